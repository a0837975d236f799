"""The letters of a SQLite store."""

# ruff: noqa: S608 - only names and operators are put into SQL here; every value is a parameter

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from redrive.clock import Millis
from redrive.errors import BadRequest
from redrive.letter import MOVES, Act, Letter, State, StoredLetter
from redrive.query import MAX_PAGE, Filter
from redrive.stores.base import Count, Filed, Occurrence, Page, Recorded
from redrive.stores.sqlite import audit, filing, order, rows
from redrive.stores.sqlite.file import File
from redrive.stores.sqlite.search import search, write_cursor

COUNT_LIMIT = 10_000

_BY_ID = "seq IN (SELECT seq FROM identities WHERE id IN (SELECT value FROM json_each(?)))"
_SEQ = "(SELECT seq FROM identities WHERE id = ?)"


class SqliteLetters:
    def __init__(self, file: File) -> None:
        self._file = file

    async def file(self, letters: Sequence[Letter], now: Millis) -> list[Filed]:
        """As the socket says; a purged letter is a duplicate, said to be discarded."""
        if not letters:
            return []
        return await self._file.write(lambda c: filing.file(c, letters, now))

    async def hold(self, letters: Sequence[Letter], now: Millis) -> list[Filed]:
        return await self._file.write(lambda c: filing.hold(c, letters, now))

    async def blocked(self, source: str, group: str, keys: Sequence[bytes]) -> dict[bytes, int | None]:
        lanes = {order.lane(source, group, key): key for key in keys}
        found = await self._file.read(lambda c: order.blocked(c, list(lanes)))
        return {lanes[lane]: place for lane, place in found.items()}

    async def get(self, letter_id: str) -> StoredLetter | None:
        return await self._file.read(lambda c: _get(c, rows.clean(letter_id)))

    async def occurrences(self, letter_id: str) -> list[Occurrence]:
        sql = f"SELECT hop, filed_at, facts FROM occurrences WHERE seq = {_SEQ} ORDER BY rowid"
        found = await self._file.read(lambda c: c.execute(sql, (rows.clean(letter_id),)).fetchall())
        return [rows.occurrence(*row) for row in found]

    async def history(self, letter_id: str) -> list[Recorded]:
        sql = "SELECT letter, source, grp, handler, message_id, at, note FROM recorded WHERE letter = ? ORDER BY at, n"
        found = await self._file.read(lambda c: c.execute(sql, (rows.clean(letter_id),)).fetchall())
        return [Recorded(*row) for row in found]

    async def page(self, filter_: Filter, limit: int = 50, cursor: str | None = None) -> Page:
        limit = max(1, min(limit, MAX_PAGE))
        wanted = search(filter_, indexed=self._file.text_is_indexed)
        wanted.below(cursor)
        sql = wanted.select(f"l.seq, {rows.SUMMARY}", ordered=True)
        found = await self._file.read(lambda c: c.execute(sql, (*wanted.values, limit + 1)).fetchall())
        return _page(found, limit)

    async def count(self, filter_: Filter) -> Count:
        wanted = search(filter_, indexed=self._file.text_is_indexed)
        sql = f"SELECT count(*) FROM ({wanted.select('1', ordered=False)})"
        found = await self._file.read(lambda c: c.execute(sql, (*wanted.values, COUNT_LIMIT + 1)).fetchone()[0])
        return Count(min(found, COUNT_LIMIT), exact=found <= COUNT_LIMIT)

    async def move(self, ids: Sequence[str], expected: State, to: State, act: Act, now: Millis) -> list[str]:
        if to not in MOVES[expected]:
            raise BadRequest(f"a letter cannot go from {expected} to {to}")
        return await self._file.write(lambda c: _move(c, [rows.clean(i) for i in ids], expected, to, act, now))

    async def purge(self, ids: Sequence[str], act: Act, now: Millis) -> list[str]:
        return await self._file.write(lambda c: _purge(c, [rows.clean(i) for i in ids], act, now))


def _get(connection: sqlite3.Connection, letter_id: str) -> StoredLetter | None:
    row = connection.execute(f"{rows.STORED} WHERE l.seq = {_SEQ}", (letter_id,)).fetchone()
    return rows.stored(row) if row else None


def _page(found: list[tuple[Any, ...]], limit: int) -> Page:
    shown = tuple(rows.summary(row[1:]) for row in found[:limit])
    more = len(found) > limit
    return Page(shown, write_cursor(shown[-1].filed_at, found[limit - 1][0]) if more else None)


def _move(
    connection: sqlite3.Connection, ids: Sequence[str], expected: State, to: State, act: Act, now: Millis
) -> list[str]:
    # Replaying by hand is no job's replay: no open window may publish it, and no quiet time may resolve it.
    detach = ", job = '', sent_at = NULL" if to is State.REPLAYING else ""
    moved = connection.execute(
        f"UPDATE letters SET state = ?, version = version + 1, updated_at = ?{detach} "
        f"WHERE {_BY_ID} AND state = ? RETURNING id",
        (to, now, rows.ids_json(ids), expected),
    ).fetchall()
    return _audited(connection, ids, moved, act, deed(expected, to), now)


def _purge(connection: sqlite3.Connection, ids: Sequence[str], act: Act, now: Millis) -> list[str]:
    gone = connection.execute(
        f"DELETE FROM letters WHERE {_BY_ID} AND state <> ? RETURNING id, seq, filed_at, attributes",
        (rows.ids_json(ids), State.REPLAYING),
    ).fetchall()
    filing.unindex(connection, [(seq, filed_at, rows.attributes_of(values)) for _, seq, filed_at, values in gone])
    for table in ("bodies", "occurrences", "keyed"):
        connection.executemany(f"DELETE FROM {table} WHERE seq = ?", ((row[1],) for row in gone))
    connection.executemany("DELETE FROM recorded WHERE letter = ?", ((row[0],) for row in gone))
    connection.executemany("UPDATE identities SET purged_at = ? WHERE seq = ?", ((now, row[1]) for row in gone))
    return _audited(connection, ids, gone, act, "purge", now)


def _audited(
    connection: sqlite3.Connection, ids: Sequence[str], done: list[tuple[Any, ...]], act: Act, what: str, now: Millis
) -> list[str]:
    """Those it was done to, in the order asked."""
    those = {row[0] for row in done}
    moved = [letter for letter in dict.fromkeys(ids) if letter in those]
    audit.append(connection, act, now, ((what, letter) for letter in moved))
    return moved


def deed(expected: State, to: State) -> str:
    """The move as the audit trail names it."""
    restored = to is State.PENDING and expected is not State.REPLAYING
    return f"{'restore: ' if restored else ''}{expected} to {to}"
