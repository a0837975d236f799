"""Apache Kafka through librdkafka: groups, commits over the settled prefix, retry topics, confirmed letters."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from redrive.brokers import _kafka_client as client
from redrive.brokers._kafka_client import Cluster, Due, Options, Outbox
from redrive.brokers._kafka_stream import STRIDE, KafkaStream, LaneState
from redrive.brokers.base import (
    Abilities,
    Ack,
    Bury,
    Confirmed,
    Delivery,
    Depth,
    Lane,
    LeaseLost,
    PublishResult,
    Refused,
    Release,
    RetryAt,
    Settled,
    Settlement,
    SettleResult,
    SourceSpec,
    Stream,
    Subscription,
    Unknown,
)
from redrive.clock import Clock, SystemClock
from redrive.errors import BrokerUnavailable, ConfigError
from redrive.message import Coordinates, Copy, Message

T = TypeVar("T")

SETTLED = Settled()
LOST = LeaseLost()
DIGITS = 18


class KafkaBroker:
    """One cluster. A retry waits in a topic of its group, `{source}.{group}.retry.{seconds}s`, made when first needed.

    `can.lease_seconds` is None: a thread of its own keeps polling, so a handler may take as long as it likes.
    `delay_natively` is False, since Kafka knows no delay; `RetryAt` works all the same.
    """

    def __init__(self, address: str, *, name: str = "kafka", clock: Clock | None = None, **options: Any) -> None:
        self.address, self.name, self.clock = address, name, clock or SystemClock()
        self.options = Options(**options)
        self.can = Abilities(
            delay_natively=False, order_by_key=True, retains_settled=True, durable=True,
            max_message_bytes=client.LARGEST_REQUEST, lease_seconds=None,
        )  # fmt: skip
        self._cluster: Cluster | None = None
        self._outbox: Outbox | None = None
        self._topics: dict[str, int] = {}
        self._streams: list[KafkaStream] = []
        self._paused: set[tuple[str, Lane]] = set()
        self._look = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        if self._cluster is not None:
            return
        with client.translated(self.name, f"opening {self.address}"):
            cluster = Cluster(self.name, self.address, self.options)
        self._topics = await cluster.names()
        self._cluster, self._outbox = cluster, Outbox(self.address, self.options)
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await asyncio.gather(*(stream.aclose() for stream in list(self._streams)))
        outbox, self._outbox = self._outbox, None
        if outbox is not None:
            await outbox.close()
        self._cluster = self._watching = None

    async def ensure(self, sources: Sequence[SourceSpec]) -> None:
        self._noticed(await self._opened("ensure").ensure(sources))

    async def subscribe(self, subscription: Subscription) -> Stream:
        named = [SourceSpec(name) for name in subscription.sources if not client.is_glob(name)]
        await self.ensure(named)
        stream = KafkaStream(self, subscription, client.wanted(subscription, self._topics))
        self._streams.append(stream)
        stream.start()
        return stream

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettleResult]:
        if self._acked(settlements):
            return [SETTLED] * len(settlements)
        self._check_leases(settlements)
        if any(isinstance(one, Bury | RetryAt) for one in settlements):
            return await self._unbroken(self._settle(settlements))
        return self._finish(settlements, {})

    async def publish(self, copies: Sequence[Copy]) -> list[PublishResult]:
        return await self._unbroken(self._publish(copies))

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """Nothing to do: a lane is ours while its reader polls, however long its messages take."""

    async def pause(self, group: str, lanes: Sequence[Lane]) -> None:
        self._paused.update((group, lane) for lane in lanes)
        self._look_again()

    async def resume(self, group: str, lanes: Sequence[Lane]) -> None:
        self._paused.difference_update((group, lane) for lane in lanes)
        self._look_again()

    async def read(self, coordinates: Sequence[Coordinates]) -> list[Message | None]:
        cluster = self._opened("read")
        topics = await cluster.names()
        found: dict[int, Message | None] = {}
        places = {i: (at.source, at.partition, int(at.position)) for i, at in enumerate(coordinates)
                  if self._may_exist(at, topics)}  # fmt: skip
        for index, record in zip(places, await cluster.peek(list(places.values())), strict=True):
            found[index] = self._message_at(coordinates[index], record)
        return [found.get(index) for index in range(len(coordinates))]

    async def depth(self, source: str, group: str) -> Depth:
        """With the retries that wait. It counts offsets: transaction markers and compacted records are in it."""
        cluster = self._opened("depth")
        await asyncio.gather(*(stream.flush() for stream in self._streams if stream.subscription.group == group))
        names = await cluster.names()
        topics = client.wanted(Subscription((source,), group), names)
        open_parts = await cluster.unsettled(group, {topic: names[topic] for topic in topics})
        first = await cluster.peek([(*place, start) for place, (start, _) in open_parts.items()])
        times = [self._written_at(record) for record in first if record is not None]
        settings = await cluster.settings(source) if source in topics else None
        count = sum(end - start for start, end in open_parts.values())
        return Depth(count, min(times, default=None), None if settings is None else settings.retention)

    # For the streams.

    def consumer_settings(self, group: str) -> dict[str, Any]:
        options = self.options
        session = round(options.session_seconds * 1000)
        classic = {
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": session,
            "heartbeat.interval.ms": max(session // 5, 100),
        }
        return {
            **options.common(self.address), "group.id": group, "group.protocol": options.group_protocol,
            "enable.auto.commit": False, "enable.auto.offset.store": False, "auto.offset.reset": "earliest",
            "isolation.level": "read_committed", "max.poll.interval.ms": round(options.poll_seconds * 1000),
            "allow.auto.create.topics": False, "fetch.message.max.bytes": 1 << 20,
            "queued.max.messages.kbytes": 1 << 15, "fetch.queue.backoff.ms": 20,
            **(classic if options.group_protocol == "classic" else {}),
        }  # fmt: skip

    def is_paused(self, group: str, lane: Lane) -> bool:
        return bool(self._paused) and (group, lane) in self._paused

    def left(self, stream: KafkaStream) -> None:
        self._streams.remove(stream)
        if not any(other.subscription.group == stream.subscription.group for other in self._streams):
            self._paused = {one for one in self._paused if one[0] != stream.subscription.group}

    async def hop(self, delivery: Delivery, due: Due) -> bool:
        """Put a retry that is due later than its topic can wait into the next one; True once that is confirmed."""
        message = delivery.message
        copy = Copy(due.source, message.key, message.body, message.headers, due.timestamp)
        try:
            [result] = await self._unbroken(self._send_ours([self._retry(copy, due.group, due.when, due.timestamp)]))
        except BrokerUnavailable:
            return False
        return isinstance(result, Confirmed)

    # Settling.

    def _acked(self, settlements: Sequence[Settlement]) -> bool:
        """Settle a batch of plain successes, lane by lane. False, and nothing done, for everything less usual."""
        lanes: dict[LaneState, list[int]] = {}
        for one in settlements:
            lane, offset, generation, turn = one.delivery.token
            if type(one) is not Ack or turn or generation != lane.tracker.generation:
                return False
            if lane in lanes:
                lanes[lane].append(offset)
            else:
                lanes[lane] = [offset]
        streams = {lane.stream for lane in lanes}
        if not all(stream.holds_lease() for stream in streams) or not all(
            lane.can_settle(offsets) for lane, offsets in lanes.items()
        ):
            return False
        for lane, offsets in lanes.items():
            lane.settle_all(offsets)
        for stream in streams:
            stream.touched([lane for lane in lanes if lane.stream is stream])
        return True

    def _check_leases(self, settlements: Sequence[Settlement]) -> None:
        for stream in {settlement.delivery.token[0].stream for settlement in settlements}:
            stream.check_lease()

    async def _settle(self, settlements: Sequence[Settlement]) -> list[SettleResult]:
        """Copies first; only what is confirmed is then settled."""
        moving: dict[int, Copy] = {}
        answers: dict[int, SettleResult] = {}
        try:
            for index, one in enumerate(settlements):
                if not isinstance(one, Bury | RetryAt):
                    continue
                lane, offset, _, _ = one.delivery.token
                if lane.is_open(one.delivery.token):
                    lane.moving.add(offset)
                    moving[index] = self._wire(one)
                else:
                    answers[index] = LOST
            answers |= await self._move(settlements, moving)
        finally:
            for index in moving:
                lane, offset, _, _ = settlements[index].delivery.token
                lane.moving.discard(offset)
        return self._finish(settlements, answers)

    async def _move(self, settlements: Sequence[Settlement], moving: Mapping[int, Copy]) -> dict[int, SettleResult]:
        """What keeps a settlement from being done; those whose copies are confirmed are not in it."""
        graves = {copy.destination for index, copy in moving.items() if isinstance(settlements[index], Bury)}
        compacted = {name for name in graves if await self._is_compacted(name)}
        answers: dict[int, SettleResult] = {
            index: Refused(f"{copy.destination} is compacted: letters of one key would replace each other")
            for index, copy in moving.items() if copy.destination in compacted
        }  # fmt: skip
        sent = [index for index in moving if index not in answers]
        results = await self._send_ours([moving[index] for index in sent])
        if sent and all(isinstance(result, Unknown) for result in results):
            raise BrokerUnavailable(self.name, "settling", results[0].why if isinstance(results[0], Unknown) else "")
        for index, result in zip(sent, results, strict=True):
            if not isinstance(result, Confirmed):
                answers[index] = result if isinstance(result, Refused) else Refused(f"not confirmed: {result.why}")
        return answers

    def _finish(self, settlements: Sequence[Settlement], answers: Mapping[int, SettleResult]) -> list[SettleResult]:
        """Close what is done, in memory; the commit follows within a second."""
        results: list[SettleResult] = []
        touched: set[LaneState] = set()
        for index, one in enumerate(settlements):
            delivery = one.delivery
            if index in answers:
                results.append(answers[index])
                continue
            lane: LaneState = delivery.token[0]
            if not isinstance(one, Ack | Release):
                lane.moving.discard(delivery.token[1])
            done = lane.release(delivery) if isinstance(one, Release) else lane.settle(delivery.token)
            results.append(SETTLED if done else LOST)
            if done:
                touched.add(lane)
        for stream in {lane.stream for lane in touched}:
            stream.touched([lane for lane in touched if lane.stream is stream])
        return results

    def _wire(self, one: Bury | RetryAt) -> Copy:
        """A letter is as old as its death, so that its topic's retention begins then; its message has its own date."""
        copy = one.copy
        if isinstance(one, Bury):
            return Copy(copy.destination, copy.key, copy.body, copy.headers)
        return self._retry(copy, one.delivery.group, one.when, one.delivery.message.timestamp)

    def _retry(self, copy: Copy, group: str, when: int, written: int) -> Copy:
        topic = client.retry_topic(copy.destination, group, self.options.bucket(when - self.clock.now()))
        due = Due(when, written if copy.timestamp is None else copy.timestamp, copy.destination, group)
        return Copy(topic, copy.key, copy.body, client.with_due(copy.headers, due))

    async def _is_compacted(self, topic: str) -> bool:
        settings = await self._opened("settle").settings(topic)
        return settings is not None and settings.compacted

    # Publishing.

    async def _publish(self, copies: Sequence[Copy]) -> list[PublishResult]:
        """To topics of others, too: whether a missing one is made is for the server to decide."""
        dated = [await self._dated(copy) for copy in copies]
        return await self._send(dated, {c.destination for c in dated if c.destination.startswith(client.OWN_PREFIX)})

    async def _send_ours(self, copies: Sequence[Copy]) -> list[PublishResult]:
        """Dead letters and retries."""
        return await self._send(copies, {copy.destination for copy in copies})

    async def _send(self, copies: Sequence[Copy], ours: Collection[str]) -> list[PublishResult]:
        """Topics of our own are made where they are missing; what cannot be made is refused, not raised."""
        outbox, refused = self._outbox_of("publish"), ""
        try:
            await self._make_missing(ours)
        except ConfigError as error:
            refused = error.problem
        possible = [not refused or copy.destination not in ours or copy.destination in self._topics for copy in copies]
        sent = iter(await outbox.send([copy for copy, may in zip(copies, possible, strict=True) if may]))
        results = [next(sent) if may else Refused(refused) for may in possible]
        self._after_sending(copies, results)
        return results

    def _after_sending(self, copies: Sequence[Copy], results: Sequence[PublishResult]) -> None:
        for copy, result in zip(copies, results, strict=True):
            if isinstance(result, Refused) and not result.too_large:
                self._topics.pop(copy.destination, None)  # deleted, perhaps: the next try makes it again
            elif copy.destination not in self._topics:
                self._look.set()

    async def _make_missing(self, names: Iterable[str]) -> None:
        """Create our own topics where they are not there yet; a retry topic has as many partitions as its source."""
        missing = {name for name in names if name not in self._topics}
        if not missing:
            return
        cluster = self._opened("settle")
        self._noticed(await cluster.names())
        missing -= self._topics.keys()
        if missing:
            self._noticed(await cluster.create({name: self._partitions_for(name) for name in missing}))

    def _partitions_for(self, name: str) -> int | None:
        sources = [source for source in self._topics if name.startswith(f"{source}.")]
        return self._topics[max(sources, key=len)] if sources and ".retry." in name else None

    async def _dated(self, copy: Copy) -> Copy:
        """A copy too old for its topic's retention could be deleted before it is read: then it is dated now."""
        if copy.timestamp is None or self.clock.now() - copy.timestamp < 3_600_000:
            return copy
        settings = await self._opened("publish").settings(copy.destination)
        kept = None if settings is None else settings.retention
        if kept is None or self.clock.now() - copy.timestamp < kept * 500:
            return copy
        return Copy(copy.destination, copy.key, copy.body, copy.headers)

    # Reading single records.

    def _may_exist(self, at: Coordinates, topics: Mapping[str, int]) -> bool:
        number = at.position.isascii() and at.position.isdecimal() and len(at.position) <= DIGITS
        return number and at.broker == self.name and 0 <= at.partition < min(topics.get(at.source, 0), STRIDE)

    def _message_at(self, at: Coordinates, record: Any) -> Message | None:
        if record is None or record.offset() != int(at.position) or record.timestamp()[1] != at.timestamp:
            return None
        where = (at.source, at.partition, at.position, at.timestamp)
        return Message(self.name, *where, record.key(), record.value(), client.headers_of(record))

    def _written_at(self, record: Any) -> int:
        _, due = client.split_due(client.headers_of(record))
        written: int = record.timestamp()[1]
        return written if due is None else due.timestamp

    # Housekeeping.

    async def _watch(self) -> None:
        """Have the streams read what appears later, and say when a source is gone."""
        while True:
            await self.clock.wait(self._look, self.options.refresh_seconds)
            self._look.clear()
            with suppress(BrokerUnavailable):  # whoever needs the broker meets the same trouble and says so
                topics = await self._opened("watch").names()
                for stream in self._streams:
                    gone = [s for s in stream.subscription.sources if not client.is_glob(s) and s not in topics]
                    if gone:
                        stream.fail(BrokerUnavailable(self.name, f"reading {gone[0]}", "there is no such topic"))
                self._noticed(topics)

    def _noticed(self, topics: Mapping[str, int]) -> None:
        self._topics = dict(topics)
        for stream in self._streams:
            stream.retopic(client.wanted(stream.subscription, topics))

    def _look_again(self) -> None:
        for stream in self._streams:
            stream.look_again()

    def _opened(self, what: str) -> Cluster:
        if self._cluster is None:
            raise BrokerUnavailable(self.name, what, "it is not open")
        return self._cluster

    def _outbox_of(self, what: str) -> Outbox:
        if self._outbox is None:
            raise BrokerUnavailable(self.name, what, "it is not open")
        return self._outbox

    async def _unbroken(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end even when the caller is cancelled, so that memory never falls behind the cluster."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)
