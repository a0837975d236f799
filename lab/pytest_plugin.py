"""Servers for tests: a fixture `redis_server`, `kafka_server`, … for each recipe, and `lab` for private ones.

All processes of a test run share one session. The servers that the collected tests ask for start side by side
as soon as collection ends; the process that began the run stops them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

import pytest

from lab.errors import LabError, Missing
from lab.server import Running
from lab.servers import SERVERS
from lab.session import Session

SESSION = pytest.StashKey[Session]()


def give_up(missing: Missing, environ: Mapping[str, str] = os.environ) -> NoReturn:
    """On a laptop a missing server skips its tests; where CI is set it fails them."""
    if environ.get("CI", "").lower() in ("", "0", "false"):
        pytest.skip(str(missing))
    pytest.fail(str(missing), pytrace=False)


def pytest_configure(config: pytest.Config) -> None:
    worker: dict[str, str] | None = getattr(config, "workerinput", None)
    config.stash[SESSION] = Session(Path(worker["lab_session"])) if worker else Session.begin()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist is about to start a worker: tell it which session it belongs to."""
    node.workerinput["lab_session"] = str(node.config.stash[SESSION].folder)


def pytest_unconfigure(config: pytest.Config) -> None:
    if SESSION in config.stash and not hasattr(config, "workerinput"):
        config.stash[SESSION].close()


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption("collectonly"):
        return
    fixtures = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    for name in SERVERS:
        if f"{name}_server" in fixtures:
            Thread(target=start_early, args=(session.config.stash[SESSION], name)).start()


def start_early(session: Session, name: str) -> None:
    with suppress(LabError):  # the fixture asks again and tells the test
        session.need(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    try:
        return (yield)
    except Missing as missing:
        give_up(missing)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    try:
        return (yield)
    except Missing as missing:
        give_up(missing)


@pytest.fixture(scope="session")
def lab(pytestconfig: pytest.Config) -> Session:
    """The run's session: `with lab.private("redis") as redis` is a server a test may kill."""
    return pytestconfig.stash[SESSION]


def server_fixture(name: str) -> Callable[..., Running]:
    @pytest.fixture(scope="session", name=f"{name}_server")
    def server(lab: Session) -> Running:
        return lab.need(name)

    return server


for _name in SERVERS:
    globals()[f"{_name}_server"] = server_fixture(_name)
