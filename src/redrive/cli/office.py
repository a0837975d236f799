"""The commands that look at letters and act on them, directly on the configured store."""

from __future__ import annotations

import asyncio
import getpass
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from redrive import cli, query
from redrive.app import Redrive
from redrive.cli.settings import app_of, where
from redrive.cli.text import age, as_json, indented, pairs, plural, safe, table
from redrive.clock import iso
from redrive.desk import Desk, Job, LetterView, Page, Statistics, Summary
from redrive.errors import BadParameter, BadRequest, ConfigError
from redrive.letter import Act
from redrive.query import Filter
from redrive.views import Bytes

BODY_LINES = 200


@asynccontextmanager
async def at_desk(app: Redrive) -> AsyncIterator[Desk]:
    """The desk with nothing open but the store: letters can be read while the broker is down."""
    desk, store = app.desk(), app.parts.store
    assert store is not None
    await app.parts.open_store()
    try:
        yield desk
    finally:
        await store.close()


def _ask(args: Namespace, question: Callable[[Redrive, Desk], Awaitable[Any]]) -> Any:
    app = app_of(args)

    async def ask() -> Any:
        async with at_desk(app) as desk:
            return await question(app, desk)

    try:
        return asyncio.run(ask())
    except ConfigError as error:
        raise error.at(where(args)) from None


# ---- looking


def list_letters(args: Namespace) -> int:
    wanted = _filter(args)

    async def page(app: Redrive, desk: Desk) -> tuple[Page, int]:
        try:
            return await desk.page(wanted, args.limit, args.cursor), app.clock.now()
        except BadRequest as error:
            raise BadParameter("--cursor", error.problem) from error

    found, now = _ask(args, page)
    _say(as_json(found) if args.json else "\n".join(_listed(found, now)))
    return cli.DONE


def show(args: Namespace) -> int:
    letter = _ask(args, lambda app, desk: desk.read(args.id))
    _say(as_json(letter) if args.json else "\n".join(_shown(letter)))
    return cli.DONE


def stats(args: Namespace) -> int:
    found = _ask(args, lambda app, desk: desk.statistics())
    _say(as_json(found) if args.json else "\n".join(_counted(found)))
    return cli.DONE


def _filter(args: Namespace) -> Filter:
    asked: list[tuple[str, str]] = []
    for name in query.NAMES:
        given = getattr(args, name)
        asked += [(name, one) for one in (given if isinstance(given, list) else [given]) if one is not None]
    try:
        return query.parse(asked)
    except BadParameter as error:
        flag = f"--{error.parameter.replace('_', '-')}"
        raise BadParameter(flag, error.problem.removeprefix(f"{error.parameter}: ")) from error


def _listed(page: Page, now: int) -> Iterable[str]:
    if not page.rows:
        yield "no letters"
        return
    head = ("ID", "STATE", "SOURCE", "GROUP", "AGE", "RUNS", "ERROR")
    yield from table(head, [_line(row, now) for row in page.rows], right=(4, 5))
    yield ""
    yield plural(len(page.rows), "letter") + (f"; more with --cursor {safe(page.next)}" if page.next else "")


def _line(row: Summary, now: int) -> tuple[object, ...]:
    error = f"{row.error_type.rpartition('.')[2]}: {row.error_message}"
    return (row.id, row.state, row.source, row.group, age(now - row.filed_at), row.attempts, error)


def _shown(letter: LetterView) -> Iterable[str]:
    yield from pairs((name, value) for name, value in _facts(letter) if value)
    yield from _section("body", _bytes(letter.body))
    yield from _section("history", "\n".join(_history(letter)))
    if len(letter.occurrences) > 1:
        deaths = (f"{iso(one.filed_at)}  {one.error_type}: {one.error_message}" for one in letter.occurrences)
        yield from _section("deaths", "\n".join(map(safe, deaths)))
    notes = (f"{iso(one.at)}  {one.note}" for one in letter.recorded)
    yield from _section("recorded", "\n".join(map(safe, notes)))
    yield from _section("stack", letter.stack.rstrip())


