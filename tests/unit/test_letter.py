from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from redrive.letter import (
    HISTORY_LIMIT,
    MOVES,
    Attempt,
    Kind,
    Letter,
    Outcome,
    Reason,
    State,
    StoredLetter,
    after_death,
    after_outcome,
    idempotency_key,
    identity,
    remember,
    with_delay,
)
from redrive.message import Message, content_digest

MESSAGE = Message("main", "orders", 3, "17", 1_700_000_000_000, b"k", b"body", (("h", b"v"),))


def letter(hop: int = 0, max_replays: int = 3) -> Letter:
    return Letter(
        "id", MESSAGE, "billing", Kind.TRANSIENT, Reason.MAX_RETRIES_EXCEEDED, "E", "e", 1, 2, 3,
        hop=hop, max_replays=max_replays,
    )  # fmt: skip


def stored(state: State, hop: int = 0, confirmed_hop: int = -1) -> StoredLetter:
    return StoredLetter(letter(), state, 1, hop, 1, 1, 1, confirmed_hop)


# Identity


def test_an_identity_never_changes_between_releases() -> None:
    """Letters on disk and copies in flight carry it: a new value here would make every one of them a second letter."""
    assert identity(MESSAGE, "billing") == "fcbfbc85559616870de3e87b567be5a1"
    assert identity(MESSAGE, "billing", "order-42") == "ad0e4fba15858e49f3e578f31ff24d37"


@pytest.mark.parametrize(
    "other",
    [
        replace(MESSAGE, broker="other"),
        replace(MESSAGE, source="orders2"),
        replace(MESSAGE, partition=4),
        replace(MESSAGE, position="18"),
        replace(MESSAGE, timestamp=1_700_000_000_001),
        replace(MESSAGE, key=b"l"),
        replace(MESSAGE, key=None),
        replace(MESSAGE, key=b""),
        replace(MESSAGE, body=b"other"),
        replace(MESSAGE, body=None),
        replace(MESSAGE, body=b""),
        replace(MESSAGE, headers=()),
        replace(MESSAGE, headers=(("h", None),)),
        replace(MESSAGE, headers=(("h", b""),)),
        replace(MESSAGE, headers=(("h", b"v"), ("h", b"v"))),
        replace(MESSAGE, headers=(("i", b"v"),)),
    ],
)
def test_whatever_differs_makes_another_letter(other: Message) -> None:
    assert identity(other, "billing") != identity(MESSAGE, "billing")


def test_each_consumer_group_has_its_own_letter() -> None:
    assert identity(MESSAGE, "billing") != identity(MESSAGE, "shipping")


def test_a_declared_identity_replaces_position_and_content() -> None:
    moved = replace(MESSAGE, partition=0, position="1", timestamp=5, body=b"edited")
    assert identity(moved, "billing", "42") == identity(MESSAGE, "billing", "42")
    assert identity(MESSAGE, "billing", "42") != identity(MESSAGE, "billing", "43")
    assert identity(MESSAGE, "shipping", "42") != identity(MESSAGE, "billing", "42")
    assert identity(replace(MESSAGE, source="x"), "billing", "42") != identity(MESSAGE, "billing", "42")
    assert identity(MESSAGE, "billing", "") != identity(MESSAGE, "billing")


def test_parts_do_not_run_into_each_other() -> None:
    a = replace(MESSAGE, broker="ab", source="c")
    assert identity(a, "g") != identity(replace(a, broker="a", source="bc"), "g")
    assert content_digest(b"ab", b"c", ()) != content_digest(b"a", b"bc", ())
    assert content_digest(None, b"", ()) != content_digest(b"", None, ())


@pytest.mark.parametrize("name", [chr(0xD800), chr(0xDCFF), "\0", "é"])
def test_names_that_are_no_utf8_still_have_an_identity(name: str) -> None:
    odd = replace(MESSAGE, source=name, position=name, headers=((name, b""),))
    assert len(identity(odd, name, name)) == len(identity(odd, name)) == 32
    assert identity(odd, "g") != identity(replace(odd, source="plain"), "g")


def test_bytes_read_as_surrogates_are_not_taken_for_the_letter_they_resemble() -> None:
    assert content_digest(None, None, (("é", b""),)) != content_digest(None, None, (("\udcc3\udca9", b""),))


@given(st.text(), st.text(), st.none() | st.text())
def test_identity_is_total_and_stable(group: str, source: str, declared: str | None) -> None:
    odd = replace(MESSAGE, source=source)
    assert identity(odd, group, declared) == identity(odd, group, declared)


# States


def test_every_state_knows_its_moves_and_none_moves_to_itself() -> None:
    assert set(MOVES) == set(State)
    assert not any(state in targets for state, targets in MOVES.items())


