"""What redrive itself costs, on the backends that need no server."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import sqlite3
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from msgspec.structs import replace

from bench.harness import Measure, limit, measured, race
from bench.nothing import NothingBroker, batches
from redrive import Redrive
from redrive.brokers.base import Ack, Batch, Broker, Subscription
from redrive.brokers.embedded import EmbeddedBroker
from redrive.classify import failure_of, rules
from redrive.consumer import Consumer, judge
from redrive.handlers import handler_for
from redrive.letter import Attempt, Environment, Failure, Kind, Letter, Reason, identity
from redrive.message import Copy, Message
from redrive.retry import Policy, decide
from redrive.stores.sqlite import SqliteStore, file

SOURCE = "orders"
PREFETCH = 100
"""What a consumer asks for by default; the bare loop asks for the same."""


# ---- the runtime


@race("embedded.runtime", subject="runtime", against="bare loop on the same broker", target=0.7, unit="messages/s")
def runtime(number: int = 10_000) -> Sequence[Measure]:
    """Attempts, time-outs, metrics and reports are on, and every commit is synced; each run is a group of its own."""
    folder = _folder()
    groups = (f"group-{n}" for n in itertools.count())
    asyncio.run(_publish(folder / "broker.db", number))

    async def subject() -> float:
        app = Redrive(f"embedded://{folder}/broker.db")
        async with app:
            return number / await _work_through(app, next(groups), number, perf_counter)

    async def peer() -> float:
        broker = EmbeddedBroker(str(folder / "broker.db"))
        await broker.open()
        try:
            begin = perf_counter()
            await _bare_loop(broker, next(groups), number)
            return number / (perf_counter() - begin)
        finally:
            await broker.close()

    return measured(subject), measured(peer)


@limit("embedded.overhead", subject="runtime on a broker that costs nothing", target=5.0, unit="us CPU/message")
def overhead(number: int = 50_000) -> Sequence[Measure]:
    """The CPU time of the whole process; all parts but the broker are real."""
    prepared = batches(number, size=500, source=SOURCE, group="overhead", body=bytes(1024))

    async def subject() -> float:
        app = Redrive("embedded://:memory:", defaults={"batch": 500})
        app.parts = replace(app.parts, broker=NothingBroker(prepared))
        with _frozen():
            async with app:
                return await _work_through(app, "overhead", number, process_time) / number * 1e6

    return [_least(measured(subject), runs=3)]


async def _work_through(app: Redrive, group: str, number: int, clock: Callable[[], float]) -> float:
    """Seconds by this clock, from the subscription until every message is handled and settled."""
    left = number

    @app.consumer(SOURCE, group=group)
    async def handle(message: Message) -> None:
        nonlocal left
        left -= 1
        if not left:
            app.stop()

    begin = clock()
    await app.work()
    return clock() - begin


async def _bare_loop(broker: Broker, group: str, number: int) -> None:
    stream = await broker.subscribe(Subscription((SOURCE,), group, batch=PREFETCH, in_flight=PREFETCH * 4))
    async for event in stream:
        if isinstance(event, Batch):
            await broker.settle([Ack(delivery) for delivery in event.deliveries])
            number -= len(event.deliveries)
            if not number:
                break
    await stream.aclose()


async def _publish(path: Path, number: int) -> None:
    broker = EmbeddedBroker(str(path))
    await broker.open()
    for start in range(0, number, 1000):
        await broker.publish([Copy(SOURCE, str(n).encode(), os.urandom(1024)) for n in range(start, start + 1000)])
    await broker.close()


# ---- letters


@race("embedded.letters", subject="store.letters.file", against="raw inserts of the same rows", target=0.7,
      unit="letters/s")  # fmt: skip
def letters(number: int = 5_000, batch: int = 500) -> Sequence[Measure]:
    folder = _folder()
    names = (folder / f"letters-{n}.db" for n in itertools.count())
    slices = [[_letter(n) for n in range(start, start + batch)] for start in range(0, number, batch)]
    filed = next(names)
    asyncio.run(_file(filed, slices))
    raw = _rows(filed, batch)

    def peer() -> float:
        path = next(names)
        asyncio.run(_file(path, []))
        return number / _insert(path, raw)

    async def subject() -> float:
        return number / await _file(next(names), slices)

    return measured(subject), peer


def _letter(number: int) -> Letter:
    message = Message("embedded", SOURCE, number % 4, str(number), 1_700_000_000_000, b"key", os.urandom(2048))
    stack = 'File "/app/orders.py", line 42, in handle\n    await charge(order)\n' * 4
    why = f"the card of order {number} was declined by the bank"
    return Letter(
        id=identity(message, "billing"), message=message, group="billing", kind=Kind.TRANSIENT,
        reason=Reason.MAX_RETRIES_EXCEEDED, error_type="orders.CardDeclined", error_message=why,
        first_attempt_at=1_700_000_000_000, last_attempt_at=1_700_000_007_000, attempts=3, stack=stack,
        handler="handle", message_id=message.id, attributes={"order": str(number), "region": "eu"},
        history=tuple(Attempt(run, 1_700_000_000_000, "orders.CardDeclined", why) for run in (1, 2, 3)),
        environment=Environment("host", 1, "orders", "1.2.3", "production"),
    )  # fmt: skip


async def _file(path: Path, slices: Sequence[Sequence[Letter]]) -> float:
    store = SqliteStore(str(path))
    await store.open()
    begin = perf_counter()
    for one in slices:
        await store.letters.file(one, 1_700_000_008_000)
    took = perf_counter() - begin
    await store.close()
    return took


Statements = list[tuple[str, list[tuple[Any, ...]]]]
_BY_SEQ = {"identities": "seq", "letters": "seq", "bodies": "seq", "occurrences": "seq", "attributes": "seq",
           "letters_text": "rowid"}  # fmt: skip


def _rows(path: Path, batch: int) -> list[Statements]:
    """What filing wrote, batch by batch, as plain inserts."""
    with closing(sqlite3.connect(path)) as connection:
        last = connection.execute("SELECT max(seq) FROM identities").fetchone()[0]
        return [
            [_dump(connection, table, start, start + batch) for table in _BY_SEQ] for start in range(1, last + 1, batch)
        ]


def _dump(connection: sqlite3.Connection, table: str, start: int, end: int) -> tuple[str, list[tuple[Any, ...]]]:
    columns = "rowid, words" if table == "letters_text" else "*"
    sql = f"SELECT {columns} FROM {table} WHERE {_BY_SEQ[table]} >= ? AND {_BY_SEQ[table]} < ?"
    rows = connection.execute(sql, (start, end)).fetchall()
    into = "letters_text (rowid, words)" if table == "letters_text" else table
    return f"INSERT INTO {into} VALUES ({', '.join('?' * len(rows[0]))})", rows


def _insert(path: Path, raw: Sequence[Statements]) -> float:
    """The schema, page size and journal of the store, written by sqlite3 and nothing else."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for pragma in ("synchronous = FULL", "foreign_keys = ON", "cache_size = -32768",
                       f"wal_autocheckpoint = {file.CHECKPOINT_PAGES}"):  # fmt: skip
            connection.execute(f"PRAGMA {pragma}")
        begin = perf_counter()
        for statements in raw:
            connection.execute("BEGIN IMMEDIATE")
            for sql, rows in statements:
                connection.executemany(sql, rows)
            connection.execute("COMMIT")
        return perf_counter() - begin


