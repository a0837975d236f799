"""The test kit: your own app on an embedded broker and store in memory, with a clock that jumps instead of waiting.

    async with office(app) as shop:
        await shop.publish("orders", {"id": 1, "card": "declined"})
        await shop.settled()
        [letter] = await shop.letters("orders")

It is the real runtime, broker, collector, store and replayer, not an emulation of them; only time is not real.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from random import Random
from typing import Any, Protocol, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from redrive.app import Redrive, as_bytes
from redrive.brokers.base import Confirmed
from redrive.clock import Millis
from redrive.config import Config, EmbeddedSettings
from redrive.consumer import Consumer
from redrive.declare import check_against
from redrive.errors import ConfigError, HandlerTimeout, PayloadUnreadable, RedriveError
from redrive.handlers import Failed, Handler
from redrive.message import Copy, Headers, Message
from redrive.office import Notice, Notify
from redrive.query import Filter
from redrive.replayer import Replayer
from redrive.stores.base import Job
from redrive.views import LetterView

__all__ = ["FailedRun", "JumpingClock", "TestOffice", "Unsettled", "office"]

T = TypeVar("T")

JUMPS = 1_000
PATIENCE = 10.0
HANDLER_SECONDS = 5.0
_FOR_EVER = 1e9
_SPINS = 50
_PAGE = 500


class JumpingClock:
    """Stands still until it is moved. A wait ends when its event comes or the clock has moved far enough."""

    def __init__(self, start: Millis | None = None) -> None:
        self._now = time.time_ns() // 1_000_000 if start is None else start
        self._timers: dict[asyncio.Future[None], tuple[Millis, asyncio.Task[Any] | None]] = {}

    def now(self) -> Millis:
        return self._now

    def jump(self, to: Millis) -> None:
        """Move forward to this time; every wait that ends by then is over."""
        self._now = max(self._now, to)
        for timer, (at, _) in self._timers.items():
            if at <= self._now and not timer.done():
                timer.set_result(None)

    @property
    def in_transit(self) -> bool:
        """Whether a wait is over whose task has not noticed yet."""
        return any(timer.done() for timer in self._timers)

    def wakes(self, task: asyncio.Task[Any]) -> Millis | None:
        """When this task's wait ends; None when it does not wait for the clock."""
        return next((at for at, waiting in self._timers.values() if waiting is task), None)

    async def sleep(self, seconds: float) -> None:
        await self.wait(asyncio.Event(), seconds)

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        if seconds <= 0 or event.is_set():
            await asyncio.sleep(0)
            return event.is_set()
        timer = asyncio.get_running_loop().create_future()
        self._timers[timer] = (self._now + max(1, round(seconds * 1000)), asyncio.current_task())
        came = asyncio.ensure_future(event.wait())
        came.add_done_callback(lambda _: None if timer.done() else timer.set_result(None))
        try:
            await timer
        finally:
            came.cancel()
            del self._timers[timer]
        return event.is_set()


class FailedRun(Struct, frozen=True):
    """One run that failed: raise `error` again to see where."""

    consumer: str
    error: BaseException
    messages: tuple[Message, ...]
    at: Millis


class Unsettled(RedriveError):
    """Something still waits or runs. `left` counts the unsettled messages of each consumer."""

    def __init__(self, why: str, left: dict[str, int], failures: Sequence[FailedRun]) -> None:
        self.why, self.left, self.failures = why, left, tuple(failures)
        last = {run.consumer: run.error for run in failures}
        waits = [f"{name} has {count} message(s) left{_because(last.get(name))}" for name, count in left.items()]
        super().__init__(f"{why}: {'; '.join(waits) or 'but no consumer has messages left'}")


def _because(error: BaseException | None) -> str:
    return "" if error is None else f" and last failed with {type(error).__name__}: {error}"


class _Asked(Protocol):
    """What the embedded broker can say and others need not."""

    def due(self) -> Millis | None: ...


