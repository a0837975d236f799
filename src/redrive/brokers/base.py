"""The broker socket: what the engine needs from a broker, in batches, and what a broker may answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import Struct

from redrive.clock import Millis
from redrive.message import Coordinates, Copy, Message


class Lane(Struct, frozen=True):
    """The part of a source that one consumer of a group owns at a time."""

    source: str
    partition: int


class Delivery(Struct, frozen=True):
    """A message under lease. `token` is the broker's own; `deliveries` only raises suspicion, it is no count."""

    message: Message
    group: str
    token: Any
    deliveries: int = 1

    @property
    def lane(self) -> Lane:
        return Lane(self.message.source, self.message.partition)


class Batch(Struct, frozen=True):
    deliveries: tuple[Delivery, ...]


class Assigned(Struct, frozen=True):
    """These lanes are ours from now on. Comes before any of their deliveries."""

    lanes: tuple[Lane, ...]


class Revoked(Struct, frozen=True):
    """These lanes are no longer ours; settling their deliveries answers LeaseLost. `clean` when none was in flight."""

    lanes: tuple[Lane, ...]
    clean: bool = True


Event = Batch | Assigned | Revoked


class Subscription(Struct, frozen=True):
    """Names or globs of sources; `exclude` globs win. `batch` bounds one batch, `in_flight` all unsettled."""

    sources: tuple[str, ...]
    group: str
    batch: int = 500
    in_flight: int = 2000
    exclude: tuple[str, ...] = ()


class Stream(Protocol):
    """A live subscription. Cancelling `__anext__` loses nothing: what it had fetched comes with the next call."""

    def __aiter__(self) -> Stream: ...

    async def __anext__(self) -> Event: ...

    async def aclose(self) -> None:
        """Give every lane back. What is unsettled is redelivered to whoever takes the lane next."""
        ...


class Ack(Struct, frozen=True):
    """Done with it."""

    delivery: Delivery


class RetryAt(Struct, frozen=True):
    """Hand `copy` to this group again, not before `when`, and settle the original once that is durable."""

    delivery: Delivery
    copy: Copy
    when: Millis


class Bury(Struct, frozen=True):
    """Make `copy` durable in its dead letter destination by the broker's strongest means, then settle the original."""

    delivery: Delivery
    copy: Copy


class Release(Struct, frozen=True):
    """Give it back unhandled; the group gets it again soon."""

    delivery: Delivery


Settlement = Ack | RetryAt | Bury | Release


class Settled(Struct, frozen=True):
    pass


class LeaseLost(Struct, frozen=True):
    """Somebody else owns the message now; nothing was done."""


class Refused(Struct, frozen=True):
    """Definitely not done, and the message is still unsettled. `too_large` says a smaller copy may pass."""

    why: str
    too_large: bool = False


class Confirmed(Struct, frozen=True):
    position: str


class Unknown(Struct, frozen=True):
    """It may or may not have happened."""

    why: str


SettleResult = Settled | LeaseLost | Refused
PublishResult = Confirmed | Refused | Unknown


class Depth(Struct, frozen=True):
    """`count` messages not yet settled, the oldest from `oldest`; the broker keeps them for `retention` seconds."""

    count: int
    oldest: Millis | None = None
    retention: float | None = None


class SourceSpec(Struct, frozen=True):
    """A source that must exist before the work starts. `letters`: dead letters, of which it may forget none."""

    name: str
    partitions: int | None = None
    letters: bool = False


class Abilities(Struct, frozen=True):
    """What differs between brokers, declared so that nobody has to find out."""

    delay_natively: bool
    order_by_key: bool
    retains_settled: bool
    durable: bool
    max_message_bytes: int | None = None
    lease_seconds: float | None = None


class Broker(Protocol):
    """One configured connection. `name` is part of every letter's identity."""

    name: str
    can: Abilities

    async def open(self) -> None:
        """Connect or raise BrokerUnavailable; nothing is half-open afterwards."""
        ...

    async def close(self) -> None: ...

    async def ensure(self, sources: Sequence[SourceSpec]) -> None:
        """Create what is missing; raise ConfigError naming both sides where what exists does not fit."""
        ...

    async def subscribe(self, subscription: Subscription) -> Stream: ...

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettleResult]:
        """One answer for each, in order. Raises BrokerUnavailable when nothing is known; settling again is harmless."""
        ...

    async def publish(self, copies: Sequence[Copy]) -> list[PublishResult]:
        """One answer for each, in order. Confirmed only once the copy is durable."""
        ...

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """Keep the leases of these deliveries for another term."""
        ...

    async def pause(self, group: str, lanes: Sequence[Lane]) -> None:
        """Hand out nothing more from these lanes; their leases stay."""
        ...

    async def resume(self, group: str, lanes: Sequence[Lane]) -> None: ...

    async def read(self, coordinates: Sequence[Coordinates]) -> list[Message | None]:
        """The messages at these places, where the broker still has them."""
        ...

    async def depth(self, source: str, group: str) -> Depth: ...
