"""A message that kills its process is found, alone, and filed; its neighbours are not blamed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from harness import letters, make_app

from redrive.letter import Kind, Reason
from redrive.message import Copy

HERE = Path(__file__).parent
INNOCENTS = 499


def publish(folder: Path, number: int) -> None:
    async def run() -> None:
        app = make_app(folder, embedded={"lease_seconds": 1.0, "partitions": 1})
        bodies = [b"%d" % one for one in range(number)]
        bodies.insert(number // 2, b"culprit")
        async with app:
            await app.parts.broker.publish([Copy("jobs", b"k", body) for body in bodies])

    asyncio.run(run())


def run_until_settled(folder: Path, how: str, concurrency: int) -> list[int]:
    """Restart the service whenever it dies, as a supervisor does; the exit codes, the last of them 0."""
    codes: list[int] = []
    while len(codes) < 12:
        service = [sys.executable, str(HERE / "crashing_service.py"), str(folder), how, str(concurrency)]
        codes.append(subprocess.run(service, timeout=60, cwd=HERE, capture_output=True, check=False).returncode)
        if codes[-1] == 0:
            return codes
    raise AssertionError(f"still dying: {codes}")


def ledger(folder: Path) -> Counter[tuple[str, str]]:
    lines = (folder / "ledger").read_text().splitlines()
    return Counter((line.split()[0], line.split()[2]) for line in lines)


@pytest.mark.parametrize(("how", "concurrency"), [("exit", 32), ("segfault", 32), ("memory", 32), ("hang", 2)])
def test_only_the_culprit_is_filed(tmp_path: Path, how: str, concurrency: int) -> None:
    publish(tmp_path, INNOCENTS)
    codes = run_until_settled(tmp_path, how, concurrency)
    seen = ledger(tmp_path)
    [row] = asyncio.run(_letters(tmp_path))
    assert (row.kind, row.reason) == (Kind.CRASH, Reason.CRASH)
    assert "died 2 times" in row.error_message
    assert len(codes) <= 4, f"three deaths find the culprit, not {len(codes) - 1}"
    assert seen["done", "culprit"] == 0
    assert all(seen["done", str(one)] >= 1 for one in range(INNOCENTS))
    repeated = sum(seen["done", str(one)] - 1 for one in range(INNOCENTS))
    assert repeated <= 2 * 500, "at most what was in flight runs again"


async def _letters(folder: Path) -> list:
    async with make_app(folder) as app:
        return await letters(app)
