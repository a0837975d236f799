"""Nothing is lost, doubled, changed or stuck in any of these histories, whatever fails and whoever dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulator.history import play

RUN = Path(__file__).with_name("run.py")
HISTORIES = 2000
CHUNK = 100
"""Small enough that the test workers share them evenly."""


@pytest.mark.parametrize("start", range(0, HISTORIES, CHUNK))
def test_no_history_has_an_anomaly(start: int) -> None:
    failed = [verdict for seed in range(start, start + CHUNK) if (verdict := play(seed)).anomalies]
    told = [f"{one}\n  replay it: .venv/bin/python tests/simulator/run.py --seed {one.seed} --trace" for one in failed]
    assert not failed, "\n".join(["", *told])


@pytest.mark.parametrize("seed", [3, 8, 21])
def test_a_seed_is_a_history(seed: int) -> None:
    first, second = play(seed, keep_trace=True), play(seed, keep_trace=True)
    assert first.trace == second.trace
    assert first.digest == second.digest


def test_a_seed_is_the_same_history_in_every_process() -> None:
    def history(hash_seed: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        command = [sys.executable, str(RUN), "--seed", "8", "--trace"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert history("1") == history("2") != ""
