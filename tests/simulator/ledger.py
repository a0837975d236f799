"""What really happened, written down outside the engine: a checker fed by the store cannot see what it forgot."""

from __future__ import annotations

from collections import Counter

from msgspec import Struct, field

from redrive import codec
from redrive.keyring import Keyring
from redrive.letter import State
from redrive.message import Copy, Headers, Message, last_header
from simulator.world import Process

ID = "id"


def id_of(headers: Headers) -> str:
    """The simulator's own name of a message, in a header of its own."""
    return (last_header(headers, ID) or b"?").decode()


class Produced(Struct):
    """A message as its producer made it. `at` is where it stands in the log, once it does."""

    id: str
    key: bytes | None
    body: bytes | None
    headers: Headers
    confirmed: bool = False


class Move(Struct, frozen=True):
    letter: str
    before: State | None
    after: State
    why: str
    hop: int
    proved: bool
    """Whether the letter's current hop had succeeded by then."""


class Publish(Struct, frozen=True):
    """One copy that a replayer really put into the broker."""

    letter: str
    hop: int
    key: str
    job: str


class Ledger(Struct):
    """`runs` and `effects` are the handler's own. Why one message may run more often than it has attempts:

    `births` are new beginnings (a replay, a second copy, a log that was rewound), `abandoned` deliveries were taken
    from the dead, and `zombies` from the living, who may not know it yet.
    """

    keyring: Keyring
    produced: dict[str, Produced] = field(default_factory=dict)
    runs: Counter[str] = field(default_factory=Counter)
    effects: Counter[str] = field(default_factory=Counter)
    succeeded_hops: set[tuple[str, int]] = field(default_factory=set)
    ended: dict[str, str] = field(default_factory=dict)
    corrupt: list[str] = field(default_factory=list)
    abandoned: Counter[str] = field(default_factory=Counter)
    births: Counter[str] = field(default_factory=Counter)
    zombies: Counter[str] = field(default_factory=Counter)
    moves: list[Move] = field(default_factory=list)
    publishes: list[Publish] = field(default_factory=list)
    takeovers: Counter[str] = field(default_factory=Counter)
    job_of: dict[tuple[str, int], str] = field(default_factory=dict)
    hops: dict[int, tuple[Message, int]] = field(default_factory=dict)

    def opened(self, message: Message, hop: int) -> None:
        """The engine took this message out of a delivery; a handler will see the same object, but not its hop."""
        self.hops[id(message)] = (message, hop)

    def ran(self, process: Process, message: Message) -> None:
        """A handler was called. What it sees must be what was produced."""
        made = self.produced.get(id_of(message.headers))
        self.runs[id_of(message.headers)] += 1
        if made is None or (message.key, message.body, message.headers) != (made.key, made.body, made.headers):
            self.corrupt.append(f"{id_of(message.headers)} reached the handler of {process.name} changed")

    def took_effect(self, process: Process, message: Message) -> None:
        """A handler succeeded."""
        name = id_of(message.headers)
        self.effects[name] += 1
        self.succeeded_hops.add((name, self.hops[id(message)][1]))

    def was_ended(self, message: Message, how: str) -> None:
        """A handler said that this is the end of it, without an effect."""
        self.ended[id_of(message.headers)] = how
        self.succeeded_hops.add((id_of(message.headers), self.hops[id(message)][1]))

    def published(self, process: Process, copy: Copy) -> None:
        """What a replayer publishes carries a ticket; each such copy is one more birth of its message."""
        message = Message("", copy.destination, 0, "", 0, copy.key, copy.body, copy.headers)
        ticket = codec.read_ticket(message, self.keyring)
        if ticket is not None:
            job = self.job_of.get((ticket.letter, ticket.hop), "")
            self.publishes.append(Publish(ticket.letter, ticket.hop, ticket.key, job))
            self.births[id_of(copy.headers)] += 1

    def moved(self, letter: str, message: Message, before: State | None, after: State, why: str, hop: int) -> None:
        if before is not after:
            proved = (id_of(message.headers), hop) in self.succeeded_hops
            self.moves.append(Move(letter, before, after, why, hop, proved))
