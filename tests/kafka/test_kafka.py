"""What only Kafka has: transactions, rebalances, frozen processes, topics that vanish, and the whole way through it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType

from lab.server import Running
from redrive import Message, Redrive, codec, wiring
from redrive.brokers.base import (
    Ack,
    Batch,
    Bury,
    Confirmed,
    Delivery,
    Refused,
    Release,
    RetryAt,
    Settled,
    SourceSpec,
    Stream,
    Subscription,
)
from redrive.brokers.kafka import KafkaBroker, KafkaStream
from redrive.clock import SystemClock
from redrive.config import from_mapping
from redrive.errors import BrokerUnavailable, ConfigError, MissingExtra, Unreachable
from redrive.letter import State
from redrive.message import Copy
from redrive.query import Filter

HERE = Path(__file__).parent
PATIENCE = 40.0
KEYS = ("00" * 32,)
GROUP = f"cases-{os.getpid()}"
"""Other processes may run other tests on the same server at the same time."""


def now() -> int:
    return time.time_ns() // 1_000_000


def topic_name(prefix: str = "t") -> str:
    return f"{prefix}.{uuid4().hex[:12]}"


@pytest.fixture
def address(kafka_server: Running) -> str:
    return kafka_server.url.removeprefix("kafka://")


@pytest.fixture
def admin(address: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": address})


@asynccontextmanager
async def opened(address: str, **options: Any) -> AsyncIterator[KafkaBroker]:
    given = {"partitions": 1, "session_seconds": 3.0, "refresh_seconds": 1.0, **options}
    broker = KafkaBroker(address, **given)
    await broker.open()
    try:
        yield broker
    finally:
        await broker.close()


@pytest.fixture
async def broker(address: str) -> AsyncIterator[KafkaBroker]:
    async with opened(address) as broker:
        yield broker


async def subscribed(broker: KafkaBroker, topic: str, **options: Any) -> Stream:
    return await broker.subscribe(Subscription((topic,), GROUP, **options))


async def take(stream: Stream, number: int) -> list[Delivery]:
    taken: list[Delivery] = []
    async with asyncio.timeout(PATIENCE):
        while len(taken) < number:
            event = await stream.__anext__()
            if isinstance(event, Batch):
                taken += event.deliveries
    return taken


async def until(condition: Callable[[], Awaitable[Any]], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (value := await condition()):
        assert time.monotonic() < deadline, f"{what} did not happen"
        await asyncio.sleep(0.05)
    return value


def bodies(deliveries: list[Delivery]) -> list[bytes | None]:
    return [delivery.message.body for delivery in deliveries]


# Offsets.


async def test_aborted_and_marked_offsets_neither_come_nor_stall_the_commit(address: str, broker: KafkaBroker) -> None:
    topic = topic_name()
    await broker.ensure([SourceSpec(topic, 1)])
    await asyncio.to_thread(write_transactions, address, topic)
    stream = await subscribed(broker, topic)
    deliveries = await take(stream, 6)
    assert bodies(deliveries) == [b"0-0", b"0-1", b"2-0", b"2-1", b"4-0", b"4-1"]
    assert int(deliveries[-1].message.position) > len(deliveries)
    assert await broker.settle([Ack(d) for d in reversed(deliveries)]) == [Settled()] * 6
    await stream.aclose()
    await broker.publish([Copy(topic, None, b"next")])
    assert bodies(await take(await subscribed(broker, topic), 1)) == [b"next"]


def write_transactions(address: str, topic: str) -> None:
    producer = Producer({"bootstrap.servers": address, "transactional.id": uuid4().hex})
    producer.init_transactions(20)
    for number in range(5):
        producer.begin_transaction()
        for index in range(2):
            producer.produce(topic, b"%d-%d" % (number, index))
        producer.flush()
        (producer.abort_transaction if number % 2 else producer.commit_transaction)(20)


async def test_a_kill_while_one_of_32_hangs_leaves_the_commit_at_that_one(address: str, broker: KafkaBroker) -> None:
    topic = topic_name()
    await broker.ensure([SourceSpec(topic, 1)])
    await broker.publish([Copy(topic, b"k", b"%d" % i) for i in range(40)])
    service = await program("slow_service.py", address, topic, GROUP)
    try:
        for _ in range(39):
            await line_of(service)
        depth = await until(lambda: reached(broker, topic, 35), "the commit up to the hanging message")
    finally:
        service.kill()
        await service.wait()
    assert depth.count == 35
    again = await take(await subscribed(broker, topic), 35)
    assert bodies(again)[0] == b"5"
    assert again[0].deliveries == 2


async def reached(broker: KafkaBroker, topic: str, count: int) -> Any:
    depth = await broker.depth(topic, GROUP)
    return depth if depth.count <= count else None


async def test_a_frozen_process_that_wakes_up_late_has_lost_its_lease(address: str, broker: KafkaBroker) -> None:
    topic = topic_name()
    await broker.ensure([SourceSpec(topic, 1)])
    await broker.publish([Copy(topic, b"k", b"v")])
    frozen = await program("stopped_consumer.py", address, topic, GROUP)
    try:
        assert await line_of(frozen) == "taken"
        os.kill(frozen.pid, signal.SIGSTOP)
        [heir] = await take(await subscribed(broker, topic), 1)
        os.kill(frozen.pid, signal.SIGCONT)
        assert frozen.stdin is not None
        frozen.stdin.write(b"\n")
        assert await line_of(frozen) == "LeaseLost()"
    finally:
        frozen.kill()
        await frozen.wait()
    assert (await broker.depth(topic, GROUP)).count == 1
    assert await broker.settle([Ack(heir)]) == [Settled()]


async def program(name: str, *words: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, str(HERE / name), *words, stdin=pipe, stdout=pipe)


async def line_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        return (await process.stdout.readline()).decode().strip()


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_consumers_that_come_and_go_lose_nothing_and_commit_only_what_they_own(
    address: str, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "redrive.kafka")
    topic, seen = topic_name(), Counter[bytes | None]()
    async with opened(address, group_protocol=protocol) as broker:
        await broker.ensure([SourceSpec(topic, 6)])

        async def work(stream: Stream) -> None:
            async for event in stream:
                if isinstance(event, Batch):
                    await asyncio.sleep(0.005)
                    seen.update(bodies(list(event.deliveries)))
                    await broker.settle([Ack(d) for d in event.deliveries])

        steady = asyncio.create_task(work(first := await subscribed(broker, topic, batch=20)))
        for round_ in range(4):
            other = asyncio.create_task(work(guest := await subscribed(broker, topic, batch=20)))
            await broker.publish([Copy(topic, b"%d" % i, b"%d-%d" % (round_, i)) for i in range(500)])
            await asyncio.sleep(1.0)
            await guest.aclose()
            await other
        async with asyncio.timeout(PATIENCE):
            while len(seen) < 2000 or (await broker.depth(topic, GROUP)).count:
                await asyncio.sleep(0.1)
        await first.aclose()
        await steady
    assert seen.total() - len(seen) <= 20 * 4
    assert not [r for r in caplog.records if "refused" in r.getMessage()]


async def test_a_handler_slower_than_the_poll_interval_keeps_its_partition(address: str) -> None:
    topic = topic_name()
    async with opened(address, poll_seconds=3.0) as broker:
        stream = await subscribed(broker, topic, batch=1, in_flight=1)
        await broker.publish([Copy(topic, b"k", b"%d" % i) for i in range(3)])
        [slow] = await take(stream, 1)
        await asyncio.sleep(5.0)
        assert await broker.settle([Ack(slow)]) == [Settled()]
        assert bodies(await take(stream, 1)) == [b"1"]


async def test_one_hanging_message_stops_its_own_partition_only(broker: KafkaBroker) -> None:
    topic = topic_name()
    await broker.ensure([SourceSpec(topic, 2)])
    stream = await subscribed(broker, topic)
    assert isinstance(stream, KafkaStream)
    await broker.publish([Copy(topic, b"k", b"hangs")])
    [hanging] = await take(stream, 1)
    hanging.token[0].tracker.limit = 50
    await broker.publish([Copy(topic, b"%d" % i, b"x") for i in range(600)])
    others = await take(stream, 300)
    await broker.settle([Ack(d) for d in others])
    assert stream.blocked == {hanging.token[0].place}
    await broker.settle([Ack(hanging)])
    assert not stream.blocked


async def test_a_consumer_that_falls_behind_reads_on_where_it_stopped(broker: KafkaBroker) -> None:
    """Its partitions are paused meanwhile, and what Kafka's client had prefetched is read again."""
    topic = topic_name()
    await broker.ensure([SourceSpec(topic, 2)])
    stream = await subscribed(broker, topic, batch=50, in_flight=100)
    assert isinstance(stream, KafkaStream)
    await broker.publish([Copy(topic, b"%d" % (i % 5), b"%06d" % i) for i in range(12_000)])
    seen: dict[bytes | None, list[bytes | None]] = defaultdict(list)
    waiting = await take(stream, 100)

    async def paused() -> bool:
        return bool(stream._reader._paused)

    await until(paused, "the pause")
    for _ in range(12_000):
        for delivery in waiting:
            seen[delivery.message.key].append(delivery.message.body)
        await broker.settle([Ack(d) for d in waiting])
        if sum(map(len, seen.values())) >= 12_000:
            break
        waiting = await take(stream, 1)
    assert sum(map(len, seen.values())) == 12_000
    for values in seen.values():
        assert values == sorted(set(values))


