"""The lab's promises: servers are real, ours, shared, and leave nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lab import __main__ as cli
from lab import docker, install, process, session
from lab.errors import Missing, NotOurs, PortTaken, StartFailed
from lab.install import Apt, Maven, Step
from lab.pytest_plugin import give_up
from lab.server import External, Native, Place, Server, free_ports, launch
from lab.servers import KAFKA, REDIS, SERVERS, ask, kafka_ready
from lab.session import Session, resolve, session_name, start, sweep

pytestmark = pytest.mark.xdist_group("lab")


@pytest.fixture(autouse=True)
def no_redis_from_outside(monkeypatch):
    monkeypatch.delenv("REDRIVE_LAB_REDIS", raising=False)


@pytest.fixture
def redis(lab: Session) -> Iterator[Native]:
    with lab.private("redis") as running:
        if not isinstance(running, Native):
            pytest.skip("these tests look at processes, and Redis runs in a container here")
        yield running


def ping(running: Native) -> bytes:
    return ask(running.port, b"PING\r\n")


# A server that runs is ours.


def test_a_started_server_answers_on_a_port_that_it_owns(redis):
    assert ping(redis) == b"+PONG\r\n"
    assert redis.pid in process.listeners(redis.port)
    assert process.owns(redis.pid, redis.port)
    assert redis.url == f"redis://127.0.0.1:{redis.port}"


def test_a_child_that_listens_counts_as_the_server(tmp_path):
    (port,) = free_ports(1)
    child = f"import socket,time; s=socket.create_server(('127.0.0.1',{port})); time.sleep(60)"
    parent = f"import subprocess,sys; subprocess.run([sys.executable, '-c', {child!r}])"
    tree = script(parent)
    launch(tree, tmp_path, Place(tmp_path, (port,)))
    running = Native(tree, tmp_path)
    assert running.pid not in process.listeners(port)
    assert process.owns(running.pid, port)
    running.stop()
    assert process.listeners(port) == set()


def test_a_restart_keeps_the_port_and_the_data(redis):
    assert ask(redis.port, b"SET letter kept\r\n") == b"+OK\r\n"
    port, pid = redis.port, redis.pid
    redis.kill()
    redis.restart()
    assert (redis.port, redis.pid != pid) == (port, True)
    assert ask(port, b"GET letter\r\n") == b"$4\r\nkept\r\n"


def test_a_paused_server_is_silent_until_it_is_resumed(redis):
    redis.pause()
    with pytest.raises(TimeoutError):
        ping(redis)
    redis.resume()
    assert ping(redis) == b"+PONG\r\n"


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_ending_a_server_leaves_nothing_behind(redis, end):
    getattr(redis, end)()
    assert process.members(redis.pid) == []
    assert process.listeners(redis.port) == set()
    assert not redis.alive
    redis.stop()


def test_a_paused_server_can_still_be_stopped(redis):
    redis.pause()
    redis.stop()
    assert not redis.alive


def test_a_number_that_was_given_to_somebody_else_is_never_signalled(redis):
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    redis.stop()
    state = json.loads((redis.folder / "state.json").read_text())
    (redis.folder / "state.json").write_text(json.dumps({**state, "pid": bystander.pid}))
    redis.stop()
    redis.kill()
    assert bystander.poll() is None
    bystander.communicate(b"\n")


# Strangers and failures are told apart.


def script(code: str, ready=lambda port: bool(process.listeners(port))) -> Server:
    return Server("script", "x://{port}", command=lambda place: [sys.executable, "-c", code], ready=ready, patience=20)


def test_a_port_that_a_stranger_holds_is_detected_on_restart(redis):
    redis.stop()
    with socket.create_server(("127.0.0.1", redis.port)), pytest.raises(PortTaken) as caught:
        redis.restart()
    assert caught.value.pids == {os.getpid()}
    assert process.members(redis.pid) == []


def test_a_stranger_that_answers_as_the_server_would_is_not_taken_for_it(redis, tmp_path):
    sleeper = replace(REDIS, command=lambda place: [sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(PortTaken) as caught:
        launch(sleeper, tmp_path, redis.place)
    assert caught.value.pids == {redis.pid}
    assert ping(redis) == b"+PONG\r\n"


def test_a_server_starts_elsewhere_when_its_port_is_taken_meanwhile(monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        first = (stranger.getsockname()[1],)
        offers = iter([first, free_ports(1)])
        monkeypatch.setattr("lab.server.free_ports", lambda count: next(offers))
        running = start(REDIS, tmp_path)
        assert isinstance(running, Native)
        assert running.ports != first
        running.stop()


def test_a_server_that_dies_while_starting_says_its_last_words(tmp_path):
    with pytest.raises(StartFailed, match="no disk today"):
        Native.start(script("raise SystemExit('no disk today')"), tmp_path)


def test_a_server_that_never_answers_is_ended(tmp_path):
    silent = replace(script("import time; time.sleep(60)", ready=lambda port: False), patience=0.5)
    with pytest.raises(StartFailed, match="did not answer"):
        Native.start(silent, tmp_path)
    assert process.members(json.loads((tmp_path / "state.json").read_text())["pid"]) == []


# The order in which a server is sought.


def test_a_url_in_the_environment_wins_and_is_left_alone(tmp_path):
    given = resolve(REDIS, tmp_path, {"REDRIVE_LAB_REDIS": "redis://elsewhere:1"})
    assert isinstance(given, External)
    assert given.url == "redis://elsewhere:1"
    given.stop()
    with pytest.raises(NotOurs):
        given.kill()


@dataclass(frozen=True)
class NotToBeHad(Step):
    stamp: str = "not-to-be-had"

    def run(self) -> None:
        raise Missing("this server cannot be had.")


def test_what_cannot_be_had_is_said_with_the_ways_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(install, "TOOLS", tmp_path)
    monkeypatch.setattr(docker, "answers", lambda: False)
    with pytest.raises(Missing, match=r"cannot be had.*REDRIVE_LAB_REDIS.*Docker"):
        start(replace(REDIS, install=(NotToBeHad(),)), tmp_path)


def test_docker_is_asked_only_where_an_engine_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(install, "TOOLS", tmp_path)
    monkeypatch.setattr(docker, "answers", lambda: True)
    monkeypatch.setattr(session.Container, "start", lambda server, folder: f"container of {server.name}")
    assert start(replace(REDIS, install=(NotToBeHad(),)), tmp_path) == "container of redis"


def test_a_container_is_published_on_loopback_only_and_told_its_port():
    words = docker.run_words(KAFKA, 4711)
    assert "127.0.0.1:4711:9092" in words
    assert "KAFKA_ADVERTISED_LISTENERS=PLAINTEXT://127.0.0.1:4711" in words


def test_a_missing_server_skips_on_a_laptop_and_fails_under_ci():
    missing = Missing("java is not installed")
    for laptop in ({}, {"CI": ""}, {"CI": "false"}):
        with pytest.raises(pytest.skip.Exception, match="java is not installed"):
            give_up(missing, laptop)
    for value in ("1", "true"):
        with pytest.raises(pytest.fail.Exception, match="java is not installed"):
            give_up(missing, {"CI": value})


def pytest_run(folder: Path, test: str, *words: str, **env: str) -> str:
    """A test run of its own, with nothing but the lab's plugin and this one file."""
    (folder / "test_it.py").write_text(test)
    (folder / "pytest.ini").touch()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "lab.pytest_plugin", *words, str(folder)]
    env = {**os.environ, "PYTHONPATH": str(install.ROOT), **env}
    return subprocess.run(command, check=False, cwd=folder, env=env, capture_output=True, text=True).stdout


