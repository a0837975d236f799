"""An honest store in memory, and the other places a process writes to: attempts, spool and blobs.

Each has one durable side that all processes share, whose methods are whole transactions, and one client for each
process, through which every call may fail, be lost or kill its caller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from redrive.attempts.base import Span
from redrive.codec import BODY_AT_SOURCE
from redrive.errors import AttemptsUnavailable, BlobsUnavailable, LeaseConflict, SpoolFailed, StoreUnavailable
from redrive.letter import MOVES, Act, Letter, Outcome, Reason, State, StoredLetter, after_death, after_outcome
from redrive.stores.base import DEFAULT_WINDOW, Filed, Filing, Job, JobState, Refusal, Report
from simulator.ledger import Ledger
from simulator.world import Process, World

NAME = "sim"


class Row(Struct):
    """A letter and its life. `first` keeps the message, `latest` the last death."""

    id: str
    first: Letter
    latest: Letter
    state: State
    filed_at: int
    hop: int
    hops: list[int]
    version: int = 1
    confirmed_hop: int = -1
    job: str = ""
    sent_at: int | None = None
    resolved_by: str = ""

    def stored(self) -> StoredLetter:
        marks = tuple(one for one in self.latest.marks if one != BODY_AT_SOURCE)
        marks = (*marks, BODY_AT_SOURCE) if BODY_AT_SOURCE in self.first.marks else marks
        letter = replace(self.latest, id=self.id, message=self.first.message, claim=self.first.claim, marks=marks)
        life = (self.state, self.version, self.hop, len(self.hops), self.filed_at, self.filed_at)
        return StoredLetter(letter, *life, self.confirmed_hop, self.job)


class JobRow(Struct):
    job: Job
    items: list[str]
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def window(self) -> list[str]:
        items = self.items[self.job.window_start : self.job.window_end]
        return [one for one in items if one not in self.refused]

    @property
    def is_open(self) -> bool:
        return self.job.window_end > self.job.window_start


class Office:
    """The durable side of the store. What the mutants break is a method of its own."""

    def __init__(self, world: World, ledger: Ledger) -> None:
        self.world, self.ledger = world, ledger
        self.letters: dict[str, Row] = {}
        self.jobs: dict[str, JobRow] = {}
        self.reports: set[tuple[str, int]] = set()

    # ---- letters

    def file(self, letters: Sequence[Letter], now: int) -> list[Filed]:
        return [self._file(letter, now) for letter in letters]

    def known(self, letter: Letter) -> Row | None:
        return self.letters.get(letter.id)

    def _file(self, letter: Letter, now: int) -> Filed:
        row = self.known(letter)
        if row is None:
            return self._new(letter, now)
        if letter.hop in row.hops:
            return Filed(row.id, Filing.DUPLICATE, row.state)
        if letter.hop >= row.hop and letter.hop > row.confirmed_hop:
            self._set(row, after_death(letter, row.stored()), f"hop {letter.hop} died")
            row.latest, row.hop = letter, max(row.hop, letter.hop)
        row.hops.append(letter.hop)
        row.version += 1
        return Filed(row.id, Filing.AGAIN, row.state)

    def _new(self, letter: Letter, now: int) -> Filed:
        state = State.HELD if letter.reason is Reason.HELD else State.PENDING
        if 0 < letter.hop >= letter.max_replays:
            state = State.QUARANTINED
        number = "" if letter.id not in self.letters else f"#{len(self.letters)}"
        row = Row(letter.id + number, letter, letter, state, now, letter.hop, [letter.hop])
        self.letters[row.id] = row
        self.ledger.moved(row.id, letter.message, None, state, "filed", letter.hop)
        return Filed(row.id, Filing.NEW, state)

    def move(self, ids: Sequence[str], expected: State, to: State) -> list[str]:
        assert to in MOVES[expected]
        moved = [row for one in ids if (row := self.letters.get(one)) is not None and row.state is expected]
        for row in moved:
            self._set(row, to, "by hand")
        return [row.id for row in moved]

    def _set(self, row: Row, state: State, why: str) -> None:
        self.ledger.moved(row.id, row.first.message, row.state, state, why, row.hop)
        row.state, row.version = state, row.version + 1
        if state is State.RESOLVED:
            row.resolved_by = why

    # ---- jobs

    def create(self, ids: Sequence[str], act: Act, now: int, window: int, rate: float | None) -> Job:
        items = list(dict.fromkeys(ids))
        state = JobState.RUNNING if items else JobState.DONE
        job = Job(f"job-{len(self.jobs)}", act, state, now, len(items), window=window, rate=rate)
        self.jobs[job.id] = JobRow(job, items)
        return job

    def lease(self, owner: str, until: int, now: int) -> Job | None:
        self._release_cancelled(now)
        free = [
            one
            for one in self.jobs.values()
            if one.job.state is JobState.RUNNING
            and one.job.window_start < one.job.total
            and (one.job.owner == owner or one.job.lease_until <= now)
        ]
        if not free:
            return None
        row = next((one for one in free if one.job.owner == owner), free[0])
        if row.job.owner not in ("", owner):
            self.ledger.takeovers[row.job.id] += 1
        row.job = replace(row.job, owner=owner, lease_until=until)
        return row.job

    def advance(self, job_id: str, owner: str) -> list[StoredLetter]:
        row = self._owned(job_id, owner)
        while row.job.state is JobState.RUNNING:
            if row.is_open:
                letters = self.handed_out(row)
                if letters:
                    return letters
                self._shut(row, sent=len(row.window), refused=0)
            elif row.job.window_end < row.job.total:
                self.open_window(row)
            else:
                self._shut(row, sent=0, refused=0)
        return []

    def handed_out(self, row: JobRow) -> list[StoredLetter]:
        return [self.letters[one].stored() for one in self._replaying(row)]

    def open_window(self, row: JobRow) -> None:
        """The window moves, and its letters' hops are counted up, before anything is published."""
        start, end = row.job.window_end, min(row.job.window_end + row.job.window, row.job.total)
        for one in row.items[start:end]:
            letter = self.letters.get(one)
            if letter is None or letter.state is not State.PENDING:
                row.refused[one] = "is not pending"
                continue
            self.claim(letter, row.job.id)
        row.job = replace(row.job, window_start=start, window_end=end)
        if not row.window:
            row.job = replace(row.job, window_start=end)

    def claim(self, letter: Row, job: str) -> None:
        letter.hop, letter.job, letter.sent_at = letter.hop + 1, job, None
        self.ledger.job_of[letter.id, letter.hop] = job
        self._set(letter, State.REPLAYING, job)

    def close(self, job_id: str, owner: str, refused: Sequence[Refusal], now: int) -> Job:
        row = self._owned(job_id, owner)
        if row.is_open:
            whole = row.window
            back = {one.letter: one.why for one in refused if one.letter in whole}
            for letter in self._replaying(row):
                if letter in back:
                    self._set(self.letters[letter], State.PENDING, f"refused: {back[letter]}")
                else:
                    self.letters[letter].sent_at = now
            row.refused |= back
            self._shut(row, sent=len(whole) - len(back), refused=len(back))
        return row.job

    def set_state(self, job_id: str, expected: JobState, to: JobState) -> bool:
        row = self.jobs.get(job_id)
        if row is None or row.job.state is not expected:
            return False
        row.job = replace(row.job, state=to)
        return True

    def outcomes(self, outcomes: Sequence[Outcome]) -> list[str]:
        resolved = []
        for one in outcomes:
            row = self.letters.get(one.letter)
            if row is None or not one.ok or not self.is_current(one, row):
                continue
            row.confirmed_hop = row.hop
            state = after_outcome(one, row.stored())
            if state is not row.state:
                self._set(row, state, "reported")
                resolved.append(row.id)
        return resolved

    def is_current(self, outcome: Outcome, row: Row) -> bool:
        return 0 < outcome.hop == row.hop and outcome.hop > row.confirmed_hop

    def settle_quiet(self, before: int) -> list[str]:
        quiet = [
            row
            for row in self.letters.values()
            if row.state is State.REPLAYING and row.sent_at is not None and row.sent_at < before
        ]
        for row in quiet:
            self._set(row, State.RESOLVED, "quiet")
        return [row.id for row in quiet]

    def report(self, reports: Sequence[Report]) -> list[str]:
        new = [one for one in reports if (one.runtime, one.serial) not in self.reports]
        self.reports.update((one.runtime, one.serial) for one in new)
        return self.outcomes([outcome for one in new for outcome in one.outcomes])

    def unfinished(self) -> list[str]:
        jobs = [one.job.id for one in self.jobs.values() if one.job.state is JobState.RUNNING]
        return jobs + [row.id for row in self.letters.values() if row.state is State.REPLAYING]

    def _replaying(self, row: JobRow) -> list[str]:
        mine = (State.REPLAYING, row.job.id)
        return [one for one in row.window if (self.letters[one].state, self.letters[one].job) == mine]

    def _owned(self, job_id: str, owner: str) -> JobRow:
        row = self.jobs[job_id]
        if row.job.owner != owner:
            raise LeaseConflict(job_id, owner)
        return row

    def _shut(self, row: JobRow, *, sent: int, refused: int) -> None:
        job = row.job
        is_done = job.window_end >= job.total and job.state is not JobState.CANCELLED
        state = JobState.DONE if is_done else job.state
        counts = {"sent": job.sent + sent, "refused": job.refused + refused}
        row.job = replace(job, window_start=job.window_end, state=state, **counts)

    def _release_cancelled(self, now: int) -> None:
        for row in self.jobs.values():
            if row.job.state is JobState.CANCELLED and row.is_open and row.job.lease_until <= now:
                for letter in self._replaying(row):
                    self._set(self.letters[letter], State.PENDING, "its job was cancelled")
                self._shut(row, sent=len(row.window), refused=0)