def _facts(letter: LetterView) -> Iterable[tuple[str, object]]:
    yield "letter", safe(letter.id)
    yield "state", letter.state
    yield "source", f"{safe(letter.source)}, partition {letter.partition}, position {safe(letter.position)}"
    yield "group", f"{safe(letter.group)}, handler {safe(letter.handler)}"
    yield "reason", f"{letter.reason}, {letter.kind}" + (f": {safe(letter.detail)}" if letter.detail else "")
    yield "error", f"{letter.error_type}: {letter.error_message}"
    yield "attempts", f"{letter.attempts}, first {letter.first_attempt_at}, last {letter.last_attempt_at}"
    yield "filed", letter.filed_at
    yield "replays", f"{letter.hop} of at most {letter.max_replays}"
    yield "message", f"{safe(letter.message_id)} {safe(letter.message_type)}".strip()
    yield "attributes", "\n".join(f"{safe(name)}={safe(value)}" for name, value in letter.attributes.items())
    yield "key", "" if letter.key is None else safe(_content(letter.key))
    yield "headers", "\n".join(f"{safe(h.name)}: {safe(_content(h.value))}" for h in letter.headers)
    yield "marks", safe(", ".join(letter.marks))
    yield "trust", "" if letter.verified else "not signed by redrive: its headers are only claims"


def _section(name: str, text: str) -> Iterable[str]:
    if text:
        yield ""
        yield name
        yield indented(text)


def _content(value: Bytes | None) -> str:
    if value is None:
        return "null"
    return value.text if value.text is not None else f"base64 {value.base64}"


def _bytes(value: Bytes | None) -> str:
    if value is None:
        return "null"
    facts = [plural(value.size, "byte"), *(["masked"] if value.masked else [])]
    text = _content(value).split("\n")
    more = value.cut or len(text) > BODY_LINES
    return "\n".join([*text[:BODY_LINES], f"({', '.join([*facts, *(['cut'] if more else [])])})"])


def _history(letter: LetterView) -> Iterable[str]:
    for run in letter.history:
        waited = f", then waited {run.delay / 1000:g} s" if run.delay is not None else ""
        yield safe(f"{run.number}  {iso(run.at)}  {run.error_type}: {run.message}{waited}")


def _counted(found: Statistics) -> Iterable[str]:
    yield plural(found.total, "letter")
    if found.oldest is not None and found.newest is not None:
        yield f"filed from {iso(found.oldest)} to {iso(found.newest)}"
    counts = {"STATE": found.by_state, "KIND": found.by_kind, "SOURCE": found.by_source, "ERROR": found.by_error_type}
    for name, by in counts.items():
        if by:
            yield ""
            most = sorted(by.items(), key=lambda pair: (-pair[1], pair[0]))
            yield from table(("LETTERS", name), [(count, what) for what, count in most], right=(0,))
    if found.by_handler:
        yield ""
        rows = [(one.handled, one.failed, f"{one.rate:.1%}", name) for name, one in sorted(found.by_handler.items())]
        yield from table(("HANDLED", "FAILED", "RATE", "HANDLER"), rows, right=(0, 1, 2))


# ---- acting


def replay(args: Namespace) -> int:
    app = app_of(args)

    async def send() -> tuple[Job, str]:
        async with app.opened():
            desk = app.desk()
            job = await desk.replay_one(args.id, _act(args))
            done = await app.replayer().finish(job.id)
            found = await desk.job(job.id)
            return done, found[1][0].why if found and found[1] else ""

    try:
        job, refused = asyncio.run(send())
    except ConfigError as error:
        raise error.at(where(args)) from None
    if args.json:
        _say(as_json(job))
    elif refused:
        _say(f"letter {safe(args.id)} was not sent: {safe(refused)}")
    else:
        _say(f"letter {safe(args.id)} was sent back and the broker has it; its consumer will say how it went")
    return cli.REFUSED if refused else cli.DONE


def resolve(args: Namespace) -> int:
    return _move(args, Desk.resolve, "is resolved")


def discard(args: Namespace) -> int:
    return _move(args, Desk.discard, "is discarded")


def restore(args: Namespace) -> int:
    return _move(args, Desk.restore, "is pending again")


def purge(args: Namespace) -> int:
    return _move(args, Desk.purge, "is deleted")


def _move(args: Namespace, deed: Callable[[Desk, str, Act], Awaitable[None]], done: str) -> int:
    _ask(args, lambda app, desk: deed(desk, args.id, _act(args)))
    _say(as_json({"id": args.id, "done": done}) if args.json else f"letter {safe(args.id)} {done}")
    return cli.DONE


def _act(args: Namespace) -> Act:
    if args.who:
        return Act(args.who, args.why)
    try:
        return Act(getpass.getuser(), args.why)
    except (OSError, KeyError):  # a container may run as a user that has no name
        return Act("cli", args.why)


def _say(text: str) -> None:
    print(text)
