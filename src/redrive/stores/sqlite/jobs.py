"""The replay jobs of a SQLite store: a frozen list of letters, and a window that only moves forward."""

# ruff: noqa: S608 - only names and operators are put into SQL here; every value is a parameter

from __future__ import annotations

import secrets
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from redrive.clock import Millis
from redrive.errors import BadRequest, LeaseConflict
from redrive.letter import Act, Kind, Letter, Outcome, Reason, State, StoredLetter, after_outcome
from redrive.message import Message
from redrive.query import MAX_PAGE
from redrive.stores.base import DEFAULT_WINDOW, Job, JobState, Refusal
from redrive.stores.sqlite import audit, order, rows
from redrive.stores.sqlite.file import File
from redrive.stores.sqlite.ledger import count_items

_JOB = (
    "SELECT id, who, why, state, created_at, total, size, rate, window_start, window_end, sent, refused, resolved, "
    "died, owner, lease_until FROM jobs"
)
_ITEMS = """
SELECT j.n, j.letter, l.seq, l.state, i.purged_at FROM job_items j
LEFT JOIN identities i ON i.id = j.letter LEFT JOIN letters l ON l.seq = i.seq
WHERE j.job = ? AND j.n >= ? AND j.n < ? ORDER BY j.n
"""
_IN_WINDOW = """
seq IN (SELECT i.seq FROM job_items j JOIN identities i ON i.id = j.letter
        WHERE j.job = ? AND j.n >= ? AND j.n < ? AND j.refused IS NULL)
AND state = 'replaying' AND job = ?
"""
_CLAIM = """
UPDATE letters SET state = 'replaying', hop = hop + 1, job = ?, sent_at = NULL, version = version + 1, updated_at = ?
WHERE seq IN (SELECT value FROM json_each(?)) AND state IN ('pending', 'held')
"""
_OPEN = f"""
{rows.STORED} JOIN identities i ON i.seq = l.seq JOIN job_items j ON j.letter = i.id
WHERE j.job = ? AND j.n >= ? AND j.n < ? AND j.refused IS NULL AND l.state = 'replaying' AND l.job = ? ORDER BY j.n
"""
_REPORTED = """
SELECT l.id, l.seq, l.state, l.version, l.hop, l.occurrences, l.filed_at, l.updated_at, l.confirmed_hop, l.job
FROM identities i JOIN letters l ON l.seq = i.seq WHERE i.id IN (SELECT value FROM json_each(?))
"""
_JOB_MOVES = {
    JobState.RUNNING: {JobState.PAUSED, JobState.CANCELLED},
    JobState.PAUSED: {JobState.RUNNING, JobState.CANCELLED},
    JobState.DONE: set(),
    JobState.CANCELLED: set(),
}
_UNREAD = Letter("", Message("", "", 0, "", 0, None, None), "", Kind.TRANSIENT, Reason.ADOPTED, "", "", 0, 0, 0)
_OFFICE = "redrive"
_MOST_RELEASED = 10_000


