"""`python -m redrive.cli`, where the script is not on the path."""

import sys

from redrive.cli import main

sys.exit(main())
