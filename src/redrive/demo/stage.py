"""One demo under way: its producer, its processes, and what can be seen of them from outside."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager

from redrive.app import Redrive
from redrive.brokers.base import Confirmed
from redrive.collector import GROUP as COLLECTOR
from redrive.demo.children import Children
from redrive.demo.deck import Deck, Produced
from redrive.demo.ledger import Reader
from redrive.demo.place import Place
from redrive.errors import BrokerUnavailable
from redrive.letter import StoredLetter
from redrive.query import MAX_PAGE, Filter
from redrive.stores.base import Summary

GROUP = "shop"
SOURCES = ("orders", "payments")
LOOK_SECONDS = 0.05


class Stage:
    """Holds the producer's own list. `waiting_for` says what the story needs next, in case it never comes."""

    def __init__(self, app: Redrive, place: Place, children: Children, say: Callable[[str], None]) -> None:
        self.app, self.place, self.children, self.say = app, place, children, say
        self.deck, self.ledger = Deck(), Reader(place.ledger)
        self.produced: list[Produced] = []
        self.waiting_for = ""

    async def produce(self, count: int) -> None:
        """Send this many messages; those the broker confirmed are on the list."""
        drawn = self.deck.draw(count)
        results = await self.app.parts.broker.publish([one.copy for one in drawn])
        self.produced += [one for one, result in zip(drawn, results, strict=True) if isinstance(result, Confirmed)]
        refused = [result for result in results if not isinstance(result, Confirmed)]
        if refused:
            raise BrokerUnavailable(self.app.parts.broker.name, "publish", refused[0])

    def pass_on_notices(self) -> None:
        """Say what the processes told their own operators since the last call."""
        for name, notice in self.children.notices():
            self.say(f"{name}: {notice}")

    async def until(self, what: str, come: Callable[[], Awaitable[bool]]) -> None:
        """Wait for it, and for nothing any more once a process has died."""
        self.waiting_for = what
        while not await come():
            self.pass_on_notices()
            self.children.check()
            await asyncio.sleep(LOOK_SECONDS)
        self.waiting_for = ""

    async def summaries(self, filter_: Filter) -> AsyncIterator[Summary]:
        """Every letter that matches, newest first."""
        cursor = None
        while True:
            page = await self.app.desk().page(filter_, MAX_PAGE, cursor)
            for row in page.rows:
                yield row
            cursor = page.next
            if cursor is None:
                return

    async def letter(self, letter_id: str) -> StoredLetter | None:
        """As the store keeps it, bit for bit; people get a view instead."""
        store = self.app.parts.store
        return None if store is None else await store.letters.get(letter_id)

    async def letters(self) -> list[StoredLetter]:
        found = [await self.letter(row.id) async for row in self.summaries(Filter())]
        return [stored for stored in found if stored is not None]

    async def unsettled(self) -> int:
        """Messages the broker still holds for the order service or the collector."""
        pairs = [(source, GROUP) for source in SOURCES] + [(f"{source}.dlq", COLLECTOR) for source in SOURCES]
        depths = [await self.app.parts.broker.depth(source, group) for source, group in pairs]
        return sum(depth.count for depth in depths)


class Stopwatch:
    """Seconds since the curtain rose, before every line."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        print(f"{self.seconds:6.1f} s  {text}", flush=True)


@contextmanager
def on_signals(act: Callable[[], object]) -> Iterator[None]:
    """Do this when somebody presses Ctrl-C or the machine asks us to end."""
    loop, signals = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
    for one in signals:
        loop.add_signal_handler(one, act)
    try:
        yield
    finally:
        for one in signals:
            loop.remove_signal_handler(one)


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """End this process, and with it the tethered ones, when even stopping hangs."""

    def give_up() -> None:
        print(f"✗ still not done after {seconds:g} s", flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
