"""What a broker handed over, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from msgspec import Struct

from redrive.clock import Millis

Headers = tuple[tuple[str, bytes | None], ...]
"""In order, repeats kept, binary values as they came."""


class Coordinates(Struct, frozen=True):
    """Where a message lives: enough for its broker to find it again."""

    broker: str
    source: str
    partition: int
    position: str
    timestamp: Millis


class Message(Struct, frozen=True):
    """One message as the broker handed it over. Null differs from empty in key, body and header values.

    `idempotency_key` is set on replayed copies: the same for every copy of one request, so that a handler can tell.
    """

    broker: str
    source: str
    partition: int
    position: str
    timestamp: Millis
    key: bytes | None
    body: bytes | None
    headers: Headers = ()
    idempotency_key: str = ""

    @property
    def coordinates(self) -> Coordinates:
        return Coordinates(self.broker, self.source, self.partition, self.position, self.timestamp)

    @property
    def id(self) -> str:
        return f"{self.broker}/{self.source}/{self.partition}/{self.position}"

    def header(self, name: str) -> bytes | None:
        """The last value of this header, as Kafka readers expect."""
        return last_header(self.headers, name)


class Copy(Struct, frozen=True):
    """What to publish, and where to."""

    destination: str
    key: bytes | None
    body: bytes | None
    headers: Headers = ()
    timestamp: Millis | None = None


def last_header(headers: Headers, name: str) -> bytes | None:
    for known, value in reversed(headers):
        if known == name:
            return value
    return None


def digest(parts: Iterable[bytes | None]) -> bytes:
    """sha256 over the parts, each prefixed with its length, so no two lists of parts collide."""
    sha = hashlib.sha256()
    for part in parts:
        if part is None:
            sha.update(b"\xff" * 8)
        else:
            sha.update(len(part).to_bytes(8, "big"))
            sha.update(part)
    return sha.digest()


def content_digest(key: bytes | None, body: bytes | None, headers: Headers) -> bytes:
    parts: list[bytes | None] = [key, body]
    for name, value in headers:
        parts += [name.encode("utf-8", "surrogatepass"), value]
    return digest(parts)
