from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from redrive import Redrive, cli
from redrive.cli.text import as_json, cut, lines, pairs, safe, table, width

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\x7f\x00\u2028<script>"
Run = Callable[..., "Answer"]
Start = Callable[..., "subprocess.Popen[str]"]
SETTINGS = 'broker = "embedded://./data/broker.db"\nstore = "sqlite://./data/letters.db"\n'
APP = """
from redrive import Redrive

app = Redrive.from_config()

@app.consumer("orders", group="billing", timeout=0.2)
{how} bill(order: dict) -> None:
    {body}
"""


class Answer(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """The real command in an empty folder, in an environment that says nothing to redrive."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("REDRIVE_")]:
        monkeypatch.delenv(name)
    started: list[subprocess.Popen[str]] = []

    def start(*args: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "redrive.cli", *args]
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(running)
        return running

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def run(start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """The same command within this process, for what ends by itself."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "orders", raising=False)

    def run(*args: str) -> Answer:
        try:
            code = cli.main(args)
        except SystemExit as usage:
            code = int(usage.code or 0)
        return Answer(code, *capsys.readouterr())

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
    sys.modules.pop("orders", None)


def filed(*errors: str, source: str = "orders") -> list[str]:
    """Letters in the store of ./redrive.toml, oldest first."""
    Path("redrive.toml").write_text(SETTINGS)

    async def file() -> list[str]:
        app = Redrive.from_config()
        async with app:
            deaths = [(f'{{"id":{n}}}'.encode(), ValueError(error)) for n, error in enumerate(errors)]
            return [await app.dead_letter(body, error, "bill", source, 3, group="billing") for body, error in deaths]

    return asyncio.run(file())


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


# ---- the first look


def test_help_names_every_command_and_every_exit_code(run: Run) -> None:
    answer = run("--help")
    assert answer.returncode == 0
    for word in ("work", "serve", "letters", "stats", "config", "keygen", "demo", "exit codes:", "4  the worker must"):
        assert word in answer.stdout
    assert run("--version").stdout == "redrive 0.1.0\n"


def test_help_loads_nothing_heavy(run: Run) -> None:
    """What makes it fast, checked without a clock."""
    code = "import sys; from redrive.cli.parser import build; build().format_help(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"msgspec", "asyncio", "sqlite3", "fastapi", "prometheus_client", "redrive.app"} & set(loaded)


def test_bad_usage_is_2(run: Run) -> None:
    for args in (
        (),
        ("nope",),
        ("letters", "nope"),
        ("letters", "show"),
        ("letters", "--limit", "0"),
        ("letters", "-x"),
    ):
        answer = run(*args)
        assert (answer.returncode, "usage: redrive" in answer.stderr) == (2, True), args


def test_a_new_key_can_be_used_at_once(run: Run) -> None:
    key = run("keygen").stdout.strip()
    Path("redrive.toml").write_text(f'{SETTINGS}signing_keys = ["{key}"]\n')
    answer = run("config", "check")
    assert (answer.returncode, "redrive.toml is good" in answer.stdout) == (0, True)
    assert not Path("data").exists(), "a check makes nothing"


# ---- configuration


def test_the_configuration_is_found_where_it_is_said_to_be(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("given", "variable", "redrive"):
        Path(f"{name}.toml").write_text(f'broker = "embedded://./{name}/b.db"\n[profiles.dev]\nservice = "dev"\n')
    assert "embedded://./redrive/b.db" in run("config", "check").stdout
    monkeypatch.setenv("REDRIVE_CONFIG", "variable.toml")
    assert "embedded://./variable/b.db" in run("config", "check").stdout
    answer = run("config", "check", "--config", "given.toml", "--profile", "dev").stdout
    assert "embedded://./given/b.db" in answer
    assert "dev" in answer
    monkeypatch.setenv("REDRIVE_BROKER", "embedded://./env/b.db")
    assert "embedded://./env/b.db" in run("config", "check").stdout
    monkeypatch.delenv("REDRIVE_CONFIG")
    Path("redrive.toml").unlink()
    assert "the environment is good" in run("config", "check").stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('brokr = "embedded://./b.db"', ("brokr", "did you mean broker?")),
        ('broker = "embedded://./b.db"\n[sources.orders]\nattempts = "five"', ("sources.orders.attempts", "number")),
        ('broker = "embeded://./b.db"', ("broker", "did you mean embedded://?")),
        ('broker = "embedded://./b.db"\nstore = "mysql://x"', ("store", "this version knows: sqlite://")),
        ('broker = "b.db"', ("broker", "scheme://")),
        ("broker = ", ("not TOML", "mend that line")),
        ('service = "x"', ("broker", "set broker")),
    ],
)
def test_a_wrong_setting_names_key_file_and_fix(run: Run, text: str, words: tuple[str, ...]) -> None:
    Path("redrive.toml").write_text(text)
    answer = run("config", "check")
    assert answer.returncode == 2
    assert "Traceback" not in answer.stderr
    for word in ("redrive.toml", "fix: ", *words):
        assert word in answer.stderr


