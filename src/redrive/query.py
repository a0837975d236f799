"""What to look for among letters."""

from __future__ import annotations

from msgspec import Struct, field

from redrive.clock import Millis
from redrive.letter import Kind, State

MAX_PAGE = 500


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
