"""One process of the system under test. `python -m chaos.service ROLE FOLDER`, with REDRIVE_FAULTS as in production."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from chaos import mutants
from chaos.history import Ledger, Witness
from chaos.plan import ATTEMPTS, CONCURRENCY, GROUP, ID, MAX_REPLAYS, UP, Place, Source, sha_of
from redrive import Message, faults, office, replayer
from redrive.app import Redrive

BUSY_MILLIS = 200
SLOW_SECONDS = 0.1
NO_BREAKER = {"failures": 10_000, "window": 10_000, "dead_window": 1_000_000}
"""A plan in which most messages fail would look like an outage."""


class Hiccup(Exception):
    """Gone by the next run, or the one after."""


class Bug(Exception):
    """The handler's own, until it is mended."""


def main() -> None:
    role, place = sys.argv[1], Place(Path(sys.argv[2]))
    threading.Thread(target=_follow_parent, daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _witness(place)
    _hurry()
    mutants.plant(os.environ.get(mutants.VARIABLE, ""))
    asyncio.run(_run(role, place))


async def _run(role: str, place: Place) -> None:
    app = _worker_app(place) if role == "worker" else place.app()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _say_what_runs)
    async with app:
        await _make_impatient(app)
        Witness(place.passes).note(UP)
        await ROLES[role](app, stopping)


def _say_what_runs() -> None:
    """Into the log, for a process that hangs."""
    for task in asyncio.all_tasks():
        task.print_stack(limit=6)


async def _work(app: Redrive, stopping: asyncio.Event) -> None:
    working, waiting = asyncio.create_task(app.work()), asyncio.create_task(stopping.wait())
    await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    while not working.done():
        app.stop()
        await asyncio.wait([working], timeout=0.1)
    await working


async def _office(app: Redrive, stopping: asyncio.Event) -> None:
    await _together([app.collector(), app.replayer()], stopping, app.office.drain_spool())


async def _collector(app: Redrive, stopping: asyncio.Event) -> None:
    await _together([app.collector()], stopping)


async def _replayer(app: Redrive, stopping: asyncio.Event) -> None:
    await _together([app.replayer()], stopping)


async def _together(parts: list[Any], stopping: asyncio.Event, *beside: Any) -> None:
    """As `redrive serve` does: the first part that fails stops the others, and the process."""
    tasks = [asyncio.create_task(part.run()) for part in parts]
    side = [asyncio.create_task(one) for one in (*beside, stopping.wait())]
    await asyncio.wait([*tasks, *side], return_when=asyncio.FIRST_COMPLETED)
    for part in parts:
        part.stop()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for task in side:
        task.cancel()
    results += await asyncio.gather(*side, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


ROLES: dict[str, Callable[[Redrive, asyncio.Event], Awaitable[None]]] = {
    "worker": _work, "office": _office, "collector": _collector, "replayer": _replayer,
}  # fmt: skip


def _worker_app(place: Place) -> Redrive:
    app, ledger = place.app(), Ledger(place.ledger)
    for source in place.read_plan().sources:
        _consume(app, source, place, ledger)
    return app


def _consume(app: Redrive, source: Source, place: Place, ledger: Ledger) -> None:
    @app.consumer(
        source.name, group=GROUP, name=source.name, attempts=ATTEMPTS, backoff=0.03,
        concurrency=CONCURRENCY, transient=[Hiccup], permanent=[Bug], max_replays=MAX_REPLAYS, breaker=NO_BREAKER,
        **source.settings,
    )  # fmt: skip
    async def handle(body: dict[str, Any], message: Message) -> None:
        name = (message.header(ID) or b"").decode()
        with ledger.run(name, sha_of(message.key, message.body, message.headers)) as run:
            await asyncio.sleep(SLOW_SECONDS if body["kind"] == "slow" else 0.001)
            _behave(body, run, place.mended.exists())


def _behave(body: dict[str, Any], run: int, mended: bool) -> None:
    match body["kind"]:
        case "doomed":
            raise Hiccup("for ever")
        case "flaky" if run <= body["fails"]:
            raise Hiccup("once or twice")
        case "permanent":
            raise Bug("this can never work")
        case "broken" | "huge" if not mended:
            raise Bug("not mended yet")


def _witness(place: Place) -> None:
    """Write down every pass before the fault acts; a kill leaves no other trace of where it happened."""
    act, pen = faults.point, Witness(place.passes)

    def point(name: str) -> None:
        pen.note(name)
        act(name)

    faults.point = point


def _hurry() -> None:
    """Leases and pauses that fit a run of seconds."""
    replayer.LEASE_SECONDS, replayer.IDLE_SECONDS = 1.0, 0.1
    office.DRAIN_SECONDS = 0.2


async def _make_impatient(app: Redrive) -> None:
    """A locked store counts as down after a moment, not after the half minute of production."""
    file: Any = getattr(app.parts.store, "_file", None)
    for database in (file._writer, file._reader):
        await database.read(lambda c: c.execute(f"PRAGMA busy_timeout = {BUSY_MILLIS}").fetchall())


def _follow_parent() -> None:
    """The lab holds the other end of standard input, and the kernel closes it however the lab ends."""
    with suppress(OSError):
        while os.read(0, 1024):
            pass
    os._exit(1)


if __name__ == "__main__":
    main()
