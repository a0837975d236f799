"""Filing a batch: one look at what is known, every decision in memory, then one statement for each kind of row."""

# ruff: noqa: S608 - only names and operators are put into SQL here; every value is a parameter

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from redrive.clock import Millis
from redrive.letter import Act, Letter, Reason, State, StoredLetter, after_death
from redrive.stores.base import Filed, Filing
from redrive.stores.sqlite import audit, order, rows
from redrive.stores.sqlite.ledger import count_items
from redrive.stores.sqlite.rows import Sealed

_KNOWN = """
SELECT i.id, i.seq, l.state, l.version, l.hop, l.death, l.confirmed_hop, l.job, l.occurrences, l.filed_at, l.attributes
FROM identities i LEFT JOIN letters l ON l.seq = i.seq
WHERE i.id IN (SELECT value FROM json_each(?))
"""
_HOPS = "SELECT seq, hop FROM occurrences WHERE seq IN (SELECT value FROM json_each(?))"
_UPDATE = """
UPDATE letters SET state = ?, version = ?, hop = ?, death = ?, occurrences = ?, updated_at = ?, grp = ?, kind = ?,
  reason = ?, error_type = ?, error_message = ?, handler = ?, message_type = ?, attempts = ?, verified = ?,
  last_attempt_at = ?, attributes = ?, masked = ? WHERE seq = ?
"""
_SENT = "SELECT id, hop FROM letters WHERE content = ? AND state = 'replaying' AND content IS NOT NULL ORDER BY seq"
_TOUCH = "UPDATE letters SET version = ?, hop = ?, occurrences = ?, updated_at = ? WHERE seq = ?"


class _Line(Struct):
    """One letter while its batch is filed. `first` is set for a new letter, `latest` when its facts change."""

    id: str
    seq: int
    state: State
    version: int
    hop: int
    death: int
    confirmed_hop: int
    job: str
    occurrences: int
    filed_at: Millis
    purged: bool = False
    hops: set[int] = field(default_factory=set)
    before: dict[str, str] = field(default_factory=dict)
    first: Letter | None = None
    latest: Letter | None = None
    touched: bool = False


def file(connection: sqlite3.Connection, letters: Sequence[Letter], now: Millis) -> list[Filed]:
    sealed = [rows.seal(letter) for letter in letters]
    batch = _Batch(connection, [one.letter.id for one in sealed], now)
    filed = [batch.file(one) for one in sealed]
    batch.write(connection)
    return filed


def hold(connection: sqlite3.Connection, letters: Sequence[Letter], now: Millis) -> list[Filed]:
    """One by one: whether a message must wait depends on the ones before it."""
    return [
        file(connection, [letter], now)[0]
        if order.must_wait(connection, letter)
        else Filed(letter.id, Filing.RELEASED, State.HELD)
        for letter in letters
    ]


