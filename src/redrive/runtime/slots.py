"""Slots: long-lived tasks that await handlers directly, under one watchdog that enforces their deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any, cast

from redrive.clock import Millis
from redrive.errors import HandlerCancelled, HandlerTimeout
from redrive.handlers import Answer, Failed, Handler
from redrive.message import Message
from redrive.runtime.engine import cancel_all
from redrive.runtime.item import Item

WATCH_SECONDS = 0.05
YIELD_EVERY = 64
"""Messages that a slot may run before it lets others in."""


class Slot:
    """One place to run a handler. The watchdog reads its deadline; `lost` means its thread cannot be stopped."""

    __slots__ = ("busy", "deadline", "lost", "running", "solo", "task", "timed_out", "until")

    def __init__(self, *, solo: bool = False) -> None:
        self.solo = solo
        self.running: Sequence[Item] = ()
        self.task: asyncio.Task[None] | None = None
        self.deadline = 0.0
        self.timed_out = False
        self.lost = False
        self.busy = False
        self.until: Millis = 0  # the end of a wait in place, while there is one

    def ended(self) -> None:
        """The handler is through: its limit is off."""
        self.deadline = 0.0
        if self.timed_out:
            self.taken_back()

    def taken_back(self) -> None:
        """Undo the watchdog's cancellation, so that the slot lives on."""
        self.deadline, self.timed_out = 0.0, False
        if self.task is not None:
            self.task.uncancel()


Work = tuple[Callable[[], bool], Callable[[Slot], Awaitable[None]]]


class Slots:
    """Runs `work(slot)` in `size` slots for as long as `work` has something to do, and suspects in one of its own."""

    def __init__(
        self, handler: Handler, size: int, timeout: float | None, on_lost: Callable[[Slot, int], None]
    ) -> None:
        self._handler, self._timeout, self._on_lost = handler, timeout, on_lost
        self._slots = [*(Slot() for _ in range(size)), Slot(solo=True)]
        self._threads = None if handler.is_async else ThreadPoolExecutor(size + 1, "redrive-handler")
        self._watchdog: asyncio.Task[None] | None = None

    def start(self, work: Work, suspects: Work, wake: asyncio.Event) -> list[asyncio.Task[None]]:
        """`work` and `suspects` each say whether there is something to do, and do it."""
        for slot in self._slots:
            slot.task = asyncio.create_task(self._serve(slot, suspects if slot.solo else work, wake))
        self._watchdog = asyncio.create_task(self._watch())
        return [self._watchdog, *(slot.task for slot in self._slots if slot.task)]

    async def stop(self) -> None:
        """Cancel what still runs; a thread that hangs is left behind."""
        tasks = [slot.task for slot in self._slots if slot.task is not None]
        await cancel_all([*tasks, *([self._watchdog] if self._watchdog else [])])
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def busy(self) -> bool:
        """Whether a handler runs that can still be waited for."""
        return any(slot.busy and not slot.lost for slot in self._slots)

    @property
    def are_free(self) -> bool:
        return any(not slot.busy and not slot.solo for slot in self._slots)

    def due(self, now: Millis) -> Millis | None:
        """When a slot goes on: now while a handler runs, else when the first wait in place is over."""
        if self._watchdog is None:
            return now
        return min((slot.until or now for slot in self._slots if slot.busy), default=None)

    async def call(self, slot: Slot, message: Message) -> Answer:
        """Run the handler on one message; whatever happens comes back as an answer."""
        try:
            return self._handler.answer(await self._begin(slot, self._handler.arguments(message)))
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its answer
            return Failed(self._cause(slot, error))
        finally:
            slot.ended()

    async def call_batch(self, slot: Slot, rows: list[tuple[Any, ...]]) -> list[Answer]:
        """Run a batch handler once; one answer for each row."""
        columns = tuple(list(column) for column in zip(*rows, strict=True))
        try:
            return self._handler.answers(await self._begin(slot, columns), len(rows))
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its answer
            return [Failed(self._cause(slot, error))] * len(rows)
        finally:
            slot.ended()

    @property
    def running(self) -> list[Item]:
        """What runs now, or waits in its slot to run again."""
        return [item for slot in self._slots if slot.busy for item in slot.running]

    @property
    def hanging(self) -> list[Item]:
        """What runs in threads that cannot be stopped."""
        return [item for slot in self._slots if slot.lost for item in slot.running]

    async def _serve(self, slot: Slot, work: Work, wake: asyncio.Event) -> None:
        ready, run = work
        while True:
            while not ready():
                wake.clear()
                await wake.wait()
            slot.busy = True
            try:
                await run(slot)
            finally:
                slot.busy, slot.running = False, ()
            await asyncio.sleep(0)  # a handler that never waits must not starve heartbeats

    def _begin(self, slot: Slot, arguments: tuple[Any, ...]) -> Awaitable[Any]:
        """Start the watch and the handler. Not a coroutine: one less for every message."""
        if self._timeout:
            slot.deadline = perf_counter() + self._timeout
        if self._threads is None:
            return cast(Awaitable[Any], self._handler.call(*arguments))
        return self._in_thread(slot, self._threads, arguments)

    def _cause(self, slot: Slot, error: BaseException) -> BaseException:
        """What a handler that ended like this has to answer for; raises what is meant for the slot itself."""
        if isinstance(error, KeyboardInterrupt):
            raise error
        if not isinstance(error, asyncio.CancelledError):
            return error
        if not slot.timed_out and slot.task is not None and slot.task.cancelling():
            raise error
        name, limit = self._handler.name, self._timeout or 0.0
        cause = HandlerTimeout(name, limit) if slot.timed_out else HandlerCancelled(name)
        cause.__cause__ = error
        return cause

    async def _in_thread(self, slot: Slot, threads: ThreadPoolExecutor, arguments: tuple[Any, ...]) -> Any:
        """A thread cannot be stopped: past its limit its slot is lost until it ends, and its true end counts."""
        running = asyncio.get_running_loop().run_in_executor(threads, self._handler.call, *arguments)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if not slot.timed_out or running.done():
                raise
        slot.taken_back()
        slot.lost = True
        self._on_lost(slot, sum(slot.lost for slot in self._slots))
        try:
            return await running
        finally:
            slot.lost = False

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(WATCH_SECONDS, (self._timeout or 1.0) / 4))
            now = perf_counter()
            for slot in self._slots:
                if slot.deadline and now > slot.deadline and not slot.timed_out and slot.task is not None:
                    slot.timed_out = True
                    slot.task.cancel()