@pytest.mark.parametrize("command", [("serve",), ("letters",), ("letters", "replay", "x"), ("stats",)])
def test_every_command_tells_a_wrong_setting_alike(run: Run, command: tuple[str, ...]) -> None:
    Path("redrive.toml").write_text('broker = "embeded://./b.db"')
    assert run(*command) == run("config", "check")
    assert run(*command).returncode == 2


def test_what_serve_cannot_do_is_said_before_anything_starts(run: Run) -> None:
    Path("redrive.toml").write_text(f'{SETTINGS}[serve]\nhost = "0.0.0.0"\n')
    answer = run("serve")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "redrive.toml: serve.host" in answer.stderr
    assert "--host: serve.host" in run("serve", "--host", "::").stderr
    Path("redrive.toml").write_text('broker = "embedded://./data/broker.db"\n')
    answer = run("serve")
    assert (answer.returncode, "redrive.toml: store: this needs a store" in answer.stderr) == (2, True)


def test_a_place_that_is_unreachable_is_named(run: Run) -> None:
    Path("blocked").write_text("a file, not a folder")
    Path("redrive.toml").write_text(
        'broker = "embedded://./data/broker.db"\nstore = "sqlite://./blocked/letters.db"\n[serve]\nport = 0\n'
    )
    for command in (("letters",), ("stats",), ("serve",)):
        answer = run(*command)
        assert (answer.returncode, "Traceback" in answer.stderr) == (2, False), command
        assert "redrive.toml: store: " in answer.stderr
        assert "fix: " in answer.stderr


# ---- work


def test_a_worker_stops_cleanly_when_told(start: Start) -> None:
    Path("redrive.toml").write_text(SETTINGS)
    Path("orders.py").write_text(APP.format(how="async def", body="print('handled', order['id'], flush=True)"))
    worker = start("work", "orders:app")
    assert (said(worker), said(worker)) == (
        "redrive 0.1.0 works on 1 consumer of orders:app:\n",
        "  bill: orders as billing\n",
    )
    asyncio.run(Redrive.from_config().publish("orders", {"id": 7}))
    assert said(worker) == "handled 7\n"
    worker.send_signal(signal.SIGTERM)
    out, err = worker.communicate(timeout=15)
    assert (worker.returncode, out) == (0, "stopping; once more to exit at once\nstopped\n"), err


def test_a_worker_whose_threads_hang_leaves_with_4(start: Start) -> None:
    Path("redrive.toml").write_text(f"{SETTINGS}[defaults]\nconcurrency = 1\n")
    Path("orders.py").write_text(APP.format(how="def", body="__import__('threading').Event().wait()"))
    worker = start("work", "orders:app")
    asyncio.run(Redrive.from_config().publish("orders", {"id": 7}))
    _, err = worker.communicate(timeout=30)
    assert worker.returncode == 4, err
    assert "bill: 1 handler thread(s) hang beyond their time limit" in err


def test_the_second_signal_ends_a_worker_that_blocks(start: Start) -> None:
    Path("redrive.toml").write_text(SETTINGS)
    blocking = "print('in', flush=True)\n    while True: pass"
    Path("orders.py").write_text(APP.format(how="async def", body=blocking))
    worker = start("work", "orders:app")
    asyncio.run(Redrive.from_config().publish("orders", {"id": 7}))
    assert [said(worker) for _ in range(3)][-1] == "in\n"
    worker.send_signal(signal.SIGINT)
    deadline = time.monotonic() + 15
    while worker.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)  # two signals at once are one signal
        worker.send_signal(signal.SIGINT)
    assert worker.returncode == 130