@pytest.mark.parametrize(("ci", "verdict"), [("", "1 skipped"), ("1", "1 failed")])
def test_a_run_skips_or_fails_what_is_missing(tmp_path, ci, verdict):
    test = "from lab.errors import Missing\ndef test_it():\n    raise Missing('java is not installed')\n"
    said = pytest_run(tmp_path, test, "-rs", CI=ci)
    assert verdict in said
    assert "java is not installed" in said


def test_the_workers_of_a_run_share_a_server_that_ends_with_the_run(tmp_path):
    test = f"""
import os, pathlib, pytest
@pytest.mark.parametrize("n", range(4))
def test_it(redis_server, n):
    pathlib.Path({str(tmp_path)!r}, f"pid-{{os.getpid()}}").write_text(str(redis_server.pid))
"""
    said = pytest_run(tmp_path, test, "-n", "2")
    assert "4 passed" in said
    found = [path.read_text() for path in tmp_path.glob("pid-*")]
    assert (len(found), len(set(found))) == (2, 1)
    assert process.members(int(found[0])) == []


# Installing.


def test_a_step_runs_once_whoever_asks(tmp_path, monkeypatch):
    monkeypatch.setattr(install, "TOOLS", tmp_path)
    runs = []

    class Slow(Step):
        stamp = "slow"

        def run(self) -> None:
            runs.append(threading.get_ident())
            time.sleep(0.05)  # long enough for the others to come to the door

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: install.install([Slow()]), range(4)))
    assert len(runs) == 1


