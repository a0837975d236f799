"""What only a file can suffer: other processes, kill -9, full and read-only disks, other versions, edits by hand."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from redrive import sqlite as database
from redrive.errors import SchemaMismatch, StoreUnavailable
from redrive.letter import Act, Kind, Letter, Reason, State, identity
from redrive.message import Message
from redrive.query import Filter
from redrive.stores.sqlite import SqliteStore, file, rows, schema
from redrive.stores.sqlite.search import search

NOW = 1_700_000_000_000
ANN = Act("ann", "why not")
BATCH = 25
NOBODY = 65534


def letter(n: int, **changes: Any) -> Letter:
    message = Message("kafka", "orders", 0, str(n), NOW, b"k", b"x" * 500, ())
    facts = {
        "kind": Kind.TRANSIENT,
        "reason": Reason.PERMANENT,
        "error_type": "TimeoutError",
        "error_message": "no answer",
        "first_attempt_at": NOW,
        "last_attempt_at": NOW,
        "attempts": 1,
    }
    return Letter(id=identity(message, "g"), message=message, group="g", **(facts | changes))


def batch(n: int) -> list[Letter]:
    return [letter(n * BATCH + i) for i in range(BATCH)]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "letters.db")


@pytest.fixture
async def store(path: str) -> Any:
    store = SqliteStore(path)
    await store.open()
    yield store
    await store.close()


def sql(path: str, statement: str) -> list[tuple[Any, ...]]:
    """What a person does with the sqlite3 tool."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return connection.execute(statement).fetchall()


async def on_writer(store: SqliteStore, statement: str) -> Any:
    writer = store._file._writer
    assert writer is not None
    return await writer.read(lambda c: c.execute(statement).fetchall())


# --- other processes

WRITER = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_sqlite_store import ANN, NOW, SqliteStore, State, batch

async def main(path, first, last):
    store = SqliteStore(path)
    await store.open()
    new = 0
    for n in range(first, last):
        filed = await store.letters.file(batch(n), NOW + n)
        new += sum(one.filing == "new" for one in filed)
        await store.letters.move([filed[0].id], State.PENDING, State.DISCARDED, ANN, NOW)
        print(n, flush=True)
    await store.close()
    print("new", new)

asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


def writer(path: str, first: int, last: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, path, str(first), str(last)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def test_processes_share_one_file_and_no_letter_is_filed_twice(path: str) -> None:
    writers = [writer(path, first, first + 20) for first in (0, 10, 20)]
    said = [one.communicate(timeout=60)[0] for one in writers]
    assert [one.returncode for one in writers] == [0, 0, 0]
    new = sum(int(text.split()[-1]) for text in said)
    store = SqliteStore(path)
    await store.open()
    assert new == (await store.letters.count(Filter())).count == 40 * BATCH
    assert len(await store.audit(1000)) == 40
    assert await store.verify_audit() is None
    await store.close()


async def test_kill_9_in_the_middle_leaves_whole_batches_and_every_one_that_was_promised(path: str) -> None:
    one = writer(path, 0, 100_000)
    assert one.stdout
    promised = [one.stdout.readline() for _ in range(30)][-1]
    one.send_signal(signal.SIGKILL)
    rest, _ = one.communicate(timeout=30)
    last = int((rest.split() or [promised])[-1])
    assert sql(path, "PRAGMA integrity_check") == [("ok",)]
    assert sql(path, "INSERT INTO letters_text (letters_text) VALUES ('integrity-check')") == []
    store = SqliteStore(path)
    await store.open()
    count = (await store.letters.count(Filter())).count
    assert count % BATCH == 0
    assert count >= (last + 1) * BATCH
    for table in ("identities", "bodies", "occurrences", "letters_text"):
        assert sql(path, f"SELECT count(*) FROM {table}") == [(count,)]
    assert await store.verify_audit() is None
    await store.close()


async def test_two_stores_on_one_file_never_both_win(store: SqliteStore, path: str) -> None:
    other = SqliteStore(path)
    await other.open()
    every = [one.id for one in await store.letters.file(batch(0), NOW)]
    moves = (one.letters.move(every, State.PENDING, State.RESOLVED, ANN, NOW) for one in (store, other, store, other))
    assert sorted(map(len, await asyncio.gather(*moves))) == [0, 0, 0, BATCH]
    await store.jobs.create(every, ANN, NOW)
    leases = await asyncio.gather(store.jobs.lease("one", 60, NOW), other.jobs.lease("two", 60, NOW))
    assert leases.count(None) == 1
    await other.close()


async def test_a_writer_that_holds_the_file_too_long_is_named_and_reads_go_on(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.01)
    store = SqliteStore(path, name="main")
    await store.open()
    await store.letters.file(batch(0), NOW)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="locked by another process") as caught:
            await store.letters.file(batch(1), NOW)
        assert caught.value.store == "main"
        assert (await store.letters.count(Filter())).count == BATCH
        other.execute("ROLLBACK")
    await store.letters.file(batch(1), NOW)
    await store.close()


