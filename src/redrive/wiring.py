"""The one place that knows every backend: addresses in, parts out."""

from __future__ import annotations

import difflib
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from redrive.attempts.base import Attempts
from redrive.attempts.sqlite import SqliteAttempts
from redrive.blobs.base import Blobs
from redrive.blobs.folder import FolderBlobs
from redrive.brokers.base import Broker
from redrive.brokers.embedded import EmbeddedBroker
from redrive.clock import Clock
from redrive.config import Config
from redrive.errors import (
    AttemptsUnavailable,
    BrokerUnavailable,
    ConfigError,
    MissingExtra,
    SpoolFailed,
    StoreUnavailable,
    Unreachable,
)
from redrive.keyring import Keyring, from_file
from redrive.spool import Spool
from redrive.sqlite import MEMORY
from redrive.stores.base import Store
from redrive.stores.sqlite import SqliteStore

T = TypeVar("T")


class Parts(Struct, frozen=True):
    """The backends of one process. Open them together, close them together."""

    broker: Broker
    attempts: Attempts
    keyring: Keyring
    store: Store | None = None
    blobs: Blobs | None = None
    spool: Spool | None = None

    async def open(self) -> None:
        """Open everything, or nothing: what was opened before a failure is closed again."""
        try:
            await _reached("broker", self.broker)
            await _reached("attempts", self.attempts)
            await self.open_store()
            if self.spool is not None:
                await _reached("spool", self.spool)
        except BaseException:
            await self.close()
            raise

    async def open_store(self) -> None:
        """The store alone: letters can be looked at while the broker is down."""
        if self.store is not None:
            await _reached("store", self.store)

    async def close(self) -> None:
        if self.spool is not None:
            await self.spool.close()
        if self.store is not None:
            await self.store.close()
        if self.blobs is not None:
            await self.blobs.close()
        await self.attempts.close()
        await self.broker.close()


class _Openable(Protocol):
    async def open(self) -> None: ...


async def _reached(key: str, part: _Openable) -> None:
    """Open it, or say which setting leads nowhere."""
    try:
        await part.open()
    except (BrokerUnavailable, StoreUnavailable, AttemptsUnavailable, SpoolFailed) as error:
        raise Unreachable(str(error), key=key, fix="check that it is there, and that its address is right") from error


def build(config: Config, clock: Clock) -> Parts:
    """Backends for these settings; nothing is opened, and nothing is touched that cannot be named in an error."""
    home = _home(config)
    return Parts(
        broker=_broker(config, clock),
        attempts=_attempts(config, home),
        keyring=_keyring(config, home),
        store=None if config.store is None else _store(config.store),
        blobs=_blobs(config, home),
        spool=_spool(config, home),
    )


def _home(config: Config) -> Path | None:
    """The folder of an embedded broker, where its companions live; None when there is no such folder."""
    scheme, path = _split("broker", config.broker)
    return Path(path).parent if scheme == "embedded" and path != MEMORY else None


def _broker(config: Config, clock: Clock) -> Broker:
    def embedded(path: str) -> Broker:
        return EmbeddedBroker(path, clock=clock, **_given(config.embedded))

    def kafka(address: str) -> Broker:
        try:
            from redrive.brokers.kafka import KafkaBroker
        except ModuleNotFoundError as missing:
            if missing.name is None or not missing.name.startswith("confluent_kafka"):
                raise
            raise MissingExtra("kafka://…", "kafka") from missing
        return KafkaBroker(_servers(address), clock=clock, **_given(config.kafka))

    return _choose("broker", config.broker, {"embedded": embedded, "kafka": kafka})


def _given(settings: Struct) -> dict[str, Any]:
    """What is set; the rest keeps the backend's own default."""
    named = {name: getattr(settings, name) for name in settings.__struct_fields__}
    return {name: value for name, value in named.items() if value is not None}


def _servers(address: str) -> str:
    """host:port,host:port as librdkafka reads it; the port is 9092 where none is given."""
    servers = [server.strip() for server in address.rstrip("/").split(",")]
    for server in servers:
        if not re.fullmatch(r"([\w.-]+|\[[\da-fA-F:.]+\])(:\d+)?", server):
            raise ConfigError(
                f"{server!r} is no server", key="broker",
                fix="write kafka://host:9092,host:9092, and everything else in the table [kafka]",
            )  # fmt: skip
    return ",".join(servers)


def _store(url: str) -> Store:
    return _choose("store", url, {"sqlite": SqliteStore})


def _attempts(config: Config, home: Path | None) -> Attempts:
    if config.attempts is None:
        return SqliteAttempts(MEMORY if home is None else str(home / "attempts.db"))
    return _choose("attempts", config.attempts, {"sqlite": SqliteAttempts})


def _blobs(config: Config, home: Path | None) -> Blobs | None:
    if config.blobs is None:
        return None if home is None else FolderBlobs(home / "blobs", make=True)
    return _choose("blobs", config.blobs, {"file": lambda path: FolderBlobs(Path(path))})


def _spool(config: Config, home: Path | None) -> Spool | None:
    if config.spool is not None:
        return Spool(Path(config.spool))
    return None if home is None or config.store is None else Spool(home / "spool", make=True)


def _keyring(config: Config, home: Path | None) -> Keyring:
    """The configured keys; else the key beside an embedded broker; else, in memory, one of this process."""
    if config.signing_keys:
        return Keyring([bytes.fromhex(key) for key in config.signing_keys])
    if not config.broker.startswith("embedded://"):
        raise ConfigError("workers and office must share a key", key="signing_keys", fix="run: redrive keygen")
    return Keyring([secrets.token_bytes(32) if home is None else from_file(home / "signing.key")])


def _choose(key: str, url: str, makers: dict[str, Callable[[str], T]]) -> T:
    scheme, rest = _split(key, url)
    if scheme in makers:
        return makers[scheme](rest)
    close = difflib.get_close_matches(scheme, makers, 1)
    hint = f"did you mean {close[0]}://? " if close else ""
    raise ConfigError(
        f"unknown scheme {scheme!r}", key=key, fix=f"{hint}this version knows: {', '.join(f'{m}://' for m in makers)}"
    )


def _split(key: str, url: str) -> tuple[str, str]:
    scheme, separator, rest = url.partition("://")
    if not separator or not rest:
        raise ConfigError(
            f"{url!r} is no address", key=key, fix="write it as scheme://…, e.g. embedded://./redrive-data/broker.db"
        )
    return scheme, rest