def test_a_debian_package_we_may_not_install_is_named(monkeypatch):
    monkeypatch.setattr(install, "as_root", lambda: None)
    with pytest.raises(Missing, match="sudo apt-get install -y nothing-server"):
        install.install([Apt("nothing-server", "nothing-serverd")])


def test_maven_is_asked_for_exactly_the_named_artifacts():
    pom = Maven("x", ("org.example:thing_2.13:4.3.1",))._pom()
    assert "<groupId>org.example</groupId><artifactId>thing_2.13</artifactId><version>4.3.1</version>" in pom


# Sessions.


def test_many_who_need_a_server_share_one(tmp_path):
    shared = Session(tmp_path / "session")
    try:
        pids = {running.pid for running in shared.need_all(["redis"] * 4)}
        assert len(pids) == 1
    finally:
        shared.close()
    assert process.members(pids.pop()) == []
    assert not shared.folder.exists()


def test_a_shared_server_that_died_is_started_again(tmp_path):
    shared = Session(tmp_path / "session")
    try:
        shared.need("redis").kill()
        assert ping(shared.need("redis")) == b"+PONG\r\n"
    finally:
        shared.close()


def test_what_a_killed_run_left_behind_is_ended_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "SESSIONS", tmp_path)
    code = f"""
import os, pathlib, signal
from lab.session import Session, session_name
run = Session(pathlib.Path({str(tmp_path)!r}) / session_name(os.getpid()))
print(run.need("redis").pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], check=False, cwd=install.ROOT, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    orphan = int(killed.stdout)
    assert process.members(orphan)
    ours = tmp_path / session_name(os.getpid())
    ours.mkdir()
    sweep()
    assert process.members(orphan) == []
    assert list(tmp_path.iterdir()) == [ours]


def test_people_put_servers_up_see_them_and_take_them_down(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "UP", tmp_path / "up")
    assert cli.main(["up", "redis"]) == 0
    line = capsys.readouterr().out.strip()
    assert line.startswith("export REDRIVE_LAB_REDIS=redis://127.0.0.1:")
    assert cli.main(["status"]) == 0
    assert capsys.readouterr().out.strip() == "redis\t" + line.partition("=")[2]
    assert cli.main(["down"]) == 0
    cli.main(["status"])
    assert capsys.readouterr().out == ""


# Where there is no /proc, ps and lsof say the same.


@pytest.mark.skipif(shutil.which("ps") is None, reason="needs ps")
def test_ps_and_proc_agree(redis):
    assert redis.pid in {one.pid for one in process._from_ps() if one.group == redis.pid}


# The shared servers of the run.


@pytest.mark.timeout(300)  # the first time it downloads Kafka
def test_kafka_is_up_with_its_own_port(kafka_server):
    port = int(kafka_server.url.rpartition(":")[2])
    assert kafka_ready(port)
    if isinstance(kafka_server, Native):
        assert process.owns(kafka_server.pid, port)


@pytest.mark.timeout(300)  # the first time it builds toxiproxy
def test_toxiproxy_can_cut_a_server_off(toxiproxy_server, redis):
    (port,) = free_ports(1)
    proxy = {"name": f"redis-{port}", "listen": f"127.0.0.1:{port}", "upstream": f"127.0.0.1:{redis.port}"}
    post(f"{toxiproxy_server.url}/proxies", proxy)
    assert ask(port, b"PING\r\n") == b"+PONG\r\n"
    post(f"{toxiproxy_server.url}/proxies/redis-{port}", {"enabled": False})
    with pytest.raises(ConnectionRefusedError):
        ask(port, b"PING\r\n")


def post(url: str, body: dict) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=5).close()


def test_every_recipe_has_a_fixture(request):
    for name in SERVERS:
        assert request._fixturemanager.getfixturedefs(f"{name}_server", request.node)


def test_the_lab_keeps_everything_under_its_own_folder():
    assert Path(install.ROOT, ".lab") == install.LAB
    assert install.LAB in install.TOOLS.parents
