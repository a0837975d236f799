"""P4: a thousand letters in one replay, and replayers that die in the middle of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from chaos.check import Verdict, judge
from chaos.history import HANDLED, OFFICE, History, Sent
from chaos.plan import GROUP, ID, Fault, Place, Plan, Source, sha_of
from chaos.run import ANN, LOOK_SECONDS, QUIET_LOOKS, RUN_SECONDS, Lab, by_start, folder
from chaos.supervisor import Supervisor
from redrive.letter import Kind, Letter, Reason, identity
from redrive.message import Message

LETTERS = 1000
BULK = Source("bulk", "broker", "delayed")


class Replayed(Struct, frozen=True):
    """What came of one job. `kills` interrupted a replayer; every copy in the topic was counted."""

    verdict: Verdict
    unreached: tuple[str, ...]
    published: int
    handled: int
    kills: int
    seconds: float
    history: History

    @property
    def ok(self) -> bool:
        return self.verdict.ok and not self.unreached


def play(window: int, faults: Sequence[Fault] = (), *, replayers: int = 1, jobs: int = 1) -> Replayed:
    """File a thousand letters, send them back, and count. Two jobs over the same letters are a double click."""
    with folder() as home:
        return asyncio.run(_play(Place(home), window, faults, replayers, jobs))


async def _play(place: Place, window: int, faults: Sequence[Fault], replayers: int, jobs: int) -> Replayed:
    began = time.monotonic()
    place.furnish(Plan(0, (BULK,), batch=100, window=window))
    place.mended.touch()
    async with place.app() as app, Supervisor(place) as system:
        lab = Lab(app, place, place.read_plan())
        await lab.ensure()
        letters = [_letter(number) for number in range(LETTERS)]
        await lab.store.letters.file(letters, app.clock.now())
        await asyncio.gather(*(app.desk().replay([one.id for one in letters], ANN) for _ in range(jobs)))
        system.start("collector", "collector")
        system.start("worker-1", "worker")
        system.start("replayer-1", "replayer", by_start(faults, OFFICE))
        if replayers > 1 and faults:
            await _until_reached(system)
        for number in range(1, replayers):
            system.start(f"replayer-{number + 1}", "replayer")
        left = await _drain(lab)
        unreached = tuple(system.unreached())
        await system.stop()
        history = await lab.history([_sent(one) for one in letters], system, left)
    return Replayed(
        judge(history), unreached, len(history.copies), sum(run.outcome == HANDLED for run in history.runs),
        history.interruptions.get(OFFICE, 0), time.monotonic() - began, history,
    )  # fmt: skip


async def _until_reached(system: Supervisor) -> None:
    """The first replayer must be in trouble before there is a second, which might do all the work instead."""
    deadline = time.monotonic() + RUN_SECONDS
    while system.unreached() and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_SECONDS)


async def _drain(lab: Lab) -> dict[str, int]:
    deadline, looks, left = time.monotonic() + RUN_SECONDS, 0, {"nothing was looked at": 1}
    while looks < QUIET_LOOKS and time.monotonic() < deadline:
        left = await lab.unsettled()
        looks = 0 if left else looks + 1
        await asyncio.sleep(LOOK_SECONDS)
    return left


def _letter(number: int) -> Letter:
    """As its runtime would have filed it."""
    name, body = f"bulk-{number}", msgspec.json.encode({"kind": "broken", "fails": 0, "number": number})
    message = Message("embedded", BULK.name, 0, str(number), 1, f"k{number}".encode(), body, ((ID, name.encode()),))
    return Letter(
        identity(message, GROUP), message, GROUP, Kind.PERMANENT, Reason.PERMANENT, "Bug", "not mended yet", 1, 1, 1
    )


def _sent(letter: Letter) -> Sent:
    message: Any = letter.message
    sha = sha_of(message.key, message.body, message.headers)
    return Sent(message.header(ID).decode(), message.source, message.key, sha, mortal=True)
