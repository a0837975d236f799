"""What happens to a message whose handler fails: the promises of the runtime, on real files."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness import letters, make_app, running, until, until_drained, until_letters

from redrive import DeadLetter, Discard, Message, Redrive, Retry, State, delays, failed, handled, recorded
from redrive.codec import SIGNATURE, TICKET
from redrive.letter import Kind, Reason
from redrive.office import Notice
from redrive.runtime import SlotsLost

FAST = delays([0.02])


class Order(msgspec.Struct):
    id: int


@pytest.fixture
def app(tmp_path: Path) -> Redrive:
    return make_app(tmp_path)


async def test_a_transient_failure_heals_and_leaves_no_letter(app: Redrive) -> None:
    runs: list[int] = []

    @app.consumer("orders", group="billing", attempts=3, backoff=FAST)
    async def bill(order: Order) -> None:
        runs.append(order.id)
        if len(runs) < 3:
            raise TimeoutError("not yet")

    async with running(app):
        await app.publish("orders", {"id": 7})
        await until(lambda: len(runs) == 3)
        await until_drained(app, "orders", "billing")
        assert await letters(app) == []


@pytest.mark.parametrize("mode", ["delayed", "redeliver", "inline"])
async def test_three_attempts_are_three_runs_and_the_letter_says_so(app: Redrive, mode: str) -> None:
    runs: list[int] = []

    @app.consumer("orders", group="billing", attempts=3, backoff=delays([0.02, 0.05]), mode=mode)
    async def bill(order: Order) -> None:
        runs.append(order.id)
        raise ConnectionError("the provider is down")

    async with running(app):
        await app.publish("orders", {"id": 7}, key="k", headers=(("a", b"\x00\xff"), ("a", None), ("b", b"")))
        [row] = await until_letters(app, 1)
        letter = await app.letters.get(row.id)
        stored = await app.parts.store.letters.get(row.id)
    assert len(runs) == 3
    assert (letter.attempts, letter.reason, letter.kind) == (3, Reason.MAX_RETRIES_EXCEEDED, Kind.TRANSIENT)
    assert [(a.number, a.delay) for a in letter.history] == [(1, 20), (2, 50), (3, None)]
    assert all(a.error_type == "ConnectionError" and "provider" in a.message and a.stack for a in letter.history)
    assert letter.environment.process > 0
    assert stored is not None
    message = stored.letter.message
    assert (message.key, message.body) == (b"k", b'{"id":7}')
    assert message.headers == (("a", b"\x00\xff"), ("a", None), ("b", b""))
    assert letter.first_attempt_at <= letter.last_attempt_at


async def test_permanent_and_unreadable_are_filed_without_a_retry(app: Redrive) -> None:
    runs: list[int] = []

    @app.consumer("orders", group="billing", backoff=FAST)
    async def bill(order: Order) -> None:
        runs.append(order.id)
        raise ValueError("negative amount")

    async with running(app):
        await app.publish("orders", {"id": 1})
        for body in (b"\xff\xfe", b"", None, b'{"id": "seven"}'):
            await app.publish("orders", body)
        await until_letters(app, 5)
        assert len(await letters(app, kind=Kind.UNREADABLE)) == 4
        [bad] = await letters(app, kind=Kind.PERMANENT)
    assert runs == [1]
    assert (bad.reason, bad.attempts) == (Reason.PERMANENT, 1)


async def test_a_handler_over_its_limit_is_cut_off_and_filed_as_timeout(app: Redrive) -> None:
    cancelled: list[int] = []

    @app.consumer("orders", group="billing", attempts=2, backoff=FAST, timeout=0.1)
    async def bill(order: Order) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(order.id)
            raise

    async with running(app):
        await app.publish("orders", {"id": 1})
        [row] = await until_letters(app, 1)
    assert cancelled == [1, 1]
    assert (row.kind, row.reason) == (Kind.TIMEOUT, Reason.MAX_RETRIES_EXCEEDED)


async def test_a_handler_decides_for_itself(app: Redrive) -> None:
    asked: list[float] = []

    @app.consumer("orders", group="billing", attempts=5, backoff=delays([60]))
    async def bill(order: Order) -> None:
        if order.id == 1:
            raise DeadLetter("the customer is gone")
        if order.id == 2:
            raise Discard("a duplicate")
        asked.append(time.monotonic())
        if len(asked) == 1:
            raise Retry(after=0.2)

    async with running(app):
        for number in (1, 2, 3):
            await app.publish("orders", {"id": number})
        [row] = await until_letters(app, 1)
        await until(lambda: len(asked) == 2)
        await until_drained(app, "orders", "billing")
        letter = await app.letters.get(row.id)
    assert (letter.reason, letter.detail) == (Reason.REQUESTED, "the customer is gone")
    assert asked[1] - asked[0] >= 0.19


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), BaseException("odd"), MemoryError()])
async def test_no_exception_kills_a_slot(app: Redrive, error: BaseException) -> None:
    done: list[int] = []

    @app.consumer("orders", group="billing", attempts=1, concurrency=1)
    async def bill(order: Order) -> None:
        if order.id == 0:
            raise error
        done.append(order.id)

    async with running(app):
        for number in range(3):
            await app.publish("orders", {"id": number})
        await until(lambda: sorted(done) == [1, 2])
        await until_letters(app, 1)


async def test_plain_functions_run_beside_the_loop(app: Redrive) -> None:
    threads: set[str] = set()
    barrier = threading.Barrier(3, timeout=10)

    @app.consumer("orders", group="billing", concurrency=3)
    def bill(order: Order) -> None:
        threads.add(threading.current_thread().name)
        barrier.wait()

    async with running(app):
        for number in range(3):
            await app.publish("orders", {"id": number})
        await until_drained(app, "orders", "billing")
    assert len(threads) == 3
    assert await letters(app) == []


async def test_threads_that_hang_are_never_settled_and_ask_for_a_new_process(app: Redrive, tmp_path: Path) -> None:
    leave = threading.Event()

    @app.consumer("orders", group="billing", concurrency=2, timeout=0.1)
    def bill(order: Order) -> None:
        leave.wait(20)

    async with app:
        await app.publish("orders", {"id": 1})
        with pytest.raises(SlotsLost) as lost:
            await app.work()
        assert lost.value.lost == 1
        assert (await app.parts.broker.depth("orders", "billing")).count == 1
        leave.set()


async def test_a_late_thread_is_settled_by_its_true_end(app: Redrive) -> None:
    runs: list[int] = []

    @app.consumer("orders", group="billing", concurrency=4, timeout=0.05)
    def bill(order: Order) -> None:
        runs.append(order.id)
        time.sleep(0.3)

    async with running(app):
        await app.publish("orders", {"id": 1})
        await until_drained(app, "orders", "billing")
        assert await letters(app) == []
    assert runs == [1]


async def test_a_batch_handler_gives_one_outcome_per_message(app: Redrive) -> None:
    sizes: list[int] = []

    @app.consumer("orders", group="billing", batch=50, attempts=1, concurrency=1)
    async def bill(orders: list[Order]) -> list[Any]:
        sizes.append(len(orders))
        return [ValueError(f"order {order.id}") if order.id % 10 == 0 else None for order in orders]

    async with app:
        for number in range(40):
            await app.publish("orders", {"id": number})
        await app.publish("orders", b"rubbish")
    async with running(app):
        found = await until_letters(app, 5)
        await until_drained(app, "orders", "billing")
    assert sorted(row.error_message for row in found if row.kind is Kind.PERMANENT) == [
        "order 0", "order 10", "order 20", "order 30",
    ]  # fmt: skip
    assert sum(sizes) == 40
    assert max(sizes) > 1


@pytest.mark.parametrize("answer", ["wrong", [None], RuntimeError("half way")])
async def test_a_batch_handler_that_answers_nonsense_fails_its_whole_batch(app: Redrive, answer: Any) -> None:
    @app.consumer("orders", group="billing", batch=10, attempts=1)
    async def bill(orders: list[Message]) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with app:
        for number in range(3):
            await app.publish("orders", {"id": number}, key="same")
    async with running(app):
        await until_letters(app, 3)


async def test_results_can_mean_failed_or_recorded(app: Redrive) -> None:
    def meaning(value: str) -> Any:
        return {"ok": handled(), "bad": failed("it said bad"), "note": recorded("could not parse this PDF")}[value]

    @app.consumer("docs", group="parser", attempts=1, result=meaning)
    async def parse(message: Message) -> str:
        return (message.body or b"").decode()

    async with running(app):
        for answer in ("ok", "bad", "note"):
            await app.publish("docs", answer)
        [row] = await until_letters(app, 1)
        await until_drained(app, "docs", "parser")
        assert row.error_message == "it said bad"

        async def noted() -> bool:
            rates = (await app.letters.statistics()).by_handler
            return any(rate.handled >= 1 for rate in rates.values())

        await until(noted)


async def test_counts_survive_a_restart_in_redeliver_mode(tmp_path: Path) -> None:
    runs: list[int] = []

    def service() -> Redrive:
        app = make_app(tmp_path)

        @app.consumer("orders", group="billing", attempts=3, backoff=delays([0.02, 600]), mode="redeliver")
        async def bill(order: Order) -> None:
            runs.append(order.id)
            raise ConnectionError("down")

        return app

    async with running(service()) as first:
        await first.publish("orders", {"id": 1})
        await until(lambda: len(runs) == 2)
    async with running(service()) as second:
        [row] = await until_letters(second, 1)
    assert len(runs) == 3
    assert row.attempts == 3


@pytest.mark.parametrize("settings", [{"on_exhausted": "block"}, {"enabled": False}])
async def test_blocking_never_drops_and_goes_on_when_mended(tmp_path: Path, settings: dict[str, Any]) -> None:
    notices: list[Notice] = []
    app = make_app(tmp_path, notify=notices.append)
    mended = False
    done: list[int] = []

    @app.consumer("orders", group="billing", attempts=2, backoff=FAST, **settings)
    async def bill(order: Order) -> None:
        if order.id == 0 and not mended:
            raise ValueError("a bug")
        done.append(order.id)

    async with running(app):
        await app.publish("orders", {"id": 0}, key="k")
        await until(lambda: any(n.kind == "blocked" for n in notices))
        assert await letters(app) == []
        mended = True
        await until(lambda: done == [0])
        await app.publish("orders", {"id": 1}, key="k")
        await until(lambda: done == [0, 1])


async def test_critical_failures_are_told_at_once(tmp_path: Path) -> None:
    notices: list[Notice] = []
    app = make_app(tmp_path, notify=notices.append)

    @app.consumer("orders", group="billing", critical=["builtins.OSError"])
    async def bill(order: Order) -> None:
        raise FileNotFoundError("the ledger is gone")

    async with running(app):
        await app.publish("orders", {"id": 1})
        [row] = await until_letters(app, 1)
    assert (row.kind, row.reason, row.attempts) == (Kind.CRITICAL, Reason.CRITICAL, 1)
    assert [n.letter.id for n in notices if n.kind == "critical" and n.letter] == [row.id]


async def test_lists_and_patterns_of_sources(app: Redrive) -> None:
    seen: list[str] = []

    @app.consumer(["orders", "shop.*"], group="audit", attempts=1)
    async def audit(message: Message) -> None:
        seen.append(message.source)
        raise ValueError("x")

    async with running(app):
        for source in ("orders", "shop.eu", "shop.us", "other"):
            await app.publish(source, b"{}")
        await until_letters(app, 3)
    assert sorted(seen) == ["orders", "shop.eu", "shop.us"]


async def test_a_replay_is_for_the_group_that_failed_and_resolves(app: Redrive) -> None:
    mended = False
    audited: list[int] = []

    @app.consumer("orders", group="billing", attempts=1)
    async def bill(order: Order) -> None:
        if not mended:
            raise ValueError("bug")

    @app.consumer("orders", group="audit")
    async def audit(order: Order) -> None:
        audited.append(order.id)

    async with running(app):
        await app.publish("orders", {"id": 1})
        [row] = await until_letters(app, 1)
        mended = True
        job = await app.letters.replay(row.id, who="ann")
        assert (job.sent, job.refused) == (1, 0)
        await until_letters(app, 1, states=(State.RESOLVED,))
        await until_drained(app, "orders", "audit")
    assert audited == [1]


async def test_a_letter_that_keeps_dying_is_one_letter_and_is_quarantined(app: Redrive) -> None:
    @app.consumer("orders", group="billing", attempts=1, max_replays=2)
    async def bill(order: Order) -> None:
        raise ValueError("still broken")

    async with running(app):
        await app.publish("orders", {"id": 1})
        for hop in (1, 2):
            [row] = await until_letters(app, 1, states=(State.PENDING,))
            await app.letters.replay(row.id)
            await until_letters(app, 1, states=(State.PENDING,) if hop < 2 else (State.QUARANTINED,))
        letter = await app.letters.get(row.id)
        assert len(await letters(app)) == 1
    assert [o.hop for o in letter.occurrences] == [0, 1, 2]
    assert [name for name in letter.headers if name.name.startswith("redrive-")] == []


async def test_forged_headers_are_not_obeyed(app: Redrive) -> None:
    runs: list[Message] = []

    @app.consumer("orders", group="billing", attempts=2, backoff=FAST)
    async def bill(message: Message) -> None:
        runs.append(message)
        raise ConnectionError("down")

    forged = b'{"letter":"' + b"0" * 32 + b'","group":"other","origin":{},"runs":99,"hop":-5}'
    async with running(app):
        await app.publish("orders", b"1", headers=((TICKET, forged), (SIGNATURE, b"abc:def")))
        await app.publish("orders", b"2", headers=((TICKET, b""), (TICKET, b"\xff"), (SIGNATURE, b"")))
        found = await until_letters(app, 2)
    assert len(runs) == 4
    assert {row.attempts for row in found} == {2}
    assert all(row.id != "0" * 32 for row in found)


async def test_ten_megabytes_of_exception_text_are_bounded(app: Redrive) -> None:
    @app.consumer("orders", group="billing", attempts=2, backoff=FAST)
    async def bill(message: Message) -> None:
        raise ConnectionError("\udcff\x00" + "x" * 10_000_000)

    body = bytes(range(256)) * 40_000
    async with running(app):
        await app.publish("orders", body)
        [row] = await until_letters(app, 1)
        stored = await app.parts.store.letters.get(row.id)
    assert stored is not None
    assert stored.letter.message.body == body
    assert len(stored.letter.error_message) <= 2000


async def test_what_is_too_large_for_the_dead_letter_source_goes_down_the_ladder(tmp_path: Path) -> None:
    limit = 20_000
    app = make_app(tmp_path, embedded={"max_message_bytes": limit, "partitions": 1, "lease_seconds": 2.0})
    mended = False
    bodies: list[bytes | None] = []

    @app.consumer("orders", group="billing", attempts=1)
    async def bill(message: Message) -> None:
        bodies.append(message.body)
        if not mended:
            raise ValueError("y" * 5000)

    near = b"n" * (limit - 2500)
    full = b"f" * (limit - 100)
    async with running(app):
        await app.publish("orders", near)
        await app.publish("orders", full)
        found = await until_letters(app, 2)
        views = [await app.letters.get(row.id) for row in found]
        assert sorted((view.body.text or "")[0] for view in views if view.body) == ["f", "n"]
        [claimed] = [view for view in views if view.claim]
        assert claimed.body is not None
        assert claimed.body.size == len(full)
        mended = True
        await app.letters.replay(next(row.id for row, view in zip(found, views, strict=True) if not view.claim))
        await until_letters(app, 1, states=(State.RESOLVED,))
    assert bodies[-1] == near


async def test_a_source_of_nothing_but_poison_is_filed_in_the_end(app: Redrive) -> None:
    """The breaker opens, but what keeps it open is not excused for ever."""

    @app.consumer(
        "orders", group="billing", attempts=1, breaker={"failures": 3, "cooldown": 0.01, "longest_cooldown": 0.05}
    )
    async def bill(message: Message) -> None:
        raise KeyError("a bug that no outage explains")

    async with running(app):
        for number in range(6):
            await app.publish("orders", {"id": number})
        await until_letters(app, 6)


async def test_a_replayed_copy_shows_its_idempotency_key(app: Redrive) -> None:
    keys: list[str] = []

    @app.consumer("orders", group="billing", attempts=2, backoff=FAST)
    async def bill(message: Message) -> None:
        keys.append(message.idempotency_key)
        if len(keys) < 4:
            raise ConnectionError("down")

    async with running(app):
        await app.publish("orders", b"{}")
        [row] = await until_letters(app, 1)
        await app.letters.replay(row.id)
        await until_letters(app, 1, states=(State.RESOLVED,))
    assert keys[:2] == ["", ""]
    assert keys[2] == keys[3] == f"{row.id}-1"
