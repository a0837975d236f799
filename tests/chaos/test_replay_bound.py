"""P4: a replay is at least once and bounded. Copies are counted in the topic, effects in a ledger of our own."""

from __future__ import annotations

import pytest

from chaos.check import explain
from chaos.plan import Fault
from chaos.replays import LETTERS, Replayed, play

KILLS = [
    (100, [Fault("replayer.after_lease", "kill", 3)]),
    (100, [Fault("replayer.after_advance", "kill", 3)]),
    (100, [Fault("replayer.after_publish", "kill", 3)]),
    (100, [Fault("replayer.after_close", "kill", 3)]),
    (100, [Fault("replayer.after_publish", "kill", 2), Fault("replayer.after_publish", "kill", 1, start=1)]),
    (500, [Fault("replayer.after_advance", "kill", 2)]),
    (500, [Fault("replayer.after_publish", "kill", 3)]),
]


def check(result: Replayed, window: int) -> None:
    assert result.ok, f"{result.unreached} {explain(result.verdict)}"
    assert result.verdict.letters == LETTERS
    assert LETTERS <= result.published <= LETTERS + window * result.kills
    assert LETTERS <= result.handled <= result.published


@pytest.mark.parametrize(("window", "faults"), KILLS, ids=[f"{w}-{' '.join(map(str, f))}" for w, f in KILLS])
def test_a_kill_repeats_at_most_one_window(window: int, faults: list[Fault]) -> None:
    result = play(window, faults)
    check(result, window)
    assert result.kills == len(faults)


def test_two_replayers_share_one_job_without_a_duplicate() -> None:
    result = play(100, replayers=2)
    check(result, 100)
    assert result.published == LETTERS


def test_a_double_click_sends_nothing_twice() -> None:
    result = play(100, replayers=2, jobs=2)
    check(result, 100)
    assert result.published == LETTERS


def test_a_replayer_that_wakes_up_late_repeats_at_most_one_window() -> None:
    result = play(500, [Fault("replayer.after_publish", "stop", 2)], replayers=2)
    check(result, 500)
    assert result.kills == 1
