"""A delivery on its way through a worker."""

from __future__ import annotations

from msgspec import Struct

from redrive.brokers.base import Delivery, Lane
from redrive.codec import Ticket


class Record(Struct):
    """A start record in memory: `left` of its deliveries have not come to an end."""

    id: str
    lane: Lane
    positions: list[str]
    left: int = 0


class Item(Struct, gc=False):
    """`ticket` is set once an earlier run in this process made one; `record` until a run has come to an end.

    An orphan's lane was lost while it ran: it may end here, but not run again. One of these is made for every message
    and nothing refers back to it, so the garbage collector need not look.
    """

    delivery: Delivery
    ticket: Ticket | None = None
    record: Record | None = None
    is_orphan: bool = False
