"""Letters as rows and back. Derived text is made storable; keys, bodies and headers are kept bit for bit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from redrive.codec import BODY_AT_SOURCE
from redrive.letter import Claim, Kind, Letter, Reason, State, StoredLetter
from redrive.message import Headers, Message
from redrive.stores.base import Occurrence, Summary

BIGGEST = 2**63 - 1
WORDS_LIMIT = 4_000

SUMMARY = (
    "l.id, l.state, l.source, l.grp, l.kind, l.reason, l.error_type, l.error_message, l.handler, l.message_type, "
    "l.attempts, l.occurrences, l.hop, l.size, l.verified, l.first_attempt_at, l.last_attempt_at, l.filed_at, "
    "l.updated_at, l.attributes, l.masked"
)
STORED = (
    "SELECT l.id, l.state, l.version, l.hop, l.occurrences, l.filed_at, l.updated_at, l.confirmed_hop, l.job, "
    "l.first_attempt_at, o.facts, b.claim, b.broker, b.source, b.partition, b.position, b.timestamp, b.key, b.body, "
    "b.headers FROM letters l JOIN bodies b ON b.seq = l.seq JOIN occurrences o ON o.seq = l.seq AND o.hop = l.death"
)

_NO_MESSAGE = Message("", "", 0, "", 0, None, None)
_pack = msgspec.msgpack.Encoder().encode
_facts = msgspec.msgpack.Decoder(Letter).decode
_claim = msgspec.msgpack.Decoder(Claim).decode
_AT_SOURCE = b""
"""In place of a claim: the body was left at the source."""
_json = msgspec.json.Encoder().encode
_names = msgspec.json.Decoder(tuple[str, ...]).decode
_values = msgspec.json.Decoder(dict[str, str]).decode
_WORD = re.compile(r"[^\W_]+")
_SEPARATED = bytes(n if chr(n).isalnum() else ord(" ") for n in range(256))
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
S = TypeVar("S", bound=Struct)


def clean(text: str) -> str:
    """The text as every database can keep it: no NUL, no lone surrogates."""
    if text.isascii() and "\0" not in text:
        return text
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def clamp(number: int) -> int:
    return max(-BIGGEST, min(number, BIGGEST))


def tame(struct: S) -> S:
    """The same struct with every text and number in it storable."""
    return cast(S, _tame(struct))


def _tame(value: Any) -> Any:
    match value:
        case str() if type(value) is str:  # not an enum of ours
            return clean(value)
        case int() if type(value) is int:
            return clamp(value)
        case Struct():
            return type(value)(**{name: _tame(getattr(value, name)) for name in value.__struct_fields__})
        case tuple():
            return tuple(_tame(one) for one in value)
        case dict():
            return {_tame(name): _tame(one) for name, one in value.items()}
        case _:
            return value


class Sealed(Struct, frozen=True):
    """A letter whose derived values are storable, with its facts packed. The message is untouched."""

    letter: Letter
    facts: bytes


def seal(letter: Letter) -> Sealed:
    bare = replace(letter, message=_NO_MESSAGE)
    try:
        facts = _pack(bare)
        if _is_storable(letter):
            return Sealed(letter, facts)
    except (UnicodeEncodeError, OverflowError):
        pass
    tamed = tame(bare)
    return Sealed(replace(tamed, message=letter.message), _pack(tamed))


def _is_storable(letter: Letter) -> bool:
    """Packing refused what is not UTF-8 or beyond 64 bits; this finds what a column still could not hold."""
    numbers = (letter.attempts, letter.hop, letter.first_attempt_at, letter.last_attempt_at)
    texts = (letter.id, letter.group, letter.error_type, letter.error_message, letter.handler)
    more = (letter.message_id, letter.message_type, *letter.attributes, *letter.attributes.values())
    return max(numbers) <= BIGGEST and "\0" not in "".join(texts) and "\0" not in "".join(more)


def body_row(seq: int, letter: Letter) -> tuple[Any, ...]:
    m = letter.message
    claim = _pack(letter.claim) if letter.claim else _AT_SOURCE if BODY_AT_SOURCE in letter.marks else None
    where = (_exact(m.broker), _exact(m.source), clamp(m.partition), _exact(m.position), clamp(m.timestamp))
    return (seq, *where, claim, m.key, _pack_headers(m.headers), m.body)


def size(letter: Letter) -> int:
    return clamp(letter.claim.size) if letter.claim else len(letter.message.body or b"")


def attributes_json(attributes: Mapping[str, str]) -> str:
    return _json(attributes).decode()


def masked_json(masked: tuple[str, ...]) -> str:
    return _json(masked).decode() if masked else ""


def attribute_digests(attributes: Mapping[str, str]) -> list[bytes]:
    return [attribute_digest(name, value) for name, value in attributes.items()]


def attribute_digest(name: str, value: str) -> bytes:
    """What the index of attributes holds: equality can be asked, and a masked value cannot be read from it."""
    return sha256(f"{len(name)}:{name}{value}".encode()).digest()[:16]


def text_of(letter: Letter) -> str:
    """The words by which this letter is found; values of masked attributes are not among them."""
    shown = [value for name, value in letter.attributes.items() if name not in letter.masked]
    names = (_humps(letter.error_type), _humps(letter.message_type))
    text = " ".join([*names, letter.message_id, *shown, letter.error_message[:WORDS_LIMIT]])
    return " " + " ".join(words(text))


def words(text: str) -> list[str]:
    """Runs of letters and digits in any script, case folded."""
    folded = text.casefold()
    if not folded.isascii():
        return _WORD.findall(folded)
    return folded.encode().translate(_SEPARATED).decode().split()  # as bytes, which is five times faster


@lru_cache(1024)
def _humps(name: str) -> str:
    """So that `refused` finds ConnectionRefusedError, and the whole name finds it too."""
    return f"{name} {_HUMP.sub(' ', name)}"


def stored(row: tuple[Any, ...]) -> StoredLetter:
    """From a row of STORED: the latest death, around the message as it was first filed."""
    id_, state, version, hop, occurrences, filed_at, updated_at, confirmed_hop, job, first, facts, claim = row[:12]
    latest = _facts(facts)
    letter = replace(
        latest,
        message=_message(row[12:]),
        first_attempt_at=first,
        marks=_marks(latest.marks, at_source=claim == _AT_SOURCE),
        claim=_claim(claim) if claim else None,
    )
    life = (State(state), version, hop, occurrences, filed_at, updated_at, confirmed_hop, job)
    return StoredLetter(letter, *life) if letter.id == id_ else StoredLetter(replace(letter, id=id_), *life)


def _marks(marks: tuple[str, ...], *, at_source: bool) -> tuple[str, ...]:
    """Where the body is was said by the first death, which brought it; the rest by the latest."""
    rest = tuple(mark for mark in marks if mark != BODY_AT_SOURCE)
    return (*rest, BODY_AT_SOURCE) if at_source else rest


def _message(row: tuple[Any, ...]) -> Message:
    broker, source, partition, position, timestamp, key, body, headers = row
    where = (_text(broker), _text(source), partition, _text(position), timestamp)
    return Message(*where, key, body, _unpack_headers(headers))


def summary(row: tuple[Any, ...]) -> Summary:
    id_, state, source, group, kind, reason, *texts, verified, first, last, filed, updated, attributes, masked = row
    error_type, error_message, handler, message_type, attempts, occurrences, hop, size_ = texts
    return Summary(
        id=id_,
        state=State(state),
        source=source,
        group=group,
        kind=Kind(kind),
        reason=Reason(reason),
        error_type=error_type,
        error_message=error_message,
        handler=handler,
        message_type=message_type,
        attempts=attempts,
        occurrences=occurrences,
        hop=hop,
        size=size_,
        verified=bool(verified),
        first_attempt_at=first,
        last_attempt_at=last,
        filed_at=filed,
        updated_at=updated,
        attributes=_values(attributes),
        masked=_names(masked) if masked else (),
    )


def occurrence(hop: int, filed_at: int, facts: bytes) -> Occurrence:
    death = _facts(facts)
    why = (death.kind, death.reason, death.error_type, death.error_message, death.attempts, death.detail)
    return Occurrence(hop, filed_at, *why)


def attributes_of(text: str) -> dict[str, str]:
    return _values(text)


def ids_json(ids: Any) -> str:
    """Any number of ids as one parameter, for `IN (SELECT value FROM json_each(?))`."""
    return _json(list(ids)).decode()


def _exact(text: str) -> str | bytes:
    """Coordinates must lead back to the message, so what is not UTF-8 is kept as bytes rather than cleaned."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def _text(kept: str | bytes) -> str:
    return kept if isinstance(kept, str) else kept.decode("utf-8", "surrogatepass")


def _pack_headers(headers: Headers) -> bytes:
    try:
        return _pack(headers)
    except UnicodeEncodeError:
        return _pack([(_exact(name), value) for name, value in headers])


def _unpack_headers(packed: bytes) -> Headers:
    return tuple((_text(name), value) for name, value in msgspec.msgpack.decode(packed))
