from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from redrive.codec import (
    LETTER,
    RESERVED,
    SIGNATURE,
    TICKET,
    Ticket,
    at_source,
    bare,
    claimed,
    letter_copy,
    original,
    read_letter,
    read_ticket,
    retry_copy,
    shortened,
)
from redrive.keyring import Keyring
from redrive.letter import Attempt, Claim, Environment, Kind, Letter, Reason, identity, remember
from redrive.message import Copy, Headers, Message

OLD, NEW, STRANGER = b"old key old key old key", b"new key new key new key", b"a stranger's own key!!"
KEYRING = Keyring([NEW])
NOW = 1_700_000_000_000
MESSAGE = Message("main", "orders", 3, "17", NOW, b"k", b"body", (("h", b"v"), ("h", None), ("bin", b"\xff\0")))
TICKET_OF = Ticket("letter-1", "billing", MESSAGE.coordinates, runs=2, first_at=NOW, hop=1, key="letter-1-1")

nullable = st.none() | st.just(b"") | st.binary(max_size=64)
header_lists = st.lists(st.tuples(st.text(max_size=20), nullable), max_size=6).map(tuple)
messages = st.builds(
    Message, st.just("main"), st.just("orders"), st.integers(0, 9), st.text("0123456789-", max_size=9),
    st.integers(0, 2**45), nullable, nullable, header_lists,
)  # fmt: skip


def letter_for(message: Message, **facts: object) -> Letter:
    letter = Letter(
        identity(message, "billing"), message, "billing", Kind.TIMEOUT, Reason.MAX_RETRIES_EXCEEDED,
        "TimeoutError", "slow \ufffd", NOW, NOW + 5, 3, detail="d", stack="s" * 2000, root_type="OSError",
        handler="bill", message_id=message.id, message_type="placed", attributes={"order_id": "42"},
        masked=("card",), history=tuple(Attempt(n, NOW, "E", "m" * 900, "st", delay=n) for n in range(5)),
        environment=Environment("host", 7, "billing", "1.0", "test"), hop=2, max_replays=5,
    )  # fmt: skip
    return replace(letter, **facts)


def delivered(copy: Copy, source: str | None = None) -> Message:
    """The copy as the broker hands it over again."""
    return Message(
        "main", source or copy.destination, 0, "99", copy.timestamp or NOW, copy.key, copy.body, copy.headers
    )


def with_header(message: Message, name: str, value: bytes | None) -> Message:
    return replace(message, headers=tuple((n, value if n == name else v) for n, v in message.headers))


def ours(headers: Headers) -> list[str]:
    return [name for name, _ in headers if name in RESERVED]


# Round trips


@given(messages)
def test_a_retry_copy_brings_back_the_message_and_its_ticket(message: Message) -> None:
    ticket = replace(TICKET_OF, origin=message.coordinates, history=(Attempt(1, NOW, "E", "m"),))
    arrived = delivered(retry_copy(message, ticket, "orders.retry", KEYRING))
    assert read_ticket(arrived, KEYRING) == ticket
    same = replace(message, headers=bare(message.headers), idempotency_key=ticket.key)
    assert original(arrived, ticket) == same


@given(messages)
def test_a_letter_copy_brings_back_every_fact_and_every_byte(message: Message) -> None:
    letter = letter_for(message)
    assert read_letter(delivered(letter_copy(letter, "orders.dlq", KEYRING)), KEYRING, NOW) == letter


def test_null_differs_from_empty_all_the_way() -> None:
    for key, body, value in [(None, b"", None), (b"", None, b""), (None, None, b""), (b"", b"", None)]:
        message = replace(MESSAGE, key=key, body=body, headers=(("h", value),))
        back = read_letter(delivered(letter_copy(letter_for(message), "dlq", KEYRING)), KEYRING, NOW).message
        assert (back.key, back.body, back.headers) == (key, body, (("h", value),))


