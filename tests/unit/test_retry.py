from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.classify import failure_of, kind_of
from redrive.errors import ConfigError, DeadLetter, HandlerTimeout, PayloadUnreadable, Retry
from redrive.letter import Failure, Kind, Reason
from redrive.retry import (
    LONGEST_DELAY,
    Backoff,
    GiveUp,
    Policy,
    RetryAt,
    constant,
    decide,
    delays,
    exponential,
    linear,
)

NOW = 1_700_000_000_000
FLAKY = Failure(Kind.TRANSIENT, "TimeoutError")


def decided(policy: Policy, error: BaseException, run: int) -> RetryAt | GiveUp:
    return decide(policy, failure_of(error), run, NOW, NOW)


# The counting table


@pytest.mark.parametrize(
    ("backoff", "waits"),
    [
        (constant(2), [2, 2, 2, 2]),
        (linear(1), [1, 2, 3, 4]),
        (linear(1, cap=2), [1, 2, 2, 2]),
        (delays([1, 2, 4]), [1, 2, 4, 4, 4]),
        (exponential(5, factor=2, cap=300), [5, 10, 20, 40, 80, 160, 300, 300]),
        (exponential(1), [1, 2, 4, 8]),
        (exponential(1, factor=1), [1, 1, 1]),
        (exponential(0), [0, 0, 0]),
    ],
)
def test_delay_n_follows_failed_run_n(backoff: Backoff, waits: list[float]) -> None:
    assert [backoff.delay(run) for run in range(1, len(waits) + 1)] == waits


@pytest.mark.parametrize("attempts", [1, 2, 3, 5])
def test_attempts_counts_runs_and_the_first_is_one_of_them(attempts: int) -> None:
    policy = Policy(attempts, constant(1))
    decisions = [decide(policy, FLAKY, run, NOW, NOW) for run in range(1, attempts + 1)]
    assert decisions == [RetryAt(NOW + 1000, 1000)] * (attempts - 1) + [GiveUp(Reason.MAX_RETRIES_EXCEEDED)]


@pytest.mark.parametrize(
    ("error", "run", "retried"),
    [(TimeoutError(), 1, True), (ValueError(), 1, False), (TimeoutError(), 5, False), (TimeoutError(), 4, True)],
)
def test_should_retry_at_five_attempts(error: BaseException, run: int, retried: bool) -> None:
    decision = decide(Policy(attempts=5), Failure(kind_of(error), "x"), run, NOW, NOW)
    assert isinstance(decision, RetryAt) is retried


def test_a_run_beyond_the_last_is_never_retried() -> None:
    assert decide(Policy(3), FLAKY, 99, NOW, NOW) == GiveUp(Reason.MAX_RETRIES_EXCEEDED)


@pytest.mark.parametrize("attempts", [0, -1])
def test_no_attempts_at_all_are_refused(attempts: int) -> None:
    with pytest.raises(ConfigError) as caught:
        Policy(attempts)
    assert caught.value.key == "attempts"


# Why not


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no such currency"), Reason.PERMANENT),
        (MemoryError(), Reason.CRITICAL),
        (PayloadUnreadable("not JSON"), Reason.UNREADABLE),
        (DeadLetter("fraud"), Reason.REQUESTED),
    ],
)
def test_what_no_retry_can_help_is_given_up_at_once(error: BaseException, reason: Reason) -> None:
    assert decided(Policy(attempts=10), error, 1) == GiveUp(reason)


def test_a_handler_over_its_time_is_retried() -> None:
    assert isinstance(decided(Policy(attempts=2), HandlerTimeout("bill", 1.0), 1), RetryAt)


# The budget


def test_a_retry_that_would_end_after_the_budget_is_not_made() -> None:
    policy = Policy(attempts=100, backoff=constant(10), budget=30)
    assert decide(policy, FLAKY, 2, NOW + 20_000, NOW) == RetryAt(NOW + 30_000, 10_000)
    assert decide(policy, FLAKY, 3, NOW + 20_001, NOW) == GiveUp(Reason.TIME_BUDGET_EXCEEDED)


