"""An outage does not become a flood: the breaker, told as data, as ten simulated minutes, and on a real broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
from flood import LANE, Flood, Memory, number_of
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


@given(policies(), st.integers(0, 60), st.lists(st.floats(0.001, 20), min_size=60, max_size=200), st.integers(1, 3))
def test_an_outage_costs_at_most_the_window(
    policy: BreakerPolicy, healthy: int, gaps: list[float], attempts: int
) -> None:
    """Whatever came before it, however slow its failures come and however often each message runs."""
    breaker, now = Breaker(policy), START
    for _ in range(healthy):
        breaker.succeeded(now)
    counted: dict[str, int] = {}
    letters = 0
    for number, gap in enumerate(gaps):
        now += round(gap * 1000)
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


@given(policies(), st.lists(st.tuples(st.booleans(), st.floats(0, 100), st.floats(0, 100)), max_size=120))
def test_only_a_run_that_began_as_a_probe_closes_it(
    policy: BreakerPolicy, runs: list[tuple[bool, float, float]]
) -> None:
    breaker, now = opened(policy), START
    for went_well, age, pause in runs:
        now += round(pause * 1000)
        started = now - round(age * 1000)
        before = breaker.probe_at
        if went_well and breaker.succeeded(started):
            assert started >= before
            return
        if not went_well:
            breaker.failed("probe", Kind.TIMEOUT, now)
            assert breaker.probe_at - now <= max(policy.longest_cooldown, policy.cooldown) * 1000 + 1
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
    """601,000 real runs of the real runtime; the messages are made one by one by a broker that stores nothing."""
    shop = Shop(rate=1000, total=601_000, attempts=1)
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