def test_a_claimed_body_does_not_travel() -> None:
    letter = claimed(letter_for(MESSAGE), Claim("blob", 4, "sha"))
    copy = letter_copy(letter, "orders.dlq", KEYRING)
    assert copy.body is None
    assert read_letter(delivered(copy), KEYRING, NOW).claim == Claim("blob", 4, "sha")


def test_a_body_left_at_its_source_is_marked() -> None:
    letter = read_letter(delivered(letter_copy(at_source(letter_for(MESSAGE)), "dlq", KEYRING)), KEYRING, NOW)
    assert letter.message.body is None
    assert "body_at_source" in letter.marks


def test_a_shortened_letter_is_small_and_keeps_who_it_is() -> None:
    letter = letter_for(MESSAGE)
    short = shortened(letter)
    assert (short.id, short.message, short.attempts) == (letter.id, letter.message, letter.attempts)
    assert len(msgspec.json.encode(short)) < len(msgspec.json.encode(letter)) - 4000
    assert "diagnostics_truncated" in short.marks


def test_a_message_without_a_ticket_is_its_own_original() -> None:
    assert original(MESSAGE, None) is MESSAGE
    assert original(replace(MESSAGE, headers=((TICKET, b"x"), ("h", b"v"))), None).headers == (("h", b"v"),)


def test_the_identity_of_an_original_survives_retries() -> None:
    arrived = delivered(retry_copy(MESSAGE, TICKET_OF, "orders.retry", KEYRING))
    assert identity(original(arrived, TICKET_OF), "billing") == identity(MESSAGE, "billing")


# Growth


def test_two_hundred_rounds_of_retry_do_not_grow_the_headers() -> None:
    message, sizes = MESSAGE, []
    ticket = replace(TICKET_OF, runs=100)
    for run in range(100, 300):
        ticket = replace(ticket, runs=run, history=remember(ticket.history, Attempt(run, NOW, "E", "m", "s")))
        message = delivered(retry_copy(message, ticket, "orders.retry", KEYRING))
        ticket = read_ticket(message, KEYRING) or pytest.fail("the ticket was lost")
        sizes.append(sum(len(name) + len(value or b"") for name, value in message.headers))
    assert ours(message.headers) == [TICKET, SIGNATURE]
    assert len(set(sizes[20:])) == 1
    assert bare(message.headers) == MESSAGE.headers


def test_a_letter_made_from_a_retry_copy_carries_one_set_of_our_headers() -> None:
    arrived = delivered(retry_copy(MESSAGE, TICKET_OF, "orders.retry", KEYRING))
    copy = letter_copy(letter_for(arrived), "orders.dlq", KEYRING)
    assert ours(copy.headers) == [LETTER, SIGNATURE]


# What is not ours is not obeyed

ARRIVED = delivered(retry_copy(MESSAGE, TICKET_OF, "orders.retry", KEYRING))
FORGED = msgspec.json.encode(replace(TICKET_OF, hop=99))


@pytest.mark.parametrize(
    "message",
    [
        MESSAGE,
        with_header(ARRIVED, TICKET, FORGED),
        with_header(ARRIVED, TICKET, None),
        with_header(ARRIVED, TICKET, b""),
        with_header(ARRIVED, SIGNATURE, None),
        with_header(ARRIVED, SIGNATURE, b""),
        with_header(ARRIVED, SIGNATURE, b":" * 150),
        with_header(ARRIVED, SIGNATURE, b"\xff" * 150),
        with_header(ARRIVED, SIGNATURE, b"x" * 1_000_000),
        replace(ARRIVED, headers=tuple(h for h in ARRIVED.headers if h[0] != SIGNATURE)),
        replace(ARRIVED, headers=(*ARRIVED.headers, (TICKET, FORGED))),
        replace(ARRIVED, source="payments"),
        replace(ARRIVED, body=b"other"),
        replace(ARRIVED, body=None),
        replace(ARRIVED, body=b""),
        delivered(retry_copy(MESSAGE, TICKET_OF, "orders.retry", Keyring([STRANGER]))),
    ],
)
def test_a_ticket_that_was_forged_tampered_with_or_moved_is_ignored(message: Message) -> None:
    assert read_ticket(message, KEYRING) is None


