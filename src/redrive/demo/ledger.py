"""The ledger: what handlers really did, written outside the system under test, one durable line at a time."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

BEGAN = "began"
HANDLED = "handled"


class Entry(Struct, frozen=True):
    """A run began, or ended: `outcome` is BEGAN, HANDLED, or the name of what was raised."""

    order: str
    run: int
    outcome: str
    pid: int
    at: float


_entries = msgspec.json.Decoder(Entry)


class Reader:
    """The ledger so far. Each call reads only what is new; a line still being written comes with the next one."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.entries: list[Entry] = []

    def refresh(self) -> list[Entry]:
        """Read on, and hand out what was new."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        new = [_entries.decode(line) for line in whole.splitlines()]
        self.entries += new
        return new


class Ledger:
    """A handler's pen. The processes of a demo share one file; O_APPEND keeps their lines whole."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._reader, self._runs = Reader(path), Counter[str]()
        self._lock = threading.Lock()

    @contextmanager
    def run(self, order: str) -> Iterator[int]:
        """Note that a run begins and how it ends; gives its number over all processes. Only a kill leaves no end."""
        run = self._next_run(order)
        self._write(order, run, BEGAN)
        try:
            yield run
        except BaseException as error:
            self._write(order, run, type(error).__name__)
            raise
        self._write(order, run, HANDLED)

    def _next_run(self, order: str) -> int:
        with self._lock:
            self._runs.update(entry.order for entry in self._reader.refresh() if entry.outcome == BEGAN)
            return self._runs[order] + 1

    def _write(self, order: str, run: int, outcome: str) -> None:
        line = msgspec.json.encode(Entry(order, run, outcome, os.getpid(), time.time()))
        os.write(self._file, line + b"\n")
        os.fsync(self._file)


def unfinished(entries: list[Entry], pid: int) -> list[Entry]:
    """The runs of this process that began and did not end."""
    ended = {(entry.order, entry.run) for entry in entries if entry.pid == pid and entry.outcome != BEGAN}
    own = [entry for entry in entries if entry.pid == pid and entry.outcome == BEGAN]
    return [entry for entry in own if (entry.order, entry.run) not in ended]
