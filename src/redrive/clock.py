"""Time comes from outside: everything that reads a clock or waits is handed one of these."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

Millis = int
"""Milliseconds since the epoch, UTC."""


class Clock(Protocol):
    def now(self) -> Millis: ...
    async def sleep(self, seconds: float) -> None: ...
    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait for the event at most this long; True when it came."""
        ...


class SystemClock:
    def now(self) -> Millis:
        return time.time_ns() // 1_000_000

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await event.wait()
        except TimeoutError:
            return False


def iso(at: Millis) -> str:
    """RFC 3339 in UTC with milliseconds."""
    seconds, millis = divmod(at, 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{millis:03d}Z"
