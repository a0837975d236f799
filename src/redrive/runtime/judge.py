"""Acts on how a run ended: counts it, asks the pure decisions, and hands the message to the settler or back."""

from __future__ import annotations

import logging
from collections import Counter

from msgspec import Struct
from msgspec.structs import replace

from redrive.breaker import Breaker
from redrive.brokers.base import Delivery
from redrive.classify import failure_of
from redrive.clock import Millis
from redrive.codec import Ticket
from redrive.consumer import Consumer, Dead, judge
from redrive.errors import AttemptsUnavailable
from redrive.handlers import Answer, Failed, Recorded
from redrive.letter import Failure, Kind
from redrive.message import Message
from redrive.office import Notice
from redrive.retry import Mode
from redrive.runtime.engine import Engine
from redrive.runtime.item import Item
from redrive.runtime.settler import Done, Settler
from redrive.stores import base as stores

log = logging.getLogger("redrive.runtime")

MOST_EXCUSES = 3


class Wait(Struct, frozen=True):
    """Run it again at `when` from this process: in its own slot, or kept aside with its lane paused."""

    ticket: Ticket
    when: Millis
    in_slot: bool


class PutBack(Struct, frozen=True):
    """Run it again once the breaker lets it; the failed run does not count."""


class Judge:
    """One consumer's verdicts."""

    def __init__(self, consumer: Consumer, engine: Engine, settler: Settler, breaker: Breaker) -> None:
        self._consumer, self._engine, self._settler, self._breaker = consumer, engine, settler, breaker
        self._clock = engine.clock
        self._excused: Counter[str] = Counter()

    def went_well(self, item: Item, message: Message, started: Millis, answer: Answer) -> None:
        """No failure, or one to be discarded: the settler may have the message."""
        what = "handled"
        if isinstance(answer, Failed):
            log.warning("%s discarded %s: %s", self._consumer.handler.name, message.id, answer.error)
            what = "discarded"
        elif isinstance(answer, Recorded):
            self._record(message, item.ticket, answer.note)
            what = "recorded"
        self._settler.finish(Done(item.delivery, what, item.ticket))
        if self._breaker.succeeded(started):
            self._excused.clear()
            self._engine.office.tell(Notice("breaker_closed", f"{self._consumer.name} goes on"))

    async def failed(
        self, item: Item, message: Message, started: Millis, error: BaseException
    ) -> Wait | PutBack | None:
        """What follows from this failure; None when the settler has the message."""
        consumer, engine, delivery = self._consumer, self._engine, item.delivery
        failure = failure_of(error, consumer.rules)
        self._settler.metrics(message.source).failed.inc()
        engine.reporter.count(message.source, consumer.group, consumer.handler.name, "failed")
        if self._is_outage(message, failure):
            return PutBack()
        past = item.ticket or consumer.first_ticket(message, started)
        if not past.first_at:
            past = replace(past, first_at=started)
        if consumer.mode is not Mode.DELAYED or consumer.ordered:
            past = await self._counted(message, past)
        verdict = judge(consumer, engine.environment, message, past, failure, self._clock.now(), engine.rng)
        if isinstance(verdict, Dead):
            return self._dead(delivery, message, verdict)
        if consumer.ordered:
            return Wait(verdict.ticket, verdict.when, in_slot=False)
        if consumer.mode is Mode.DELAYED:
            self._settler.finish(Done(delivery, "retried", verdict.ticket, again=verdict))
            return None
        return Wait(verdict.ticket, verdict.when, consumer.mode is Mode.INLINE)

    def _is_outage(self, message: Message, failure: Failure) -> bool:
        """Whether the breaker takes the blame. The failure that opens it still counts.

        So does one of a message that was excused again and again: it may be what keeps the breaker open.
        """
        excused = self._breaker.excuses(failure.kind)
        if self._breaker.failed(message.id, failure.kind, self._clock.now()) and not excused:
            self._tell_open(failure)
        if excused:
            self._excused[message.id] += 1
        return excused and self._excused[message.id] <= MOST_EXCUSES

    def _tell_open(self, failure: Failure) -> None:
        text = f"{self._consumer.name} pauses: {failure.error_type}: {failure.message}"
        self._engine.office.tell(Notice("breaker_open", text))

    async def _counted(self, message: Message, ticket: Ticket) -> Ticket:
        """The ticket with the durable count of runs; what is only in memory would forget them in a crash."""
        try:
            [runs] = await self._engine.attempts.increment([self._consumer.run_key(message, ticket)], self._clock.now())
        except AttemptsUnavailable as error:
            self._engine.office.tell(Notice("degraded", f"attempts are counted in memory only: {error}"))
            return ticket
        return replace(ticket, runs=max(ticket.runs, runs - 1))

    def _dead(self, delivery: Delivery, message: Message, verdict: Dead) -> Wait | None:
        letter, office = verdict.letter, self._engine.office
        if letter.kind is Kind.CRITICAL:
            office.tell(Notice("critical", f"{letter.error_type} in {letter.handler}: {letter.error_message}", letter))
        if not self._consumer.block:
            if self._breaker.died(letter.kind, self._clock.now()):
                office.tell(Notice("breaker_open", f"{self._consumer.name} pauses: too many messages become letters"))
            self._settler.finish(Done(delivery, "filed", verdict.ticket, letter=letter))
            return None
        policy = self._consumer.policy
        pause = max(policy.backoff.longest(policy.attempts), 1.0)
        text = f"{letter.error_type} blocks {message.source}/{message.partition}: {letter.error_message}"
        office.tell(Notice("blocked", text, letter))
        return Wait(replace(verdict.ticket, runs=0), self._clock.now() + round(pause * 1000), in_slot=False)

    def _record(self, message: Message, ticket: Ticket | None, note: str) -> None:
        letter_id = ticket.letter if ticket else self._consumer.letter_id(message)
        group, handler = self._consumer.group, self._consumer.handler.name
        self._engine.reporter.record(
            stores.Recorded(letter_id, message.source, group, handler, message.id, self._clock.now(), note[:2000])
        )
