"""A filter as SQL with parameters only, and the cursor that continues a list."""

# ruff: noqa: S608 - only names and operators are put into SQL here; every value is a parameter

from __future__ import annotations

import base64
import binascii
from typing import Any

from msgspec import Struct, field

from redrive.clock import Millis
from redrive.errors import BadRequest
from redrive.query import Filter
from redrive.stores.sqlite import rows

PATTERN_LIMIT, STARS_LIMIT = 1000, 5  # every star multiplies the work of matching
WORDS_LIMIT, WORD_LIMIT = 32, 200
_COLUMNS = ("group", "kind", "error_type", "handler", "message_type")


class Search(Struct):
    """What to read from, under which conditions, and what orders it newest first without sorting."""

    tables: str = "letters l"
    order: str = "l"
    conditions: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def add(self, condition: str, *values: Any) -> None:
        self.conditions.append(condition)
        self.values += values

    def below(self, cursor: str | None) -> None:
        if cursor is not None:
            self.add(f"({self.order}.filed_at, {self.order}.seq) < (?, ?)", *read_cursor(cursor))

    def select(self, columns: str, *, ordered: bool) -> str:
        where = f" WHERE {' AND '.join(self.conditions)}" if self.conditions else ""
        order = f" ORDER BY {self.order}.filed_at DESC, {self.order}.seq DESC" if ordered else ""
        return f"SELECT {columns} FROM {self.tables}{where}{order} LIMIT ?"


def search(wanted: Filter, *, indexed: bool) -> Search:
    """`indexed`: whether the words of letters are in an FTS5 index; the same letters are found either way.

    A plus sign keeps the planner on the index that is in the order of the list: matches of a pattern or a common word
    can be most of the table, and sorting those for one page costs far more than stepping over the others.
    """
    found = Search()
    _attributes(found, wanted.attributes)
    _equalities(found, wanted)
    _source(found, wanted.source)
    _times(found, wanted.since, wanted.until)
    _text(found, wanted.text, indexed)
    return found


def _attributes(found: Search, attributes: dict[str, str]) -> None:
    digests = [rows.attribute_digest(rows.clean(n), rows.clean(v)) for n, v in attributes.items()]
    if digests:
        # The index of attributes is in the order of the list, so it drives the query and nothing is sorted.
        found.tables, found.order = "attributes a CROSS JOIN letters l ON l.seq = a.seq", "a"
        found.add("a.digest = ?", digests[0])
    for more in digests[1:]:
        same = "x.digest = ? AND x.filed_at = l.filed_at AND x.seq = l.seq"
        found.add(f"EXISTS (SELECT 1 FROM attributes x WHERE {same})", more)


def _equalities(found: Search, wanted: Filter) -> None:
    if wanted.states:
        marks = ", ".join("?" * len(wanted.states))
        found.add(f"l.state IN ({marks})", *(str(state) for state in wanted.states))
    for name in _COLUMNS:
        value = getattr(wanted, name)
        if value is not None:
            found.add(f"l.{'grp' if name == 'group' else name} = ?", rows.clean(str(value)))


def _source(found: Search, source: str | None) -> None:
    if source is None:
        return
    if len(source) > PATTERN_LIMIT or source.count("*") > STARS_LIMIT:
        raise BadRequest(f"a source pattern has at most {PATTERN_LIMIT} characters and {STARS_LIMIT} stars")
    if "*" in source:
        pattern = rows.clean(source).replace("[", "[[]").replace("?", "[?]")
        found.add("+l.source GLOB ?", pattern)
    else:
        found.add("l.source = ?", rows.clean(source))


def _times(found: Search, since: Millis | None, until: Millis | None) -> None:
    if since is not None:
        found.add(f"{found.order}.filed_at >= ?", rows.clamp(since))
    if until is not None:
        found.add(f"{found.order}.filed_at < ?", rows.clamp(until))


def _text(found: Search, text: str | None, indexed: bool) -> None:
    """Every word must begin a word of the letter. A text without any word finds nothing."""
    if text is None or not text.strip():
        return
    wanted = [word[:WORD_LIMIT] for word in rows.words(rows.clean(text))[:WORDS_LIMIT]]
    if not wanted:
        found.add("0")
    elif indexed:
        matches = " ".join(f'"{word}"*' for word in wanted)
        found.add("+l.seq IN (SELECT rowid FROM letters_text WHERE letters_text MATCH ?)", matches)
    else:
        every = " AND ".join(["words LIKE ?"] * len(wanted))
        found.add(f"+l.seq IN (SELECT rowid FROM letters_text WHERE {every})", *(f"% {word}%" for word in wanted))


def write_cursor(filed_at: Millis, seq: int) -> str:
    return base64.urlsafe_b64encode(f"{filed_at}.{seq}".encode()).decode().rstrip("=")


def read_cursor(cursor: str) -> tuple[Millis, int]:
    try:
        plain = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode("ascii")
        filed_at, _, seq = plain.partition(".")
        return rows.clamp(int(filed_at)), rows.clamp(int(seq))
    except (binascii.Error, ValueError) as e:
        raise BadRequest("the cursor does not come from a page of this store") from e
