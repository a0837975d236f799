"""A store in one SQLite file."""

# ruff: noqa: S608 - only names and operators are put into SQL here; every value is a parameter

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

from redrive.clock import Millis
from redrive.letter import Outcome
from redrive.stores.base import AuditEntry, HandlerRate, Jobs, Letters, Report, Statistics
from redrive.stores.sqlite import audit, rows
from redrive.stores.sqlite.file import File
from redrive.stores.sqlite.jobs import SqliteJobs, apply_outcomes
from redrive.stores.sqlite.letters import SqliteLetters

_SLICE = 10_000


class SqliteStore:
    """As the socket says. Any number of processes may share the file; `:memory:` is gone when it is closed."""

    def __init__(self, path: str, *, name: str = "sqlite") -> None:
        self.name = name
        self._file = File(path, name)
        self.letters: Letters = SqliteLetters(self._file)
        self.jobs: Jobs = SqliteJobs(self._file)

    async def open(self) -> None:
        await self._file.open()

    async def close(self) -> None:
        await self._file.close()

    async def report(self, reports: Sequence[Report], now: Millis) -> list[str]:
        return await self._file.write(lambda c: _report(c, [rows.tame(one) for one in reports], now))

    async def statistics(self) -> Statistics:
        return await self._file.read(_statistics)

    async def audit(self, limit: int = 100) -> list[AuditEntry]:
        return await self._file.read(lambda c: audit.newest(c, limit))

    async def verify_audit(self) -> int | None:
        """The number of the first entry that was edited, or is missing; None when the chain is whole."""
        chain = audit.Chain()
        while await self._file.read(lambda c: chain.check(c, _SLICE)):
            pass
        return chain.broken or None


def _report(connection: sqlite3.Connection, reports: Iterable[Report], now: Millis) -> list[str]:
    seen = "INSERT OR IGNORE INTO reports_seen VALUES (?, ?)"
    new = [one for one in reports if connection.execute(seen, (one.runtime, one.serial)).rowcount]
    tallies = [
        (t.source, t.group, t.handler, t.minute, t.handled, t.failed, t.retried, t.filed, t.recorded, t.discarded)
        for one in new
        for t in one.tallies
    ]
    recorded = [
        (r.letter, r.source, r.group, r.handler, r.message_id, r.at, r.note) for one in new for r in one.recorded
    ]
    connection.executemany("INSERT INTO tallies VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", tallies)
    connection.executemany("INSERT INTO recorded VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", recorded)
    outcomes: list[Outcome] = [outcome for one in new for outcome in one.outcomes]
    return apply_outcomes(connection, outcomes, now) if outcomes else []


def _statistics(connection: sqlite3.Connection) -> Statistics:
    """Everything from one snapshot, and from indexes alone."""
    connection.execute("BEGIN")
    try:
        by_state = _counts(connection, "state")
        oldest, newest = connection.execute(
            "SELECT (SELECT min(filed_at) FROM letters), (SELECT max(filed_at) FROM letters)"
        ).fetchone()
        return Statistics(
            total=sum(by_state.values()),
            by_state=by_state,
            by_source=_counts(connection, "source"),
            by_error_type=_counts(connection, "error_type"),
            by_kind=_counts(connection, "kind"),
            by_handler=_rates(connection),
            oldest=oldest,
            newest=newest,
        )
    finally:
        connection.execute("COMMIT")


def _counts(connection: sqlite3.Connection, column: str) -> dict[str, int]:
    return dict(connection.execute(f"SELECT {column}, count(*) FROM letters GROUP BY {column}"))


def _rates(connection: sqlite3.Connection) -> dict[str, HandlerRate]:
    sums = connection.execute("SELECT handler, sum(handled), sum(failed) FROM tallies GROUP BY handler")
    return {handler: HandlerRate(handled, failed) for handler, handled, failed in sums}