class SqliteJobs:
    def __init__(self, file: File) -> None:
        self._file = file

    async def create(
        self,
        ids: Sequence[str],
        act: Act,
        now: Millis,
        *,
        window: int = DEFAULT_WINDOW,
        rate: float | None = None,
    ) -> Job:
        """As the socket says; an id given twice is one item, and a job without items is done at once."""
        if window < 1:
            raise BadRequest(f"a window of {window} letters would never move")
        letters = list(dict.fromkeys(rows.clean(one) for one in ids))
        job = Job(
            id=_new_id(now),
            act=Act(rows.clean(act.who), rows.clean(act.why)),
            state=JobState.RUNNING if letters else JobState.DONE,
            created_at=now,
            total=len(letters),
            window=window,
            rate=rate,
        )
        return await self._file.write(lambda c: _create(c, job, order.with_followers(c, letters)))

    async def release_held(self, now: Millis, *, window: int = DEFAULT_WINDOW) -> Job | None:
        if not await self._file.read(lambda c: order.released(c, 1)):
            return None
        act = Act(_OFFICE, "nothing stands before them any more")
        job = Job(_new_id(now), act, JobState.RUNNING, now, 0, window)
        return await self._file.write(lambda c: _release_held(c, job))

    async def get(self, job_id: str) -> Job | None:
        return await self._file.read(lambda c: _find(c, rows.clean(job_id)))

    async def recent(self, limit: int = 50) -> list[Job]:
        limit = max(1, min(limit, MAX_PAGE))
        found = await self._file.read(lambda c: c.execute(f"{_JOB} ORDER BY n DESC LIMIT ?", (limit,)).fetchall())
        return [_job(row) for row in found]

    async def lease(self, owner: str, seconds: float, now: Millis) -> Job | None:
        """As the socket says: the one this owner has, else the oldest.

        It also lets go of windows that a cancelled job left open and that no living owner will close: their letters
        return to pending, from where a late success still resolves them.
        """
        return await self._file.write(lambda c: _lease(c, rows.clean(owner), now + int(seconds * 1000), now))

    async def advance(self, job_id: str, owner: str, now: Millis) -> list[StoredLetter]:
        """As the socket says. Also empty, without ending it, when the job is paused or cancelled."""
        return await self._file.write(lambda c: _advance(c, _owned(c, job_id, owner), now))

    async def close_window(self, job_id: str, owner: str, refused: Sequence[Refusal], now: Millis) -> Job:
        """As the socket says, in any state of the job: what was published was published. Again, it changes nothing."""
        return await self._file.write(lambda c: _close(c, _owned(c, job_id, owner), refused, now))

    async def set_state(self, job_id: str, expected: JobState, to: JobState, act: Act, now: Millis) -> bool:
        if to not in _JOB_MOVES[expected]:
            raise BadRequest(f"a job cannot go from {expected} to {to}")
        return await self._file.write(lambda c: _set_state(c, rows.clean(job_id), expected, to, act, now))

    async def refusals(self, job_id: str) -> list[Refusal]:
        sql = "SELECT letter, refused FROM job_items WHERE job = ? AND refused IS NOT NULL ORDER BY n"
        found = await self._file.read(lambda c: c.execute(sql, (rows.clean(job_id),)).fetchall())
        return [Refusal(*row) for row in found]

    async def outcomes(self, outcomes: Sequence[Outcome], now: Millis) -> list[str]:
        return await self._file.write(lambda c: apply_outcomes(c, outcomes, now))

    async def settle_quiet(self, quiet_before: Millis, now: Millis) -> list[str]:
        return await self._file.write(lambda c: _settle_quiet(c, quiet_before, now))


def _job(row: tuple[Any, ...]) -> Job:
    id_, who, why, state, *rest = row
    return Job(id_, Act(who, why), JobState(state), *rest)


def _find(connection: sqlite3.Connection, job_id: str) -> Job | None:
    row = connection.execute(f"{_JOB} WHERE id = ?", (job_id,)).fetchone()
    return _job(row) if row else None


def _owned(connection: sqlite3.Connection, job_id: str, owner: str) -> Job:
    job = _find(connection, rows.clean(job_id))
    if job is None or not owner or job.owner != rows.clean(owner):
        raise LeaseConflict(job_id, owner)
    return job


def _new_id(now: Millis) -> str:
    return f"{now:011x}-{secrets.token_hex(5)}"


def _release_held(connection: sqlite3.Connection, job: Job) -> Job | None:
    letters = order.released(connection, _MOST_RELEASED)
    return _create(connection, job, letters) if letters else None


def _create(connection: sqlite3.Connection, job: Job, letters: list[str]) -> Job:
    job = replace(job, total=len(letters))
    connection.execute(
        "INSERT INTO jobs (id, who, why, state, created_at, total, size, rate, window_start, window_end, sent, refused,"
        " resolved, died, owner, lease_until) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, 0, 0, '', 0)",
        (job.id, job.act.who, job.act.why, job.state, job.created_at, job.total, job.window, job.rate),
    )
    items = ((job.id, n, letter) for n, letter in enumerate(letters))
    connection.executemany("INSERT INTO job_items (job, n, letter) VALUES (?, ?, ?)", items)
    audit.append(connection, job.act, job.created_at, [(f"create replay {job.id} of {job.total}", "")])
    return job


def _set_state(
    connection: sqlite3.Connection, job_id: str, expected: JobState, to: JobState, act: Act, now: Millis
) -> bool:
    sql = "UPDATE jobs SET state = ? WHERE id = ? AND state = ?"
    moved = connection.execute(sql, (to, job_id, expected)).rowcount == 1
    if moved:
        audit.append(connection, act, now, [(f"replay {job_id}: {expected} to {to}", "")])
    return moved


def _lease(connection: sqlite3.Connection, owner: str, until: Millis, now: Millis) -> Job | None:
    _release_cancelled(connection, now)
    row = connection.execute(
        f"{_JOB} WHERE state = 'running' AND window_start < total AND (owner = ? OR lease_until <= ?) "
        "ORDER BY owner = ? DESC, n LIMIT 1",
        (owner, now, owner),
    ).fetchone()
    if row is None:
        return None
    connection.execute("UPDATE jobs SET owner = ?, lease_until = ? WHERE id = ?", (owner, until, row[0]))
    return _find(connection, row[0])


