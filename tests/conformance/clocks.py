"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio

from redrive.clock import Millis


class ManualClock:
    def __init__(self, now: Millis = 1_700_000_000_000) -> None:
        self._now = now
        self._timers: list[tuple[Millis, asyncio.Future[None]]] = []

    def now(self) -> Millis:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let this much time pass at once; every wait that ends within it is over."""
        self._now += round(seconds * 1000)
        for at, timer in self._timers:
            if at <= self._now and not timer.done():
                timer.set_result(None)

    async def sleep(self, seconds: float) -> None:
        await self.wait(asyncio.Event(), seconds)

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        timer = asyncio.get_running_loop().create_future()
        entry = (self._now + max(1, round(seconds * 1000)), timer)
        self._timers.append(entry)
        came = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({came, timer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            came.cancel()
            self._timers.remove(entry)
        return event.is_set()
