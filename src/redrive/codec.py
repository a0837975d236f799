"""How letters, retry copies and replay copies look on the wire: the original bytes and three headers.

A `redrive-ticket` travels on copies that are to be handled again, a `redrive-letter` on dead ones, and a
`redrive-signature` beside either. They are replaced, never appended. Reading is total: what does not verify is
ignored, never obeyed.
"""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from redrive.clock import Millis
from redrive.keyring import Keyring
from redrive.letter import Attempt, Claim, Kind, Letter, Reason, identity
from redrive.message import Coordinates, Copy, Headers, Message, last_header

TICKET = "redrive-ticket"
LETTER = "redrive-letter"
SIGNATURE = "redrive-signature"
RESERVED = frozenset({TICKET, LETTER, SIGNATURE})
BODY_AT_SOURCE = "body_at_source"
"""The mark of a letter whose body its source still has."""


class Ticket(Struct, frozen=True, omit_defaults=True):
    """What a copy must know of its past: whose letter it is, how often it ran, which replay it belongs to.

    `group` is the consumer group it is meant for; `key` is the idempotency key of a replay.
    """

    letter: str
    group: str
    origin: Coordinates
    runs: int = 0
    first_at: Millis = 0
    hop: int = 0
    key: str = ""
    history: tuple[Attempt, ...] = ()

    @property
    def run_key(self) -> str:
        """Names the count of this message's runs; each replay starts a count of its own."""
        return f"{self.letter}-{self.hop}"


_ticket = msgspec.json.Decoder(Ticket)
_letter = msgspec.json.Decoder(Letter)
_encode = msgspec.json.encode


def retry_copy(message: Message, ticket: Ticket, destination: str, keyring: Keyring) -> Copy:
    """The message again, carrying this ticket instead of any it had."""
    headers = _stamped(message.headers, TICKET, _encode(ticket), destination, message.body, keyring)
    return Copy(destination, message.key, message.body, headers, ticket.origin.timestamp)


def letter_copy(letter: Letter, destination: str, keyring: Keyring) -> Copy:
    """The letter as a message: the original key, body and headers, and the facts in one header."""
    original = letter.message
    body = None if letter.claim else original.body
    facts = replace(letter, message=replace(original, key=None, body=None, headers=()))
    headers = _stamped(original.headers, LETTER, _encode(facts), destination, body, keyring)
    return Copy(destination, original.key, body, headers, original.timestamp)


def read_ticket(message: Message, keyring: Keyring) -> Ticket | None:
    """The ticket on this message, if it is ours and was written for this source and this body."""
    raw = last_header(message.headers, TICKET)
    if raw is None or not _verifies(message, TICKET, raw, keyring):
        return None
    try:
        return _ticket.decode(raw)
    except msgspec.MsgspecError:
        return None


def read_letter(message: Message, keyring: Keyring, now: Millis) -> Letter:
    """The letter in a dead letter source: ours where the signature holds, else adopted as it stands, unverified."""
    raw = last_header(message.headers, LETTER)
    if raw is not None and _verifies(message, LETTER, raw, keyring):
        try:
            facts = _letter.decode(raw)
        except msgspec.MsgspecError:
            return _adopted(message, now, ("tampered",))
        original = replace(facts.message, key=message.key, body=message.body, headers=bare(message.headers))
        return replace(facts, message=original)
    return _adopted(message, now, ("tampered",) if raw is not None else ())


def bare(headers: Headers) -> Headers:
    """The headers without our own."""
    for name, _ in headers:  # a loop, because it runs for every message and a generator costs more than the rest
        if name in RESERVED:
            return tuple(pair for pair in headers if pair[0] not in RESERVED)
    return headers


def original(message: Message, ticket: Ticket | None) -> Message:
    """The message as it first arrived: its first coordinates, and none of our headers."""
    if ticket is None and not message.headers:
        return message
    if ticket is None:
        kept = bare(message.headers)
        return message if kept is message.headers else replace(message, headers=kept)
    origin = ticket.origin
    return Message(
        origin.broker, origin.source, origin.partition, origin.position, origin.timestamp,
        message.key, message.body, bare(message.headers), ticket.key,
    )  # fmt: skip


def shortened(letter: Letter) -> Letter:
    """The letter with its diagnostics cut to the bone, for a destination with little room."""
    history = tuple(replace(a, stack="", message=a.message[:200]) for a in letter.history[-3:])
    return replace(
        letter, stack=letter.stack[-500:], error_message=letter.error_message[:500], history=history,
        marks=(*letter.marks, "diagnostics_truncated"),
    )  # fmt: skip


def claimed(letter: Letter, claim: Claim) -> Letter:
    """The letter with its body left in blob storage."""
    return replace(letter, claim=claim)


def at_source(letter: Letter) -> Letter:
    """The letter without its body, which its source still retains."""
    return replace(letter, message=replace(letter.message, body=None), marks=(*letter.marks, BODY_AT_SOURCE))


def _adopted(message: Message, now: Millis, marks: tuple[str, ...]) -> Letter:
    at = message.timestamp or now
    return Letter(
        id=identity(replace(message, headers=bare(message.headers)), message.source),
        message=replace(message, headers=bare(message.headers)),
        group=message.source, kind=Kind.PERMANENT, reason=Reason.ADOPTED, error_type="", error_message="",
        first_attempt_at=at, last_attempt_at=at, attempts=0, message_id=message.id, verified=False, marks=marks,
    )  # fmt: skip


def _stamped(
    headers: Headers, name: str, value: bytes, destination: str, body: bytes | None, keyring: Keyring
) -> Headers:
    signature = keyring.sign(_signed_parts(name, value, destination, body))
    return (*bare(headers), (name, value), (SIGNATURE, signature))


def _verifies(message: Message, name: str, value: bytes, keyring: Keyring) -> bool:
    parts = _signed_parts(name, value, message.source, message.body)
    return keyring.verify(parts, last_header(message.headers, SIGNATURE))


def _signed_parts(name: str, value: bytes, destination: str, body: bytes | None) -> list[bytes | None]:
    sha = None if body is None else hashlib.sha256(body).digest()
    return [name.encode(), value, destination.encode("utf-8", "surrogatepass"), sha]
