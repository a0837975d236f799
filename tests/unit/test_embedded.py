"""What is special to the embedded broker: many processes on one file, kill -9, rebalancing, disks that fail."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from redrive.brokers.base import (
    Ack,
    Assigned,
    Batch,
    Bury,
    Confirmed,
    Delivery,
    Lane,
    LeaseLost,
    Refused,
    Release,
    RetryAt,
    Revoked,
    Settled,
    Settlement,
    SourceSpec,
    Stream,
    Subscription,
)
from redrive.brokers.embedded import EmbeddedBroker
from redrive.errors import BrokerUnavailable, SchemaMismatch
from redrive.message import Copy
from redrive.sqlite import MEMORY

PATIENCE = 40.0


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "broker.db")


@asynccontextmanager
async def opened(path: str, **options: object) -> AsyncIterator[EmbeddedBroker]:
    broker = EmbeddedBroker(path, **options)
    await broker.open()
    try:
        yield broker
    finally:
        await broker.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


async def take(stream: Stream, count: int) -> list[Delivery]:
    taken: list[Delivery] = []
    async with asyncio.timeout(PATIENCE):
        while len(taken) < count:
            event = await stream.__anext__()
            if isinstance(event, Batch):
                taken += event.deliveries
    return taken


class Reader:
    """Reads a stream in the background; keeps its lanes and its deliveries, and acks when told to."""

    def __init__(self, broker: EmbeddedBroker, stream: Stream, *, ack: bool = True) -> None:
        self.broker, self.stream, self.ack = broker, stream, ack
        self.lanes: set[Lane] = set()
        self.revoked: list[Revoked] = []
        self.deliveries: list[Delivery] = []
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self.stream:
            match event:
                case Assigned(lanes=lanes):
                    self.lanes |= set(lanes)
                case Revoked(lanes=lanes):
                    self.lanes -= set(lanes)
                    self.revoked.append(event)
                case Batch(deliveries=deliveries):
                    self.deliveries += deliveries
                    if self.ack:
                        await self.broker.settle([Ack(d) for d in deliveries])


WORKER = """
import asyncio, sys
from redrive.brokers.base import Ack, Batch, Bury, Subscription
from redrive.brokers.embedded import EmbeddedBroker
from redrive.message import Copy

async def main(path, notes):
    broker = EmbeddedBroker(path, lease_seconds=1.5)
    await broker.open()
    stream = await broker.subscribe(Subscription(("work",), "g", batch=20, in_flight=20))
    async for event in stream:
        if isinstance(event, Batch):
            with open(notes, "ab") as file:
                file.write(b"".join(d.message.body + b"\\n" for d in event.deliveries))
            await broker.settle([
                Ack(d) if int(d.message.body) % 2 else Bury(d, Copy("dead", d.message.key, d.message.body))
                for d in event.deliveries
            ])

