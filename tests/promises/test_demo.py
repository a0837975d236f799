"""The demo plays the whole product and counts; its auditor must notice whatever goes wrong."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from redrive.demo.audit import audit, complaints, table
from redrive.demo.deck import HUNDRED, PAYMENTS, Deck, Produced
from redrive.demo.ledger import BEGAN, HANDLED, Entry, Ledger, Reader, unfinished
from redrive.letter import Kind, Letter, Reason, State, StoredLetter, identity
from redrive.message import Message

FIRST, SECOND, THIRD = Deck().draw(3)
ALL = [FIRST, SECOND, THIRD]
WORKER, KILLED = 101, 102
SHOW = [sys.executable, "-m", "redrive.cli", "demo"]
CHECK = [*SHOW, "--check"]
pytestmark = pytest.mark.xdist_group("demo")


def ran(one: Produced, outcome: str = HANDLED, *, run: int = 1, pid: int = WORKER) -> list[Entry]:
    return [Entry(one.id, run, BEGAN, pid, 1.0), Entry(one.id, run, outcome, pid, 2.0)]


def filed(one: Produced, state: State = State.PENDING, *, kind: Kind = Kind.PERMANENT, at: str = "7") -> StoredLetter:
    message = Message("embedded", one.source, 0, at, 1000, one.key, one.body, one.headers)
    letter = Letter(
        identity(message, "shop"), message, "shop", kind, Reason.PERMANENT, "ValueError", "no",
        first_attempt_at=1000, last_attempt_at=1000, attempts=1,
    )  # fmt: skip
    return StoredLetter(letter, state, version=1, hop=0, occurrences=1, filed_at=1000, updated_at=1000)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def check(home: Path) -> subprocess.CompletedProcess[str]:
    """`redrive demo --check`, once."""
    return subprocess.run(
        CHECK, env=environment(home), cwd=home, capture_output=True, text=True, timeout=60, check=False
    )


def environment(home: Path) -> dict[str, str]:
    """A shell that is set up for another redrive, which the demo must not touch."""
    return {**os.environ, "TMPDIR": str(home), "REDRIVE_BROKER": "kafka://nobody-home:9092"}


def started(command: list[str], home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env=environment(home), cwd=home, stdout=subprocess.PIPE, text=True)


def read_until(demo: subprocess.Popen[str], text: str) -> str:
    """The first line that has this text."""
    assert demo.stdout is not None
    return next(line for line in demo.stdout if text in line)


def processes_that_mention(home: Path) -> list[str]:
    """Command lines of living processes that work in this folder."""
    listed = subprocess.run(["ps", "-axww", "-o", "args="], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if str(home) in line]


def counts(output: str) -> dict[str, int]:
    return {name.strip(): int(number) for name, number in re.findall(r"^  ([a-z -]+?) +(\d+)", output, re.M)}


def test_the_check_accounts_for_every_message(check: subprocess.CompletedProcess[str]) -> None:
    assert check.returncode == 0, check.stdout + check.stderr
    assert "every message is accounted for" in check.stdout
    found = counts(check.stdout)
    assert found["lost"] == 0
    assert found["produced"] == found["handled"] + found["still pending"]
    assert found["replayed"] == found["resolved"] == found["dead-lettered"] - found["unreadable"]


def test_the_check_sees_every_way_to_fail_and_a_kill_in_the_middle(check: subprocess.CompletedProcess[str]) -> None:
    found = counts(check.stdout)
    assert all(found[kind] > 0 for kind in ("transient", "permanent", "unreadable", "timeout", "retried"))
    assert found["duplicated"] > 0
    assert re.search(r"worker \d is killed with SIGKILL, [1-9]\d* handler", check.stdout)


def test_the_check_sees_that_an_outage_pauses_a_source_and_makes_no_flood_of_letters(
    check: subprocess.CompletedProcess[str],
) -> None:
    assert "charge_card pauses: ConnectionError" in check.stdout
    assert "charge_card goes on" in check.stdout
    payments = 3 * sum(HUNDRED[story] for story in PAYMENTS)
    assert counts(check.stdout)["transient"] < payments / 4


def test_the_check_leaves_nothing_behind(check: subprocess.CompletedProcess[str], home: Path) -> None:
    assert check.stderr == ""
    assert list(home.iterdir()) == []
    assert processes_that_mention(home) == []
    [port] = re.findall(r"http://127\.0\.0\.1:(\d+)", check.stdout)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(port))) != 0


def test_the_processes_die_with_a_demo_that_is_killed(tmp_path: Path) -> None:
    with started(CHECK, tmp_path) as demo:
        read_until(demo, "the office is open")
        assert len(processes_that_mention(tmp_path)) == 3
        demo.kill()
    deadline = time.monotonic() + 10
    while processes_that_mention(tmp_path) and time.monotonic() < deadline:
        pass
    assert processes_that_mention(tmp_path) == []


def test_the_check_fails_when_it_is_interrupted_and_stops_what_it_started(tmp_path: Path) -> None:
    with started(CHECK, tmp_path) as demo:
        read_until(demo, "the office is open")
        demo.send_signal(signal.SIGINT)
        read_until(demo, "it was interrupted")
        read_until(demo, "the check failed")
    assert demo.returncode == 1
    assert processes_that_mention(tmp_path) == []


def test_the_check_fails_when_nobody_reads_its_count(tmp_path: Path) -> None:
    with started(CHECK, tmp_path) as demo:
        read_until(demo, "two workers start")
        assert demo.stdout is not None
        demo.stdout.close()
    assert demo.returncode == 1
    assert processes_that_mention(tmp_path) == []


def test_with_a_person_a_killed_worker_is_replaced_and_control_c_ends_it_well(tmp_path: Path) -> None:
    with started(SHOW, tmp_path) as demo:
        victim = re.search(r"kill -9 (\d+)", read_until(demo, "kill -9"))
        assert victim is not None
        os.kill(int(victim[1]), signal.SIGKILL)
        read_until(demo, "worker 2 was killed; worker 3 takes over")
        demo.send_signal(signal.SIGINT)
        read_until(demo, "everything is stopped")
    assert demo.returncode == 0
    assert processes_that_mention(tmp_path) == []


def test_with_a_person_only_a_folder_that_a_demo_made_is_wiped(tmp_path: Path) -> None:
    precious = tmp_path / "redrive-data" / "demo" / "letters.db"
    precious.parent.mkdir(parents=True)
    precious.write_text("not a demo's")
    refused = subprocess.run(SHOW, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert "this folder is not a demo's" in refused.stderr
    assert precious.read_text() == "not a demo's"


def test_a_message_is_accounted_for_when_it_is_handled_or_an_open_letter() -> None:
    verdict = audit(ALL, [*ran(FIRST), *ran(SECOND, "ValueError")], [filed(SECOND), filed(THIRD, kind=Kind.UNREADABLE)])
    assert verdict.ok
    assert (verdict.produced, verdict.handled, verdict.pending, verdict.retried) == (3, 1, 2, 0)
    assert verdict.dead[Kind.PERMANENT] == verdict.dead[Kind.UNREADABLE] == 1


def test_a_message_that_was_neither_handled_nor_filed_is_lost_and_named() -> None:
    verdict = audit(ALL, [*ran(FIRST), *ran(SECOND)], [])
    assert verdict.lost == (THIRD.id,)
    assert not verdict.ok
    assert THIRD.id in complaints(verdict)[0]


def test_what_the_broker_still_has_is_not_called_lost_without_saying_so() -> None:
    assert "or among 2 with the broker" in table(audit(ALL, ran(FIRST), [], under_way=2))
    assert "with the broker" not in table(audit(ALL, ran(FIRST), []))


def test_a_handler_that_only_began_has_not_handled() -> None:
    assert audit([FIRST], ran(FIRST)[:1], []).lost == (FIRST.id,)


def test_a_letter_called_resolved_that_nobody_handled_is_a_loss() -> None:
    letter = filed(FIRST, State.RESOLVED)
    assert audit([FIRST], ran(FIRST, "ValueError"), [letter], [letter.id]).lost == (FIRST.id,)


def test_a_letter_without_a_produced_message_is_a_phantom() -> None:
    phantom = filed(THIRD)
    verdict = audit([FIRST], ran(FIRST), [phantom])
    assert verdict.problems == {"letters of messages that were never produced": (phantom.id,)}


def test_two_letters_of_one_message_are_one_too_many() -> None:
    verdict = audit([FIRST], [], [filed(FIRST), filed(FIRST, at="8")])
    assert verdict.problems == {"messages with more than one letter": (FIRST.id,)}


@pytest.mark.parametrize("part", ["key", "body", "headers"])
def test_a_letter_with_other_bytes_is_found(part: str) -> None:
    sent = replace(FIRST, **{part: (*FIRST.headers, ("more", None)) if part == "headers" else b""})
    letter = filed(FIRST)
    verdict = audit([sent], [], [letter])
    assert verdict.problems == {"letters whose bytes are not what was produced": (letter.id,)}


@pytest.mark.parametrize("state", [State.PENDING, State.REPLAYING, State.QUARANTINED])
def test_a_letter_sent_back_must_be_resolved(state: State) -> None:
    letter = filed(FIRST, state)
    verdict = audit([FIRST], ran(FIRST), [letter], [letter.id])
    assert verdict.problems == {"letters sent back and not resolved": (letter.id,)}


def test_a_letter_sent_back_must_still_exist() -> None:
    verdict = audit([FIRST], ran(FIRST), [], ["gone"])
    assert verdict.problems == {"letters sent back and not resolved": ("gone",)}


def test_a_letter_that_nobody_touched_must_be_pending() -> None:
    letter = filed(FIRST, State.DISCARDED)
    verdict = audit([FIRST], ran(FIRST), [letter])
    assert verdict.problems == {"letters that nobody sent back, and not pending": (letter.id,)}


def test_what_was_handled_must_have_been_produced() -> None:
    assert audit([], ran(FIRST), []).problems == {"handled, but never produced": (FIRST.id,)}


def test_retries_are_the_failed_runs_that_ended_in_no_letter() -> None:
    entries = [*ran(FIRST, "TimeoutError"), *ran(FIRST, "TimeoutError", run=2), *ran(FIRST, run=3)]
    entries += [*ran(SECOND, "ValueError"), *ran(SECOND, "ValueError", run=2)]
    assert audit([FIRST, SECOND], entries, [filed(SECOND)]).retried == 3


def test_runs_done_again_are_counted_and_explained_by_the_kill() -> None:
    cut_short = ran(FIRST, pid=KILLED)[:1] + ran(FIRST, run=2)
    unacknowledged = ran(SECOND, pid=KILLED) + ran(SECOND, run=2)
    for_no_reason = ran(THIRD) + ran(THIRD, run=2)
    verdict = audit(ALL, cut_short + unacknowledged + for_no_reason, [], killed=[KILLED])
    assert verdict.ok
    assert (verdict.duplicated, verdict.explained) == (3, 2)
    assert "runs done again, 2 because of the kill" in table(verdict)


def test_every_hundred_messages_have_the_same_mix_and_a_seed_the_same_bytes() -> None:
    deck = Deck().draw(200)
    assert deck == Deck().draw(200)
    for hundred in (deck[:100], deck[100:]):
        assert {story: sum(one.story == story for one in hundred) for story in HUNDRED} == HUNDRED


def test_the_ledger_notes_how_each_run_ended_and_numbers_runs_over_processes(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.touch()
    here, there, reader = Ledger(path), Ledger(path), Reader(path)
    with pytest.raises(ValueError, match="no"):
        _fail_in(here)
    with there.run("a") as run:
        assert run == 2
        assert [entry.run for entry in unfinished(Reader(path).refresh(), os.getpid())] == [2]
    assert [entry.outcome for entry in reader.refresh()] == [BEGAN, "ValueError", BEGAN, HANDLED]
    assert reader.refresh() == []


def _fail_in(ledger: Ledger) -> None:
    with ledger.run("a") as run:
        assert run == 1
        raise ValueError("no")


def test_a_line_still_being_written_is_read_later(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"order":"a","run":1,"outcome":"began","pid":1,"at":1.0}\n{"order":"b"')
    reader = Reader(path)
    assert [entry.order for entry in reader.refresh()] == ["a"]
    with path.open("ab") as file:
        file.write(b',"run":1,"outcome":"began","pid":1,"at":1.0}\n')
    assert [entry.order for entry in reader.refresh()] == ["b"]
