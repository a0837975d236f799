"""The kill matrix: every fault point with every way to die there; and storms of several faults, drawn from a seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

from msgspec import Struct

from chaos.history import OFFICE, WORKER
from chaos.plan import Fault
from chaos.run import Result, play
from redrive.faults import POINTS

ACTIONS = ("kill", "exit", "raise", "stop")
RARE = frozenset({"office.after_blob", "office.after_spool", "spool.after_drain", "runtime.after_outcome"})
"""Passed once or twice in a run, so only the first pass is sure to come."""
COLUMNS = ("point", "action", "nth", "verdict", "kills", "duplicates", "seconds")


class Case(Struct, frozen=True):
    seed: int
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.faults)) or "calm"

    @property
    def command(self) -> str:
        """How to play it again."""
        return f"python -m chaos --seed {self.seed}" + "".join(f" --fault {fault}" for fault in self.faults)


QUICK: tuple[Case, ...] = tuple(
    Case(seed, (Fault(point, action, nth),))
    for seed, (point, action, nth) in enumerate(
        [
            ("runtime.after_receive", "kill", 2),
            ("runtime.before_handler", "exit", 5),
            ("runtime.after_handler", "kill", 5),
            ("runtime.before_settle", "kill", 3),
            ("runtime.before_settle", "stop", 2),
            ("runtime.after_settle", "kill", 3),
            ("runtime.after_outcome", "kill", 1),
            ("office.before_file", "kill", 1),
            ("office.after_file", "kill", 1),
            ("office.after_file", "stop", 1),
            ("office.after_spool", "kill", 1),
            ("office.after_blob", "kill", 1),
            ("collector.after_receive", "exit", 2),
            ("collector.after_store", "kill", 1),
            ("collector.after_settle", "raise", 1),
            ("replayer.after_lease", "kill", 2),
            ("replayer.after_advance", "kill", 1),
            ("replayer.after_publish", "stop", 1),
            ("replayer.after_close", "kill", 1),
            ("spool.after_drain", "raise", 1),
        ]
    )
)
"""What every change goes through: each point once, each way to die, twenty runs."""


def full() -> Iterator[Case]:
    """Every point with every action, at its first pass and, where it is passed often, at a later one."""
    seed = 0
    for point in POINTS:
        for action in ACTIONS:
            for nth in (1,) if point in RARE else (1, 3):
                yield Case(seed, (Fault(point, action, nth),))
                seed += 1


def storm(seed: int) -> Case:
    """Several faults in one run: a worker and the office die, and what is started in their place may die again."""
    rng = Random(seed)
    faults: list[Fault] = []
    for role in (WORKER, OFFICE):
        points = [point for point in POINTS if point not in RARE and Fault(point).role == role]
        for start in range(rng.randint(1, 2)):
            action, nth = rng.choice(ACTIONS), rng.randint(1, 3) if start == 0 else 1
            faults.append(Fault(rng.choice(points), action, nth, start))
            if action == "stop":  # nothing is started in its place
                break
    return Case(seed, tuple(faults))


def run(case: Case, bug: str = "", *, keep: bool = False) -> Result:
    return play(case.seed, case.faults, bug, keep=keep)


def row(case: Case, result: Result) -> tuple[str, ...]:
    """One line of the table."""
    fault = case.faults[0] if len(case.faults) == 1 else None
    what = "ok" if result.ok else ", ".join(sorted(result.verdict.kinds)) or "point not reached"
    return (
        str(case) if fault is None else fault.point,
        "" if fault is None else fault.action,
        "" if fault is None else str(fault.nth),
        what,
        str(result.verdict.kills),
        str(result.verdict.duplicates),
        f"{result.seconds:.1f}",
    )


def table(rows: Iterable[tuple[str, ...]]) -> str:
    lines = [COLUMNS, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