class _Batch:
    def __init__(self, connection: sqlite3.Connection, ids: Sequence[str], now: Millis) -> None:
        self._now = now
        self._lines = _known(connection, ids)
        self._connection = connection
        self._next = connection.execute("SELECT coalesce(max(seq), 0) + 1 FROM identities").fetchone()[0]
        self._deaths: list[tuple[int, int, Millis, bytes]] = []
        self._deeds: list[audit.Deed] = []
        self._died: dict[str, list[str]] = defaultdict(list)

    def file(self, sealed: Sealed) -> Filed:
        line = self._lines.get(sealed.letter.id)
        if line is None and not sealed.letter.verified:
            sealed, line = self._sent_before(sealed)
        if line is None:
            return self._new(sealed)
        if line.purged or sealed.letter.hop in line.hops:
            return Filed(line.id, Filing.DUPLICATE, line.state)
        return self._again(line, sealed)

    def _sent_before(self, sealed: Sealed) -> tuple[Sealed, _Line | None]:
        """A stranger's death with the key and body of a letter we have just sent: its consumer dropped our headers."""
        found = self._connection.execute(_SENT, (order.content(sealed.letter),)).fetchone()
        if found is None:
            return sealed, None
        letter_id, hop = found
        if letter_id not in self._lines:
            self._lines |= _known(self._connection, [letter_id])
        return rows.seal(replace(sealed.letter, id=letter_id, hop=hop)), self._lines[letter_id]

    def _new(self, sealed: Sealed) -> Filed:
        letter = sealed.letter
        life = (first_state(letter), 1, letter.hop, letter.hop, -1, "", 0, self._now)
        line = _Line(letter.id, self._next, *life, first=letter, latest=letter)
        self._next += 1
        self._lines[letter.id] = line
        self._occur(line, sealed)
        return Filed(letter.id, Filing.NEW, line.state)

    def _again(self, line: _Line, sealed: Sealed) -> Filed:
        letter = sealed.letter
        if self._is_current(line, letter):
            self._die(line, letter)
        line.version += 1
        line.touched = True
        self._occur(line, sealed)
        return Filed(line.id, Filing.AGAIN, line.state)

    @staticmethod
    def _is_current(line: _Line, letter: Letter) -> bool:
        return letter.hop >= line.hop and letter.hop > line.confirmed_hop

    def _die(self, line: _Line, letter: Letter) -> None:
        state = after_death(letter, _life(line, letter))
        if line.job and letter.hop == line.hop:
            self._died[line.job].append(line.id)
        if state is not line.state:
            self._deeds.append((f"{line.state} to {state}: hop {letter.hop} died", line.id))
        line.state, line.latest = state, letter
        line.hop, line.death = max(line.hop, letter.hop), letter.hop

    def _occur(self, line: _Line, sealed: Sealed) -> None:
        line.occurrences += 1
        line.hops.add(sealed.letter.hop)
        self._deaths.append((line.seq, sealed.letter.hop, self._now, sealed.facts))

    def write(self, connection: sqlite3.Connection) -> None:
        new = [line for line in self._lines.values() if line.first]
        changed = [line for line in self._lines.values() if line.touched and line.latest and not line.first]
        touched = [line for line in self._lines.values() if line.touched and not line.latest]
        if new:
            self._insert(connection, new)
        if changed:
            self._update(connection, changed)
        touches = ((line.version, line.hop, line.occurrences, self._now, line.seq) for line in touched)
        connection.executemany(_TOUCH, touches)
        connection.executemany("INSERT INTO occurrences VALUES (?, ?, ?, ?)", self._deaths)
        count_items(connection, "died", self._died)
        if self._deeds:
            audit.append(connection, Act("redrive", "died again"), self._now, self._deeds)

    def _insert(self, connection: sqlite3.Connection, new: list[_Line]) -> None:
        connection.executemany("INSERT INTO identities (seq, id) VALUES (?, ?)", ((x.seq, x.id) for x in new))
        marks = ", ".join("?" * 28)
        values = (_letter_row(line, first, latest, self._now) for line, first, latest in _both(new))
        connection.executemany(f"INSERT INTO letters VALUES ({marks})", values)
        marks = ", ".join("?" * 10)
        bodies = (rows.body_row(line.seq, first) for line, first, _ in _both(new))
        connection.executemany(f"INSERT INTO bodies VALUES ({marks})", bodies)
        order.remember(connection, ((line.seq, first) for line, first, _ in _both(new)))
        _index(connection, new)

    def _update(self, connection: sqlite3.Connection, changed: list[_Line]) -> None:
        connection.executemany(_UPDATE, (_changes(line, self._now) for line in changed))
        unindex(connection, ((line.seq, line.filed_at, line.before) for line in changed))
        _index(connection, changed)


def first_state(letter: Letter) -> State:
    """A letter that nobody knew. One that was replayed too often already is not let into another loop."""
    if letter.reason is Reason.HELD:
        return State.HELD
    return State.QUARANTINED if 0 < letter.hop >= letter.max_replays else State.PENDING


