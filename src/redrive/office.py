"""The one place that makes a letter durable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from msgspec import Struct

from redrive import codec, faults
from redrive.blobs.base import Blobs, claim_for
from redrive.clock import Clock
from redrive.errors import BlobsUnavailable, FilingFailed, SpoolFailed, StoreUnavailable
from redrive.keyring import Keyring
from redrive.letter import Letter
from redrive.message import Copy
from redrive.metrics import Metrics
from redrive.spool import Spool
from redrive.stores.base import Filed, Store

log = logging.getLogger("redrive.office")
DRAIN_SECONDS = 1.0


class Notice(Struct, frozen=True):
    """Something a person should know now: a critical failure, a source that is stuck, letters in the spool."""

    kind: str
    text: str
    letter: Letter | None = None


Notify = Callable[[Notice], None]


class Office:
    """Files letters through the broker or directly, and steps down a ladder before it gives up. Never drops."""

    def __init__(
        self,
        keyring: Keyring,
        clock: Clock,
        metrics: Metrics,
        *,
        store: Store | None = None,
        spool: Spool | None = None,
        blobs: Blobs | None = None,
        notify: Notify | None = None,
    ) -> None:
        self._keyring, self._clock, self._metrics = keyring, clock, metrics
        self._store, self._spool, self._blobs = store, spool, blobs
        self._notify = notify

    async def file(self, letters: Sequence[Letter], *, may_spool: bool = True) -> None:
        """Returns once every letter is durable, in the store or else in the spool; raises FilingFailed otherwise.

        Where order matters the spool is no place: others must see at once that a key has an open letter.
        """
        causes: list[Exception] = []
        faults.point("office.before_file")
        if self._store is not None:
            try:
                await self._store.letters.file(letters, self._clock.now())
            except StoreUnavailable as error:
                self._failed("store", error, causes)
            else:
                faults.point("office.after_file")
                return
        if self._spool is not None and may_spool:
            try:
                await self._spool.append(letters)
            except SpoolFailed as error:
                self._failed("spool", error, causes)
            else:
                faults.point("office.after_spool")
                self._metrics.spooled.set(self._spool.pending)
                self.tell(Notice("spooled", f"{len(letters)} letter(s) went to the spool: {causes[-1:] or 'no store'}"))
                return
        raise FilingFailed([letter.id for letter in letters], causes)

    async def hold(self, letters: Sequence[Letter]) -> list[Filed]:
        """Keep messages behind the open letters of their keys; those that need not wait are answered RELEASED."""
        return await self._needed_store().letters.hold(letters, self._clock.now())

    async def blocked(self, source: str, group: str, keys: Sequence[bytes]) -> dict[bytes, int | None]:
        """The keys with open letters, each with the place of its first dead one."""
        return await self._needed_store().letters.blocked(source, group, keys)

    def _needed_store(self) -> Store:
        if self._store is None:
            raise StoreUnavailable("none", "order by key needs a store")
        return self._store

    def copy(self, letter: Letter, destination: str) -> Copy:
        """The letter as a message for its dead letter destination."""
        return codec.letter_copy(letter, destination, self._keyring)

    async def smaller(self, letter: Letter, *, source_retains: bool) -> Letter | None:
        """The next rung for a letter its destination finds too large; None when there is none left.

        Full letter, short diagnostics, body in blob storage, body left at the source where the source keeps it.
        """
        if "diagnostics_truncated" not in letter.marks:
            return codec.shortened(letter)
        if letter.claim is None and self._blobs is not None and letter.message.body is not None:
            claim = claim_for(letter.id, letter.message.body)
            try:
                await self._blobs.put(claim.name, letter.message.body)
            except BlobsUnavailable as error:
                self._failed("blobs", error, [])
            else:
                faults.point("office.after_blob")
                return codec.claimed(letter, claim)
        if source_retains and "body_at_source" not in letter.marks and letter.claim is None:
            return codec.at_source(letter)
        return None

    async def drain_spool(self) -> None:
        """Bring spooled letters to the store as soon as it answers, in order. Runs until cancelled."""
        while self._spool is not None and self._store is not None:
            try:
                await self.drain_once()
            except (StoreUnavailable, SpoolFailed) as error:
                log.warning("the spool cannot be drained yet: %s", error)
            await self._clock.sleep(DRAIN_SECONDS)
        await asyncio.Event().wait()

    async def drain_once(self) -> int:
        """How many letters went from the spool to the store."""
        if self._spool is None or self._store is None:
            return 0
        store = self._store

        async def deliver(letters: Sequence[Letter]) -> None:
            await store.letters.file(letters, self._clock.now())
            faults.point("spool.after_drain")

        drained = await self._spool.drain(deliver)
        self._metrics.spooled.set(self._spool.pending)
        return drained

    def tell(self, notice: Notice) -> None:
        """Log it, and hand it to the user's callback, whose own failure must not hurt a message."""
        log.warning("%s: %s", notice.kind, notice.text)
        if self._notify is None:
            return
        try:
            self._notify(notice)
        except Exception:
            log.exception("the notify callback failed for %s", notice.kind)

    def _failed(self, place: str, error: Exception, causes: list[Exception]) -> None:
        causes.append(error)
        self._metrics.filing_errors.labels(place, type(error).__name__).inc()
        log.error("filing in the %s failed: %s", place, error)
