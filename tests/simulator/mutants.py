"""Bugs planted on purpose. A harness that stays green with one of them has a hole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from redrive import codec, office
from redrive.collector import Collector
from redrive.errors import BrokerUnavailable, FilingFailed
from redrive.letter import Letter, Outcome, State, StoredLetter
from redrive.runtime.settler import Settler
from redrive.stores.base import Job
from redrive.tracker import Tracker
from simulator import broker, store
from simulator.broker import SimBroker
from simulator.check import Anomaly
from simulator.history import History, play
from simulator.store import Counts, JobRow, Office, Row, SimAttempts, SimSpool
from simulator.world import Process


class Mutant(Struct, frozen=True):
    """A planted bug, and the anomalies that give it away."""

    name: str
    signs: frozenset[str]
    plant: Callable[[pytest.MonkeyPatch], type[History]]


MUTANTS: list[Mutant] = []


def mutant(name: str, *signs: str) -> Callable[[Callable[[pytest.MonkeyPatch], Any]], None]:
    def add(plant: Callable[[pytest.MonkeyPatch], Any]) -> None:
        MUTANTS.append(Mutant(name, frozenset(signs), lambda patch: plant(patch) or History))

    return add


def with_office(kind: type[Office]) -> type[History]:
    return type("Mutated", (History,), {"office_type": kind})


@mutant("settle before filing", "lost")
def _(patch: pytest.MonkeyPatch) -> None:
    filing = Settler._file_directly

    async def later(self: Settler, batch: list[Any]) -> list[Any]:
        self.spawn(filing(self, batch))
        return batch

    patch.setattr(Settler, "_file_directly", later)


@mutant("commit before the copy is out", "lost")
def _(patch: pytest.MonkeyPatch) -> type[History]:
    class Hasty(SimBroker):
        async def _settle_log(self, settlements: Sequence[Any]) -> Any:
            lanes = {}
            for lease in (one.delivery.token for one in settlements):
                if lease.generation == lease.lane.generation:
                    lease.lane.tracker.settle(lease.offset, lease.lane.tracker.generation)
                    lanes[lease.lane] = lease.generation
            await self._commit(lanes)
            return await super()._settle_log(settlements)

    return type("Mutated", (History,), {"broker_type": Hasty})


@mutant("no identity check", "duplicate letter")
def _(patch: pytest.MonkeyPatch) -> type[History]:
    class Forgetful(Office):
        def known(self, letter: Letter) -> Row | None:
            return None

    return with_office(Forgetful)


@mutant("replay without a window", "replay", "idempotency key")
def _(patch: pytest.MonkeyPatch) -> type[History]:
    class Windowless(Office):
        def advance(self, job_id: str, owner: str) -> list[StoredLetter]:
            row = self._owned(job_id, owner)
            row.job = replace(row.job, window_start=0, window_end=0)
            rest = [self.letters[one] for one in row.items if one in self.letters]
            sent = [one for one in rest if one.state is State.PENDING or one.job == job_id]
            for one in sent:
                self.claim(one, job_id)
            row.job = replace(row.job, window_end=row.job.total)
            return [one.stored() for one in sent]

    return with_office(Windowless)


@mutant("publish before the window is durable", "replay", "idempotency key", "stuck", "falsely resolved")
def _(patch: pytest.MonkeyPatch) -> type[History]:
    class Late(Office):
        def open_window(self, row: JobRow) -> None:
            self.peeked = row.job.id
            super().open_window(row)

        def advance(self, job_id: str, owner: str) -> list[StoredLetter]:
            before = self.jobs[job_id].job, dict(self.jobs[job_id].refused)
            held = {one.id: (one.state, one.hop, one.job) for one in self.letters.values()}
            letters = super().advance(job_id, owner)
            self.jobs[job_id].job, self.jobs[job_id].refused = before
            for one in self.letters.values():
                one.state, one.hop, one.job = held[one.id]
            return letters

        def close(self, job_id: str, owner: str, refused: Sequence[Any], now: int) -> Job:
            super().advance(job_id, owner)
            return super().close(job_id, owner, refused, now)

    return with_office(Late)


@mutant("window forgotten in a crash", "stuck", "falsely resolved", "replay", "idempotency key")
def _(patch: pytest.MonkeyPatch) -> type[History]:
    class Amnesiac(Office):
        def lease(self, owner: str, until: int, now: int) -> Job | None:
            owners = {one.job.id: one.job.owner for one in self.jobs.values()}
            job = super().lease(owner, until, now)
            if job is not None and owners[job.id] not in ("", owner):
                row = self.jobs[job.id]
                job = row.job = replace(row.job, window_end=row.job.window_start)
            return job

    return with_office(Amnesiac)


@mutant("watermark by highest offset", "lost", "falsely resolved")
def _(patch: pytest.MonkeyPatch) -> None:
    class Highest(Tracker):
        __slots__ = ("highest",)

        def settle(self, offset: int, generation: int) -> bool:
            settled = super().settle(offset, generation)
            self.highest = max(getattr(self, "highest", 0), offset + 1)
            return settled

        @property
        def watermark(self) -> int:
            return max(getattr(self, "highest", 0), super().watermark)

    patch.setattr(broker, "Tracker", Highest)


@mutant("attempts in memory only", "over-retried")
def _(patch: pytest.MonkeyPatch) -> type[History]:
    class Forgetful(SimAttempts):
        def __init__(self, counts: Counts, process: Process) -> None:
            super().__init__(Counts(spans=counts.spans), process)

    return type("Mutated", (History,), {"attempts_type": Forgetful})


@mutant("swallowed filing error", "lost")
def _(patch: pytest.MonkeyPatch) -> None:
    filing = office.Office.file

    async def swallow(self: office.Office, letters: Sequence[Letter], **options: Any) -> None:
        with suppress(FilingFailed):
            await filing(self, letters, **options)

    patch.setattr(office.Office, "file", swallow)


@mutant("outcome without hop", "falsely resolved")
def _(patch: pytest.MonkeyPatch) -> type[History]:
    class Hopless(Office):
        def is_current(self, outcome: Outcome, row: Row) -> bool:
            return row.hop > row.confirmed_hop

    def resolved(outcome: Outcome, stored: StoredLetter) -> State:
        open_ = stored.state in (State.REPLAYING, State.PENDING)
        return State.RESOLVED if outcome.ok and open_ else stored.state

    patch.setattr(store, "after_outcome", resolved)
    return type("Mutated", (with_office(Hopless),), {"pinned": {"impatient": True, "partitions": 3, "workers": 3}})


@mutant("collector settles before storing", "lost", "falsely resolved")
def _(patch: pytest.MonkeyPatch) -> None:
    collect = Collector._collect

    async def hasty(self: Collector, deliveries: Sequence[Any]) -> None:
        await self._settle(deliveries)
        await collect(self, deliveries)

    patch.setattr(Collector, "_collect", hasty)


@mutant("collector settles once and gives up", "stuck")
def _(patch: pytest.MonkeyPatch) -> None:
    settle = SimBroker.settle

    async def once(self: Collector, deliveries: Sequence[Any]) -> None:
        with suppress(BrokerUnavailable):
            await settle(self._broker, [broker.Ack(one) for one in deliveries])

    patch.setattr(Collector, "_settle", once)


@mutant("a retry copy too large is tried for ever", "stuck")
def _(patch: pytest.MonkeyPatch) -> None:
    shrink = Settler._shrink

    async def letters_only(self: Settler, done: Any) -> bool:
        return done.letter is not None and await shrink(self, done)

    patch.setattr(Settler, "_shrink", letters_only)


@mutant("spool that a crash empties", "lost")
def _(patch: pytest.MonkeyPatch) -> type[History]:
    class Volatile(SimSpool):
        def __init__(self, disk: list[Letter], process: Process) -> None:
            super().__init__([], process)

    return type("Mutated", (History,), {"spool_type": Volatile})


@mutant("retry copy forgets its runs", "over-retried")
def _(patch: pytest.MonkeyPatch) -> None:
    copy = codec.retry_copy

    def forgetful(message: Any, ticket: Any, *where: Any) -> Any:
        return copy(message, replace(ticket, runs=min(ticket.runs, 0)), *where)

    patch.setattr(codec, "retry_copy", forgetful)


@mutant("null body becomes empty", "corrupt")
def _(patch: pytest.MonkeyPatch) -> None:
    copy = codec.retry_copy

    def emptied(message: Any, *rest: Any) -> Any:
        return copy(replace(message, body=message.body or b""), *rest)

    patch.setattr(codec, "retry_copy", emptied)


@mutant("a refused copy counts as settled", "lost", "falsely resolved")
def _(patch: pytest.MonkeyPatch) -> type[History]:
    class Careless(SimBroker):
        async def settle(self, settlements: Sequence[Any]) -> Any:
            results = await super().settle(settlements)
            bad = [one for one, answer in zip(settlements, results, strict=True) if isinstance(answer, broker.Refused)]
            if bad:
                await super().settle([broker.Ack(one.delivery) for one in bad])
            return [broker.Settled() if isinstance(one, broker.Refused) else one for one in results]

    return type("Mutated", (History,), {"broker_type": Careless})


class Caught(Struct, frozen=True):
    mutant: Mutant
    seed: int
    anomaly: Anomaly

    def __str__(self) -> str:
        return f"{self.mutant.name:40} {self.seed:>5}  {self.anomaly.kind}: {self.anomaly.text}"


def hunt(mutant: Mutant, limit: int) -> Caught | None:
    """The first seed whose history gives this bug away."""
    with pytest.MonkeyPatch.context() as patch:
        kind = mutant.plant(patch)
        for seed in range(limit):
            for anomaly in play(seed, kind=kind).anomalies:
                if anomaly.kind in mutant.signs:
                    return Caught(mutant, seed, anomaly)
    return None
