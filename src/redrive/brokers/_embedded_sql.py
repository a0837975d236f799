"""What the embedded broker keeps in SQLite, and the transactions on it: each function runs inside one.

A topic is split into logs by a stable hash of the key. A lane is a group's way through one log: a position, behind
which everything is settled or in `pending`, and an owner under a lease. A delayed message is a pending row with a due
time; an abandoned one is due at once. `deliveries` of a pending row only grows, so it fences off every older lease.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from redrive.brokers.base import Ack, Bury, Release, RetryAt, Settlement, SourceSpec, Subscription
from redrive.clock import Millis
from redrive.errors import ConfigError
from redrive.message import Headers

BATCH_BYTES = 32 << 20
TRIM_ROWS = 1000
AT_ONCE = 0
OWN_PREFIX = "redrive."

SCHEMA = """
CREATE TABLE logs (
    id INTEGER PRIMARY KEY, topic TEXT NOT NULL, partition INTEGER NOT NULL, head INTEGER NOT NULL DEFAULT 0,
    UNIQUE (topic, partition)
);
CREATE TABLE messages (
    log INTEGER NOT NULL, offset INTEGER NOT NULL, ts INTEGER NOT NULL, stored INTEGER NOT NULL,
    key BLOB, body BLOB, headers BLOB NOT NULL, PRIMARY KEY (log, offset)
);
CREATE TABLE lanes (
    id INTEGER PRIMARY KEY, grp TEXT NOT NULL, log INTEGER NOT NULL, position INTEGER NOT NULL,
    owner INTEGER, lease_until INTEGER NOT NULL DEFAULT 0, generation INTEGER NOT NULL DEFAULT 0, UNIQUE (grp, log)
);
CREATE INDEX lanes_by_log ON lanes (log);
CREATE TABLE pending (
    lane INTEGER NOT NULL, offset INTEGER NOT NULL, due INTEGER, deliveries INTEGER NOT NULL, headers BLOB,
    PRIMARY KEY (lane, offset)
) WITHOUT ROWID;
CREATE INDEX pending_due ON pending (lane, due, offset) WHERE due IS NOT NULL;
CREATE TABLE groups (name TEXT PRIMARY KEY, epoch INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE members (
    id INTEGER PRIMARY KEY AUTOINCREMENT, grp TEXT NOT NULL, wants TEXT NOT NULL, until INTEGER NOT NULL
);
"""


class Lease(Struct, frozen=True):
    """The token of a delivery. `turn` is how often the message was handed out; the last turn alone may settle it."""

    member: int
    lane: int
    generation: int
    offset: int
    turn: int


class Row(NamedTuple):
    offset: int
    turn: int
    ts: Millis
    key: bytes | None
    body: bytes | None
    headers: bytes


class Log(Struct):
    id: int
    head: int


class LaneRow(Struct):
    id: int
    topic: str
    partition: int
    owner: int | None
    lease_until: Millis
    generation: int


class View(Struct):
    """What a heartbeat found: the lanes this member owns now, and which of them it is to hand on."""

    owned: list[LaneRow]
    draining: set[int]
    epoch: int


class Fetched(Struct):
    rows: list[tuple[int, list[Row]]]
    next_due: Millis | None
    epoch: int
    version: int


class _Room(Struct):
    messages: int
    size: int = BATCH_BYTES

    @property
    def full(self) -> bool:
        return self.messages <= 0 or self.size <= 0

    def fill(self, found: Iterable[Sequence[Any]]) -> list[Row]:
        rows = []
        for row in map(Row._make, found):
            rows.append(row)
            self.messages -= 1
            self.size -= len(row.body or b"") + len(row.headers)
            if self.full:
                break
        return rows


EXTEND = "UPDATE lanes SET lease_until = max(lease_until, ?) WHERE id = ? AND owner = ? AND generation = ?"
FIND = """
SELECT m.key, m.body, m.headers FROM logs g JOIN messages m ON m.log = g.id
WHERE g.topic = ? AND g.partition = ? AND m.offset = ? AND m.ts = ?
"""
_IN_FLIGHT = "lane = ? AND offset = ? AND deliveries = ? AND due IS NULL"
_DONE = f"DELETE FROM pending WHERE {_IN_FLIGHT}"  # noqa: S608
_ALL_DONE = """
DELETE FROM pending WHERE lane = ? AND deliveries = ? AND due IS NULL AND offset IN (SELECT value FROM json_each(?))
"""
_DELAY = f"UPDATE pending SET due = ?, headers = ? WHERE {_IN_FLIGHT}"  # noqa: S608
_GIVE_BACK = f"UPDATE pending SET due = ? WHERE {_IN_FLIGHT}"  # noqa: S608
_ABANDON = f"UPDATE pending SET due = {AT_ONCE} WHERE lane = ? AND due IS NULL"  # noqa: S608
_READY = """
SELECT l.id, l.log, l.generation, l.position, g.head,
       (SELECT min(due) FROM pending WHERE lane = l.id AND due IS NOT NULL)
FROM lanes l JOIN logs g ON g.id = l.log WHERE l.grp = ? AND l.owner = ? ORDER BY l.id
"""
_DUE = """
SELECT p.offset, p.deliveries + 1, m.ts, m.key, m.body, coalesce(p.headers, m.headers)
FROM pending p CROSS JOIN messages m ON m.log = ? AND m.offset = p.offset
WHERE p.lane = ? AND p.due <= ? ORDER BY p.due, p.offset LIMIT ?
"""
_NEW = """
SELECT offset, 1, ts, key, body, headers FROM messages WHERE log = ? AND offset >= ? ORDER BY offset LIMIT ?
"""
_TAKE = """
INSERT INTO pending (lane, offset, deliveries)
SELECT ?, offset, 1 FROM messages WHERE log = ? AND offset BETWEEN ? AND ?
"""
_START = """
INSERT INTO lanes (grp, log, position)
SELECT ?, id, coalesce((SELECT min(offset) FROM messages WHERE log = logs.id), head) FROM logs WHERE id = ?
"""
_LANES = """
SELECT g.id, g.topic, l.id, g.partition, l.owner, l.lease_until, l.generation
FROM logs g LEFT JOIN lanes l ON l.log = g.id AND l.grp = ? ORDER BY g.partition, g.topic
"""
_SETTLED_BELOW = """
SELECT min(coalesce((SELECT min(offset) FROM pending WHERE lane = l.id), l.position))
FROM lanes l WHERE l.log = ?
"""
_OLDEST = "SELECT offset, stored FROM messages WHERE log = ? ORDER BY offset LIMIT 1"
_DEPTH = """
SELECT g.head - coalesce(l.position, (SELECT min(offset) FROM messages WHERE log = g.id), g.head)
         + (SELECT count(*) FROM pending WHERE lane = l.id),
       (SELECT ts FROM messages WHERE log = g.id
          AND offset >= coalesce((SELECT min(offset) FROM pending WHERE lane = l.id), l.position, 0)
        ORDER BY offset LIMIT 1)
FROM logs g LEFT JOIN lanes l ON l.log = g.id AND l.grp = ? WHERE g.topic = ?
"""

_headers = msgspec.msgpack.Decoder(tuple[tuple[bytes, bytes | None], ...])
_NO_HEADERS = msgspec.msgpack.encode(())


def pack(headers: Headers) -> bytes:
    # Names may carry bytes that were no UTF-8 where they came from.
    return msgspec.msgpack.encode([(name.encode("utf-8", "surrogatepass"), value) for name, value in headers])


def unpack(raw: bytes) -> Headers:
    if raw == _NO_HEADERS:
        return ()
    return tuple((name.decode("utf-8", "surrogatepass"), value) for name, value in _headers.decode(raw))


def is_glob(name: str) -> bool:
    return any(mark in name for mark in "*?[")


def is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def wanted(subscription: Subscription, topic: str) -> bool:
    if any(fnmatchcase(topic, pattern) for pattern in subscription.exclude):
        return False
    if topic in subscription.sources:
        return True
    return not topic.startswith(OWN_PREFIX) and any(fnmatchcase(topic, p) for p in subscription.sources if is_glob(p))


def ensure(connection: sqlite3.Connection, sources: Sequence[SourceSpec], default: int) -> None:
    for spec in sources:
        found = len(topic_logs(connection, spec.name, spec.partitions or default))
        if spec.partitions is not None and found != spec.partitions:
            raise ConfigError(
                f"topic {spec.name} has {found} partitions, the configuration asks for {spec.partitions}",
                key="partitions", fix=f"set partitions to {found}, or use a new topic",
            )  # fmt: skip


def topic_logs(connection: sqlite3.Connection, name: str, partitions: int) -> list[Log]:
    """The logs of this topic, made now if it has none."""
    select = "SELECT id, head FROM logs WHERE topic = ? ORDER BY partition"
    rows = connection.execute(select, (name,)).fetchall()
    if not rows:
        new = [(name, partition) for partition in range(partitions)]
        connection.executemany("INSERT INTO logs (topic, partition) VALUES (?, ?)", new)
        rows = connection.execute(select, (name,)).fetchall()
    return [Log(*row) for row in rows]


def settle_all(connection: sqlite3.Connection, leases: Iterable[Lease]) -> bool:
    """Settle all of these as done; False, with nothing changed, when one of them is not in flight under its lease.

    One statement for many messages: the lock on the interpreter changes hands at every step of a statement.
    """
    turns: dict[tuple[int, int], list[int]] = {}
    for lease in leases:
        turns.setdefault((lease.lane, lease.turn), []).append(lease.offset)
    connection.execute("SAVEPOINT settling")
    for (lane, turn), offsets in turns.items():
        values = (lane, turn, msgspec.json.encode(offsets).decode())
        if connection.execute(_ALL_DONE, values).rowcount != len(offsets):
            connection.execute("ROLLBACK TO settling")
            return False
    return True


def settle_one(cursor: sqlite3.Cursor, settlement: Settlement, now: Millis) -> bool:
    """True when the delivery was still in flight under its own lease, and is settled now."""
    lease: Lease = settlement.delivery.token
    key = (lease.lane, lease.offset, lease.turn)
    match settlement:
        case Ack() | Bury():
            cursor.execute(_DONE, key)
        case RetryAt(copy=copy, when=when):
            cursor.execute(_DELAY, (when, pack(copy.headers), *key))
        case Release():
            cursor.execute(_GIVE_BACK, (now, *key))
    return cursor.rowcount == 1


def version(connection: sqlite3.Connection) -> int:
    """A number that changes when another process commits."""
    return int(connection.execute("PRAGMA data_version").fetchone()[0])


def fetch(
    connection: sqlite3.Connection, group: str, member: int, open_lanes: dict[int, int], messages: int, now: Millis,
    rotation: int,
) -> Fetched:  # fmt: skip
    lanes = [row for row in connection.execute(_READY, (group, member)) if open_lanes.get(row[0]) == row[2]]
    start = rotation % len(lanes) if lanes else 0
    room, picked = _Room(messages), []
    for lane, log, _, position, head, due in lanes[start:] + lanes[:start]:
        rows: list[Row] = []
        if due is not None and due <= now and not room.full:
            rows = _take_due(connection, lane, log, now, room)
        if position < head and not room.full:
            rows += _take_new(connection, lane, log, position, room)
        if rows:
            picked.append((lane, rows))
    next_due = min((row[5] for row in lanes if row[5] is not None), default=None)
    return Fetched(picked, next_due, _epoch(connection, group), version(connection))


def _take_due(connection: sqlite3.Connection, lane: int, log: int, now: Millis, room: _Room) -> list[Row]:
    rows = room.fill(connection.execute(_DUE, (log, lane, now, room.messages)))
    turns = [(row.turn, lane, row.offset) for row in rows]
    connection.executemany("UPDATE pending SET due = NULL, deliveries = ? WHERE lane = ? AND offset = ?", turns)
    return sorted(rows, key=lambda row: row.offset)


def _take_new(connection: sqlite3.Connection, lane: int, log: int, position: int, room: _Room) -> list[Row]:
    rows = room.fill(connection.execute(_NEW, (log, position, room.messages)))
    if rows:
        last = rows[-1].offset
        connection.execute(_TAKE, (lane, log, position, last))
        connection.execute("UPDATE lanes SET position = ? WHERE id = ?", (last + 1, lane))
    return rows


def beat(
    connection: sqlite3.Connection, subscription: Subscription, member: int, movable: set[int], now: Millis,
    until: Millis,
) -> View:  # fmt: skip
    """Stay a member, keep the leases, give back what is surplus and movable, and claim what is free up to the share."""
    group = subscription.group
    _stay(connection, subscription, member, now, until)
    connection.execute("UPDATE lanes SET lease_until = ? WHERE grp = ? AND owner = ?", (until, group, member))
    lanes = _lanes(connection, subscription)
    share = _share(connection, subscription, member, len(lanes))
    mine = [row for row in lanes if row.owner == member]
    surplus = {row.id for row in mine[share:]}
    _free(connection, group, surplus & movable)
    free = [row for row in lanes if row.owner != member and (row.owner is None or row.lease_until < now)]
    claimed = [_claim(connection, row, member, until) for row in free[: max(0, share - len(mine))]]
    kept = [row for row in mine if row.id not in surplus & movable]
    return View(kept + claimed, surplus - movable, _epoch(connection, group))


def _wants(subscription: Subscription) -> str:
    return repr((sorted(subscription.sources), sorted(subscription.exclude)))


def enlist(connection: sqlite3.Connection, subscription: Subscription, until: Millis) -> int:
    values = (subscription.group, _wants(subscription), until)
    cursor = connection.execute("INSERT INTO members (grp, wants, until) VALUES (?, ?, ?)", values)
    _bump(connection, subscription.group)
    return int(cursor.lastrowid or 0)


def _stay(connection: sqlite3.Connection, subscription: Subscription, member: int, now: Millis, until: Millis) -> None:
    """Renew the membership, even one that had run out, and strike the dead off the list."""
    group = subscription.group
    changed = connection.execute("UPDATE members SET until = ? WHERE id = ?", (until, member)).rowcount == 0
    if changed:
        connection.execute("INSERT INTO members VALUES (?, ?, ?, ?)", (member, group, _wants(subscription), until))
    dead = connection.execute("DELETE FROM members WHERE grp = ? AND until < ?", (group, now)).rowcount
    if changed or dead:
        _bump(connection, group)


def _lanes(connection: sqlite3.Connection, subscription: Subscription) -> list[LaneRow]:
    """The group's lanes through all logs it wants; a new lane starts at the oldest message its log still has."""
    rows = connection.execute(_LANES, (subscription.group,)).fetchall()
    lanes = []
    for log, topic, lane, partition, owner, lease_until, generation in rows:
        if not wanted(subscription, topic):
            continue
        if lane is None:
            started = connection.execute(_START, (subscription.group, log)).lastrowid or 0
            lanes.append(LaneRow(started, topic, partition, None, 0, 0))
        else:
            lanes.append(LaneRow(lane, topic, partition, owner, lease_until, generation))
    return lanes


def _share(connection: sqlite3.Connection, subscription: Subscription, member: int, lanes: int) -> int:
    """How many lanes this member is due. The shares of all members add up to the lanes, the oldest get the rest."""
    sql = "SELECT id FROM members WHERE grp = ? AND wants = ? ORDER BY id"
    members = [row[0] for row in connection.execute(sql, (subscription.group, _wants(subscription)))]
    return lanes // len(members) + (members.index(member) < lanes % len(members))


def _claim(connection: sqlite3.Connection, row: LaneRow, member: int, until: Millis) -> LaneRow:
    """Take the lane; what its last owner left in flight is due at once, and that owner's leases are void."""
    sql = "UPDATE lanes SET owner = ?, lease_until = ?, generation = generation + 1 WHERE id = ?"
    connection.execute(sql, (member, until, row.id))
    connection.execute(_ABANDON, (row.id,))
    return msgspec.structs.replace(row, owner=member, lease_until=until, generation=row.generation + 1)


def _free(connection: sqlite3.Connection, group: str, lanes: Collection[int]) -> None:
    ids = [(lane,) for lane in lanes]
    connection.executemany(_ABANDON, ids)
    connection.executemany("UPDATE lanes SET owner = NULL, lease_until = 0 WHERE id = ?", ids)
    if ids:
        _bump(connection, group)


def leave(connection: sqlite3.Connection, group: str, member: int) -> None:
    sql = "SELECT id FROM lanes WHERE grp = ? AND owner = ?"
    _free(connection, group, [row[0] for row in connection.execute(sql, (group, member))])
    connection.execute("DELETE FROM members WHERE id = ?", (member,))
    _bump(connection, group)


def _epoch(connection: sqlite3.Connection, group: str) -> int:
    row = connection.execute("SELECT epoch FROM groups WHERE name = ?", (group,)).fetchone()
    return int(row[0]) if row else 0


def _bump(connection: sqlite3.Connection, group: str) -> None:
    """Tell every member of the group, in any process, to look at the shares again."""
    sql = "INSERT INTO groups VALUES (?, 1) ON CONFLICT (name) DO UPDATE SET epoch = epoch + 1"
    connection.execute(sql, (group,))


def trim(connection: sqlite3.Connection, lanes: Sequence[int], cutoff: Millis) -> list[int]:
    """Delete a bounded part of what every group has settled and is old enough; the lanes that may have more."""
    return [lane for lane in lanes if _trim_log(connection, lane, cutoff) == TRIM_ROWS]


def _trim_log(connection: sqlite3.Connection, lane: int, cutoff: Millis) -> int:
    log = connection.execute("SELECT log FROM lanes WHERE id = ?", (lane,)).fetchone()[0]
    first, stored = connection.execute(_OLDEST, (log,)).fetchone() or (0, cutoff)
    if stored >= cutoff:
        return 0
    below = min(connection.execute(_SETTLED_BELOW, (log,)).fetchone()[0], first + TRIM_ROWS)
    sql = "DELETE FROM messages WHERE log = ? AND offset < ? AND stored < ?"
    return connection.execute(sql, (log, below, cutoff)).rowcount


def depth(connection: sqlite3.Connection, source: str, group: str) -> tuple[int, Millis | None]:
    """How many, and when the first of them in log order was made."""
    rows = connection.execute(_DEPTH, (group, source)).fetchall()
    oldest = min((row[1] for row in rows if row[1] is not None), default=None)
    return sum(row[0] for row in rows), oldest