async def test_lists_do_not_wait_behind_a_long_write(store: SqliteStore) -> None:
    await store.letters.file(batch(0), NOW)
    go_on = threading.Event()
    long = asyncio.create_task(store._file.write(lambda _: go_on.wait(30)))
    await asyncio.sleep(0)
    assert len((await store.letters.page(Filter())).rows) == BATCH
    assert not long.done()
    go_on.set()
    assert await long


async def test_a_caller_that_gives_up_leaves_all_or_nothing(store: SqliteStore) -> None:
    filing = asyncio.create_task(store.letters.file(batch(0), NOW))
    await asyncio.sleep(0)
    filing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await filing
    await store.letters.file(batch(1), NOW)
    assert (await store.letters.count(Filter())).count in (BATCH, 2 * BATCH)


# --- disks


async def test_a_full_disk_writes_nothing_and_is_forgotten_once_there_is_room(store: SqliteStore) -> None:
    await store.letters.file(batch(0), NOW)
    [[pages]] = await on_writer(store, "PRAGMA page_count")
    await on_writer(store, f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(StoreUnavailable, match="the disk is full"):
        await store.letters.file([letter(n) for n in range(1000, 2000)], NOW)
    assert (await store.letters.count(Filter())).count == BATCH
    await on_writer(store, "PRAGMA max_page_count = 1000000")
    await store.letters.file([letter(n) for n in range(1000, 2000)], NOW)
    assert (await store.letters.count(Filter())).count == BATCH + 1000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


async def test_a_disk_that_really_fills_up(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1_500_000))
    store = SqliteStore(str(small_disk / "letters.db"))
    await store.open()
    filings = (store.letters.file(batch(n), NOW) for n in range(100))
    refused = [one for one in await asyncio.gather(*filings, return_exceptions=True) if isinstance(one, Exception)]
    assert {str(one) for one in refused} == {"store sqlite is unavailable: the disk is full (database or disk is full)"}
    count = (await store.letters.count(Filter())).count
    assert count == (100 - len(refused)) * BATCH
    ballast.unlink()
    await store.letters.file(batch(100), NOW)
    assert (await store.letters.count(Filter())).count == count + BATCH
    await store.close()
    assert sql(str(small_disk / "letters.db"), "PRAGMA integrity_check") == [("ok",)]


async def test_opening_on_a_full_disk_says_so_and_leaves_no_half_schema(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(3 * 1024 * 1024 - 100_000))
    store = SqliteStore(str(small_disk / "letters.db"))
    with pytest.raises(StoreUnavailable):
        await store.open()
    (small_disk / "ballast").unlink()
    await store.open()
    await store.letters.file(batch(0), NOW)
    await store.close()