# Retries.


async def test_a_retry_longer_than_any_topic_hops_until_it_is_due(address: str) -> None:
    topic = topic_name()
    async with opened(address, retry_seconds=(1,)) as broker:
        stream = await subscribed(broker, topic)
        await broker.publish([Copy(topic, b"k", b"v", (("a", None), ("a", b"\xff")), 1_700_000_000_000)])
        [first] = await take(stream, 1)
        due = now() + 3000
        copy = Copy(topic, b"k", b"v", (*first.message.headers, ("ticket", b"1")))
        assert await broker.settle([RetryAt(first, copy, due)]) == [Settled()]
        [again] = await take(stream, 1)
        assert now() >= due
        assert again.message.headers == copy.headers
        assert again.message.timestamp == first.message.timestamp
        assert await broker.settle([Ack(again)]) == [Settled()]
        assert (await broker.depth(topic, GROUP)).count == 0


async def test_bad_due_headers_delay_nothing_and_strangers_are_passed_over(broker: KafkaBroker) -> None:
    topic = topic_name()
    retries = f"{topic}.{GROUP}.retry.5s"
    await broker.ensure([SourceSpec(topic, 1), SourceSpec(retries, 1)])
    due, names = "redrive-due", (topic.encode(), GROUP.encode())
    fuzz: list[tuple[tuple[str, bytes | None], ...]] = [
        (), ((due, None),), ((due, b""),), ((due, b"\xff\x00"),), ((due, b"[]"),), ((due, b"9" * 5000),),
        ((due, b'["a",1,"b","c"]'),), ((due, b"[1e99,0,\"a\",\"b\"]"),), ((due, b"1"), (due, b"2")),
        ((due, b'[0,0,"%s","%s"]' % names),), ((due, b'[-99,-1,"%s","%s"]' % names),),
    ]  # fmt: skip
    await broker.publish([Copy(retries, b"k", b"%d" % i, headers) for i, headers in enumerate(fuzz)])
    await broker.publish([Copy(retries, b"k", b"stranger", ((due, b'[0,0,"%s","other"]' % topic.encode()),))])
    deliveries = await take(await subscribed(broker, topic), len(fuzz))
    assert sorted(bodies(deliveries)) == sorted(b"%d" % i for i in range(len(fuzz)))
    assert {d.message.source for d in deliveries} == {topic}
    await broker.settle([Ack(d) for d in deliveries])
    assert (await broker.depth(topic, GROUP)).count == 0


