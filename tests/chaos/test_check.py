"""The judge catches every kind of anomaly in a history written by hand, and finds nothing wrong with a sound one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from chaos.check import RULES, judge
from chaos.history import BEGAN, HANDLED, OFFICE, SLEPT, STORE, WORKER, Found, History, Move, Published, Run, Sent
from redrive.letter import Kind, Reason, State

SENT = [
    Sent("ok", "orders", b"k", "sha-ok"),
    Sent("dead", "orders", b"k", "sha-dead", runs=3, mortal=True, mended=False),
    Sent("mended", "orders", b"k", "sha-mended", mortal=True),
    Sent("a0", "accounts", b"a", "sha-a0", seq=0),
    Sent("a1", "accounts", b"a", "sha-a1", seq=1),
]


def runs(*names: str, outcome: str = HANDLED, pid: int = 1) -> list[Run]:
    """Whole runs, one after another."""
    found = []
    for name in names:
        found += [Run(name, 1, BEGAN, pid, 0.0, f"sha-{name}"), Run(name, 1, outcome, pid, 0.0, f"sha-{name}")]
    return found


def copy(letter: str, message: str, hop: int = 1, key: str | None = None) -> Published:
    return Published(letter, message, hop, key or f"{letter}-{hop}", f"sha-{message}")


DEAD = Found("L1", "dead", State.PENDING, "sha-dead")
MENDED = Found("L2", "mended", State.RESOLVED, "sha-mended", Kind.PERMANENT, Reason.PERMANENT)
SOUND = History(
    sent=SENT,
    runs=[
        *runs("ok"),
        *runs("dead", "dead", "dead", outcome="Hiccup"),
        *runs("mended", outcome="Bug"),
        *runs("mended", "a0", "a1"),
    ],
    letters=[DEAD, MENDED],
    copies=[copy("L2", "mended")],
    moves=[Move("L2", "pending", "replaying"), Move("L2", "replaying", "resolved")],
    in_flight=4,
    window=2,
    ordered=frozenset({"accounts"}),
)
Change = Callable[[History], dict[str, Any]]


def without(history: History, name: str) -> list[Run]:
    return [run for run in history.runs if run.id != name]


ANOMALIES: list[tuple[str, str, Change]] = [
    ("lost", "never handled and no letter", lambda h: {"runs": without(h, "ok")}),
    ("lost", "its letter is gone", lambda h: {"letters": [MENDED]}),
    (
        "lost",
        "resolved, not handled",
        lambda h: {"runs": [*without(h, "mended"), *runs("mended", outcome="Bug")]},
    ),
    ("stuck", "the broker still has it", lambda h: {"unsettled": {"orders": 1}}),
    ("stuck", "replaying for ever", lambda h: {"letters": [replace(DEAD, state=State.REPLAYING), MENDED]}),
    ("stuck", "mended and not sent", lambda h: {"letters": [DEAD, replace(MENDED, state=State.PENDING)], "moves": []}),
    ("phantom", "a run of nothing", lambda h: {"runs": [*h.runs, *runs("ghost")]}),
    ("phantom", "a letter of nothing", lambda h: {"letters": [*h.letters, Found("L9", "ghost", State.PENDING, "")]}),
    ("phantom", "a copy of nothing", lambda h: {"copies": [*h.copies, copy("L9", "ghost")]}),
    (
        "false_letter",
        "it cannot die",
        lambda h: {"letters": [*h.letters, Found("L3", "ok", State.DISCARDED, "sha-ok")]},
    ),
    ("corrupt", "seen otherwise", lambda h: {"runs": [*h.runs, Run("ok", 2, "Hiccup", 1, 0.0, "other")]}),
    ("corrupt", "the letter has other bytes", lambda h: {"letters": [replace(DEAD, sha="other"), MENDED]}),
    ("corrupt", "the copy has other bytes", lambda h: {"copies": [replace(h.copies[0], sha="other")]}),
    ("duplicate_letter", "two letters", lambda h: {"letters": [*h.letters, replace(DEAD, id="L1b")]}),
    ("duplicate_effects", "handled twice, nobody died", lambda h: {"runs": [*h.runs, *runs("ok")]}),
    (
        "duplicate_effects",
        "more than was in flight",
        lambda h: {"runs": [*h.runs, *runs(*["ok"] * 5)], "interruptions": {WORKER: 1}},
    ),
    ("over_retried", "a fourth run of three", lambda h: {"runs": [*h.runs, *runs("dead", outcome="Hiccup")]}),
    (
        "over_retried",
        "a kill explains one run",
        lambda h: {"runs": [*h.runs, *runs("dead", "dead", outcome="Hiccup")], "interruptions": {WORKER: 1}},
    ),
    ("under_retried", "given up early", lambda h: {"runs": [*without(h, "dead"), *runs("dead", outcome="Hiccup")]}),
    ("reordered", "the second first", lambda h: {"runs": [*without(h, "a0"), *runs("a0")]}),
    (
        "illegal_state",
        "no such move",
        lambda h: {"moves": [Move("L2", "pending", "held"), Move("L2", "held", "resolved")]},
    ),
    ("illegal_state", "a gap", lambda h: {"moves": [h.moves[0], Move("L2", "pending", "resolved")]}),
    ("illegal_state", "born resolved", lambda h: {"moves": [Move("L2", "resolved", "pending"), *h.moves]}),
    ("illegal_state", "another end", lambda h: {"moves": h.moves[:1]}),
    ("replay_dup", "twice, nobody died", lambda h: {"copies": [*h.copies, copy("L2", "mended")]}),
    (
        "replay_dup",
        "more than a window",
        lambda h: {"copies": [*h.copies, *[copy("L2", "mended")] * 3], "interruptions": {OFFICE: 1}},
    ),
    (
        "replay_dup",
        "two keys for one hop",
        lambda h: {"copies": [*h.copies, copy("L2", "mended", key="other")], "interruptions": {OFFICE: 1}},
    ),
    ("replay_dup", "no key", lambda h: {"copies": [replace(h.copies[0], key="")]}),
    ("reused_key", "one key for two hops", lambda h: {"copies": [*h.copies, copy("L2", "mended", 2, "L2-1")]}),
    ("audit", "the chain is broken", lambda h: {"broken_audit": 7}),
    ("defect", "a process died by itself", lambda h: {"defects": ["worker-1 ended with 1"]}),
]


def test_a_sound_history_has_no_anomaly() -> None:
    verdict = judge(SOUND)
    assert verdict.anomalies == ()
    assert (verdict.messages, verdict.handled, verdict.letters, verdict.copies, verdict.duplicates) == (5, 4, 2, 1, 0)


@pytest.mark.parametrize(
    ("kind", "change"), [(kind, change) for kind, _, change in ANOMALIES], ids=[a[1] for a in ANOMALIES]
)
def test_a_bad_history_is_caught(kind: str, change: Change) -> None:
    assert kind in judge(replace(SOUND, **change(SOUND))).kinds


def test_every_rule_has_a_history_that_breaks_it() -> None:
    assert {kind for kind, _, _ in ANOMALIES} == RULES.keys()


EXPLAINED: list[tuple[str, Change]] = [
    ("effects again after a kill", lambda h: {"runs": [*h.runs, *runs("ok", "a0")], "interruptions": {WORKER: 1}}),
    (
        "a run cut short",
        lambda h: {"runs": [*h.runs, Run("dead", 4, BEGAN, 1, 0.0, "sha-dead")], "interruptions": {WORKER: 1}},
    ),
    (
        "attempts again after a sleep",
        lambda h: {"runs": [*h.runs, *runs(*["dead"] * 3, outcome="Hiccup")], "interruptions": {WORKER: 1, SLEPT: 1}},
    ),
    (
        "a window again after a kill",
        lambda h: {
            "copies": [*h.copies, copy("L2", "mended")],
            "runs": [*h.runs, *runs("mended")],
            "interruptions": {OFFICE: 1},
        },
    ),
    ("a window again after an outage", lambda h: {"copies": h.copies * 2, "interruptions": {STORE: 1}}),
    (
        "an innocent blamed for many crashes",
        lambda h: {
            "letters": [*h.letters, Found("L3", "ok", State.RESOLVED, "sha-ok", Kind.CRASH, Reason.CRASH)],
            "interruptions": {WORKER: 3},
        },
    ),
    (
        "a letter that was only held",
        lambda h: {"letters": [*h.letters, Found("L3", "a1", State.RESOLVED, "sha-a1", reason=Reason.HELD)]},
    ),
]


@pytest.mark.parametrize("change", [change for _, change in EXPLAINED], ids=[name for name, _ in EXPLAINED])
def test_what_an_interruption_explains_is_no_anomaly(change: Change) -> None:
    assert judge(replace(SOUND, **change(SOUND))).anomalies == ()
