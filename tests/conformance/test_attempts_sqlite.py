from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from attempts_suite import LATER, NOW, SPAN, TTL_SECONDS, AttemptsSuite, Reopened, lane

from redrive.attempts.sqlite import SWEEP, SqliteAttempts
from redrive.errors import AttemptsUnavailable, SchemaMismatch
from redrive.sqlite import Database

INCREMENT = """
import asyncio, sys
from redrive.attempts.sqlite import SqliteAttempts
async def main():
    attempts = SqliteAttempts(sys.argv[1])
    await attempts.open()
    for _ in range(500):
        await attempts.increment(["the same key"], 1_800_000_000_000)
    await attempts.close()
asyncio.run(main())
"""
CRASH = """
import asyncio, os, signal, sys
from redrive.attempts.base import Span
from redrive.attempts.sqlite import SqliteAttempts
async def main():
    attempts = SqliteAttempts(sys.argv[1])
    await attempts.open()
    await attempts.turn(start=[Span("span-1", "orders", "billing", 3, ("10", "11", "15"))])
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def rows(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("SELECT count(*) FROM attempt_counts").fetchone()[0])


class TestSqliteAttempts(AttemptsSuite):
    backend = SqliteAttempts

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "attempts.db"

    @pytest.fixture
    async def reopened(self, path: Path) -> AsyncIterator[Reopened]:
        opened: list[SqliteAttempts] = []

        async def another() -> SqliteAttempts:
            opened.append(SqliteAttempts(path, ttl_seconds=TTL_SECONDS))
            await opened[-1].open()
            return opened[-1]

        yield another
        for attempts in opened:
            await attempts.close()

    @pytest.fixture
    async def attempts(self, reopened: Reopened) -> SqliteAttempts:
        return await reopened()

    async def test_a_count_that_expired_reads_as_none(self, attempts: SqliteAttempts) -> None:
        await attempts.increment(["a"], NOW)
        assert await attempts.counts(["a"], LATER - 1) == [1]
        assert await attempts.counts(["a"], LATER) == [0]
        assert await attempts.increment(["a"], LATER) == [1]

    async def test_counting_again_renews_the_expiry(self, attempts: SqliteAttempts) -> None:
        await attempts.increment(["a"], NOW)
        await attempts.increment(["a"], LATER - 1)
        assert await attempts.counts(["a"], LATER) == [2]

    async def test_expired_counts_go_away_a_few_at_a_time(self, attempts: SqliteAttempts, path: Path) -> None:
        await attempts.increment([str(n) for n in range(3 * SWEEP)], NOW)
        await attempts.increment(["a"], LATER)
        assert rows(path) == 2 * SWEEP
        for _ in range(2):
            await attempts.increment(["a"], LATER)
        assert rows(path) == 1

    def test_two_processes_count_every_increment(self, path: Path) -> None:
        command = [sys.executable, "-c", INCREMENT, str(path)]
        processes = [subprocess.Popen(command) for _ in range(2)]
        assert [process.wait() for process in processes] == [0, 0]
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT count FROM attempt_counts").fetchall() == [(1000,)]

    async def test_a_span_survives_the_crash_of_its_owner(self, path: Path, reopened: Reopened) -> None:
        crashed = subprocess.run([sys.executable, "-c", CRASH, str(path)], check=False)
        assert crashed.returncode == -signal.SIGKILL
        assert await lane(await reopened()) == [SPAN]

    @pytest.mark.parametrize("first", ["the other", "attempts"])
    async def test_it_shares_a_file_with_other_tables(self, path: Path, reopened: Reopened, first: str) -> None:
        other = Database(str(path), ["CREATE TABLE letters (id TEXT);", "CREATE TABLE jobs (id TEXT);"])
        if first == "the other":
            await other.open()
        attempts = await reopened()
        await other.open()
        await attempts.turn(start=[SPAN])
        await other.close()
        assert await lane(await reopened()) == [SPAN]

    async def test_a_file_of_a_newer_redrive_is_refused(self, path: Path, attempts: SqliteAttempts) -> None:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE redrive_parts SET version = 99")
        newer = SqliteAttempts(path)
        with pytest.raises(SchemaMismatch):
            await newer.open()
        await newer.close()

    async def test_a_file_that_is_no_database_has_a_named_error(self, path: Path) -> None:
        path.write_bytes(b"this is not a database" * 100)
        attempts = SqliteAttempts(path)
        with pytest.raises(AttemptsUnavailable, match=r"attempts\.db"):
            await attempts.open()
        await attempts.close()

    async def test_a_folder_that_cannot_be_made_has_a_named_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        attempts = SqliteAttempts(tmp_path / "file" / "attempts.db")
        with pytest.raises(AttemptsUnavailable):
            await attempts.open()
        await attempts.close()

    async def test_a_failed_turn_leaves_nothing_half_done(self, attempts: SqliteAttempts) -> None:
        await attempts.turn(start=[SPAN])
        too_large = 2**70
        with pytest.raises(OverflowError):
            await attempts.turn(start=[type(SPAN)("b", "orders", "billing", too_large, ())], finish=[SPAN.id])
        assert await lane(attempts) == [SPAN]