# Topics.


async def test_a_compacted_dead_letter_topic_is_refused(broker: KafkaBroker, admin: AdminClient) -> None:
    topic, dead = topic_name(), topic_name("dead")
    made = admin.create_topics([NewTopic(dead, 1, 1, config={"cleanup.policy": "compact"})])
    await asyncio.wrap_future(made[dead])
    with pytest.raises(ConfigError, match=dead) as caught:
        await broker.ensure([SourceSpec(dead, letters=True)])
    assert "compact" in caught.value.problem
    stream = await subscribed(broker, topic)
    await broker.publish([Copy(topic, b"k", b"v")])
    [delivery] = await take(stream, 1)
    [answer] = await broker.settle([Bury(delivery, Copy(dead, b"k", b"v"))])
    assert isinstance(answer, Refused)
    assert not answer.too_large
    assert await broker.settle([Release(delivery)]) == [Settled()]


async def test_a_deleted_dead_letter_topic_is_made_again(broker: KafkaBroker, admin: AdminClient) -> None:
    topic, dead = topic_name(), topic_name("dead")
    await broker.ensure([SourceSpec(topic, 1), SourceSpec(dead, 1)])
    stream = await subscribed(broker, topic)
    await broker.publish([Copy(topic, b"k", b"%d" % i) for i in range(2)])
    first, second = await take(stream, 2)
    assert await broker.settle([Bury(first, Copy(dead, b"k", b"0"))]) == [Settled()]
    await asyncio.wrap_future(admin.delete_topics([dead])[dead])

    async def buried() -> bool:
        try:
            return await broker.settle([Bury(second, Copy(dead, b"k", b"1"))]) == [Settled()]
        except BrokerUnavailable:
            return False

    await until(buried, "the second burial")
    [letter] = await take(await broker.subscribe(Subscription((dead,), "collector")), 1)
    assert letter.message.body == b"1"


