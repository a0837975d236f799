"""The demo's processes: started apart from the terminal, watched, and stopped by their ids on every path."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from redrive.demo.place import Place
from redrive.errors import RedriveError

STOP_SECONDS = 4.0
TAIL_LINES = 15
_NOTICE = re.compile(r" WARNING redrive\.office: \w+: (.*)")


class ChildDied(RedriveError):
    """A process of the demo ended that nobody had asked to."""

    def __init__(self, name: str, code: int, tail: str) -> None:
        self.name, self.code, self.tail = name, code, tail
        super().__init__(f"{name} ended with {_code(code)}; the end of its log:\n{tail or '(it is empty)'}")


class Child:
    """One process, its name and its log."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], place: Place) -> None:
        self.name, self.process, self.place = name, process, place
        self._seen = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def tail(self) -> str:
        text = log_of(self.place, self.name).read_text("utf-8", "replace")
        return "\n".join(f"    {line}" for line in text.splitlines()[-TAIL_LINES:])

    def notices(self) -> list[str]:
        """What its office told people since the last call."""
        with log_of(self.place, self.name).open("rb") as log:
            log.seek(self._seen)
            whole, newline, _ = log.read().rpartition(b"\n")
        self._seen += len(whole) + len(newline)
        return _NOTICE.findall(whole.decode("utf-8", "replace"))

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has buried it."""
        self.process.kill()
        self.process.communicate()


class Children:
    """The living processes of one demo. Leaving the block stops them all."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._living: list[Child] = []
        self._names: dict[int, str] = {}
        self._workers = 0

    def __enter__(self) -> Children:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start_office(self, port: int) -> Child:
        return self._start("office", "serve", "--port", str(port))

    def start_worker(self) -> Child:
        self._workers += 1
        return self._start(f"worker {self._workers}", "work", "redrive.demo.orders:app")

    def kill(self, child: Child) -> None:
        """The crash of the story: this one may die."""
        self._living.remove(child)
        child.kill()

    def bury(self) -> list[Child]:
        """Those that were killed from outside since the last call; they are not watched any more."""
        fallen = [child for child in self._living if (child.process.poll() or 0) == -signal.SIGKILL]
        self._living = [child for child in self._living if child not in fallen]
        return fallen

    def check(self) -> None:
        """Raise ChildDied when one of them has ended."""
        for child in self._living:
            code = child.process.poll()
            if code is not None:
                raise ChildDied(child.name, code, child.tail)

    def notices(self) -> list[tuple[str, str]]:
        return [(child.name, notice) for child in self._living for notice in child.notices()]

    def stop(self) -> list[Child]:
        """Ask all of them to end, kill those that do not, and say which did not end well."""
        leaving, self._living = self._living, []
        for child in leaving:
            child.process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        return [child for child in leaving if not _ended_well(child, deadline)]

    def name_of(self, pid: int) -> str:
        return self._names.get(pid, f"process {pid}")

    def _start(self, name: str, *command: str) -> Child:
        # A session of its own: Ctrl-C in the terminal reaches the demo alone, which then stops them in order.
        with log_of(self._place, name).open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and our own module
                [sys.executable, "-m", "redrive.demo.tether", *command, "--config", str(self._place.config)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(self._place),
                start_new_session=True,
            )
        child = Child(name, process, self._place)
        self._living.append(child)
        self._names[child.pid] = name
        return child


def log_of(place: Place, name: str) -> Path:
    return place.logs / f"{name.replace(' ', '-')}.log"


def child_environment(place: Place) -> dict[str, str]:
    """Ours, without what a shell may have set for another redrive."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("REDRIVE_")}
    return {**kept, "REDRIVE_CONFIG": str(place.config), "PYTHONUNBUFFERED": "1"}


def _ended_well(child: Child, deadline: float) -> bool:
    try:
        child.process.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        child.kill()
        return False
    child.process.communicate()
    # One that had not yet come to listen for SIGTERM dies of it.
    return child.process.returncode in (0, -signal.SIGTERM)


def _code(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
