"""One Kafka subscription, on the loop: hands out batches, holds retries until they are due, knows what is settled.

Trackers and buffers belong to the loop alone. The consumer belongs to the reader's thread, which passes whole batches
and goes on polling, however slow a handler is.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from itertools import count, groupby
from typing import Any, Protocol

from redrive.brokers._kafka_client import Due, Options, Origin, headers_of, split_due
from redrive.brokers._kafka_reader import Commit, Place, Reader
from redrive.brokers.base import Assigned, Batch, Delivery, Event, Lane, Revoked, Subscription
from redrive.clock import Clock, Millis
from redrive.errors import BrokerUnavailable
from redrive.message import Headers, Message
from redrive.tracker import Tracker

log = logging.getLogger("redrive.kafka")

HELD_LIMIT = 200
"""Retries of one partition that wait in memory for their time; the others wait in Kafka."""
STRIDE = 1_000_000
"""A retry partition is lane number seconds * STRIDE + partition of its source."""
RETRY_HOP_SECONDS = 5.0
FAR = 3600.0

Token = tuple["LaneState", int, int, int]
"""Lane, offset, generation, and how often it was released before."""


class LaneState:
    """One partition that this stream owns, from its assignment to its revocation."""

    __slots__ = (
        "buffer", "draining", "handed", "held", "in_flight", "is_announced", "lane", "moving", "origin", "place",
        "seen", "stream", "tracker", "turns",
    )  # fmt: skip

    def __init__(self, stream: KafkaStream, place: Place, origin: Origin, seen: int) -> None:
        number = place[1] + STRIDE * (origin.seconds or 0)
        self.stream, self.place, self.origin, self.lane = stream, place, origin, Lane(origin.source, number)
        self.seen = seen  # an earlier owner handed out what is below
        self.tracker = Tracker()
        self.buffer: deque[Delivery] = deque()
        self.turns: dict[int, int] = {}
        self.moving: set[int] = set()
        self.in_flight = self.handed = self.held = 0
        self.draining = False
        self.is_announced = origin.seconds is None

    def is_open(self, token: Token) -> bool:
        _, offset, generation, turn = token
        if turn != (self.turns.get(offset, 0) if self.turns else 0) or offset in self.moving:
            return False
        return self.tracker.is_open(offset, generation)

    def settle(self, token: Token) -> bool:
        """Done with it, if it is still ours."""
        if not self.is_open(token):
            return False
        self.tracker.settle(token[1], token[2])
        self.in_flight -= 1
        self.turns.pop(token[1], None)
        return True

    def can_settle(self, offsets: list[int]) -> bool:
        """Whether all of these are open in their first turn."""
        plain = not self.turns and not self.moving
        return plain and self.tracker.are_open(offsets, self.tracker.generation)

    def settle_all(self, offsets: list[int]) -> None:
        self.tracker.settle_many(offsets, self.tracker.generation)
        self.in_flight -= len(offsets)

    def release(self, delivery: Delivery) -> bool:
        """Hand it out again, under a new turn; Kafka itself would not."""
        if not self.is_open(delivery.token):
            return False
        _, offset, generation, turn = delivery.token
        self.turns[offset] = turn + 1
        self.in_flight -= 1
        token = (self, offset, generation, turn + 1)
        self.buffer.appendleft(Delivery(delivery.message, delivery.group, token, delivery.deliveries + 1))
        return True

    @property
    def due_commit(self) -> Commit:
        """The offset to commit; beside it, how far messages were handed out, which tells the next owner."""
        return self.tracker.watermark, str(max(self.handed, self.seen))


class Office(Protocol):
    """What a stream needs from its broker."""

    name: str
    clock: Clock
    options: Options

    def consumer_settings(self, group: str) -> dict[str, Any]: ...
    def is_paused(self, group: str, lane: Lane) -> bool: ...
    def left(self, stream: KafkaStream) -> None: ...
    async def hop(self, delivery: Delivery, due: Due) -> bool: ...


class KafkaStream:
    """The loop's side of a subscription."""

    def __init__(self, broker: Office, subscription: Subscription, topics: Mapping[str, Origin]) -> None:
        self.subscription = subscription
        self.accepted = self.backlog = 0
        self.blocked: frozenset[Place] = frozenset()
        self._broker, self._clock = broker, broker.clock
        self._topics = dict(topics)
        self._lanes: dict[Place, LaneState] = {}
        self._events: deque[Event] = deque()
        self._held: list[tuple[Millis, int, Delivery, Due]] = []
        self._order = count()
        self._rotation = 0
        self._wake, self._drained = asyncio.Event(), asyncio.Event()
        self._trouble: BrokerUnavailable | None = None
        self._closing: asyncio.Task[None] | None = None
        self._hops: set[asyncio.Task[None]] = set()
        settings = broker.consumer_settings(subscription.group)
        self._reader = Reader(self, broker.name, settings, broker.options, self._topics)

    def start(self) -> None:
        self._reader.start()

    def __aiter__(self) -> KafkaStream:
        return self

    async def __anext__(self) -> Event:
        while self._closing is None:
            event = self._next_event()
            if event is not None:
                return event
            if self._trouble is not None:
                trouble, self._trouble = self._trouble, None
                raise trouble
            self._wake.clear()
            due = (self._held[0][0] - self._clock.now()) / 1000 if self._held else FAR
            await self._clock.wait(self._wake, max(due, 0.001))
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._leave())
        await asyncio.shield(self._closing)

    async def _leave(self) -> None:
        self._wake.set()
        self._reader.owe(self._forget(list(self._lanes.values()), announce=False))
        await self._reader.stop()
        for hop in self._hops:
            hop.cancel()
        await asyncio.gather(*self._hops, return_exceptions=True)
        self._broker.left(self)

    # What the broker asks.

    @property
    def lanes(self) -> list[Lane]:
        return [state.lane for state in self._lanes.values()]

    def retopic(self, topics: Mapping[str, Origin]) -> None:
        """Read these topics from now on."""
        if topics.keys() != self._topics.keys() and self._closing is None:
            self._topics = dict(topics)
            self._reader.subscribe(topics)

    def fail(self, trouble: BrokerUnavailable) -> None:
        """Have the reading side hear of this once."""
        self._trouble = trouble
        self._wake.set()

    def touched(self, lanes: Iterable[LaneState]) -> None:
        """Something of these lanes was settled or released."""
        self._reader.owe({lane.place: lane.due_commit for lane in lanes if lane.place in self._lanes})
        self.look_again()
        if all(not lane.in_flight for lane in self._lanes.values() if lane.draining):
            self._drained.set()

    def look_again(self) -> None:
        """Lanes were paused, resumed, filled or emptied: decide anew which of them take more."""
        lanes = self._lanes.values()
        stopped = {lane.place for lane in lanes if self._is_paused(lane)}
        self.backlog = sum(len(lane.buffer) for lane in lanes if lane.place not in stopped)
        full = {lane.place for lane in lanes if lane.tracker.full or lane.held >= HELD_LIMIT}
        blocked = stopped | full
        if blocked != self.blocked:
            self.blocked = frozenset(blocked)
        self._reader.look_again()
        self._wake.set()

    def holds_lease(self) -> bool:
        return not self._reader.is_late

    def check_lease(self) -> None:
        """A process that stood still beyond its session owns nothing any more, whatever it remembers."""
        if self._lanes and not self.holds_lease():
            log.warning("a consumer of %s stood still and gives up its partitions", self.subscription.group)
            self._forget(list(self._lanes.values()))

    async def stood_still(self) -> None:
        """The reader has found out first; it joins again once this is done."""
        self.check_lease()

    async def flush(self) -> None:
        """Return once everything settled is committed."""
        await self._reader.flush()

    # Handing out.

    def _next_event(self) -> Event | None:
        self._ripen()
        if self._events:
            return self._events.popleft()
        in_flight = sum(lane.in_flight for lane in self._lanes.values())
        room = min(self.subscription.batch, self.subscription.in_flight - in_flight)
        deliveries = self._take(room) if room > 0 else []
        if not deliveries:
            return None
        self.look_again()
        return Batch(tuple(deliveries))

    def _take(self, room: int) -> list[Delivery]:
        """From every lane in turn, beginning with another one each time."""
        lanes = list(self._lanes.values())
        self._rotation += 1
        taken: list[Delivery] = []
        for index in range(len(lanes)):
            lane = lanes[(self._rotation + index) % len(lanes)]
            size = min(len(lane.buffer), room - len(taken))
            if size <= 0 or self._is_paused(lane):
                continue
            taken += [lane.buffer.popleft() for _ in range(size)]
            lane.in_flight += size
            lane.handed = max(lane.handed, taken[-1].token[1] + 1)
        return taken

    def _is_paused(self, lane: LaneState) -> bool:
        return lane.draining or self._broker.is_paused(self.subscription.group, lane.lane)

    # Arriving.

    def arrived(self, records: list[Any]) -> None:
        """A batch from the reader. What is of lanes lost meanwhile goes nowhere; their next owner reads it."""
        self.accepted += len(records)
        runs = groupby(records, lambda record: (record.topic(), record.partition()))
        for place, run in runs:
            lane = self._lanes.get(place)
            if lane is None or lane.draining:
                continue
            deliveries = self._deliveries(lane, run)
            lane.tracker.deliver_many([delivery.token[1] for delivery in deliveries])
            if lane.origin.seconds is None:
                lane.buffer.extend(deliveries)
            else:
                for delivery in deliveries:
                    self._hold(lane, delivery)
        self.look_again()

    def _deliveries(self, lane: LaneState, records: Iterable[Any]) -> list[Delivery]:
        """Every message of this stream passes here: nothing is done in it that can be done once for a batch."""
        name, group, seen = self._broker.name, self.subscription.group, lane.seen
        source, number, generation = lane.origin.source, lane.lane.partition, lane.tracker.generation
        deliveries = []
        for record in records:
            offset = record.offset()
            headers = headers_of(record)
            message = Message(
                name, source, number, str(offset), record.timestamp()[1], record.key(), record.value(), headers
            )  # fmt: skip
            times = 1 if offset >= seen else 2
            deliveries.append(Delivery(message, group, (lane, offset, generation, 0), times))
        return deliveries

    def _hold(self, lane: LaneState, delivery: Delivery) -> None:
        """A retry waits here until it is due, or until it must hop on; nothing else waits for it."""
        message, source = delivery.message, lane.origin.source
        headers, due = split_due(message.headers)
        if due is None:
            due = Due(0, message.timestamp, source, delivery.group)
        lane.held += 1
        if (due.source, due.group) != (source, delivery.group):
            self._let_go(delivery)  # two groups can share the name of a retry topic; this is the other's
            return
        message = _as_it_was(message, headers, due.timestamp)
        waiting = Delivery(message, delivery.group, delivery.token, delivery.deliveries)
        until = min(due.when, self._clock.now() + 1000 * (lane.origin.seconds or 0))
        heapq.heappush(self._held, (until, next(self._order), waiting, due))

    def _let_go(self, delivery: Delivery) -> None:
        lane, offset, generation, _ = delivery.token
        lane.held -= 1
        lane.tracker.settle(offset, generation)
        self._reader.owe({lane.place: lane.due_commit})

    def _ripen(self) -> None:
        now, ripe = self._clock.now(), False
        while self._held and self._held[0][0] <= now:
            _, _, delivery, due = heapq.heappop(self._held)
            lane: LaneState = delivery.token[0]
            ripe = True
            if due.when > now:
                self._spawn_hop(delivery, due)
                continue
            lane.held -= 1
            if not lane.is_announced:
                lane.is_announced = True
                self._events.append(Assigned((lane.lane,)))
            lane.buffer.append(delivery)
        if ripe:
            self.look_again()

    def _spawn_hop(self, delivery: Delivery, due: Due) -> None:
        task = asyncio.create_task(self._hop(delivery, due))
        self._hops.add(task)
        task.add_done_callback(self._hops.discard)

    async def _hop(self, delivery: Delivery, due: Due) -> None:
        """It has waited as long as its topic can: on into the next, and only then is this copy done with."""
        lane: LaneState = delivery.token[0]
        if await self._broker.hop(delivery, due):
            self._let_go(delivery)
        elif lane.place in self._lanes:
            until = self._clock.now() + round(RETRY_HOP_SECONDS * 1000)
            heapq.heappush(self._held, (until, next(self._order), delivery, due))
        self.look_again()

    # Coming and going of lanes; the reader calls these on the loop.

    def assigned(self, places: Mapping[Place, int]) -> None:
        origins = {place: self._topics.get(place[0]) for place in places}
        fresh = {p: LaneState(self, p, o, places[p]) for p, o in origins.items() if o is not None}
        self._lanes.update(fresh)
        announced = tuple(lane.lane for lane in fresh.values() if lane.is_announced)
        if announced:
            self._events.append(Assigned(announced))
        self.look_again()

    def lost(self, places: Collection[Place]) -> None:
        """Taken from us without a question: nothing of them may be committed."""
        self._forget([self._lanes[place] for place in places if place in self._lanes])

    async def give_back(self, places: Collection[Place]) -> dict[Place, Commit]:
        """Let what is in flight end, within reason; then it is ours no more. Says what to commit."""
        lanes = [self._lanes[place] for place in places if place in self._lanes]
        for lane in lanes:
            lane.draining = True
            lane.buffer.clear()
        self._drained.clear()
        patience = min(self._broker.options.drain_seconds, self._broker.options.session_seconds / 2)
        if any(lane.in_flight for lane in lanes) and self._closing is None:
            await self._clock.wait(self._drained, patience)
        return self._forget([lane for lane in lanes if self._lanes.get(lane.place) is lane])

    def _forget(self, lanes: list[LaneState], *, announce: bool = True) -> dict[Place, Commit]:
        commits = {lane.place: lane.due_commit for lane in lanes if lane.handed}
        gone = {id(lane) for lane in lanes}
        for lane in lanes:
            del self._lanes[lane.place]
            lane.buffer.clear()
            lane.tracker.revoke()
        self._held = [entry for entry in self._held if id(entry[2].token[0]) not in gone]
        heapq.heapify(self._held)
        for clean in (True, False) if announce else ():
            told = tuple(lane.lane for lane in lanes if lane.is_announced and clean is not bool(lane.in_flight))
            if told:
                self._events.append(Revoked(told, clean))
        self.look_again()
        return commits


def _as_it_was(message: Message, headers: Headers, timestamp: Millis) -> Message:
    return Message(
        message.broker, message.source, message.partition, message.position, timestamp, message.key, message.body,
        headers,
    )  # fmt: skip
