"""Two honest brokers in memory: a queue with leases for each message, and a log that knows only a committed offset."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from zlib import crc32

from msgspec import Struct, field

from redrive.brokers.base import (
    Abilities,
    Ack,
    Assigned,
    Batch,
    Bury,
    Confirmed,
    Delivery,
    Depth,
    Event,
    Lane,
    LeaseLost,
    PublishResult,
    Refused,
    Release,
    RetryAt,
    Revoked,
    Settled,
    Settlement,
    SettleResult,
    SourceSpec,
    Subscription,
    Unknown,
)
from redrive.errors import BrokerUnavailable
from redrive.message import Coordinates, Copy, Headers, Message
from redrive.tracker import Tracker
from simulator.ledger import Ledger, id_of
from simulator.world import Process, World

NAME = "sim"
RETRY_PARTITION = 1000
RECOMMIT_SECONDS = 1.0
TRACKER_LIMIT = 6


class Record(Struct):
    offset: int
    timestamp: int
    key: bytes | None
    body: bytes | None
    headers: Headers
    due: int = 0


class Log(Struct):
    """One partition. `shown` is how its messages present themselves; a retry log passes for its source."""

    topic: str
    shown: Lane
    group: str = ""
    records: list[Record] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    head: int = 0

    def append(self, copy: Copy, now: int, gap: int, due: int = 0) -> int:
        self.head += gap
        at = now if copy.timestamp is None else copy.timestamp
        self.records.append(Record(self.head, at, copy.key, copy.body, copy.headers, due))
        self.offsets.append(self.head)
        self.head += 1
        return self.head - 1


class Lease(Struct):
    """The token of a delivery. `turn` is how often the message was handed out; the last turn alone may settle it."""

    lane: GroupLane
    generation: int
    offset: int
    turn: int
    appended: bool = False


class Pending(Struct):
    """A message that was handed out: in flight while `due` is None."""

    record: Record
    headers: Headers
    turn: int = 1
    due: int | None = None


class GroupLane:
    """One log as one group reads it."""

    def __init__(self, log: Log, group: str) -> None:
        self.log, self.group = log, group
        self.owner: SimStream | None = None
        self.generation = 0
        self.moved_at = 0.0

    def __repr__(self) -> str:
        return f"{self.log.topic}/{self.log.shown.partition}"


class QueueLane(GroupLane):
    """Remembers each message that is handed out until it is settled."""

    def __init__(self, log: Log, group: str) -> None:
        super().__init__(log, group)
        self.position = 0
        self.pending: dict[int, Pending] = {}

    def begin(self) -> None:
        """Nothing to do: the broker knows what is settled."""

    def next_due(self) -> int | None:
        if self.position < len(self.log.records):
            return 0
        return min((one.due for one in self.pending.values() if one.due is not None), default=None)

    def take(self, now: int, room: int) -> list[tuple[Record, Headers, int]]:
        due = [one for one in self.pending.values() if one.due is not None and one.due <= now][:room]
        for one in due:
            one.turn, one.due = one.turn + 1, None
        fresh = self.log.records[self.position : self.position + room - len(due)]
        self.position += len(fresh)
        for record in fresh:
            self.pending[record.offset] = Pending(record, record.headers)
        return [(one.record, one.headers, one.turn) for one in due] + [(one, one.headers, 1) for one in fresh]

    def in_flight(self) -> list[Pending]:
        return [one for one in self.pending.values() if one.due is None]

    def abandon(self, ledger: Ledger) -> None:
        """What its owner had in flight is handed out again, with the headers it had."""
        taken_from = ledger.zombies if self.owner is not None and self.owner.process.alive else ledger.abandoned
        for one in self.in_flight():
            one.due = 0
            taken_from[id_of(one.headers)] += 1

    @property
    def unsettled(self) -> int:
        return len(self.pending) + len(self.log.records) - self.position


class LogLane(GroupLane):
    """Remembers one committed offset; everything past it comes again for the next owner."""

    def __init__(self, log: Log, group: str) -> None:
        super().__init__(log, group)
        self.committed = 0
        self.index = 0
        self.tracker = Tracker(limit=TRACKER_LIMIT)

    def begin(self) -> None:
        self.index = bisect_left(self.log.offsets, self.committed)
        self.tracker.revoke(self.committed)

    def next_due(self) -> int | None:
        if self.index >= len(self.log.records) or self.tracker.full:
            return None
        return self.log.records[self.index].due

    def take(self, now: int, room: int) -> list[tuple[Record, Headers, int]]:
        records = []
        for record in self.log.records[self.index : self.index + room]:
            if record.due > now:
                break  # a retry topic is read in order: the first that is not due holds back the rest
            records.append(record)
        self.index += len(records)
        self.tracker.deliver_many([one.offset for one in records])
        return [(one, one.headers, 1) for one in records]

    def in_flight(self) -> list[Record]:
        return self.log.records[bisect_left(self.log.offsets, self.committed) : self.index]

    def abandon(self, ledger: Ledger) -> None:
        for record in self.in_flight():
            ledger.births[id_of(record.headers)] += 1

    @property
    def unsettled(self) -> int:
        return len(self.log.records) - bisect_left(self.log.offsets, self.committed)


class SimServer:
    """The broker itself: it survives every process. `readers` must read everything, whether they live or not."""

    def __init__(
        self, world: World, ledger: Ledger, *, is_log: bool, partitions: int, readers: Sequence[Subscription]
    ) -> None:
        self.world, self.ledger, self.is_log = world, ledger, is_log
        self.partitions, self.readers = partitions, readers
        self.lease_seconds = world.rng.uniform(1.5, 4)
        self.max_bytes = world.rng.choice((None, None, None, 2500))
        self.topics: dict[str, list[Log]] = {}
        self.lanes: dict[tuple[str, str, int], GroupLane] = {}
        self.streams: list[SimStream] = []

    def logs(self, topic: str) -> list[Log]:
        if topic not in self.topics:
            self.topics[topic] = [Log(topic, Lane(topic, number)) for number in range(self.partitions)]
            for reader in self.readers:
                if _wants(reader, topic):
                    [self._lane(reader.group, log) for log in self.topics[topic]]
            for group in dict.fromkeys(stream.subscription.group for stream in self.streams):
                self.rebalance(group)
        return self.topics[topic]

    def append(self, copy: Copy) -> int:
        logs = self.logs(copy.destination)
        log = self.world.rng.choice(logs) if copy.key is None else logs[crc32(copy.key) % len(logs)]
        return self._write(log, copy)

    def append_retry(self, copy: Copy, group: str, due: int) -> None:
        """A log keeps a retry copy in a topic of its own, read by this group only."""
        topic = f"{copy.destination} retry {group}"
        if topic not in self.topics:
            self.topics[topic] = [Log(topic, Lane(copy.destination, RETRY_PARTITION), group)]
            self.rebalance(group)
        self._write(self.topics[topic][0], copy, due)

    def _write(self, log: Log, copy: Copy, due: int = 0) -> int:
        gap = self.world.rng.choice((0, 0, 0, 1, 2)) if self.is_log else 0
        offset = log.append(copy, self.world.now, gap, due)
        self.wake()
        return offset

    def wake(self) -> None:
        for stream in self.streams:
            stream.wake.set()

    def join(self, stream: SimStream) -> None:
        self.streams.append(stream)
        for source in stream.subscription.sources:
            if "*" not in source:
                self.logs(source)
        self.rebalance(stream.subscription.group)

    def leave(self, stream: SimStream) -> None:
        if stream in self.streams:
            self.streams.remove(stream)
            for lane in self._owned(stream):
                self.take_away(lane, tell=False)
            self.rebalance(stream.subscription.group)

    def rebalance(self, group: str) -> None:
        """Give every lane an owner, and nobody two more than another."""
        members = [stream for stream in self.streams if stream.subscription.group == group]
        if not members:
            return
        lanes = [self._lane(group, log) for log in self._wanted(group, members[0].subscription)]
        share = {id(one): [lane for lane in lanes if lane.owner is one] for one in members}
        for lane in lanes:
            if lane.owner is None:
                fewest = min(members, key=lambda one: len(share[id(one)]))
                share[id(fewest)].append(lane)
                self.give(lane, fewest)
        most, fewest = (pick(members, key=lambda one: len(share[id(one)])) for pick in (max, min))
        if len(share[id(most)]) - len(share[id(fewest)]) > 1:
            moving = share[id(most)][-1]
            if not moving.in_flight() or self.world.chance(0.5):
                self.take_away(moving)
                self.give(moving, fewest)

    def give(self, lane: GroupLane, stream: SimStream) -> None:
        lane.owner = stream
        lane.begin()
        stream.assigned(lane)

    def take_away(self, lane: GroupLane, *, tell: bool = True) -> None:
        """The owner's leases are void at once; it hears of it a little later."""
        owner, clean = lane.owner, not lane.in_flight()
        lane.abandon(self.ledger)
        generation, lane.generation, lane.owner = lane.generation, lane.generation + 1, None
        self.world.note("broker", "revokes", repr(lane), "cleanly" if clean else "in flight")
        if owner is not None and tell:
            delay = self.world.rng.random() * self.world.rng.choice((0, 0.1, 2))
            self.world.loop.call_later(delay, owner.revoked, lane, generation, clean)

    def steal(self) -> None:
        """A lease runs out under a living owner; another member, or the same, gets the lane."""
        owned = [lane for lane in self.lanes.values() if lane.owner is not None and lane.owner.process.alive]
        if owned:
            lane = self.world.rng.choice(owned)
            self.world.hit("steal", None, repr(lane))
            self.take_away(lane)
            members = [one for one in self.streams if one.subscription.group == lane.group]
            self.give(lane, self.world.rng.choice(members))

    def redeliver(self) -> None:
        """A message that is in flight is handed out once more, as brokers with a visibility time do."""
        lanes = [one for one in self.lanes.values() if isinstance(one, QueueLane) and one.in_flight()]
        if lanes:
            one = self.world.rng.choice(self.world.rng.choice(lanes).in_flight())
            self.world.hit("redeliver", None, id_of(one.headers))
            self.ledger.zombies[id_of(one.headers)] += 1
            one.due = 0
            self.wake()

    def unsettled(self) -> dict[str, int]:
        return {f"{lane.group} of {lane!r}": lane.unsettled for lane in self.lanes.values() if lane.unsettled}

    def holds(self) -> list[tuple[str, Record]]:
        """Everything that was ever written, by topic."""
        return [(log.topic, record) for logs in self.topics.values() for log in logs for record in log.records]

    def _owned(self, stream: SimStream) -> list[GroupLane]:
        return [lane for lane in self.lanes.values() if lane.owner is stream]

    def _wanted(self, group: str, subscription: Subscription) -> list[Log]:
        return [
            log
            for topic, logs in self.topics.items()
            for log in logs
            if (log.group == group if log.group else _wants(subscription, topic))
        ]

    def _lane(self, group: str, log: Log) -> GroupLane:
        key = (group, log.topic, log.shown.partition)
        if key not in self.lanes:
            self.lanes[key] = LogLane(log, group) if self.is_log else QueueLane(log, group)
        return self.lanes[key]