@pytest.mark.parametrize(
    ("start", "targets"),
    [
        (State.PENDING, {"replaying", "resolved", "discarded", "quarantined"}),
        (State.REPLAYING, {"resolved", "pending", "quarantined", "held"}),
        (State.RESOLVED, {"pending", "quarantined"}),
        (State.DISCARDED, {"pending", "quarantined"}),
        (State.QUARANTINED, {"pending"}),
        (State.HELD, {"replaying", "discarded"}),
    ],
)
def test_moves(start: State, targets: set[str]) -> None:
    assert MOVES[start] == targets


def test_a_quarantined_letter_is_never_replayed_without_being_restored() -> None:
    assert State.REPLAYING not in MOVES[State.QUARANTINED] | MOVES[State.RESOLVED] | MOVES[State.DISCARDED]


@pytest.mark.parametrize(
    ("died", "state", "hop", "confirmed", "after"),
    [
        (1, State.REPLAYING, 1, -1, State.PENDING),  # the replay died again
        (2, State.REPLAYING, 2, -1, State.PENDING),
        (3, State.REPLAYING, 3, -1, State.QUARANTINED),  # the third re-death is the last
        (4, State.PENDING, 3, -1, State.QUARANTINED),
        (1, State.PENDING, 1, -1, State.PENDING),  # a time-out was quicker than the report
        (1, State.REPLAYING, 2, -1, State.REPLAYING),  # a late death of an older replay
        (0, State.RESOLVED, 1, -1, State.RESOLVED),
        (1, State.RESOLVED, 1, 1, State.RESOLVED),  # this replay was handled; the copy is a duplicate
        (1, State.RESOLVED, 1, -1, State.PENDING),  # resolved by hand, and then its replay died
        (1, State.DISCARDED, 1, -1, State.PENDING),
        (2, State.REPLAYING, 2, 1, State.PENDING),  # only the older replay was confirmed
    ],
)
def test_what_a_death_does_to_a_known_letter(died: int, state: State, hop: int, confirmed: int, after: State) -> None:
    assert after_death(letter(hop=died), stored(state, hop, confirmed)) is after


def test_a_loop_ends_after_its_own_number_of_replays() -> None:
    assert after_death(letter(hop=1, max_replays=1), stored(State.REPLAYING, 1)) is State.QUARANTINED
    assert after_death(letter(hop=9, max_replays=10), stored(State.REPLAYING, 9)) is State.PENDING


def test_no_death_makes_a_move_that_is_not_allowed() -> None:
    for state in set(State) - {State.HELD, State.QUARANTINED}:
        for hop in range(4):
            after = after_death(letter(hop), stored(state, hop))
            assert after is state or after in MOVES[state]


@pytest.mark.parametrize(
    ("ok", "hop", "state", "current", "after"),
    [
        (True, 1, State.REPLAYING, 1, State.RESOLVED),
        (True, 1, State.PENDING, 1, State.RESOLVED),  # the quiet window gave up too early
        (True, 1, State.REPLAYING, 2, State.REPLAYING),  # an older replay
        (True, 2, State.REPLAYING, 1, State.REPLAYING),  # a replay nobody made
        (True, 0, State.PENDING, 0, State.PENDING),  # the original is no replay
        (False, 1, State.REPLAYING, 1, State.REPLAYING),  # its death arrives as a letter
        (True, 1, State.DISCARDED, 1, State.DISCARDED),
        (True, 1, State.QUARANTINED, 1, State.QUARANTINED),
        (True, 1, State.RESOLVED, 1, State.RESOLVED),
        (True, 1, State.HELD, 1, State.HELD),
    ],
)
def test_what_an_outcome_does(ok: bool, hop: int, state: State, current: int, after: State) -> None:
    assert after_outcome(Outcome("id", hop, ok, 1), stored(state, current)) is after


def test_copies_of_one_request_share_a_key_and_the_next_request_has_another() -> None:
    assert idempotency_key("a", 1) == idempotency_key("a", 1) != idempotency_key("a", 2)


# History


def test_history_keeps_the_first_run_and_the_latest() -> None:
    history: tuple[Attempt, ...] = ()
    for number in range(1, 1001):
        history = remember(history, Attempt(number, number, "E"))
        assert len(history) <= HISTORY_LIMIT
    assert [a.number for a in history] == [1, *range(992, 1001)]


def test_the_wait_belongs_to_the_latest_run() -> None:
    history = (Attempt(1, 1, "E", delay=5), Attempt(2, 2, "E"))
    assert [a.delay for a in with_delay(history, 9)] == [5, 9]