class SimStore:
    """One process's client of the office. It is its own `letters` and `jobs`."""

    name = NAME

    def __init__(self, office: Office, process: Process) -> None:
        self._office, self._process = office, process
        self.letters = self.jobs = self

    async def open(self) -> None: ...

    async def file(self, letters: Sequence[Letter], now: int) -> list[Filed]:
        return await self._call("file", lambda: self._office.file(letters, now))

    async def move(self, ids: Sequence[str], expected: State, to: State, act: Act, now: int) -> list[str]:
        return await self._call("move", lambda: self._office.move(ids, expected, to), to=f"{expected} to {to}")

    async def create(
        self, ids: Sequence[str], act: Act, now: int, *, window: int = DEFAULT_WINDOW, rate: float | None = None
    ) -> Job:
        return await self._call("create", lambda: self._office.create(ids, act, now, window, rate))

    async def lease(self, owner: str, seconds: float, now: int) -> Job | None:
        return await self._call("lease", lambda: self._office.lease(owner, now + round(seconds * 1000), now))

    async def advance(self, job_id: str, owner: str, now: int) -> list[StoredLetter]:
        return await self._call("advance", lambda: self._office.advance(job_id, owner), job=job_id)

    async def close_window(self, job_id: str, owner: str, refused: Sequence[Refusal], now: int) -> Job:
        return await self._call("close_window", lambda: self._office.close(job_id, owner, refused, now), job=job_id)

    async def release_held(self, now: int, *, window: int = DEFAULT_WINDOW) -> Job | None:
        """Nothing is held where order does not matter."""

    async def set_state(self, job_id: str, expected: JobState, to: JobState, act: Act, now: int) -> bool:
        return await self._call("set_state", lambda: self._office.set_state(job_id, expected, to), to=str(to))

    async def settle_quiet(self, quiet_before: int, now: int) -> list[str]:
        return await self._call("settle_quiet", lambda: self._office.settle_quiet(quiet_before))

    async def report(self, reports: Sequence[Report], now: int) -> list[str]:
        return await self._call("report", lambda: self._office.report(reports))

    async def _call(self, what: str, effect: Callable[[], Any], **facts: Any) -> Any:
        return await self._process.world.call(
            self._process, f"store.{what}", effect, lambda why: StoreUnavailable(NAME, why), **facts
        )


