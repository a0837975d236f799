"""For people with their own consumer loop: the same decisions, the same letters, without the runtime."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

from msgspec.structs import replace

from redrive import retry
from redrive.attempts.base import Attempts
from redrive.brokers.base import Broker, Confirmed
from redrive.classify import failure_of
from redrive.clock import Clock
from redrive.codec import Ticket
from redrive.consumer import Again, Consumer, Dead, judge, letter_of
from redrive.errors import BrokerUnavailable, Discard, Retry
from redrive.handlers import Failed, Handler, handler_for
from redrive.letter import Environment, Letter, Reason
from redrive.message import Message
from redrive.office import Office


class Guarded:
    """What became of a guarded message: handled, or filed under this letter id."""

    handled: bool = False
    filed: str | None = None


class Guard:
    """Judges failures and files letters for one app whose parts are open."""

    def __init__(
        self,
        broker: Broker,
        office: Office,
        attempts: Attempts,
        clock: Clock,
        environment: Environment,
        rng: Random,
        *,
        direct: bool,
    ) -> None:
        self._broker, self._office, self._attempts, self._clock = broker, office, attempts, clock
        self._environment, self._rng, self._direct = environment, rng, direct

    def should_retry(self, consumer: Consumer, error: BaseException, attempt: int) -> bool:
        now = self._clock.now()
        decision = retry.decide(consumer.policy, failure_of(error, consumer.rules), attempt, now, now)
        return isinstance(decision, retry.RetryAt)

    async def dead_letter(self, consumer: Consumer, message: Message, error: BaseException, attempt: int) -> str:
        now = self._clock.now()
        ticket = replace(consumer.first_ticket(message, now), runs=attempt)
        failure = failure_of(error, consumer.rules)
        letter = letter_of(consumer, self._environment, message, ticket, failure, Reason.REQUESTED, now)
        await self._file(consumer, letter)
        return letter.id

    async def execute(self, consumer: Consumer, message: Message) -> bool:
        """Run the handler until it succeeds (True) or its message is filed (False), waiting in place between runs."""
        ticket = consumer.first_ticket(message, self._clock.now())
        while True:
            error = await _run(consumer.handler, message)
            if error is None or isinstance(error, Discard):
                return True
            verdict = self._judge(consumer, message, ticket, error)
            if isinstance(verdict, Dead):
                await self._file(consumer, verdict.letter)
                return False
            ticket = verdict.ticket
            await self._clock.sleep(max(verdict.when - self._clock.now(), 0) / 1000)

    @asynccontextmanager
    async def around(self, consumer: Consumer, message: Message, attempt: int | None) -> AsyncIterator[Guarded]:
        guarded = Guarded()
        ticket = consumer.first_ticket(message, self._clock.now())
        try:
            yield guarded
            guarded.handled = True
        except Discard:
            guarded.handled = True
        except Exception as error:
            runs = (
                attempt or (await self._attempts.increment([consumer.run_key(message, ticket)], self._clock.now()))[0]
            )
            verdict = self._judge(consumer, message, replace(ticket, runs=runs - 1), error)
            if isinstance(verdict, Again):
                raise Retry(str(error), after=(verdict.when - self._clock.now()) / 1000) from error
            await self._file(consumer, verdict.letter)
            guarded.filed = verdict.letter.id
        if attempt is None:
            await self._attempts.clear([consumer.run_key(message, ticket)])

    def _judge(self, consumer: Consumer, message: Message, ticket: Ticket, error: BaseException) -> Again | Dead:
        failure = failure_of(error, consumer.rules)
        return judge(consumer, self._environment, message, ticket, failure, self._clock.now(), self._rng)

    async def _file(self, consumer: Consumer, letter: Letter) -> None:
        """Directly where there is a store, else through the broker. Returns once it is durable."""
        if self._direct:
            await self._office.file([letter])
            return
        copy = self._office.copy(letter, consumer.dead_letter_source(letter.message.source))
        [result] = await self._broker.publish([copy])
        if not isinstance(result, Confirmed):
            raise BrokerUnavailable(self._broker.name, copy.destination, result)


def _body_of_a_guard(message: Message) -> None:
    """Stands for the code inside a guard."""


STAND_IN = handler_for(_body_of_a_guard, name="guard")


async def _run(handler: Handler, message: Message) -> BaseException | None:
    """The error of one run, None when it was handled."""
    try:
        arguments = handler.arguments(message)
        if handler.is_async:
            answer = handler.answer(await handler.call(*arguments))
        else:
            answer = handler.answer(await asyncio.to_thread(handler.call, *arguments))
    except Exception as error:  # noqa: BLE001 - whatever a handler raises is its answer
        return error
    return answer.error if isinstance(answer, Failed) else None
