"""How bytes and letters look to people: decoded where that is safe, masked where it must be, never part of the path."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from redrive.clock import Millis, iso
from redrive.letter import Attempt, Environment, StoredLetter
from redrive.message import Headers
from redrive.redact import MASK
from redrive.stores.base import Occurrence, Recorded, Summary

PREVIEW_BYTES = 64 << 10


class Bytes(Struct, frozen=True, omit_defaults=True):
    """Bytes for a page: `text` when they are UTF-8, else `base64`; `cut` when only the beginning is shown."""

    size: int
    text: str | None = None
    base64: str | None = None
    cut: bool = False
    masked: bool = False


class HeaderView(Struct, frozen=True):
    name: str
    value: Bytes | None


class LetterView(Struct, frozen=True):
    """Everything a person may see of one letter."""

    id: str
    state: str
    source: str
    group: str
    kind: str
    reason: str
    error_type: str
    error_message: str
    stack: str
    detail: str
    handler: str
    message_id: str
    message_type: str
    partition: int
    position: str
    timestamp: str
    key: Bytes | None
    body: Bytes | None
    headers: list[HeaderView]
    attributes: dict[str, str]
    attempts: int
    occurrences: list[Occurrence]
    history: list[Attempt]
    recorded: list[Recorded]
    environment: Environment
    first_attempt_at: str
    last_attempt_at: str
    filed_at: str
    updated_at: str
    hop: int
    max_replays: int
    verified: bool
    version: int
    claim: str | None = None
    marks: tuple[str, ...] = field(default_factory=tuple)


def letter_view(stored: StoredLetter, occurrences: list[Occurrence], recorded: list[Recorded]) -> LetterView:
    letter, message = stored.letter, stored.letter.message
    hidden = letter.masked_fields
    return LetterView(
        id=letter.id,
        state=stored.state,
        source=message.source,
        group=letter.group,
        kind=letter.kind,
        reason=letter.reason,
        error_type=letter.error_type,
        error_message=letter.error_message,
        stack=letter.stack,
        detail=letter.detail,
        handler=letter.handler,
        message_id=letter.message_id,
        message_type=letter.message_type,
        partition=message.partition,
        position=message.position,
        timestamp=_time(message.timestamp),
        key=_hidden_bytes(message.key) if "key" in hidden else bytes_view(message.key),
        body=body_view(message.body, hidden),
        headers=header_views(message.headers, hidden),
        attributes=masked_attributes(letter.attributes, letter.masked),
        attempts=letter.attempts,
        occurrences=occurrences,
        history=list(letter.history),
        recorded=recorded,
        environment=letter.environment,
        first_attempt_at=_time(letter.first_attempt_at),
        last_attempt_at=_time(letter.last_attempt_at),
        filed_at=_time(stored.filed_at),
        updated_at=_time(stored.updated_at),
        hop=stored.hop,
        max_replays=letter.max_replays,
        verified=letter.verified,
        version=stored.version,
        claim=letter.claim.name if letter.claim else None,
        marks=letter.marks,
    )


def masked_summary(summary: Summary) -> Summary:
    return replace(summary, attributes=masked_attributes(summary.attributes, summary.masked))


def masked_attributes(attributes: dict[str, str], masked: tuple[str, ...]) -> dict[str, str]:
    return {name: MASK if name in masked else value for name, value in attributes.items()}


def bytes_view(value: bytes | None) -> Bytes | None:
    """Null stays null; bytes that are no text are shown as base64."""
    if value is None:
        return None
    shown = value[:PREVIEW_BYTES]
    cut = len(value) > PREVIEW_BYTES
    try:
        return Bytes(len(value), text=shown.decode("utf-8", "ignore" if cut else "strict"), cut=cut)
    except UnicodeDecodeError:
        return Bytes(len(value), base64=base64.b64encode(shown).decode(), cut=cut)


def header_views(headers: Headers, hidden: tuple[str, ...]) -> list[HeaderView]:
    return [
        HeaderView(name, _hidden_bytes(value) if f"header:{name}" in hidden else bytes_view(value))
        for name, value in headers
    ]


def body_view(body: bytes | None, hidden: tuple[str, ...]) -> Bytes | None:
    """The body with masked fields replaced; nothing of it where that cannot be done."""
    paths = [spec.removeprefix("body:") for spec in hidden if spec.startswith("body:")]
    if not paths or body is None:
        return bytes_view(body)
    try:
        tree = msgspec.json.decode(body)
        for path in paths:
            _mask(tree, path.split("."))
        view = bytes_view(msgspec.json.encode(tree))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _hidden_bytes(body)
    return None if view is None else replace(view, size=len(body), masked=True)


def _mask(tree: Any, steps: list[str]) -> None:
    for step in steps[:-1]:
        tree = _child(tree, step)
    last = steps[-1]
    if isinstance(tree, dict) and last in tree:
        tree[last] = MASK
    elif isinstance(tree, list) and last.isdecimal() and int(last) < len(tree):
        tree[int(last)] = MASK


def _child(tree: Any, step: str) -> Any:
    if isinstance(tree, dict):
        return tree.get(step)
    if isinstance(tree, list) and step.isdecimal() and int(step) < len(tree):
        return tree[int(step)]
    return None


def _hidden_bytes(value: bytes | None) -> Bytes | None:
    return None if value is None else Bytes(len(value), text=MASK, masked=True)


def _time(at: Millis) -> str:
    return iso(at)
