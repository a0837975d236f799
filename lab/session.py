"""Who needs which server: each starts once for a session, whatever number of processes ask for it."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from lab import docker, process
from lab.docker import Container
from lab.errors import Missing
from lab.install import LAB, locked
from lab.server import External, Native, Running, Server, read_state
from lab.servers import SERVERS

SESSIONS = LAB / "sessions"
UP = LAB / "up"


def resolve(server: Server, folder: Path, environ: Mapping[str, str] = os.environ) -> Running:
    """A URL in the environment wins, else the server starts natively, else in Docker; else Missing says why."""
    if url := environ.get(f"REDRIVE_LAB_{server.name.upper()}"):
        return External(server.name, url)
    return start(server, folder)


def start(server: Server, folder: Path) -> Native | Container:
    """A server of our own, which may be killed, paused and restarted."""
    try:
        return Native.start(server, folder)
    except Missing as missing:
        if server.image is None or not docker.answers():
            hint = f"Or give a URL in REDRIVE_LAB_{server.name.upper()}, or start a Docker engine."
            raise Missing(f"{missing} {hint}") from missing
        return Container.start(server, folder)


def attach(folder: Path) -> Native | Container | None:
    """The server whose state is in this folder, as any process may hold it."""
    if not (folder / "state.json").exists():
        return None
    state = read_state(folder)
    kind = Container if state["kind"] == "container" else Native
    return kind(SERVERS[state["name"]], folder)


class Session:
    """The servers of one test run, or those a person has put up. It lives in a folder, not in a process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def begin(cls) -> Session:
        """A session that belongs to this process; what dead processes left behind is cleared away first."""
        sweep()
        return cls(SESSIONS / session_name(os.getpid()))

    def need(self, name: str) -> Running:
        """The one server of this name in the session, started when nobody has yet."""
        folder = self.folder / name
        with locked(self.folder / f"{name}.lock"):
            found = attach(folder)
            if found and found.alive and read_state(folder)["ready"]:
                return found
            if found:
                found.stop()
            return resolve(SERVERS[name], folder)

    def need_all(self, names: Iterable[str]) -> list[Running]:
        """Several servers, started side by side."""
        wanted = list(names)
        with ThreadPoolExecutor(max(len(wanted), 1)) as pool:
            return list(pool.map(self.need, wanted))

    @contextmanager
    def private(self, name: str) -> Iterator[Native | Container]:
        """A server for one test alone, to be killed and paused at will. A URL in the environment does not apply."""
        folder = self.folder / f"{name}-{uuid.uuid4().hex[:8]}"
        try:
            yield start(SERVERS[name], folder)
        finally:
            end(folder)

    def running(self) -> list[Native | Container]:
        found = [attach(folder) for folder in self._folders()]
        return [server for server in found if server and server.alive]

    def _folders(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*") if path.is_dir())

    def close(self) -> None:
        """Stop every server of the session, also one that is just starting, and forget its data."""
        for lock in self.folder.glob("*.lock"):
            with locked(lock):
                end(lock.with_suffix(""))
        for folder in self._folders():
            end(folder)
        shutil.rmtree(self.folder, ignore_errors=True)


def end(folder: Path) -> None:
    if found := attach(folder):
        found.stop()
    shutil.rmtree(folder, ignore_errors=True)


def session_name(pid: int) -> str:
    return f"{pid}-{process.born(pid)}".replace(" ", "_").replace(":", "_")


def sweep() -> None:
    """End the sessions whose process is gone: a run killed by SIGKILL could not clean up."""
    for folder in SESSIONS.iterdir() if SESSIONS.exists() else []:
        if folder.name != session_name(int(folder.name.partition("-")[0])):
            Session(folder).close()
