"""The store socket: letters, jobs, statistics. Every change of state is a compare-and-set with its audit row."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct, field

from redrive.clock import Millis
from redrive.letter import Act, Kind, Letter, Outcome, Reason, State, StoredLetter
from redrive.query import Filter

DEFAULT_WINDOW = 500


class Filing(StrEnum):
    NEW = "new"
    AGAIN = "again"
    DUPLICATE = "duplicate"
    RELEASED = "released"


class Filed(Struct, frozen=True):
    """`NEW` letter, `AGAIN` for one more death of a known letter, `DUPLICATE` when nothing changed.

    `RELEASED` answers `hold` only: nothing stands before this message any more, so it was not stored; run it.
    """

    id: str
    filing: Filing
    state: State


class Summary(Struct, frozen=True):
    """A letter in a list: no body, no stack."""

    id: str
    state: State
    source: str
    group: str
    kind: Kind
    reason: Reason
    error_type: str
    error_message: str
    handler: str
    message_type: str
    attempts: int
    occurrences: int
    hop: int
    size: int
    verified: bool
    first_attempt_at: Millis
    last_attempt_at: Millis
    filed_at: Millis
    updated_at: Millis
    attributes: dict[str, str] = field(default_factory=dict)
    masked: tuple[str, ...] = ()


class Page(Struct, frozen=True):
    """Newest first. `next` continues below the last row and stays right while letters are filed above it."""

    rows: tuple[Summary, ...]
    next: str | None = None


class Count(Struct, frozen=True):
    count: int
    exact: bool = True


class Occurrence(Struct, frozen=True):
    """One death: which replay it was, when, and why."""

    hop: int
    filed_at: Millis
    kind: Kind
    reason: Reason
    error_type: str
    error_message: str
    attempts: int
    detail: str = ""


class JobState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    CANCELLED = "cancelled"


class Job(Struct, frozen=True):
    """One replay: a frozen list of letters and a window over it that only moves forward.

    Items before `window_start` are sent or refused; items up to `window_end` may have been published and are
    published again after a crash; the rest have not been touched. `rate` is letters a second, None for no limit.
    """

    id: str
    act: Act
    state: JobState
    created_at: Millis
    total: int
    window: int = DEFAULT_WINDOW
    rate: float | None = None
    window_start: int = 0
    window_end: int = 0
    sent: int = 0
    refused: int = 0
    resolved: int = 0
    died: int = 0
    owner: str = ""
    lease_until: Millis = 0


class Refusal(Struct, frozen=True):
    letter: str
    why: str


class Tally(Struct, frozen=True):
    """What one handler did in one minute."""

    source: str
    group: str
    handler: str
    minute: Millis
    handled: int = 0
    failed: int = 0
    retried: int = 0
    filed: int = 0
    recorded: int = 0
    discarded: int = 0


class Recorded(Struct, frozen=True):
    """A failure that a handler reported as data: kept in the message's history, and the message went on."""

    letter: str
    source: str
    group: str
    handler: str
    message_id: str
    at: Millis
    note: str


class Report(Struct, frozen=True):
    """What a runtime tells the office. `serial` counts one runtime's reports, so that a second copy is ignored."""

    runtime: str
    serial: int
    host: str
    at: Millis
    outcomes: tuple[Outcome, ...] = ()
    tallies: tuple[Tally, ...] = ()
    recorded: tuple[Recorded, ...] = ()


class HandlerRate(Struct, frozen=True):
    handled: int
    failed: int

    @property
    def rate(self) -> float:
        return self.failed / (self.handled + self.failed) if self.failed else 0.0


class Statistics(Struct, frozen=True):
    total: int
    by_state: dict[str, int]
    by_source: dict[str, int]
    by_error_type: dict[str, int]
    by_kind: dict[str, int]
    by_handler: dict[str, HandlerRate]
    oldest: Millis | None = None
    newest: Millis | None = None


class AuditEntry(Struct, frozen=True):
    """One deed. `hash` covers the entry and the hash before it, so an edit or a gap shows."""

    number: int
    at: Millis
    who: str
    why: str
    what: str
    letter: str
    hash: str


