"""The story without a person: orders flow, a worker is killed, things are mended and sent back, and then we count."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from redrive.app import Redrive
from redrive.config import load
from redrive.demo.audit import STORY_KINDS, Verdict, audit, complaints, table
from redrive.demo.children import Child, Children
from redrive.demo.front import Front, free_port
from redrive.demo.ledger import unfinished
from redrive.demo.place import Place
from redrive.demo.stage import Stage, Stopwatch, deadline, on_signals
from redrive.errors import RedriveError
from redrive.letter import Kind, State
from redrive.query import Filter
from redrive.runtime.engine import cancel_all

MESSAGES = 300
BURST = 20
BURST_SECONDS = 0.25
KILL_AFTER = 100
BACK_AFTER = 20
STORY_SECONDS = 45.0
HARD_SECONDS = 55.0
"""What lies between the two is for stopping and counting."""


class StoryFailed(RedriveError):
    """The story took a turn that proves nothing."""


class Check:
    """Plays the story once. What it learns on the way is kept for the count, however far it came."""

    def __init__(self, stage: Stage, front: Front) -> None:
        self._stage, self._front = stage, front
        self._replayed: list[str] = []
        self._killed: list[int] = []

    async def play(self) -> None:
        stage, children = self._stage, self._stage.children
        stage.say("an office and two workers start; the payment provider is down")
        stage.place.outage.touch()
        children.start_office(self._front.port)
        children.start_worker()
        second = children.start_worker()
        await stage.until("the office to open", self._front.is_open)
        stage.say(f"the office is open at {self._front.url}")
        together = [asyncio.create_task(part) for part in (self._produce(), self._trouble(second))]
        try:
            await asyncio.gather(*together)
        finally:
            await cancel_all(together)
        await self._calm_down()
        await self._send_back()

    async def count(self) -> Verdict:
        """Hold what the producer sent against the ledger and the letters."""
        stage = self._stage
        under_way = await stage.unsettled()
        stage.ledger.refresh()
        letters = await stage.letters()
        return audit(stage.produced, stage.ledger.entries, letters, self._replayed, self._killed, under_way)

    async def _produce(self) -> None:
        while len(self._stage.produced) < MESSAGES:
            await self._stage.produce(BURST)
            await asyncio.sleep(BURST_SECONDS)
        self._stage.say(f"{MESSAGES} messages are produced")

    async def _trouble(self, worker: Child) -> None:
        """While messages come in: kill workers until one dies in the middle of its work, then end the outage."""
        while not await self._crash(worker):
            worker = self._stage.children.start_worker()
        self._stage.say(f"{self._stage.children.start_worker().name} takes over")
        await self._end_outage()

    async def _crash(self, worker: Child) -> int:
        """Kill it while handlers run, and say how many were cut short: none, if they were quicker."""
        stage = self._stage

        async def in_the_middle() -> bool:
            stage.ledger.refresh()
            return len(stage.produced) >= KILL_AFTER and bool(unfinished(stage.ledger.entries, worker.pid))

        await stage.until(f"{worker.name} to be in the middle of its work", in_the_middle)
        stage.children.kill(worker)
        self._killed.append(worker.pid)
        stage.ledger.refresh()
        cut = len(unfinished(stage.ledger.entries, worker.pid))
        stage.say(f"{worker.name} is killed with SIGKILL, {cut} handler(s) cut short")
        return cut

    async def _end_outage(self) -> None:
        """Let it last until breakers have opened; they keep it from turning payments into letters."""
        stage = self._stage

        async def long_enough() -> bool:
            stage.ledger.refresh()
            refused = sum(entry.outcome == "ConnectionError" for entry in stage.ledger.entries)
            return refused >= BACK_AFTER and len(stage.produced) >= MESSAGES // 2

        await stage.until(f"{BACK_AFTER} payments to fail in the outage", long_enough)
        stage.place.outage.unlink()
        stage.say("the payment provider is back")

    async def _calm_down(self) -> None:
        """Wait until the broker has nothing left to deliver: what is neither handled nor a letter then is lost."""
        stage = self._stage
        await stage.until("every message to be handled or filed", self._nothing_is_under_way)
        lost = (await self.count()).lost
        if lost:
            raise StoryFailed(f"nothing is under way any more, and {len(lost)} message(s) went nowhere")
        dead = (await stage.app.desk().statistics()).by_kind
        unseen = [kind for kind in STORY_KINDS if not dead.get(kind)]
        if unseen:
            raise StoryFailed(f"nothing died of {', '.join(unseen)}, so nothing is proven about it")
        kinds = ", ".join(f"{dead[kind]} {kind}" for kind in STORY_KINDS)
        stage.say(f"everything is handled or filed; {sum(dead.values())} letters: {kinds}")

    async def _nothing_is_under_way(self) -> bool:
        return await self._stage.unsettled() == 0

    async def _send_back(self) -> None:
        """Deploy the fix, send back all that can be read, and wait for what becomes of it."""
        stage = self._stage
        stage.place.release_2.touch()
        pending = [row async for row in stage.summaries(Filter(states=(State.PENDING,)))]
        wanted = [row.id for row in pending if row.kind is not Kind.UNREADABLE]
        stage.say(f"release 2 is deployed; {len(wanted)} letters go back through the API")
        await self._front.replay(wanted, "release 2 mends it")
        self._replayed += wanted

        async def resolved() -> bool:
            rows = {row.id async for row in stage.summaries(Filter(states=(State.RESOLVED,)))}
            return rows >= set(wanted) and await self._nothing_is_under_way()

        await stage.until("every letter sent back to be resolved", resolved)
        stage.say("every letter sent back is resolved")


async def check(port: int | None) -> int:
    """Play and count in a folder of its own: 0 when every message is accounted for, else 1."""
    place = Place(Path(tempfile.mkdtemp(prefix="redrive-demo-")))
    front, watch = Front(port or free_port()), Stopwatch()
    place.furnish(front.port)
    async with Redrive(settings=load(place.config, env={})) as app:
        with Children(place) as children, deadline(HARD_SECONDS):
            stage = Stage(app, place, children, watch.say)
            story = Check(stage, front)
            failure, unclean = await _failure_of(story, stage), children.stop()
            failure = failure or _bad_ends(unclean)
            verdict = await story.count()
    return _report(place, watch, verdict, failure)


async def _failure_of(story: Check, stage: Stage) -> str | None:
    """Why the story did not reach its end; None when it did."""
    playing = asyncio.create_task(story.play())
    with on_signals(playing.cancel):
        await asyncio.wait({playing}, timeout=STORY_SECONDS)
        late = not playing.done()
        await cancel_all([playing])
    if late:
        return f"out of time after {STORY_SECONDS:g} s, waiting for {stage.waiting_for or 'the producer'}"
    if playing.cancelled():
        return "it was interrupted"
    error = playing.exception()
    if error is None or isinstance(error, RedriveError | OSError):
        return None if error is None else str(error)
    raise error


def _bad_ends(children: list[Child]) -> str | None:
    ends = [f"{child.name} did not stop cleanly; the end of its log:\n{child.tail}" for child in children]
    return "\n".join(ends) or None


def _report(place: Place, watch: Stopwatch, verdict: Verdict, failure: str | None) -> int:
    if verdict.produced:
        print(f"\n{table(verdict)}\n")
    wrong = [*([f"the story did not reach its end: {failure}"] if failure else []), *complaints(verdict)]
    for line in wrong:
        print(f"✗ {line}")
    if wrong:
        print(f"✗ the check failed; its files are kept in {place.home}")
        return 1
    shutil.rmtree(place.home)
    print(f"✓ every message is accounted for, in {watch.seconds:.1f} s")
    return 0
