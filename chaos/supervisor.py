"""Starts the processes of the system under test, restarts those that die, and wakes those that were stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from chaos.history import OFFICE, SLEPT, WORKER, passes
from chaos.mutants import VARIABLE as BUG
from chaos.plan import STOP_SECONDS, Fault, Place
from redrive.faults import EXIT_CODE
from redrive.faults import VARIABLE as FAULTS

LOOK_SECONDS = 0.02
LEAVE_SECONDS = 5.0
MOST_STARTS = 8
TAIL_LINES = 12
_EXPECTED = {"kill": -signal.SIGKILL, "exit": EXIT_CODE, "raise": 1}


class Child:
    """One place in the system, filled by one process after another. The first `len(faults)` of them have faults."""

    def __init__(self, name: str, role: str, faults: Sequence[Sequence[Fault]]) -> None:
        self.name, self.role, self.faults = name, role, faults
        self.pids: list[int] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.stopped_at: float | None = None

    def due(self) -> Sequence[Fault]:
        """The faults of the process that lives now, or lived last."""
        number = len(self.pids) - 1
        return self.faults[number] if number < len(self.faults) else ()

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def kind(self) -> str:
        return WORKER if self.role == "worker" else OFFICE


class Supervisor:
    """Leaving the block kills whatever still lives. `interruptions` counts deaths and stops; `defects` are the rest."""

    def __init__(self, place: Place, bug: str = "") -> None:
        self._place, self._bug = place, bug
        self.children: list[Child] = []
        self.interruptions: Counter[str] = Counter()
        self.defects: list[str] = []
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Supervisor:
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._leave_alone()
        for child in self.children:
            if child.process is not None:
                child.process.kill()
                child.process.communicate()

    def start(self, name: str, role: str, faults: Sequence[Sequence[Fault]] = ()) -> Child:
        child = Child(name, role, faults)
        self.children.append(child)
        self._launch(child)
        return child

    def unreached(self) -> list[str]:
        """Faults of first starts whose point was not passed often enough, so that nothing is proven about them.

        What is started later may find no work left; that is no fault of the harness.
        """
        passed = passes(self._place.passes)
        return [
            f"{child.name}: {fault}"
            for child in self.children
            for fault in (child.faults[0] if child.faults else ())
            if passed[child.pids[0], fault.point] < fault.nth
        ]

    async def stop(self) -> None:
        """Ask all of them to end well; who does not is a defect. One that has hardly started may die of being asked."""
        self._leave_alone()
        await self._question_survivors()
        for child in self.children:
            if child.process is not None:
                child.process.send_signal(signal.SIGCONT)
                child.process.terminate()
        deadline = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < deadline and any(child.is_alive for child in self.children):
            await asyncio.sleep(LOOK_SECONDS)
        self.defects += [
            f"{child.name} did not stop cleanly ({child.process.poll()}): {self._tail(child)}"
            for child in self.children
            if child.process is not None and child.process.poll() not in (0, -signal.SIGTERM)
        ]

    async def _question_survivors(self) -> None:
        """Who lives on though a fault should have ended it says in its log what it is doing."""
        passed = passes(self._place.passes)
        hanging = [
            child
            for child in self.children
            if child.is_alive
            and any(f.action != "stop" and passed[child.pids[-1], f.point] >= f.nth for f in child.due())
        ]
        for child in hanging:
            assert child.process is not None
            child.process.send_signal(signal.SIGUSR1)
            self.defects.append(f"{child.name} outlived its fault; its log says what it was doing")
        await asyncio.sleep(0.3 if hanging else 0.0)

    def _leave_alone(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def _launch(self, child: Child) -> None:
        number = len(child.pids)
        faults = child.faults[number] if number < len(child.faults) else ()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("REDRIVE_")}
        extra = {FAULTS: ",".join(fault.spec for fault in faults), BUG: self._bug}
        with self._place.log(child.name).open("ab") as log:
            child.process = subprocess.Popen(
                [sys.executable, "-m", "chaos.service", child.role, str(self._place.home)],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**kept, **extra}, cwd=Path(__file__).parents[1],
            )  # fmt: skip
        child.pids.append(child.process.pid)
        child.stopped_at = None

    async def _watch(self) -> None:
        while True:
            for child in self.children:
                self._look_at(child)
            await asyncio.sleep(LOOK_SECONDS)

    def _look_at(self, child: Child) -> None:
        process = child.process
        if process is None:
            return
        code = process.poll()
        if code is not None:
            self._died(child, code)
        elif child.stopped_at is None and os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG) is not None:
            child.stopped_at = time.monotonic()
            self.interruptions.update([child.kind, *([SLEPT] if child.kind == WORKER else [])])
        elif child.stopped_at is not None and time.monotonic() - child.stopped_at > STOP_SECONDS:
            process.send_signal(signal.SIGCONT)
            child.stopped_at = None

    def _died(self, child: Child, code: int) -> None:
        assert child.process is not None
        child.process.communicate()
        self.interruptions[child.kind] += 1
        if code != -signal.SIGKILL and code not in {_EXPECTED.get(fault.action) for fault in child.due()}:
            self.defects.append(f"{child.name} ended with {code}: {self._tail(child)}")
        if len(child.pids) < MOST_STARTS:
            self._launch(child)
        else:
            child.process = None
            self.defects.append(f"{child.name} died {MOST_STARTS} times")

    def _tail(self, child: Child) -> str:
        text = self._place.log(child.name).read_text("utf-8", "replace")
        return "\n    ".join(["", *text.splitlines()[-TAIL_LINES:]])
