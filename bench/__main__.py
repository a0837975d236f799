"""python -m bench [name …]"""

from __future__ import annotations

import os
import sys

from bench import embedded, harness


def main(only: list[str]) -> int:
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.2f}", flush=True)
    rows = []
    for benchmark in harness.chosen(only):
        print(f"{benchmark.name} …", file=sys.stderr, flush=True)
        rows.append(harness.run(benchmark))
    harness.keep(rows)
    print(f"load {os.getloadavg()[0]:.2f} at the end\n\n{harness.table(rows)}")
    return 0 if all(row.met for row in rows) else 1


FAMILIES = (embedded,)
"""Importing a family registers its benchmarks."""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