asyncio.run(main(*sys.argv[1:]))
"""


@contextmanager
def workers(path: str, notes: list[Path]) -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [subprocess.Popen([sys.executable, "-c", WORKER, path, str(note)]) for note in notes]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


async def test_three_processes_share_one_file_and_a_killed_one_loses_nothing(path: str, tmp_path: Path) -> None:
    notes = [tmp_path / f"notes{i}" for i in range(3)]
    async with opened(path, lease_seconds=1.5) as broker:
        await broker.ensure([SourceSpec("work", 6), SourceSpec("dead", 2)])
        sent = 0
        with workers(path, notes) as processes:
            async with asyncio.timeout(PATIENCE):
                while not all(note.exists() for note in notes):
                    await broker.publish([Copy("work", b"k%d" % i, b"%d" % i) for i in range(sent, sent + 50)])
                    sent += 50
                    await asyncio.sleep(0.01)
                await broker.publish([Copy("work", b"k%d" % i, b"%d" % i) for i in range(sent, sent + 2000)])
                sent += 2000
                size = notes[0].stat().st_size
                while notes[0].stat().st_size == size:
                    await asyncio.sleep(0.001)
                processes[0].send_signal(signal.SIGKILL)
                while (await broker.depth("work", "g")).count:
                    await asyncio.sleep(0.02)
            assert [process.poll() for process in processes[1:]] == [None, None]
        handled = Counter(int(line) for note in notes for line in note.read_text().split())
        assert set(handled) == set(range(sent))
        assert sum(handled.values()) - sent <= 20, "only what the dead one had in flight came twice"
        stream = await broker.subscribe(Subscription(("dead",), "collector", in_flight=sent))
        letters = Counter(int(d.message.body or b"") for d in await take(stream, (sent + 1) // 2))
        assert letters == Counter(range(0, sent, 2)), "a burial is atomic, even under kill -9"


async def test_two_objects_on_one_file_notice_each_other(path: str) -> None:
    async with opened(path) as one, opened(path) as two:
        reader = Reader(one, await one.subscribe(Subscription(("t",), "g")))
        await two.publish([Copy("t", b"k", b"v")])
        await until(lambda: len(reader.deliveries) == 1)
        other = Reader(two, await two.subscribe(Subscription(("t",), "g")))
        await until(lambda: len(reader.lanes) == len(other.lanes) == 2)
        assert not reader.lanes & other.lanes
        await other.stream.aclose()
        await until(lambda: len(reader.lanes) == 4)


async def test_lanes_are_shared_out_so_that_nobody_idles_while_another_has_two_more(path: str) -> None:
    async with opened(path, partitions=8) as broker:
        readers = [Reader(broker, await broker.subscribe(Subscription(("t",), "g"))) for _ in range(3)]
        await until(lambda: sorted(len(r.lanes) for r in readers) == [2, 3, 3])
        assert len(set().union(*(r.lanes for r in readers))) == 8
        await readers[0].stream.aclose()
        await until(lambda: [len(r.lanes) for r in readers[1:]] == [4, 4])


async def test_a_busy_lane_is_handed_on_after_one_lease_and_its_old_lease_is_void(path: str) -> None:
    async with opened(path, partitions=2, lease_seconds=0.6) as broker:
        stuck = Reader(broker, await broker.subscribe(Subscription(("t",), "g")), ack=False)
        await broker.publish([Copy("t", None, b"%d" % i) for i in range(2)])
        await until(lambda: len(stuck.deliveries) == 2)
        heir = Reader(broker, await broker.subscribe(Subscription(("t",), "g")))
        await until(lambda: len(heir.deliveries) == 1)
        assert [r.clean for r in stuck.revoked] == [False]
        moved = heir.deliveries[0].message.id
        results = await broker.settle([Ack(d) for d in stuck.deliveries])
        assert [type(r) for d, r in zip(stuck.deliveries, results, strict=True) if d.message.id == moved] == [LeaseLost]
        assert sorted(type(r).__name__ for r in results) == ["LeaseLost", "Settled"]


async def test_a_settle_whose_caller_was_cancelled_still_makes_room(path: str) -> None:
    async with opened(path, partitions=1) as broker:
        stream = await broker.subscribe(Subscription(("t",), "g", batch=5, in_flight=5))
        await broker.publish([Copy("t", b"k", b"%d" % i) for i in range(10)])
        settling = asyncio.ensure_future(broker.settle([Ack(d) for d in await take(stream, 5)]))
        await asyncio.sleep(0)
        settling.cancel()
        await asyncio.gather(settling, return_exceptions=True)
        assert [d.message.body for d in await take(stream, 5)] == [b"5", b"6", b"7", b"8", b"9"]


async def test_everything_survives_a_reopening_of_the_file(path: str) -> None:
    async with opened(path) as broker:
        await broker.publish([Copy("t", b"k", b"%d" % i) for i in range(4)])
        stream = await broker.subscribe(Subscription(("t",), "g"))
        first, *_ = await take(stream, 4)
        await broker.settle([Ack(first)])
    async with opened(path) as broker:
        stream = await broker.subscribe(Subscription(("t",), "g"))
        assert [d.message.body for d in await take(stream, 3)] == [b"1", b"2", b"3"]


async def test_memory_forgets_and_says_so(path: str) -> None:
    assert EmbeddedBroker(path).can.durable
    assert not EmbeddedBroker(MEMORY).can.durable
    async with opened(MEMORY) as broker:
        await broker.publish([Copy("t", b"k", b"v")])
    async with opened(MEMORY) as broker:
        assert (await broker.depth("t", "g")).count == 0


async def test_a_burst_of_large_bodies_comes_in_small_batches(path: str) -> None:
    async with opened(path, partitions=1) as broker:
        await broker.publish([Copy("t", b"k", bytes(8 << 20)) for _ in range(6)])
        stream = await broker.subscribe(Subscription(("t",), "g"))
        assert isinstance(await stream.__anext__(), Assigned)
        event = await stream.__anext__()
        assert isinstance(event, Batch)
        assert len(event.deliveries) == 4
        assert len(await take(stream, 2)) == 2


@pytest.mark.parametrize("name", ["", "a*", "\ud800"])
async def test_a_destination_that_can_be_no_topic_is_refused(path: str, name: str) -> None:
    async with opened(path) as broker:
        refused, confirmed = await broker.publish([Copy(name, b"k", b"v"), Copy("t", b"k", b"v")])
        assert isinstance(refused, Refused)
        assert isinstance(confirmed, Confirmed)


async def test_header_names_that_were_no_utf8_come_back(path: str) -> None:
    headers = ((b"\xff\xfe".decode("utf-8", "surrogateescape"), b"1"), ("\ud800", b"2"))
    async with opened(path) as broker:
        await broker.publish([Copy("t", b"k", b"v", headers)])
        [delivery] = await take(await broker.subscribe(Subscription(("t",), "g")), 1)
        assert delivery.message.headers == headers


class Chaos:
    """Consumers that come, go silent, leave and settle at random; every message must end exactly once."""

    def __init__(self, brokers: list[EmbeddedBroker], total: int, seed: int) -> None:
        self.brokers, self.total, self.dice = brokers, total, random.Random(seed)
        self.ended: Counter[bytes | None] = Counter()
        self.buried: Counter[bytes | None] = Counter()

    def _choice(self, broker: EmbeddedBroker, delivery: Delivery) -> Settlement | None:
        key, body, roll = delivery.message.key, delivery.message.body, self.dice.random()
        if roll < 0.6:
            return Ack(delivery)
        if roll < 0.7:
            return Bury(delivery, Copy("dead", key, body))
        if roll < 0.85:
            return RetryAt(delivery, Copy("t", key, body), broker.clock.now() + self.dice.randrange(50))
        return Release(delivery) if roll < 0.95 else None

    async def consume(self) -> None:
        while self.ended.total() < self.total:
            broker = self.dice.choice(self.brokers)
            stream = await broker.subscribe(Subscription(("t",), "g", batch=20, in_flight=60))
            await self._read_for_a_while(broker, stream)
            if self.dice.random() < 0.2:
                stream._heart.cancel()  # type: ignore[attr-defined]
                await asyncio.sleep(self.dice.random() * 0.5)
            await stream.aclose()

    async def _read_for_a_while(self, broker: EmbeddedBroker, stream: Stream) -> None:
        for _ in range(self.dice.randrange(2, 25)):
            reading = asyncio.ensure_future(stream.__anext__())
            await asyncio.wait([reading], timeout=self.dice.random() * 0.05)
            reading.cancel()
            [event] = await asyncio.gather(reading, return_exceptions=True)
            if isinstance(event, Batch):
                await self._settle(broker, event)

    async def _settle(self, broker: EmbeddedBroker, batch: Batch) -> None:
        chosen = [c for d in batch.deliveries if (c := self._choice(broker, d)) is not None]
        for settlement, result in zip(chosen, await broker.settle(chosen), strict=True):
            if result == Settled() and isinstance(settlement, Ack | Bury):
                self.ended[settlement.delivery.message.body] += 1
                self.buried[settlement.delivery.message.body] += isinstance(settlement, Bury)


@pytest.mark.parametrize("seed", range(3))
async def test_in_any_disorder_every_message_ends_exactly_once(path: str, seed: int) -> None:
    async with opened(path, lease_seconds=0.3) as one, opened(path, lease_seconds=0.3) as two:
        chaos = Chaos([one, two], 1500, seed)
        consumers = [asyncio.create_task(chaos.consume()) for _ in range(4)]
        for start in range(0, 1500, 100):
            await one.publish([Copy("t", b"k%d" % (i % 31), b"%d" % i) for i in range(start, start + 100)])
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*consumers)
        assert chaos.ended == Counter(b"%d" % i for i in range(1500))
        assert (await one.depth("t", "g")).count == 0
        stream = await one.subscribe(Subscription(("dead",), "collector"))
        letters = Counter(d.message.body for d in await take(stream, chaos.buried.total()))
        assert letters == +chaos.buried
        assert (await one.depth("dead", "collector")).count == chaos.buried.total()


# Retention.


async def test_only_what_every_group_has_settled_is_ever_deleted(path: str) -> None:
    async with opened(path, partitions=1, lease_seconds=0.15, retention_seconds=0) as broker:
        await broker.publish([Copy("t", b"k", b"%d" % i) for i in range(10)])
        await broker.publish([Copy("unread", b"k", b"kept")])
        slow = await broker.subscribe(Subscription(("t",), "slow", batch=4))
        fast = Reader(broker, await broker.subscribe(Subscription(("t",), "fast")))
        unsettled = await take(slow, 4)
        await broker.settle([Ack(d) for d in unsettled[:2] + unsettled[3:]])
        await until(lambda: len(fast.deliveries) == 10)
        places = [d.message.coordinates for d in fast.deliveries]
        expected = [False, False] + [True] * 8
        async with asyncio.timeout(PATIENCE):
            while (found := [m is not None for m in await broker.read(places)]) != expected:
                assert found[2:] == expected[2:]
                await asyncio.sleep(0.01)
        await broker.settle([Ack(unsettled[2])])
        await broker.settle([Ack(d) for d in await take(slow, 6)])
        async with asyncio.timeout(PATIENCE):
            while any(await broker.read(places)):
                await asyncio.sleep(0.01)
        assert (await broker.depth("t", "slow")).count == 0
        assert (await broker.depth("t", "newcomer")).count == 0
        assert (await broker.depth("unread", "newcomer")).count == 1
        await broker.publish([Copy("t", b"k", b"after")])
        [after] = await take(slow, 1)
        assert (after.message.position, after.message.body) == ("10", b"after")


async def test_what_is_settled_stays_readable_within_retention(path: str) -> None:
    async with opened(path, lease_seconds=0.06) as broker:
        reader = Reader(broker, await broker.subscribe(Subscription(("t",), "g")))
        # An old timestamp does not make a message old: retention counts from when the broker got it.
        await broker.publish([Copy("t", b"k", b"v", (), timestamp=1)])
        await until(lambda: len(reader.deliveries) == 1)
        beats = await broker.query("test", _lease)
        async with asyncio.timeout(PATIENCE):
            while await broker.query("test", _lease) < beats + 100:
                await asyncio.sleep(0.01)
        assert await broker.read([reader.deliveries[0].message.coordinates]) == [reader.deliveries[0].message]


def _lease(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT max(lease_until) FROM lanes").fetchone()[0])


# Disks that fail.


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """A disk without room: no file may grow beyond this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_full_disk_is_unavailability_and_nothing_is_lost(path: str) -> None:
    async with opened(path, partitions=1) as broker:
        stream = await broker.subscribe(Subscription(("t",), "g", batch=10))
        await broker.publish([Copy("t", b"k", b"%d" % i) for i in range(20)])
        deliveries = await take(stream, 10)
        with files_limited_to(os.path.getsize(path + "-wal")):
            with pytest.raises(BrokerUnavailable):
                await broker.publish([Copy("t", b"k", bytes(1 << 20))])
            with pytest.raises(BrokerUnavailable):
                await broker.settle([Bury(deliveries[0], Copy("dead", b"k", bytes(1 << 20)))])
            with pytest.raises(BrokerUnavailable):
                await stream.__anext__()
        assert await broker.settle([Ack(d) for d in deliveries]) == [Settled()] * 10
        assert [d.message.body for d in await take(stream, 10)] == [b"%d" % i for i in range(10, 20)]
        assert (await broker.depth("dead", "g")).count == 0
        await broker.publish([Copy("t", b"k", b"after")])
        assert (await take(stream, 1))[0].message.body == b"after"