@pytest.fixture
def read_only() -> Iterator[str]:
    """A folder nobody may write to; root would write all the same, so root steps down."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "letters.db"
        asyncio.run(filed(str(path)))
        path.chmod(0o444)
        path.parent.chmod(0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(NOBODY)
        yield str(path)
        if root:
            os.seteuid(0)
        path.parent.chmod(0o755)


async def filed(path: str) -> None:
    store = SqliteStore(path)
    await store.open()
    await store.letters.file(batch(0), NOW)
    await store.close()


async def test_a_read_only_file_is_refused_by_name(read_only: str) -> None:
    with pytest.raises(StoreUnavailable, match=r"read-only|cannot be opened"):
        await SqliteStore(read_only).open()


async def test_a_file_that_becomes_read_only_is_named(store: SqliteStore) -> None:
    await store.letters.file(batch(0), NOW)
    await on_writer(store, "PRAGMA query_only = ON")
    with pytest.raises(StoreUnavailable, match="read-only"):
        await store.letters.file(batch(1), NOW)
    await on_writer(store, "PRAGMA query_only = OFF")
    await store.letters.file(batch(1), NOW)


async def test_a_file_that_is_no_database_and_a_folder_that_cannot_be_made(path: str) -> None:
    Path(path).write_bytes(b"certainly not a database, far from it" * 100)
    for bad, why in ((path, "not a database"), (f"{path}/below/letters.db", "exists|directory")):
        with pytest.raises(StoreUnavailable, match=why):
            await SqliteStore(bad).open()


# --- versions


async def test_a_newer_schema_is_not_touched(path: str) -> None:
    await filed(path)
    sql(path, "PRAGMA user_version = 99")
    with pytest.raises(SchemaMismatch) as caught:
        await SqliteStore(path).open()
    assert (caught.value.found, caught.value.known) == (99, len(schema.migrations()))


async def test_a_migration_happens_whole_or_not_at_all(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await filed(path)
    known = schema.migrations()
    steps = ["CREATE TABLE later (a INTEGER) STRICT;\nINSERT INTO nowhere VALUES (1);\n"]
    monkeypatch.setattr(file, "migrations", lambda: known + steps)
    store = SqliteStore(path)
    with pytest.raises(StoreUnavailable, match="nowhere"):
        await store.open()
    assert sql(path, "PRAGMA user_version") == [(len(known),)]
    assert sql(path, "SELECT name FROM sqlite_master WHERE name = 'later'") == []
    steps[0] = "CREATE TABLE later (a INTEGER) STRICT;\n"
    await store.open()
    assert (await store.letters.count(Filter())).count == BATCH
    await store.close()


async def test_a_store_opened_again_has_everything(path: str) -> None:
    await filed(path)
    store = SqliteStore(path)
    for _ in range(2):
        await store.open()
        assert (await store.letters.count(Filter(text="timeout"))).count == BATCH
        await store.close()


async def test_a_file_made_with_full_text_search_needs_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await filed(path)
    monkeypatch.setattr(file, "has_fts5", lambda: False)
    with pytest.raises(StoreUnavailable, match="FTS5"):
        await SqliteStore(path).open()


async def test_a_file_made_without_full_text_search_is_still_searched(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as old_build:
        old_build.setattr(schema, "has_fts5", lambda: False)
        await filed(path)
    store = SqliteStore(path)
    await store.open()
    await store.letters.file([letter(9999, error_message="needle")], NOW)
    assert (await store.letters.count(Filter(text="time"))).count == BATCH + 1
    assert (await store.letters.count(Filter(text="needle"))).count == 1
    await store.close()


async def test_an_old_sqlite_is_refused_before_it_touches_the_file(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 31, 0))
    with pytest.raises(StoreUnavailable, match="too old"):
        await SqliteStore(path).open()
    assert not Path(path).exists()


# --- what is in the file


@pytest.mark.parametrize(
    "wanted",
    [
        Filter(),
        Filter(since=NOW, until=NOW + 1),
        Filter(states=(State.PENDING,)),
        Filter(source="orders"),
        Filter(source="ord*"),
        Filter(text="timeout"),
        Filter(kind=Kind.CRASH),
        Filter(error_type="TimeoutError"),
        Filter(handler="charge"),
        Filter(attributes={"order": "7"}),
        Filter(attributes={"order": "7", "country": "de"}, states=(State.PENDING,)),
    ],
)
@pytest.mark.parametrize("cursor", [None, "MTcwMDAwMDAwMDAwMC43"])
async def test_lists_walk_an_index_and_never_sort(
    store: SqliteStore, path: str, wanted: Filter, cursor: str | None
) -> None:
    query = search(wanted, indexed=True)
    query.below(cursor)
    with closing(sqlite3.connect(path)) as connection:
        statement = "EXPLAIN QUERY PLAN " + query.select(rows.SUMMARY, ordered=True)
        plan = [row[3] for row in connection.execute(statement, (*query.values, 50))]
    assert "INDEX" in plan[0] or "PRIMARY KEY" in plan[0]
    assert not [step for step in plan if "TEMP B-TREE" in step]
    assert not [
        step for step in plan if step.startswith("SCAN l") and "USING INDEX" not in step and "_text" not in step
    ]


async def test_at_most_six_indexes_slow_down_filing(store: SqliteStore, path: str) -> None:
    assert sum(not row[4] for row in sql(path, "PRAGMA index_list(letters)")) <= 6


async def test_masked_values_are_in_no_search_table(store: SqliteStore, path: str) -> None:
    await store.letters.file([letter(0, attributes={"iban": "DE4711"}, masked=("iban",))], NOW)
    assert "de4711" not in sql(path, "SELECT words FROM letters_text")[0][0]
    assert b"DE4711" not in sql(path, "SELECT digest FROM attributes")[0][0]


@pytest.mark.parametrize(
    ("edit", "broken"),
    [
        ("UPDATE audit SET why = 'innocent' WHERE number = 3", 3),
        ("UPDATE audit SET who = who || why, why = '' WHERE number = 2", 2),
        ("DELETE FROM audit WHERE number = 4", 4),
        ("DELETE FROM audit WHERE number = 1", 1),
        ("UPDATE audit SET hash = '' WHERE number = 5", 5),
    ],
)
async def test_an_edit_of_the_audit_trail_shows(store: SqliteStore, path: str, edit: str, broken: int) -> None:
    filed = await store.letters.file(batch(0), NOW)
    await store.letters.move([one.id for one in filed], State.PENDING, State.DISCARDED, ANN, NOW)
    assert await store.verify_audit() is None
    sql(path, edit)
    assert await store.verify_audit() == broken
