"""What every worker of one process shares."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from random import Random
from typing import Any

from msgspec import Struct

from redrive.attempts.base import Attempts
from redrive.brokers.base import Broker
from redrive.clock import Clock, Millis
from redrive.errors import RedriveError
from redrive.keyring import Keyring
from redrive.letter import Environment
from redrive.metrics import Metrics
from redrive.office import Office
from redrive.reports import Reporter
from redrive.runtime.spans import Gate

MAX_BACKOFF = 30.0


class Engine(Struct, frozen=True):
    broker: Broker
    office: Office
    attempts: Attempts
    reporter: Reporter
    metrics: Metrics
    keyring: Keyring
    clock: Clock
    environment: Environment
    rng: Random
    gate: Gate


class SlotsLost(RedriveError):
    """Too many `def` handlers ran over their limit and cannot be stopped; a fresh process is the only cure."""

    def __init__(self, consumer: str, lost: int) -> None:
        self.consumer, self.lost = consumer, lost
        super().__init__(f"{consumer}: {lost} handler thread(s) hang beyond their time limit")


def backoff(tries: int) -> float:
    """Seconds to wait before asking a place that failed `tries` times again."""
    return min(0.1 * 2.0 ** min(tries, 12), MAX_BACKOFF)


async def sleep_until(when: Millis, clock: Clock) -> None:
    """Sleep until the clock says so; a sleep that ends a moment early goes on."""
    while (left := when - clock.now()) > 0:
        await clock.sleep(left / 1000)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel these and wait for their end."""
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
