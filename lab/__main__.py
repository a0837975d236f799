"""For people: python -m lab up redis kafka, python -m lab status, python -m lab down."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lab.errors import LabError
from lab.servers import SERVERS
from lab.session import UP, Session, sweep


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab", description="Start and stop the lab's real servers.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="start servers and print the lines that point tests at them")
    up.add_argument("names", nargs="+", choices=sorted(SERVERS))
    verbs.add_parser("status", help="say what is up")
    verbs.add_parser("down", help="stop them and forget their data")
    given = parser.parse_args(words)
    session = Session(UP)
    try:
        return run(session, given.verb, getattr(given, "names", []))
    except LabError as error:
        print(error, file=sys.stderr)
        return 1


def run(session: Session, verb: str, names: list[str]) -> int:
    match verb:
        case "up":
            for server in session.need_all(names):
                print(f"export REDRIVE_LAB_{server.name.upper()}={server.url}")
        case "status":
            for server in session.running():
                print(f"{server.name}\t{server.url}")
        case "down":
            session.close()
            sweep()
    return 0


if __name__ == "__main__":
    sys.exit(main())
