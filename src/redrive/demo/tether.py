"""Runs a redrive command that cannot outlive the demo that started it. `python -m redrive.demo.tether work …`"""

from __future__ import annotations

import os
import sys
import threading


def main() -> int:
    threading.Thread(target=_follow_parent, daemon=True).start()
    from redrive.cli import main as redrive

    return redrive()


def _follow_parent() -> None:
    """The parent holds the other end of standard input, and the kernel closes it however the parent ends."""
    while os.read(0, 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
