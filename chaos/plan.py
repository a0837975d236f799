"""What one run does, from a seed: the sources, the messages and how their handler treats them, and the faults."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from msgspec import Struct

from chaos.history import OFFICE, WORKER, Sent
from redrive import faults
from redrive.app import Redrive
from redrive.message import Copy, Headers, content_digest

GROUP = "shop"
ID = "id"
UP = "up"
"""What a process writes among its passes once it is at work."""
PARTITIONS = 2
ATTEMPTS = 3
MAX_REPLAYS = 3
BATCH = CONCURRENCY = 4
IN_FLIGHT = 4 * BATCH
WINDOW = 8
MAX_BYTES = 16 << 10
ROOM = 1000
"""What a huge body leaves free: enough for a ticket, too little for a letter."""
LEASE_SECONDS = 1.0
STOP_SECONDS = 1.6

OK, FLAKY, SLOW, DOOMED, PERMANENT, BROKEN, HUGE, UNREADABLE = (
    "ok", "flaky", "slow", "doomed", "permanent", "broken", "huge", "unreadable",
)  # fmt: skip
_MORTAL = frozenset({DOOMED, PERMANENT, BROKEN, HUGE, UNREADABLE})
_HOPELESS = frozenset({DOOMED, PERMANENT, UNREADABLE})
_RUNS = {FLAKY: ATTEMPTS, DOOMED: ATTEMPTS, UNREADABLE: 0}
_MIX = [OK] * 5 + [FLAKY] * 2 + [SLOW, DOOMED, PERMANENT, BROKEN, BROKEN, UNREADABLE]
_ORDERED_MIX = [OK] * 5 + [FLAKY] * 2 + [BROKEN, SLOW]


class Source(Struct, frozen=True):
    name: str
    route: str
    mode: str | None = None
    ordered: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        given = {"route": self.route, "mode": self.mode, "ordering": "key" if self.ordered else None}
        return {name: value for name, value in given.items() if value is not None}


class Fault(Struct, frozen=True):
    """At the nth pass of a point, in the first process of its role or in what is started after it."""

    point: str
    action: str = "kill"
    nth: int = 1
    start: int = 0

    def __post_init__(self) -> None:
        faults.parse(self.spec)

    @classmethod
    def read(cls, text: str) -> Fault:
        """As `str` writes it: point:nth:action, and @1 for the second start."""
        spec, _, start = text.partition("@")
        point, nth, action = spec.split(":")
        return cls(point, action, int(nth), int(start or 0))

    @property
    def spec(self) -> str:
        return f"{self.point}:{self.nth}:{self.action}"

    @property
    def role(self) -> str:
        return OFFICE if self.point.partition(".")[0] in ("collector", "replayer") else WORKER

    def __str__(self) -> str:
        return f"{self.spec}@{self.start}" if self.start else self.spec


class Planned(Struct, frozen=True):
    """One message, and the half of the run in which it is produced."""

    id: str
    kind: str
    copy: Copy
    half: int
    seq: int = 0

    @property
    def sent(self) -> Sent:
        copy = self.copy
        return Sent(
            self.id, copy.destination, copy.key, sha_of(copy.key, copy.body, copy.headers),
            runs=_RUNS.get(self.kind, 1), seq=self.seq, mortal=self.kind in _MORTAL, mended=self.kind not in _HOPELESS,
        )  # fmt: skip


class Plan(Struct, frozen=True):
    """Two plain sources, one for each route, whose modes change with the seed, and one that keeps its order."""

    seed: int
    sources: tuple[Source, ...]
    batch: int = BATCH
    window: int = WINDOW

    @classmethod
    def of(cls, seed: int) -> Plan:
        modes = ("delayed", "redeliver") if seed % 2 == 0 else ("redeliver", "delayed")
        plain = Source("orders", "broker", modes[0]), Source("payments", "direct", modes[1])
        return cls(seed, (*plain, Source("accounts", "direct", ordered=True)))

    def messages(self) -> list[Planned]:
        """In the order of production; every kind is in both halves, or in both partitions, or in all four."""
        rng = Random(self.seed)
        found = [*self._plain(rng, "orders", [*_MIX, HUGE]), *self._plain(rng, "payments", _MIX)]
        rng.shuffle(found)
        return sorted([*found, *self._ordered(rng)], key=lambda one: one.half)

    def _plain(self, rng: Random, source: str, mix: list[str]) -> Iterator[Planned]:
        for partition in range(PARTITIONS):
            keys = _keys(f"{source}-", partition, 4)
            for number, kind in enumerate(mix):
                name = f"{source}-{partition}-{number}-{kind}"
                yield Planned(name, kind, _copy(rng, name, source, rng.choice(keys), kind), number % 2)

    def _ordered(self, rng: Random) -> Iterator[Planned]:
        for partition in range(PARTITIONS):
            for key in _keys("acc-", partition, 2):
                mix = rng.sample(_ORDERED_MIX, len(_ORDERED_MIX))
                for number, kind in enumerate(mix):
                    name = f"{key.decode()}-{number}-{kind}"
                    copy = _copy(rng, name, "accounts", key, kind)
                    yield Planned(name, kind, copy, int(number >= len(mix) // 2), number)


def _keys(prefix: str, partition: int, number: int) -> list[bytes]:
    """Keys that the embedded broker puts into this partition."""
    names = (f"{prefix}{one}".encode() for one in range(1000))
    return [name for name in names if zlib.crc32(name) % PARTITIONS == partition][:number]


def _copy(rng: Random, name: str, source: str, key: bytes, kind: str) -> Copy:
    headers = ((ID, name.encode()), ("tag", rng.randbytes(4)), ("tag", None), ("tag", b""))
    if kind == UNREADABLE:
        return Copy(source, key, b"\xff{" + rng.randbytes(8), headers)
    body = {"kind": kind, "fails": rng.choice((1, 2)) if kind == FLAKY else 0, "fill": rng.randbytes(8).hex()}
    if kind == HUGE:
        body["fill"] = "x" * (MAX_BYTES - ROOM)
    return Copy(source, key, msgspec.json.encode(body), headers)


def sha_of(key: bytes | None, body: bytes | None, headers: Headers) -> str:
    return content_digest(key, body, headers).hex()


class Place:
    """One run's folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.ledger, self.passes, self.mended = home / "ledger", home / "passes", home / "mended"
        self.plan, self.letters, self.spool = home / "plan.json", home / "letters.db", home / "spool"

    def furnish(self, plan: Plan) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        self.ledger.touch()
        self.plan.write_bytes(msgspec.json.encode(plan))

    def read_plan(self) -> Plan:
        return msgspec.json.decode(self.plan.read_bytes(), type=Plan)

    def log(self, name: str) -> Path:
        return self.home / f"{name}.log"

    def app(self) -> Redrive:
        """The app of this folder, without consumers."""
        plan = self.read_plan()
        return Redrive(
            f"embedded://{self.home}/broker.db",
            store=f"sqlite://{self.letters}",
            embedded={"partitions": PARTITIONS, "lease_seconds": LEASE_SECONDS, "max_message_bytes": MAX_BYTES},
            replay={"window": plan.window},
            defaults={"batch": plan.batch},
        )