@asynccontextmanager
async def office(
    app: Redrive,
    *,
    start: Millis | None = None,
    partitions: int = 1,
    handler_seconds: float = HANDLER_SECONDS,
    patience: float = PATIENCE,
) -> AsyncIterator[TestOffice]:
    """Run this app in memory. Inside the block the app itself is changed, outside it is as it was.

    `start` is the first time on the clock, else the present. `partitions` of 1 keep messages in the order they were
    published. A handler that hangs is cut after its own limit or `handler_seconds`, whichever is shorter, in real time:
    the clock stands still while handlers run. `patience` bounds, in real time, a wait in which nothing happens.
    """
    for consumer in app.consumers:
        check_against(consumer, app.parts.broker.can)
    clock = JumpingClock(start)
    one = TestOffice(app, clock, patience)
    settings = _in_memory(app.config, partitions)
    consumers = [one._watched(consumer, handler_seconds) for consumer in app.consumers]
    with _swapped(app, settings, clock, consumers, one._hear):
        async with app.opened(), _at_work(app, patience) as tasks:
            await one._begin(tasks)
            yield one


class TestOffice:
    """One app at work in memory, and its office. Nothing you publish here runs before `settled`, `later` or `run`."""

    __test__ = False

    def __init__(self, app: Redrive, clock: JumpingClock, patience: float) -> None:
        self.app, self.clock = app, clock
        self.failures: list[FailedRun] = []
        self.notices: list[Notice] = []
        self._notify = app._notify
        self._patience = patience
        self._runs: Counter[str] = Counter()
        self._unsent: list[Copy] = []
        self._tasks: Sequence[asyncio.Task[None]] = ()
        self._replayer: Replayer | None = None
        self._awaited: set[asyncio.Task[Any]] = set()

    # ---- doing

    async def publish(self, source: str, *bodies: Any, key: bytes | str | None = None, headers: Headers = ()) -> None:
        """Send messages: bytes as they are, text as UTF-8, anything else as JSON. They go out together, later."""
        raw_key = key.encode() if isinstance(key, str) else key
        self._unsent += [Copy(source, raw_key, as_bytes(body), headers) for body in bodies]

    async def settled(self, *, jumps: int = JUMPS) -> None:
        """Work until nothing is left to do, jumping over every back-off. Raises Unsettled after so many jumps."""
        await self._work(None, jumps)

    async def later(self, seconds: float, *, jumps: int = JUMPS) -> None:
        """Let this much time pass, doing what falls due on the way, and no more."""
        until = self.clock.now() + round(seconds * 1000)
        await self._work(until, jumps)
        self.clock.jump(until)
        await self._quiet()

    async def run(self, work: Coroutine[Any, Any, T], *, jumps: int = JUMPS) -> T:
        """Await this while time jumps over its waits: for `app.execute_with_retry` and other code of your own."""
        await self._send()
        task = asyncio.create_task(work)
        self._awaited.add(task)
        try:
            for _ in range(jumps):
                await self._quiet(task)
                if task.done():
                    return task.result()
                self.clock.jump(self._due() or 0)
            raise await self._unsettled(f"not done after {jumps} jumps of the clock")
        finally:
            self._awaited.discard(task)
            task.cancel()

    async def replay(self, letter: str | LetterView, *, why: str = "a test") -> Job:
        """Send it back to the group that failed; `settled` lets it run."""
        letter_id = letter if isinstance(letter, str) else letter.id
        return await self.run(self.app.letters.replay(letter_id, who="test", why=why))

    # ---- looking

    async def letters(self, source: str | None = None, **filters: Any) -> list[LetterView]:
        """The letters that match, in the order of their messages. `filters` are the fields of `Filter`."""
        desk, cursor, found = self.app.desk(), None, []
        while True:
            page = await desk.page(Filter(source=source, **filters), _PAGE, cursor)
            found += [await desk.read(row.id) for row in page.rows]
            cursor = page.next
            if cursor is None:
                return sorted(found, key=_place)

    async def letter(self, letter_id: str) -> LetterView:
        return await self.app.desk().read(letter_id)

    def runs(self, consumer: str) -> int:
        """How often this consumer's handler was called; a batch is one call."""
        return self._runs[self._name(consumer)]

    # ---- the inside

    async def _begin(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        self._tasks, self._replayer = tasks, self.app.replayer()
        await self._quiet()

    async def _work(self, until: Millis | None, jumps: int) -> None:
        await self._send()
        begun = self.clock.now()
        for _ in range(jumps):
            due = await self._next(until)
            if due is None:
                return
            self.clock.jump(due)
        hours = (self.clock.now() - begun) / 3_600_000
        raise await self._unsettled(f"not settled after {jumps} jumps of the clock over {hours:.1f} hours")

    async def _next(self, until: Millis | None) -> Millis | None:
        """When something falls due that may be waited for, once all that can be done now is done."""
        assert self._replayer is not None
        while True:
            await self._quiet()
            if await self.run(self._replayer.step()):
                continue
            due = self._due()
            if due is not None and (until is None or due <= until):
                return due
            if self.app.reporter is not None:
                await self.app.reporter.flush()
            if self._due() == due:
                return None

    async def _quiet(self, task: asyncio.Task[Any] | None = None) -> None:
        """Return when nothing can go on without time passing, or this task is done."""
        spins, mark, deadline = 0, self._mark(), time.monotonic() + self._patience
        while task is None or not task.done():
            self._raise_defects()
            due = self._due()
            if due is None or due > self.clock.now():
                return
            spins += 1
            await asyncio.sleep(0 if spins < _SPINS else 0.001)
            if self._mark() != mark:
                spins, mark, deadline = 0, self._mark(), time.monotonic() + self._patience
            elif time.monotonic() > deadline:
                raise await self._unsettled(f"nothing has happened for {self._patience:g} real seconds")

    def _mark(self) -> tuple[int, int]:
        return self._runs.total(), len(self.failures)

    def _due(self) -> Millis | None:
        now = self.clock.now()
        if self.clock.in_transit:
            return now
        dues = [self.app.due() if self._tasks[1:] else None, cast(_Asked, self.app.parts.broker).due()]
        dues += [now if (wakes := self.clock.wakes(task)) is None else wakes for task in self._awaited]
        return min((max(due, now) for due in dues if due is not None), default=None)

    def _raise_defects(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def _send(self) -> None:
        copies, self._unsent = self._unsent, []
        if not copies:
            return
        for copy, result in zip(copies, await self.app.parts.broker.publish(copies), strict=True):
            if not isinstance(result, Confirmed):
                raise ConfigError(f"the broker did not take it: {result}", key=copy.destination, fix="see why")

    async def _unsettled(self, why: str) -> Unsettled:
        broker, left = self.app.parts.broker, {}
        for consumer in self.app.consumers:
            depths = [await broker.depth(source, consumer.group) for source in consumer.sources]
            if count := sum(depth.count for depth in depths):
                left[consumer.name] = count
        return Unsettled(why, left, self.failures)

    def _name(self, asked: str) -> str:
        names = [consumer.name for consumer in self.app.consumers]
        found = [name for name in names if asked in (name, name.rpartition(".")[2])]
        if len(found) != 1:
            raise ConfigError(f"{len(found)} consumers have this name", key=asked, fix=f"there are: {', '.join(names)}")
        return found[0]

    def _hear(self, notice: Notice) -> None:
        self.notices.append(notice)
        if self._notify is not None:
            self._notify(notice)

    def _watched(self, consumer: Consumer, limit: float) -> Consumer:
        """The same consumer, with its runs and failures noted here."""
        timeout = None if consumer.timeout is None else min(consumer.timeout, limit)
        handler = _noted(consumer.handler, timeout, partial(self._note, consumer))
        return replace(consumer, timeout=timeout, handler=handler)

    def _note(self, consumer: Consumer, messages: Sequence[Message], error: BaseException | None) -> None:
        if error is None:
            self._runs[consumer.name] += 1
        else:
            self.failures.append(FailedRun(consumer.name, error, tuple(messages), self.clock.now()))


def _place(letter: LetterView) -> tuple[Any, ...]:
    return letter.timestamp, letter.source, letter.partition, len(letter.position), letter.position


def _noted(
    handler: Handler, timeout: float | None, note: Callable[[Sequence[Message], BaseException | None], None]
) -> Handler:
    """A handler that notes each run before it begins and each failure as it ends."""

    @contextmanager
    def run(messages: Sequence[Message]) -> Iterator[None]:
        note(messages, None)
        begun = time.perf_counter()
        try:
            yield
        except asyncio.CancelledError as error:
            is_late = timeout is not None and time.perf_counter() - begun >= timeout
            note(messages, HandlerTimeout(handler.name, timeout or 0.0) if is_late else error)
            raise
        except BaseException as error:
            note(messages, error)
            raise

    def arguments(body: Any, message: Any) -> tuple[Any, ...]:
        return (body, message) if handler.wants_message else (body,)

    def answer(value: Any, messages: Sequence[Message]) -> Any:
        answers = handler.answers(value, len(messages)) if handler.batch else [handler.answer(value)]
        for message, one in zip(messages, answers, strict=True):
            if isinstance(one, Failed):
                note([message], one.error)
        return answers if handler.batch else answers[0]

    async def call(body: Any, message: Any) -> Any:
        messages = message if handler.batch else [message]
        with run(messages):
            value = await handler.call(*arguments(body, message))
        return answer(value, messages)

    def call_plain(body: Any, message: Any) -> Any:
        messages = message if handler.batch else [message]
        with run(messages):
            value = handler.call(*arguments(body, message))
        return answer(value, messages)

    def decode(message: Message) -> Any:
        try:
            return handler.decode(message)
        except PayloadUnreadable as error:
            note([message], error)
            raise

    return replace(handler, call=call if handler.is_async else call_plain, decode=decode, wants_message=True)


def _in_memory(settings: Config, partitions: int) -> Config:
    """The same settings with every address in memory, no lease that could run out, and no rate that would wait."""
    embedded = EmbeddedSettings(
        partitions=partitions, lease_seconds=_FOR_EVER, max_message_bytes=settings.embedded.max_message_bytes
    )
    return replace(
        settings, broker="embedded://:memory:", store="sqlite://:memory:", attempts=None, blobs=None, spool=None,
        embedded=embedded, replay=replace(settings.replay, rate=None),
    )  # fmt: skip


@contextmanager
def _swapped(
    app: Redrive, settings: Config, clock: JumpingClock, consumers: list[Consumer], notify: Notify
) -> Iterator[None]:
    """This app with other insides, so that whoever holds it, handlers too, reaches memory and nothing else."""
    if isinstance(app.clock, JumpingClock):
        raise ConfigError("this app is in a test office already", key="office", fix="leave the other one first")
    fresh = Redrive(settings=settings, notify=notify, clock=clock)
    fresh.consumers, fresh.origin = consumers, app.origin
    fresh._rng = Random(0)  # noqa: S311 - the same jitter in every run
    before = dict(vars(app))
    vars(app).update(vars(fresh))
    try:
        yield
    finally:
        vars(app).clear()
        vars(app).update(before)


@asynccontextmanager
async def _at_work(app: Redrive, patience: float) -> AsyncIterator[list[asyncio.Task[None]]]:
    """The app's workers, if it has any, and the collector."""
    collector = app.collector()
    jobs = [collector.run(), *([app.work()] if app.consumers else [])]
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        yield tasks
    finally:
        app.stop()
        collector.stop()
        await _end(tasks, patience)


async def _end(tasks: Sequence[asyncio.Task[None]], patience: float) -> None:
    """Wait for what was told to stop; what hangs is cancelled, and again where it had to clean up first."""
    pending = set(tasks)
    for seconds in (min(patience, 1.0), patience, patience):
        _, pending = await asyncio.wait(pending, timeout=seconds)
        if not pending:
            break
        for task in pending:
            task.cancel()
    for task in tasks:
        if task.done() and not task.cancelled():
            with suppress(asyncio.CancelledError):
                task.result()
