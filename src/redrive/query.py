"""What to look for among letters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from msgspec import Struct, field

from redrive.clock import Millis
from redrive.errors import BadParameter
from redrive.letter import Kind, State

MAX_PAGE = 500
NAMES = (
    "state", "source", "group", "kind", "error_type", "handler", "message_type", "attribute", "text", "since", "until",
)  # fmt: skip
"""What a filter may be asked by; `state` and `attribute` may be repeated."""
_REPEATABLE = ("state", "attribute")
_LONGEST = 1000
_MILLIS = re.compile(r"-?[0-9]{1,15}")


class Filter(Struct, frozen=True):
    """Letters that match all of these; what is unset matches everything. `text` searches error text and attributes."""

    states: tuple[State, ...] = ()
    source: str | None = None
    group: str | None = None
    kind: Kind | None = None
    error_type: str | None = None
    handler: str | None = None
    message_type: str | None = None
    attributes: dict[str, str] = field(default_factory=dict)
    text: str | None = None
    since: Millis | None = None
    until: Millis | None = None


def parse(asked: Iterable[tuple[str, str]]) -> Filter:
    """A filter from names and texts, as an address or a command line has them. Raises BadParameter and nothing else."""
    facts: dict[str, Any] = {}
    states: list[State] = []
    attributes: dict[str, str] = {}
    for name, text in asked:
        _check(name, text, facts)
        if name == "state":
            states.append(State(_one_of(name, text, State)))
        elif name == "attribute":
            attributes.update([_attribute(text)])
        else:
            facts[name] = _value(name, text)
    return Filter(states=tuple(states), attributes=attributes, **facts)


def _check(name: str, text: str, known: dict[str, Any]) -> None:
    if name not in NAMES:
        raise BadParameter(name, f"there is no such filter; there are {', '.join(NAMES)}")
    if name in known and name not in _REPEATABLE:
        raise BadParameter(name, "is given twice")
    if not text:
        raise BadParameter(name, "is empty")
    if len(text) > _LONGEST:
        raise BadParameter(name, f"is longer than {_LONGEST} characters")


def _value(name: str, text: str) -> Any:
    if name == "kind":
        return Kind(_one_of(name, text, Kind))
    return parse_time(name, text) if name in ("since", "until") else text


def _one_of(name: str, text: str, choices: Iterable[str]) -> str:
    if text not in list(choices):
        raise BadParameter(name, f"must be one of {', '.join(choices)}")
    return text


def _attribute(text: str) -> tuple[str, str]:
    name, separator, value = text.partition(":")
    if not name or not separator:
        raise BadParameter("attribute", "must be written as name:value")
    return name, value


def parse_time(name: str, text: str) -> Millis:
    """Milliseconds since the epoch, or RFC 3339 with its offset."""
    if _MILLIS.fullmatch(text):
        return int(text)
    try:
        # An unescaped + in an address arrives as a space.
        at = datetime.fromisoformat(re.sub(r" (?=\d\d:?\d\d$)", "+", text))
    except (ValueError, OverflowError):
        at = None
    if at is None or at.tzinfo is None:
        raise BadParameter(name, "must be a time like 2026-01-31T12:00:00Z, or milliseconds since the epoch")
    return round(at.timestamp() * 1000)
