"""The replayer: drives replay jobs. A durable window moves first, then its letters are published, then it closes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from msgspec.structs import replace

from redrive import codec, faults
from redrive.blobs.base import Blobs
from redrive.brokers.base import Broker, Refused, Unknown
from redrive.clock import Clock, Millis
from redrive.codec import Ticket
from redrive.errors import BlobsUnavailable, BrokerUnavailable, LeaseConflict, StoreUnavailable
from redrive.keyring import Keyring
from redrive.letter import StoredLetter, idempotency_key
from redrive.message import Copy
from redrive.metrics import Metrics
from redrive.stores.base import Job, JobState, Refusal, Store

log = logging.getLogger("redrive.replayer")

LEASE_SECONDS = 30.0
IDLE_SECONDS = 0.5
LOOK_SECONDS = 5.0
_CHUNK = 100


class Replayer:
    """Sends letters back to where they came from, at least once, never more than one window twice a crash."""

    def __init__(
        self,
        broker: Broker,
        store: Store,
        keyring: Keyring,
        clock: Clock,
        metrics: Metrics,
        *,
        owner: str,
        blobs: Blobs | None = None,
        quiet_seconds: float = 300.0,
    ) -> None:
        self._broker, self._store, self._keyring = broker, store, keyring
        self._clock, self._metrics, self._blobs = clock, metrics, blobs
        self._owner, self._quiet_seconds = owner, quiet_seconds
        self._looked_at: Millis = 0
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        """Drive whatever job has work and no living owner, until stopped."""
        while not self._stopping.is_set():
            try:
                worked = await self.step()
                await self._settle_quiet()
            except (BrokerUnavailable, StoreUnavailable, BlobsUnavailable) as error:
                log.warning("replay waits: %s", error)
                worked = False
            except LeaseConflict as error:
                log.warning("%s", error)
                worked = False
            if not worked:
                await self._clock.wait(self._stopping, IDLE_SECONDS)

    async def step(self) -> bool:
        """Drive one window of one job; False when there is nothing to do."""
        await self._store.jobs.release_held(self._clock.now())
        job = await self._store.jobs.lease(self._owner, LEASE_SECONDS, self._clock.now())
        if job is None:
            return False
        faults.point("replayer.after_lease")
        letters = await self._store.jobs.advance(job.id, self._owner, self._clock.now())
        if letters:
            await self._send(job, letters)
        return True

    async def finish(self, job_id: str) -> Job:
        """Drive jobs until this one has sent everything, for people who run no replayer."""
        while True:
            job = await self._store.jobs.get(job_id)
            if job is None or job.state is not JobState.RUNNING:
                assert job is not None
                return job
            if not await self.step():
                await self._clock.sleep(IDLE_SECONDS)

    async def _send(self, job: Job, letters: Sequence[StoredLetter]) -> None:
        faults.point("replayer.after_advance")
        refused: list[Refusal] = []
        for chunk in _chunks(letters, job.rate):
            started = self._clock.now()
            refused += await self._publish(chunk)
            faults.point("replayer.after_publish")
            await self._store.jobs.lease(self._owner, LEASE_SECONDS, self._clock.now())
            if job.rate:
                spent = (self._clock.now() - started) / 1000
                await self._clock.sleep(max(len(chunk) / job.rate - spent, 0.0))
        await self._store.jobs.close_window(job.id, self._owner, refused, self._clock.now())
        faults.point("replayer.after_close")
        self._metrics.replayed.labels("sent").inc(len(letters) - len(refused))
        self._metrics.replayed.labels("refused").inc(len(refused))

    async def _publish(self, letters: Sequence[StoredLetter]) -> list[Refusal]:
        """Publish these until each is confirmed or refused; an unclear answer is asked again."""
        refused: list[Refusal] = []
        copies: dict[str, Copy] = {}
        for stored in letters:
            copy = await self._copy(stored)
            if isinstance(copy, Refusal):
                refused.append(copy)
            else:
                copies[stored.id] = copy
        while copies:
            results = await self._broker.publish(list(copies.values()))
            answers = dict(zip(copies, results, strict=True))
            refused += [Refusal(key, one.why) for key, one in answers.items() if isinstance(one, Refused)]
            copies = {key: copies[key] for key, one in answers.items() if isinstance(one, Unknown)}
            if copies:
                await self._clock.sleep(IDLE_SECONDS)
        return refused

    async def _copy(self, stored: StoredLetter) -> Copy | Refusal:
        letter = stored.letter
        message = letter.message
        if letter.claim is not None:
            body = await self._blobs.get(letter.claim.name) if self._blobs else None
            if body is None:
                return Refusal(stored.id, f"its body {letter.claim.name} is not in blob storage")
            message = replace(message, body=body)
        elif "body_at_source" in letter.marks:
            [found] = await self._broker.read([message.coordinates])
            if found is None:
                return Refusal(stored.id, "its body was left at the source, which no longer has it")
            message = replace(message, body=found.body)
        if letter.message.source == letter.group and not letter.verified:
            return Refusal(stored.id, "nobody knows where it came from")
        ticket = Ticket(
            stored.id, letter.group, message.coordinates, hop=stored.hop, key=idempotency_key(stored.id, stored.hop)
        )
        return codec.retry_copy(message, ticket, message.source, self._keyring)

    async def _settle_quiet(self) -> None:
        now = self._clock.now()
        if now - self._looked_at < LOOK_SECONDS * 1000:
            return
        self._looked_at = now
        await self._store.jobs.settle_quiet(now - round(self._quiet_seconds * 1000), now)


def _chunks(letters: Sequence[StoredLetter], rate: float | None) -> list[Sequence[StoredLetter]]:
    """Small enough that a rate limit holds within each second."""
    size = _CHUNK if rate is None else max(1, min(_CHUNK, int(rate / 10)))
    return [letters[start : start + size] for start in range(0, len(letters), size)]
