"""What runtimes tell the office: outcomes of replayed copies, counts by handler and minute, recorded failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from redrive.brokers.base import Broker, Confirmed
from redrive.clock import Clock
from redrive.codec import SIGNATURE
from redrive.errors import BrokerUnavailable, RedriveError
from redrive.keyring import Keyring
from redrive.letter import Outcome
from redrive.message import Copy, Message
from redrive.stores.base import Recorded, Report, Store, Tally

log = logging.getLogger("redrive.reports")

REPORTS = "redrive.reports"
MINUTE = 60_000
FLUSH_SECONDS = 1.0
SEND_SECONDS = 5.0
Send = Callable[[Report], Awaitable[None]]

_KEY = ("source", "group", "handler", "minute")
_report = msgspec.json.Decoder(Report)


class Reporter:
    """Gathers one runtime's counts and sends them in batches. Counting is plain addition; sending never blocks it."""

    def __init__(self, runtime: str, host: str, send: Send, clock: Clock) -> None:
        self._runtime, self._host, self._send, self._clock = runtime, host, send, clock
        self._serial = 0
        self._tallies: dict[tuple[str, str, str, int], dict[str, int]] = {}
        self._recorded: list[Recorded] = []
        self._unsent: Report | None = None

    def count(self, source: str, group: str, handler: str, what: str, number: int = 1) -> None:
        """Add to a field of Tally, by name, in the current minute."""
        minute = self._clock.now() // MINUTE * MINUTE
        counts = self._tallies.setdefault((source, group, handler, minute), {})
        counts[what] = counts.get(what, 0) + number

    def record(self, recorded: Recorded) -> None:
        self._recorded.append(recorded)

    async def send_outcomes(self, outcomes: Sequence[Outcome]) -> bool:
        """Publish what became of replayed copies, within a bound; False when it could not be done.

        The copies are settled either way: the quiet window then decides.
        """
        return await self._deliver(self._report(outcomes=tuple(outcomes)))

    async def flush(self) -> None:
        """Send the counts so far. What cannot be sent is sent again under its old serial, so it counts once."""
        if self._unsent is None and (self._tallies or self._recorded):
            rows = tuple(
                msgspec.convert(dict(zip(_KEY, key, strict=True)) | counts, Tally)
                for key, counts in self._tallies.items()
            )
            self._unsent = self._report(tallies=rows, recorded=tuple(self._recorded))
            self._tallies, self._recorded = {}, []
        if self._unsent is not None and await self._deliver(self._unsent):
            self._unsent = None

    async def run(self) -> None:
        """Flush every second until cancelled."""
        while True:
            await self._clock.sleep(FLUSH_SECONDS)
            await self.flush()

    def _report(
        self,
        *,
        outcomes: tuple[Outcome, ...] = (),
        tallies: tuple[Tally, ...] = (),
        recorded: tuple[Recorded, ...] = (),
    ) -> Report:
        self._serial += 1
        return Report(self._runtime, self._serial, self._host, self._clock.now(), outcomes, tallies, recorded)

    async def _deliver(self, report: Report) -> bool:
        try:
            await _bounded(self._send(report))
        except (RedriveError, TimeoutError) as error:
            log.warning("a report could not be sent: %s", error)
            return False
        return True


async def _bounded(work: Awaitable[None]) -> None:
    async with asyncio.timeout(SEND_SECONDS):
        await work


def through_broker(broker: Broker, keyring: Keyring) -> Send:
    """Reports as signed messages; the collector brings them to the store."""

    async def send(report: Report) -> None:
        [result] = await broker.publish([report_copy(report, keyring)])
        if not isinstance(result, Confirmed):
            raise BrokerUnavailable(broker.name, REPORTS, result)

    return send


def through_store(store: Store, clock: Clock) -> Send:
    async def send(report: Report) -> None:
        await store.report([report], clock.now())

    return send


async def nowhere(report: Report) -> None:
    """For a runtime that reaches no office: counts stay in the metrics."""


def report_copy(report: Report, keyring: Keyring) -> Copy:
    body = msgspec.json.encode(report)
    return Copy(REPORTS, report.runtime.encode(), body, ((SIGNATURE, keyring.sign([b"report", body])),))


def read_report(message: Message, keyring: Keyring) -> Report | None:
    """The report, if one of our runtimes signed it."""
    if message.body is None or not keyring.verify([b"report", message.body], message.header(SIGNATURE)):
        return None
    try:
        return _report.decode(message.body)
    except msgspec.MsgspecError:
        return None