def test_the_budget_also_bounds_what_a_handler_asks_for() -> None:
    decision = decided(Policy(budget=30), Retry(after=31), 1)
    assert decision == GiveUp(Reason.TIME_BUDGET_EXCEEDED)


@pytest.mark.parametrize("budget", [0, -1, float("nan")])
def test_a_budget_that_allows_nothing_is_refused(budget: float) -> None:
    with pytest.raises(ConfigError):
        Policy(budget=budget)


# What a handler asks for


@pytest.mark.parametrize(("after", "delay"), [(7, 7000), (0, 0), (-3, 0), (0.25, 250)])
def test_a_handler_may_choose_its_own_delay(after: float, delay: int) -> None:
    assert decided(Policy(backoff=constant(1)), Retry(after=after), 1) == RetryAt(NOW + delay, delay)


@pytest.mark.parametrize("after", [float("nan"), float("inf"), 10**400, "soon", None, object()])
def test_a_delay_that_is_no_number_falls_back_to_the_policy(after: object) -> None:
    error = Retry(after=after)  # type: ignore[arg-type]
    assert decided(Policy(backoff=constant(1)), error, 1) == RetryAt(NOW + 1000, 1000)


def test_a_delay_of_a_million_years_still_makes_a_date() -> None:
    decision = decided(Policy(), Retry(after=1e300), 1)
    assert decision == RetryAt(NOW + int(LONGEST_DELAY) * 1000, int(LONGEST_DELAY) * 1000)


def test_asking_for_a_retry_does_not_buy_more_runs() -> None:
    assert decided(Policy(attempts=3), Retry(after=1), 3) == GiveUp(Reason.MAX_RETRIES_EXCEEDED)


# Jitter and bad numbers


@given(st.floats(0, 1), st.integers(0, 2**32), st.integers(1, 50))
def test_jitter_only_shortens_and_never_by_more_than_its_share(jitter: float, seed: int, run: int) -> None:
    backoff = exponential(1, cap=60, jitter=jitter)
    whole, shaken = backoff.delay(run), backoff.delay(run, Random(seed))
    assert whole * (1 - jitter) - 1e-9 <= shaken <= whole


def test_jitter_spreads_retries_out() -> None:
    rng = Random(1)
    assert len({constant(10, jitter=0.5).delay(1, rng) for _ in range(50)}) == 50


@given(
    st.sampled_from(["linear", "exponential", "constant"]),
    st.floats(0, 1e8),
    st.floats(0, 1e8),
    st.integers(1, 10**6),
)
def test_no_backoff_overflows(shape: str, base: float, factor: float, run: int) -> None:
    backoff = Backoff(shape, base=base, factor=factor)  # type: ignore[arg-type]
    assert 0 <= backoff.delay(run) <= LONGEST_DELAY


def test_the_longest_wait_between_runs_is_known_beforehand() -> None:
    assert exponential(1, cap=60).longest(5) == 8
    assert delays([9, 1]).longest(3) == 9
    assert exponential(8, factor=0.5).longest(5) == linear(2).longest(5) == 8
    assert delays([1, 9]).longest(2) == 1
    assert delays([1, 9]).longest(2**31) == constant(9).longest(2**31) == 9  # at once, however many runs


@pytest.mark.parametrize(
    "make",
    [
        lambda: constant(-1),
        lambda: linear(float("nan")),
        lambda: exponential(float("inf")),
        lambda: exponential(1, cap=-1),
        lambda: delays([]),
        lambda: delays([1, -1]),
        lambda: constant(1, jitter=1.1),
        lambda: constant(1, jitter=-0.1),
    ],
)
def test_a_backoff_that_cannot_work_is_refused(make: object) -> None:
    with pytest.raises(ConfigError) as caught:
        make()  # type: ignore[operator]
    assert caught.value.key.startswith("backoff")
