"""Text for terminals. What comes from a broker or a message is never printed raw."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

MIN_LAST = 24
GAP = "  "


def safe(text: object) -> str:
    """One line that only shows: control, bidi and unknown characters are written as escapes."""
    plain = str(text)
    return plain if plain.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in plain)


def lines(text: str) -> str:
    """Several lines that only show; line ends and tabs stay what they are."""
    return "\n".join(safe(line.expandtabs(4)) for line in text.replace("\r\n", "\n").split("\n"))


def _escape(character: str) -> str:
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character)
    return short or character.encode("unicode_escape", "surrogatepass").decode()


def as_json(value: Any) -> str:
    """JSON in ASCII, so that nothing in it can steer a terminal."""
    import json

    import msgspec

    return json.dumps(msgspec.to_builtins(value), indent=2).replace("\x7f", "\\u007f")


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[int] = ()) -> list[str]:
    """Aligned columns; the last one is cut where the terminal ends."""
    cells = [list(head), *([safe(cell) for cell in row] for row in rows)]
    widths = [max(map(width, column)) for column in zip(*cells, strict=True)]
    used = sum(widths[:-1]) + len(GAP) * (len(widths) - 1)
    room = max(columns() - used, MIN_LAST)
    return [_row([*row[:-1], cut(row[-1], room)], widths, right) for row in cells]


def _row(cells: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> str:
    padded = []
    for number, (cell, wanted) in enumerate(zip(cells, widths, strict=True)):
        pad = " " * (wanted - width(cell))
        padded.append(pad + cell if number in right else cell + pad)
    return GAP.join(padded).rstrip()


def pairs(facts: Iterable[tuple[str, object]]) -> list[str]:
    """Names and values beside each other; a value of several lines stays in its column."""
    shown = [(name, lines(str(value))) for name, value in facts]
    wide = max((len(name) for name, _ in shown), default=0)
    margin = "\n" + " " * wide + GAP
    return [f"{name:<{wide}}{GAP}{value}".replace("\n", margin).rstrip() for name, value in shown]


def indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in lines(text).split("\n"))


def cut(text: str, room: int) -> str:
    """At most this many columns."""
    if width(text) <= room:
        return text
    while width(text) > room - 1:
        text = text[: min(len(text) - 1, room - 1)]
    return text + "…"


def width(text: str) -> int:
    """Columns on a terminal: East Asian characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def columns() -> int:
    """The terminal's width; a pipe has room for everything a list needs."""
    import shutil

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 240


def age(millis: int) -> str:
    """How long, in the one unit that says most."""
    seconds = max(millis, 0) // 1000
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
