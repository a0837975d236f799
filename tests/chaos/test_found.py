"""What the matrix found, each pinned in one process so that it is found in a moment next time."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from redrive import Message, Redrive, State, faults
from redrive.attempts.base import Span
from redrive.brokers.base import SourceSpec
from redrive.clock import SystemClock
from redrive.letter import Act, Kind, Letter, Outcome, Reason
from redrive.message import Copy
from redrive.reports import Reporter, ReportTooLarge
from redrive.stores.base import Report
from redrive.stores.sqlite import SqliteStore

SECONDS = 10.0


@pytest.fixture
def app(tmp_path: Path) -> Redrive:
    embedded = {"lease_seconds": 2.0, "partitions": 1}
    return Redrive(f"embedded://{tmp_path}/broker.db", store=f"sqlite://{tmp_path}/letters.db", embedded=embedded)


@pytest.fixture
def injected() -> Iterator[None]:
    yield
    faults.install("")


async def until(app: Redrive, working: asyncio.Task[None], group: str) -> None:
    """Work until the source is empty, then stop."""
    async with asyncio.timeout(SECONDS):
        while (await app.parts.broker.depth("orders", group)).count:
            await asyncio.sleep(0.02)
        app.stop()
        await working


async def test_a_suspect_keeps_its_place_among_the_messages_of_its_key(app: Redrive) -> None:
    """After a crash, a suspect of a key ran alone, and its followers went past it while it waited to run again."""
    done: list[bytes | None] = []
    failures = [ConnectionError("once"), ConnectionError("twice")]

    @app.consumer("orders", group="g", route="direct", ordering="key", attempts=3, backoff=0.05, concurrency=8)
    async def handle(message: Message) -> None:
        if message.body == b"0" and failures:
            raise failures.pop()
        done.append(message.body)

    async with app:
        await app.parts.broker.ensure([SourceSpec("orders")])
        await app.parts.broker.publish([Copy("orders", b"k", b"%d" % number) for number in range(6)])
        left_by_the_dead = Span("span", "orders", "g", 0, ("0", "1", "2"))
        await app.parts.attempts.turn(start=[left_by_the_dead])
        await until(app, asyncio.create_task(app.work()), "g")
    assert done == [b"0", b"1", b"2", b"3", b"4", b"5"]


@pytest.mark.parametrize(
    ("settings", "at_once"),
    [({"mode": "redeliver"}, 3), ({"route": "direct", "ordering": "key"}, 1)],
    ids=["plain", "key"],
)
async def test_what_waits_is_not_run_again_once_its_lane_is_lost(
    app: Redrive, tmp_path: Path, settings: dict[str, str], at_once: int
) -> None:
    """A worker that had slept past its lease went on retrying what another worker had long since dealt with."""
    runs: list[bytes | None] = []

    @app.consumer("orders", group="g", attempts=5, backoff=3.0, **settings)
    async def handle(message: Message) -> None:
        runs.append(message.body)
        raise ConnectionError("down")

    async with asyncio.timeout(SECONDS), app:
        await app.parts.broker.publish([Copy("orders", b"k", b"%d" % number) for number in range(3)])
        working = asyncio.create_task(app.work())
        while len(runs) < at_once:
            await asyncio.sleep(0.02)
        with sqlite3.connect(tmp_path / "broker.db", isolation_level=None, timeout=SECONDS) as thief:
            thief.execute(
                "UPDATE lanes SET owner = 999, generation = generation + 1, lease_until = lease_until + 1000000"
            )
        [worker] = app._workers
        while worker.due() is not None:
            await asyncio.sleep(0.02)
        app.stop()
        await working
    assert len(runs) == at_once


async def test_a_side_job_that_fails_ends_the_process_instead_of_the_letters(
    app: Redrive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drain of the spool had died in silence, and letters stayed there until the next restart."""

    @app.consumer("orders", group="g")
    async def handle(message: Message) -> None: ...

    async def drain() -> None:
        raise OSError("not what anybody expected")

    monkeypatch.setattr(app.office, "drain_spool", drain)
    async with asyncio.timeout(SECONDS), app:
        with pytest.raises(OSError, match="not what anybody expected"):
            await app.work()


async def test_a_worker_whose_settler_failed_ends_at_once(app: Redrive, injected: None) -> None:
    """It had waited out its grace time for settlements that nobody was left to make, and kept its lanes meanwhile."""
    faults.install("runtime.before_settle:1:raise")

    @app.consumer("orders", group="g", concurrency=2)
    async def handle(message: Message) -> None:
        await asyncio.sleep(0.01 * int(message.body or b"0"))

    async with asyncio.timeout(SECONDS), app:
        await app.parts.broker.publish([Copy("orders", None, b"%d" % number) for number in range(8)])
        with pytest.raises(faults.InjectedFault):
            await app.work()


class Narrow:
    """A destination that takes few rows at a time."""

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, list[Report]()

    async def send(self, report: Report) -> None:
        if len(report.outcomes) + len(report.recorded) + len(report.tallies) > self.most:
            raise ReportTooLarge("narrow", "too many rows")
        self.taken.append(report)


@pytest.mark.parametrize("number", [1, 2, 3, 400])
async def test_outcomes_that_do_not_fit_one_report_go_out_in_several(number: int) -> None:
    """All of them had been thrown away, and their letters stayed in replay until the quiet window."""
    narrow = Narrow(3)
    reporter = Reporter("r", "host", narrow.send, SystemClock())
    outcomes = [Outcome(f"L{one}", 1, True, 0) for one in range(number)]
    assert await reporter.send_outcomes(outcomes)
    arrived = [outcome.letter for report in narrow.taken for outcome in report.outcomes]
    assert sorted(arrived) == sorted(outcome.letter for outcome in outcomes)
    assert len({report.serial for report in narrow.taken}) == len(narrow.taken)


async def test_a_count_that_nothing_can_carry_does_not_keep_back_the_others() -> None:
    narrow = Narrow(0)
    reporter = Reporter("r", "host", narrow.send, SystemClock())
    for handler in ("a", "b", "c"):
        reporter.count("orders", "g", handler, "handled")
    await reporter.flush()
    narrow.most = 10
    reporter.count("orders", "g", "d", "handled")
    await reporter.flush()
    assert [tally.handler for report in narrow.taken for tally in report.tallies] == ["d"]


def keyed(place: int, reason: Reason) -> Letter:
    message = Message("b", "orders", 0, str(place), 1, b"k", b"%d" % place)
    return Letter(f"{place:032x}", message, "g", Kind.PERMANENT, reason, "E", "", 1, 1, 1, place=place)


async def test_the_audit_trail_says_where_a_letter_really_came_from(tmp_path: Path) -> None:
    """It had called every letter of a window pending, those that were held as well."""
    store = SqliteStore(str(tmp_path / "letters.db"))
    await store.open()
    letters: Sequence[Letter] = [keyed(0, Reason.PERMANENT), keyed(1, Reason.HELD)]
    await store.letters.file(letters, 1)
    job = await store.jobs.create([letters[0].id], Act("ann"), 2)
    await store.jobs.lease("me", 10.0, 3)
    sent = await store.jobs.advance(job.id, "me", 4)
    moves = [(row.letter, row.what) for row in reversed(await store.audit()) if row.letter]
    await store.close()
    assert [(one.id, one.state) for one in sent] == [(letter.id, State.REPLAYING) for letter in letters]
    assert moves == [(letters[0].id, "pending to replaying"), (letters[1].id, "held to replaying")]
