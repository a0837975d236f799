"""One run: produce, break, send back, heal, wait until everything is quiet, and gather the evidence."""

from __future__ import annotations

import asyncio
import re
import shutil
import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from chaos.check import Verdict, judge
from chaos.history import OFFICE, STORE, WORKER, Found, History, Move, Published, Reader, Sent, passes
from chaos.plan import GROUP, ID, IN_FLIGHT, UP, Fault, Place, Plan, Planned, sha_of
from chaos.supervisor import Supervisor
from redrive.app import Redrive
from redrive.brokers.base import Batch, Confirmed, SourceSpec, Subscription
from redrive.codec import TICKET, bare
from redrive.collector import GROUP as COLLECTOR
from redrive.letter import Act, State, StoredLetter
from redrive.message import Message, last_header
from redrive.query import MAX_PAGE, Filter
from redrive.reports import REPORTS
from redrive.stores.base import JobState
from redrive.stores.sqlite import SqliteStore

LOOK_SECONDS = 0.05
QUIET_LOOKS = 3
RUN_SECONDS = 30.0
SOME_LETTERS = 6
START_SECONDS = 5.0
OUTAGE_SECONDS = 1.5
AUDIT_ROWS = 10_000
ANN = Act("ann", "chaos")
_MOVE = re.compile(r"(?:restore: )?(\w+) to (\w+)(?::|$)")


class Result(Struct, frozen=True):
    """What came of one run. A fault that was never reached proves nothing, so it fails the run."""

    seed: int
    faults: tuple[Fault, ...]
    verdict: Verdict
    unreached: tuple[str, ...]
    seconds: float
    history: History
    home: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict.ok and not self.unreached


@contextmanager
def folder() -> Iterator[Path]:
    """Where a run lives: in memory if possible, since processes die here and machines do not."""
    memory = Path("/dev/shm")
    home = Path(tempfile.mkdtemp(prefix="redrive-chaos-", dir=memory if memory.is_dir() else None))
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


class Lab:
    """The outside of a running system: its topics, its desk, and nothing of its processes."""

    def __init__(self, app: Redrive, place: Place, plan: Plan) -> None:
        self.app, self.place, self.plan = app, place, plan
        self._names: dict[str, str] = {}

    async def ensure(self) -> None:
        names = [name for source in self.plan.sources for name in (source.name, f"{source.name}.dlq")]
        await self.app.parts.broker.ensure([SourceSpec(name) for name in [*names, REPORTS]])

    async def produce(self, messages: Sequence[Planned]) -> None:
        for start in range(0, len(messages), 10):
            results = await self.app.parts.broker.publish([one.copy for one in messages[start : start + 10]])
            assert all(isinstance(result, Confirmed) for result in results), results

    async def letters(self, *states: State) -> list[StoredLetter]:
        found, cursor = [], None
        while True:
            page = await self.app.desk().page(Filter(states=states), MAX_PAGE, cursor)
            found += [await self.store.letters.get(row.id) for row in page.rows]
            cursor = page.next
            if cursor is None:
                return [stored for stored in found if stored is not None]

    @property
    def store(self) -> SqliteStore:
        store = self.app.parts.store
        assert isinstance(store, SqliteStore)
        return store

    async def unsettled(self) -> dict[str, int]:
        """What is still under way, by place; empty when nothing is."""
        pairs = [(source.name, GROUP) for source in self.plan.sources]
        pairs += [(f"{source.name}.dlq", COLLECTOR) for source in self.plan.sources] + [(REPORTS, COLLECTOR)]
        found = {name: (await self.app.parts.broker.depth(name, group)).count for name, group in pairs}
        counts = (await self.app.desk().statistics()).by_state
        found |= {f"letters {state}": counts.get(state, 0) for state in (State.REPLAYING, State.HELD)}
        jobs = await self.app.desk().jobs(MAX_PAGE)
        found["jobs"] = sum(job.state is JobState.RUNNING for job in jobs)
        found["spool files"] = len(list(self.place.spool.glob("*.spool")))
        return {what: number for what, number in found.items() if number}

    async def history(self, sent: list[Sent], system: Supervisor, unsettled: dict[str, int]) -> History:
        """The evidence, once the processes are gone."""
        ledger = Reader(self.place.ledger)
        ledger.refresh()
        rows = [row for row in reversed(await self.store.audit(AUDIT_ROWS)) if row.letter]
        moves = [(row.letter, _MOVE.match(row.what)) for row in rows]
        return History(
            sent=sent,
            runs=ledger.runs,
            letters=[await self._found(stored) for stored in await self.letters()],
            copies=[copy async for copy in self._copies()],
            moves=[Move(letter, move[1], move[2]) for letter, move in moves if move],
            interruptions=dict(system.interruptions),
            in_flight=max(IN_FLIGHT, 4 * self.plan.batch),
            window=self.plan.window,
            ordered=frozenset(source.name for source in self.plan.sources if source.ordered),
            unsettled=unsettled,
            defects=system.defects,
            broken_audit=await self.store.verify_audit(),
        )

    async def _found(self, stored: StoredLetter) -> Found:
        letter = stored.letter
        message, body = letter.message, letter.message.body
        if letter.claim is not None and self.app.parts.blobs is not None:
            body = await self.app.parts.blobs.get(letter.claim.name)
        return Found(
            stored.id, name_of(message), stored.state, sha_of(message.key, body, message.headers),
            letter.kind, letter.reason, stored.occurrences,
        )  # fmt: skip

    async def _copies(self) -> AsyncIterator[Published]:
        """Every replayed copy there is, read by a group of our own."""
        names = tuple(source.name for source in self.plan.sources)
        broker = self.app.parts.broker
        left = sum([(await broker.depth(name, "chaos")).count for name in names])
        stream = await broker.subscribe(Subscription(names, "chaos", batch=1000, in_flight=1_000_000))
        while left:
            event = await anext(stream)
            for delivery in event.deliveries if isinstance(event, Batch) else ():
                left -= 1
                if (ticket := last_header(delivery.message.headers, TICKET)) is not None:
                    yield published(delivery.message, msgspec.json.decode(ticket))
        await stream.aclose()


