"""Finds the message that kills the process: start records outside it, and suspects that run alone.

What is received is recorded as a span before it may run. A lane's new owner reads the spans nobody finished; their
messages are suspects and run one at a time with nothing beside them in the whole process, each under a record of its
own. A record left open by a run alone is a crash that only this message can have caused; two of them make a letter.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from redrive.attempts.base import Attempts, Span
from redrive.brokers.base import Delivery, Lane
from redrive.errors import AttemptsUnavailable
from redrive.runtime.item import Item, Record

log = logging.getLogger("redrive.runtime")

CRASHES_ALONE = 2


class Gate:
    """Lets handlers run side by side, or one of them alone in the whole process."""

    def __init__(self) -> None:
        self.running = 0
        self.is_open = True
        self._wakes: list[asyncio.Event] = []
        self._idle = asyncio.Event()
        self._turn = asyncio.Lock()

    def wakes(self, event: asyncio.Event) -> None:
        """Set this event whenever the gate opens again."""
        self._wakes.append(event)

    def enter(self) -> None:
        self.running += 1

    def leave(self) -> None:
        self.running -= 1
        if not self.running:
            self._idle.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Hold back every other handler of this process until the block ends."""
        async with self._turn:
            self.is_open = False
            try:
                while self.running:
                    self._idle.clear()
                    await self._idle.wait()
                yield
            finally:
                self.is_open = True
                for wake in self._wakes:
                    wake.set()


class Spans:
    """One consumer's start records, and what earlier owners of its lanes left open."""

    def __init__(self, attempts: Attempts, group: str) -> None:
        self._attempts, self._group = attempts, group
        self._open: dict[str, Record] = {}
        self._alone: set[str] = set()
        self._finished: list[str] = []
        self._inherited: dict[Lane, list[Span]] = {}
        self.degraded: str | None = None

    async def assigned(self, lanes: Sequence[Lane]) -> None:
        """Read what earlier owners of these lanes never finished."""
        for lane in lanes:
            try:
                found = await self._attempts.open_spans(lane.source, self._group, lane.partition)
            except AttemptsUnavailable as error:
                self.degraded = str(error)
                continue
            foreign = [span for span in found if span.id not in self._open]
            if foreign:
                self._inherited[lane] = foreign

    @property
    def suspects_nobody(self) -> bool:
        return not self._inherited

    def is_suspect(self, delivery: Delivery) -> bool:
        """Whether an earlier run of this message may have killed its process."""
        if not self._inherited:
            return False
        position = delivery.message.position
        return any(position in span.positions for span in self._inherited.get(delivery.lane, ()))

    def crashes(self, delivery: Delivery) -> int:
        """How often a process died while this message ran alone."""
        position = delivery.message.position
        spans = self._inherited.get(delivery.lane, ())
        return sum(span.alone and position in span.positions for span in spans)

    async def crashes_on_record(self, delivery: Delivery) -> int:
        """Like `crashes`, asked again: an owner that was only slow has finished its record meanwhile."""
        lane, position = delivery.lane, delivery.message.position
        try:
            found = await self._attempts.open_spans(lane.source, self._group, lane.partition)
        except AttemptsUnavailable as error:
            self.degraded = str(error)
            return 0
        return sum(span.alone and position in span.positions for span in found)

    async def start(self, deliveries: Sequence[Delivery]) -> list[Item]:
        """Record these as started, and the finished ones as finished, in one step. Suspects are left out of it."""
        lanes: dict[tuple[str, int], Record] = {}
        items = []
        for delivery in deliveries:
            message = delivery.message
            if self._inherited and self.is_suspect(delivery):
                items.append(Item(delivery))
                continue
            record = lanes.get((message.source, message.partition))
            if record is None:
                record = lanes[message.source, message.partition] = Record(uuid.uuid4().hex, delivery.lane, [])
            record.positions.append(message.position)
            items.append(Item(delivery, None, record))
        await self._turn([self._opened(record) for record in lanes.values()])
        return items

    def _opened(self, record: Record) -> Span:
        record.left = len(record.positions)
        self._open[record.id] = record
        return Span(record.id, record.lane.source, self._group, record.lane.partition, tuple(record.positions))

    async def start_alone(self, delivery: Delivery) -> None:
        """Record one suspect that is about to run alone."""
        lane, position = delivery.lane, delivery.message.position
        span = Span(uuid.uuid4().hex, lane.source, self._group, lane.partition, (position,), alone=True)
        self._alone.add(span.id)
        self._inherited.setdefault(lane, []).append(span)
        await self._turn([span])

    def ended(self, item: Item) -> None:
        """The run came to an end, whichever: it did not kill the process."""
        record, item.record = item.record, None
        if record is None:
            return
        record.left -= 1
        if not record.left and record.id in self._open:
            del self._open[record.id]
            self._finished.append(record.id)

    async def cleared(self, delivery: Delivery) -> None:
        """A suspect came to an end alone: it is none any more, and its records are finished."""
        lane, position = delivery.lane, delivery.message.position
        kept: list[Span] = []
        for span in self._inherited.get(lane, ()):
            rest = tuple(one for one in span.positions if one != position)
            if rest and not span.alone:
                kept.append(Span(span.id, span.source, span.group, span.partition, rest))
            elif rest:
                kept.append(span)
            else:
                self._alone.discard(span.id)
                self._finished.append(span.id)
        self._keep(lane, kept)
        await self._turn([])

    async def forget_settled(self, waiting: Iterable[Delivery]) -> None:
        """Finish what earlier owners left open and nobody redelivers: it was settled before they died."""
        held = {(delivery.lane, delivery.message.position) for delivery in waiting}
        for lane, spans in list(self._inherited.items()):
            kept = [s for s in spans if s.alone or any((lane, position) in held for position in s.positions)]
            self._finished += [span.id for span in spans if span not in kept]
            self._keep(lane, kept)
        await self.flush()

    def revoked(self, lanes: Sequence[Lane]) -> None:
        """These lanes are somebody else's, who reads what is open; we are alive, so what we started is finished."""
        for lane in lanes:
            self._finished += [span.id for span in self._inherited.pop(lane, ()) if span.id in self._alone]
        for record in [one for one in self._open.values() if one.lane in lanes]:
            del self._open[record.id]
            self._finished.append(record.id)

    async def flush(self) -> None:
        """Write down what is finished, when no new batch does it on the way."""
        if self._finished:
            await self._turn([])

    async def close(self, hanging: Sequence[Item] = ()) -> None:
        """A clean end: nothing that was started here can be blamed for it, but what still hangs."""
        blamed = {item.record.id for item in hanging if item.record is not None}
        self._finished += self._open.keys() - blamed
        self._open.clear()
        await self.flush()

    def _keep(self, lane: Lane, spans: list[Span]) -> None:
        if spans:
            self._inherited[lane] = spans
        else:
            self._inherited.pop(lane, None)

    async def _turn(self, start: Sequence[Span]) -> None:
        finished, self._finished = self._finished, []
        if not start and not finished:
            return
        try:
            await self._attempts.turn(start=start, finish=finished)
            self.degraded = None
        except AttemptsUnavailable as error:
            self._finished += finished
            self.degraded = str(error)
