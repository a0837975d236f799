"""The collector: brings dead letters and reports from the broker into the store. Settles only what is stored."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from redrive import faults
from redrive.brokers.base import Ack, Batch, Broker, Delivery, Stream, Subscription
from redrive.clock import Clock
from redrive.codec import read_letter
from redrive.errors import BrokerUnavailable, StoreUnavailable
from redrive.keyring import Keyring
from redrive.letter import Letter
from redrive.message import Message
from redrive.metrics import Metrics
from redrive.office import Notice
from redrive.reports import REPORTS, read_report
from redrive.stores.base import Report, Store

log = logging.getLogger("redrive.collector")

GROUP = "redrive-collector"
BATCH = 500
_LONGEST_WAIT = 10.0


class Collector:
    """Drains dead letter sources and the reports. Collecting twice changes nothing."""

    def __init__(
        self,
        broker: Broker,
        store: Store,
        keyring: Keyring,
        clock: Clock,
        metrics: Metrics,
        *,
        sources: Sequence[str],
        tell: Callable[[Notice], None],
    ) -> None:
        self._broker, self._store, self._keyring = broker, store, keyring
        self._clock, self._metrics, self._tell = clock, metrics, tell
        self._sources = tuple(sources)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        """Collect until stopped."""
        subscription = Subscription((*self._sources, REPORTS), GROUP, batch=BATCH, in_flight=BATCH * 2)
        stream = await self._broker.subscribe(subscription)
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            while not self._stopping.is_set():
                await self._next(stream, stopping)
        finally:
            stopping.cancel()
            await stream.aclose()

    async def _next(self, stream: Stream, stopping: asyncio.Task[bool]) -> None:
        coming = asyncio.ensure_future(stream.__anext__())
        await asyncio.wait({coming, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not coming.done():
            coming.cancel()
            with suppress(asyncio.CancelledError, BrokerUnavailable):
                await coming
            return
        try:
            event = coming.result()
            if isinstance(event, Batch):
                await self._collect(event.deliveries)
        except BrokerUnavailable as error:
            log.warning("collecting waits for the broker: %s", error)
            await self._clock.wait(self._stopping, 1.0)

    async def _collect(self, deliveries: Sequence[Delivery]) -> None:
        """Store the batch, however long the store is away; the messages stay unsettled until then."""
        faults.point("collector.after_receive")
        messages = [delivery.message for delivery in deliveries]
        letters = [self._letter(message) for message in messages if message.source != REPORTS]
        reports = [report for report in map(self._report, messages) if report is not None]
        for tries in range(1_000_000_000):
            if self._stopping.is_set():
                return
            try:
                await self._keep(letters, reports)
                break
            except StoreUnavailable as error:
                if tries == 0:
                    self._tell(Notice("store_down", f"{len(letters)} dead letter(s) wait in the broker: {error}"))
                await self._clock.wait(self._stopping, min(0.2 * 2 ** min(tries, 10), _LONGEST_WAIT))
        faults.point("collector.after_store")
        await self._settle(deliveries)
        faults.point("collector.after_settle")

    async def _settle(self, deliveries: Sequence[Delivery]) -> None:
        """However long the broker is away: nobody hands these out again while this collector lives."""
        for tries in range(1_000_000_000):
            try:
                await self._broker.settle([Ack(delivery) for delivery in deliveries])
                return
            except BrokerUnavailable as error:
                log.warning("%d stored message(s) cannot be settled yet: %s", len(deliveries), error)
                if await self._clock.wait(self._stopping, min(0.2 * 2 ** min(tries, 10), _LONGEST_WAIT)):
                    return

    async def _keep(self, letters: list[Letter], reports: list[Report]) -> None:
        if letters:
            filed = await self._store.letters.file(letters, self._clock.now())
            for filing, number in Counter(one.filing for one in filed).items():
                self._metrics.collected.labels(filing.value).inc(number)
        if reports:
            await self._store.report(reports, self._clock.now())

    def _letter(self, message: Message) -> Letter:
        return read_letter(message, self._keyring, self._clock.now())

    def _report(self, message: Message) -> Report | None:
        if message.source != REPORTS:
            return None
        report = read_report(message, self._keyring)
        if report is None:
            log.warning("a report at %s does not verify and is ignored", message.id)
        return report
