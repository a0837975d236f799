"""What a server is, and one that runs: as a process of ours, or somewhere else by its URL."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab import process
from lab.errors import NotOurs, PortTaken, StartFailed
from lab.install import Step, install

TRIES = 3
"""Another process can take a free port before our server does; then we try other ports."""


@dataclass(frozen=True)
class Place:
    """Where one server lives: its data folder and its ports. The first port is the one clients use."""

    data: Path
    ports: tuple[int, ...]

    @property
    def port(self) -> int:
        return self.ports[0]


@dataclass(frozen=True)
class Image:
    """The same server for Docker; `{port}` in a value becomes the port on this machine."""

    name: str
    port: int
    env: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Server:
    """How a server is had, started and asked whether it is up."""

    name: str
    url: str
    """With `{port}` in it."""
    command: Callable[[Place], list[str]]
    ready: Callable[[int], bool]
    """Asks the server itself, at its first port; any OSError means not yet."""
    install: tuple[Step, ...] = ()
    prepare: Callable[[Place], None] = lambda place: None
    """Runs once, before the first start, in an empty data folder."""
    ports: int = 1
    patience: float = 30
    image: Image | None = None

    def is_ready(self, port: int) -> bool:
        try:
            return self.ready(port)
        except OSError:
            return False


class Running(ABC):
    """A server that is up at `url`."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url

    @abstractmethod
    def stop(self) -> None:
        """End it in order; stopping what is stopped changes nothing."""

    @abstractmethod
    def kill(self) -> None:
        """End it as a crash would: nothing is flushed, no farewell is said."""

    @abstractmethod
    def pause(self) -> None:
        """Freeze it: connections stay open and nothing answers."""

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def restart(self) -> None:
        """Bring it up again, stopped or not, with its data and on its port."""


class External(Running):
    """Somebody else's server, given by URL. It is not ours to end."""

    def stop(self) -> None:
        """Leave it as it was found."""

    def kill(self) -> None:
        raise NotOurs(self.name)

    def pause(self) -> None:
        raise NotOurs(self.name)

    def resume(self) -> None:
        raise NotOurs(self.name)

    def restart(self) -> None:
        raise NotOurs(self.name)


class Native(Running):
    """A server that is a process group of ours. Its state is a file, so that every test process can hold it."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self.folder = folder
        super().__init__(server.name, server.url.format(port=self.port))

    @classmethod
    def start(cls, server: Server, folder: Path) -> Native:
        """Install what is missing and start the server on free ports, in a new data folder."""
        install(server.install)
        for last in (False,) * (TRIES - 1) + (True,):
            place = Place(folder / "data", free_ports(server.ports))
            shutil.rmtree(place.data, ignore_errors=True)
            place.data.mkdir(parents=True)
            server.prepare(place)
            try:
                launch(server, folder, place)
            except PortTaken:
                if last:
                    raise
            else:
                break
        return cls(server, folder)

    @property
    def pid(self) -> int:
        """The first process; its process group has the same number."""
        return int(read_state(self.folder)["pid"])

    @property
    def ports(self) -> tuple[int, ...]:
        return tuple(read_state(self.folder)["ports"])

    @property
    def port(self) -> int:
        return self.ports[0]

    @property
    def place(self) -> Place:
        return Place(self.folder / "data", self.ports)

    @property
    def alive(self) -> bool:
        """Whether the process we started still runs; another one with its number does not count."""
        born = process.born(self.pid)
        return born is not None and born == read_state(self.folder)["born"]

    def stop(self) -> None:
        self._signal(signal.SIGTERM, signal.SIGCONT)
        if not self._gone(10):
            self.kill()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        if not self._gone(10):
            raise StartFailed(self.name, "outlived SIGKILL", tail(self.folder))

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def restart(self) -> None:
        self.stop()
        launch(self.server, self.folder, self.place)

    def _signal(self, *numbers: int) -> None:
        if self._ours():
            for number in numbers:
                process.signal_group(self.pid, number)

    def _gone(self, seconds: float) -> bool:
        return not self._ours() or process.wait_gone(self.pid, seconds)

    def _ours(self) -> bool:
        """Whether the group is still the one we started: a group keeps its number while any member lives."""
        first = process.born(self.pid)
        return first in (None, read_state(self.folder)["born"])


def launch(server: Server, folder: Path, place: Place) -> None:
    """Start the process and return once it answers on a port that it owns; leave nothing behind otherwise."""
    pid = spawn(server.command(place), folder / "log")
    state = {"kind": "native", "name": server.name, "pid": pid, "born": process.born(pid), "ports": place.ports}
    write_state(folder, {**state, "ready": False})
    try:
        wait_ready(server, folder, place, pid)
    except BaseException:
        process.signal_group(pid, signal.SIGKILL)
        process.wait_gone(pid, 10)
        raise
    write_state(folder, {**state, "ready": True})


def wait_ready(server: Server, folder: Path, place: Place, pid: int) -> None:
    deadline = time.monotonic() + server.patience
    while time.monotonic() < deadline:
        process.bury(pid)
        alive = bool(process.members(pid))
        if alive and not server.is_ready(place.port):
            time.sleep(0.05)
        elif alive and process.owns(pid, place.port):
            return
        else:
            raise why_not(server, folder, place, alive)
    raise StartFailed(server.name, f"did not answer within {server.patience:g} s", tail(folder))


def why_not(server: Server, folder: Path, place: Place, alive: bool) -> PortTaken | StartFailed:
    for port in place.ports:
        if taken_by := process.listeners(port):
            return PortTaken(server.name, port, taken_by)
    return StartFailed(server.name, "lost its port" if alive else "ended while starting", tail(folder))


def spawn(command: list[str], log: Path) -> int:
    """Start a process in a group of its own, so that Ctrl-C reaches us and not the server."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawn(command[0], command, os.environ, file_actions=actions, setpgroup=0)


def free_ports(count: int) -> tuple[int, ...]:
    """Loopback ports nobody listens on just now, all different."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return tuple(one.getsockname()[1] for one in sockets)


def tail(folder: Path, size: int = 3000) -> str:
    log = folder / "log"
    return log.read_text(errors="replace")[-size:] if log.exists() else "(empty)"


def read_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return state


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / "state.json.new"
    fresh.write_text(json.dumps(state))
    fresh.replace(folder / "state.json")
