"""Order by key: which letters of a key are open, and what waits behind them.

A lane is one key of one source and group. Its open letters are the block itself: there is no second record that could
disagree with them, and a lane is released by the very step that closes its last one.
"""

# ruff: noqa: S608 - only names and operators are put into SQL here; every value is a parameter

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from redrive.letter import Letter
from redrive.message import digest
from redrive.stores.sqlite import rows

_DEAD = "('pending', 'quarantined')"
_OPEN = "('pending', 'quarantined', 'held', 'replaying')"
_BLOCKED_ONE = f"""
SELECT count(*), min(CASE WHEN l.state IN {_DEAD} THEN k.place END) FROM keyed k JOIN letters l ON l.seq = k.seq
WHERE k.lane = ? AND l.state IN {_OPEN}
"""
_RELEASED = """
SELECT l.id, k.lane, k.place FROM letters l JOIN keyed k ON k.seq = l.seq WHERE l.state = 'held'
AND NOT EXISTS (SELECT 1 FROM keyed k2 JOIN letters l2 ON l2.seq = k2.seq
                WHERE k2.lane = k.lane AND l2.state IN ('pending', 'quarantined', 'replaying'))
AND NOT EXISTS (SELECT 1 FROM job_items j JOIN jobs b ON b.id = j.job
                WHERE j.letter = l.id AND b.state IN ('running', 'paused') AND j.n >= b.window_end)
ORDER BY k.lane, k.place LIMIT ?
"""
_BEHIND = """
SELECT i.id, k.lane, k.place, l.state FROM keyed k JOIN letters l ON l.seq = k.seq JOIN identities i ON i.seq = k.seq
WHERE k.lane IN (SELECT k2.lane FROM keyed k2 JOIN identities i2 ON i2.seq = k2.seq
                 WHERE i2.id IN (SELECT value FROM json_each(?)))
"""
_WAITS = f"""
SELECT 1 FROM keyed k JOIN letters l ON l.seq = k.seq
WHERE k.lane = ? AND k.place < ? AND (l.state IN {_DEAD} OR l.state = 'held') LIMIT 1
"""


def lane(source: str, group: str, key: bytes | None) -> bytes:
    return digest([source.encode("utf-8", "surrogatepass"), group.encode("utf-8", "surrogatepass"), key])[:16]


def content(letter: Letter) -> bytes:
    """The same for every message of this source and group with this key and body."""
    return digest([lane_of(letter), letter.message.body])[:16]


def lane_of(letter: Letter) -> bytes:
    return lane(letter.message.source, letter.group, letter.message.key)


def blocked(connection: sqlite3.Connection, lanes: Sequence[bytes]) -> dict[bytes, int | None]:
    """The lanes that have open letters, each with the place of its first dead one."""
    found: dict[bytes, int | None] = {}
    for one in lanes:
        row = connection.execute(_BLOCKED_ONE, (one,)).fetchone()
        if row[0]:
            found[one] = row[1]
    return found


def must_wait(connection: sqlite3.Connection, letter: Letter) -> bool:
    """Whether something still stands before this message: any open letter, or for a copy a dead one before it."""
    there, first_dead = connection.execute(_BLOCKED_ONE, (lane_of(letter),)).fetchone()
    if not letter.hop:
        return bool(there)
    return first_dead is not None and letter.place is not None and first_dead < letter.place


def remember(connection: sqlite3.Connection, new: Iterable[tuple[int, Letter]]) -> None:
    """Note where these new letters stand among the messages of their key."""
    keyed = ((seq, lane_of(letter), rows.clamp(letter.place)) for seq, letter in new if letter.place is not None)
    connection.executemany("INSERT INTO keyed VALUES (?, ?, ?)", keyed)


def with_followers(connection: sqlite3.Connection, ids: list[str]) -> list[str]:
    """The selection, what is held behind any of it included, each key in its own order."""
    chosen = set(ids)
    keyed = [row for row in connection.execute(_BEHIND, (rows.ids_json(ids),)) if row[0] in chosen or row[3] == "held"]
    ordered = [row[0] for row in sorted(keyed, key=lambda row: (row[1], row[2]))]
    in_order = set(ordered)
    return [one for one in ids if one not in in_order] + ordered


def waits_behind(connection: sqlite3.Connection, seq: int) -> bool:
    """Whether a held letter has a dead or held one before it."""
    row = connection.execute("SELECT lane, place FROM keyed WHERE seq = ?", (seq,)).fetchone()
    return row is not None and connection.execute(_WAITS, row).fetchone() is not None


def released(connection: sqlite3.Connection, limit: int) -> list[str]:
    """Held letters with nothing before them, in the order of their keys, and in no job yet."""
    found: list[tuple[Any, ...]] = connection.execute(_RELEASED, (limit,)).fetchall()
    return [row[0] for row in found]