# ---- decisions


@limit("embedded.decision", subject="failure_of and judge, an ordinary exception", target=60.0, unit="us CPU")
def decision() -> Sequence[Measure]:
    async def handle(message: Message) -> None: ...

    own = rules(permanent=[KeyError, "orders.OutOfStock"], transient=[ConnectionError])
    consumer = Consumer(name="orders", sources=(SOURCE,), group="billing", handler=handler_for(handle), rules=own)
    message = Message("embedded", SOURCE, 0, "7", 1_700_000_000_000, b"key", bytes(1024))
    environment = Environment("host", 1, "orders")
    ticket = consumer.first_ticket(message, 1_700_000_000_000)
    error = _raised()

    def one() -> None:
        judge(consumer, environment, message, ticket, failure_of(error, own), 1_700_000_001_000)

    return [_least(lambda: _cost(one, 1_000))]


@limit("embedded.decide", subject="retry.decide alone", target=2.0, unit="us CPU")
def decide_alone() -> Sequence[Measure]:
    policy, failure = Policy(), Failure(Kind.TRANSIENT, "ConnectionError", "refused")
    return [_least(lambda: _cost(lambda: decide(policy, failure, 1, 1_700_000_001_000, 1_700_000_000_000), 5_000))]


def _raised() -> Exception:
    def charge(order: int) -> None:
        raise ConnectionError(f"order {order}: connection to payments.internal:443 refused")

    try:
        charge(7)
    except ConnectionError as error:
        return error
    raise AssertionError


def _cost(call: Callable[[], Any], times: int) -> float:
    begin = process_time()
    for _ in range(times):
        call()
    return (process_time() - begin) / times * 1e6


# ---- starting

REDRIVE = str(Path(sys.executable).with_name("redrive"))


@limit("embedded.help", subject="redrive --help", target=150.0, unit="ms", rounds=15)
def help_text() -> Sequence[Measure]:
    def subject() -> float:
        begin = perf_counter()
        subprocess.run([REDRIVE, "--help"], check=True, stdout=subprocess.DEVNULL)
        return (perf_counter() - begin) * 1e3

    return [subject]


@limit("embedded.serve", subject="redrive serve until /health answers", target=2.0, unit="s")
def serve() -> Sequence[Measure]:
    folder = _folder()
    config = folder / "redrive.toml"
    config.write_text(f'broker = "embedded://{folder}/broker.db"\nstore = "sqlite://{folder}/letters.db"\n')

    def subject() -> float:
        begin = perf_counter()
        command = [REDRIVE, "serve", "--port", "0", "--config", str(config)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            try:
                assert process.stdout is not None
                address = process.stdout.readline().split()[-1]
                _until_it_answers(address.replace("/api/v1", "/health"))
                return perf_counter() - begin
            finally:
                process.terminate()
                process.communicate()

    return [subject]


def _until_it_answers(url: str) -> None:
    deadline = perf_counter() + 30
    while perf_counter() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                answer.read()
                return
        except urllib.error.URLError:
            continue
    raise TimeoutError(url)


# ---- helpers

_folders: list[tempfile.TemporaryDirectory[str]] = []
"""Kept until the process ends."""


def _folder() -> Path:
    """A folder on a real disk, beside the code: in memory a sync would cost nothing."""
    _folders.append(
        tempfile.TemporaryDirectory(prefix=".bench-", dir=Path(__file__).parent, ignore_cleanup_errors=True)
    )
    return Path(_folders[-1].name)


def _least(measure: Measure, runs: int = 5) -> Measure:
    """The least of some runs: on a shared CPU even CPU time grows with what others do, and never shrinks."""
    return lambda: min(measure() for _ in range(runs))


@contextmanager
def _frozen() -> Iterator[None]:
    """What the benchmark prepared must not be walked by the collector in the subject's time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
