"""The judge: a history in, a verdict out. Pure; it believes the ledger, the producer and the topics, in that order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from msgspec import Struct

from chaos.history import BEGAN, HANDLED, OFFICE, SLEPT, STORE, WORKER, Found, History, Published, Sent
from redrive.letter import MOVES, Kind, Reason, State

BIRTHS = (State.PENDING, State.HELD, State.QUARANTINED)
CRASHES_TO_BLAME = 3
"""A letter for a crash needs one to raise suspicion and two alone."""


class Anomaly(Struct, frozen=True):
    kind: str
    text: str


class Verdict(Struct, frozen=True):
    """Everything that is wrong, and the counts a table shows."""

    anomalies: tuple[Anomaly, ...]
    messages: int
    handled: int
    letters: int
    copies: int
    kills: int
    duplicates: int

    @property
    def ok(self) -> bool:
        return not self.anomalies

    @property
    def kinds(self) -> set[str]:
        return {anomaly.kind for anomaly in self.anomalies}


def judge(history: History) -> Verdict:
    """Account for every message of this run."""
    case = _Case(history)
    found = [Anomaly(name, text) for name, rule in RULES.items() for text in rule(case)]
    return Verdict(
        anomalies=tuple(found),
        messages=len(history.sent),
        handled=len(case.handled.keys() & case.sent.keys()),
        letters=len(history.letters),
        copies=len(history.copies),
        kills=case.interrupted(WORKER) + case.interrupted(OFFICE),
        duplicates=sum(case.surplus().values()),
    )


class _Case:
    """A history, indexed the ways the rules look at it."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.sent: dict[str, Sent] = {one.id: one for one in history.sent}
        self.runs: Counter[str] = Counter(line.id for line in history.runs if line.outcome == BEGAN)
        self.handled: Counter[str] = Counter(line.id for line in history.runs if line.outcome == HANDLED)
        self.letters: dict[str, list[Found]] = defaultdict(list)
        for letter in history.letters:
            self.letters[letter.message].append(letter)
        self.copies: Counter[str] = Counter(copy.message for copy in history.copies)
        self.hops: dict[tuple[str, int], list[Published]] = defaultdict(list)
        for copy in history.copies:
            self.hops[copy.letter, copy.hop].append(copy)

    def interrupted(self, role: str) -> int:
        return self.history.interruptions.get(role, 0)

    def surplus(self) -> Counter[str]:
        """Effects beyond the first of each message, by source."""
        extra: Counter[str] = Counter()
        for name, times in self.handled.items():
            if name in self.sent:
                extra[self.sent[name].source] += times - 1
        return extra

    def repeated_copies(self) -> int:
        return len(self.history.copies) - len(self.hops)


def _lost(case: _Case) -> Iterator[str]:
    """Neither handled nor a letter; or a letter that calls itself resolved though nobody handled its message."""
    for name in sorted(case.sent.keys() - case.handled.keys()):
        if name not in case.letters:
            yield f"{name}: {case.runs[name]} run(s), never handled, no letter"
        elif any(letter.state is State.RESOLVED for letter in case.letters[name]):
            yield f"{name}: resolved, and never handled"


def _stuck(case: _Case) -> Iterator[str]:
    yield from (f"{number} in {what}" for what, number in case.history.unsettled.items() if number)
    for letter in case.history.letters:
        sent = case.sent.get(letter.message)
        if letter.state is State.REPLAYING:
            yield f"{letter.message}: replaying for ever"
        elif sent is not None and sent.mended and letter.state in BIRTHS:
            yield f"{letter.message}: still {letter.state}, though it was mended and sent back"


def _phantom(case: _Case) -> Iterator[str]:
    seen = {line.id for line in case.history.runs} | case.letters.keys() | case.copies.keys()
    yield from (f"{name!r} was never produced" for name in sorted(seen - case.sent.keys()))


def _false_letter(case: _Case) -> Iterator[str]:
    """A letter for a message that could not die. Only crashes may take the wrong one, and only many of them."""
    for name, letters in case.letters.items():
        sent = case.sent.get(name)
        if sent is None or sent.mortal:
            continue
        for letter in letters:
            blamed = letter.kind is Kind.CRASH and case.interrupted(WORKER) >= CRASHES_TO_BLAME
            if letter.reason is not Reason.HELD and not blamed:
                yield f"{name}: {letter.kind}, {letter.reason}"


def _corrupt(case: _Case) -> Iterator[str]:
    def differs(name: str, sha: str) -> bool:
        return name in case.sent and sha != case.sent[name].sha

    yield from (f"{line.id}: the handler saw other bytes" for line in case.history.runs if differs(line.id, line.sha))
    for letter in case.history.letters:
        if differs(letter.message, letter.sha):
            yield f"{letter.message}: its letter has other bytes"
    for copy in case.history.copies:
        if differs(copy.message, copy.sha):
            yield f"{copy.message}: the copy of hop {copy.hop} has other bytes"


