"""The users' test kit: their own app in memory, hours in no time, and a clear word about what does not settle."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from redrive import ConfigError, Discard, Message, Redrive, Retry, exponential, failed, recorded
from redrive.clock import SystemClock
from redrive.errors import HandlerTimeout, PayloadUnreadable
from redrive.runtime import SlotsLost
from redrive.testing import JumpingClock, TestOffice, Unsettled, office

Offices = Callable[..., AbstractAsyncContextManager[TestOffice]]
HOUR = 3600.0


class Order(msgspec.Struct):
    id: int
    card: str = "fine"


class Bank:
    """What a handler depends on: says no to some cards, or is away."""

    def __init__(self) -> None:
        self.declines, self.is_down = True, False

    def charge(self, card: str) -> None:
        if self.is_down:
            raise ConnectionError("the bank is away")
        if card == "declined" and self.declines:
            raise ValueError("declined")


BANK = Bank()
APP = Redrive("embedded://./nobody-writes-here/broker.db", signing_keys=["ab" * 32])


@APP.consumer("orders", group="billing", attempts=5, backoff=exponential(HOUR), timeout=HOUR)
async def bill(order: Order) -> None:
    BANK.charge(order.card)


@APP.consumer("orders", group="mail", attempts=1)
def send_receipt(order: Order) -> None:
    assert threading.current_thread() is not threading.main_thread()


@pytest.fixture(autouse=True)
def bank() -> Bank:
    BANK.declines, BANK.is_down = True, False
    return BANK


def fresh() -> Redrive:
    return Redrive("embedded://:memory:")


async def test_a_declined_card_becomes_a_letter_and_is_resolved_by_a_replay(
    redrive_office: Offices, bank: Bank
) -> None:
    async with redrive_office(APP) as shop:
        await shop.publish("orders", {"id": 1, "card": "declined"}, {"id": 2})
        assert shop.runs("bill") == 0
        await shop.settled()
        [letter] = await shop.letters("orders")
        assert (letter.reason, letter.state, letter.group) == ("permanent", "pending", "billing")
        assert (shop.runs("bill"), shop.runs("send_receipt")) == (2, 2)
        bank.declines = False
        await shop.replay(letter)
        await shop.settled()
        assert (await shop.letter(letter.id)).state == "resolved"
        assert (shop.runs("bill"), shop.runs("send_receipt")) == (3, 2)


async def test_the_app_is_as_it_was_afterwards_and_nothing_was_written(redrive_office: Offices) -> None:
    before = dict(vars(APP))
    with pytest.raises(ZeroDivisionError):
        await _fails_half_way(redrive_office)
    assert vars(APP) == before
    assert isinstance(APP.clock, SystemClock)
    assert not Path("nobody-writes-here").exists()


async def _fails_half_way(redrive_office: Offices) -> None:
    async with redrive_office(APP) as shop:
        assert APP.config.broker == "embedded://:memory:"
        assert APP.config.store == "sqlite://:memory:"
        await shop.publish("orders", {"id": 1})
        await shop.settled()
        raise ZeroDivisionError


def test_one_app_serves_many_loops_one_after_the_other() -> None:
    async def story() -> int:
        async with office(APP) as shop:
            await shop.publish("orders", {"id": 1})
            await shop.settled()
            return shop.runs("bill")

    assert [asyncio.run(story()) for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("mode", ["delayed", "redeliver", "inline"])
@pytest.mark.parametrize("batch", [None, 10])
async def test_hours_of_back_off_take_no_time_in_any_mode(mode: str, batch: int | None) -> None:
    app = Redrive("embedded://:memory:", embedded={"lease_seconds": 1e6})

    async def one(message: Message) -> None:
        raise ConnectionError("down")

    def many(messages: list[Message]) -> None:
        raise ConnectionError("down")

    app.consumer("orders", group="g", attempts=4, backoff=exponential(HOUR), mode=mode, batch=batch)(
        many if batch else one
    )

    begun = time.monotonic()
    async with office(app) as shop:
        await shop.publish("orders", b"1", b"2", b"3")
        started = shop.clock.now()
        await shop.settled()
        assert shop.clock.now() - started == 7 * HOUR * 1000
        found = await shop.letters()
        assert [(letter.body.text, letter.attempts) for letter in found if letter.body] == [
            ("1", 4),
            ("2", 4),
            ("3", 4),
        ]
        assert [run.at - started for run in shop.failures][-1] == 7 * HOUR * 1000
    assert time.monotonic() - begun < 5


async def test_a_dependency_that_comes_back_heals_everything(redrive_office: Offices, bank: Bank) -> None:
    async with redrive_office(APP) as shop:
        bank.is_down = True
        await shop.publish("orders", {"id": 1})
        await shop.later(HOUR - 1)
        assert shop.runs("bill") == 1
        await shop.later(1)
        assert shop.runs("bill") == 2
        bank.is_down = False
        await shop.settled()
        assert shop.runs("bill") == 3
        assert await shop.letters() == []
        assert [type(run.error) for run in shop.failures] == [ConnectionError] * 2


async def test_order_by_key_holds_and_releases_what_follows_a_dead_message() -> None:
    app, done, broken = Redrive("embedded://:memory:", store="sqlite://:memory:"), [], {"2"}

    @app.consumer("orders", group="g", attempts=2, backoff=60, ordering="key", route="direct")
    async def take(message: Message) -> None:
        number = (message.body or b"").decode()
        if number in broken:
            raise ConnectionError(number)
        done.append(number)

    async with office(app) as shop:
        await shop.publish("orders", *"12345", key="a")
        await shop.publish("orders", *"678", key="b")
        await shop.settled()
        assert [one for one in done if one < "6"] == ["1"]
        assert [letter.state for letter in await shop.letters()] == ["pending", "held", "held", "held"]
        broken.clear()
        await shop.replay((await shop.letters(states=("pending",)))[0])
        await shop.settled()
        assert [one for one in done if one < "6"] == list("12345")
        assert {letter.state for letter in await shop.letters()} == {"resolved"}


async def test_batches_come_as_they_were_published_and_each_message_has_its_own_end() -> None:
    app, sizes = fresh(), []

    @app.consumer("orders", group="g", batch=50, attempts=1)
    async def take(orders: list[Order]) -> list[Any]:
        sizes.append(len(orders))
        return [failed("odd") if order.id % 2 else None for order in orders]

    async with office(app) as shop:
        await shop.publish("orders", *({"id": number} for number in range(20)))
        await shop.settled()
        assert sizes == [20]
        assert shop.runs("take") == 1
        assert len(shop.failures) == len(await shop.letters()) == 10
        assert [run.messages[0].position for run in shop.failures] == [str(number) for number in range(1, 20, 2)]


async def test_a_hanging_handler_is_cut_in_real_time_and_filed_as_a_timeout() -> None:
    app = fresh()

    @app.consumer("orders", group="g", attempts=2, backoff=HOUR, timeout=300)
    async def hang(message: Message) -> None:
        await asyncio.Event().wait()

    async with office(app, handler_seconds=0.1) as shop:
        await shop.publish("orders", b"")
        await shop.settled()
        [letter] = await shop.letters()
        assert (letter.kind, letter.attempts) == ("timeout", 2)
        assert [type(run.error) for run in shop.failures] == [HandlerTimeout] * 2


async def test_time_stands_still_while_a_handler_runs() -> None:
    app = fresh()
    seen: list[int] = []

    @app.consumer("slow", group="g")
    async def slow(message: Message) -> None:
        before = app.clock.now()
        await asyncio.sleep(0.1)
        seen.append(app.clock.now() - before)

    @app.consumer("fails", group="g", attempts=3, backoff=1)
    async def fails(message: Message) -> None:
        raise ConnectionError

    async with office(app) as shop:
        await shop.publish("fails", b"")
        await shop.publish("slow", b"")
        await shop.settled()
    assert seen == [0]


async def test_a_thread_that_hangs_says_so_instead_of_waiting() -> None:
    app, leave = fresh(), threading.Event()

    @app.consumer("orders", group="g", concurrency=1)
    def hang(message: Message) -> None:
        leave.wait(20)

    async def story() -> None:
        async with office(app, handler_seconds=0.1) as shop:
            await shop.publish("orders", b"")
            try:
                await shop.settled()
            finally:
                leave.set()

    with pytest.raises(SlotsLost):
        await story()


async def test_what_never_settles_ends_with_a_word_about_what_waits() -> None:
    app = fresh()

    @app.consumer("orders", group="g", name="block", attempts=1, on_exhausted="block")
    async def block(message: Message) -> None:
        raise ConnectionError("for ever")

    async with office(app) as shop:
        await shop.publish("orders", b"1", b"2")
        with pytest.raises(Unsettled, match=r"20 jumps.*block has 2 message\(s\) left.*ConnectionError: for ever") as e:
            await shop.settled(jumps=20)
        assert e.value.left == {"block": 2}


async def test_an_endless_retry_and_an_endless_outage_end_too() -> None:
    app = Redrive("embedded://:memory:")

    @app.consumer("polls", group="g", attempts=10**6)
    async def poll(message: Message) -> None:
        raise Retry(after=HOUR)

    @app.consumer("orders", group="g", attempts=1)
    async def out(message: Message) -> None:
        raise ConnectionError

    async with office(app) as shop:
        await shop.publish("polls", b"")
        with pytest.raises(Unsettled) as endless:
            await shop.settled(jumps=30)
        assert endless.value.left == {poll.__qualname__: 1}
        await shop.publish("orders", *range(40))
        with pytest.raises(Unsettled):
            await shop.settled(jumps=50)
        assert "breaker_open" in {notice.kind for notice in shop.notices}
        assert len(await shop.letters("orders")) <= 20


async def test_a_handler_that_waits_for_ever_without_a_limit_is_named_after_some_patience() -> None:
    app = fresh()

    @app.consumer("orders", group="g", timeout=1)
    async def forget(message: Message) -> None:
        await asyncio.Event().wait()

    async with office(app, patience=0.2, handler_seconds=60) as shop:
        await shop.publish("orders", b"")
        with pytest.raises(Unsettled, match=r"nothing has happened for 0\.2 real seconds: .*forget has 1 message"):
            await shop.settled()


async def test_everything_a_handler_may_answer_is_seen() -> None:
    heard: list[str] = []
    app = Redrive("embedded://:memory:", notify=lambda notice: heard.append(notice.kind), service="shop")

    @app.consumer("orders", group="g", attempts=1, critical=[PermissionError])
    async def take(order: Order) -> Any:
        if order.id == 1:
            raise Discard("a duplicate")
        if order.id == 2:
            return failed("it said no")
        if order.id == 3:
            return recorded("a small thing")
        if order.id == 4:
            raise PermissionError
        return None

    async with office(app) as shop:
        await shop.publish("orders", b"rubbish", *({"id": number} for number in range(5)))
        await shop.settled()
        reasons = [letter.reason for letter in await shop.letters()]
        assert reasons == ["unreadable", "max_retries_exceeded", "critical"]
        assert [type(run.error).__name__ for run in shop.failures] == [
            "PayloadUnreadable", "Discard", "ReportedFailure", "PermissionError",
        ]  # fmt: skip
        assert isinstance(shop.failures[0].error, PayloadUnreadable)
        assert heard == [notice.kind for notice in shop.notices] == ["critical"]
        assert shop.runs("take") == 5
        statistics = await app.letters.statistics()
        assert statistics.by_handler[take.__qualname__].handled == 1


async def test_handlers_reach_the_same_memory_through_their_app() -> None:
    app, got = fresh(), []

    @app.consumer("orders", group="g")
    async def forward(message: Message) -> None:
        await app.publish("shipments", message.body)

    @app.consumer("shipments", group="g")
    async def ship(message: Message) -> None:
        got.append(message.body)

    async with office(app) as shop:
        await app.publish("orders", "straight")
        await shop.publish("orders", "later")
        await shop.settled()
    assert sorted(got) == [b"later", b"straight"]


async def test_code_with_its_own_loop_is_run_over_its_waits() -> None:
    app = Redrive("embedded://:memory:", defaults={"attempts": 3, "backoff": [HOUR]})
    runs: list[int] = []

    async def handler(message: Message) -> None:
        runs.append(app.clock.now())
        raise ConnectionError

    async with office(app) as shop:
        assert await shop.run(app.execute_with_retry(b"body", handler, source="orders")) is False
        [letter] = await shop.letters("orders")
        assert letter.attempts == 3
    assert [later - sooner for sooner, later in pairwise(runs)] == [HOUR * 1000] * 2


async def test_what_production_would_refuse_is_refused_here_too() -> None:
    app = fresh()

    @app.consumer("orders", group="g", mode="inline", backoff=HOUR)
    async def take(message: Message) -> None: ...

    with pytest.raises(ConfigError, match="outlasts the broker's lease"):
        async with office(app):
            pass


async def test_mistakes_in_a_test_are_named(redrive_office: Offices) -> None:
    async with redrive_office(APP) as shop:
        with pytest.raises(ConfigError, match="there are: bill, send_receipt"):
            shop.runs("bil")
        with pytest.raises(ConfigError, match="already"):
            async with office(APP):
                pass
        await shop.publish("*", b"")
        with pytest.raises(ConfigError, match="did not take it"):
            await shop.settled()


async def test_the_same_story_twice_is_the_same_story() -> None:
    async def story() -> list[tuple[str, int]]:
        app = fresh()

        @app.consumer("orders", group="g", attempts=4, backoff=exponential(60, jitter=0.5))
        async def take(message: Message) -> None:
            raise ConnectionError

        async with office(app, start=1_700_000_000_000) as shop:
            await shop.publish("orders", *range(8))
            await shop.settled()
            return [(run.messages[0].position, run.at) for run in shop.failures]

    assert await story() == await story()


async def test_the_clock_ends_a_wait_by_time_or_by_event() -> None:
    clock, event = JumpingClock(1000), asyncio.Event()
    assert await clock.wait(event, 0) is False
    waits = [asyncio.create_task(clock.wait(event, seconds)) for seconds in (1, 10)]
    await asyncio.sleep(0)
    assert clock.wakes(waits[1]) == 11_000
    clock.jump(2000)
    assert clock.in_transit
    assert await waits[0] is False
    clock.jump(0)
    assert clock.now() == 2000
    event.set()
    assert await waits[1] is True
    assert not clock.in_transit
    assert await clock.wait(event, 5) is True


def test_a_run_of_pytest_that_does_not_use_it_pays_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text(
        "import sys\ndef test_nothing():\n    assert not {'redrive.app', 'redrive.testing'} & set(sys.modules)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:hypothesispytest", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout


def test_production_does_not_import_pytest() -> None:
    code = "import sys, redrive.app, redrive.testing; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