def unindex(connection: sqlite3.Connection, gone: Any) -> None:
    """Forget how to find these (seq, filed_at, attributes)."""
    digests, seqs = [], []
    for seq, filed_at, attributes in gone:
        seqs.append((seq,))
        digests += [(digest, filed_at, seq) for digest in rows.attribute_digests(attributes)]
    connection.executemany("DELETE FROM attributes WHERE digest = ? AND filed_at = ? AND seq = ?", digests)
    connection.executemany("DELETE FROM letters_text WHERE rowid = ?", seqs)


def _index(connection: sqlite3.Connection, lines: list[_Line]) -> None:
    texts, digests = [], []
    for line in lines:
        if line.latest:
            texts.append((line.seq, rows.text_of(line.latest)))
            digests += [(digest, line.filed_at, line.seq) for digest in rows.attribute_digests(line.latest.attributes)]
    connection.executemany("INSERT INTO letters_text (rowid, words) VALUES (?, ?)", texts)
    connection.executemany("INSERT INTO attributes VALUES (?, ?, ?)", digests)


def _known(connection: sqlite3.Connection, ids: Sequence[str]) -> dict[str, _Line]:
    found = connection.execute(_KNOWN, (rows.ids_json(ids),)).fetchall()
    lines = {row[0]: _line(row) for row in found}
    by_seq = {line.seq: line for line in lines.values() if not line.purged}
    if by_seq:
        for seq, hop in connection.execute(_HOPS, (rows.ids_json(by_seq),)):
            by_seq[seq].hops.add(hop)
    return lines


def _line(row: tuple[Any, ...]) -> _Line:
    id_, seq, state, version, hop, death, confirmed_hop, job, occurrences, filed_at, attributes = row
    if state is None:
        return _Line(id_, seq, State.DISCARDED, 0, 0, 0, -1, "", 0, 0, purged=True)
    life = (version, hop, death, confirmed_hop, job, occurrences, filed_at)
    return _Line(id_, seq, State(state), *life, before=rows.attributes_of(attributes))


def _life(line: _Line, letter: Letter) -> StoredLetter:
    return StoredLetter(
        letter=letter,
        state=line.state,
        version=line.version,
        hop=line.hop,
        occurrences=line.occurrences,
        filed_at=line.filed_at,
        updated_at=line.filed_at,
        confirmed_hop=line.confirmed_hop,
        job=line.job,
    )


def _both(lines: list[_Line]) -> Iterator[tuple[_Line, Letter, Letter]]:
    return ((line, line.first, line.latest) for line in lines if line.first and line.latest)


def _letter_row(line: _Line, first: Letter, latest: Letter, now: Millis) -> tuple[Any, ...]:
    life = (line.seq, line.id, line.state, line.version, line.hop, line.death, -1, "", None, line.occurrences)
    when = (first.first_attempt_at, latest.last_attempt_at, now, now)
    return (
        *life,
        rows.clean(first.message.source),
        latest.group,
        latest.kind,
        latest.reason,
        latest.error_type,
        latest.error_message,
        latest.handler,
        latest.message_type,
        latest.attempts,
        rows.size(first),
        latest.verified,
        *when,
        rows.attributes_json(latest.attributes),
        rows.masked_json(latest.masked),
        None if first.verified else order.content(first),
    )


def _changes(line: _Line, now: Millis) -> tuple[Any, ...]:
    latest = line.latest
    assert latest is not None
    return (
        line.state,
        line.version,
        line.hop,
        line.death,
        line.occurrences,
        now,
        latest.group,
        latest.kind,
        latest.reason,
        latest.error_type,
        latest.error_message,
        latest.handler,
        latest.message_type,
        latest.attempts,
        latest.verified,
        latest.last_attempt_at,
        rows.attributes_json(latest.attributes),
        rows.masked_json(latest.masked),
        line.seq,
    )