@pytest.mark.parametrize(
    ("target", "code", "words"),
    [
        ("orders", "", ("MODULE:APP", "'orders' names no app", "redrive work orders:app")),
        ("nothere:app", "", ("there is no module 'nothere'", "in the folder that holds")),
        ("orders:app", "import nosuchlib", ("orders.py:1", "No module named 'nosuchlib'", "install nosuchlib")),
        ("orders:app", "x = 1\n1 / 0", ("orders.py:2", "ZeroDivisionError")),
        ("orders:app", "def f(:", ("orders.py:1", "SyntaxError")),
        ("orders:ap", "import redrive\napp = redrive.Redrive.from_config()", ("has no 'ap'", "use orders:app")),
        ("orders:app", "app = object()", ("orders.py", "'app' is an object, not a Redrive app")),
        ("orders:app", "import redrive\napp = redrive.Redrive('kafkaa://x')", ("orders.py:2", "broker", "unknown sch")),
        (
            "orders:app",
            "import redrive\napp = redrive.Redrive.from_config()\napp.consumer('orders', group='g')(42)",
            ("orders.py:3", "handler", "42 is not callable", "give a function"),
        ),
        (
            "orders:app",
            APP.format(how="def", body="pass") + "\n@app.consumer('x', group='g')\ndef bill(o: dict) -> None: ...",
            ("orders.py:", "bill: two consumers have this name", "name='…'"),
        ),
    ],
)  # fmt: skip
def test_an_app_that_cannot_work_is_2_and_says_where(run: Run, target: str, code: str, words: tuple[str, ...]) -> None:
    Path("redrive.toml").write_text(SETTINGS)
    Path("orders.py").write_text(code)
    answer = run("work", target)
    assert answer.returncode == 2, answer.stderr
    assert "Traceback" not in answer.stderr
    for word in (*words, "fix: "):
        assert word in answer.stderr


def test_an_app_is_told_of_the_file_and_the_profile(start: Start) -> None:
    Path("other.toml").write_text(f"{SETTINGS}[profiles.dev]\nservice = 'dev'\n")
    Path("orders.py").write_text("import redrive\napp = redrive.Redrive.from_config()\nprint(app.config)")
    out, err = (worker := start("work", "orders:app", "--config", "other.toml", "--profile", "dev")).communicate()
    assert "service='dev'" in out
    assert worker.returncode == 2
    assert "orders:app: app: no consumer is registered" in err


@pytest.mark.parametrize("flag", ["--config", "--profile"])
def test_an_app_that_would_not_listen_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    monkeypatch.setenv("REDRIVE_CONFIG", "")
    monkeypatch.setenv("REDRIVE_PROFILE", "")
    Path("orders.py").write_text("import redrive\napp = redrive.Redrive('embedded://./data/b.db')")
    answer = run("work", "orders:app", flag, "other")
    assert (answer.returncode, f"{flag}: orders:app" in answer.stderr) == (2, True)


# ---- letters


def test_letters_are_listed_read_and_counted(run: Run) -> None:
    [first, second] = filed("no customer", "negative amount")
    listed = run("letters")
    assert listed.stdout.splitlines()[0].split() == ["ID", "STATE", "SOURCE", "GROUP", "AGE", "RUNS", "ERROR"]
    assert [line.split()[0] for line in listed.stdout.splitlines()[1:3]] == [second, first]
    assert listed.stdout.endswith("\n2 letters\n")
    assert [row["id"] for row in json.loads(run("letters", "--text", "customer", "--json").stdout)["rows"]] == [first]
    shown = run("letters", "show", first).stdout
    assert "error     ValueError: no customer" in shown
    assert '\nbody\n  {"id":0}\n  (8 bytes)\n' in shown
    assert json.loads(run("letters", "show", first, "--json").stdout)["body"]["text"] == '{"id":0}'
    assert "      2  pending\n" in run("stats").stdout
    assert json.loads(run("stats", "--json").stdout)["by_state"] == {"pending": 2}


def test_a_long_list_goes_on_where_it_ended(run: Run) -> None:
    expected = filed("a", "b", "c")[::-1]
    first = run("letters", "list", "--limit", "2").stdout
    rest = run("letters", "list", "--limit", "2", "--cursor", first.split()[-1]).stdout
    assert [line.split()[0] for text in (first, rest) for line in text.splitlines() if "pending" in line] == expected


def test_a_filter_that_cannot_be_understood_is_2(run: Run) -> None:
    filed()
    for args in (("--state", "x"), ("--since", "soon"), ("--attribute", "x"), ("--cursor", "x"), ("--error-type", "")):
        answer = run("letters", *args)
        assert (answer.returncode, answer.stderr.startswith(f"redrive: {args[0]}: ")) == (2, True), answer.stderr


