"""What each message is going to do to its handler, by seed and name alone."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from redrive.errors import DeadLetter, Discard, PayloadUnreadable, Retry
from redrive.handlers import Handler, handler_for, recorded
from redrive.message import Message
from simulator.ledger import ID, Ledger, Produced, id_of
from simulator.world import Dead, Process

if TYPE_CHECKING:
    from simulator.history import Setup

TIMEOUT = 4.0
NEVER = 1e9

SHARES = {
    "ok": 24,
    "flaky": 12,
    "broken": 12,
    "moody": 18,
    "permanent": 8,
    "unreadable": 4,
    "slow": 4,
    "requested": 3,
    "patient": 4,
    "discard": 3,
    "recorded": 3,
}


class Plan(Struct, frozen=True):
    """`what` goes wrong, on the first `times` runs or until somebody mends it at `mended_at`."""

    what: str
    times: int
    mended_at: float
    takes: float

    @property
    def may_die(self) -> bool:
        return self.what not in ("ok", "discard", "recorded")


def plan_for(seed: int, name: str, setup: Setup) -> Plan:
    rng = Random(f"{seed}/{name}")
    what = rng.choices(list(SHARES), list(SHARES.values()))[0]
    if setup.batch and what == "slow":
        what = "broken"  # one that is cut off would take its innocent neighbours with it
    if int(name[1:]) < setup.killers:
        what = "killer"
    mended_at = rng.choice((rng.uniform(2, 25), NEVER))
    if setup.breaker:
        mended_at = min(mended_at, 30.0)  # an outage that never ends never ends
    times, takes = rng.randint(1, max(setup.attempts - 1, 1)), rng.choice((0, 0, 0.05, 0.05 if setup.batch else 0.5))
    return Plan(what, times, mended_at, takes)


def message_for(seed: int, name: str) -> Produced:
    """Keys, bodies and headers as strange as they come: null, empty, binary, repeated."""
    rng = Random(f"{seed}/{name}/bytes")
    blob = rng.randbytes(rng.randint(1, 12))
    key = rng.choice((None, None, b"", b"k1", b"k2", blob))
    body = rng.choice((None, b"", blob, b'{"id":"' + name.encode() + b'"}', rng.randbytes(1800)))
    extra = rng.choice(((), (("a", None), ("a", b"")), (("\xe9", blob), ("a", b"1"), ("a", b"2"))))
    return Produced(name, key, body, (*extra, (ID, name.encode())))


class Plans:
    """The handler that plays them, for one process at a time."""

    def __init__(self, seed: int, setup: Setup, ledger: Ledger) -> None:
        self._seed, self._setup, self._ledger = seed, setup, ledger
        self._plans: dict[str, Plan] = {}

    def __getitem__(self, name: str) -> Plan:
        if name not in self._plans:
            self._plans[name] = plan_for(self._seed, name, self._setup)
        return self._plans[name]

    def handler(self, process: Process) -> Handler:
        async def handle(message: Message) -> object:
            return await self._handle(process, message)

        async def handle_batch(messages: list[Message]) -> list[object]:
            return [await self._answered(process, message) for message in messages]

        handler = handler_for(handle_batch if self._setup.batch else handle, name="handle", batch=self._setup.batch)
        return replace(handler, decode=self._decode)

    def _decode(self, message: Message) -> Message:
        if self[id_of(message.headers)].what == "unreadable":
            raise PayloadUnreadable("not what the handler asked for")
        return message

    async def _answered(self, process: Process, message: Message) -> object:
        try:
            return await self._handle(process, message)
        except Exception as error:
            return error

    async def _handle(self, process: Process, message: Message) -> object:
        if not process.alive:
            raise Dead
        name = id_of(message.headers)
        plan, world = self[name], process.world
        self._ledger.ran(process, message)
        world.note(process.name, "runs", name, plan.what)
        if plan.takes:
            await asyncio.sleep(plan.takes * (0.5 + world.rng.random()))
        if not self._goes_well(plan, name, world.loop.time()):
            await self._fail(plan, name, process)
        if plan.what == "discard":
            self._ledger.was_ended(message, plan.what)
            raise Discard("not needed")
        self._ledger.took_effect(process, message)
        world.note(process.name, "handled", name)
        return recorded("odd") if plan.what == "recorded" else None

    def _goes_well(self, plan: Plan, name: str, now: float) -> bool:
        run = self._ledger.runs[name]
        if plan.what == "moody":
            return Random(f"{self._seed}/{name}/{run}").random() < 0.4
        return run > plan.times if plan.what in ("flaky", "patient") else now >= plan.mended_at

    async def _fail(self, plan: Plan, name: str, process: Process) -> None:
        match plan.what:
            case "killer":
                process.world.crash(process, f"handler of {name}")
            case "flaky" | "broken" | "moody":
                raise ConnectionError(f"{name} meets a provider that is down")
            case "permanent":
                raise ValueError(f"{name} is wrong")
            case "requested":
                raise DeadLetter(f"{name} is hopeless")
            case "patient":
                raise Retry(after=0.5)
            case "slow":
                await asyncio.sleep(10 * TIMEOUT)