def _release_cancelled(connection: sqlite3.Connection, now: Millis) -> None:
    left = connection.execute(
        f"{_JOB} WHERE state = 'cancelled' AND window_start < total AND window_end > window_start AND lease_until <= ?",
        (now,),
    ).fetchall()
    for job in map(_job, left):
        letters = _return(connection, job, _window_letters(connection, job), now)
        _shut(connection, job, sent=len(_window_items(connection, job)), refused=0)
        act = Act(_OFFICE, "its job was cancelled before the window was confirmed")
        audit.append(connection, act, now, (("replaying to pending", letter) for letter in letters))


class _Claim(Struct):
    """What a window holds: letters to publish, how each came to be in it, and refusals."""

    seqs: list[int]
    deeds: list[audit.Deed]
    refused: list[Refusal]


def _advance(connection: sqlite3.Connection, job: Job, now: Millis) -> list[StoredLetter]:
    deeds: list[audit.Deed] = []
    published: list[StoredLetter] = []
    while job.state is JobState.RUNNING and not published:
        if job.window_end > job.window_start:
            published = _handed_out(connection, job)
            if not published:  # every one of them was reported on before the window was closed
                job = _shut(connection, job, sent=len(_window_items(connection, job)), refused=0)
        elif job.window_end < job.total:
            job, claimed = _open_window(connection, job, now)
            deeds += claimed
        else:
            job = _shut(connection, job, sent=0, refused=0)
    if deeds:
        audit.append(connection, Act(job.act.who, f"replay {job.id}"), now, deeds)
    return published


def _handed_out(connection: sqlite3.Connection, job: Job) -> list[StoredLetter]:
    window = (job.id, job.window_start, job.window_end, job.id)
    return [rows.stored(row) for row in connection.execute(_OPEN, window)]


def _open_window(connection: sqlite3.Connection, job: Job, now: Millis) -> tuple[Job, list[audit.Deed]]:
    """Move the window, and claim its letters; one in which everything was refused is closed again at once."""
    end = min(job.window_end + job.window, job.total)
    items = connection.execute(_ITEMS, (job.id, job.window_end, end)).fetchall()
    claim = _sorted_out([item for item in items if item[3] != State.HELD])
    connection.execute(_CLAIM, (job.id, now, rows.ids_json(claim.seqs)))
    for item in items:
        if item[3] == State.HELD:
            _claim_held(connection, job, item, claim, now)
    _refuse(connection, job, claim.refused)
    connection.execute(
        "UPDATE jobs SET window_start = ?, window_end = ?, refused = refused + ? WHERE id = ?",
        (job.window_end if claim.seqs else end, end, len(claim.refused), job.id),
    )
    return _again(connection, job), claim.deeds


def _claim_held(connection: sqlite3.Connection, job: Job, item: tuple[Any, ...], claim: _Claim, now: Millis) -> None:
    """In order: each may go once everything before it has gone."""
    _, letter, seq, _, _ = item
    if order.waits_behind(connection, seq):
        claim.refused.append(Refusal(letter, "is held behind another letter of its key"))
        return
    connection.execute(_CLAIM, (job.id, now, rows.ids_json([seq])))
    claim.seqs.append(seq)
    claim.deeds.append(("held to replaying", letter))


def _sorted_out(items: list[tuple[Any, ...]]) -> _Claim:
    claim = _Claim([], [], [])
    for _, letter, seq, state, purged_at in items:
        if state == State.PENDING:
            claim.seqs.append(seq)
            claim.deeds.append(("pending to replaying", letter))
        elif state is None:
            claim.refused.append(Refusal(letter, "is unknown" if purged_at is None else "was purged"))
        else:
            claim.refused.append(Refusal(letter, f"is {state}, not pending"))
    return claim


def _refuse(connection: sqlite3.Connection, job: Job, refused: Iterable[Refusal]) -> None:
    sql = "UPDATE job_items SET refused = ? WHERE job = ? AND letter = ?"
    connection.executemany(sql, ((rows.clean(one.why), job.id, rows.clean(one.letter)) for one in refused))


