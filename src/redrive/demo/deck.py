"""What the demo's producer sends: a fixed mix of orders and payments, shuffled by a seed."""

from __future__ import annotations

from random import Random

import msgspec
from msgspec import Struct

from redrive.message import Copy, Headers

SEED = 7
ORDER_ID = "order-id"
HUNDRED = {"plain": 60, "refund": 4, "long": 3, "garbled": 2, "payment": 25, "flaky": 4, "foreign": 2}
"""How many of a hundred messages are of which story."""
PAYMENTS = ("payment", "flaky", "foreign")


class Produced(Struct, frozen=True):
    """One message as it was sent, kept by the producer and nobody else."""

    id: str
    story: str
    source: str
    key: bytes | None
    body: bytes | None
    headers: Headers

    @property
    def copy(self) -> Copy:
        return Copy(self.source, self.key, self.body, self.headers)


class Deck:
    """An endless deck of messages: every hundred has the same mix, in another order."""

    def __init__(self, seed: int = SEED) -> None:
        self._random = Random(seed)  # noqa: S311 - the same story every time
        self._stories: list[str] = []
        self._number = 0

    def draw(self, count: int) -> list[Produced]:
        return [self._one() for _ in range(count)]

    def _one(self) -> Produced:
        if not self._stories:
            self._stories = [story for story, count in HUNDRED.items() for _ in range(count)]
            self._random.shuffle(self._stories)
        self._number += 1
        return self._message(f"{self._number:05d}", self._stories.pop())

    def _message(self, number: str, story: str) -> Produced:
        pays = story in PAYMENTS
        source, kind = ("payments", "card-payment") if pays else ("orders", "order-placed")
        headers = ((ORDER_ID, number.encode()), ("type", kind.encode()), ("trace", self._random.randbytes(8)))
        customer = f"customer-{self._random.randrange(40)}"
        body = self._payment(number, story) if pays else self._order(number, story, customer)
        return Produced(number, story, source, customer.encode(), body, headers)

    def _payment(self, number: str, story: str) -> bytes:
        card = f"4000-{self._random.randrange(10_000):04d}-{self._random.randrange(10_000):04d}-0000"
        amount = self._random.randrange(100, 50_000)
        bank = story if story in ("flaky", "foreign") else "usual"
        return msgspec.json.encode({"id": number, "card": card, "amount": amount, "bank": bank})

    def _order(self, number: str, story: str, customer: str) -> bytes:
        if story == "garbled":
            return b'{"id": "' + number.encode() + b'", "customer": \xff\xfe' + self._random.randbytes(12)
        amount = self._random.randrange(100, 50_000) * (-1 if story == "refund" else 1)
        lines = 5000 if story == "long" else self._random.randrange(1, 9)
        return msgspec.json.encode({"id": number, "customer": customer, "amount": amount, "lines": lines})
