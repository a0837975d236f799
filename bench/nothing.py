"""A broker that costs nothing: it hands out deliveries made beforehand and settles at once, so the runtime is left."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redrive.brokers.base import (
    Abilities,
    Assigned,
    Batch,
    Confirmed,
    Delivery,
    Depth,
    Event,
    Lane,
    PublishResult,
    Settled,
    Settlement,
    SettleResult,
    SourceSpec,
    Stream,
    Subscription,
)
from redrive.message import Coordinates, Copy, Message

_SETTLED = Settled()


def batches(number: int, *, size: int, source: str, group: str, body: bytes, lanes: int = 8) -> list[Batch]:
    """As a log hands them out: a few lanes in every batch, each in order."""
    made = []
    for start in range(0, number, size):
        places = sorted((n % lanes, n // lanes) for n in range(start, start + size))
        messages = (Message("nothing", source, lane, str(offset), 0, None, body) for lane, offset in places)
        made.append(Batch(tuple(Delivery(message, group, None) for message in messages)))
    return made


class NothingBroker:
    name = "nothing"
    can = Abilities(delay_natively=True, order_by_key=True, retains_settled=True, durable=False)

    def __init__(self, prepared: Sequence[Batch]) -> None:
        self.prepared = prepared
        self.unsettled = 0
        self.room = asyncio.Event()

    async def subscribe(self, subscription: Subscription) -> Stream:
        return NothingStream(self, subscription.in_flight)

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettleResult]:
        self.unsettled -= len(settlements)
        self.room.set()
        return [_SETTLED] * len(settlements)

    async def publish(self, copies: Sequence[Copy]) -> list[PublishResult]:
        return [Confirmed("")] * len(copies)

    async def ensure(self, sources: Sequence[SourceSpec]) -> None: ...

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def extend(self, deliveries: Sequence[Delivery]) -> None: ...

    async def pause(self, group: str, lanes: Sequence[Lane]) -> None: ...

    async def resume(self, group: str, lanes: Sequence[Lane]) -> None: ...

    async def read(self, coordinates: Sequence[Coordinates]) -> list[Message | None]:
        return [None] * len(coordinates)

    async def depth(self, source: str, group: str) -> Depth:
        return Depth(0)


class NothingStream:
    def __init__(self, broker: NothingBroker, in_flight: int) -> None:
        self._broker, self._in_flight = broker, in_flight
        self._events: Any = iter(self._all())

    def _all(self) -> list[Event]:
        lanes = {delivery.lane: None for delivery in self._broker.prepared[0].deliveries}
        return [Assigned(tuple(lanes)), *self._broker.prepared]

    def __aiter__(self) -> NothingStream:
        return self

    async def __anext__(self) -> Event:
        broker = self._broker
        while broker.unsettled >= self._in_flight:
            broker.room.clear()
            await broker.room.wait()
        event: Event | None = next(self._events, None)
        if event is None:
            await asyncio.Event().wait()
            raise StopAsyncIteration
        if isinstance(event, Batch):
            broker.unsettled += len(event.deliveries)
        return event

    async def aclose(self) -> None: ...