def _close(connection: sqlite3.Connection, job: Job, refused: Sequence[Refusal], now: Millis) -> Job:
    if job.window_end == job.window_start:
        return job
    open_ = _window_items(connection, job)
    refused = [one for one in {r.letter: r for r in refused}.values() if one.letter in open_]
    returned = _return(connection, job, [one.letter for one in refused], now)
    _refuse(connection, job, refused)
    sent = "UPDATE letters SET sent_at = ?, version = version + 1, updated_at = ? WHERE " + _IN_WINDOW
    connection.execute(sent, (now, now, job.id, job.window_start, job.window_end, job.id))
    closed = _shut(connection, job, sent=len(open_) - len(refused), refused=len(refused))
    why = {one.letter: one.why for one in refused}
    deeds = ((f"replaying to pending: {rows.clean(why[letter])}", letter) for letter in returned)
    audit.append(connection, Act(_OFFICE, f"replay {job.id} was refused"), now, deeds)
    return closed


def _window_items(connection: sqlite3.Connection, job: Job) -> set[str]:
    sql = "SELECT letter FROM job_items WHERE job = ? AND n >= ? AND n < ? AND refused IS NULL"
    return {row[0] for row in connection.execute(sql, (job.id, job.window_start, job.window_end))}


def _window_letters(connection: sqlite3.Connection, job: Job) -> list[str]:
    sql = "SELECT id FROM letters WHERE " + _IN_WINDOW
    return [row[0] for row in connection.execute(sql, (job.id, job.window_start, job.window_end, job.id))]


def _return(connection: sqlite3.Connection, job: Job, letters: Sequence[str], now: Millis) -> list[str]:
    """Back to pending, if this job still has them; the hop stays counted, for a copy may be out all the same."""
    found = connection.execute(
        "UPDATE letters SET state = 'pending', version = version + 1, updated_at = ? WHERE seq IN (SELECT seq FROM "
        "identities WHERE id IN (SELECT value FROM json_each(?))) AND state = 'replaying' AND job = ? RETURNING id",
        (now, rows.ids_json(letters), job.id),
    ).fetchall()
    return [row[0] for row in found]


def _shut(connection: sqlite3.Connection, job: Job, *, sent: int, refused: int) -> Job:
    """The window is behind us; a job whose last item is behind us is done, unless it was cancelled."""
    connection.execute(
        "UPDATE jobs SET window_start = window_end, sent = sent + ?, refused = refused + ?, state = CASE WHEN "
        "window_end >= total AND state <> 'cancelled' THEN 'done' ELSE state END WHERE id = ?",
        (sent, refused, job.id),
    )
    return _again(connection, job)


def _again(connection: sqlite3.Connection, job: Job) -> Job:
    found = _find(connection, job.id)
    assert found is not None
    return found


def apply_outcomes(connection: sqlite3.Connection, outcomes: Sequence[Outcome], now: Millis) -> list[str]:
    """Only the first success of a letter's current hop changes anything."""
    ids = rows.ids_json({rows.clean(one.letter) for one in outcomes if one.ok})
    known = {row[0]: row for row in connection.execute(_REPORTED, (ids,))}
    confirmed = {}
    for one in outcomes:
        row = known.get(one.letter)
        if row and one.ok and 0 < one.hop == row[4] and one.hop > row[8]:
            confirmed[one.letter] = (row, after_outcome(one, _life(row)))
    connection.executemany(
        "UPDATE letters SET confirmed_hop = hop, state = ?, version = version + 1, updated_at = ? WHERE seq = ?",
        ((state, now, row[1]) for row, state in confirmed.values()),
    )
    resolved = [row for row, state in confirmed.values() if state != row[2]]
    return _resolved(connection, [(row[0], row[9], row[2]) for row in resolved], "replay confirmed", now)


def _life(row: tuple[Any, ...]) -> StoredLetter:
    _, _, state, *life = row
    return StoredLetter(_UNREAD, State(state), *life)


def _settle_quiet(connection: sqlite3.Connection, quiet_before: Millis, now: Millis) -> list[str]:
    found = connection.execute(
        "UPDATE letters SET state = 'resolved', version = version + 1, updated_at = ? "
        "WHERE state = 'replaying' AND sent_at < ? RETURNING id, job, 'replaying'",
        (now, quiet_before),
    ).fetchall()
    return _resolved(connection, found, "no death reported", now)


def _resolved(connection: sqlite3.Connection, found: list[tuple[str, str, str]], why: str, now: Millis) -> list[str]:
    """These (letter, job, state before) are resolved now."""
    by_job = defaultdict(list)
    for letter, job, _ in found:
        by_job[job].append(letter)
    count_items(connection, "resolved", by_job)
    audit.append(connection, Act(_OFFICE, why), now, ((f"{before} to resolved", letter) for letter, _, before in found))
    return [letter for letter, _, _ in found]
