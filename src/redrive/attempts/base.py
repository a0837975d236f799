"""The attempts socket: runs and crashes counted outside the process, where the broker keeps no count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from redrive.clock import Millis


class Span(Struct, frozen=True):
    """Deliveries of one lane that were started and not yet finished.

    `alone` marks a suspect that ran with nothing beside it in its process, so that a crash is its own.
    """

    id: str
    source: str
    group: str
    partition: int
    positions: tuple[str, ...]
    alone: bool = False


class Attempts(Protocol):
    async def open(self) -> None: ...

    async def open_spans(self, source: str, group: str, partition: int) -> list[Span]:
        """Every span of this lane that nobody finished, whoever started it."""
        ...

    async def turn(self, *, start: Sequence[Span] = (), finish: Sequence[str] = ()) -> None:
        """Finish spans by id and start others in one durable step. Finishing an unknown span changes nothing."""
        ...

    async def increment(self, keys: Sequence[str], now: Millis) -> list[int]:
        """Count one more for each key, atomically with its new expiry, and say the new counts."""
        ...

    async def counts(self, keys: Sequence[str], now: Millis) -> list[int]:
        """The counts so far; 0 for unknown or expired keys."""
        ...

    async def clear(self, keys: Sequence[str]) -> None: ...

    async def close(self) -> None: ...
