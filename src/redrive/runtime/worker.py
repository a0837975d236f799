"""A worker: reads one consumer's deliveries, runs them in slots, and decides what follows from each run."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import deque
from contextlib import suppress
from itertools import count
from time import perf_counter
from typing import Any

from msgspec.structs import replace

from redrive import codec, faults
from redrive.brokers.base import Batch, Delivery, Event, Stream, Subscription
from redrive.classify import failure_of
from redrive.clock import Millis
from redrive.codec import TICKET, Ticket
from redrive.consumer import Again, Consumer, Dead, judge
from redrive.errors import AttemptsUnavailable, BrokerUnavailable, Discard, PayloadUnreadable
from redrive.handlers import Answer, Failed, Handled, Recorded
from redrive.letter import Kind
from redrive.message import Message
from redrive.office import Notice
from redrive.retry import Mode
from redrive.runtime.engine import Engine, SlotsLost, backoff, cancel_all
from redrive.runtime.settler import Done, Settler
from redrive.runtime.slots import Slot, Slots
from redrive.stores import base as stores

log = logging.getLogger("redrive.runtime")

DRAIN_TICK = 0.01


class Worker:
    """One consumer at work on one broker."""

    def __init__(self, consumer: Consumer, engine: Engine, *, grace: float = 30.0) -> None:
        self.consumer, self._engine, self._grace = consumer, engine, grace
        self._clock = engine.clock
        self._settler = Settler(consumer, engine)
        self._slots = Slots(consumer.handler, consumer.concurrency, consumer.timeout, self._on_lost_slot)
        self._ready: deque[tuple[Delivery, Ticket | None]] = deque()
        self._wake = asyncio.Event()
        self._waiting: list[tuple[Millis, int, Delivery, Ticket]] = []
        self._waiting_wake = asyncio.Event()
        self._order = count()
        self._stopping = asyncio.Event()
        self._lost_slots = 0
        self._defect: BaseException | None = None

    def stop(self) -> None:
        """Take no more; finish what runs, settle it, give the rest back."""
        self._stopping.set()

    async def run(self) -> None:
        """Work until stopped. Raises SlotsLost when the process should be replaced."""
        stream = await self._engine.broker.subscribe(self._subscription())
        work = self._run_batch if self.consumer.handler.batch else self._run_one
        slots = self._slots.start(work, lambda: bool(self._ready), self._wake)
        tasks = [asyncio.create_task(job) for job in (self._settler.run(), self._release_due())]
        for task in (*slots, *tasks):
            task.add_done_callback(self._on_task_end)
        try:
            await self._read(stream)
            await self._drain()
        finally:
            await self._slots.stop()
            await cancel_all(tasks)
            await self._settler.stop()
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
                self._accept(coming.result())
                failures = 0
            except BrokerUnavailable as error:
                failures += 1
                log.warning("%s: %s; trying again", self.consumer.name, error)
                await self._clock.wait(self._stopping, backoff(failures))
        stopping.cancel()

    def _accept(self, event: Event) -> None:
        if isinstance(event, Batch):
            faults.point("runtime.after_receive")
            self._ready.extend((delivery, None) for delivery in event.deliveries)
            self._wake.set()

    async def _drain(self) -> None:
        """Let running handlers finish and settle, within the grace time; what has not started goes back."""
        self._ready.clear()
        self._waiting.clear()
        deadline = perf_counter() + self._grace
        while perf_counter() < deadline and (self._slots.busy or not self._settler.idle):  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_TICK)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """A slot or the settler must not die in silence: messages would wait for ever."""
        if not task.cancelled() and task.exception() is not None:
            self._defect = task.exception()
            self.stop()

    def _on_lost_slot(self, lost: int) -> None:
        size = self.consumer.concurrency
        text = f"{self.consumer.name}: {lost} of {size} handler threads hang beyond their limit"
        self._engine.office.tell(Notice("slot_lost", text))
        if lost * 2 >= size:
            self._lost_slots = lost
            self.stop()

    # ---- running

    async def _run_one(self, slot: Slot) -> None:
        delivery, known = self._ready.popleft()
        opened = self._open(delivery, known)
        if opened is None:
            return
        message, ticket = opened
        started = self._clock.now()
        while True:
            begin = perf_counter()
            faults.point("runtime.before_handler")
            answer = await self._slots.call(slot, message)
            faults.point("runtime.after_handler")
            self._settler.metrics(message.source).seconds.observe(perf_counter() - begin)
            again = await self._conclude(delivery, message, ticket, started, answer)
            if again is None:
                return
            ticket = again.ticket
            if await self._clock.wait(self._stopping, max(again.when - self._clock.now(), 0) / 1000):
                return

    async def _run_batch(self, slot: Slot) -> None:
        taken = [self._ready.popleft() for _ in range(min(self.consumer.batch, len(self._ready)))]
        started = self._clock.now()
        rows: list[tuple[Delivery, Message, Ticket | None]] = []
        arguments: list[tuple[Any, ...]] = []
        for delivery, known in taken:
            opened = self._open(delivery, known)
            if opened is None:
                continue
            try:
                arguments.append(self.consumer.handler.arguments(opened[0]))
                rows.append((delivery, *opened))
            except PayloadUnreadable as error:
                await self._conclude(delivery, *opened, started, Failed(error))
        answers = await self._slots.call_batch(slot, arguments) if rows else []
        for (delivery, message, ticket), answer in zip(rows, answers, strict=True):
            await self._conclude(delivery, message, ticket, started, answer)

    def _open(self, delivery: Delivery, known: Ticket | None) -> tuple[Message, Ticket | None] | None:
        """The original message and its ticket; None for a copy that is meant for another group."""
        ticket = known
        if known is None and any(name == TICKET for name, _ in delivery.message.headers):
            ticket = codec.read_ticket(delivery.message, self._engine.keyring)
        if ticket is not None and ticket.group != self.consumer.group:
            self._settler.finish(Done(delivery, "skipped"))
            return None
        return codec.original(delivery.message, ticket), ticket

    # ---- deciding

    async def _conclude(
        self, delivery: Delivery, message: Message, ticket: Ticket | None, started: Millis, answer: Answer
    ) -> Again | None:
        """Turn an answer into something to settle; hands back the decision to wait in place in `inline` mode."""
        if isinstance(answer, Handled):
            self._settler.finish(Done(delivery, "handled", ticket))
        elif isinstance(answer, Recorded):
            self._record(message, ticket, answer.note)
            self._settler.finish(Done(delivery, "recorded", ticket))
        elif isinstance(answer.error, Discard):
            log.warning("%s discarded %s: %s", self.consumer.handler.name, message.id, answer.error.why)
            self._settler.finish(Done(delivery, "discarded", ticket))
        else:
            return await self._failed(delivery, message, ticket or self._first_ticket(message, started), answer.error)
        return None

    def _first_ticket(self, message: Message, started: Millis) -> Ticket:
        return self.consumer.first_ticket(message, started)

    async def _failed(self, delivery: Delivery, message: Message, ticket: Ticket, error: BaseException) -> Again | None:
        consumer, engine = self.consumer, self._engine
        self._settler.metrics(message.source).failed.inc()
        engine.reporter.count(message.source, consumer.group, consumer.handler.name, "failed")
        if consumer.mode is not Mode.DELAYED:
            ticket = await self._counted(ticket)
        failure = failure_of(error, consumer.rules)
        now = self._clock.now()
        verdict = judge(consumer, engine.environment, message, ticket, failure, now, engine.rng)
        if isinstance(verdict, Dead):
            self._dead(delivery, message, verdict)
            return None
        if consumer.mode is Mode.INLINE:
            return verdict
        if consumer.mode is Mode.REDELIVER:
            self._wait(delivery, verdict.ticket, verdict.when)
        else:
            self._settler.finish(Done(delivery, "retried", verdict.ticket, again=verdict))
        return None

    async def _counted(self, ticket: Ticket) -> Ticket:
        """The ticket with the durable count of runs; what is only in memory would forget them in a crash."""
        try:
            [runs] = await self._engine.attempts.increment([ticket.letter], self._clock.now())
        except AttemptsUnavailable as error:
            self._engine.office.tell(Notice("degraded", f"attempts are counted in memory only: {error}"))
            return ticket
        return replace(ticket, runs=max(ticket.runs, runs - 1))

    def _dead(self, delivery: Delivery, message: Message, verdict: Dead) -> None:
        letter, office = verdict.letter, self._engine.office
        if letter.kind is Kind.CRITICAL:
            office.tell(Notice("critical", f"{letter.error_type} in {letter.handler}: {letter.error_message}", letter))
        if not self.consumer.block:
            self._settler.finish(Done(delivery, "filed", verdict.ticket, letter=letter))
            return
        policy = self.consumer.policy
        pause = max(policy.backoff.longest(policy.attempts), 1.0)
        text = f"{letter.error_type} blocks {message.source}/{message.partition}: {letter.error_message}"
        office.tell(Notice("blocked", text, letter))
        self._wait(delivery, replace(verdict.ticket, runs=0), self._clock.now() + round(pause * 1000))

    def _record(self, message: Message, ticket: Ticket | None, note: str) -> None:
        letter_id = ticket.letter if ticket else self.consumer.letter_id(message)
        group, handler = self.consumer.group, self.consumer.handler.name
        self._engine.reporter.record(
            stores.Recorded(letter_id, message.source, group, handler, message.id, self._clock.now(), note[:2000])
        )

    # ---- waiting in memory (redeliver, block)

    def _wait(self, delivery: Delivery, ticket: Ticket, when: Millis) -> None:
        """Keep the delivery, hand out nothing more from its lane, and run it again when due."""
        heapq.heappush(self._waiting, (when, next(self._order), delivery, ticket))
        self._waiting_wake.set()
        self._settler.pause(delivery.lane)

    async def _release_due(self) -> None:
        while True:
            due = self._waiting[0][0] if self._waiting else None
            if due is not None and due <= self._clock.now():
                _, _, delivery, ticket = heapq.heappop(self._waiting)
                self._ready.append((delivery, ticket))
                self._wake.set()
                self._settler.resume(delivery.lane)
                continue
            self._waiting_wake.clear()
            pause = 3600.0 if due is None else (due - self._clock.now()) / 1000
            await self._clock.wait(self._waiting_wake, max(pause, 0.001))
