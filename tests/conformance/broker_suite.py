"""What every broker promises. A backend inherits BrokerSuite, gives it an opened `broker`, and says how time passes.

What a backend cannot do is marked by its subclass with xfail(strict=True). "Nothing came" is never awaited: a marker
is published behind the message that must not come, and the marker comes alone.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from uuid import uuid4

import pytest

from redrive.brokers.base import (
    Ack,
    Assigned,
    Batch,
    Broker,
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
    SourceSpec,
    Stream,
    Subscription,
)
from redrive.clock import Millis
from redrive.errors import ConfigError
from redrive.message import Coordinates, Copy, Headers

PATIENCE = 30.0
HOSTILE_HEADERS: Headers = (
    ("trace", b"1"),
    ("Trace", b"2"),
    ("trace", b"3"),
    ("empty", b""),
    ("null", None),
    ("binary", bytes(range(256))),
    ("ünïcode ☃", "☃".encode()),
    ("", b"no name"),
)


def source(prefix: str = "t") -> str:
    """A name no other test uses."""
    return f"{prefix}.{uuid4().hex[:12]}"


def copies(destination: str, count: int, key: bytes | None = None) -> list[Copy]:
    return [Copy(destination, key if key is not None else b"k%d" % (i % 17), b"%d" % i) for i in range(count)]


def bodies(deliveries: Sequence[Delivery]) -> list[bytes | None]:
    return [delivery.message.body for delivery in deliveries]


async def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


async def take(stream: Stream, count: int) -> list[Delivery]:
    """Read until this many messages came."""
    taken: list[Delivery] = []
    async with asyncio.timeout(PATIENCE):
        while len(taken) < count:
            event = await stream.__anext__()
            if isinstance(event, Batch):
                taken += event.deliveries
    return taken


async def owned(stream: Stream, count: int = 1) -> set[Lane]:
    """Read until this many lanes are assigned; nothing is published yet."""
    lanes: set[Lane] = set()
    async with asyncio.timeout(PATIENCE):
        while len(lanes) < count:
            event = await stream.__anext__()
            assert isinstance(event, Assigned)
            lanes |= set(event.lanes)
    return lanes


class Consumer:
    """Reads a stream in the background, remembers what came, and settles it if told how."""

    def __init__(self, broker: Broker, stream: Stream, *, ack: bool = False) -> None:
        self.broker, self.stream, self.ack = broker, stream, ack
        self.lanes: set[Lane] = set()
        self.revoked: list[Revoked] = []
        self.deliveries: list[Delivery] = []
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self.stream:
            match event:
                case Assigned(lanes=lanes):
                    assert not self.lanes & set(lanes), "assigned twice"
                    self.lanes |= set(lanes)
                case Revoked(lanes=lanes):
                    self.lanes -= set(lanes)
                    self.revoked.append(event)
                case Batch(deliveries=deliveries):
                    assert {d.lane for d in deliveries} <= self.lanes, "delivered before assigned"
                    self.deliveries += deliveries
                    if self.ack:
                        await self.broker.settle([Ack(d) for d in deliveries])

    async def stop(self) -> None:
        """Stop reading without a goodbye to the broker."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def close(self) -> None:
        await self.stream.aclose()
        await self._task