async def test_small_letters_are_not_refused_for_the_size_of_their_batch(
    broker: KafkaBroker, admin: AdminClient
) -> None:
    topic = topic_name()
    await asyncio.wrap_future(admin.create_topics([NewTopic(topic, 1, 1, config={"max.message.bytes": "3000"})])[topic])
    results = await broker.publish([Copy(topic, b"k", os.urandom(2000)) for _ in range(10)])
    assert all(isinstance(result, Confirmed) for result in results)
    [answer] = await broker.publish([Copy(topic, b"k", os.urandom(4000))])
    assert isinstance(answer, Refused)
    assert answer.too_large


async def test_what_may_not_be_created_is_named(address: str) -> None:
    topic = topic_name()
    async with opened(address, create_topics=False) as broker:
        with pytest.raises(ConfigError, match=topic) as caught:
            await subscribed(broker, topic)
        assert caught.value.key == "kafka.create_topics"
        result = await broker.publish([Copy("redrive.no.such.topic", None, b"v")])
        assert isinstance(result[0], Refused)
    async with opened(address) as broker:
        with pytest.raises(ConfigError, match="no/such name"):
            await broker.ensure([SourceSpec("no/such name")])


async def test_a_source_that_vanishes_is_reported(broker: KafkaBroker, admin: AdminClient) -> None:
    topic = topic_name()
    stream = await subscribed(broker, topic)
    await broker.publish([Copy(topic, b"k", b"v")])
    await take(stream, 1)
    await asyncio.wrap_future(admin.delete_topics([topic])[topic])
    with pytest.raises(BrokerUnavailable, match=topic):
        await take(stream, 1)


async def test_an_old_copy_is_dated_so_that_retention_cannot_take_it(address: str) -> None:
    topic = topic_name()
    async with opened(address, retention_seconds=86400.0) as broker:
        stream = await subscribed(broker, topic)
        fresh, old = now() - 7_200_000, now() - 7 * 86_400_000
        await broker.publish([Copy(topic, b"k", b"fresh", (), fresh), Copy(topic, b"k", b"old", (), old)])
        first, second = await take(stream, 2)
        assert first.message.timestamp == fresh
        assert second.message.timestamp > now() - 60_000


# At the door.


async def test_an_unreachable_broker_is_named_within_seconds() -> None:
    broker = KafkaBroker("127.0.0.1:1")
    before = time.monotonic()
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
        await broker.open()
    assert time.monotonic() - before < 8
    await broker.close()


async def test_an_app_with_an_unreachable_broker_names_the_setting() -> None:
    app = Redrive("kafka://127.0.0.1:1", signing_keys=KEYS)
    with pytest.raises(Unreachable) as caught:
        async with app:
            pass
    assert caught.value.key == "broker"


def test_the_address_and_the_table_are_checked() -> None:
    settings = {"broker": "kafka://one:9092,two", "signing_keys": KEYS, "kafka": {"group_protocol": "consumer"}}
    broker = wiring.build(from_mapping(settings, "test"), SystemClock()).broker
    assert isinstance(broker, KafkaBroker)
    assert (broker.address, broker.options.group_protocol) == ("one:9092,two", "consumer")
    for wrong in ({"broker": "kafka://host:9092?acks=0"}, {"kafka": {"client": {"acks": "0"}}}):
        with pytest.raises(ConfigError):
            wiring.build(from_mapping({**settings, **wrong}, "test"), SystemClock())


def test_a_missing_client_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("confluent_kafka", "redrive.brokers.kafka"))]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith("redrive.brokers._kafka")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    settings = from_mapping({"broker": "kafka://host", "signing_keys": KEYS}, "test")
    with pytest.raises(MissingExtra) as caught:
        wiring.build(settings, SystemClock())
    assert caught.value.extra == "kafka"


