"""What really happened, written down outside the engine: a checker fed by the store cannot see what it forgot."""

from __future__ import annotations

from collections import Counter, defaultdict

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


class Publish(Struct, frozen=True):
    """One copy that a replayer really put into the broker."""

    letter: str
    hop: int
    key: str
    job: str


class Ledger(Struct):
    """`runs` and `effects` are the handler's own; `abandoned` and `births` are why one message may run more often."""

    keyring: Keyring
    produced: dict[str, Produced] = field(default_factory=dict)
    runs: Counter[str] = field(default_factory=Counter)
    effects: Counter[str] = field(default_factory=Counter)
    succeeded_hops: set[tuple[str, int]] = field(default_factory=set)
    ended: dict[str, str] = field(default_factory=dict)
    corrupt: list[str] = field(default_factory=list)
    abandoned: Counter[str] = field(default_factory=Counter)
    births: Counter[str] = field(default_factory=Counter)
    moves: list[Move] = field(default_factory=list)
    publishes: list[Publish] = field(default_factory=list)
    takeovers: Counter[str] = field(default_factory=Counter)
    job_of: dict[tuple[str, int], str] = field(default_factory=dict)
    held: dict[tuple[str, str], list[int]] = field(default_factory=lambda: defaultdict(list))

    def handed_out(self, process: Process, message: Message) -> None:
        self.held[process.name, id_of(message.headers)].append(self._hop(message))

    def put_down(self, process: Process, message: Message) -> None:
        hops = self.held[process.name, id_of(message.headers)]
        if self._hop(message) in hops:
            hops.remove(self._hop(message))

    def ran(self, process: Process, message: Message) -> None:
        """A handler was called. What it sees must be what was produced."""
        made = self.produced.get(id_of(message.headers))
        self.runs[id_of(message.headers)] += 1
        if made is None or (message.key, message.body, message.headers) != (made.key, made.body, made.headers):
            self.corrupt.append(f"{id_of(message.headers)} reached the handler of {process.name} changed")

    def took_effect(self, process: Process, message: Message) -> None:
        """A handler succeeded. A handler does not see the hop, so it counts for every copy its process holds."""
        name = id_of(message.headers)
        self.effects[name] += 1
        self.succeeded_hops.update((name, hop) for hop in self.held[process.name, name])

    def published(self, process: Process, copy: Copy) -> None:
        """What a replayer publishes carries a ticket; each such copy is one more birth of its message."""
        message = Message("", copy.destination, 0, "", 0, copy.key, copy.body, copy.headers)
        ticket = codec.read_ticket(message, self.keyring)
        if ticket is not None:
            job = self.job_of.get((ticket.letter, ticket.hop), "")
            self.publishes.append(Publish(ticket.letter, ticket.hop, ticket.key, job))
            self.births[id_of(copy.headers)] += 1

    def moved(self, letter: str, before: State | None, after: State, why: str, hop: int) -> None:
        if before is not after:
            self.moves.append(Move(letter, before, after, why, hop))

    def _hop(self, message: Message) -> int:
        ticket = codec.read_ticket(message, self.keyring)
        return ticket.hop if ticket is not None else 0
