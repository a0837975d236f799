"""What runs on this machine and who listens where, from /proc or, where there is none, from ps and lsof."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
LISTEN = "0A"
UNKNOWN = 0
"""Stands for a listener whose process we may not look at."""


@dataclass(frozen=True)
class Process:
    pid: int
    group: int
    born: str
    """Start time in the system's own words: a reused pid has another one."""


def processes() -> list[Process]:
    """Every living process; the dead that nobody has buried yet do not count."""
    return list(_from_proc() if PROC.joinpath("self/stat").exists() else _from_ps())


def _from_proc() -> Iterator[Process]:
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                # pid (name, which may hold anything) state ppid pgrp … starttime
                fields = folder.joinpath("stat").read_text().rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    yield Process(int(folder.name), int(fields[2]), fields[19])


def _from_ps() -> Iterator[Process]:
    listing = subprocess.run(["ps", "-axo", "pid=,pgid=,stat=,lstart="], capture_output=True, text=True, check=True)
    for line in listing.stdout.splitlines():
        pid, group, state, born = line.split(maxsplit=3)
        if not state.startswith("Z"):
            yield Process(int(pid), int(group), born.strip())


def born(pid: int) -> str | None:
    """When this process started, or None when it is gone."""
    return next((process.born for process in processes() if process.pid == pid), None)


def members(group: int) -> list[Process]:
    return [process for process in processes() if process.group == group]


def listeners(port: int) -> set[int]:
    """The processes that listen on this TCP port."""
    if PROC.joinpath("net/tcp").exists():
        return _listeners_from_proc(port)
    command = ["lsof", "-nP", "-t", f"-iTCP:{port}", "-sTCP:LISTEN"]
    listing = subprocess.run(command, check=False, capture_output=True, text=True)
    return {int(pid) for pid in listing.stdout.split()}


def _listeners_from_proc(port: int) -> set[int]:
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not sockets:
        return set()
    return {process.pid for process in processes() if sockets & _open_files(process.pid)} or {UNKNOWN}


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("net/tcp", "net/tcp6"):
        with suppress(OSError):
            for line in PROC.joinpath(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _open_files(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):
        for descriptor in PROC.joinpath(str(pid), "fd").iterdir():
            with suppress(OSError):
                found.add(os.readlink(descriptor))
    return found


def owns(group: int, port: int) -> bool:
    """Whether a process of this group listens on the port: a server's children count as the server."""
    listening = listeners(port)
    return any(process.pid in listening for process in members(group))


def signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def bury(pid: int) -> None:
    """Reap the process if it is a dead child of this one."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def wait_gone(group: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while members(group):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    bury(group)
    return True
