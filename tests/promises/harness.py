"""Runs a whole office in one test: real embedded broker, real SQLite store, nothing mocked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from redrive import Redrive
from redrive.query import Filter
from redrive.stores.base import Summary

DEADLINE = 20.0


def make_app(folder: Path, **more: Any) -> Redrive:
    settings: dict[str, Any] = {"embedded": {"lease_seconds": 2.0, "partitions": 2}, **more}
    return Redrive(f"embedded://{folder}/broker.db", store=f"sqlite://{folder}/letters.db", **settings)


@asynccontextmanager
async def running(app: Redrive, *, office: bool = True) -> AsyncIterator[Redrive]:
    """The app at work, with the collector and the replayer beside it."""
    async with app:
        helpers = [app.collector(), app.replayer()] if office else []
        tasks = [asyncio.create_task(app.work()), *(asyncio.create_task(helper.run()) for helper in helpers)]
        await asyncio.sleep(0)
        try:
            yield app
        finally:
            app.stop()
            for helper in helpers:
                helper.stop()
            await asyncio.gather(*tasks)


async def until(condition: Callable[[], Awaitable[Any] | Any], what: str = "the condition") -> Any:
    """Wait for something to become true; fails with its name, never hangs."""
    deadline = time.monotonic() + DEADLINE
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, f"{what} did not happen within {DEADLINE} s"
        await asyncio.sleep(0.02)


async def letters(app: Redrive, **filters: Any) -> list[Summary]:
    page = await app.letters.list(limit=500, filter_=Filter(**filters))
    return list(page.rows)


async def until_letters(app: Redrive, number: int, **filters: Any) -> list[Summary]:
    async def enough() -> list[Summary] | None:
        found = await letters(app, **filters)
        return found if len(found) >= number else None

    found: list[Summary] = await until(enough, f"{number} letter(s) with {filters}")
    assert len(found) == number
    return found


async def until_drained(app: Redrive, source: str, group: str) -> None:
    async def empty() -> bool:
        return (await app.parts.broker.depth(source, group)).count == 0

    await until(empty, f"{source} drained by {group}")
