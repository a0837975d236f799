"""What is known about one run, from outside the system under test: the evidence that `chaos.check` judges."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct, field

from redrive.letter import Kind, Reason, State

BEGAN = "began"
HANDLED = "handled"
WORKER, OFFICE, STORE, SLEPT = "worker", "office", "store", "slept"


class Sent(Struct, frozen=True):
    """One message as its producer remembers it. `runs` is how many runs one life of it may take.

    A message that is not `mortal` must never die; one that is `mended` must be handled in the end.
    """

    id: str
    source: str
    key: bytes | None
    sha: str
    runs: int = 1
    seq: int = 0
    mortal: bool = False
    mended: bool = True


class Run(Struct, frozen=True):
    """One line of the ledger: a run began, was handled, or raised the error `outcome` names."""

    id: str
    run: int
    outcome: str
    pid: int
    at: float
    sha: str = ""
    seq: int = 0


class Found(Struct, frozen=True):
    """A letter as the store has it after the run, its body fetched from wherever it lies."""

    id: str
    message: str
    state: State
    sha: str
    kind: Kind = Kind.TRANSIENT
    reason: Reason = Reason.MAX_RETRIES_EXCEEDED
    occurrences: int = 1


class Published(Struct, frozen=True):
    """A replayed copy, read from its topic by a consumer group of our own."""

    letter: str
    message: str
    hop: int
    key: str
    sha: str


class Move(Struct, frozen=True):
    """One change of a letter's state, as the audit trail tells it."""

    letter: str
    before: str
    after: str


class History(Struct, frozen=True, kw_only=True):
    """A whole run. `interruptions` counts kills, exits, errors and stops by role, and outages of the store.

    Workers that slept past their lease are in it a second time: until such a one hears that it has lost its lanes, it
    goes on with what it has.

    `unsettled` is what had not come to an end when the lab lost its patience.
    """

    sent: list[Sent]
    runs: list[Run] = field(default_factory=list)
    letters: list[Found] = field(default_factory=list)
    copies: list[Published] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    interruptions: dict[str, int] = field(default_factory=dict)
    in_flight: int = 0
    window: int = 0
    ordered: frozenset[str] = frozenset()
    unsettled: dict[str, int] = field(default_factory=dict)
    defects: list[str] = field(default_factory=list)
    broken_audit: int | None = None


_line = msgspec.json.Decoder(Run)


class Reader:
    """The ledger so far. Each call reads only what is new; a line still being written comes with the next one."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.runs: list[Run] = []

    def refresh(self) -> list[Run]:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        new = [_line.decode(line) for line in whole.splitlines()]
        self.runs += new
        return new


class Ledger:
    """A handler's pen. All processes append to one file; the order of its lines is the order of the effects."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._reader, self._runs = Reader(path), Counter[str]()
        self._lock, self._written = threading.Lock(), 0

    @contextmanager
    def run(self, message: str, sha: str) -> Iterator[int]:
        """Note that a run begins and how it ends; gives its number over all processes. Only a kill leaves no end."""
        with self._lock:
            self._runs.update(line.id for line in self._reader.refresh() if line.outcome == BEGAN)
            run = self._runs[message] + 1
        self._write(message, run, BEGAN, sha)
        try:
            yield run
        except BaseException as error:
            self._write(message, run, type(error).__name__, sha)
            raise
        self._write(message, run, HANDLED, sha)

    def _write(self, message: str, run: int, outcome: str, sha: str) -> None:
        self._written += 1
        line = msgspec.json.encode(Run(message, run, outcome, os.getpid(), time.time(), sha, self._written))
        os.write(self._file, line + b"\n")
        os.fsync(self._file)


class Witness:
    """Every pass of every fault point, one line each, written before the fault acts."""

    def __init__(self, path: Path) -> None:
        self._path, self._pen = path, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, name: str) -> None:
        os.write(self._pen, f"{os.getpid()} {name}\n".encode())


def passes(path: Path) -> Counter[tuple[int, str]]:
    """How often each process passed each point."""
    lines = path.read_text().splitlines() if path.exists() else []
    return Counter((int(pid), name) for pid, _, name in (line.partition(" ") for line in lines))
