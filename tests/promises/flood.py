"""A broker made of arithmetic, for stories with hundreds of thousands of messages and none of them stored.

Message n of the source comes into being at its time on the clock and is handed out like from a log; what is settled is
only counted. It implements the Broker socket, so the runtime above it is the real one.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from typing import Any

from redrive.attempts.base import Span
from redrive.brokers.base import (
    Abilities,
    Assigned,
    Batch,
    Bury,
    Confirmed,
    Delivery,
    Depth,
    Event,
    Lane,
    PublishResult,
    RetryAt,
    Settled,
    Settlement,
    SettleResult,
    SourceSpec,
    Subscription,
)
from redrive.clock import Millis
from redrive.message import Coordinates, Copy, Message
from redrive.testing import JumpingClock

LANE = Lane("orders", 0)
LINGER = 100
"""Milliseconds between two looks for new messages: a thousand messages a second come a hundred at a time."""


class Flood:
    """`total` messages, `rate` a second. What was handed out and not settled comes again with the next stream."""

    name = "flood"
    can = Abilities(delay_natively=True, order_by_key=True, retains_settled=True, durable=False)

    def __init__(self, clock: JumpingClock, *, rate: int, total: int) -> None:
        self.clock, self.rate, self.total = clock, rate, total
        self.began = clock.now()
        self.head = 0
        self.acked = 0
        self.buried: list[Copy] = []
        self.retries: list[tuple[Millis, int, Message]] = []
        self.again: list[Message] = []
        self.out: dict[str, Message] = {}
        self.paused: set[Lane] = set()
        self.stream: FloodStream | None = None
        self.room = 0

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def ensure(self, sources: Sequence[SourceSpec]) -> None: ...

    async def subscribe(self, subscription: Subscription) -> FloodStream:
        self.stream = FloodStream(self, subscription)
        return self.stream

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettleResult]:
        for settlement in settlements:
            message = settlement.delivery.message
            del self.out[message.position]
            if isinstance(settlement, RetryAt):
                place = (message.source, message.partition, message.position, message.timestamp)
                copy = Message(self.name, *place, settlement.copy.key, settlement.copy.body, settlement.copy.headers)
                heapq.heappush(self.retries, (settlement.when, int(message.position), copy))
            elif isinstance(settlement, Bury):
                self.buried.append(settlement.copy)
            else:
                self.acked += 1
        self._wake()
        return [Settled()] * len(settlements)

    async def publish(self, copies: Sequence[Copy]) -> list[PublishResult]:
        return [Confirmed("")] * len(copies)

    async def extend(self, deliveries: Sequence[Delivery]) -> None: ...

    async def pause(self, group: str, lanes: Sequence[Lane]) -> None:
        self.paused.update(lanes)

    async def resume(self, group: str, lanes: Sequence[Lane]) -> None:
        self.paused.difference_update(lanes)
        self._wake()

    async def read(self, coordinates: Sequence[Coordinates]) -> list[Message | None]:
        return [None] * len(coordinates)

    async def depth(self, source: str, group: str) -> Depth:
        return Depth(self.total - self.acked - len(self.buried))

    @property
    def unsettled(self) -> int:
        return self.total - self.acked - len(self.buried)

    def due(self) -> Millis | None:
        return self.clock.now() if self.stream is None else self.stream.due()

    def take(self, number: int) -> list[Message]:
        """What may be handed out now: first what came back, then what is new."""
        now, taken = self.clock.now(), self.again[:number]
        self.again = self.again[number:]
        while self.retries and self.retries[0][0] <= now and len(taken) < number:
            taken.append(heapq.heappop(self.retries)[2])
        arrived = min(self.total, (now - self.began) * self.rate // 1000)
        while self.head < arrived and len(taken) < number:
            body = str(self.head).encode()
            taken.append(Message(self.name, "orders", 0, str(self.head), self.began, body, body))
            self.head += 1
        return taken

    def next_at(self) -> Millis | None:
        """When there is something to hand out again."""
        times = [self.retries[0][0]] if self.retries else []
        if self.head < self.total:
            arrives = self.began + (self.head + 1) * 1000 // self.rate
            times.append(max(arrives, self.clock.now() + LINGER))
        return min(times, default=None)

    def _wake(self) -> None:
        if self.stream is not None:
            self.stream.wake.set()


class FloodStream:
    def __init__(self, flood: Flood, subscription: Subscription) -> None:
        self._flood, self._subscription = flood, subscription
        self.wake = asyncio.Event()
        self._resting: Millis | bool | None = False
        self._is_new = True

    def __aiter__(self) -> FloodStream:
        return self

    async def __anext__(self) -> Event:
        if self._is_new:
            self._is_new = False
            return Assigned((LANE,))
        flood = self._flood
        while True:
            self.wake.clear()
            room = min(self._subscription.batch, self._subscription.in_flight - len(flood.out))
            is_open = room > 0 and not flood.paused
            messages = flood.take(room) if is_open else []
            if messages:
                flood.out.update((message.position, message) for message in messages)
                return Batch(tuple(Delivery(message, self._subscription.group, None) for message in messages))
            self._resting = flood.next_at() if is_open else None
            pause = 3600.0 if self._resting is None else (self._resting - flood.clock.now()) / 1000
            await flood.clock.wait(self.wake, pause)
            self._resting = False

    async def aclose(self) -> None:
        flood = self._flood
        flood.again, flood.out, flood.stream = [*flood.out.values(), *flood.again], {}, None
        flood.paused.clear()

    def due(self) -> Millis | None:
        return self._flood.clock.now() if self._resting is False or self.wake.is_set() else self._resting


class Memory:
    """Attempts that cost nothing; `left` is what a dead process left open."""

    def __init__(self, left: Sequence[Span] = ()) -> None:
        self.spans = {span.id: span for span in left}
        self.numbers: dict[str, int] = {}

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def open_spans(self, source: str, group: str, partition: int) -> list[Span]:
        return list(self.spans.values())

    async def turn(self, *, start: Sequence[Span] = (), finish: Sequence[str] = ()) -> None:
        for span_id in finish:
            self.spans.pop(span_id, None)
        self.spans.update((span.id, span) for span in start)

    async def increment(self, keys: Sequence[str], now: Millis) -> list[int]:
        return [self.numbers.__setitem__(key, self.numbers.get(key, 0) + 1) or self.numbers[key] for key in keys]

    async def counts(self, keys: Sequence[str], now: Millis) -> list[int]:
        return [self.numbers.get(key, 0) for key in keys]

    async def clear(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.numbers.pop(key, None)


def number_of(message: Message | Any) -> int:
    return int(message.body)