# The whole way.


@asynccontextmanager
async def running(app: Redrive) -> AsyncIterator[Redrive]:
    async with app:
        helpers = [app.collector(), app.replayer()]
        tasks = [asyncio.create_task(app.work()), *(asyncio.create_task(helper.run()) for helper in helpers)]
        await asyncio.sleep(0)
        try:
            yield app
        finally:
            app.stop()
            for helper in helpers:
                helper.stop()
            await asyncio.gather(*tasks)


def make_app(address: str, folder: Path, dead: str, **more: Any) -> Redrive:
    return Redrive(
        f"kafka://{address}", store=f"sqlite://{folder}/letters.db", signing_keys=KEYS,
        kafka={"partitions": 2, "session_seconds": 6.0}, defaults={"dead_letter": dead}, **more,
    )  # fmt: skip


async def state_of(app: Redrive, state: State) -> Any:
    return (await app.letters.list(filter_=Filter(states=(state,)))).rows


async def test_a_message_fails_retries_dies_is_collected_replayed_and_resolved(address: str, tmp_path: Path) -> None:
    topic, runs, healthy = topic_name("orders"), [], asyncio.Event()
    app = make_app(address, tmp_path, f"{topic}.dlq")

    @app.consumer(topic, group="billing", attempts=3, backoff=[0.2, 0.2])
    async def bill(message: Message) -> None:
        runs.append((message.source, message.partition, message.position, message.headers))
        if not healthy.is_set():
            raise ConnectionError("the bank is away")

    async with running(app):
        headers = (("trace", b"\xff"), ("trace", None))
        await app.publish(topic, b"\x00 42", key=b"k", headers=headers)
        [summary] = await until(lambda: state_of(app, State.PENDING), "the letter")
        assert len(runs) == 3
        assert len(set(runs)) == 1, "every run sees the original, where and as it was"
        letter = await app.letters.get(summary.id)
        assert letter.attempts == 3
        healthy.set()
        await app.letters.replay(summary.id)
        await until(lambda: state_of(app, State.RESOLVED), "the resolution")
    assert len(runs) == 4
    assert runs[-1][3] == headers


async def test_a_letter_too_large_for_its_topic_goes_down_the_ladder(
    address: str, tmp_path: Path, broker: KafkaBroker, admin: AdminClient
) -> None:
    topic = topic_name("orders")
    dead = f"{topic}.dlq"
    await asyncio.wrap_future(admin.create_topics([NewTopic(dead, 1, 1, config={"max.message.bytes": "6000"})])[dead])
    app = make_app(address, tmp_path, dead)

    @app.consumer(topic, group="billing", attempts=1)
    async def bill(message: Message) -> None:
        raise ValueError(os.urandom(20_000).hex())

    async with app:
        working = asyncio.create_task(app.work())
        await app.publish(topic, os.urandom(100_000), key=b"k")
        [grave] = await take(await subscribed(broker, dead), 1)
        app.stop()
        await working
        assert (await app.parts.broker.depth(topic, "billing")).count == 0
    letter = codec.read_letter(grave.message, app.parts.keyring, now())
    assert letter.verified
    assert letter.message.source == topic
    assert codec.BODY_AT_SOURCE in letter.marks
    [original] = await broker.read([letter.message.coordinates])
    assert original is not None
    assert len(original.body or b"") == 100_000


async def test_the_settings_of_a_topic_change_under_a_running_app(
    address: str, broker: KafkaBroker, admin: AdminClient
) -> None:
    topic, dead = topic_name(), topic_name("dead")
    await broker.ensure([SourceSpec(dead, 1)])
    stream = await subscribed(broker, topic)
    await broker.publish([Copy(topic, b"k", b"v")])
    [delivery] = await take(stream, 1)
    smaller = ConfigEntry("max.message.bytes", "1000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, dead, incremental_configs=[smaller])
    await asyncio.wrap_future(admin.incremental_alter_configs([resource])[resource])

    async def refused() -> bool:
        [answer] = await broker.settle([Bury(delivery, Copy(dead, b"k", os.urandom(5000)))])
        return isinstance(answer, Refused) and answer.too_large

    await until(refused, "the refusal")
    assert await broker.settle([Bury(delivery, Copy(dead, b"k", b"small"))]) == [Settled()]
    with pytest.raises(KafkaException):
        await asyncio.wrap_future(admin.create_topics([NewTopic(dead, 1, 1)])[dead])
