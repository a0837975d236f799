"""Order by key: one message of a key at a time, and none past an open letter of its key."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable

from redrive.brokers.base import Delivery, Lane
from redrive.codec import Ticket
from redrive.consumer import Consumer, letter_of
from redrive.errors import FilingFailed, StoreUnavailable
from redrive.letter import Failure, Kind, Reason
from redrive.message import Message
from redrive.office import Office
from redrive.runtime.engine import Engine
from redrive.runtime.item import Item
from redrive.stores.base import Filing

_BEHIND = Failure(Kind.TRANSIENT, "", "an earlier message of this key has an open letter")


class Keys:
    """One consumer's keys: which are at work, what waits for them, and which have open letters."""

    def __init__(self, consumer: Consumer, engine: Engine, ready: Callable[[Item], None]) -> None:
        self._consumer, self._engine, self._ready = consumer, engine, ready
        self._queues: dict[bytes, deque[Item]] = {}
        self._blocked: dict[tuple[str, bytes], int | None] = {}

    def admit(self, item: Item) -> None:
        """Let it run if no other message of its key is at work; else it waits for its turn."""
        key = item.delivery.message.key
        if key is None:
            self._ready(item)
        elif key in self._queues:
            self._queues[key].append(item)
        else:
            self._queues[key] = deque()
            self._ready(item)

    def ended(self, delivery: Delivery) -> None:
        """The message at work is settled: the next of its key may run."""
        key = delivery.message.key
        if key is None or key not in self._queues:
            return
        if self._queues[key]:
            self._ready(self._queues[key].popleft())
        else:
            del self._queues[key]

    @property
    def waiting(self) -> list[Delivery]:
        """What is here and has not had its turn."""
        return [item.delivery for queue in self._queues.values() for item in queue]

    def forget(self, lanes: Collection[Lane]) -> list[Item]:
        """Let go of what waits here of these lanes, and say what that was. What is at work is not among it."""
        gone = [item for queue in self._queues.values() for item in queue if item.delivery.lane in lanes]
        for key, queue in self._queues.items():
            self._queues[key] = deque(item for item in queue if item.delivery.lane not in lanes)
        return gone

    def clear(self) -> None:
        self._queues.clear()

    def died(self, message: Message, place: int) -> None:
        """A letter of this key is durable: what follows must wait."""
        if message.key is not None:
            known = self._blocked.get((message.source, message.key))
            self._blocked[message.source, message.key] = place if known is None else min(known, place)

    async def look_up(self, deliveries: Iterable[Delivery], office: Office) -> None:
        """Learn which keys of this batch have open letters, whoever filed them. Raises StoreUnavailable."""
        by_source: dict[str, set[bytes]] = {}
        for delivery in deliveries:
            if delivery.message.key is not None:
                by_source.setdefault(delivery.message.source, set()).add(delivery.message.key)
        for source, keys in by_source.items():
            found = await office.blocked(source, self._consumer.group, sorted(keys))
            for key in keys:
                self._blocked.pop((source, key), None)
            self._blocked.update(((source, key), place) for key, place in found.items())

    async def held(self, message: Message, ticket: Ticket | None) -> bool:
        """Whether this message was put behind an open letter of its key. Raises FilingFailed where it cannot be."""
        if message.key is None or (message.source, message.key) not in self._blocked:
            return False
        first_dead = self._blocked[message.source, message.key]
        place = place_of(message)
        if ticket is not None and ticket.hop and (first_dead is None or first_dead >= place):
            return False
        return await self._hold(message, ticket)

    async def _hold(self, message: Message, ticket: Ticket | None) -> bool:
        consumer, now = self._consumer, self._engine.clock.now()
        past = ticket or consumer.first_ticket(message, now)
        letter = letter_of(consumer, self._engine.environment, message, past, _BEHIND, Reason.HELD, now)
        try:
            [filed] = await self._engine.office.hold([letter])
        except StoreUnavailable as error:
            raise FilingFailed([letter.id], [error]) from error
        if filed.filing is Filing.RELEASED:
            self._blocked.pop((message.source, message.key or b""), None)
            return False
        return True


def place_of(message: Message) -> int:
    return int(message.position)
