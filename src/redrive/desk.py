"""What people may do with letters. The API, the CLI and the library calls all stand on this."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from redrive.blobs.base import Blobs
from redrive.clock import Clock
from redrive.errors import BodyMissing, BodyWithheld, JobConflict, JobNotFound, LetterNotFound, StateConflict
from redrive.letter import Act, State, StoredLetter
from redrive.query import Filter
from redrive.stores.base import (
    DEFAULT_WINDOW,
    AuditEntry,
    Count,
    Job,
    JobState,
    Page,
    Refusal,
    Statistics,
    Store,
    Summary,
)
from redrive.views import LetterView, letter_view, masked_summary

# The surfaces know letters only as the desk hands them out, so its words are theirs.
__all__ = [
    "AuditEntry", "Count", "Desk", "Job", "JobState", "LetterView", "Page", "Refusal", "Statistics", "Summary",
]  # fmt: skip


class Desk:
    """Every change carries an act, and its audit row commits with it."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        blobs: Blobs | None = None,
        window: int = DEFAULT_WINDOW,
        rate: float | None = None,
    ) -> None:
        self._store, self._clock, self._blobs = store, clock, blobs
        self._window, self._rate = window, rate

    async def page(self, filter_: Filter, limit: int = 50, cursor: str | None = None) -> Page:
        """Letters that match, newest first, without their bodies."""
        page = await self._store.letters.page(filter_, limit, cursor)
        return replace(page, rows=tuple(masked_summary(row) for row in page.rows))

    async def count(self, filter_: Filter) -> Count:
        return await self._store.letters.count(filter_)

    async def read(self, letter_id: str) -> LetterView:
        """One letter as a person may see it: its body, its deaths, its history."""
        stored = await self._existing(letter_id)
        occurrences = await self._store.letters.occurrences(letter_id)
        return letter_view(await self._with_body(stored), occurrences, await self._store.letters.history(letter_id))

    async def body(self, letter_id: str) -> bytes | None:
        """The body bit for bit, null told from empty. Withheld where anything is masked."""
        stored = await self._existing(letter_id)
        letter = stored.letter
        if letter.masked or letter.masked_fields:
            raise BodyWithheld(letter_id)
        body = (await self._with_body(stored)).letter.message.body
        if body is None and letter.claim is not None:
            raise BodyMissing(letter_id, "not in blob storage")
        if body is None and "body_at_source" in letter.marks:
            raise BodyMissing(letter_id, "still at its source only")
        return body

    async def replay(self, ids: Sequence[str], act: Act, *, rate: float | None = None) -> Job:
        """Freeze this selection and start sending it back. A letter that is not pending is refused, with a row."""
        return await self._store.jobs.create(
            ids, act, self._clock.now(), window=self._window, rate=rate if rate is not None else self._rate
        )

    async def replay_one(self, letter_id: str, act: Act) -> Job:
        """Like replay, and a letter that cannot be replayed now is an error at once."""
        stored = await self._existing(letter_id)
        if stored.state is not State.PENDING:
            raise StateConflict(letter_id, expected=State.PENDING, actual=stored.state)
        return await self.replay([letter_id], act)

    async def resolve(self, letter_id: str, act: Act) -> None:
        """Somebody mended it by hand."""
        await self._move(letter_id, State.RESOLVED, act, (State.PENDING,))

    async def discard(self, letter_id: str, act: Act) -> None:
        """It need not be sent again."""
        await self._move(letter_id, State.DISCARDED, act, (State.PENDING, State.HELD))

    async def restore(self, letter_id: str, act: Act) -> None:
        """Back to pending, from whatever end it had."""
        await self._move(letter_id, State.PENDING, act, (State.RESOLVED, State.DISCARDED, State.QUARANTINED))

    async def purge(self, letter_id: str, act: Act) -> None:
        """Delete it for good. Its identity stays, so that collecting again cannot bring it back."""
        stored = await self._existing(letter_id)
        if not await self._store.letters.purge([letter_id], act, self._clock.now()):
            raise StateConflict(letter_id, expected="not replaying", actual=stored.state)
        if stored.letter.claim is not None and self._blobs is not None:
            await self._blobs.delete(stored.letter.claim.name)

    async def jobs(self, limit: int = 50) -> list[Job]:
        return await self._store.jobs.recent(limit)

    async def job(self, job_id: str) -> tuple[Job, list[Refusal]] | None:
        found = await self._store.jobs.get(job_id)
        return None if found is None else (found, await self._store.jobs.refusals(job_id))

    async def set_job(self, job_id: str, expected: JobState, to: JobState, act: Act) -> bool:
        return await self._store.jobs.set_state(job_id, expected, to, act, self._clock.now())

    async def pause(self, job_id: str, act: Act) -> Job:
        """Send nothing more of it until it is resumed; what is under way is finished."""
        return await self._move_job(job_id, JobState.PAUSED, act, (JobState.RUNNING,))

    async def resume(self, job_id: str, act: Act) -> Job:
        return await self._move_job(job_id, JobState.RUNNING, act, (JobState.PAUSED,))

    async def cancel(self, job_id: str, act: Act) -> Job:
        """Never send the rest of it; its letters stay pending."""
        return await self._move_job(job_id, JobState.CANCELLED, act, (JobState.RUNNING, JobState.PAUSED))

    async def statistics(self) -> Statistics:
        return await self._store.statistics()

    async def audit(self, limit: int = 100) -> list[AuditEntry]:
        """Who did what and why, newest first."""
        return await self._store.audit(limit)

    async def _existing(self, letter_id: str) -> StoredLetter:
        stored = await self._store.letters.get(letter_id)
        if stored is None:
            raise LetterNotFound(letter_id)
        return stored

    async def _with_body(self, stored: StoredLetter) -> StoredLetter:
        claim = stored.letter.claim
        if claim is None or self._blobs is None:
            return stored
        body = await self._blobs.get(claim.name)
        letter = stored.letter
        return replace(stored, letter=replace(letter, message=replace(letter.message, body=body)))

    async def _move(self, letter_id: str, to: State, act: Act, froms: tuple[State, ...]) -> None:
        stored = await self._existing(letter_id)
        if stored.state in froms:
            if await self._store.letters.move([letter_id], stored.state, to, act, self._clock.now()):
                return
            stored = await self._existing(letter_id)
        raise StateConflict(letter_id, expected=" or ".join(froms), actual=stored.state)

    async def _move_job(self, job_id: str, to: JobState, act: Act, froms: tuple[JobState, ...]) -> Job:
        job = await self._existing_job(job_id)
        moved = job.state in froms and await self.set_job(job_id, job.state, to, act)
        job = await self._existing_job(job_id)
        if not moved:
            raise JobConflict(job_id, expected=" or ".join(froms), actual=job.state)
        return job

    async def _existing_job(self, job_id: str) -> Job:
        job = await self._store.jobs.get(job_id)
        if job is None:
            raise JobNotFound(job_id)
        return job
