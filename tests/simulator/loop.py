"""Virtual time: an event loop whose clock jumps to the next timer, without threads, sockets or sleeping."""

from __future__ import annotations

import asyncio
from asyncio.base_events import BaseEventLoop
from typing import Any

EPOCH = 1_700_000_000_000


class Deadlock(Exception):
    """Nothing is ready and no timer is set: nothing would ever happen again."""


class VirtualLoop(BaseEventLoop):
    """Runs what is ready; when nothing is, it is the time of the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._clock_resolution = 1e-9
        self._selector = self  # all that the base class asks of a selector is to wait

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Deadlock(f"at {self._now:.3f} s")
        if timeout > 0:
            self._now = self._scheduled[0]._when
        return []

    def _process_events(self, events: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody waits outside."""


class VirtualClock:
    """The engine's clock on this loop. `skew` is how far this process's wall clock is off, in milliseconds."""

    def __init__(self, loop: VirtualLoop, skew: int = 0) -> None:
        self._loop, self._skew = loop, skew

    def now(self) -> int:
        return EPOCH + round(self._loop.time() * 1000) + self._skew

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        if event.is_set():
            return True
        waiting = self._loop.create_task(event.wait())
        try:
            await asyncio.wait((waiting,), timeout=seconds)
        finally:
            waiting.cancel()
        return event.is_set()
