"""A letter: a message that will not be retried by itself, why it died, and the states it may pass through."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, field
from msgspec.structs import replace

from redrive.clock import Millis
from redrive.message import Message, content_digest, digest

HISTORY_LIMIT = 10


class Kind(StrEnum):
    """What sort of failure it was."""

    TRANSIENT = "transient"
    PERMANENT = "permanent"
    CRITICAL = "critical"
    UNREADABLE = "unreadable"
    CRASH = "crash"
    TIMEOUT = "timeout"


class Reason(StrEnum):
    """Why a message was filed. A fixed vocabulary: it labels metrics."""

    MAX_RETRIES_EXCEEDED = "max_retries_exceeded"
    TIME_BUDGET_EXCEEDED = "time_budget_exceeded"
    PERMANENT = "permanent"
    CRITICAL = "critical"
    UNREADABLE = "unreadable"
    CRASH = "crash"
    REQUESTED = "requested"
    ADOPTED = "adopted"
    HELD = "held"


class State(StrEnum):
    PENDING = "pending"
    HELD = "held"
    REPLAYING = "replaying"
    RESOLVED = "resolved"
    DISCARDED = "discarded"
    QUARANTINED = "quarantined"


MOVES: dict[State, frozenset[State]] = {
    State.PENDING: frozenset({State.REPLAYING, State.RESOLVED, State.DISCARDED, State.QUARANTINED}),
    State.REPLAYING: frozenset({State.RESOLVED, State.PENDING, State.QUARANTINED, State.HELD}),
    State.RESOLVED: frozenset({State.PENDING, State.QUARANTINED}),
    State.DISCARDED: frozenset({State.PENDING, State.QUARANTINED}),
    State.QUARANTINED: frozenset({State.PENDING}),
    State.HELD: frozenset({State.REPLAYING, State.DISCARDED}),
}
"""Every move a letter may make; anything else is refused by name."""


class Failure(Struct, frozen=True):
    """Why one run failed. Text is scrubbed and bounded before it gets here."""

    kind: Kind
    error_type: str
    message: str = ""
    stack: str = ""
    root_type: str = ""
    retry_after: float | None = None
    requested: bool = False


class Attempt(Struct, frozen=True, omit_defaults=True):
    """One run in a letter's history. `delay` is the wait in milliseconds that followed it, if any."""

    number: int
    at: Millis
    error_type: str
    message: str = ""
    stack: str = ""
    kind: Kind = Kind.TRANSIENT
    delay: int | None = None


class Environment(Struct, frozen=True):
    """Who ran the handler."""

    host: str = ""
    process: int = 0
    service: str = ""
    version: str = ""
    name: str = ""


class Claim(Struct, frozen=True):
    """The body is in blob storage under this name."""

    name: str
    size: int
    sha256: str


class Letter(Struct, frozen=True):
    """One death of one message in one consumer group. `hop` is the replay that died, 0 for the original.

    `masked` names attributes, `masked_fields` the places they come from; no view shows either. `place` is where it
    stands among the messages of its key, for sources whose order matters.
    """

    id: str
    message: Message
    group: str
    kind: Kind
    reason: Reason
    error_type: str
    error_message: str
    first_attempt_at: Millis
    last_attempt_at: Millis
    attempts: int
    detail: str = ""
    stack: str = ""
    root_type: str = ""
    handler: str = ""
    message_id: str = ""
    message_type: str = ""
    attributes: dict[str, str] = field(default_factory=dict)
    masked: tuple[str, ...] = ()
    masked_fields: tuple[str, ...] = ()
    history: tuple[Attempt, ...] = ()
    environment: Environment = Environment()
    hop: int = 0
    max_replays: int = 3
    verified: bool = True
    marks: tuple[str, ...] = ()
    place: int | None = None
    claim: Claim | None = None


class StoredLetter(Struct, frozen=True):
    """A letter as the store keeps it: the latest death, and the letter's life so far."""

    letter: Letter
    state: State
    version: int
    hop: int
    occurrences: int
    filed_at: Millis
    updated_at: Millis
    confirmed_hop: int = -1
    job: str = ""

    @property
    def id(self) -> str:
        return self.letter.id


class Outcome(Struct, frozen=True):
    """What became of one replayed copy."""

    letter: str
    hop: int
    ok: bool
    at: Millis
    note: str = ""


class Act(Struct, frozen=True):
    """Who did it, and why. Its audit row commits with the deed."""

    who: str
    why: str = ""


def identity(message: Message, group: str, declared: str | None = None) -> str:
    """One letter per message and consumer group.

    Content is part of it, so a recreated topic cannot swallow a new letter; `declared` is the value of the
    attribute a source names as its identity instead.
    """
    if declared is not None:
        parts = ["declared", message.broker, message.source, declared, group]
        return digest(p.encode("utf-8", "surrogatepass") for p in parts).hex()[:32]
    parts = [
        message.broker,
        message.source,
        str(message.partition),
        message.position,
        str(message.timestamp),
        group,
    ]
    content = content_digest(message.key, message.body, message.headers)
    return digest([*(p.encode("utf-8", "surrogatepass") for p in parts), content]).hex()[:32]


def remember(history: tuple[Attempt, ...], attempt: Attempt) -> tuple[Attempt, ...]:
    """The first run and the latest ones; what lies between is dropped, never the count."""
    grown = (*history, attempt)
    return grown if len(grown) <= HISTORY_LIMIT else (grown[0], *grown[-(HISTORY_LIMIT - 1) :])


def with_delay(history: tuple[Attempt, ...], delay: int) -> tuple[Attempt, ...]:
    return (*history[:-1], replace(history[-1], delay=delay))


def idempotency_key(letter_id: str, hop: int) -> str:
    """The same for every copy of one replay request, different for the next request."""
    return f"{letter_id}-{hop}"


def after_death(letter: Letter, stored: StoredLetter) -> State:
    """The state a known letter has after this death of one of its hops.

    A death of an older hop, or of one already confirmed as handled, only adds an occurrence.
    """
    if letter.hop < stored.hop or letter.hop <= stored.confirmed_hop:
        return stored.state
    if letter.reason is Reason.HELD:
        return State.HELD
    return State.QUARANTINED if letter.hop >= letter.max_replays else State.PENDING


def after_outcome(outcome: Outcome, stored: StoredLetter) -> State:
    """Success of the current hop resolves, even a letter that a time-out already put back to pending."""
    current = outcome.ok and outcome.hop == stored.hop and outcome.hop > 0
    return State.RESOLVED if current and stored.state in (State.REPLAYING, State.PENDING) else stored.state