def published(message: Message, ticket: dict[str, object]) -> Published:
    """Read as a stranger would: the ticket is plain JSON, and nothing of ours helps to read it."""
    headers = bare(message.headers)
    letter, hop, key = str(ticket["letter"]), int(str(ticket.get("hop", 0))), str(ticket.get("key", ""))
    return Published(letter, name_of(message), hop, key, sha_of(message.key, message.body, headers))


def name_of(message: Message) -> str:
    return (message.header(ID) or b"").decode("utf-8", "replace")


class Storm(Lab):
    """The run of the kill matrix."""

    def __init__(self, app: Redrive, place: Place, plan: Plan, system: Supervisor) -> None:
        super().__init__(app, place, plan)
        self.system, self.messages = system, plan.messages()
        self._sent = {one.id: one.sent for one in self.messages}

    async def play(self) -> dict[str, int]:
        """Everything up to quiet; what is left when it never becomes quiet."""
        await self._until(self._all_up, START_SECONDS)
        await self.produce([one for one in self.messages if one.half == 0])
        await self._until(self._some_letters, 4.0)
        await self._send_back(await self.letters(State.PENDING))
        async with self._outage():
            await self.produce([one for one in self.messages if one.half == 1])
            await self._until(self._spooled, OUTAGE_SECONDS)
        await self._until(self._calm, RUN_SECONDS)
        self.place.mended.touch()
        return await self._drain()

    async def _drain(self) -> dict[str, int]:
        """Send back what is mended, again and again, until nothing is under way and nothing is left to send."""
        deadline, looks, left = time.monotonic() + RUN_SECONDS, 0, {"nothing was looked at": 1}
        while looks < QUIET_LOOKS and time.monotonic() < deadline:
            left = await self.unsettled()
            mended = [] if left.keys() - {"letters held"} else await self._mended()
            await self._send_back(mended)
            looks = 0 if left or mended else looks + 1
            await asyncio.sleep(LOOK_SECONDS)
        return left

    async def _mended(self) -> list[StoredLetter]:
        pending = await self.letters(State.PENDING)
        return [one for one in pending if (sent := self._sent.get(name_of(one.letter.message))) and sent.mended]

    async def _send_back(self, letters: list[StoredLetter]) -> None:
        if letters:
            await self.app.desk().replay([one.id for one in letters], ANN)

    async def _all_up(self) -> bool:
        """Both workers share the messages, so that each passes its points."""
        passed = passes(self.place.passes)
        return all(passed[child.pids[-1], UP] for child in self.system.children)

    async def _some_letters(self) -> bool:
        return (await self.app.desk().count(Filter(states=(State.PENDING,)))).count >= SOME_LETTERS

    async def _spooled(self) -> bool:
        """Long enough for what waits for it: the faults in the spool, or else any letter there."""
        first = self.system.children[0]
        if any("spool" in fault.point for faults in first.faults for fault in faults):
            return passes(self.place.passes)[first.pids[0], "office.after_spool"] > 0
        return any(self.place.spool.glob("*.spool"))

    async def _calm(self) -> bool:
        return not (await self.unsettled()).keys() - {"letters held"}

    @asynccontextmanager
    async def _outage(self) -> AsyncIterator[None]:
        """The store takes no writes: somebody rude holds its lock. A window that is open meanwhile goes out again."""
        self.system.interruptions[STORE] += 1
        rude = sqlite3.connect(self.place.letters, isolation_level=None, timeout=10.0)
        rude.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            rude.execute("ROLLBACK")
            rude.close()

    async def _until(self, come: Callable[[], Awaitable[bool]], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not await come():
            await asyncio.sleep(LOOK_SECONDS)

    @property
    def sent(self) -> list[Sent]:
        return list(self._sent.values())


def play(seed: int, faults: Sequence[Fault] = (), bug: str = "", *, keep: bool = False) -> Result:
    """One whole run in a folder of its own, which is kept on request."""
    with folder() as home:
        result = asyncio.run(_play(Place(home), Plan.of(seed), tuple(faults), bug))
        if keep and not result.ok:
            kept = Path(tempfile.mkdtemp(prefix="redrive-chaos-kept-"))
            shutil.copytree(home, kept, dirs_exist_ok=True)
            result = msgspec.structs.replace(result, home=str(kept))
        return result


async def _play(place: Place, plan: Plan, faults: tuple[Fault, ...], bug: str) -> Result:
    began = time.monotonic()
    place.furnish(plan)
    async with place.app() as app, Supervisor(place, bug) as system:
        storm = Storm(app, place, plan, system)
        await storm.ensure()
        system.start("worker-1", "worker", by_start(faults, WORKER))
        system.start("office", "office", by_start(faults, OFFICE))
        system.start("worker-2", "worker")
        left = await storm.play()
        unreached = tuple(system.unreached())
        await system.stop()
        history = await storm.history(storm.sent, system, left)
    return Result(plan.seed, faults, judge(history), unreached, time.monotonic() - began, history)


def by_start(faults: Sequence[Fault], role: str) -> list[list[Fault]]:
    """The faults of the first process in this role, of the one started after it, and so on."""
    mine = [fault for fault in faults if fault.role == role]
    starts = max((fault.start + 1 for fault in mine), default=0)
    return [[fault for fault in mine if fault.start == number] for number in range(starts)]
