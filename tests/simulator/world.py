"""The world: what may happen at a call into a backend, who is alive, and when it heals. One seed decides everything."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from contextvars import ContextVar, copy_context
from random import Random
from typing import Any, TypeVar

from msgspec import Struct

from redrive.errors import RedriveError
from simulator.loop import EPOCH, VirtualLoop

T = TypeVar("T")


class Dead(BaseException):
    """Raised into the tasks of a process that is no more. No engine code may catch it."""


class Fates(Struct, frozen=True):
    """How likely each misfortune is at one call. Delays are in seconds; `stall` is one longer than any lease."""

    fail: float = 0.0
    ambiguous: float = 0.0
    crash: float = 0.0
    refuse: float = 0.0
    late: float = 0.3
    stall: float = 0.0


CALM = Fates()
PROFILES = (
    CALM,
    Fates(crash=0.05),
    Fates(fail=0.1, ambiguous=0.1),
    Fates(ambiguous=0.2, crash=0.01),
    Fates(fail=0.05, ambiguous=0.05, crash=0.02, refuse=0.03, late=0.5, stall=0.01),
    Fates(refuse=0.15, late=0.6, stall=0.03),
    Fates(fail=0.3, crash=0.01),
)
"""What a history is made of: no faults, only crashes, only unclear answers, everything, refusals, outages."""
WEIGHTS = {
    "broker.ensure": 0.2,
    "broker.subscribe": 0.2,
    "store.lease": 0.3,
    "store.settle_quiet": 0.2,
    "attempts.turn": 0.3,
    "store.advance": 3.0,
    "store.close_window": 3.0,
    "store.file": 2.0,
    "broker.publish": 1.5,
    "spool.append": 2.0,
    "spool.forget": 2.0,
    "attempts.increment": 2.0,
}
"""Calls that idle processes repeat are dull; those between two durable steps are where bugs live."""


class Process:
    """One life of one process. Its tasks die together; what it calls afterwards has no effect."""

    def __init__(self, world: World, name: str, kind: str, life: int) -> None:
        self.world, self.kind, self.life = world, kind, life
        self.name = f"{name}.{life}"
        self.alive = True
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.on_death: list[Callable[[], None]] = []

    def start(self, main: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        context = copy_context()
        context.run(_process.set, self)
        return context.run(self.world.loop.create_task, main)

    def ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)

    def kill(self) -> None:
        if not self.alive:
            return
        self.alive = False
        for done in self.on_death:
            done()
        for task in list(self.tasks):
            task.cancel()


_process: ContextVar[Process] = ContextVar("process")


class WorldLoop(VirtualLoop):
    """Knows whose task each task is."""

    def create_task(self, work: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
        task = super().create_task(work, **options)
        owner = _process.get(None)
        if owner is not None:
            if owner.alive:
                owner.tasks[task] = None
                task.add_done_callback(owner.ended)
            else:
                task.cancel()
        return task


class World:
    """Decides the fate of every call, counts the misfortunes, and keeps the trace."""

    def __init__(self, seed: int, *, keep_trace: bool = False) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.loop = WorldLoop(self._unhandled)
        self.fates = self.rng.choice(PROFILES)
        self.heals_at = 0.0 if self.fates is CALM else self.rng.uniform(6, 22)
        self.outages = [self._outage() for _ in range(self.rng.choice((0, 0, 1, 2)))] if self.heals_at else []
        self.crashes_left = 8
        self.faults: Counter[str] = Counter()
        self.by_kind: Counter[str] = Counter()
        self.by_call: Counter[str] = Counter()
        self.defects: list[str] = []
        self.trace: list[tuple[Any, ...]] | None = [] if keep_trace else None
        self.calls = 0
        self.on_crash: Callable[[Process], None] = lambda process: None

    @property
    def healed(self) -> bool:
        return self.loop.time() >= self.heals_at

    @property
    def now(self) -> int:
        return EPOCH + round(self.loop.time() * 1000)

    def note(self, *what: Any) -> None:
        if self.trace is not None:
            self.trace.append((round(self.loop.time(), 3), *what))

    def hit(self, fault: str, process: Process | None, what: str) -> None:
        """One more misfortune."""
        self.faults[fault] += 1
        self.by_call[what] += 1
        if process is not None:
            self.by_kind[process.kind] += 1
        self.note(process.name if process else "world", what, fault.upper())

    async def call(
        self, process: Process, what: str, effect: Callable[[], T], error: Callable[[str], Exception], **facts: Any
    ) -> T:
        """One call into a backend: the effect happens once, never, or nobody knows; and the caller may not live."""
        if not process.alive:
            raise Dead
        self.calls += 1
        fate = self._fate(what, process)
        await self._delay(fate)
        if not process.alive:
            raise Dead
        if fate == "fail":
            self.hit("fail", process, what)
            raise error("it does not answer")
        if fate == "crash before":
            self.crash(process, what)
        result = effect()
        self.note(process.name, what, *(facts.values() if facts else ()), _brief(result))
        if fate == "crash after":
            self.crash(process, what)
        await self._delay(fate)
        if not process.alive:
            raise Dead
        if fate == "ambiguous":
            self.hit("ambiguous", process, what)
            raise error("nobody knows whether it happened")
        return result

    def crash(self, process: Process, what: str) -> None:
        """The caller's whole process is gone; this raises into the calling task."""
        self.hit("crash", process, what)
        self.crashes_left -= 1
        process.kill()
        self.on_crash(process)
        raise Dead

    def chance(self, likely: float) -> bool:
        """A thing that happens only while the world is not healed."""
        return not self.healed and self.rng.random() < likely

    def refuses(self, what: str) -> bool:
        if self.chance(self.fates.refuse):
            self.hit("refuse", None, what)
            return True
        return False

    def is_out(self, backend: str) -> bool:
        now = self.loop.time()
        return any(name == backend and start <= now < end for name, start, end in self.outages)

    def _outage(self) -> tuple[str, float, float]:
        start = self.rng.uniform(0, self.heals_at)
        backend = self.rng.choice(("broker", "store", "attempts", "spool"))
        return backend, start, min(start + self.rng.uniform(1, 8), self.heals_at)

    def _fate(self, what: str, process: Process) -> str:
        if self.healed:
            return ""
        if self.outages and self.is_out(what.partition(".")[0]):
            return "fail"
        drawn, fates = self.rng.random() / WEIGHTS.get(what, 1.0), self.fates
        for name in ("fail", "ambiguous", "crash", "stall"):
            likely = getattr(fates, name)
            if drawn < likely:
                return self._crash_fate(process) if name == "crash" else name
            drawn -= likely
        return ""

    def _crash_fate(self, process: Process) -> str:
        mortal = process.kind != "people" and self.crashes_left > 0
        return self.rng.choice(("crash before", "crash after")) if mortal else ""

    async def _delay(self, fate: str) -> None:
        """Most answers come at once, some late, so that completions overtake each other."""
        if fate == "stall":
            await asyncio.sleep(self.rng.uniform(2, 12))
        elif self.rng.random() < self.fates.late:
            await asyncio.sleep(self.rng.random() * 0.2)

    def _unhandled(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, Dead | RedriveError):
            self.defects.append(f"{context.get('message')}: {error!r}")


def _brief(result: Any) -> str:
    if isinstance(result, list | tuple):
        return f"{len(result)}: " + ", ".join(_brief(one) for one in result[:6])
    return type(result).__name__ if result is None or not isinstance(result, str | int | bool) else repr(result)