def _wants(subscription: Subscription, topic: str) -> bool:
    if any(fnmatchcase(topic, pattern) for pattern in subscription.exclude):
        return False
    if topic in subscription.sources:
        return True
    return not topic.startswith("redrive.") and any(fnmatchcase(topic, p) for p in subscription.sources if "*" in p)


class SimStream:
    """A subscription of one process."""

    def __init__(self, broker: SimBroker, subscription: Subscription) -> None:
        self.broker, self.subscription, self.process = broker, subscription, broker.process
        self.wake = asyncio.Event()
        self._held: dict[GroupLane, int] = {}
        self._events: deque[Event] = deque()
        self._parked: list[Delivery] = []
        self._flying: dict[tuple[GroupLane, int], int] = {}
        self._closed = False

    def __aiter__(self) -> SimStream:
        return self

    async def __anext__(self) -> Event:
        while not self._closed:
            event = self._next_event()
            if event is not None:
                return event
            self.wake.clear()
            due = self._next_due()
            if due is not None and due <= self.broker.world.now:
                await self.broker.call("fetch", self._fetch)
            elif not self._events:
                await self._idle(due)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if not self._closed:
            await self.broker.call("leave", self._leave)

    def assigned(self, lane: GroupLane) -> None:
        if lane in self._held:  # it went and came back before its owner was told
            self.revoked(lane, self._held[lane], clean=False)
        self._held[lane] = lane.generation
        self._events.append(Assigned((lane.log.shown,)))
        self.wake.set()

    def revoked(self, lane: GroupLane, generation: int, clean: bool) -> None:
        if self._held.get(lane) != generation:
            return
        del self._held[lane]
        self._flying = {key: turn for key, turn in self._flying.items() if key[0] is not lane}
        self._parked = [one for one in self._parked if one.token.lane is not lane]
        self._events.append(Revoked((lane.log.shown,), clean))
        self.wake.set()

    def holds(self, lease: Lease) -> bool:
        """Whether this process believes that it owns the lane; it may have lost it and not know yet."""
        return self._held.get(lease.lane) == lease.generation

    def finished(self, lease: Lease) -> None:
        if self._flying.get((lease.lane, lease.offset)) == lease.turn:
            del self._flying[lease.lane, lease.offset]
            self.wake.set()

    def _holds(self, lane: GroupLane) -> bool:
        return self._held.get(lane) == lane.generation and lane.owner is self

    def _is_current(self, lease: Lease) -> bool:
        return self._holds(lease.lane) and lease.generation == lease.lane.generation

    def _open(self) -> list[GroupLane]:
        return [lane for lane in self._held if self._holds(lane) and not self.broker.is_paused(lane)]

    def _next_due(self) -> int | None:
        if len(self._flying) >= self.subscription.in_flight:
            return None
        return min((due for lane in self._open() if (due := lane.next_due()) is not None), default=None)

    def _next_event(self) -> Event | None:
        if any(not self.broker.is_paused(one.token.lane) for one in self._parked):
            self._events.append(Batch(tuple(self._parked)))
            self._parked = []
        while self._events:
            event = self._events.popleft()
            if not isinstance(event, Batch):
                return event
            ready = [one for one in event.deliveries if self._is_current(one.token)]
            self._parked += [one for one in ready if self.broker.is_paused(one.token.lane)]
            ready = [one for one in ready if not self.broker.is_paused(one.token.lane)]
            if ready:
                return Batch(tuple(ready))
        return None

    def _fetch(self) -> None:
        """What is fetched stands in `_events`, so that a cancelled caller loses nothing."""
        rng, lanes = self.broker.world.rng, self._open()
        rng.shuffle(lanes)
        room = min(self.subscription.batch, self.subscription.in_flight - len(self._flying))
        deliveries = []
        for lane in lanes:
            for record, headers, turn in lane.take(self.broker.world.now, room - len(deliveries)):
                deliveries.append(self._delivery(lane, record, headers, turn))
        if isinstance(lanes[0] if lanes else None, QueueLane):
            rng.shuffle(deliveries)
        if deliveries:
            self._events.append(Batch(tuple(deliveries)))

    def _delivery(self, lane: GroupLane, record: Record, headers: Headers, turn: int) -> Delivery:
        self._flying[lane, record.offset] = turn
        shown = lane.log.shown
        where = (NAME, shown.source, shown.partition, str(record.offset), record.timestamp)
        message = Message(*where, record.key, record.body, headers)
        return Delivery(message, self.subscription.group, Lease(lane, lane.generation, record.offset, turn), turn)

    async def _idle(self, due: int | None) -> None:
        loop = self.broker.world.loop
        timer = loop.call_later((due - self.broker.world.now) / 1000, self.wake.set) if due is not None else None
        try:
            await self.wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _leave(self) -> None:
        self._closed = True
        self.broker.server.leave(self)


