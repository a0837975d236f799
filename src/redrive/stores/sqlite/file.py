"""The file behind a SQLite store: one connection that writes, one that reads, and errors told apart."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable
from typing import TypeVar

from redrive.errors import StoreUnavailable
from redrive.sqlite import MEMORY, Database, Work
from redrive.stores.sqlite.schema import OLDEST_SQLITE, has_fts5, migrations, text_is_indexed

T = TypeVar("T")
PAGE_SIZE = 8192
"""Letters are a few kilobytes: with SQLite's own 4096 most pages would be half empty."""
CHECKPOINT_PAGES = 2000
_WHY = {
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_READONLY: "the file is read-only",
    sqlite3.SQLITE_BUSY: "locked by another process",
    sqlite3.SQLITE_LOCKED: "locked by another connection",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened",
    sqlite3.SQLITE_CORRUPT: "the file is damaged",
    sqlite3.SQLITE_NOTADB: "the file is not a database",
    sqlite3.SQLITE_IOERR: "the disk failed",
}


class File:
    """Reads do not wait behind writes, except in memory, where there is only one connection."""

    def __init__(self, path: str, name: str) -> None:
        self.path, self.name = path, name
        self.text_is_indexed = False
        self._writer: Database | None = None
        self._reader: Database | None = None

    async def open(self) -> None:
        if self._writer is not None:
            return
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            raise StoreUnavailable(self.name, f"SQLite {sqlite3.sqlite_version} is too old, 3.37 is needed")
        try:
            self._writer = await self._opened()
            self._reader = self._writer if self.path == MEMORY else await self._opened()
            await self._translated(self._prepare(self._writer, self._reader))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        writer, reader = self._writer, self._reader
        self._writer = self._reader = None
        if reader is not None and reader is not writer:
            await self._translated(reader.close())
        if writer is not None:
            await self._translated(writer.close())

    async def write(self, work: Work[T]) -> T:
        """Run `work` in one transaction; it is durable when this returns, undone when it raises."""
        return await self._translated(self._live(self._writer).write(work))

    async def read(self, work: Work[T]) -> T:
        return await self._translated(self._live(self._reader).read(work))

    def _live(self, database: Database | None) -> Database:
        if database is None:
            raise StoreUnavailable(self.name, "it is not open")
        return database

    async def _opened(self) -> Database:
        database = Database(self.path, migrations(), page_size=PAGE_SIZE)
        try:
            await self._translated(database.open())
        except BaseException:
            await database.close()
            raise
        return database

    async def _prepare(self, writer: Database, reader: Database) -> None:
        self.text_is_indexed = await writer.read(text_is_indexed)
        if self.text_is_indexed and not has_fts5():
            raise StoreUnavailable(self.name, "the file was made with FTS5, which this build of SQLite lacks")
        await writer.read(lambda c: c.execute("PRAGMA cache_size = -32768").fetchall())
        await writer.read(lambda c: c.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}").fetchall())
        if reader is not writer:
            await reader.read(lambda c: c.execute("PRAGMA query_only = ON").fetchall())

    async def _translated(self, doing: Awaitable[T]) -> T:
        try:
            return await doing
        except sqlite3.Error as e:
            raise StoreUnavailable(self.name, why(e)) from e
        except OSError as e:
            raise StoreUnavailable(self.name, e) from e


def why(error: sqlite3.Error) -> str:
    known = _WHY.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
    return f"{known} ({error})" if known else str(error)
