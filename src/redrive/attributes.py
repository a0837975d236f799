"""Named values taken out of a message: from its body, key or headers, or constant. Never raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from redrive.errors import ConfigError
from redrive.message import Message

VALUE_LIMIT = 256
_BODY_LIMIT = 1 << 20
_WHERE = ("body", "header", "const")


class Attribute(Struct, frozen=True):
    """Where a value comes from: ("body", "order.id"), ("header", "x-type"), ("key", "") or ("const", "eu")."""

    where: str
    path: str = ""

    def __str__(self) -> str:
        return f"{self.where}:{self.path}" if self.path else self.where


def parse(name: str, spec: str) -> Attribute:
    """`body:order.id`, `header:x-type`, `key` or `const:eu`."""
    where, _, path = spec.partition(":")
    if spec == "key":
        return Attribute("key")
    if where in _WHERE and path:
        return Attribute(where, path)
    raise ConfigError(
        f"cannot read {spec!r}",
        key=f"attributes.{name}",
        fix="use 'body:path.to.field', 'header:name', 'key' or 'const:value'",
    )


def parse_all(specs: Mapping[str, str]) -> dict[str, Attribute]:
    return {name: parse(name, spec) for name, spec in specs.items()}


def extract(message: Message, wanted: Mapping[str, Attribute]) -> dict[str, str]:
    """The attributes this message has; those it lacks are absent, and bad bytes are replaced, not raised."""
    body: Any = _UNREAD
    found: dict[str, str] = {}
    for name, attribute in wanted.items():
        if attribute.where == "body":
            body = _decoded(message.body) if body is _UNREAD else body
            value = _as_text(_walk(body, attribute.path))
        elif attribute.where == "header":
            value = _as_text(message.header(attribute.path))
        else:
            value = _as_text(message.key if attribute.where == "key" else attribute.path)
        if value is not None:
            found[name] = value
    return found


_UNREAD = object()


def _decoded(body: bytes | None) -> Any:
    if not body or len(body) > _BODY_LIMIT:
        return None
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError):
        return None


def _walk(value: Any, path: str) -> Any:
    for step in path.split("."):
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and step.isdecimal() and len(step) < 10 and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value


def _as_text(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, bytes):
        text = value[: VALUE_LIMIT * 4].decode("utf-8", "replace")
    elif isinstance(value, str):
        text = value
    else:
        try:
            text = msgspec.json.encode(value).decode()
        except (RecursionError, ValueError, TypeError):
            return None
    # A lone surrogate is not UTF-8 and a NUL ends a text in some stores; neither may keep a letter from being filed.
    return text[:VALUE_LIMIT].encode("utf-8", "replace").decode().replace("\0", "?")