class SimBroker:
    """One process's connection to the server."""

    name = NAME

    def __init__(self, server: SimServer, process: Process) -> None:
        self.server, self.process, self.world = server, process, server.world
        self.can = Abilities(
            delay_natively=not server.is_log,
            order_by_key=True,
            retains_settled=True,
            durable=True,
            max_message_bytes=server.max_bytes,
        )
        self._paused: set[tuple[str, Lane]] = set()
        self._streams: list[SimStream] = []

    async def open(self) -> None:
        await self.call("open", lambda: None)

    async def close(self) -> None:
        for stream in self._streams:
            await stream.aclose()

    async def ensure(self, sources: Sequence[SourceSpec]) -> None:
        await self.call("ensure", lambda: [self.server.logs(one.name) for one in sources] and None)

    async def subscribe(self, subscription: Subscription) -> SimStream:
        stream = SimStream(self, subscription)
        self.process.on_death.append(lambda: self._died(stream))
        self._streams.append(stream)
        await self.call("subscribe", lambda: self.server.join(stream))
        return stream

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettleResult]:
        if self.server.is_log:
            return await self._settle_log(settlements)
        return await self.call("settle", lambda: [self._settle_one(one) for one in settlements])

    async def publish(self, copies: Sequence[Copy]) -> list[PublishResult]:
        results: list[PublishResult] = await self.call("publish", lambda: [self._publish(one) for one in copies])
        if self.world.chance(self.world.fates.ambiguous):
            self.world.hit("unknown", self.process, "broker.publish")
            return [Unknown("no answer") if isinstance(one, Confirmed) else one for one in results]
        return results

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        await self.call("extend", lambda: None)

    async def pause(self, group: str, lanes: Sequence[Lane]) -> None:
        self._paused.update((group, lane) for lane in lanes)

    async def resume(self, group: str, lanes: Sequence[Lane]) -> None:
        self._paused.difference_update((group, lane) for lane in lanes)
        self.server.wake()

    async def read(self, coordinates: Sequence[Coordinates]) -> list[Message | None]:
        return await self.call("read", lambda: [self._find(one) for one in coordinates])

    async def depth(self, source: str, group: str) -> Depth:
        return Depth(sum(one.unsettled for key, one in self.server.lanes.items() if key[:2] == (group, source)))

    def is_paused(self, lane: GroupLane) -> bool:
        return bool(self._paused) and (lane.group, lane.log.shown) in self._paused

    async def call(self, what, effect, **facts):
        return await self.world.call(
            self.process, f"broker.{what}", effect, lambda why: BrokerUnavailable(NAME, what, why), **facts
        )

    def _died(self, stream: SimStream) -> None:
        """Its leases run out, and somebody else takes over."""
        self.world.loop.call_later(self.server.lease_seconds, self.server.leave, stream)

    def _publish(self, copy: Copy) -> PublishResult:
        refused = self._refusal(copy)
        if refused is not None:
            return refused
        self.server.ledger.published(self.process, copy)
        return Confirmed(str(self.server.append(copy)))

    def _refusal(self, copy: Copy) -> Refused | None:
        size = len(copy.body or b"") + sum(len(name) + len(value or b"") for name, value in copy.headers)
        if self.server.max_bytes is not None and size > self.server.max_bytes:
            return Refused(f"{size} bytes are too many", too_large=True)
        return Refused("no permission") if self.world.refuses(f"copy to {copy.destination}") else None

    def _settle_one(self, settlement: Settlement) -> SettleResult:
        lease: Lease = settlement.delivery.token
        refused = self._refusal(settlement.copy) if isinstance(settlement, Bury | RetryAt) else None
        if refused is not None:
            return refused
        self._finished(settlement)
        one = lease.lane.pending.get(lease.offset)
        if one is None or one.due is not None or one.turn != lease.turn:
            return LeaseLost()
        match settlement:
            case Ack():
                del lease.lane.pending[lease.offset]
            case Bury(copy=copy):
                del lease.lane.pending[lease.offset]
                self.server.append(copy)
            case RetryAt(copy=copy, when=when):
                one.due, one.headers = when, copy.headers
            case Release():
                one.due = self.world.now
        self.server.wake()
        return Settled()

    def _finished(self, settlement: Settlement) -> None:
        for stream in self._streams:
            stream.finished(settlement.delivery.token)

    # ---- the log: copies first, then the tracker, then the commit

    async def _settle_log(self, settlements: Sequence[Settlement]) -> list[SettleResult]:
        results = await self.call("settle", lambda: [self._append_copy(one) for one in settlements])
        lanes: dict[GroupLane, int] = {}
        for settlement, result in zip(settlements, results, strict=True):
            if isinstance(result, Settled):
                lease = settlement.delivery.token
                if lease.generation == lease.lane.generation:
                    lease.lane.tracker.settle(lease.offset, lease.lane.tracker.generation)
                    lanes[lease.lane] = lease.generation
        self.server.wake()  # a tracker that was full may have room again
        await self._commit(lanes)
        return results

    def _append_copy(self, settlement: Settlement) -> SettleResult:
        lease: Lease = settlement.delivery.token
        if isinstance(settlement, Bury | RetryAt):
            refused = self._refusal(settlement.copy)
            if refused is not None:
                return refused
        self._finished(settlement)
        if not any(stream.holds(lease) for stream in self._streams):
            return LeaseLost()
        if isinstance(settlement, Bury):
            self.server.append(settlement.copy)
        elif isinstance(settlement, RetryAt):
            if lease.appended:  # the answer to the first was lost, so there are two now
                self.server.ledger.births[id_of(settlement.copy.headers)] += 1
            lease.appended = True
            self.server.append_retry(settlement.copy, settlement.delivery.group, settlement.when)
        return Settled()

    async def _commit(self, lanes: dict[GroupLane, int]) -> None:
        """What cannot be committed now is committed later; a lane that was lost meanwhile, by its new owner."""
        try:
            await self.call("commit", lambda: self._commit_all(lanes.items()))
        except BrokerUnavailable:
            self.world.loop.create_task(self._recommit(lanes))

    async def _recommit(self, lanes: dict[GroupLane, int]) -> None:
        await asyncio.sleep(RECOMMIT_SECONDS)
        await self._commit(lanes)

    @staticmethod
    def _commit_all(lanes: Iterable[tuple[GroupLane, int]]) -> None:
        for lane, generation in lanes:
            if lane.generation == generation:
                lane.committed = max(lane.committed, lane.tracker.watermark)

    def _find(self, place: Coordinates) -> Message | None:
        for log in self.server.topics.get(place.source, ()):
            if log.shown.partition == place.partition:
                for record in log.records:
                    if str(record.offset) == place.position:
                        where = (NAME, place.source, place.partition, place.position, record.timestamp)
                        return Message(*where, record.key, record.body, record.headers)
        return None