async def test_a_database_at_its_limit_refuses_and_recovers(path: str) -> None:
    async with opened(path, partitions=1) as broker:
        await broker.publish([Copy("t", b"k", b"before")])
        await broker.query("test", lambda c: c.execute("PRAGMA max_page_count = 20").fetchone())
        with pytest.raises(BrokerUnavailable) as caught:
            await broker.publish([Copy("t", b"k", bytes(1 << 20))])
        assert caught.value.broker == "embedded"
        assert "full" in caught.value.why
        await broker.query("test", lambda c: c.execute("PRAGMA max_page_count = 1000000").fetchone())
        await broker.publish([Copy("t", b"k", b"after")])
        deliveries = await take(await broker.subscribe(Subscription(("t",), "g")), 2)
        assert [d.message.body for d in deliveries] == [b"before", b"after"]


async def test_the_heart_survives_a_broken_disk(path: str) -> None:
    async with opened(path, partitions=1, lease_seconds=0.3) as broker:
        stream = await broker.subscribe(Subscription(("t",), "g"))
        await broker.query("test", lambda c: c.execute("PRAGMA query_only = ON"))
        broken_at = await broker.query("test", _lease)
        with pytest.raises(BrokerUnavailable):
            await broker.publish([Copy("t", b"k", b"v")])
        await until(lambda: broker.clock.now() > broken_at)  # the lease has run out unrenewed
        await broker.query("test", lambda c: c.execute("PRAGMA query_only = OFF"))
        async with asyncio.timeout(PATIENCE):
            while await broker.query("test", _lease) <= broken_at:
                await asyncio.sleep(0.01)
        await broker.publish([Copy("t", b"k", b"v")])
        assert len(await take(stream, 1)) == 1