class Letters(Protocol):
    async def file(self, letters: Sequence[Letter], now: Millis) -> list[Filed]:
        """Store each letter once, all or none. The same identity and hop again changes nothing and says so."""
        ...

    async def hold(self, letters: Sequence[Letter], now: Millis) -> list[Filed]:
        """Keep messages behind the open letters of their key, each only if there is still something to wait for.

        A message waits for any open letter of its key; a replayed copy only for a dead one that stands before it.
        """
        ...

    async def blocked(self, source: str, group: str, keys: Sequence[bytes]) -> dict[bytes, int | None]:
        """The keys that have open letters, each with the place of its first dead one, None when none is dead."""
        ...

    async def get(self, letter_id: str) -> StoredLetter | None: ...

    async def occurrences(self, letter_id: str) -> list[Occurrence]:
        """Every death of this letter, oldest first."""
        ...

    async def history(self, letter_id: str) -> list[Recorded]:
        """Failures that handlers reported as data for this message."""
        ...

    async def page(self, filter_: Filter, limit: int = 50, cursor: str | None = None) -> Page: ...

    async def count(self, filter_: Filter) -> Count: ...

    async def move(self, ids: Sequence[str], expected: State, to: State, act: Act, now: Millis) -> list[str]:
        """Compare-and-set: moves those that are in `expected`, with an audit row each, and says which moved."""
        ...

    async def purge(self, ids: Sequence[str], act: Act, now: Millis) -> list[str]:
        """Delete letters that are not replaying. Their identities stay, so collecting again cannot resurrect them."""
        ...


class Jobs(Protocol):
    async def create(
        self,
        ids: Sequence[str],
        act: Act,
        now: Millis,
        *,
        window: int = DEFAULT_WINDOW,
        rate: float | None = None,
    ) -> Job:
        """Freeze this selection. Nothing is sent yet. What is held behind a selected letter goes after it, in order."""
        ...

    async def get(self, job_id: str) -> Job | None: ...

    async def recent(self, limit: int = 50) -> list[Job]:
        """Newest first."""
        ...

    async def lease(self, owner: str, seconds: float, now: Millis) -> Job | None:
        """Take, or keep, one running job that has work left and no living owner."""
        ...

    async def advance(self, job_id: str, owner: str, now: Millis) -> list[StoredLetter]:
        """The letters to publish now, with their bodies; their hop is already counted up and durable.

        An open window is handed out again as it is. Otherwise the window moves: its letters go from pending to
        replaying, and those that are not pending are refused with a row each. Empty when the job is done, which
        also ends it. Raises LeaseConflict when the job is not this owner's any more.
        """
        ...

    async def close_window(self, job_id: str, owner: str, refused: Sequence[Refusal], now: Millis) -> Job:
        """The window's letters are confirmed, except those refused, which go back to pending."""
        ...

    async def release_held(self, now: Millis, *, window: int = DEFAULT_WINDOW) -> Job | None:
        """Start sending what is held behind nothing any more; None when there is nothing of that kind."""
        ...

    async def set_state(self, job_id: str, expected: JobState, to: JobState, act: Act, now: Millis) -> bool: ...

    async def refusals(self, job_id: str) -> list[Refusal]: ...

    async def outcomes(self, outcomes: Sequence[Outcome], now: Millis) -> list[str]:
        """Apply what runtimes reported; says which letters were resolved by it. A second copy changes nothing."""
        ...

    async def settle_quiet(self, quiet_before: Millis, now: Millis) -> list[str]:
        """Resolve letters whose copy was confirmed before this time and that nobody reported dead since."""
        ...


class Store(Protocol):
    """One configured database. Raises StoreUnavailable when it cannot commit."""

    name: str
    letters: Letters
    jobs: Jobs

    async def open(self) -> None:
        """Connect and migrate, or raise StoreUnavailable or SchemaMismatch with nothing half-migrated."""
        ...

    async def close(self) -> None: ...

    async def report(self, reports: Sequence[Report], now: Millis) -> list[str]:
        """Keep what runtimes reported, each report once; says which letters their outcomes resolved."""
        ...

    async def statistics(self) -> Statistics: ...

    async def audit(self, limit: int = 100) -> list[AuditEntry]:
        """Newest first."""
        ...
