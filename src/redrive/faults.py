"""Named places where a test may make this process fail. Costs one comparison while `REDRIVE_FAULTS` is unset.

A spec is `name:nth:action`, several separated by commas: at the nth pass of `name`, do `exit`, `kill`, `stop`,
`raise` or `sleep` (for `sleep=seconds`). `name:*:action` acts at every pass.
"""

from __future__ import annotations

import os
import signal
import time

from redrive.errors import ConfigError, RedriveError

VARIABLE = "REDRIVE_FAULTS"
EXIT_CODE = 86

POINTS = (
    "runtime.after_receive",
    "runtime.before_handler",
    "runtime.after_handler",
    "runtime.before_settle",
    "runtime.after_settle",
    "runtime.after_outcome",
    "office.before_file",
    "office.after_file",
    "office.after_spool",
    "office.after_blob",
    "collector.after_receive",
    "collector.after_store",
    "collector.after_settle",
    "replayer.after_lease",
    "replayer.after_advance",
    "replayer.after_publish",
    "replayer.after_close",
    "spool.after_drain",
)


class InjectedFault(RedriveError):
    """Raised on purpose by a fault point."""


class _Fault:
    def __init__(self, nth: int | None, action: str) -> None:
        self.nth, self.action, self.passed = nth, action, 0

    def passing(self) -> bool:
        self.passed += 1
        return self.nth is None or self.passed == self.nth


def parse(spec: str) -> dict[str, _Fault]:
    """The faults this spec asks for; a name nobody passes, or an action nobody knows, is refused."""
    found: dict[str, _Fault] = {}
    for part in filter(None, (one.strip() for one in spec.split(","))):
        name, _, rest = part.partition(":")
        nth, _, action = rest.partition(":")
        if name not in POINTS or not (nth == "*" or nth.isdecimal()) or action.partition("=")[0] not in _ACTIONS:
            raise ConfigError(
                f"cannot read {part!r}",
                key=VARIABLE,
                fix=f"write name:nth:action; names: {', '.join(POINTS)}; actions: {', '.join(_ACTIONS)}",
            )
        found[name] = _Fault(None if nth == "*" else int(nth), action)
    return found


def _exit(_: str) -> None:
    os._exit(EXIT_CODE)


def _kill(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(_: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(name: str) -> None:
    raise InjectedFault(f"fault injected at {name}")


_ACTIONS = {"exit": _exit, "kill": _kill, "stop": _stop, "raise": _raise, "sleep": None}
_faults = parse(os.environ.get(VARIABLE, ""))


def install(spec: str) -> None:
    """Set the faults of this process, for tests that run inside it."""
    global _faults  # noqa: PLW0603 - one set of faults a process is what they are
    _faults = parse(spec)


def point(name: str) -> None:
    """Pass this point; nothing happens unless a fault waits here."""
    if not _faults:
        return
    fault = _faults.get(name)
    if fault is None or not fault.passing():
        return
    action, _, value = fault.action.partition("=")
    act = _ACTIONS[action]
    if act is None:
        time.sleep(float(value or 1))
    else:
        act(name)
