"""Judges a history from the ledger: what may never happen, and how much of what may happen is too much."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import Struct

from redrive.letter import MOVES, Kind, State
from redrive.retry import Mode
from redrive.runtime.spans import CRASHES_ALONE
from simulator.ledger import id_of

if TYPE_CHECKING:
    from simulator.history import History
    from simulator.store import Row


Found = Iterator[tuple[str, str]]


class Anomaly(Struct, frozen=True):
    kind: str
    text: str


def check(history: History) -> list[Anomaly]:
    return [Anomaly(kind, text) for one in CHECKS for kind, text in one(history)]


def _defects(history: History) -> Found:
    """The engine stumbled over itself."""
    for text in history.world.defects:
        yield "defect", text


def _in_log(history: History) -> set[str]:
    """Whatever the producer was told, these are the messages that exist."""
    return {id_of(record.headers) for topic, record in history.server.holds() if topic == "orders"}


def _by_message(history: History) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in history.office.letters.values():
        rows[id_of(row.first.message.headers)].append(row)
    return rows


def _lost(history: History) -> Found:
    """Neither handled, nor ended by its handler, nor a letter."""
    ledger, letters = history.ledger, _by_message(history)
    for name in sorted(_in_log(history)):
        if not ledger.effects[name] and name not in ledger.ended and name not in letters:
            yield "lost", f"{name} ({history.plans[name].what}, {ledger.runs[name]} runs)"


def _stuck(history: History) -> Found:
    for what, number in history.server.unsettled().items():
        yield "stuck", f"{number} unsettled in {what}"
    for what in history.office.unfinished():
        yield "stuck", f"{what} never came to an end"
    for name, disk in history.disks.items():
        if disk:
            yield "stuck", f"{len(disk)} letters in the spool of {name}"


def _letters(history: History) -> Found:
    """Every letter is of a message that was produced and could die, and has its bytes."""
    ledger = history.ledger
    yield from (("corrupt", text) for text in ledger.corrupt)
    for row in history.office.letters.values():
        message, name = row.first.message, id_of(row.first.message.headers)
        made = ledger.produced.get(name)
        if made is None:
            yield "phantom", f"letter {row.id} is of {name}, which nobody produced"
            continue
        if row.first.kind is Kind.CRASH:
            yield from _blame(history, name)
        elif not history.plans[name].may_die:
            yield "phantom", f"{name} ({history.plans[name].what}) has a letter: {row.first.kind}, {row.first.reason}"
        body = _body(history, row)
        if (message.key, body, message.headers) != (made.key, made.body, made.headers):
            yield "corrupt", f"the letter of {name} has other bytes than {name}"
        if not row.first.verified:
            yield "corrupt", f"the letter of {name} does not verify"


def _blame(history: History, name: str) -> Found:
    """A crash is blamed on who did it. Where the world takes processes or leases at random, twice is bad luck."""
    faults, what = history.world.faults, history.plans[name].what
    if history.setup.killers and what != "killer":
        yield "wrongly blamed", f"{name} ({what}) is said to have killed its process"
    elif not history.setup.killers and faults["crash"] + faults["steal"] + faults["redeliver"] < CRASHES_ALONE:
        yield "wrongly blamed", f"{name} ({what}) is said to have killed its process, after {dict(faults)}"


def _restarts(history: History) -> Found:
    """A message that kills is known after three deaths, each time it comes anew: one in company, two alone.

    Two of them may cost each other a second round: one kills between the verdict on the other and its settling.
    """
    names = [f"m{number}" for number in range(history.setup.killers)]
    anew = sum(1 + history.ledger.births[name] + history.ledger.zombies[name] for name in names)
    allowed = (1 + CRASHES_ALONE) * anew * len(names)
    if names and history.world.faults["crash"] > allowed:
        yield "killed too often", f"{history.world.faults['crash']} crashes, {allowed} allowed"


def _body(history: History, row: Row) -> bytes | None:
    letter = row.first
    if letter.claim is not None:
        return history.blobs.get(letter.claim.name)
    if "body_at_source" in letter.marks:
        return history.ledger.produced[id_of(letter.message.headers)].body
    return letter.message.body


def _duplicates(history: History) -> Found:
    seen = Counter((row.first.message.id, row.first.group) for row in history.office.letters.values())
    for (name, group), number in seen.items():
        if number > 1:
            yield "duplicate letter", f"{number} letters of {name} in {group}"


def _effects(history: History) -> Found:
    """One effect, and one more for each time the message was really handed out again or sent again."""
    ledger, setup = history.ledger, history.setup
    extra = 0
    for name, number in ledger.effects.items():
        allowed = 1 + ledger.abandoned[name] + ledger.zombies[name] + ledger.births[name]
        extra += max(number - 1 - ledger.births[name], 0)
        if number > allowed:
            yield "duplicate effects", f"{name} took effect {number} times, {allowed} allowed"
    in_flight = 4 * max(setup.concurrency, 3)
    faults = sum(history.world.faults.values())
    if extra > in_flight * faults:
        yield "duplicate effects", f"{extra} in all after {faults} faults with {in_flight} in flight"


def _runs(history: History) -> Found:
    """No more runs than attempts, and one more for each time a run was interrupted or its count unclear."""
    if history.setup.breaker:
        return  # while it is open, runs do not count
    ledger, attempts, world = history.ledger, history.setup.attempts, history.world
    unclear = world.by_call["attempts.increment"]
    zombie_runs = 1 if history.setup.mode is Mode.DELAYED else attempts
    for name, number in ledger.runs.items():
        interrupted = ledger.abandoned[name] + zombie_runs * ledger.zombies[name]
        allowed = attempts * (1 + ledger.births[name]) + interrupted + unclear
        if number > allowed:
            yield "over-retried", f"{name} ran {number} times, {allowed} allowed"


def _moves(history: History) -> Found:
    for move in history.ledger.moves:
        if move.before is not None and move.after not in MOVES[move.before]:
            yield "illegal state", f"{move.letter[:8]} went from {move.before} to {move.after}: {move.why}"


def _resolved(history: History) -> Found:
    """No report resolves a letter before its current hop succeeded; what the quiet resolved has succeeded by now."""
    for move in history.ledger.moves:
        if move.after is State.RESOLVED and move.why == "reported" and not move.proved:
            yield "falsely resolved", f"{move.letter[:8]} by a report, before its hop {move.hop} succeeded"
    for row in history.office.letters.values():
        name = id_of(row.first.message.headers)
        proved = (name, row.hop) in history.ledger.succeeded_hops
        if row.state is State.RESOLVED and row.resolved_by == "quiet" and not proved:
            yield "falsely resolved", f"{name} by the quiet, but its hop {row.hop} never succeeded"


def _replays(history: History) -> Found:
    """No more copies of a job than its letters, and one window for each interruption."""
    by_job = Counter(one.job for one in history.ledger.publishes)
    faults = history.world.by_kind["replayer"]
    for job, number in by_job.items():
        row = history.office.jobs.get(job)
        if row is None:
            yield "replay", f"{number} copies were published without a job"
            continue
        interruptions = faults + history.ledger.takeovers[job]
        allowed = row.job.total + row.job.window * interruptions
        if number > allowed:
            yield "replay", f"{job} published {number} copies of {row.job.total} letters, {allowed} allowed"


def _keys(history: History) -> Found:
    """One replay of one letter has one idempotency key, and no other replay has it."""
    keys: dict[tuple[str, str], set[str]] = defaultdict(set)
    requests: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for one in history.ledger.publishes:
        keys[one.job, one.letter].add(one.key)
        requests[one.key].add((one.job, one.letter))
    for (job, letter), found in keys.items():
        if len(found) > 1:
            yield "idempotency key", f"{job} sent {letter[:8]} under {len(found)} keys"
    for key, found in requests.items():
        if len(found) > 1:
            yield "idempotency key", f"{key[:12]} was used for {len(found)} requests"


CHECKS = (
    _defects,
    _lost,
    _stuck,
    _letters,
    _duplicates,
    _effects,
    _runs,
    _moves,
    _resolved,
    _replays,
    _keys,
    _restarts,
)
