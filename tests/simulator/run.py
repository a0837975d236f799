"""Replays one seed or searches for one that fails: `--seed 7 --trace`, `--seconds 60`; `--mutants` plants bugs."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from simulator.history import Verdict, play


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="play this one")
    parser.add_argument("--trace", action="store_true", help="print every call")
    parser.add_argument("--seconds", type=float, default=10.0, help="search this long")
    parser.add_argument("--start", type=int, default=0, help="search from this seed")
    parser.add_argument("--mutants", action="store_true", help="plant each bug and say which seed finds it")
    given = parser.parse_args()
    if given.mutants:
        return mutants()
    return one(given.seed, given.trace) if given.seed is not None else search(given.start, given.seconds)


def one(seed: int, trace: bool) -> int:
    verdict = play(seed, keep_trace=True)
    for at, who, *what in verdict.trace if trace else ():
        print(f"{at:9.3f}  {who:13} {' '.join(map(str, what))}")
    print(f"seed {seed}: {verdict.calls} calls, {verdict.seconds:.0f} virtual s, faults {verdict.faults}")
    print(f"history {verdict.digest[:16]}")
    print(verdict if verdict.anomalies else "  no anomaly")
    return 1 if verdict.anomalies else 0


def search(start: int, seconds: float) -> int:
    failed: list[Verdict] = []
    began, seed = time.perf_counter(), start
    while time.perf_counter() - began < seconds:
        verdict = play(seed)
        if verdict.anomalies:
            failed.append(verdict)
            print(f"seed {seed}\n{verdict}", flush=True)
        seed += 1
    spent = time.perf_counter() - began
    print(f"{seed - start} histories in {spent:.1f} s, {(seed - start) / spent:.0f} a second, {len(failed)} failed")
    return 1 if failed else 0


def mutants() -> int:
    from simulator.mutants import MUTANTS, hunt

    missed = 0
    for mutant in MUTANTS:
        caught = hunt(mutant, 1000)
        missed += caught is None
        print(caught or f"{mutant.name:40}     -  NOT FOUND", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
