"""Runs and crashes counted in SQLite: in a file of their own, or beside other tables of redrive."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from redrive.attempts.base import Span
from redrive.clock import Millis
from redrive.errors import AttemptsUnavailable
from redrive.sqlite import Database

T = TypeVar("T")
SWEEP = 100
"""Expired counts deleted with each increment, beyond as many as it may add."""

_MIGRATIONS = (
    """
    CREATE TABLE attempt_spans (
        number INTEGER PRIMARY KEY,
        id BLOB NOT NULL UNIQUE,
        source BLOB NOT NULL,
        consumer_group BLOB NOT NULL,
        partition INTEGER NOT NULL,
        positions BLOB NOT NULL,
        alone INTEGER NOT NULL
    );
    CREATE INDEX attempt_spans_lane ON attempt_spans (source, consumer_group, partition);
    CREATE TABLE attempt_counts (
        key BLOB PRIMARY KEY,
        count INTEGER NOT NULL,
        expires_at INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX attempt_counts_expiry ON attempt_counts (expires_at);
    """,
)
_FINISH = "DELETE FROM attempt_spans WHERE id = ?"
_START = """
    INSERT OR REPLACE INTO attempt_spans (id, source, consumer_group, partition, positions, alone)
    VALUES (?, ?, ?, ?, ?, ?)
"""
_OPEN = """
    SELECT id, positions, alone FROM attempt_spans
    WHERE source = ? AND consumer_group = ? AND partition = ? ORDER BY number
"""
_INCREMENT = """
    INSERT INTO attempt_counts (key, count, expires_at) VALUES (:key, 1, :expires_at)
    ON CONFLICT (key) DO UPDATE SET
        count = CASE WHEN expires_at <= :now THEN 1 ELSE count + 1 END, expires_at = :expires_at
    RETURNING count
"""
_SWEEP = """
    DELETE FROM attempt_counts WHERE key IN
        (SELECT key FROM attempt_counts WHERE expires_at <= ? ORDER BY expires_at LIMIT ?)
"""
_COUNT = "SELECT count FROM attempt_counts WHERE key = ? AND expires_at > ?"
_CLEAR = "DELETE FROM attempt_counts WHERE key = ?"


class SqliteAttempts:
    """Many processes may share the file. Raises AttemptsUnavailable when it cannot be read or written."""

    def __init__(self, path: str | Path, *, ttl_seconds: float = 7 * 86400) -> None:
        self.path = str(path)
        self._ttl = int(ttl_seconds * 1000)
        # A record must outlive the process, and what is written does. It need not outlive a power cut, which is no
        # message's fault: that would cost a sync for every batch, to have innocents run alone afterwards.
        self._database = Database(self.path, _MIGRATIONS, part="attempts", survives_power_cut=False)

    async def open(self) -> None:
        await self._named(self._database.open())

    async def open_spans(self, source: str, group: str, partition: int) -> list[Span]:
        lane = (_raw(source), _raw(group), partition)
        rows = await self._named(self._database.read(lambda c: c.execute(_OPEN, lane).fetchall()))
        return [
            Span(_text(id_), source, group, partition, _positions(positions), bool(alone))
            for id_, positions, alone in rows
        ]

    async def turn(self, *, start: Sequence[Span] = (), finish: Sequence[str] = ()) -> None:
        if not start and not finish:
            return

        def work(connection: sqlite3.Connection) -> None:
            connection.executemany(_FINISH, [(_raw(id_),) for id_ in finish])
            connection.executemany(_START, [_row(span) for span in start])

        await self._named(self._database.write(work))

    async def increment(self, keys: Sequence[str], now: Millis) -> list[int]:
        """A key named twice counts twice."""

        def work(connection: sqlite3.Connection) -> list[int]:
            rows = ({"key": _raw(key), "expires_at": now + self._ttl, "now": now} for key in keys)
            counts = [int(connection.execute(_INCREMENT, row).fetchall()[0][0]) for row in rows]
            connection.execute(_SWEEP, (now, len(keys) + SWEEP))
            return counts

        return await self._named(self._database.write(work)) if keys else []

    async def counts(self, keys: Sequence[str], now: Millis) -> list[int]:
        def work(connection: sqlite3.Connection) -> list[int]:
            rows = (connection.execute(_COUNT, (_raw(key), now)).fetchone() for key in keys)
            return [int(row[0]) if row else 0 for row in rows]

        return await self._named(self._database.read(work)) if keys else []

    async def clear(self, keys: Sequence[str]) -> None:
        rows = [(_raw(key),) for key in keys]
        if rows:
            await self._named(self._database.write(lambda c: c.executemany(_CLEAR, rows)))

    async def close(self) -> None:
        await self._database.close()

    async def _named(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except (sqlite3.Error, OSError) as error:
            raise AttemptsUnavailable(self.path, error) from error


def _raw(text: str) -> bytes:
    """Names and positions come from brokers, so text that UTF-8 refuses is kept as well."""
    return text.encode("utf-8", "surrogatepass")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _row(span: Span) -> tuple[bytes, bytes, bytes, int, bytes, bool]:
    return (_raw(span.id), _raw(span.source), _raw(span.group), span.partition, _packed(span.positions), span.alone)


def _packed(positions: tuple[str, ...]) -> bytes:
    try:
        return msgspec.msgpack.encode(positions)
    except UnicodeEncodeError:
        return msgspec.msgpack.encode([_raw(position) for position in positions])


def _positions(packed: bytes) -> tuple[str, ...]:
    return tuple(one if isinstance(one, str) else _text(one) for one in msgspec.msgpack.decode(packed))
