"""Decides when a source must pause because its dependency is down. Pure: outcomes and times in, a state out."""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from msgspec import Struct

from redrive.clock import Millis
from redrive.errors import ConfigError
from redrive.letter import Kind

COUNTED = frozenset({Kind.TRANSIENT, Kind.TIMEOUT})
PROBES = 3
"""Runs that must go well, one after the other, before a breaker closes: one may be luck while most still fail."""


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class BreakerPolicy(Struct, frozen=True):
    """`failures` distinct messages failing, and at least `ratio` of the last `window` runs, open the breaker.

    A message that fails again and again counts once, by its last run. The open breaker lets one message at a time
    through after `cooldown` seconds, twice as long after each probe that fails, up to `longest_cooldown`.
    `dead_ratio` of the last `dead_window` messages becoming letters opens it too: that is a deploy gone wrong. Only
    the kinds in `counted` count: a bug in a message is no outage.
    """

    failures: int = 10
    window: int = 20
    ratio: float = 0.5
    cooldown: float = 1.0
    longest_cooldown: float = 60.0
    dead_ratio: float = 0.5
    dead_window: int = 100
    counted: frozenset[Kind] = COUNTED

    def __post_init__(self) -> None:
        if not 1 <= self.failures <= self.window:
            raise ConfigError(
                f"{self.failures} failures never fit a window of {self.window} runs",
                key="breaker.failures",
                fix="use 1 up to the window",
            )
        for name in ("ratio", "dead_ratio"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError("a ratio is a share", key=f"breaker.{name}", fix="use above 0, up to 1")


class Breaker:
    """One worker's breaker. Ask `state` before a run, tell it how the run ended.

    It promises that an outage costs at most `failures` messages a counted run: whatever fails while it is open is
    excused, and only runs that began as probes can close it.
    """

    def __init__(self, policy: BreakerPolicy) -> None:
        self._policy = policy
        self._recent: deque[str | None] = deque(maxlen=policy.window)
        self._ends: deque[bool] = deque(maxlen=policy.dead_window)
        self._opened_at: Millis | None = None
        self._cooldown = policy.cooldown
        self._passed = 0

    def state(self, now: Millis) -> BreakerState:
        if self._opened_at is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.probe_at else BreakerState.PROBING

    @property
    def probe_at(self) -> Millis:
        """When the next probe may run; meaningless while closed."""
        return (self._opened_at or 0) + round(self._cooldown * 1000)

    @property
    def is_open(self) -> bool:
        """Whether it is open or probing."""
        return self._opened_at is not None

    def succeeded(self, started: Millis) -> bool:
        """A run went well; True when that closes the breaker. One already under way when it opened does not."""
        if self._opened_at is None:
            self._recent.append(None)
            self._ends.append(False)
            return False
        if started < self.probe_at:
            return False
        self._passed += 1
        if self._passed < PROBES:
            return False
        self._recent.clear()
        self._ends.clear()
        self._opened_at, self._cooldown, self._passed = None, self._policy.cooldown, 0
        return True

    def failed(self, message: str, kind: Kind, now: Millis) -> bool:
        """A run failed; True when that opens the breaker, or keeps it open after a probe."""
        if kind not in self._policy.counted:
            return False
        if self.state(now) is BreakerState.PROBING:
            self._opened_at, self._passed = now, 0
            self._cooldown = min(self._cooldown * 2, self._policy.longest_cooldown)
            return True
        if self._opened_at is not None:
            return False
        if message in self._recent:
            self._recent.remove(message)
        self._recent.append(message)
        bad = len(self._recent) - self._recent.count(None)
        if bad >= self._policy.failures and bad >= self._policy.ratio * len(self._recent):
            self._opened_at = now
            return True
        return False

    def died(self, kind: Kind, now: Millis) -> bool:
        """A message became a letter; True when there are too many of them."""
        if kind not in self._policy.counted or self._opened_at is not None:
            return False
        self._ends.append(True)
        if len(self._ends) == self._policy.dead_window and sum(self._ends) >= self._policy.dead_ratio * len(self._ends):
            self._opened_at = now
            return True
        return False

    def excuses(self, kind: Kind) -> bool:
        """Whether a failure of this kind now is the outage's fault, so that it must not cost its message a run."""
        return self._opened_at is not None and kind in self._policy.counted
