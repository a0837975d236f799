"""What runtimes tell the office: outcomes of replayed copies, counts by handler and minute, recorded failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from redrive.brokers.base import Broker, Confirmed, Refused
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


class ReportTooLarge(RedriveError):
    """The broker takes no message of this size; two smaller ones say the same."""

    def __init__(self, broker: str, why: str) -> None:
        self.broker, self.why = broker, why
        super().__init__(f"{broker} refused a report: {why}")


_KEY = ("source", "group", "handler", "minute")
_report = msgspec.json.Decoder(Report)


class Reporter:
    """Gathers one runtime's counts and sends them in batches. Counting is plain addition; sending never blocks it."""

    def __init__(self, runtime: str, host: str, send: Send, clock: Clock) -> None:
        self._runtime, self._host, self._send, self._clock = runtime, host, send, clock
        self._serial = 0
        self._tallies: dict[tuple[str, str, str, int], dict[str, int]] = {}
        self._recorded: list[Recorded] = []
        self._unsent: list[Report] = []

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
        return await self._deliver([self._report(outcomes=tuple(outcomes))])

    async def flush(self) -> None:
        """Send the counts so far. What cannot be sent is sent again under its old serial, so it counts once."""
        if not self._unsent and (self._tallies or self._recorded):
            rows = tuple(
                msgspec.convert(dict(zip(_KEY, key, strict=True)) | counts, Tally)
                for key, counts in self._tallies.items()
            )
            self._unsent = [self._report(tallies=rows, recorded=tuple(self._recorded))]
            self._tallies, self._recorded = {}, []
        await self._deliver(self._unsent)

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

    async def _deliver(self, unsent: list[Report]) -> bool:
        """Send these, in smaller ones where one is too large. What could not be sent yet stays in the list."""
        while unsent:
            try:
                await _bounded(self._send(unsent[0]))
                del unsent[0]
            except ReportTooLarge as error:
                unsent[:1] = self._parts(unsent[0], error)
            except (RedriveError, TimeoutError) as error:
                log.warning("a report could not be sent: %s", error)
                return False
        return True

    def _parts(self, report: Report, error: ReportTooLarge) -> list[Report]:
        """Two halves of it; none, when it says only one thing: that must not keep back everything after it."""
        size = len(report.outcomes) + len(report.tallies) + len(report.recorded)
        if size < 2:
            log.error("a report that no destination takes is dropped: %s", error)
            return []
        halves = [_half(report, which) for which in (0, 1)]
        return [self._report(outcomes=one[0], tallies=one[1], recorded=one[2]) for one in halves]


def _half(report: Report, which: int) -> tuple[tuple[Outcome, ...], tuple[Tally, ...], tuple[Recorded, ...]]:
    """Every other row of everything in it, so that a half is smaller whatever it is full of."""
    return report.outcomes[which::2], report.tallies[1 - which :: 2], report.recorded[which::2]


async def _bounded(work: Awaitable[None]) -> None:
    async with asyncio.timeout(SEND_SECONDS):
        await work


def through_broker(broker: Broker, keyring: Keyring) -> Send:
    """Reports as signed messages; the collector brings them to the store."""

    async def send(report: Report) -> None:
        [result] = await broker.publish([report_copy(report, keyring)])
        if isinstance(result, Refused) and result.too_large:
            raise ReportTooLarge(broker.name, result.why)
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
