"""The audit trail: a chain of hashes, appended in the transaction of the deed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from redrive.clock import Millis
from redrive.letter import Act
from redrive.message import digest
from redrive.stores.base import AuditEntry
from redrive.stores.sqlite.rows import clean

GENESIS = ""
MOST = 10_000
Deed = tuple[str, str]
"""What was done, and to which letter; the letter is empty for deeds on a job."""


def append(connection: sqlite3.Connection, act: Act, now: Millis, deeds: Iterable[Deed]) -> None:
    """One row for each deed. Call it last in the transaction: the head of the chain is read here."""
    number, head = _head(connection)
    who, why = clean(act.who), clean(act.why)
    rows = []
    for what, letter in deeds:
        number += 1
        head = _link(head, number, now, who, why, what, letter)
        rows.append((number, now, who, why, what, letter, head))
    connection.executemany("INSERT INTO audit VALUES (?, ?, ?, ?, ?, ?, ?)", rows)


def newest(connection: sqlite3.Connection, limit: int) -> list[AuditEntry]:
    rows = connection.execute("SELECT * FROM audit ORDER BY number DESC LIMIT ?", (max(1, min(limit, MOST)),))
    return [AuditEntry(*row) for row in rows]


class Chain:
    """Walks the trail in slices and remembers the first entry that does not follow from the one before it."""

    def __init__(self) -> None:
        self.number, self.hash, self.broken = 0, GENESIS, 0

    def check(self, connection: sqlite3.Connection, limit: int) -> bool:
        """Check up to `limit` more entries; False when there is nothing left to check."""
        rows = connection.execute("SELECT * FROM audit WHERE number > ? ORDER BY number LIMIT ?", (self.number, limit))
        seen = 0
        for entry in (AuditEntry(*row) for row in rows):
            seen += 1
            if not self._follows(entry):
                self.broken = self.number + 1
                return False
            self.number, self.hash = entry.number, entry.hash
        return seen == limit

    def _follows(self, entry: AuditEntry) -> bool:
        known = (entry.number, entry.at, entry.who, entry.why, entry.what, entry.letter)
        return entry.number == self.number + 1 and entry.hash == _link(self.hash, *known)


def _head(connection: sqlite3.Connection) -> tuple[int, str]:
    row = connection.execute("SELECT number, hash FROM audit ORDER BY number DESC LIMIT 1").fetchone()
    return (row[0], row[1]) if row else (0, GENESIS)


def _link(head: str, number: int, at: Millis, who: str, why: str, what: str, letter: str) -> str:
    return digest(part.encode() for part in (head, str(number), str(at), who, why, what, letter)).hex()