class Counts(Struct):
    """The durable side of the attempts."""

    counts: Counter[str] = field(default_factory=Counter)
    spans: dict[str, Span] = field(default_factory=dict)


class SimAttempts:
    def __init__(self, counts: Counts, process: Process) -> None:
        self._kept, self._process = counts, process

    async def open(self) -> None: ...

    async def open_spans(self, source: str, group: str, partition: int) -> list[Span]:
        lane = (source, group, partition)
        found = lambda: [s for s in self._kept.spans.values() if (s.source, s.group, s.partition) == lane]  # noqa: E731
        return await self._call("open_spans", found)

    async def turn(self, *, start: Sequence[Span] = (), finish: Sequence[str] = ()) -> None:
        def effect() -> None:
            for one in finish:
                self._kept.spans.pop(one, None)
            self._kept.spans.update((span.id, span) for span in start)

        await self._call("turn", effect)

    async def increment(self, keys: Sequence[str], now: int) -> list[int]:
        def effect() -> list[int]:
            self._kept.counts.update(keys)
            return [self._kept.counts[key] for key in keys]

        return await self._call("increment", effect)

    async def counts(self, keys: Sequence[str], now: int) -> list[int]:
        return await self._call("counts", lambda: [self._kept.counts[key] for key in keys])

    async def clear(self, keys: Sequence[str]) -> None:
        await self._call("clear", lambda: [self._kept.counts.pop(key, None) for key in keys] and None)

    async def close(self) -> None: ...

    async def _call(self, what: str, effect: Callable[[], Any]) -> Any:
        return await self._process.world.call(
            self._process, f"attempts.{what}", effect, lambda why: AttemptsUnavailable(NAME, why)
        )


