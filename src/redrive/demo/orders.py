"""The demo's order service. Its first release has bugs, and the payment provider it depends on has bad days.

Run it like any other: `redrive work redrive.demo.orders:app`, with REDRIVE_CONFIG naming the demo's redrive.toml.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from msgspec import Struct

from redrive import Redrive, delays
from redrive.demo.ledger import Ledger
from redrive.demo.place import Place

WORK_SECONDS = 0.03
MANY_LINES = 1000
FLAKY_RUNS = 2

place = Place(Path(os.environ.get("REDRIVE_CONFIG", "redrive-data/demo/redrive.toml")).parent)
ledger = Ledger(place.ledger)
app = Redrive.from_config(place.config)


class Order(Struct):
    id: str
    customer: str
    amount: int
    lines: int


class Payment(Struct):
    id: str
    card: str
    amount: int
    bank: str


@app.consumer(
    "orders", group="shop", attempts=3, backoff=delays([0.2, 0.4]), timeout=0.5, concurrency=8,
    attributes={"order": "header:order-id", "customer": "body:customer"}, message_type="header:type",
)  # fmt: skip
async def accept_order(order: Order) -> None:
    """Release 1 takes a refund for nonsense, and prices long orders far too slowly."""
    with ledger.run(order.id):
        await asyncio.sleep(WORK_SECONDS)
        if order.amount < 0 and not place.is_mended:
            raise ValueError(f"amount must not be negative: {order.amount}")
        if order.lines > MANY_LINES and not place.is_mended:
            await asyncio.sleep(60)


@app.consumer(
    "payments", group="shop", attempts=4, backoff=delays([0.3, 0.6, 1.2]), timeout=5, concurrency=8,
    breaker={"failures": 8, "window": 10, "ratio": 1.0, "cooldown": 0.5, "longest_cooldown": 2},
    attributes={"order": "header:order-id", "card": "body:card"}, masked=["card"], message_type="header:type",
)  # fmt: skip
def charge_card(payment: Payment) -> None:
    """The provider is down at times; one bank answers only when asked again, and release 1 calls another wrongly."""
    with ledger.run(payment.id) as run:
        time.sleep(WORK_SECONDS)
        if place.provider_is_down:
            raise ConnectionError("payment provider: connection refused")
        if payment.bank == "flaky" and run <= FLAKY_RUNS:
            raise TimeoutError("payment provider: no answer from the bank within 30 s")
        if payment.bank == "foreign" and not place.is_mended:
            raise TimeoutError("payment provider: no answer from the foreign bank within 30 s")
