"""The demo's auditor: holds what was produced against the ledger and the letters. Pure: data in, verdict out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence

from msgspec import Struct, field

from redrive.demo.deck import ORDER_ID, Produced
from redrive.demo.ledger import BEGAN, HANDLED, Entry
from redrive.letter import Kind, State, StoredLetter

STORY_KINDS = (Kind.TRANSIENT, Kind.PERMANENT, Kind.UNREADABLE, Kind.TIMEOUT)
OPEN = (State.PENDING, State.HELD, State.REPLAYING, State.QUARANTINED)
_NAMED = 20


class Verdict(Struct, frozen=True):
    """The counts, and everything that is wrong: a sentence each, with the ids it is about."""

    produced: int
    handled: int
    retried: int
    dead: dict[Kind, int]
    replayed: int
    resolved: int
    pending: int
    lost: tuple[str, ...]
    duplicated: int
    explained: int
    under_way: int = 0
    problems: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problems


def audit(
    produced: Sequence[Produced],
    entries: Sequence[Entry],
    letters: Sequence[StoredLetter],
    replayed: Collection[str] = (),
    killed: Collection[int] = (),
    under_way: int = 0,
) -> Verdict:
    """Account for every message.

    `replayed` are the ids of letters sent back, `killed` the processes we killed; `under_way` says how many
    messages the broker still has, nobody knows which.
    """
    sent = {one.id: one for one in produced}
    handled = Counter(entry.order for entry in entries if entry.outcome == HANDLED)
    known = [stored for stored in letters if order_of(stored) in sent]
    waiting = {order_of(stored) for stored in known if stored.state in OPEN}
    lost = sorted(sent.keys() - handled.keys() - waiting)
    extra = needless(entries)
    problems = {
        "neither handled nor an open letter": lost,
        "handled, but never produced": sorted(handled.keys() - sent.keys()),
        "letters of messages that were never produced": [s.id for s in letters if order_of(s) not in sent],
        "messages with more than one letter": _repeated(order_of(stored) for stored in known),
        "letters whose bytes are not what was produced": [s.id for s in known if not _same(s, sent[order_of(s)])],
        "letters sent back and not resolved": _unresolved(letters, replayed),
        "letters that nobody sent back, and not pending": _moved(letters, replayed),
    }
    return Verdict(
        produced=len(sent),
        handled=len(handled.keys() & sent.keys()),
        retried=_retried(entries, letters),
        dead={kind: sum(stored.letter.kind is kind for stored in letters) for kind in Kind},
        replayed=len(set(replayed)),
        resolved=sum(stored.state is State.RESOLVED for stored in letters),
        pending=sum(stored.state is State.PENDING for stored in letters),
        lost=tuple(lost),
        duplicated=len(extra),
        explained=sum(entry.pid in killed for entry in extra),
        under_way=under_way,
        problems={name: tuple(ids) for name, ids in problems.items() if ids},
    )


def order_of(stored: StoredLetter) -> str:
    """The id the producer gave this message; a header has it, because some bodies cannot be read."""
    value = stored.letter.message.header(ORDER_ID)
    return "" if value is None else value.decode("utf-8", "replace")


def needless(entries: Sequence[Entry]) -> list[Entry]:
    """Runs beyond what was needed: cut short and done again, or handled when a later run was handled too."""
    last = {(entry.order, entry.run, entry.pid): entry for entry in entries}
    handled: set[str] = set()
    found = []
    for entry in reversed(last.values()):
        if entry.outcome == BEGAN or (entry.outcome == HANDLED and entry.order in handled):
            found.append(entry)
        elif entry.outcome == HANDLED:
            handled.add(entry.order)
    return found


def _same(stored: StoredLetter, produced: Produced) -> bool:
    message = stored.letter.message
    given = (message.source, message.key, message.body, message.headers)
    return given == (produced.source, produced.key, produced.body, produced.headers)


def _repeated(orders: Iterable[str]) -> list[str]:
    return sorted(order for order, count in Counter(orders).items() if count > 1)


def _unresolved(letters: Sequence[StoredLetter], replayed: Collection[str]) -> list[str]:
    resolved = {stored.id for stored in letters if stored.state is State.RESOLVED}
    return sorted(set(replayed) - resolved)


def _moved(letters: Sequence[StoredLetter], replayed: Collection[str]) -> list[str]:
    return [s.id for s in letters if s.id not in replayed and s.state is not State.PENDING]


def _retried(entries: Sequence[Entry], letters: Sequence[StoredLetter]) -> int:
    """Failed runs that another run followed by itself: all but those that ended in a letter."""
    failed: dict[str, int] = defaultdict(int)
    for entry in entries:
        failed[entry.order] += entry.outcome not in (BEGAN, HANDLED)
    for stored in letters:
        if stored.letter.kind is not Kind.UNREADABLE:
            failed[order_of(stored)] -= stored.occurrences
    return sum(max(count, 0) for count in failed.values())


def table(verdict: Verdict) -> str:
    """The verdict as a person reads it."""
    kinds = [(f"  {kind.value}", count, "") for kind, count in verdict.dead.items() if count or kind in STORY_KINDS]
    rows = [
        ("produced", verdict.produced, ""),
        ("handled", verdict.handled, "at least once, says the ledger"),
        ("retried", verdict.retried, "runs that followed a failed run"),
        ("dead-lettered", sum(verdict.dead.values()), ""),
        *kinds,
        ("replayed", verdict.replayed, ""),
        ("resolved", verdict.resolved, ""),
        ("still pending", verdict.pending, "open letters, for a person to decide"),
        ("lost", len(verdict.lost), f"or among {verdict.under_way} with the broker" if verdict.under_way else ""),
        ("duplicated", verdict.duplicated, _explanation(verdict)),
    ]
    return "\n".join(f"  {name:<16}{count:>6}   {note}".rstrip() for name, count, note in rows)


def complaints(verdict: Verdict) -> list[str]:
    """What is wrong, one line each."""
    return [f"{len(ids)} {name}: {_list(ids)}" for name, ids in verdict.problems.items()]


def _explanation(verdict: Verdict) -> str:
    """Runs that the kill cut short, or whose success it kept from the broker, had to be done again."""
    if not verdict.duplicated:
        return ""
    share = "all" if verdict.explained == verdict.duplicated else str(verdict.explained)
    return f"runs done again, {share} because of the kill"


def _list(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    return ", ".join(ids[:_NAMED]) + more
