"""Decides what happens after a failed run. Pure: a failure, a count and a time in, a decision out."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from random import Random
from typing import Literal

from msgspec import Struct

from redrive.clock import Millis
from redrive.errors import ConfigError
from redrive.letter import Failure, Kind, Reason

DEFAULT_ATTEMPTS = 3
LONGEST_DELAY = 10.0**9
"""Seconds. Beyond this a date no longer fits where dates are kept."""
_GIVE_UP = {
    Kind.PERMANENT: Reason.PERMANENT,
    Kind.CRITICAL: Reason.CRITICAL,
    Kind.UNREADABLE: Reason.UNREADABLE,
    Kind.CRASH: Reason.CRASH,
}


class Mode(StrEnum):
    """How a message waits for its next run."""

    DELAYED = "delayed"
    REDELIVER = "redeliver"
    INLINE = "inline"


class Backoff(Struct, frozen=True):
    """The wait, in seconds, after failed run n (counted from 1)."""

    shape: Literal["constant", "linear", "exponential", "list"]
    base: float = 1.0
    factor: float = 2.0
    cap: float | None = None
    delays: tuple[float, ...] = ()
    jitter: float = 0.0

    def delay(self, run: int, rng: Random | None = None) -> float:
        """The delay after this failed run; jitter shortens it by at most that share, so a cap stays a cap."""
        whole = self._whole(run)
        whole = min(whole, LONGEST_DELAY if self.cap is None else self.cap)
        return whole * (1 - self.jitter * rng.random()) if rng and self.jitter else whole

    def _whole(self, run: int) -> float:
        match self.shape:
            case "constant":
                return self.base
            case "linear":
                return self.base * run
            case "list":
                return self.delays[min(run, len(self.delays)) - 1]
            case "exponential":
                return self._power(run - 1)

    def _power(self, exponent: int) -> float:
        try:
            return self.base * float(self.factor) ** exponent
        except OverflowError:
            return LONGEST_DELAY if self.base else 0.0

    def longest(self, runs: int) -> float:
        """The longest delay of so many runs: of a list any may be, of the other shapes the first or the last."""
        last = max(runs - 1, 1)
        tried = range(1, min(last, len(self.delays)) + 1) if self.shape == "list" else (1, last)
        return max(self.delay(run) for run in tried)


def constant(seconds: float, *, jitter: float = 0.0) -> Backoff:
    return _checked(Backoff("constant", base=seconds, jitter=jitter))


def linear(seconds: float, *, cap: float | None = None, jitter: float = 0.0) -> Backoff:
    return _checked(Backoff("linear", base=seconds, cap=cap, jitter=jitter))


def exponential(seconds: float, *, factor: float = 2.0, cap: float | None = None, jitter: float = 0.0) -> Backoff:
    return _checked(Backoff("exponential", base=seconds, factor=factor, cap=cap, jitter=jitter))


def delays(seconds: Sequence[float], *, jitter: float = 0.0) -> Backoff:
    """An explicit list; its last entry repeats."""
    return _checked(Backoff("list", delays=tuple(seconds), jitter=jitter))


def _checked(backoff: Backoff) -> Backoff:
    numbers = [backoff.base, backoff.factor, backoff.cap or 0.0, *backoff.delays]
    if not all(0 <= n < LONGEST_DELAY for n in numbers):
        raise ConfigError("delays must be finite and not negative", key="backoff", fix="use seconds of 0 or more")
    if backoff.shape == "list" and not backoff.delays:
        raise ConfigError("the list of delays is empty", key="backoff", fix="give at least one delay, e.g. [1, 2, 4]")
    if not 0 <= backoff.jitter <= 1:
        raise ConfigError("jitter is a share of the delay", key="backoff.jitter", fix="use 0 to 1")
    return backoff


class Policy(Struct, frozen=True):
    """How often and how long to try. `attempts` counts runs, the first included; `budget` is in seconds."""

    attempts: int = DEFAULT_ATTEMPTS
    backoff: Backoff = Backoff("exponential", base=1.0, cap=60.0)
    budget: float | None = None

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(
                f"{self.attempts} attempts would run nothing",
                key="attempts",
                fix="1 runs once and never retries",
            )
        if self.budget is not None and not self.budget > 0:
            raise ConfigError(
                "the time budget is not positive", key="budget", fix="give seconds above 0, or leave it out"
            )


class RetryAt(Struct, frozen=True):
    when: Millis
    delay: Millis


class GiveUp(Struct, frozen=True):
    reason: Reason


def decide(
    policy: Policy, failure: Failure, run: int, now: Millis, first_at: Millis, rng: Random | None = None
) -> RetryAt | GiveUp:
    """After failed run number `run` (1 is the first): when to run again, or why not."""
    if failure.requested:
        return GiveUp(Reason.REQUESTED)
    if failure.kind in _GIVE_UP:
        return GiveUp(_GIVE_UP[failure.kind])
    if run >= policy.attempts:
        return GiveUp(Reason.MAX_RETRIES_EXCEEDED)
    asked = failure.retry_after
    wait = policy.backoff.delay(run, rng) if asked is None else min(max(asked, 0.0), LONGEST_DELAY)
    delay = round(wait * 1000)
    if policy.budget is not None and now + delay - first_at > policy.budget * 1000:
        return GiveUp(Reason.TIME_BUDGET_EXCEEDED)
    return RetryAt(now + delay, delay)
