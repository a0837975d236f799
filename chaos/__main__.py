"""`make chaos`: the whole kill matrix, then storms from seeds; a table, and exit code 1 on any anomaly."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from chaos.check import explain
from chaos.matrix import Case, full, row, run, storm, table
from chaos.plan import Fault
from chaos.run import Result

STORM_SEED = 1000


def main() -> int:
    given = _arguments()
    began = time.monotonic()
    rows, failed = [], 0
    for case, result in _played(_cases(given, began), given.jobs):
        rows.append(row(case, result))
        print("  ".join(rows[-1]), flush=True)
        if not result.ok:
            failed += 1
            _complain(case, result)
    print(f"\n{table(rows)}\n\n{len(rows)} runs, {failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed or not rows else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="one run with this seed: the storm it draws, or the given faults")
    parser.add_argument("--fault", type=Fault.read, action="append", help="point:nth:action, with --seed")
    parser.add_argument("--calm", action="store_true", help="no fault at all, with --seed")
    parser.add_argument("--seeds", type=int, default=20, help="how many storms follow the matrix")
    parser.add_argument("--seconds", type=float, help="storms for so long instead")
    parser.add_argument("--no-matrix", action="store_true", help="only storms")
    parser.add_argument("--jobs", type=int, default=max(2, (os.cpu_count() or 2) // 2), help="runs at a time")
    return parser.parse_args()


def _cases(given: argparse.Namespace, began: float) -> Iterator[Case]:
    if given.seed is not None:
        faults = tuple(given.fault or ())
        yield Case(given.seed, faults) if faults or given.calm else storm(given.seed)
        return
    if not given.no_matrix:
        yield from full()
    for seed in itertools.count(STORM_SEED):
        enough = seed - STORM_SEED >= given.seeds if given.seconds is None else time.monotonic() - began > given.seconds
        if enough:
            return
        yield storm(seed)


def _played(cases: Iterable[Case], jobs: int) -> Iterator[tuple[Case, Result]]:
    """A few at a time, in whichever order they end; a case is drawn only when there is room for it."""
    waiting = iter(cases)
    with ProcessPoolExecutor(jobs) as pool:
        running: dict[Future[Result], Case] = {}
        while True:
            for case in itertools.islice(waiting, jobs - len(running)):
                running[pool.submit(run, case, keep=True)] = case
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()


def _complain(case: Case, result: Result) -> None:
    for line in [*(f"point not reached: {one}" for one in result.unreached), *explain(result.verdict).splitlines()]:
        print(f"    {line}")
    print(f"    its files are in {result.home}\n    again: {case.command}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
