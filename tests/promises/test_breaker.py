"""An outage does not become a flood: the breaker, told as data, as ten simulated minutes, and on a real broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
from flood import Flood, Memory, number_of
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from redrive import ConfigError, Message, Redrive, State
from redrive.attempts.base import Span
from redrive.breaker import COUNTED, PROBES, Breaker, BreakerPolicy, BreakerState
from redrive.letter import Kind
from redrive.office import Notice
from redrive.testing import JumpingClock, office

START = 1_700_000_000_000
MINUTES = 60.0
POLICY = BreakerPolicy()

# ---- the decision, as data


def opened(policy: BreakerPolicy = POLICY, now: int = START) -> Breaker:
    breaker = Breaker(policy)
    for number in range(policy.window):
        breaker.failed(str(number), Kind.TRANSIENT, now)
    assert breaker.state(now) is BreakerState.OPEN
    return breaker


@given(
    st.lists(st.tuples(st.sampled_from(sorted(set(Kind) - COUNTED)), st.booleans()), max_size=300),
    st.booleans(),
)
def test_bad_messages_never_open_it(ends: list[tuple[Kind, bool]], dies: bool) -> None:
    breaker = Breaker(POLICY)
    for number, (kind, is_same) in enumerate(ends):
        assert not breaker.failed("same" if is_same else str(number), kind, START + number)
        assert not (dies and breaker.died(kind, START + number))
        assert not breaker.excuses(kind)
    assert breaker.state(START + 10**9) is BreakerState.CLOSED


@st.composite
def policies(draw: st.DrawFn) -> BreakerPolicy:
    window = draw(st.integers(1, 30))
    return BreakerPolicy(
        failures=draw(st.integers(1, window)), window=window, ratio=draw(st.floats(0.01, 1)),
        dead_ratio=draw(st.floats(0.01, 1)), dead_window=draw(st.integers(1, 40)),
        cooldown=draw(st.floats(0.1, 5)), longest_cooldown=draw(st.floats(5, 100)),
    )  # fmt: skip


@given(policies(), st.integers(0, 60), st.lists(st.integers(1, 20_000), min_size=60, max_size=120), st.integers(1, 3))
def test_an_outage_costs_at_most_the_window(
    policy: BreakerPolicy, healthy: int, gaps: list[int], attempts: int
) -> None:
    """Whatever came before it, however slow its failures come and however often each message runs."""
    breaker, now = Breaker(policy), START
    for _ in range(healthy):
        breaker.succeeded(now)
    counted: dict[str, int] = {}
    letters = 0
    for number, gap in enumerate(gaps):
        now += gap
        if breaker.state(now) is BreakerState.OPEN:
            continue
        message = str(number // attempts)
        excused = breaker.excuses(Kind.TRANSIENT)
        breaker.failed(message, Kind.TRANSIENT, now)
        if not excused:
            counted[message] = counted.get(message, 0) + 1
            if counted[message] == attempts:
                letters += 1
                breaker.died(Kind.TRANSIENT, now)
    assert letters <= policy.window
    assert len(counted) <= policy.window


@given(policies(), st.lists(st.tuples(st.sampled_from("oops"), st.booleans(), st.integers(0, 9000)), max_size=120))
def test_only_runs_that_began_as_probes_close_it(policy: BreakerPolicy, runs: list[tuple[str, bool, int]]) -> None:
    breaker, now, passed = opened(policy), START, 0
    for what, is_old, pause in runs:
        now += pause
        if what == "s":
            breaker.failed("probe", Kind.TIMEOUT, now)
            passed = 0
            assert breaker.probe_at - now <= max(policy.longest_cooldown, policy.cooldown) * 1000 + 1
            continue
        if not is_old:
            now, passed = max(now, breaker.probe_at), passed + 1
        assert breaker.succeeded(breaker.probe_at - 1 if is_old else now) == (passed == PROBES)
        if passed == PROBES:
            return
    assert breaker.is_open


def test_one_lucky_probe_does_not_close_it() -> None:
    breaker, now = opened(), START + 1000
    assert [breaker.succeeded(now) for _ in range(PROBES)] == [False] * (PROBES - 1) + [True]
    breaker = opened()
    assert not breaker.succeeded(now)
    assert breaker.failed("x", Kind.TRANSIENT, now)
    assert breaker.state(now + 1999) is BreakerState.OPEN
    assert breaker.state(now + 2000) is BreakerState.PROBING
    assert [breaker.succeeded(now + 2000) for _ in range(PROBES)] == [False] * (PROBES - 1) + [True]


def test_a_message_that_fails_again_and_again_counts_once() -> None:
    """Else the tries of seven messages fill the window, and ten distinct ones are never seen in it."""
    breaker = Breaker(POLICY)
    told = [breaker.failed(str(run // 3), Kind.TRANSIENT, START) for run in range(30)]
    assert told.index(True) == 27
    breaker = Breaker(POLICY)
    assert not any(breaker.failed("the only one", Kind.TIMEOUT, START) for _ in range(1000))


def test_cooldowns_double_up_to_the_longest() -> None:
    breaker, waits, now = opened(), [], START
    for _ in range(9):
        waits.append((breaker.probe_at - now) / 1000)
        now = breaker.probe_at
        breaker.failed("probe", Kind.TRANSIENT, now)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


@pytest.mark.parametrize("given_", [{"failures": 21}, {"failures": 0}, {"ratio": 0}, {"dead_ratio": 1.1}])
def test_what_could_never_open_is_refused(given_: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BreakerPolicy(**given_)


# ---- ten minutes on a simulated clock


class Shop:
    """A worker over a flood of orders, and the dependency its handler needs."""

    def __init__(self, *, rate: int, total: int, suspects: int = 0, batch: int | None = None, **settings: Any) -> None:
        self.clock = JumpingClock(START)
        self.notices: list[Notice] = []
        self.app = Redrive("embedded://:memory:", clock=self.clock, notify=self.notices.append)
        self.flood = Flood(self.clock, rate=rate, total=total)
        left = [Span("dead", "orders", "billing", 0, tuple(map(str, range(suspects))))] if suspects else []
        self.attempts = Memory(left)
        self.app.parts = replace(self.app.parts, broker=self.flood, attempts=self.attempts)
        self.handled = bytearray(total)
        self.runs = 0
        self.fails: Callable[[int], BaseException | None] = lambda number: None
        handler = self.bill_many if batch else self.bill
        self.app.consumer("orders", group="billing", name="bill", batch=batch, **settings)(handler)

    async def bill(self, message: Message) -> None:
        self.run([number_of(message)])

    async def bill_many(self, messages: list[Message]) -> None:
        self.run([number_of(message) for message in messages])

    def run(self, numbers: list[int]) -> None:
        self.runs += 1
        for number in numbers:
            if (error := self.fails(number)) is not None:
                raise error
        for number in numbers:
            self.handled[number] += 1

    def goes_down(self) -> None:
        self.fails = lambda number: ConnectionError("the bank is away")

    def comes_back(self) -> None:
        self.fails = lambda number: None

    @property
    def letters(self) -> int:
        return len(self.flood.buried)

    def told(self, kind: str) -> int:
        return sum(notice.kind == kind for notice in self.notices)

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        async with self.app:
            work = asyncio.create_task(self.app.work())
            try:
                yield
            finally:
                self.app.stop()
                await work

    async def until(self, when: float | Callable[[], bool], *, limit: float = 3600.0) -> None:
        """Let the clock jump from one thing due to the next: to this second after the start, or until this is so."""
        end = self.flood.began + round((limit if callable(when) else when) * 1000)
        while not (callable(when) and when()):
            await asyncio.sleep(0)
            now = self.clock.now()
            dues = [due for due in (self.app.due(), self.flood.due()) if due is not None]
            due = now if self.clock.in_transit else max(min(dues, default=end), now)
            if due > end or (due == end == now):
                assert not callable(when), f"not within {limit} simulated seconds"
                self.clock.jump(end)
                return
            if due > now:
                self.clock.jump(due)


async def ten_minutes_of_outage(shop: Shop) -> int:
    """Healthy for a second, away for ten minutes, then back until everything is settled; the runs of the outage."""
    async with shop.at_work():
        await shop.until(1)
        shop.goes_down()
        before = shop.runs
        await shop.until(1 + 10 * MINUTES)
        during = shop.runs - before
        assert shop.flood.unsettled > shop.flood.total * 0.99
        assert (shop.told("breaker_open"), shop.told("breaker_closed")) == (1, 0)
        shop.comes_back()
        await shop.until(lambda: shop.flood.unsettled == 0)
    assert shop.told("breaker_closed") == 1
    return during


def every_message_ended_once(shop: Shop) -> None:
    dead = {int(copy.body or b"") for copy in shop.flood.buried}
    assert len(dead) == shop.letters
    assert shop.handled == bytearray(number not in dead for number in range(shop.flood.total))


async def test_ten_minutes_at_a_thousand_a_second_leave_at_most_a_window_of_letters() -> None:
    """601,000 messages through the real runtime, made as they are asked for by a broker that stores nothing.

    In batches of a hundred, which is three times as fast; one by one it is told below, at a lower rate.
    """
    shop = Shop(rate=1000, total=601_000, attempts=1, batch=100)
    runs = await ten_minutes_of_outage(shop)
    assert 0 < shop.letters <= POLICY.failures <= POLICY.window
    assert runs < 100
    every_message_ended_once(shop)


@pytest.mark.parametrize("mode", ["delayed", "redeliver", "inline"])
@pytest.mark.parametrize(
    ("attempts", "batch", "concurrency"), [(1, None, 16), (3, None, 1), (3, None, 16), (1, 100, 4), (3, 100, 4)]
)
async def test_the_same_in_every_mode(mode: str, attempts: int, batch: int | None, concurrency: int) -> None:
    shop = Shop(rate=10, total=6_010, attempts=attempts, batch=batch, concurrency=concurrency, mode=mode, backoff=1)
    runs = await ten_minutes_of_outage(shop)
    assert shop.letters <= POLICY.failures
    assert runs < 100
    every_message_ended_once(shop)


async def test_a_thousand_invalid_events_are_a_thousand_letters() -> None:
    shop = Shop(rate=1000, total=1000, attempts=3)
    shop.fails = lambda number: ValueError("no such currency")
    async with shop.at_work():
        await shop.until(lambda: shop.flood.unsettled == 0)
    assert shop.letters == shop.runs == 1000
    assert shop.told("breaker_open") == 0


async def test_invalid_events_are_filed_even_while_the_dependency_is_away() -> None:
    shop = Shop(rate=10, total=6_000, attempts=1)
    down = ConnectionError("the bank is away")
    shop.fails = lambda number: ValueError("invalid") if number % 5 == 0 else down
    async with shop.at_work():
        await shop.until(10 * MINUTES)
        assert 0 < shop.letters < 6_000 / 5 + POLICY.window
        shop.fails = lambda number: ValueError("invalid") if number % 5 == 0 else None
        await shop.until(lambda: shop.flood.unsettled == 0)
    assert 6_000 / 5 <= shop.letters <= 6_000 / 5 + POLICY.window
    every_message_ended_once(shop)


async def test_a_deploy_gone_wrong_pauses_the_source_and_says_so() -> None:
    """Six of ten messages die of an error nobody classified. A minute of it would be 36,000 letters."""
    shop, chance = Shop(rate=1000, total=60_000, attempts=1), Random(4)
    broken = [chance.random() < 0.6 for _ in range(60_000)]
    shop.fails = lambda number: AttributeError("'NoneType' has no attribute 'price'") if broken[number] else None
    async with shop.at_work():
        await shop.until(MINUTES)
        assert shop.told("breaker_open") >= 1
        assert "bill pauses: AttributeError: 'NoneType' has no attribute 'price'" in shop.notices[0].text
        assert shop.letters <= POLICY.window * shop.told("breaker_open") < 200
        assert shop.flood.unsettled > 59_000
        shop.comes_back()
        await shop.until(lambda: shop.flood.unsettled == 0)
    every_message_ended_once(shop)


async def test_too_many_letters_pause_a_source_whose_failures_never_come_in_a_row() -> None:
    shop, chance = (
        Shop(rate=100, total=6_000, attempts=1, breaker={"failures": 20, "window": 20, "ratio": 1.0}),
        Random(4),
    )
    broken = [chance.random() < 0.6 for _ in range(6_000)]
    shop.fails = lambda number: KeyError("price") if broken[number] else None
    async with shop.at_work():
        await shop.until(lambda: shop.told("breaker_open") > 0)
        assert "too many messages become letters" in shop.notices[0].text
        assert shop.letters <= POLICY.dead_window


async def test_a_healthy_source_with_some_failures_is_never_paused() -> None:
    shop, chance = Shop(rate=1000, total=30_000, attempts=2, backoff=1), Random(4)
    slow = {number for number in range(30_000) if chance.random() < 0.05}

    def fails_once(number: int) -> BaseException | None:
        if number not in slow:
            return None
        slow.discard(number)
        return TimeoutError("slow today")

    shop.fails = fails_once
    async with shop.at_work():
        await shop.until(lambda: shop.flood.unsettled == 0)
    assert shop.told("breaker_open") == shop.letters == 0
    assert shop.runs > 31_000
    assert not slow
    every_message_ended_once(shop)


async def test_one_message_that_spoils_its_batch_is_the_only_one_to_pay() -> None:
    shop = Shop(rate=10**6, total=1_000, attempts=1, batch=100)
    shop.fails = lambda number: RuntimeError("cannot be parsed") if number == 555 else None
    async with shop.at_work():
        await shop.until(lambda: shop.flood.unsettled == 0)
    assert [copy.body for copy in shop.flood.buried] == [b"555"]
    assert shop.told("breaker_open") == 0
    every_message_ended_once(shop)


async def test_a_message_that_always_fails_does_not_keep_the_source_closed() -> None:
    """Probes go round: after an outage the next one is another message, and the culprit is judged when it is over."""
    shop = Shop(rate=10, total=600, attempts=2, concurrency=1, backoff=1)
    async with shop.at_work():
        shop.goes_down()
        await shop.until(20)
        shop.fails = lambda number: TimeoutError("for ever") if number in shop.poison else None
        shop.poison = {int(next(iter(shop.flood.out)))}
        await shop.until(lambda: shop.flood.unsettled == 0)
    assert {int(copy.body or b"") for copy in shop.flood.buried} == shop.poison
    every_message_ended_once(shop)


async def test_a_slow_run_from_before_the_outage_neither_ends_it_nor_lets_a_second_probe_in() -> None:
    shop = Shop(rate=100, total=2_000, attempts=1, timeout=None)
    first, probe, probes = asyncio.Event(), asyncio.Event(), []
    plain = shop.app.consumers[0].handler

    async def bill(message: Message) -> None:
        if number_of(message) == 0:
            await first.wait()
        elif shop.told("breaker_open") and not probe.is_set():
            probes.append(number_of(message))
            await probe.wait()
        await plain.call(message)

    shop.app.consumers[0] = replace(shop.app.consumers[0], handler=replace(plain, call=bill))
    shop.fails = lambda number: ConnectionError("away") if number else None
    async with shop.at_work():
        while not probes:
            await asyncio.sleep(0)
            shop.clock.jump(shop.clock.now() + 10)
        first.set()
        while not shop.handled[0]:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(probes) == 1
        assert shop.told("breaker_closed") == 0
        probe.set()
        await shop.until(5 * MINUTES)
        assert shop.letters <= POLICY.window
        shop.comes_back()
        await shop.until(lambda: shop.flood.unsettled == 0)
    every_message_ended_once(shop)


async def test_suspects_of_a_crash_wait_for_the_outage_too() -> None:
    shop = Shop(rate=10, total=6_000, attempts=1, suspects=200)
    async with shop.at_work():
        shop.goes_down()
        await shop.until(10 * MINUTES)
        assert shop.letters <= POLICY.window
        assert shop.runs < 100
        shop.comes_back()
        await shop.until(lambda: shop.flood.unsettled == 0)
    every_message_ended_once(shop)


async def test_stopping_while_it_is_open_is_quick_and_loses_nothing() -> None:
    shop = Shop(rate=10, total=800, attempts=3, backoff=1)
    async with shop.app:
        async with shop.at_work():
            shop.goes_down()
            await shop.until(MINUTES)
            begun = time.monotonic()
        assert time.monotonic() - begun < 5
        assert shop.told("breaker_open") == 1
        assert shop.attempts.spans == {}
        assert shop.letters == shop.flood.acked == 0
        shop.comes_back()
        async with shop.at_work():
            await shop.until(lambda: shop.flood.unsettled == 0)
    every_message_ended_once(shop)


# ---- the same on the embedded broker


@pytest.mark.parametrize("mode", ["delayed", "redeliver", "inline"])
@pytest.mark.parametrize(("attempts", "batch"), [(1, None), (3, None), (1, 50), (3, 50)])
async def test_an_outage_on_a_real_broker(mode: str, attempts: int, batch: int | None) -> None:
    app, is_down, handled = Redrive("embedded://:memory:"), True, []

    async def bill(message: Message) -> None:
        bill_many([message])

    def bill_many(messages: list[Message]) -> None:
        if is_down:
            raise ConnectionError("the bank is away")
        handled.extend(number_of(message) for message in messages)

    declare = app.consumer("orders", group="billing", attempts=attempts, mode=mode, batch=batch, backoff=[1, 2])
    declare(bill_many if batch else bill)
    async with office(app) as shop:
        await shop.publish("orders", *range(300))
        await shop.later(10 * MINUTES)
        assert not handled
        is_down = False
        await shop.settled()
        letters = await shop.letters()
        assert len(letters) <= POLICY.failures
        assert sorted([*handled, *(int(letter.body.text or "") for letter in letters if letter.body)]) == list(
            range(300)
        )
        assert [notice.kind for notice in shop.notices] == ["breaker_open", "breaker_closed"]


async def test_order_by_key_outlives_an_outage() -> None:
    """Ten keys pay with a letter each; what follows in those keys waits behind it, and every other key goes on."""
    app = Redrive("embedded://:memory:", store="sqlite://:memory:")
    is_down, handled = True, []

    @app.consumer("orders", group="billing", attempts=1, ordering="key", route="direct", max_replays=9)
    async def bill(message: Message) -> None:
        if is_down:
            raise ConnectionError("the bank is away")
        handled.append(((message.key or b"").decode(), number_of(message)))

    async with office(app, partitions=2) as shop:
        for number in range(10):
            for key in range(30):
                await shop.publish("orders", number, key=f"k{key}")
        await shop.later(10 * MINUTES)
        dead = await shop.letters(states=(State.PENDING,))
        assert len(dead) <= POLICY.failures
        is_down = False
        await shop.settled()
        assert len(handled) == (30 - len(dead)) * 10
        assert len(await shop.letters(states=(State.HELD,))) == len(dead) * 9
        for letter in dead:
            await shop.replay(letter)
        await shop.settled()
        assert {letter.state for letter in await shop.letters()} == {"resolved"}
    for key in range(30):
        assert [number for name, number in handled if name == f"k{key}"] == list(range(10))
