"""The settler: files, then settles, in batches. Only what is handled, confirmed or durable is settled as done."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from operator import attrgetter
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from redrive import codec, faults
from redrive.brokers.base import (
    Ack,
    Bury,
    Delivery,
    Lane,
    LeaseLost,
    Refused,
    RetryAt,
    Settled,
    Settlement,
    SettleResult,
)
from redrive.clock import Millis
from redrive.codec import Ticket
from redrive.consumer import Again, Consumer
from redrive.errors import AttemptsUnavailable, BrokerUnavailable, FilingFailed
from redrive.letter import Letter, Outcome
from redrive.metrics import ConsumerMetrics
from redrive.office import Notice
from redrive.retry import Mode
from redrive.runtime.engine import Engine, backoff, cancel_all, sleep_until

log = logging.getLogger("redrive.runtime")

_SUCCESSES = ("handled", "recorded", "discarded")
_SOURCE_AND_WHAT = attrgetter("delivery.message.source", "what")


class Done(Struct, gc=False):
    """One delivery that is ready to be settled: `what` names the counter; a letter or a retry says how."""

    delivery: Delivery
    what: str
    ticket: Ticket | None = None
    again: Again | None = None
    letter: Letter | None = None
    tries: int = 0
    stuck: bool = False


class Settler:
    """One consumer's settlements, and the lanes it has stopped."""

    def __init__(self, consumer: Consumer, engine: Engine, on_end: Callable[[Done], None] | None = None) -> None:
        """`on_end` hears of every delivery that is settled, or somebody else's by now."""
        self._consumer, self._engine, self._on_end = consumer, engine, on_end
        self._done: list[Done] = []
        self._wake = asyncio.Event()
        self._settling = False
        self._paused: Counter[Lane] = Counter()
        self._tasks: dict[asyncio.Task[None], Millis] = {}
        self._metrics: dict[str, ConsumerMetrics] = {}

    def finish(self, done: Done) -> None:
        if not self._done:
            self._wake.set()
        self._done.append(done)

    @property
    def idle(self) -> bool:
        return not self._done and not self._settling

    def due(self, now: Millis) -> Millis | None:
        """When there is something to settle, or to try again."""
        return min((max(when, now) for when in self._tasks.values()), default=None) if self.idle else now

    async def run(self) -> None:
        """Settle whatever is finished, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._flush()

    async def stop(self) -> None:
        """Leave off trying again; what is unsettled stays with the broker."""
        await cancel_all(self._tasks)

    def metrics(self, source: str) -> ConsumerMetrics:
        found = self._metrics.get(source)
        if found is None:
            found = self._engine.metrics.consumer(source, self._consumer.group, self._consumer.handler.name)
            self._metrics[source] = found
        return found

    def pause(self, lane: Lane) -> None:
        """Hand out nothing more from this lane, until it is resumed as often as it was paused."""
        self._paused[lane] += 1
        if self._paused[lane] == 1:
            self.spawn(self._switch(self._engine.broker.pause, lane))

    def resume(self, lane: Lane) -> None:
        self._paused[lane] -= 1
        if self._paused[lane] == 0:
            del self._paused[lane]
            self.spawn(self._switch(self._engine.broker.resume, lane))

    async def _switch(self, verb: Callable[[str, Sequence[Lane]], Awaitable[None]], lane: Lane) -> None:
        try:
            await verb(self._consumer.group, [lane])
        except BrokerUnavailable as error:
            log.warning("%s: cannot %s %s: %s", self._consumer.name, verb.__name__, lane, error)

    async def _flush(self) -> None:
        self._settling = True
        try:
            while self._done:
                batch, self._done = self._done, []
                await self._settle(batch)
        finally:
            self._settling = False

    async def _settle(self, batch: list[Done]) -> None:
        await self._report_outcomes(batch)
        batch = await self._file_directly(batch)
        if not batch:
            return
        faults.point("runtime.before_settle")
        try:
            results = await self._engine.broker.settle(
                [
                    Ack(done.delivery) if done.again is None and done.letter is None else self._settlement(done)
                    for done in batch
                ]
            )
        except BrokerUnavailable as error:
            log.warning("%s: cannot settle %d message(s) yet: %s", self._consumer.name, len(batch), error)
            self._try_later(batch)
            return
        faults.point("runtime.after_settle")
        await self._after_settling(batch, results)

    async def _report_outcomes(self, batch: list[Done]) -> None:
        """Tell the office what became of replayed copies, before they are settled and forgotten."""
        now = self._engine.clock.now()
        outcomes = [
            Outcome(done.ticket.letter, done.ticket.hop, True, now, "" if done.what == "handled" else done.what)
            for done in batch
            if done.ticket is not None and done.ticket.hop and done.what in _SUCCESSES and not done.tries
        ]
        if outcomes:
            await self._engine.reporter.send_outcomes(outcomes)
            faults.point("runtime.after_outcome")

    async def _file_directly(self, batch: list[Done]) -> list[Done]:
        """On the direct route: the batch without those whose letters no place would take."""
        letters = [done.letter for done in batch if done.letter is not None] if self._consumer.direct else []
        if not letters:
            return batch
        try:
            await self._engine.office.file(letters, may_spool=not self._consumer.ordered)
        except FilingFailed as error:
            self._stuck([done for done in batch if done.letter is not None], str(error))
            return [done for done in batch if done.letter is None]
        return batch

    def _settlement(self, done: Done) -> Settlement:
        message = done.delivery.message
        if done.again is not None:
            copy = codec.retry_copy(message, done.again.ticket, message.source, self._engine.keyring)
            return RetryAt(done.delivery, copy, done.again.when)
        if done.letter is not None and not self._consumer.direct:
            destination = self._consumer.dead_letter_source(done.letter.message.source)
            return Bury(done.delivery, self._engine.office.copy(done.letter, destination))
        return Ack(done.delivery)

    async def _after_settling(self, batch: list[Done], results: Sequence[SettleResult]) -> None:
        settled: list[Done] = []
        for done, result in zip(batch, results, strict=True):
            if isinstance(result, Settled):
                settled.append(done)
            elif isinstance(result, LeaseLost):
                self.metrics(done.delivery.message.source).lease_lost.inc()
            else:
                await self._refused(done, result)
                continue
            if done.stuck:
                self._unstick(done)
            if self._on_end is not None:
                self._on_end(done)
        self._count(settled)
        await self._forget_counts(settled)

    async def _refused(self, done: Done, result: Refused) -> None:
        """Too large: one rung down the ladder and try again at once. Anything else, or no rung left: stuck."""
        if result.too_large and await self._shrink(done):
            self.finish(done)
        else:
            self._stuck([done], result.why)

    async def _shrink(self, done: Done) -> bool:
        """A retry copy leaves behind what its past runs said; a letter steps down the office's ladder."""
        if done.again is not None and done.again.ticket.history:
            done.again = replace(done.again, ticket=replace(done.again.ticket, history=()))
            return True
        if done.letter is None:
            return False
        retains = self._engine.broker.can.retains_settled
        smaller = await self._engine.office.smaller(done.letter, source_retains=retains)
        done.letter = smaller or done.letter
        return smaller is not None

    def _stuck(self, items: list[Done], why: str) -> None:
        """No place takes them: leave the messages unsettled, stop their lanes, say so, and try again later."""
        for done in items:
            if not done.stuck:
                done.stuck = True
                self.metrics(done.delivery.message.source).stuck.inc()
                self.pause(done.delivery.lane)
        if not items[0].tries:
            source = items[0].delivery.message.source
            self._engine.office.tell(Notice("stuck", f"{len(items)} message(s) of {source} cannot be filed: {why}"))
        self._try_later(items)

    def _unstick(self, done: Done) -> None:
        done.stuck = False
        self.metrics(done.delivery.message.source).stuck.dec()
        self.resume(done.delivery.lane)

    def _try_later(self, items: list[Done]) -> None:
        when = self._engine.clock.now() + round(backoff(items[0].tries) * 1000)

        async def later() -> None:
            await sleep_until(when, self._engine.clock)
            for done in items:
                done.tries += 1
                self.finish(done)

        self.spawn(later(), when)

    def _count(self, settled: list[Done]) -> None:
        consumer, reporter = self._consumer, self._engine.reporter
        totals = Counter(map(_SOURCE_AND_WHAT, settled))
        for (source, what), number in totals.items():
            getattr(self.metrics(source), what).inc(number)
            if what not in ("skipped", "held"):
                reporter.count(source, consumer.group, consumer.handler.name, what, number)
        for done in settled:
            if done.letter is not None:
                found = {name: done.letter.attributes.get(name, "") for name in consumer.labels}
                self.metrics(done.delivery.message.source).letter(done.letter.reason, done.letter.kind, found)

    async def _forget_counts(self, settled: list[Done]) -> None:
        """Clear run counts after the settling that ends a message, never before it."""
        if self._consumer.mode is Mode.DELAYED and not self._consumer.ordered:
            return
        keys = [
            self._consumer.run_key(done.delivery.message, done.ticket)
            for done in settled
            if done.ticket is not None and done.again is None
        ]
        if not keys:
            return
        try:
            await self._engine.attempts.clear(keys)
        except AttemptsUnavailable as error:
            log.warning("run counts stay until they expire: %s", error)

    def spawn(self, work: Coroutine[Any, Any, None], when: Millis = 0) -> None:
        """Run this beside the rest; `when` says that it sleeps until then."""
        task = asyncio.create_task(work)
        self._tasks[task] = when
        task.add_done_callback(lambda ended: self._tasks.pop(ended, None))
