"""The `redrive` command. What is heavy is imported by the command that needs it, so that `--help` answers at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper

from redrive import errors
from redrive.cli.parser import parse
from redrive.cli.text import lines

DONE, UNEXPECTED, USAGE, UNAVAILABLE, REPLACE, REFUSED, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130

_CODES: dict[type[Exception], int] = {
    errors.ConfigError: USAGE,
    errors.BadRequest: USAGE,
    errors.BrokerUnavailable: UNAVAILABLE,
    errors.StoreUnavailable: UNAVAILABLE,
    errors.BlobsUnavailable: UNAVAILABLE,
    errors.AttemptsUnavailable: UNAVAILABLE,
    errors.SpoolFailed: UNAVAILABLE,
    errors.SchemaMismatch: UNAVAILABLE,
    errors.LetterNotFound: REFUSED,
    errors.StateConflict: REFUSED,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and say how it went."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    args = parse(sys.argv[1:] if argv is None else argv)
    module, _, function = args.command.partition(":")
    try:
        code: int = getattr(import_module(f"redrive.cli.{module}"), function)(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has seen enough, and Python must not try to flush the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the end of the line for every error
        complain(error)
        return code_of(error)
    return code


def code_of(error: Exception) -> int:
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), UNEXPECTED)


def complain(error: Exception) -> None:
    """One sentence for what we know by name, everything for what nobody expected."""
    if isinstance(error, errors.RedriveError):
        text = f"redrive: {error}"
    else:
        import traceback

        text = "".join(traceback.format_exception(error)).rstrip()
    print(lines(text), file=sys.stderr, flush=True)
