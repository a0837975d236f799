"""A consumer's settings, and the pure decisions about its messages: who a message is, and what a failure means."""

from __future__ import annotations

import re
from random import Random

from msgspec import Struct, field
from msgspec.structs import replace

from redrive import attributes, retry
from redrive.attributes import Attribute
from redrive.breaker import BreakerPolicy
from redrive.classify import Rule
from redrive.clock import Millis
from redrive.codec import Ticket
from redrive.errors import ConfigError
from redrive.handlers import Handler
from redrive.letter import Attempt, Environment, Failure, Letter, Reason, identity, remember, with_delay
from redrive.message import Message
from redrive.redact import MASK, clip
from redrive.retry import Mode, Policy

DEFAULT_DEAD_LETTER = "{source}.dlq"
HISTORY_STACK_LIMIT = 1_500
SHORTEST_SECRET = 4


class Consumer(Struct, frozen=True, kw_only=True):
    """What to consume, how to run it, and what to do when it fails."""

    name: str
    sources: tuple[str, ...]
    group: str
    handler: Handler
    policy: Policy = Policy()
    rules: tuple[Rule, ...] = ()
    mode: Mode = Mode.DELAYED
    timeout: float | None = 300.0
    concurrency: int = 16
    batch: int = 100
    block: bool = False
    direct: bool = False
    dead_letter: str = DEFAULT_DEAD_LETTER
    names: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, Attribute] = field(default_factory=dict)
    message_type: Attribute | None = None
    identity: str | None = None
    masked: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    attempts_key: str | None = None
    max_replays: int = 3
    ordered: bool = False
    breaker: BreakerPolicy = BreakerPolicy()

    def dead_letter_source(self, source: str) -> str:
        """Where this consumer's dead letters from `source` go."""
        try:
            return self.dead_letter.format_map({**self.names, "source": source, "group": self.group})
        except (KeyError, ValueError, IndexError) as error:
            raise ConfigError(
                f"cannot fill {self.dead_letter!r}: {error}",
                key=f"{self.name}.dead_letter",
                fix="use {source}, {group} and the entries of `names` only",
            ) from error

    @property
    def dead_letter_glob(self) -> str:
        """Every dead letter source of this consumer, so that a pattern of sources does not swallow them."""
        return as_glob(self.dead_letter)

    def letter_id(self, message: Message) -> str:
        """The identity of this message's letter, computed once, at its first failure."""
        declared = None
        if self.identity is not None:
            declared = attributes.extract(message, {"id": self.attributes[self.identity]}).get("id")
        return identity(message, self.group, declared)

    def run_key(self, message: Message, ticket: Ticket) -> str:
        """Names the count of this message's runs: `attempts_key` filled with attributes, where the message has them."""
        if self.attempts_key is None:
            return ticket.run_key
        try:
            return self.attempts_key.format_map(attributes.extract(message, self.attributes))
        except KeyError:
            return ticket.run_key

    def first_ticket(self, message: Message, started_at: Millis) -> Ticket:
        return Ticket(self.letter_id(message), self.group, message.coordinates, first_at=started_at)


def as_glob(pattern: str) -> str:
    """A pattern of dead letter sources with every placeholder open."""
    return re.sub(r"\{[^}]*\}", "*", pattern)


class Again(Struct, frozen=True):
    """Run it again at `when`, with this ticket."""

    ticket: Ticket
    when: Millis


class Dead(Struct, frozen=True):
    """File this letter."""

    letter: Letter
    ticket: Ticket


def judge(
    consumer: Consumer,
    environment: Environment,
    message: Message,
    ticket: Ticket,
    failure: Failure,
    now: Millis,
    rng: Random | None = None,
) -> Again | Dead:
    """What follows from one more failed run of this message. `ticket.runs` counts the runs before it."""
    run = ticket.runs + 1
    stack = clip(failure.stack, HISTORY_STACK_LIMIT)
    attempt = Attempt(run, now, failure.error_type, clip(failure.message, 500), stack, failure.kind)
    history = remember(ticket.history, attempt)
    match retry.decide(consumer.policy, failure, run, now, ticket.first_at, rng):
        case retry.RetryAt(when, delay):
            return Again(replace(ticket, runs=run, history=with_delay(history, delay)), when)
        case retry.GiveUp(reason):
            past = replace(ticket, runs=run, history=history)
            return Dead(letter_of(consumer, environment, message, past, failure, reason, now), past)


def letter_of(
    consumer: Consumer,
    environment: Environment,
    message: Message,
    ticket: Ticket,
    failure: Failure,
    reason: Reason,
    now: Millis,
) -> Letter:
    wanted = consumer.attributes
    if consumer.message_type is not None:
        wanted = {**wanted, "": consumer.message_type}
    found = attributes.extract(message, wanted)
    hide = [found[name] for name in consumer.masked if len(found.get(name, "")) >= SHORTEST_SECRET]
    return Letter(
        id=ticket.letter,
        message=replace(message, idempotency_key="") if message.idempotency_key else message,
        group=consumer.group,
        kind=failure.kind,
        reason=reason,
        error_type=failure.error_type,
        error_message=_hidden(failure.message, hide),
        first_attempt_at=ticket.first_at,
        last_attempt_at=now,
        attempts=ticket.runs,
        detail=_hidden(failure.message, hide) if failure.requested else "",
        stack=_hidden(failure.stack, hide),
        root_type=failure.root_type,
        handler=consumer.handler.name,
        message_id=message.id,
        message_type=found.pop("", ""),
        attributes=found,
        masked=consumer.masked,
        masked_fields=tuple(str(consumer.attributes[name]) for name in consumer.masked),
        history=tuple(
            replace(a, message=_hidden(a.message, hide), stack=_hidden(a.stack, hide)) for a in ticket.history
        ),
        environment=environment,
        hop=ticket.hop,
        max_replays=consumer.max_replays,
        place=int(message.position) if consumer.ordered and message.key is not None else None,
    )


def _hidden(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, MASK)
    return text
