"""Runs subject and peer in turns, so that a busy machine slows both, and keeps the last result of every benchmark."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from msgspec import Struct

RESULTS = Path(__file__).with_name("results.json")
ROUNDS = 7

Measure = Callable[[], float]
"""One run, answering in the benchmark's unit."""


class Benchmark(Struct, frozen=True):
    """`prepare` sets up once and hands back what is measured: subject and peer, or a subject that has a limit."""

    name: str
    subject: str
    against: str
    target: float
    unit: str
    rounds: int
    prepare: Callable[[], Sequence[Measure]]

    @property
    def has_peer(self) -> bool:
        return bool(self.against)


class Row(Struct, frozen=True):
    """A result. Against a peer `ratio` is subject by peer, at least the target; else measured by target, at most 1."""

    bench: str
    subject: str
    against: str
    ratio: float
    target: float
    met: bool
    unit: str
    measured: float
    peer: float | None
    spread: tuple[float, float]
    rounds: int
    load: float


_benchmarks: dict[str, Benchmark] = {}
Prepare = Callable[[], Sequence[Measure]]


def race(
    name: str, *, subject: str, against: str, target: float, unit: str, rounds: int = ROUNDS
) -> Callable[[Prepare], Prepare]:
    """Register a benchmark whose subject must reach `target` times what its peer does; more of the unit is better."""
    return _register(Benchmark(name, subject, against, target, unit, rounds, tuple))


def limit(name: str, *, subject: str, target: float, unit: str, rounds: int = ROUNDS) -> Callable[[Prepare], Prepare]:
    """Register a benchmark that must stay within `target`; less of the unit is better."""
    return _register(Benchmark(name, subject, "", target, unit, rounds, tuple))


def _register(benchmark: Benchmark) -> Callable[[Prepare], Prepare]:
    def register(prepare: Prepare) -> Prepare:
        _benchmarks[benchmark.name] = msgspec.structs.replace(benchmark, prepare=prepare)
        return prepare

    return register


def chosen(only: Sequence[str]) -> list[Benchmark]:
    """Those of these names, or of a whole family (`embedded` has `embedded.runtime`); all without a name."""
    known = list(_benchmarks.values())
    unknown = [name for name in only if not any(_is_of(one, name) for one in known)]
    if unknown:
        raise SystemExit(f"no such benchmark: {', '.join(unknown)}; there are: {', '.join(_benchmarks)}")
    return [one for one in known if not only or any(_is_of(one, name) for name in only)]


def _is_of(benchmark: Benchmark, name: str) -> bool:
    return benchmark.name == name or benchmark.name.startswith(f"{name}.")


def run(benchmark: Benchmark) -> Row:
    """Warm up once, then take turns, the first place changing hands every round."""
    measures = benchmark.prepare()
    for measure in measures:
        measure()
    found: list[list[float]] = [[] for _ in measures]
    for number in range(benchmark.rounds):
        turns = list(zip(measures, found, strict=True))
        for measure, results in turns if number % 2 else reversed(turns):
            results.append(measure())
    return _row(benchmark, *found)


def _row(benchmark: Benchmark, subject: Sequence[float], peer: Sequence[float] = ()) -> Row:
    """Medians are compared; the spread is that of the ratios of single rounds."""
    base = median(peer) if peer else benchmark.target
    ratio = median(subject) / base
    ratios = [one / other for one, other in zip(subject, peer or [base] * len(subject), strict=True)]
    return Row(
        bench=benchmark.name,
        subject=benchmark.subject,
        against=benchmark.against or f"a limit of {benchmark.target:g} {benchmark.unit}",
        ratio=round(ratio, 3),
        target=benchmark.target,
        met=ratio >= benchmark.target if peer else ratio <= 1,
        unit=benchmark.unit,
        measured=_short(median(subject)),
        peer=_short(base) if peer else None,
        spread=(round(min(ratios), 3), round(max(ratios), 3)),
        rounds=benchmark.rounds,
        load=round(os.getloadavg()[0], 2),
    )


def _short(number: float) -> float:
    return float(f"{number:.4g}")


def keep(rows: Sequence[Row], path: Path = RESULTS) -> None:
    """Put these in the place of their last results; results of other benchmarks stay."""
    kept = {row.bench: row for row in msgspec.json.decode(path.read_bytes(), type=list[Row])} if path.exists() else {}
    kept |= {row.bench: row for row in rows}
    ordered = [kept[name] for name in sorted(kept)]
    path.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=2) + b"\n")


HEADINGS = ("bench", "subject", "against", "measured", "ratio", "spread", "target", "met")


def table(rows: Sequence[Row]) -> str:
    lines = [HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _cells(row: Row) -> tuple[str, ...]:
    target = f"{row.target:g}" if row.peer is not None else f"{row.target:g} {row.unit}"
    spread = f"{row.spread[0]:.2f}-{row.spread[1]:.2f}"
    measured = f"{row.measured:,g} {row.unit}"
    return row.bench, row.subject, row.against, measured, f"{row.ratio:.2f}", spread, target, "yes" if row.met else "NO"


def measured(work: Callable[[], Coroutine[Any, Any, float]]) -> Measure:
    """A coroutine function as a measure, in a loop of its own."""
    return lambda: asyncio.run(work())