def _unusable(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "garbage.db").write_bytes(b"this is no database, however long it may be" * 100)
    return {
        "read-only folder": "/proc/redrive/broker.db",
        "file as folder": str(tmp_path / "file" / "broker.db"),
        "folder as file": str(tmp_path),
        "garbage": str(tmp_path / "garbage.db"),
    }


@pytest.mark.parametrize("case", ["read-only folder", "file as folder", "folder as file", "garbage"])
async def test_a_path_that_cannot_be_used_is_named(tmp_path: Path, case: str) -> None:
    path = _unusable(tmp_path)[case]
    broker = EmbeddedBroker(path)
    with pytest.raises(BrokerUnavailable) as caught:
        await broker.open()
    assert path in caught.value.what
    assert caught.value.why
    with pytest.raises(BrokerUnavailable):
        await broker.publish([Copy("t", b"k", b"v")])
    await broker.close()


async def test_a_file_of_a_newer_version_is_left_alone(path: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(SchemaMismatch):
        await EmbeddedBroker(path).open()


async def test_a_broker_can_be_closed_twice_and_opened_again(path: str) -> None:
    broker = EmbeddedBroker(path)
    await broker.open()
    await broker.open()
    stream = await broker.subscribe(Subscription(("t",), "g"))
    reading = asyncio.ensure_future(take(stream, 1))
    await asyncio.sleep(0)
    await broker.close()
    await broker.close()
    with pytest.raises(StopAsyncIteration):
        await stream.__anext__()
    await asyncio.gather(reading, return_exceptions=True)
    await broker.open()
    assert isinstance((await broker.publish([Copy("t", b"k", b"v")]))[0], Confirmed)
    await broker.close()
