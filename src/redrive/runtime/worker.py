"""A worker: reads one consumer's deliveries and runs them in slots; suspects alone, nothing while a breaker is open."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import deque
from contextlib import suppress
from itertools import count
from time import perf_counter
from typing import Any

from redrive import codec, faults
from redrive.breaker import Breaker, BreakerState
from redrive.brokers.base import Assigned, Batch, Event, Lane, Revoked, Stream, Subscription
from redrive.clock import Millis
from redrive.consumer import Consumer
from redrive.errors import (
    BrokerUnavailable,
    DeadLetter,
    Discard,
    FilingFailed,
    PayloadUnreadable,
    ProcessDied,
    ReportedFailure,
    Retry,
    StoreUnavailable,
)
from redrive.handlers import Answer, Failed
from redrive.message import Message
from redrive.office import Notice
from redrive.runtime.engine import Engine, SlotsLost, backoff, cancel_all, sleep_until
from redrive.runtime.item import Item
from redrive.runtime.judge import Judge, PutBack, Wait
from redrive.runtime.keys import Keys, place_of
from redrive.runtime.settler import Done, Settler
from redrive.runtime.slots import YIELD_EVERY, Slot, Slots
from redrive.runtime.spans import CRASHES_ALONE, Spans

log = logging.getLogger("redrive.runtime")

DRAIN_TICK = 0.01
TEND_SECONDS = 1.0
SUSPICION_SECONDS = 5.0


class Worker:
    """One consumer at work on one broker."""

    def __init__(self, consumer: Consumer, engine: Engine, *, grace: float = 30.0) -> None:
        self.consumer, self._engine, self._grace = consumer, engine, grace
        self._clock = engine.clock
        self._keys = Keys(consumer, engine, self._enqueue) if consumer.ordered else None
        self._settler = Settler(consumer, engine, self._on_settled)
        self._condemned: set[int] = set()
        self._slots = Slots(consumer.handler, consumer.concurrency, consumer.timeout, self._on_lost_slot)
        self._spans = Spans(engine.attempts, consumer.group)
        self._breaker = Breaker(consumer.breaker)
        self._judge = Judge(consumer, engine, self._settler, self._breaker)
        self._probing = False
        self._wakes_at: Millis = 0
        self._singly = 0
        self._ready: deque[Item] = deque()
        self._suspects: deque[Item] = deque()
        self._last_suspect_at: Millis = 0
        self._wake = asyncio.Event()
        self._waiting: list[tuple[Millis, int, Item]] = []
        self._waiting_wake = asyncio.Event()
        self._order = count()
        self._stopping = asyncio.Event()
        self._lost_slots = 0
        self._defect: BaseException | None = None

    def stop(self) -> None:
        """Take no more; finish what runs, settle it, give the rest back."""
        self._stopping.set()

    def due(self) -> Millis | None:
        """When there is something to do here: now, later, or None until a message comes."""
        now = self._clock.now()
        times = [self._slots.due(now), self._settler.due(now), self._waiting[0][0] if self._waiting else None]
        if (self._ready and self._slots.are_free) or self._suspects:
            times.append(max(now, self._breaker.probe_at))
        return min((time for time in times if time is not None), default=None)

    async def run(self) -> None:
        """Work until stopped. Raises SlotsLost when the process should be replaced."""
        stream = await self._engine.broker.subscribe(self._subscription())
        self._engine.gate.wakes(self._wake)
        run = self._run_batch if self.consumer.handler.batch else self._run_some
        slots = self._slots.start((self._may_run, run), (self._has_suspect, self._run_suspect), self._wake)
        tasks = [asyncio.create_task(job) for job in (self._settler.run(), self._release_due(), self._tend())]
        for task in (*slots, *tasks):
            task.add_done_callback(self._on_task_end)
        try:
            await self._read(stream)
            await self._drain(tasks[0])
        finally:
            hanging = self._slots.hanging
            await self._slots.stop()
            await cancel_all(tasks)
            await self._settler.stop()
            await self._spans.close(hanging)
            await stream.aclose()
        if self._defect is not None:
            raise self._defect
        if self._lost_slots:
            raise SlotsLost(self.consumer.name, self._lost_slots)

    def _subscription(self) -> Subscription:
        consumer = self.consumer
        widest = max(consumer.batch, consumer.concurrency)
        return Subscription(
            consumer.sources, consumer.group, batch=widest, in_flight=widest * 4, exclude=(consumer.dead_letter_glob,)
        )

    # ---- reading

    async def _read(self, stream: Stream) -> None:
        stopping = asyncio.create_task(self._stopping.wait())
        failures = 0
        while not self._stopping.is_set():
            coming = asyncio.ensure_future(stream.__anext__())
            await asyncio.wait({coming, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                coming.cancel()
                with suppress(asyncio.CancelledError, BrokerUnavailable):
                    await coming
                break
            try:
                await self._accept(coming.result())
                failures = 0
            except BrokerUnavailable as error:
                failures += 1
                log.warning("%s: %s; trying again", self.consumer.name, error)
                await self._clock.wait(self._stopping, backoff(failures))
        stopping.cancel()

    async def _accept(self, event: Event) -> None:
        if isinstance(event, Assigned):
            await self._spans.assigned(event.lanes)
            self._last_suspect_at = self._clock.now()
        elif isinstance(event, Revoked):
            self._spans.revoked(event.lanes)
            self._forget(frozenset(event.lanes))
        else:
            await self._accept_batch(event)

    def _forget(self, lanes: frozenset[Lane]) -> None:
        """Another owner runs what waits here of these lanes; what runs already may end, but not run again."""
        for item in self._slots.running:
            item.is_orphan = item.is_orphan or item.delivery.lane in lanes
        late = [entry[2] for entry in self._waiting if entry[2].delivery.lane in lanes]
        self._waiting = [entry for entry in self._waiting if entry[2].delivery.lane not in lanes]
        heapq.heapify(self._waiting)
        if self._keys is None:
            for item in late:
                self._settler.resume(item.delivery.lane)
        else:
            for item in self._keys.forget(lanes):
                self._spans.ended(item)
        for item in [*late, *_take(self._ready, lanes), *_take(self._suspects, lanes)]:
            self._drop(item)

    def _drop(self, item: Item) -> None:
        self._spans.ended(item)
        if self._keys is not None:
            self._keys.ended(item.delivery)

    async def _accept_batch(self, batch: Batch) -> None:
        """Nothing may run before it is on record: a crash must find it there."""
        faults.point("runtime.after_receive")
        if self._keys is not None:
            await self._look_up(batch)
        items = await self._spans.start(batch.deliveries)
        if any(item.record is None for item in items):
            self._last_suspect_at = self._clock.now()
        if self._keys is None and self._spans.suspects_nobody:
            self._ready.extend(items)
        else:
            for item in items:
                self._admit(item)
        self._wake.set()

    def _admit(self, item: Item) -> None:
        """A suspect waits for its turn too: what follows it in its key must not pass while it runs, or runs again."""
        if self._keys is None:
            self._enqueue(item)
        else:
            self._keys.admit(item)

    def _enqueue(self, item: Item) -> None:
        (self._suspects if self._spans.is_suspect(item.delivery) else self._ready).append(item)
        self._wake.set()

    async def _look_up(self, batch: Batch) -> None:
        """Which keys have open letters; nothing runs before that is known, however long the store is away."""
        assert self._keys is not None
        for tries in range(1_000_000_000):
            try:
                await self._keys.look_up(batch.deliveries, self._engine.office)
                return
            except StoreUnavailable as error:
                log.warning("%s waits for the store: %s", self.consumer.name, error)
                if await self._clock.wait(self._stopping, backoff(tries)):
                    return

    async def _tend(self) -> None:
        """Small duties once a second: finished records, records that no redelivery will ever finish, bad news."""
        told = False
        while True:
            await self._clock.sleep(TEND_SECONDS)
            await self._spans.flush()
            if not self._suspects and self._clock.now() - self._last_suspect_at > SUSPICION_SECONDS * 1000:
                await self._spans.forget_settled(self._keys.waiting if self._keys is not None else ())
            if self._spans.degraded and not told:
                self._engine.office.tell(Notice("degraded", f"crashes are not tracked: {self._spans.degraded}"))
            told = self._spans.degraded is not None

    # ---- running

    def _may_run(self) -> bool:
        return bool(self._ready) and self._engine.gate.is_open and self._breaker_lets()

    def _has_suspect(self) -> bool:
        return bool(self._suspects) and self._engine.gate.is_open and self._breaker_lets()

    def _breaker_lets(self) -> bool:
        if not self._breaker.is_open:
            return True
        return self._breaker.state(self._clock.now()) is BreakerState.PROBING and not self._probing

    async def _run_some(self, slot: Slot) -> None:
        """Run messages one after the other while nothing stands in their way; a probe stays alone."""
        probe = self._begin()
        try:
            for _ in range(1 if probe else YIELD_EVERY):
                await self._run_item(slot, self._ready.popleft())
                if not self._ready or not self._engine.gate.is_open or self._breaker.is_open:
                    break
        finally:
            self._end(probe)

    def _begin(self) -> bool:
        """Enter the gate; says whether this run is the probe, of which there is one at a time."""
        self._engine.gate.enter()
        if not self._breaker.is_open:
            return False
        self._probing = True
        return True

    def _end(self, probe: bool) -> None:
        self._engine.gate.leave()
        if probe:
            self._probing = False
        if self._ready or self._suspects:
            self._wake.set()

    async def _run_item(self, slot: Slot, item: Item) -> None:
        message = self._open(item)
        if message is None:
            return
        slot.running = (item,)
        if self._keys is not None and await self._held(item, message):
            return
        started = self._clock.now()
        while True:
            faults.point("runtime.before_handler")
            begin = perf_counter()
            answer = await self._slots.call(slot, message)
            self._settler.metrics(message.source).seconds.observe(perf_counter() - begin)
            faults.point("runtime.after_handler")
            if not isinstance(answer, Failed) or answer.discards:
                self._went_well(item, message, started, answer)
                return
            wait = await self._went_wrong(item, message, started, answer.error)
            if wait is None:
                return
            item.ticket, slot.until = wait.ticket, wait.when
            if await self._clock.wait(self._stopping, max(wait.when - self._clock.now(), 0) / 1000):
                return
            slot.until = 0

    async def _run_batch(self, slot: Slot) -> None:
        probe = self._begin()
        size = 1 if probe or self._singly else min(self.consumer.batch, len(self._ready))
        self._singly = max(self._singly - 1, 0)
        try:
            await self._run_items(slot, [self._ready.popleft() for _ in range(size)])
        finally:
            self._end(probe)

    async def _run_items(self, slot: Slot, items: list[Item]) -> None:
        slot.running = items
        started = self._clock.now()
        rows: list[tuple[Item, Message]] = []
        arguments: list[tuple[Any, ...]] = []
        for item in items:
            message = self._open(item)
            if message is None:
                continue
            try:
                arguments.append(self.consumer.handler.arguments(message))
                rows.append((item, message))
            except PayloadUnreadable as error:
                await self._went_wrong(item, message, started, error)
        faults.point("runtime.before_handler")
        answers = await self._slots.call_batch(slot, arguments) if rows else []
        faults.point("runtime.after_handler")
        if len(rows) > 1 and _is_one_error(answers):
            self._run_singly([item for item, _ in rows])
            return
        for (item, message), answer in zip(rows, answers, strict=True):
            if not isinstance(answer, Failed) or answer.discards:
                self._went_well(item, message, started, answer)
                continue
            wait = await self._went_wrong(item, message, started, answer.error)
            if wait is not None:
                self._keep(item, wait)

    def _run_singly(self, items: list[Item]) -> None:
        """A batch failed as a whole: its messages run again one by one, and uncounted, so that only culprits pay."""
        for item in reversed(items):
            if item.is_orphan:
                self._drop(item)
            else:
                self._ready.appendleft(item)
                self._singly += 1
        self._wake.set()

    async def _run_suspect(self, slot: Slot) -> None:
        """Run one suspect with nothing beside it, under a record of its own; file it when that killed us before."""
        item = self._suspects.popleft()
        delivery = item.delivery
        if self._spans.crashes(delivery) >= CRASHES_ALONE:
            crashes = await self._spans.crashes_on_record(delivery)
            message = self._open(item) if crashes >= CRASHES_ALONE else None
            if message is not None:
                self._condemned.add(id(delivery))
                await self._went_wrong(item, message, self._clock.now(), ProcessDied(crashes))
                return
        async with self._engine.gate.alone():
            await self._spans.start_alone(delivery)
            run = self._run_items(slot, [item]) if self.consumer.handler.batch else self._run_item(slot, item)
            await run
            await self._spans.cleared(delivery)

    def _open(self, item: Item) -> Message | None:
        """The original message, its ticket now in the item; None for a copy that is meant for another group."""
        message = item.delivery.message
        if item.ticket is None and message.headers:
            item.ticket = codec.read_ticket(message, self._engine.keyring)
        if item.ticket is not None and item.ticket.group != self.consumer.group:
            self._spans.ended(item)
            self._settler.finish(Done(item.delivery, "skipped"))
            return None
        return codec.original(message, item.ticket)

    async def _held(self, item: Item, message: Message) -> bool:
        """Whether this message waits behind an open letter of its key, or for a store that could say so."""
        assert self._keys is not None
        try:
            if not await self._keys.held(message, item.ticket):
                return False
        except FilingFailed as error:
            log.warning("%s: %s", self.consumer.name, error)
            if item.is_orphan:
                self._drop(item)
                return True
            past = item.ticket or self.consumer.first_ticket(message, 0)
            self._keep(item, Wait(past, self._clock.now() + 1000, in_slot=False))
            return True
        self._spans.ended(item)
        self._settler.finish(Done(item.delivery, "held", item.ticket))
        return True

    def _on_settled(self, done: Done) -> None:
        if self._condemned and id(done.delivery) in self._condemned:  # evidence is kept until the letter is durable
            self._condemned.discard(id(done.delivery))
            self._settler.spawn(self._spans.cleared(done.delivery))
        if self._keys is None:
            return
        if done.letter is not None:
            self._keys.died(done.letter.message, place_of(done.letter.message))
        self._keys.ended(done.delivery)

    def _went_well(self, item: Item, message: Message, started: Millis, answer: Answer) -> None:
        self._judge.went_well(item, message, started, answer)
        if self._breaker.is_open:
            self._wake_at(self._breaker.probe_at)
        self._spans.ended(item)

    async def _went_wrong(self, item: Item, message: Message, started: Millis, error: BaseException) -> Wait | None:
        """Act on a failure; hands back a wait that its slot should sit out in place."""
        verdict = await self._judge.failed(item, message, started, error)
        if self._breaker.is_open:
            self._wake_at(self._breaker.probe_at)
        if isinstance(verdict, Wait) and verdict.in_slot:
            self._spans.ended(item)
            return verdict
        if item.is_orphan and verdict is not None:
            self._drop(item)
        elif isinstance(verdict, PutBack):
            # At the end, so that the next probe is another message: this one may fail for reasons of its own.
            # Its start record stays open, for it will run again.
            self._ready.append(item)
        else:
            self._spans.ended(item)
            if isinstance(verdict, Wait):
                self._keep(item, verdict)
        return None

    def _wake_at(self, when: Millis) -> None:
        if when == self._wakes_at:
            return
        self._wakes_at = when

        async def later() -> None:
            await sleep_until(when, self._clock)
            self._wake.set()

        self._settler.spawn(later(), when)

    # ---- waiting in memory (redeliver, block)

    def _keep(self, item: Item, wait: Wait) -> None:
        """Keep the delivery and run it again when due; meanwhile its lane waits, or only its key in ordered sources."""
        item.ticket = wait.ticket
        heapq.heappush(self._waiting, (wait.when, next(self._order), item))
        self._waiting_wake.set()
        if self._keys is None:
            self._settler.pause(item.delivery.lane)

    async def _release_due(self) -> None:
        while True:
            due = self._waiting[0][0] if self._waiting else None
            if due is not None and due <= self._clock.now():
                _, _, item = heapq.heappop(self._waiting)
                self._ready.append(item)
                self._wake.set()
                if self._keys is None:
                    self._settler.resume(item.delivery.lane)
                continue
            self._waiting_wake.clear()
            pause = 3600.0 if due is None else (due - self._clock.now()) / 1000
            await self._clock.wait(self._waiting_wake, max(pause, 0.001))

    # ---- stopping

    async def _drain(self, settling: asyncio.Task[None]) -> None:
        """Let running handlers finish and settle, within the grace time; what has not started goes back."""
        self._ready.clear()
        self._suspects.clear()
        self._waiting.clear()
        if self._keys is not None:
            self._keys.clear()
        deadline = perf_counter() + self._grace
        while perf_counter() < deadline and (self._slots.busy or not self._settler.idle):
            if settling.done():  # it failed: nothing that ends now can be settled
                return
            await asyncio.sleep(DRAIN_TICK)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """A slot or the settler must not die in silence: messages would wait for ever."""
        if not task.cancelled() and task.exception() is not None:
            self._defect = task.exception()
            self.stop()

    def _on_lost_slot(self, slot: Slot, lost: int) -> None:
        size = self.consumer.concurrency
        text = f"{self.consumer.name}: {lost} of {size} handler threads hang beyond their limit"
        self._engine.office.tell(Notice("slot_lost", text))
        if slot.solo or lost * 2 >= size:
            self._lost_slots = lost
            self.stop()


def _take(queue: deque[Item], lanes: frozenset[Lane]) -> list[Item]:
    """Remove what is of these lanes, and say what that was."""
    items = list(queue)
    queue.clear()
    queue.extend(item for item in items if item.delivery.lane not in lanes)
    return [item for item in items if item.delivery.lane in lanes]


def _is_one_error(answers: list[Answer]) -> bool:
    """Whether a batch handler raised, and not to say itself what should become of them all."""
    first = answers[0]
    if not isinstance(first, Failed) or isinstance(first.error, ReportedFailure | Retry | DeadLetter | Discard):
        return False
    return all(answer is first for answer in answers)