def test_a_letter_is_moved_and_every_move_has_its_author(run: Run) -> None:
    [letter] = filed("boom")
    for verb, word in (("discard", "discarded"), ("restore", "pending again"), ("resolve", "resolved")):
        answer = run("letters", verb, letter, "--who", "ann", "--why", "because")
        assert (answer.returncode, answer.stdout) == (0, f"letter {letter} is {word}\n")
    again = run("letters", "resolve", letter)
    assert (again.returncode, again.stderr) == (5, f"redrive: letter {letter} is resolved, not pending\n")
    assert run("letters", "purge", letter, "--json").returncode == 0
    for verb in ("show", "replay", "purge"):
        assert (run("letters", verb, letter).returncode) == 5

    async def audit() -> list[tuple[str, str]]:
        async with Redrive.from_config() as app:
            return [(entry.who, entry.why) for entry in await app.desk().audit()]

    assert asyncio.run(audit())[1:] == [("ann", "because")] * 3


def test_replay_returns_when_the_broker_has_it(start: Start) -> None:
    [letter] = filed("boom")
    replay = start("letters", "replay", letter)
    assert "was sent back and the broker has it" in said(replay)
    assert replay.wait(15) == 0
    Path("orders.py").write_text(APP.format(how="async def", body="print('handled', order['id'], flush=True)"))
    worker = start("work", "orders:app")
    assert [said(worker) for _ in range(3)][-1] == "handled 0\n"


def test_letters_can_be_read_while_the_broker_is_down(run: Run) -> None:
    [letter] = filed("boom")
    key = "00" * 32
    Path("blocked").write_text("a file, not a folder")
    broken = SETTINGS.replace("./data/broker.db", "./blocked/broker.db")
    Path("redrive.toml").write_text(f'{broken}signing_keys = ["{key}"]\n')
    assert run("letters", "show", letter).returncode == 0
    answer = run("letters", "replay", letter)
    assert (answer.returncode, "broker embedded is unavailable" in answer.stderr) == (2, True)


# ---- what a terminal may be told


def test_nothing_from_a_message_steers_the_terminal(run: Run) -> None:
    [letter] = filed(HOSTILE, source=HOSTILE.replace("\x00", ""))
    commands = [("letters",), ("letters", "show", letter), ("stats",), ("letters", "show", HOSTILE.replace("\x00", ""))]
    for command in [*commands, *([*one, "--json"] for one in commands)]:
        answer = run(*command)
        output = answer.stdout + answer.stderr
        assert output.replace("\n", "").isprintable(), command
        assert "<script>" in output


def test_a_reader_who_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    code = "import sys; from redrive.cli import main; sys.exit(main(['keygen']))"
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        answer = subprocess.run([sys.executable, "-c", code], stdout=closed, stderr=subprocess.PIPE, check=False)
    assert (answer.returncode, answer.stderr) == (0, b"")


def test_a_defect_is_1_and_shows_where(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(_: Any) -> int:
        raise RuntimeError("\x1b[31m")

    monkeypatch.setattr("redrive.cli.tools.keygen", broken)
    assert cli.main(["keygen"]) == 1
    told = capsys.readouterr().err
    assert "RuntimeError: \\x1b[31m" in told
    assert "\x1b" not in told


def test_text_is_made_safe_and_fits() -> None:
    assert safe("a\x1b\n\u202eb漢") == "a\\x1b\\n\\u202eb漢"
    assert safe("\udcff\U000e0001") == "\\udcff\\U000e0001"
    assert lines("a\tb\r\nc\x07") == "a   b\nc\\x07"
    assert as_json({"a": "é\x7f\udcff"}) == '{\n  "a": "\\u00e9\\u007f\\udcff"\n}'
    assert (width("漢e\u0301"), cut("漢字漢字", 5), cut("abc", 3)) == (3, "漢字…", "abc")
    assert table(("N", "NAME"), [(1, "漢"), (10, "b")], right=(0,)) == [" N  NAME", " 1  漢", "10  b"]
    assert pairs([("a", "1\n2"), ("long", "3")]) == ["a     1\n      2", "long  3"]


def test_the_demo_is_called_with_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def play(check: bool = False, port: int | None = None) -> int:
        asked.append((check, port))
        return 0

    monkeypatch.setattr("redrive.demo.main", play, raising=False)
    assert cli.main(["demo", "--check", "--port", "8401"]) == 0
    assert asked == [(True, 8401)]
