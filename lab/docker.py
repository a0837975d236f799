"""The same servers as containers, for machines where they cannot be installed and an engine answers."""

from __future__ import annotations

import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from lab.errors import Missing, StartFailed
from lab.server import Running, Server, free_ports, read_state, write_state


def answers() -> bool:
    """Whether a Docker engine is there and talks to us."""
    docker = shutil.which("docker")
    if docker is None:
        return False
    try:
        return subprocess.run([docker, "info"], check=False, capture_output=True, timeout=10).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def docker(*words: str) -> str:
    done = subprocess.run(["docker", *words], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise Missing(f"docker {words[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout.strip()


def run_words(server: Server, port: int) -> list[str]:
    """The `docker run` that starts this server at a port of this machine."""
    image = server.image
    if image is None:
        raise Missing(f"{server.name} has no Docker image")
    words = ["run", "--detach", "--label", "redrive-lab", "--publish", f"127.0.0.1:{port}:{image.port}"]
    for name, value in image.env.items():
        words += ["--env", f"{name}={value.format(port=port)}"]
    return [*words, image.name, *image.command]


class Container(Running):
    """A server in a container of ours, known by its id."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.port = int(read_state(folder)["ports"][0])
        super().__init__(server.name, server.url.format(port=self.port))

    @classmethod
    def start(cls, server: Server, folder: Path) -> Container:
        (port,) = free_ports(1)
        state = {"kind": "container", "name": server.name, "ports": [port]}
        write_state(folder, {**state, "id": docker(*run_words(server, port)), "ready": False})
        started = cls(server, folder)
        started._wait()
        write_state(folder, {**read_state(folder), "ready": True})
        return started

    @property
    def id(self) -> str:
        return str(read_state(self.folder)["id"])

    @property
    def alive(self) -> bool:
        try:
            return docker("inspect", "--format", "{{.State.Running}}", self.id) == "true"
        except Missing:
            return False

    def stop(self) -> None:
        with suppress(Missing):
            docker("rm", "--force", "--volumes", self.id)

    def kill(self) -> None:
        docker("kill", self.id)

    def pause(self) -> None:
        docker("pause", self.id)

    def resume(self) -> None:
        docker("unpause", self.id)

    def restart(self) -> None:
        docker("restart", self.id)
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + self.server.patience
        while not self.server.is_ready(self.port):
            if time.monotonic() > deadline:
                log = docker("logs", "--tail", "40", self.id)
                self.stop()
                raise StartFailed(self.name, f"did not answer within {self.server.patience:g} s", log)
            time.sleep(0.1)
