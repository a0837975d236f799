"""One SQLite file behind one thread: WAL, immediate transactions, commits that last, migrations by number."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from redrive.errors import SchemaMismatch

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]
BUSY_SECONDS = 30.0
MEMORY = ":memory:"


class Database:
    """Runs functions on the connection, one at a time, off the event loop. Errors come out as sqlite3.Error."""

    def __init__(
        self,
        path: str,
        migrations: Sequence[str],
        *,
        part: str = "",
        page_size: int = 4096,
        survives_power_cut: bool = True,
    ) -> None:
        """A named part keeps a schema version of its own, so that it can share the file with others.

        What must survive a crash of the process only is written without waiting for the disk: a power cut may then
        undo the last commits, but never damages the file.
        """
        self._synchronous = "FULL" if survives_power_cut else "NORMAL"
        self._page_size = page_size
        self.path = path
        self._part = part
        self._migrations = migrations
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="redrive-sqlite")
        self._connection: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Open or create the file and bring it to the newest schema, each migration whole or not at all."""
        await self._call(self._open)

    async def close(self) -> None:
        await self._call(self._close)
        self._thread.shutdown(wait=False)

    async def write(self, work: Work[T]) -> T:
        """Run `work` in one immediate transaction; it is durable when this returns, undone when it raises.

        Cancelling the caller does not stop it: the transaction has happened or not, never half.
        """
        return await self._call(lambda: self._in_transaction(work))

    async def read(self, work: Work[T]) -> T:
        return await self._call(lambda: work(self._live()))

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def _live(self) -> sqlite3.Connection:
        if self._connection is None:
            raise sqlite3.ProgrammingError(f"{self.path} is not open")
        return self._connection

    def _open(self) -> None:
        if self._connection is not None:
            return
        if self.path != MEMORY:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            connection.execute(f"PRAGMA page_size = {self._page_size:d}")  # of a new file; a file keeps what it has
            _use_wal(connection)
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            connection.execute("PRAGMA foreign_keys = ON")
            self._connection = connection
            self._migrate(connection)
        except BaseException:
            self._connection = None
            connection.close()
            raise

    def _migrate(self, connection: sqlite3.Connection) -> None:
        if self._version(connection) == len(self._migrations):
            return
        connection.execute("BEGIN IMMEDIATE")
        try:
            for number in range(self._version(connection), len(self._migrations)):
                for statement in _statements(self._migrations[number]):
                    connection.execute(statement)
                self._set_version(connection, number + 1)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # a full disk has rolled back already
                connection.execute("ROLLBACK")
            raise

    def _version(self, connection: sqlite3.Connection) -> int:
        found = self._found_version(connection)
        if found > len(self._migrations):
            raise SchemaMismatch(self.path, found, len(self._migrations))
        return found

    def _found_version(self, connection: sqlite3.Connection) -> int:
        if not self._part:
            return int(connection.execute("PRAGMA user_version").fetchone()[0])
        connection.execute("CREATE TABLE IF NOT EXISTS redrive_parts (name TEXT PRIMARY KEY, version INTEGER NOT NULL)")
        row = connection.execute("SELECT version FROM redrive_parts WHERE name = ?", (self._part,)).fetchone()
        return int(row[0]) if row else 0

    def _set_version(self, connection: sqlite3.Connection, version: int) -> None:
        if self._part:
            connection.execute("INSERT OR REPLACE INTO redrive_parts VALUES (?, ?)", (self._part, version))
        else:
            connection.execute(f"PRAGMA user_version = {version}")

    def _in_transaction(self, work: Work[T]) -> T:
        connection = self._live()
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = work(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return result

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _use_wal(connection: sqlite3.Connection) -> None:
    """SQLite does not wait for its lock when two processes switch a new file at once, so we do."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _statements(script: str) -> list[str]:
    """Split a migration on complete statements; `executescript` would commit behind our back."""
    found, pending = [], ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            found.append(pending)
            pending = ""
    return found