class SimSpool:
    """The spool's API over a list that stands for the disk of one host. Its contract knows no unclear answers."""

    damaged = 0

    def __init__(self, disk: list[Letter], process: Process) -> None:
        self._disk, self._process = disk, process

    @property
    def pending(self) -> int:
        return len(self._disk)

    async def open(self) -> None: ...

    async def append(self, letters: Sequence[Letter]) -> None:
        try:
            await self._call("append", lambda: self._disk.extend(letters))
        except SpoolFailed:
            self._disk[:] = [one for one in self._disk if not any(one is letter for letter in letters)]
            raise

    async def drain(self, file: Callable[[Sequence[Letter]], Awaitable[object]], batch: int = 500) -> int:
        taken = self._disk[:batch]
        if not taken:
            return 0
        await file(taken)
        await self._call("forget", lambda: self._forget(taken))
        return len(taken)

    async def close(self) -> None: ...

    def _forget(self, taken: list[Letter]) -> None:
        if self._disk[: len(taken)] == taken:
            del self._disk[: len(taken)]

    async def _call(self, what: str, effect: Callable[[], Any]) -> Any:
        return await self._process.world.call(
            self._process, f"spool.{what}", effect, lambda why: SpoolFailed(NAME, why)
        )


class SimBlobs:
    def __init__(self, kept: dict[str, bytes], process: Process) -> None:
        self._kept, self._process = kept, process

    async def put(self, name: str, body: bytes) -> None:
        await self._call("put", lambda: self._kept.__setitem__(name, body))

    async def get(self, name: str) -> bytes | None:
        return await self._call("get", lambda: self._kept.get(name))

    async def _call(self, what: str, effect: Callable[[], Any]) -> Any:
        return await self._process.world.call(
            self._process, f"blobs.{what}", effect, lambda why: BlobsUnavailable(NAME, why)
        )