def test_a_null_body_is_not_taken_for_an_empty_one() -> None:
    for signed, swapped in ((None, b""), (b"", None)):
        copy = retry_copy(replace(MESSAGE, body=signed), TICKET_OF, "orders.retry", KEYRING)
        assert read_ticket(replace(delivered(copy), body=swapped), KEYRING) is None


def test_a_ticket_is_not_accepted_as_a_letter_nor_a_letter_as_a_ticket() -> None:
    renamed = tuple((LETTER if name == TICKET else name, value) for name, value in ARRIVED.headers)
    assert not read_letter(replace(ARRIVED, headers=renamed), KEYRING, NOW).verified
    dead = delivered(letter_copy(letter_for(MESSAGE), "orders.dlq", KEYRING))
    renamed = tuple((TICKET if name == LETTER else name, value) for name, value in dead.headers)
    assert read_ticket(replace(dead, headers=renamed), KEYRING) is None


def test_what_our_key_signed_and_nobody_can_read_is_still_no_ticket() -> None:
    from redrive.codec import _stamped

    for raw in (b"", b"{}", b"\xff", b"[1]", b'{"letter": 1}'):
        headers = _stamped((), TICKET, raw, "orders.retry", None, KEYRING)
        assert read_ticket(Message("main", "orders.retry", 0, "1", 1, None, None, headers), KEYRING) is None
        headers = _stamped((), LETTER, raw, "orders.dlq", None, KEYRING)
        letter = read_letter(Message("main", "orders.dlq", 0, "1", 1, None, None, headers), KEYRING, NOW)
        assert (letter.verified, letter.marks) == (False, ("tampered",))


def test_a_tampered_letter_is_adopted_with_its_bytes_and_marked() -> None:
    dead = delivered(letter_copy(letter_for(MESSAGE), "orders.dlq", KEYRING))
    letter = read_letter(replace(dead, body=b"other"), KEYRING, NOW)
    assert (letter.verified, letter.marks, letter.reason) == (False, ("tampered",), Reason.ADOPTED)
    assert (letter.message.body, letter.message.headers) == (b"other", MESSAGE.headers)
    assert (letter.group, letter.message.source) == ("orders.dlq", "orders.dlq")


def test_a_strangers_dead_letter_is_adopted_without_a_mark() -> None:
    message = replace(MESSAGE, source="their.dlq", timestamp=0)
    letter = read_letter(message, KEYRING, NOW)
    assert (letter.verified, letter.marks, letter.message) == (False, (), message)
    assert letter.first_attempt_at == NOW
    assert letter.id == read_letter(message, KEYRING, NOW + 1).id


@given(messages, st.lists(st.tuples(st.sampled_from(sorted(RESERVED)), nullable), max_size=5))
def test_reading_is_total(message: Message, noise: list[tuple[str, bytes | None]]) -> None:
    hostile = replace(message, headers=(*message.headers, *noise))
    assert read_ticket(hostile, KEYRING) is None
    letter = read_letter(hostile, KEYRING, NOW)
    assert not letter.verified
    assert (letter.message.key, letter.message.body) == (message.key, message.body)


# Rotation


def test_keys_rotate_by_adding_the_new_one_in_front() -> None:
    before, during, after = Keyring([OLD]), Keyring([NEW, OLD]), Keyring([NEW])
    written_before = delivered(retry_copy(MESSAGE, TICKET_OF, "orders.retry", before))
    written_during = delivered(retry_copy(MESSAGE, TICKET_OF, "orders.retry", during))
    assert read_ticket(written_before, during) == read_ticket(written_during, during) == TICKET_OF
    assert read_ticket(written_during, after) == TICKET_OF
    assert read_ticket(written_before, after) is None