class BrokerSuite:
    partitions = 4

    # What a subclass says about its broker.

    def now(self, broker: Broker) -> Millis:
        raise NotImplementedError

    async def pass_time(self, broker: Broker, seconds: float) -> None:
        """Let the broker's clock run on; a real broker really waits."""
        await asyncio.sleep(seconds)

    async def outlive_lease(self, broker: Broker) -> None:
        """Let so much time pass that an owner who went silent counts as dead."""
        raise NotImplementedError

    async def die(self, stream: Stream) -> None:
        """Make this consumer go silent as if its process was gone."""
        raise NotImplementedError

    async def subscribed(self, broker: Broker, *sources: str, group: str = "g", **options: object) -> Stream:
        return await broker.subscribe(Subscription(tuple(sources), group, **options))

    async def only_marker_comes(self, broker: Broker, stream: Stream, topic: str, keys: Sequence[bytes]) -> None:
        """Whatever these keys' lanes still had for the stream would come before or with the markers."""
        await broker.publish([Copy(topic, key, b"marker") for key in keys])
        deliveries = await take(stream, len(keys))
        assert set(bodies(deliveries)) == {b"marker"}
        await broker.settle([Ack(d) for d in deliveries])

    # Bytes are sacred.

    @pytest.mark.parametrize("key", [None, b"", b"\x00\xff\xfe", b"text"])
    @pytest.mark.parametrize("body", [None, b"", bytes(range(256)), b'{"a":1}'])
    async def test_key_and_body_come_back_bit_for_bit(
        self, broker: Broker, key: bytes | None, body: bytes | None
    ) -> None:
        topic = source()
        stream = await self.subscribed(broker, topic)
        await broker.publish([Copy(topic, key, body)])
        [delivery] = await take(stream, 1)
        assert (delivery.message.key, delivery.message.body) == (key, body)
        assert (delivery.message.broker, delivery.message.source) == (broker.name, topic)
        assert delivery.deliveries == 1

    async def test_headers_keep_order_repeats_binary_and_null(self, broker: Broker) -> None:
        topic = source()
        stream = await self.subscribed(broker, topic)
        await broker.publish([Copy(topic, b"k", b"v", HOSTILE_HEADERS, timestamp=1_600_000_000_123)])
        [delivery] = await take(stream, 1)
        assert delivery.message.headers == HOSTILE_HEADERS
        assert delivery.message.timestamp == 1_600_000_000_123

    async def test_a_ten_megabyte_body_comes_back(self, broker: Broker) -> None:
        topic, body = source(), random.Random(1).randbytes(10_000_000)
        stream = await self.subscribed(broker, topic)
        assert isinstance((await broker.publish([Copy(topic, b"k", body)]))[0], Confirmed)
        [delivery] = await take(stream, 1)
        assert delivery.message.body == body

    # Groups and consumers.

    async def test_two_groups_each_get_every_message(self, broker: Broker) -> None:
        topic = source()
        first = await self.subscribed(broker, topic, group="one")
        second = await self.subscribed(broker, topic, group="two")
        await broker.publish(copies(topic, 100))
        for stream in (first, second):
            assert sorted(bodies(await take(stream, 100))) == sorted(c.body for c in copies(topic, 100))

    async def test_a_new_group_starts_at_the_oldest_message(self, broker: Broker) -> None:
        topic = source()
        await broker.publish(copies(topic, 5))
        stream = await self.subscribed(broker, topic)
        assert len(await take(stream, 5)) == 5

    async def test_two_consumers_of_a_group_share_and_none_comes_twice(self, broker: Broker) -> None:
        topic = source()
        await broker.ensure([SourceSpec(topic, self.partitions)])
        one = Consumer(broker, await self.subscribed(broker, topic), ack=True)
        two = Consumer(broker, await self.subscribed(broker, topic), ack=True)
        await until(lambda: len(one.lanes) == len(two.lanes) == self.partitions // 2)
        assert not one.lanes & two.lanes
        await broker.publish(copies(topic, 400))
        await until(lambda: len(one.deliveries) + len(two.deliveries) >= 400)
        assert one.deliveries
        assert two.deliveries
        assert max(Counter(bodies(one.deliveries + two.deliveries)).values()) == 1
        await one.close()
        await two.close()

    async def test_a_consumer_that_joins_takes_over_nothing_that_is_in_flight(self, broker: Broker) -> None:
        topic = source()
        await broker.ensure([SourceSpec(topic, self.partitions)])
        one = Consumer(broker, await self.subscribed(broker, topic))
        await broker.publish(copies(topic, 50))
        await until(lambda: len(one.deliveries) == 50)
        two = Consumer(broker, await self.subscribed(broker, topic), ack=True)
        assert await broker.settle([Ack(d) for d in one.deliveries]) == [Settled()] * 50
        await until(lambda: len(one.lanes) == len(two.lanes) == self.partitions // 2)
        assert [r.clean for r in one.revoked] == [True] * len(one.revoked)
        assert two.deliveries == []
        await one.close()
        await two.close()

    async def test_order_by_key_is_kept_and_survives_a_change_of_owner(self, broker: Broker) -> None:
        topic = source()
        stream = await self.subscribed(broker, topic, batch=7)
        await broker.publish([Copy(topic, b"k%d" % (i % 13), b"%04d" % i) for i in range(260)])
        seen: dict[bytes | None, list[bytes]] = defaultdict(list)
        for delivery in (first := await take(stream, 100)):
            seen[delivery.message.key].append(delivery.message.body or b"")
        for values in seen.values():
            assert values == sorted(values)
        await broker.settle([Ack(d) for d in first[:50]])
        await stream.aclose()
        again: dict[bytes | None, list[bytes]] = defaultdict(list)
        for delivery in await take(await self.subscribed(broker, topic, batch=7), 210):
            again[delivery.message.key].append(delivery.message.body or b"")
        for values in again.values():
            assert values == sorted(values)

    async def test_in_flight_bounds_what_is_unsettled(self, broker: Broker) -> None:
        topic = source()
        stream = await self.subscribed(broker, topic, batch=4, in_flight=10)
        await broker.publish(copies(topic, 30))
        consumer = Consumer(broker, stream)
        await until(lambda: len(consumer.deliveries) == 10)
        await broker.settle([Ack(d) for d in consumer.deliveries[:3]])
        await until(lambda: len(consumer.deliveries) == 13)
        await broker.settle([Ack(d) for d in consumer.deliveries[3:]])
        await until(lambda: len(consumer.deliveries) == 23)
        await consumer.close()

    # What is unsettled comes back; what is settled does not.

    async def test_unsettled_messages_come_back_after_aclose_and_acked_ones_do_not(self, broker: Broker) -> None:
        topic = source()
        stream = await self.subscribed(broker, topic)
        await broker.publish(copies(topic, 20))
        deliveries = await take(stream, 20)
        assert await broker.settle([Ack(d) for d in deliveries[:12]]) == [Settled()] * 12
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await stream.__anext__()
        again = await take(await self.subscribed(broker, topic), 8)
        assert sorted(bodies(again)) == sorted(bodies(deliveries[12:]))
        assert {d.deliveries for d in again} == {2}

    async def test_what_a_dead_owner_held_goes_to_the_next_and_its_lease_is_void(self, broker: Broker) -> None:
        topic = source()
        dead = await self.subscribed(broker, topic)
        await broker.publish(copies(topic, 20))
        deliveries = await take(dead, 20)
        await broker.settle([Ack(d) for d in deliveries[:5]])
        await self.die(dead)
        await self.outlive_lease(broker)
        heir = await self.subscribed(broker, topic)
        again = await take(heir, 15)
        assert sorted(bodies(again)) == sorted(bodies(deliveries[5:]))
        dead_letters = source("dead")
        late = [Ack(deliveries[5]), Release(deliveries[6]), Bury(deliveries[7], Copy(dead_letters, b"k", b"v"))]
        assert await broker.settle(late) == [LeaseLost()] * 3
        assert (await broker.depth(dead_letters, "g")).count == 0
        assert await broker.settle([Ack(d) for d in again]) == [Settled()] * 15

    async def test_settling_twice_is_harmless(self, broker: Broker) -> None:
        topic = source()
        stream = await self.subscribed(broker, topic)
        await broker.publish(copies(topic, 2, key=b"k"))
        first, second = await take(stream, 2)
        assert await broker.settle([Ack(first), Ack(first)]) == [Settled(), LeaseLost()]
        assert await broker.settle([Release(second)]) == [Settled()]
        [again] = await take(stream, 1)
        assert await broker.settle([Ack(second)]) == [LeaseLost()]
        assert await broker.settle([Ack(again)]) == [Settled()]
        assert (await broker.depth(topic, "g")).count == 0

    async def test_released_messages_come_back(self, broker: Broker) -> None:
        topic = source()
        stream = await self.subscribed(broker, topic)
        await broker.publish(copies(topic, 3))
        deliveries = await take(stream, 3)
        assert await broker.settle([Release(d) for d in deliveries]) == [Settled()] * 3
        assert sorted(bodies(await take(stream, 3))) == sorted(bodies(deliveries))

    # Delay.

    async def test_a_retry_comes_back_when_due_with_its_new_headers_and_does_not_block(self, broker: Broker) -> None:
        topic = source()
        stream = await self.subscribed(broker, topic)
        await broker.publish(copies(topic, 2, key=b"k"))
        first, second = await take(stream, 2)
        when, retry = self.now(broker) + 2000, Copy(topic, b"k", first.message.body, (("redrive-ticket", b"\x00"),))
        assert await broker.settle([RetryAt(first, retry, when), Ack(second)]) == [Settled()] * 2
        await self.only_marker_comes(broker, stream, topic, [b"k"])
        await self.pass_time(broker, 2.0)
        [again] = await take(stream, 1)
        assert self.now(broker) >= when
        assert (again.message.key, again.message.body) == (first.message.key, first.message.body)
        assert again.message.headers == retry.headers
        assert await broker.settle([Ack(again)]) == [Settled()]
        await self.only_marker_comes(broker, stream, topic, [b"k"])

    async def test_a_waiting_reader_gets_the_retry_when_it_is_due(self, broker: Broker) -> None:
        topic = source()
        consumer = Consumer(broker, await self.subscribed(broker, topic))
        await broker.publish(copies(topic, 1))
        await until(lambda: len(consumer.deliveries) == 1)
        [first] = consumer.deliveries
        again = Copy(topic, first.message.key, first.message.body)
        await broker.settle([RetryAt(first, again, self.now(broker) + 1000)])
        await self.pass_time(broker, 1.0)
        await until(lambda: len(consumer.deliveries) == 2)
        await consumer.close()

    async def test_a_retry_concerns_only_its_own_group(self, broker: Broker) -> None:
        topic = source()
        mine = await self.subscribed(broker, topic, group="mine")
        theirs = await self.subscribed(broker, topic, group="theirs")
        await broker.publish(copies(topic, 1, key=b"k"))
        [delivery] = await take(mine, 1)
        await broker.settle([Ack((await take(theirs, 1))[0])])
        retry = Copy(topic, b"k", b"0", (("ticket", b"mine"),))
        await broker.settle([RetryAt(delivery, retry, self.now(broker) + 1000)])
        await self.pass_time(broker, 1.0)
        assert (await take(mine, 1))[0].message.headers == retry.headers
        await self.only_marker_comes(broker, theirs, topic, [b"k"])

    async def test_a_retry_keeps_its_headers_when_its_owner_leaves(self, broker: Broker) -> None:
        topic = source()
        stream = await self.subscribed(broker, topic)
        await broker.publish(copies(topic, 1, key=b"k"))
        [delivery] = await take(stream, 1)
        retry = Copy(topic, b"k", b"0", (("ticket", b"1"),))
        await broker.settle([RetryAt(delivery, retry, self.now(broker) + 1000)])
        await stream.aclose()
        await self.pass_time(broker, 1.0)
        stream = await self.subscribed(broker, topic)
        [again] = await take(stream, 1)
        await stream.aclose()
        [last] = await take(await self.subscribed(broker, topic), 1)
        assert again.message.headers == last.message.headers == retry.headers

    # Dead letters.

    async def test_a_buried_message_is_in_the_dead_letter_source_once_and_gone_from_its_own(
        self, broker: Broker
    ) -> None:
        topic, dead = source(), source("dead")
        stream = await self.subscribed(broker, topic)
        await broker.publish(copies(topic, 1, key=b"k"))
        [delivery] = await take(stream, 1)
        letter = Copy(dead, b"k", b"0", HOSTILE_HEADERS, timestamp=1_600_000_000_000)
        assert await broker.settle([Bury(delivery, letter)]) == [Settled()]
        assert await broker.settle([Bury(delivery, letter)]) == [LeaseLost()]
        await stream.aclose()
        await self.only_marker_comes(broker, await self.subscribed(broker, topic), topic, [b"k"])
        graves = await self.subscribed(broker, dead, group="collector")
        [buried] = await take(graves, 1)
        assert buried.message.headers == HOSTILE_HEADERS
        assert (buried.message.key, buried.message.body) == (b"k", b"0")
        await broker.settle([Ack(buried)])
        await self.only_marker_comes(broker, graves, dead, [b"k"])

    async def test_a_letter_too_large_is_refused_and_its_message_stays_unsettled(self, broker: Broker) -> None:
        assert broker.can.max_message_bytes is not None
        topic, dead = source(), source("dead")
        stream = await self.subscribed(broker, topic)
        await broker.publish(copies(topic, 3, key=b"k"))
        first, second, third = await take(stream, 3)
        huge = Copy(dead, b"k", b"", (("h", bytes(broker.can.max_message_bytes)),))
        results = await broker.settle(
            [
                Bury(first, huge),
                RetryAt(second, huge, self.now(broker)),
                Bury(third, Copy(dead, b"k", b"fits")),
            ]
        )
        assert results[2] == Settled()
        for refused in results[:2]:
            assert isinstance(refused, Refused)
            assert refused.too_large
        [answer] = await broker.publish([huge])
        assert isinstance(answer, Refused)
        assert answer.too_large
        assert await broker.settle([Ack(first), Bury(second, Copy(dead, b"k", b"fits"))]) == [Settled()] * 2

    # Sources.

    async def test_patterns_pick_up_what_appears_later_and_exclude_wins(self, broker: Broker) -> None:
        prefix = source("shop")
        await broker.publish([Copy(f"{prefix}.orders", b"k", b"early"), Copy(f"{prefix}.orders.dead", b"k", b"no")])
        consumer = Consumer(
            broker, await self.subscribed(broker, f"{prefix}.*", exclude=("*.dead",), group=prefix), ack=True
        )
        await broker.publish([Copy(f"{prefix}.bills", b"k", b"late"), Copy(f"{prefix}.bills.dead", b"k", b"no")])
        await until(lambda: len(consumer.deliveries) == 2)
        await broker.publish([Copy(f"{prefix}.bills", b"k", b"marker")])
        await until(lambda: len(consumer.deliveries) == 3)
        assert sorted(bodies(consumer.deliveries)) == [b"early", b"late", b"marker"]
        await consumer.close()

    async def test_a_pattern_never_matches_our_own_topics(self, broker: Broker) -> None:
        own = source("redrive")
        await broker.publish([Copy(own, b"k", b"own")])
        stream = await self.subscribed(broker, "redr*", group=source("g"))
        named = await self.subscribed(broker, own, group=source("g"))
        assert bodies(await take(named, 1)) == [b"own"]
        visible = source("redrawn")
        await broker.publish([Copy(visible, b"k", b"visible")])
        [delivery] = await take(stream, 1)
        assert delivery.message.source == visible

    async def test_ensure_creates_and_names_both_sides_where_what_exists_differs(self, broker: Broker) -> None:
        topic = source()
        await broker.ensure([SourceSpec(topic, 3)])
        await broker.ensure([SourceSpec(topic, 3), SourceSpec(topic)])
        with pytest.raises(ConfigError) as caught:
            await broker.ensure([SourceSpec(topic, 5)])
        assert "3" in caught.value.problem
        assert "5" in caught.value.problem
        assert len(await owned(await self.subscribed(broker, topic), 3)) == 3

    # Pause, depth, read.

    async def test_a_paused_lane_hands_out_nothing_until_it_is_resumed(self, broker: Broker) -> None:
        topic, other = source(), source()
        await broker.ensure([SourceSpec(topic, 1), SourceSpec(other, 1)])
        stream = await self.subscribed(broker, topic, other)
        await owned(stream, 2)
        await broker.pause("g", [Lane(topic, 0)])
        await broker.publish([Copy(topic, b"k", b"paused"), Copy(other, b"k", b"flows")])
        [delivery] = await take(stream, 1)
        assert delivery.message.body == b"flows"
        await self.only_marker_comes(broker, stream, other, [b"k"])
        await broker.resume("g", [Lane(topic, 0)])
        assert bodies(await take(stream, 1)) == [b"paused"]

    async def test_a_pause_holds_what_a_cancelled_read_had_fetched(self, broker: Broker) -> None:
        topic, other = source(), source()
        await broker.ensure([SourceSpec(topic, 1), SourceSpec(other, 1)])
        stream = await self.subscribed(broker, topic, other)
        await owned(stream, 2)
        reading = asyncio.ensure_future(stream.__anext__())
        await broker.publish([Copy(topic, b"k", b"paused")])
        reading.cancel()
        [result] = await asyncio.gather(reading, return_exceptions=True)
        assert isinstance(result, asyncio.CancelledError)
        await broker.pause("g", [Lane(topic, 0)])
        await self.only_marker_comes(broker, stream, other, [b"k"])
        await broker.resume("g", [Lane(topic, 0)])
        assert bodies(await take(stream, 1)) == [b"paused"]

    async def test_depth_counts_what_is_not_settled(self, broker: Broker) -> None:
        topic = source()
        assert (await broker.depth(topic, "g")).count == 0
        await broker.publish([Copy(topic, b"k", b"%d" % i, (), timestamp=1_600_000_000_000 + i) for i in range(6)])
        depth = await broker.depth(topic, "g")
        assert (depth.count, depth.oldest) == (6, 1_600_000_000_000)
        stream = await self.subscribed(broker, topic, batch=4)
        deliveries = await take(stream, 4)
        assert (await broker.depth(topic, "g")).count == 6
        retry = Copy(topic, b"k", b"1")
        await broker.settle([Ack(deliveries[0]), RetryAt(deliveries[1], retry, self.now(broker) + 60_000)])
        depth = await broker.depth(topic, "g")
        assert (depth.count, depth.oldest) == (5, 1_600_000_000_001)

    async def test_read_finds_settled_messages_while_they_are_retained(self, broker: Broker) -> None:
        assert broker.can.retains_settled
        topic = source()
        stream = await self.subscribed(broker, topic)
        await broker.publish([Copy(topic, b"k", b"v", HOSTILE_HEADERS)])
        [delivery] = await take(stream, 1)
        await broker.settle([Ack(delivery)])
        place = delivery.message.coordinates
        nowhere = [
            Coordinates(place.broker, place.source, place.partition, "987654321", place.timestamp),
            Coordinates(place.broker, source(), 0, "0", place.timestamp),
            Coordinates(place.broker, place.source, place.partition, "no position", place.timestamp),
        ]
        assert await broker.read([place, *nowhere]) == [delivery.message, None, None, None]

    async def test_extend_keeps_a_lease(self, broker: Broker) -> None:
        topic = source()
        stream = await self.subscribed(broker, topic)
        await broker.publish(copies(topic, 2))
        deliveries = await take(stream, 2)
        await broker.extend(deliveries)
        assert await broker.settle([Ack(d) for d in deliveries]) == [Settled()] * 2

    # Nothing is lost, in bulk and under cancellation.

    async def test_cancelling_a_read_at_any_moment_loses_nothing(self, broker: Broker) -> None:
        topic, dice, seen = source(), random.Random(7), Counter[bytes | None]()
        stream = await self.subscribed(broker, topic, batch=5)
        publishing = asyncio.create_task(self._publish_slowly(broker, topic, 300))
        cancelled = 0
        async with asyncio.timeout(PATIENCE):
            while seen.total() < 300:
                reading = asyncio.ensure_future(stream.__anext__())
                await asyncio.sleep(dice.random() * 0.002)
                reading.cancel()
                [event] = await asyncio.gather(reading, return_exceptions=True)
                cancelled += isinstance(event, asyncio.CancelledError)
                if isinstance(event, Batch):
                    seen.update(bodies(event.deliveries))
                    await broker.settle([Ack(d) for d in event.deliveries])
        await publishing
        assert cancelled
        assert set(seen.values()) == {1}
        assert (await broker.depth(topic, "g")).count == 0

    async def _publish_slowly(self, broker: Broker, topic: str, count: int) -> None:
        for copy in copies(topic, count):
            await broker.publish([copy])

    async def test_what_a_cancelled_read_had_fetched_goes_back_at_aclose(self, broker: Broker) -> None:
        topic = source()
        stream = await self.subscribed(broker, topic)
        reading = asyncio.ensure_future(stream.__anext__())
        await broker.publish(copies(topic, 10))
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await stream.aclose()
        assert len(await take(await self.subscribed(broker, topic), 10)) == 10

    async def test_ten_thousand_messages_drain_exactly_once(self, broker: Broker) -> None:
        topic, seen = source(), Counter[bytes | None]()
        results = await broker.publish(copies(topic, 10_000))
        assert all(isinstance(result, Confirmed) for result in results)
        stream = await self.subscribed(broker, topic)
        while seen.total() < 10_000:
            deliveries = await take(stream, 1)
            seen.update(bodies(deliveries))
            assert await broker.settle([Ack(d) for d in deliveries]) == [Settled()] * len(deliveries)
        assert set(seen.values()) == {1}
        assert (await broker.depth(topic, "g")).count == 0

    async def test_a_mixed_batch_is_answered_in_order(self, broker: Broker) -> None:
        topic, dead = source(), source("dead")
        stream = await self.subscribed(broker, topic)
        await broker.publish(copies(topic, 5, key=b"k"))
        first, second, third, fourth, fifth = await take(stream, 5)
        await broker.settle([Ack(first)])
        results = await broker.settle(
            [
                Ack(first),
                Ack(second),
                RetryAt(third, Copy(topic, b"k", b"2"), self.now(broker) + 60_000),
                Bury(fourth, Copy(dead, b"k", b"3")),
                Release(fifth),
            ]
        )
        assert results == [LeaseLost(), Settled(), Settled(), Settled(), Settled()]
        assert bodies(await take(stream, 1)) == [b"4"]
        assert await broker.settle([]) == []
        assert await broker.publish([]) == []
