"""What may be typed. Knows no command's code, only its name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TypeAlias

from redrive import __version__

EXIT_CODES = """exit codes:
  0  done, or stopped cleanly
  1  unexpected: a defect in redrive or in your code
  2  bad usage or configuration; the message names the key, the file and the fix
  3  a broker or a store went away
  4  the worker must be replaced: too many handler threads hang beyond their limit
  5  the letter does not exist, or its state forbids the move
"""
_ABOUT = "The dead letter office for every broker."
_VERBS = {
    "replay": "send it back to where it came from, and wait until the broker has it",
    "resolve": "say that it was mended by hand",
    "discard": "say that it need not be sent again",
    "restore": "put it back to pending, from whatever end it had",
    "purge": "delete it for good",
}
_Plain = argparse.RawDescriptionHelpFormatter
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    given = list(argv)
    # `redrive letters --state pending` is short for `redrive letters list --state pending`.
    if given[:1] == ["letters"] and (len(given) == 1 or (given[1][0:1] == "-" and given[1] not in ("-h", "--help"))):
        given.insert(1, "list")
    return build().parse_args(given)


def build() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "redrive", description=_ABOUT, epilog=EXIT_CODES, formatter_class=_Plain, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"redrive {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _work(commands)
    _serve(commands)
    _letters(commands)
    stats = _command(commands, "stats", "count letters by state, source, error and handler", "office:stats")
    _config(stats)
    _json(stats)
    _check(commands)
    _command(commands, "keygen", "print a new signing key", "tools:keygen")
    demo = _command(commands, "demo", "run the whole product on its embedded default", "tools:demo")
    demo.add_argument("--check", action="store_true", help="play the story alone, count every message, and end")
    demo.add_argument("--port", type=_port, help="where the API listens")
    return parser


def _work(commands: Commands) -> None:
    work = _command(commands, "work", "run the consumers of an app", "run:work")
    work.add_argument("app", metavar="MODULE:APP", help="where the app is, e.g. orders:app")
    _config(work)


def _serve(commands: Commands) -> None:
    serve = _command(commands, "serve", "run the office: collector, replayer and API", "run:serve")
    _config(serve)
    serve.add_argument("--host", help="where to listen; only this machine's own addresses (default: 127.0.0.1)")
    serve.add_argument("--port", type=_port, help="0 for any that is free (default: 8400)")
    serve.add_argument("--app", metavar="MODULE:APP", help="take settings and sources from this app")


def _letters(commands: Commands) -> None:
    letters = _parser(commands, "letters", "look at letters and act on them", "Without a command, letters are listed.")
    verbs = letters.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listed = _command(verbs, "list", "list letters, newest first", "office:list_letters")
    _config(listed)
    _filters(listed)
    _json(listed)
    show = _command(verbs, "show", "everything about one letter", "office:show")
    show.add_argument("id")
    _config(show)
    _json(show)
    for verb, meaning in _VERBS.items():
        one = _command(verbs, verb, meaning, f"office:{verb}")
        one.add_argument("id")
        one.add_argument("--why", default="", help="the reason, for the audit trail")
        one.add_argument("--who", help="who does it, for the audit trail (default: your user name)")
        _config(one)
        _json(one)


def _filters(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--state", action="append", help="pending, replaying, resolved, discarded, quarantined or held; repeatable")
    add("--source", help="of this source; * stands for anything")
    add("--group", help="of this consumer group")
    add("--kind", help="transient, permanent, critical, unreadable, crash or timeout")
    add("--error-type", help="with this type of error")
    add("--handler", help="failed in this handler")
    add("--message-type", help="of this type of message")
    add("--attribute", action="append", metavar="NAME:VALUE", help="with this attribute; repeatable")
    add("--text", help="with these words in their error or attributes")
    add("--since", metavar="TIME", help="filed then or later: 2026-01-31T12:00:00Z, or milliseconds since the epoch")
    add("--until", metavar="TIME", help="filed before then")
    add("--limit", type=_limit, default=50, help="how many at most, up to 500 (default: 50)")
    add("--cursor", help="go on where the list before ended")


def _check(commands: Commands) -> None:
    config = _parser(commands, "config", "check the configuration")
    verbs = config.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check = _command(verbs, "check", "read the whole configuration and say what it comes to", "tools:check")
    _config(check)


def _command(commands: Commands, name: str, meaning: str, runs: str) -> argparse.ArgumentParser:
    parser = _parser(commands, name, meaning)
    parser.set_defaults(command=runs)
    return parser


def _parser(commands: Commands, name: str, meaning: str, more: str = "") -> argparse.ArgumentParser:
    sentence = f"{meaning[0].upper()}{meaning[1:]}. {more}".strip()
    return commands.add_parser(
        name, help=meaning, description=sentence, epilog=EXIT_CODES, formatter_class=_Plain, allow_abbrev=False
    )


def _config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", help="default: $REDRIVE_CONFIG, else ./redrive.toml if there is one"
    )
    parser.add_argument("--profile", help="lay this profile of the file over it (default: $REDRIVE_PROFILE)")


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")


def _port(text: str) -> int:
    return _between(text, 0, 65535)


def _limit(text: str) -> int:
    return _between(text, 1, 500)


def _between(text: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdecimal() or not low <= int(text[:9]) <= high:
        raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high}")
    return int(text)
