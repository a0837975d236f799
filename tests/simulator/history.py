"""One history: the processes of an office, what people do to it, what the world does to it, until all is quiet."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import Any, ClassVar

from msgspec import Struct
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from redrive import codec, collector, replayer, reports
from redrive import office as offices
from redrive.breaker import BreakerPolicy
from redrive.brokers.base import SourceSpec, Subscription
from redrive.collector import Collector
from redrive.consumer import Consumer
from redrive.errors import RedriveError
from redrive.keyring import Keyring
from redrive.letter import Act, Environment, Letter, State
from redrive.message import Copy, Message
from redrive.metrics import Metrics
from redrive.replayer import Replayer
from redrive.reports import Reporter, through_broker, through_store
from redrive.retry import Mode, Policy, constant, exponential
from redrive.runtime import Engine, Gate, Worker, slots, worker
from redrive.stores.base import JobState
from simulator.broker import SimBroker, SimServer
from simulator.check import Anomaly, check
from simulator.ledger import Ledger
from simulator.loop import VirtualClock
from simulator.plans import TIMEOUT, Plans, message_for
from simulator.store import Counts, Office, SimAttempts, SimBlobs, SimSpool, SimStore
from simulator.world import CALM, Fates, Process, World

SOURCE = "orders"
GROUP = "billing"
DEAD = "*.dlq"
QUIET_SECONDS = 20.0
DEADLINE = 400.0
"""Virtual seconds. What is not at rest by then is stuck."""
METRICS = Metrics(CollectorRegistry())
KEYRING = Keyring([b"the key of every simulated office"])
INTERVALS = (
    (slots, "WATCH_SECONDS", 1.0),
    (worker, "DRAIN_TICK", 0.1),
    (worker, "TEND_SECONDS", 2.0),
    (reports, "FLUSH_SECONDS", 2.0),
    (replayer, "IDLE_SECONDS", 2.0),
    (replayer, "LEASE_SECONDS", 5.0),
    (offices, "DRAIN_SECONDS", 2.0),
)
"""How often the engine looks at things, scaled to histories of a minute; what it does then is untouched."""


class Setup(Struct, frozen=True):
    """What a seed makes of an office."""

    is_log: bool
    partitions: int
    mode: Mode
    direct: bool
    batch: bool
    attempts: int
    concurrency: int
    max_replays: int
    window: int
    has_spool: bool
    has_blobs: bool
    breaker: bool
    messages: int
    workers: int
    collectors: int
    replayers: int
    impatient: bool
    killers: int
    """How many messages kill whatever process runs them. The world itself kills nobody then."""


def setup_for(rng: Random, fates: Fates) -> Setup:
    return Setup(
        is_log=rng.random() < 0.5,
        partitions=rng.randint(1, 3),
        mode=rng.choice(tuple(Mode)),
        direct=rng.random() < 0.5,
        batch=rng.random() < 0.2,
        attempts=rng.randint(1, 4),
        concurrency=rng.randint(1, 4),
        max_replays=rng.randint(1, 3),
        window=rng.randint(1, 3),
        has_spool=rng.random() < 0.5,
        has_blobs=rng.random() < 0.5,
        breaker=rng.random() < 0.1,
        messages=rng.randint(3, 15),
        workers=rng.randint(1, 3),
        collectors=rng.randint(1, 2),
        replayers=rng.randint(1, 2),
        impatient=rng.random() < 0.4,
        killers=rng.choice((0, 1, 2)) if fates is CALM else 0,
    )


class Verdict(Struct):
    """What became of one seed."""

    seed: int
    anomalies: list[Anomaly]
    trace: list[tuple[Any, ...]] | None
    digest: str
    calls: int
    seconds: float
    faults: dict[str, int]

    def __str__(self) -> str:
        return "\n".join(f"  {one.kind}: {one.text}" for one in self.anomalies)


class History:
    """The mutants replace its parts and may pin its setup; everything else is the real engine."""

    pinned: ClassVar[dict[str, Any]] = {}
    office_type = Office
    broker_type = SimBroker
    attempts_type = SimAttempts
    spool_type = SimSpool

    def __init__(self, seed: int, *, keep_trace: bool = False) -> None:
        self.world = World(seed, keep_trace=keep_trace)
        self.setup = replace(setup_for(self.world.rng, self.world.fates), **self.pinned)
        self.ledger = Ledger(KEYRING)
        self.plans = Plans(seed, self.setup, self.ledger)
        self.server = SimServer(
            self.world,
            self.ledger,
            is_log=self.setup.is_log,
            partitions=self.setup.partitions,
            readers=(Subscription((SOURCE,), GROUP), Subscription((DEAD, reports.REPORTS), collector.GROUP)),
        )
        self.office = self.office_type(self.world, self.ledger)
        self.counts = Counts()
        self.disks: dict[str, list[Letter]] = {}
        self.blobs: dict[str, bytes] = {}
        self.world.on_crash = self._restart
        self._lives: dict[str, int] = {}
        self._mains: dict[str, tuple[str, Callable[[Process], Awaitable[None]]]] = {}
        self._running: dict[str, Process] = {}
        self._stops: dict[str, Callable[[], None]] = {}
        self._ending = False

    def run(self) -> Verdict:
        world = self.world
        with observed(world.loop.time, self.ledger):
            try:
                world.loop.run_until_complete(self._play())
            finally:
                self._bury_all()
        anomalies = check(self)
        digest = hashlib.sha256(repr(world.trace).encode()).hexdigest()
        return Verdict(world.seed, anomalies, world.trace, digest, world.calls, world.loop.time(), dict(world.faults))

    async def _play(self) -> None:
        setup = self.setup
        self.world.note("world", repr(setup), repr(self.world.fates), f"heals at {self.world.heals_at:.1f}")
        for number in range(setup.workers):
            self._begin(f"worker{number}", "worker", self._work)
        for number in range(setup.collectors):
            self._begin(f"collector{number}", "collector", self._collect)
        for number in range(setup.replayers):
            self._begin(f"replayer{number}", "replayer", self._replay)
        people = Process(self.world, "people", "people", 0)
        acts = [people.start(self._produce(people)), people.start(self._operate(people))]
        if setup.impatient:
            acts.append(people.start(self._insist(people)))
        if self.world.heals_at:
            acts.append(people.start(self._torment()))
        await asyncio.wait(acts)
        for act in acts:
            act.result()
        await self._until_quiet()

    # ---- processes

    def _begin(self, name: str, kind: str, main: Callable[[Process], Awaitable[None]]) -> None:
        self._mains[name] = (kind, main)
        self._live(name)

    def _live(self, name: str) -> None:
        if self._ending:
            return
        kind, main = self._mains[name]
        self._lives[name] = self._lives.get(name, 0) + 1
        process = self._running[name] = Process(self.world, name, kind, self._lives[name])
        process.start(self._supervised(name, process, main))

    async def _supervised(self, name: str, process: Process, main: Callable[[Process], Awaitable[None]]) -> None:
        """A process that ends, by an outage at its start or because it was asked to, is started anew."""
        try:
            await main(process)
        except RedriveError as error:
            self.world.note(process.name, "exits", type(error).__name__)
        except Exception as error:
            self.world.defects.append(f"{process.name} ended with {error!r}")
        if process.alive:
            self.world.hit("exit", process, "exit")
            process.kill()
            self._restart(process)

    def _restart(self, process: Process) -> None:
        name = process.name.partition(".")[0]
        self.world.loop.call_later(self.world.rng.uniform(0.1, 3), self._live, name)

    def _engine(self, process: Process, store: SimStore, clock: VirtualClock) -> Engine:
        setup, name = self.setup, process.name.partition(".")[0]
        broker = self.broker_type(self.server, process)
        disk = self.disks.setdefault(name, [])
        office = offices.Office(
            KEYRING,
            clock,
            METRICS,
            store=store if setup.direct else None,
            spool=self.spool_type(disk, process) if setup.has_spool and setup.direct else None,
            blobs=SimBlobs(self.blobs, process) if setup.has_blobs else None,
        )
        send = through_store(store, clock) if setup.direct else through_broker(broker, KEYRING)
        return Engine(
            broker=broker,
            office=office,
            attempts=self.attempts_type(self.counts, process),
            reporter=Reporter(process.name, "sim", send, clock),
            metrics=METRICS,
            keyring=KEYRING,
            clock=clock,
            environment=Environment("sim", 1),
            rng=Random(self.world.seed),
            gate=Gate(),
        )

    def consumer(self, process: Process) -> Consumer:
        setup = self.setup
        rare = BreakerPolicy(failures=1000, window=1000, dead_window=1000)
        return Consumer(
            name="sim",
            sources=(SOURCE,),
            group=GROUP,
            handler=self.plans.handler(process),
            policy=Policy(setup.attempts, exponential(0.4, cap=2.0, jitter=0.5) if setup.is_log else constant(0.5)),
            mode=setup.mode,
            timeout=TIMEOUT,
            concurrency=setup.concurrency,
            batch=max(setup.concurrency, 3),
            direct=setup.direct,
            max_replays=setup.max_replays,
            breaker=BreakerPolicy(failures=2, window=4, longest_cooldown=4.0) if setup.breaker else rare,
        )

    async def _work(self, process: Process) -> None:
        """As `Redrive.work` puts it together."""
        clock = VirtualClock(self.world.loop)
        engine = self._engine(process, SimStore(self.office, process), clock)
        consumer = self.consumer(process)
        await engine.broker.ensure([SourceSpec(SOURCE), SourceSpec(consumer.dead_letter_source(SOURCE))])
        running = Worker(consumer, engine, grace=3.0)
        self._stops[process.name] = running.stop
        side = [asyncio.create_task(job) for job in (engine.reporter.run(), engine.office.drain_spool())]
        try:
            await running.run()
        finally:
            for task in side:
                task.cancel()
            await asyncio.gather(*side, return_exceptions=True)
            await engine.reporter.flush()

    async def _collect(self, process: Process) -> None:
        clock, store = VirtualClock(self.world.loop), SimStore(self.office, process)
        broker = self.broker_type(self.server, process)
        one = Collector(broker, store, KEYRING, clock, METRICS, sources=[DEAD], tell=lambda notice: None)
        self._stops[process.name] = one.stop
        await one.run()

    async def _replay(self, process: Process) -> None:
        clock, store = VirtualClock(self.world.loop), SimStore(self.office, process)
        one = Replayer(
            self.broker_type(self.server, process),
            store,
            KEYRING,
            clock,
            METRICS,
            owner=process.name,
            blobs=SimBlobs(self.blobs, process) if self.setup.has_blobs else None,
            quiet_seconds=QUIET_SECONDS,
        )
        self._stops[process.name] = one.stop
        await one.run()

    # ---- people and the world

    async def _produce(self, people: Process) -> None:
        """What is never confirmed may be there or not: the broker's own log is the truth."""
        broker, rng = SimBroker(self.server, people), self.world.rng
        for number in range(self.setup.messages):
            made = message_for(self.world.seed, f"m{number}")
            self.ledger.produced[made.id] = made
            with suppress(RedriveError):
                await broker.publish([Copy(SOURCE, made.key, made.body, made.headers)])
            await asyncio.sleep(rng.random() * rng.choice((0.05, 1.5)))

    async def _operate(self, people: Process) -> None:
        """People look at letters and act on them while everything fails, and once more when it is mended."""
        rng = self.world.rng
        for _ in range(rng.randint(4, 12)):
            await asyncio.sleep(rng.uniform(0.2, 2.5))
            await self._act(people, rng)
        await asyncio.sleep(max(self.world.heals_at + 1 - self.world.loop.time(), 0))
        await self._until_settled()
        for _ in range(2):
            await self._act(people, rng, verbs=("replay", "restore", "replay"))
            await asyncio.sleep(rng.uniform(0.5, 5))

    async def _act(
        self,
        people: Process,
        rng: Random,
        verbs: tuple[str, ...] = ("replay", "replay", "replay", "discard", "restore", "resolve", "cancel", "pause"),
    ) -> None:
        store, act, now = SimStore(self.office, people), Act("people"), self.world.now
        verb = rng.choice(verbs)
        ids = [row.id for row in self.office.letters.values()]
        some = rng.sample(ids, rng.randint(min(1, len(ids)), len(ids)))
        self.world.note("people", verb, len(some))
        try:
            if verb == "replay":
                await store.create(some, act, now, window=self.setup.window, rate=rng.choice((None, 2.0, 20.0)))
            elif verb in ("cancel", "pause"):
                await self._stop_a_job(store, rng, verb)
            elif verb == "discard":
                await store.move(some[:2], State.PENDING, State.DISCARDED, act, now)
            elif verb == "resolve":
                await store.move(some[:1], State.PENDING, State.RESOLVED, act, now)
            else:
                ended = rng.choice((State.DISCARDED, State.QUARANTINED, State.RESOLVED))
                await store.move(some, ended, State.PENDING, act, now)
        except RedriveError as error:
            self.world.note("people", "cannot", verb, type(error).__name__)

    async def _insist(self, people: Process) -> None:
        """Somebody sends every letter back the moment it returns, while older copies of it may still be about."""
        store, rng = SimStore(self.office, people), self.world.rng
        while self.world.loop.time() < max(self.world.heals_at, 5.0):
            await asyncio.sleep(rng.uniform(0.1, 1.0))
            ids = [row.id for row in self.office.letters.values() if row.state is State.PENDING]
            if ids:
                with suppress(RedriveError):
                    await store.create(ids, Act("impatient"), self.world.now, window=self.setup.window)

    async def _stop_a_job(self, store: SimStore, rng: Random, verb: str) -> None:
        running = [one.job.id for one in self.office.jobs.values() if one.job.state is JobState.RUNNING]
        if not running:
            return
        job, act = rng.choice(running), Act("people")
        to = JobState.CANCELLED if verb == "cancel" else JobState.PAUSED
        with suppress(RedriveError):
            await store.set_state(job, JobState.RUNNING, to, act, self.world.now)
        await asyncio.sleep(rng.uniform(0, 6) if to is JobState.PAUSED else 0)
        while self.office.jobs[job].job.state is JobState.PAUSED:
            with suppress(RedriveError):
                await store.set_state(job, JobState.PAUSED, JobState.RUNNING, act, self.world.now)
            await asyncio.sleep(0.5)

    async def _torment(self) -> None:
        """Leases that run out under the living, messages handed out twice, and rolling restarts."""
        rng = self.world.rng
        while not self.world.healed:
            await asyncio.sleep(rng.uniform(0.2, 6))
            if self.world.healed:
                return
            verb = rng.choice(("steal", "redeliver", "stop", "nothing"))
            if verb == "steal":
                self.server.steal()
            elif verb == "redeliver":
                self.server.redeliver()
            elif verb == "stop":
                chosen = self._running[rng.choice(list(self._running))]
                if chosen.alive and chosen.name in self._stops:
                    self.world.note(chosen.name, "is asked to stop")
                    self._stops[chosen.name]()

    # ---- the end

    async def _until_settled(self) -> None:
        """Until every message has found its end for now, or it is plain that it never will."""
        until = self.world.loop.time() + 60
        while self.server.unsettled() and self.world.loop.time() < until:
            await asyncio.sleep(1.0)

    async def _until_quiet(self) -> None:
        calm = 0
        while calm < 2 and self.world.loop.time() < DEADLINE:
            await asyncio.sleep(1.5)
            calm = calm + 1 if self._is_quiet() else 0

    def _is_quiet(self) -> bool:
        return not self.server.unsettled() and not self.office.unfinished() and not any(self.disks.values())

    def _bury_all(self) -> None:
        """Kill what runs, and let its tasks unwind, so that nothing is left for the garbage collector to find."""
        self._ending = True
        loop = self.world.loop
        for process in self._running.values():
            process.kill()
        for _ in range(50):
            left = asyncio.all_tasks(loop)
            if not left:
                return
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left, timeout=60.0))
        raise AssertionError(f"seed {self.world.seed}: these tasks cannot be killed: {asyncio.all_tasks(loop)}")


@contextmanager
def observed(now: Callable[[], float], ledger: Ledger) -> Iterator[None]:
    """The engine's stopwatch shows virtual time, its intervals suit short histories, and the ledger sees hops."""
    original = codec.original

    def noted(message: Message, ticket: codec.Ticket | None) -> Message:
        opened = original(message, ticket)
        ledger.opened(opened, ticket.hop if ticket is not None else 0)
        return opened

    changes = [
        *INTERVALS,
        (slots, "perf_counter", now),
        (worker, "perf_counter", now),
        (codec, "original", noted),
    ]
    before = [getattr(module, name) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    silenced = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(silenced)
        for (module, name, _), value in zip(changes, before, strict=True):
            setattr(module, name, value)


def play(seed: int, *, keep_trace: bool = False, kind: type[History] = History) -> Verdict:
    return kind(seed, keep_trace=keep_trace).run()
