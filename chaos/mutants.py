"""Bugs planted by hand into a process of the system under test, to see the judge catch them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

VARIABLE = "CHAOS_BUG"


def plant(name: str) -> None:
    if name:
        BUGS[name]()


def _settle_before_filing() -> None:
    """The oldest mistake of the field: acknowledge, then write. A crash in between loses the message."""
    from redrive.brokers.base import Ack
    from redrive.runtime.settler import Settler

    file_then_settle = Settler._file_directly

    async def settle_then_file(self: Any, batch: list[Any]) -> list[Any]:
        dead = [done for done in batch if done.letter is not None] if self._consumer.direct else []
        if dead:
            await self._engine.broker.settle([Ack(done.delivery) for done in dead])
        return await file_then_settle(self, batch)

    Settler._file_directly = settle_then_file  # type: ignore[method-assign]


def _ack_without_filing() -> None:
    """An error on the way to the store, swallowed."""
    from redrive.runtime.settler import Settler

    async def file_nothing(self: Any, batch: list[Any]) -> list[Any]:
        return batch

    Settler._file_directly = file_nothing  # type: ignore[method-assign]


BUGS: dict[str, Callable[[], None]] = {
    "settle_before_filing": _settle_before_filing,
    "ack_without_filing": _ack_without_filing,
}