def _duplicate_letter(case: _Case) -> Iterator[str]:
    for name, letters in case.letters.items():
        if len(letters) > 1:
            yield f"{name}: {len(letters)} letters"


def _duplicate_effects(case: _Case) -> Iterator[str]:
    """What was in flight may be done again after an interruption, and so may a copy that was published again."""
    bound = case.history.in_flight * case.interrupted(WORKER) + case.repeated_copies()
    for source, extra in case.surplus().items():
        if extra > bound:
            yield f"{source}: {extra} effects too many, {bound} can be explained"


def _over_retried(case: _Case) -> Iterator[str]:
    """Every copy has its attempts, every interruption costs a run, and who sleeps may use the attempts again."""
    for name, runs in case.runs.items():
        sent = case.sent.get(name)
        if sent is None:
            continue
        bound = sent.runs * (1 + case.copies[name] + case.interrupted(SLEPT)) + case.interrupted(WORKER)
        if runs > bound:
            yield f"{name}: {runs} runs, {bound} can be explained"


def _under_retried(case: _Case) -> Iterator[str]:
    """Given up before its attempts were used."""
    for name, letters in case.letters.items():
        sent = case.sent.get(name)
        for letter in letters:
            if sent is None or letter.reason is not Reason.MAX_RETRIES_EXCEEDED:
                continue
            if case.runs[name] < sent.runs * letter.occurrences:
                yield f"{name}: {case.runs[name]} runs for {letter.occurrences} deaths of {sent.runs} attempts each"


def _reordered(case: _Case) -> Iterator[str]:
    """In an ordered source, the first effects of a key come in the order in which it was produced."""
    reached: dict[tuple[str, bytes | None], Sent] = {}
    done: set[str] = set()
    for line in case.history.runs:
        sent = case.sent.get(line.id)
        if line.outcome != HANDLED or sent is None or sent.source not in case.history.ordered or line.id in done:
            continue
        done.add(line.id)
        last = reached.get((sent.source, sent.key))
        if last is not None and last.seq > sent.seq:
            yield f"{sent.id} was handled after {last.id}"
        else:
            reached[sent.source, sent.key] = sent


def _illegal_state(case: _Case) -> Iterator[str]:
    """Every move is allowed, begins where the last one ended, and the last one ends where the letter is now."""
    at: dict[str, str] = {}
    for move in case.history.moves:
        if move.letter in at and at[move.letter] != move.before:
            yield f"{move.letter}: {move.before} to {move.after}, but it was {at[move.letter]}"
        elif move.letter not in at and move.before not in BIRTHS:
            yield f"{move.letter}: its first move is {move.before} to {move.after}"
        if move.before not in set(State) or move.after not in MOVES[State(move.before)]:
            yield f"{move.letter}: {move.before} to {move.after} is no move"
        at[move.letter] = move.after
    for letter in case.history.letters:
        if at.get(letter.id, letter.state) != letter.state:
            yield f"{letter.id}: is {letter.state}, but its last move ended in {at[letter.id]}"


def _replay_dup(case: _Case) -> Iterator[str]:
    bound = case.history.window * (case.interrupted(OFFICE) + case.interrupted(STORE))
    if case.repeated_copies() > bound:
        yield f"{case.repeated_copies()} copies too many, {bound} can be explained"
    for (letter, hop), copies in case.hops.items():
        keys = {copy.key for copy in copies}
        if len(keys) > 1 or "" in keys:
            yield f"{letter}: hop {hop} went out under the keys {sorted(keys)}"


def _reused_key(case: _Case) -> Iterator[str]:
    owners: dict[str, tuple[str, int]] = {}
    for hop, copies in case.hops.items():
        if owners.setdefault(copies[0].key, hop) != hop:
            yield f"{copies[0].key}: of {hop} and of {owners[copies[0].key]}"


def _audit(case: _Case) -> Iterator[str]:
    if case.history.broken_audit is not None:
        yield f"the chain breaks at entry {case.history.broken_audit}"


def _defect(case: _Case) -> Iterator[str]:
    """A process ended that nobody had asked to."""
    yield from case.history.defects


Rule = Callable[[_Case], Iterator[str]]
RULES: dict[str, Rule] = {
    "lost": _lost,
    "stuck": _stuck,
    "phantom": _phantom,
    "false_letter": _false_letter,
    "corrupt": _corrupt,
    "duplicate_letter": _duplicate_letter,
    "duplicate_effects": _duplicate_effects,
    "over_retried": _over_retried,
    "under_retried": _under_retried,
    "reordered": _reordered,
    "illegal_state": _illegal_state,
    "replay_dup": _replay_dup,
    "reused_key": _reused_key,
    "audit": _audit,
    "defect": _defect,
}


def explain(verdict: Verdict, most: int = 12) -> str:
    """The anomalies, a line each."""
    lines = [f"{anomaly.kind}: {anomaly.text}" for anomaly in verdict.anomalies]
    rest = [f"… and {len(lines) - most} more"] if len(lines) > most else []
    return "\n".join(lines[:most] + rest)
