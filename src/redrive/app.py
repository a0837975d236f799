"""`Redrive`: the library's front door. Declares consumers, runs them, and offers the office without a server."""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from redrive import classify, config, reports
from redrive.brokers.base import PublishResult, SourceSpec
from redrive.classify import Matcher
from redrive.clock import Clock, Millis, SystemClock
from redrive.collector import Collector
from redrive.config import Config, ConsumerSettings
from redrive.consumer import DEFAULT_DEAD_LETTER, Consumer, as_glob
from redrive.declare import as_backoff, check_against, check_beside, declare
from redrive.desk import Desk
from redrive.errors import ConfigError
from redrive.guard import STAND_IN, Guard, Guarded
from redrive.handlers import Handler, Result, handler_for
from redrive.letter import Act, Environment
from redrive.message import Copy, Headers, Message
from redrive.metrics import Metrics
from redrive.office import Notify, Office
from redrive.query import Filter
from redrive.replayer import Replayer
from redrive.retry import Backoff, Mode
from redrive.runtime import Engine, Gate, Worker
from redrive.stores.base import Job, Page, Statistics, Store
from redrive.views import LetterView
from redrive.wiring import build

F = TypeVar("F", bound=Callable[..., Any])
_GLOB = "*?["


class Redrive:
    """One service's consumers and its way to the office."""

    def __init__(
        self,
        broker: str | None = None,
        *,
        store: str | None = None,
        settings: Config | None = None,
        notify: Notify | None = None,
        clock: Clock | None = None,
        registry: CollectorRegistry | None = None,
        **more: Any,
    ) -> None:
        """`more` are the top-level keys of the configuration file: service, version, spool, blobs, signing_keys …"""
        self.config = settings or _config(broker, store, more)
        self.clock = clock or SystemClock()
        self.metrics = Metrics(registry or CollectorRegistry())
        self.environment = _environment(self.config)
        self.consumers: list[Consumer] = []
        self.origin: tuple[Path, str | None] | None = None
        self._notify = notify
        self._assemble()
        self._rng = Random()  # noqa: S311 - jitter needs no secret
        self._workers: list[Worker] = []
        self.reporter: reports.Reporter | None = None
        self._users = 0
        self._opening = asyncio.Lock()
        self._contexts: list[AbstractAsyncContextManager[Redrive]] = []

    def _assemble(self) -> None:
        """Fresh parts: what was closed is not opened again."""
        self.parts = parts = build(self.config, self.clock)
        self._is_fresh = True
        self.office = Office(
            parts.keyring, self.clock, self.metrics,
            store=parts.store, spool=parts.spool, blobs=parts.blobs, notify=self._notify,
        )  # fmt: skip

    @classmethod
    def from_config(cls, path: str | Path | None = None, *, profile: str | None = None, **more: Any) -> Redrive:
        """The app that this file describes. `REDRIVE_…` variables override every key of it.

        Without a path it is the file that `redrive work --config` or REDRIVE_CONFIG names, else redrive.toml;
        without a profile the one that `--profile` or REDRIVE_PROFILE names.
        """
        file = Path(path or os.environ.get("REDRIVE_CONFIG") or "redrive.toml")
        chosen = profile or os.environ.get("REDRIVE_PROFILE") or None
        settings = config.load(file, profile=chosen)
        try:
            app = cls(settings=settings, **more)
        except ConfigError as error:
            raise error.at(str(file)) from None
        app.origin = (file, chosen)
        return app

    # ---- declaring

    def consumer(
        self,
        source: str | Sequence[str],
        *,
        group: str,
        name: str | None = None,
        batch: int | None = None,
        result: Result | None = None,
        backoff: Backoff | Sequence[float] | float | None = None,
        critical: Iterable[Matcher] = (),
        permanent: Iterable[Matcher] = (),
        transient: Iterable[Matcher] = (),
        attempts: int | None = None,
        budget: float | None = None,
        mode: Mode | str | None = None,
        timeout: float | None = None,
        concurrency: int | None = None,
        on_exhausted: str | None = None,
        enabled: bool | None = None,
        route: str | None = None,
        dead_letter: str | None = None,
        names: dict[str, str] | None = None,
        attributes: dict[str, str] | None = None,
        message_type: str | None = None,
        identity: str | None = None,
        masked: Sequence[str] | None = None,
        labels: Sequence[str] | None = None,
        attempts_key: str | None = None,
        max_replays: int | None = None,
        ordering: str | None = None,
        breaker: dict[str, Any] | None = None,
    ) -> Callable[[F], F]:
        """Register a handler for one source, several, or a pattern. `batch` makes it a batch handler."""
        sources = (source,) if isinstance(source, str) else tuple(source)
        given = {
            "attempts": attempts, "budget": budget, "mode": mode, "timeout": timeout, "concurrency": concurrency,
            "batch": batch, "on_exhausted": on_exhausted, "enabled": enabled, "route": route, "names": names,
            "dead_letter": dead_letter, "attributes": attributes, "message_type": message_type,
            "labels": labels, "attempts_key": attempts_key,
            "identity": identity, "masked": masked, "max_replays": max_replays, "ordering": ordering,
            "breaker": breaker,
        }  # fmt: skip
        rules = classify.rules(critical=critical, permanent=permanent, transient=transient)

        def register(function: F) -> F:
            handler = handler_for(function, name=name, batch=batch is not None, result=result)
            settings = self._settings(sources, config.consumer_settings(given, f"consumer {handler.name}"))
            self._add(declare(handler, sources, group, settings, rules, as_backoff(backoff)))
            return function

        return register

    def _settings(self, sources: Iterable[str], code: ConsumerSettings = ConsumerSettings()) -> ConsumerSettings:  # noqa: B008
        """Defaults, then the code, then what the file says of each source: the file has the last word."""
        return config.merge(self.config.defaults, code, *(self.config.source(source) for source in sources))

    def _add(self, consumer: Consumer) -> None:
        check_beside(consumer, self.consumers)
        if consumer.direct and self.parts.store is None:
            key = f"{consumer.name}.route"
            raise ConfigError("the direct route needs a store", key=key, fix="set store, or route='broker'")
        self.consumers.append(consumer)

    # ---- running

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Redrive]:
        """The app with its parts open; uses at the same time share them."""
        async with self._opening:
            if self._users == 0:
                if not self._is_fresh:
                    self._assemble()
                self._is_fresh = False
                await self._open_parts()
            self._users += 1
        try:
            yield self
        finally:
            self._users -= 1
            if self._users == 0:
                await self.parts.close()

    async def _open_parts(self) -> None:
        try:
            await self.parts.open()
        except ConfigError as error:
            raise (error.at(str(self.origin[0])) if self.origin else error) from None

    async def __aenter__(self) -> Redrive:
        self._contexts.append(self.opened())
        return await self._contexts[-1].__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        await self._contexts.pop().__aexit__(*error)

    async def work(self) -> None:
        """Run every consumer until `stop`. The first that fails stops the others, and its error comes out."""
        if not self.consumers:
            raise ConfigError("no consumer is registered", key="app", fix="decorate a handler with @app.consumer(…)")
        for consumer in self.consumers:
            check_against(consumer, self.parts.broker.can)
        async with self.opened():
            await self._ensure()
            reporter = self.reporter = self._reporter()
            engine = self._engine(reporter)
            self._workers = [Worker(consumer, engine) for consumer in self.consumers]
            side = [asyncio.create_task(job) for job in (reporter.run(), self.office.drain_spool())]
            try:
                await _all_or_first_error(self._workers, side)
            finally:
                for task in side:
                    task.cancel()
                await asyncio.gather(*side, return_exceptions=True)
                await reporter.flush()

    def stop(self) -> None:
        """Finish what runs, settle it, and let `work` return."""
        for worker in self._workers:
            worker.stop()

    def due(self) -> Millis | None:
        """When its workers have something to do: now, later, or None until a message comes. The test kit asks this."""
        dues = [worker.due() for worker in self._workers]
        return min((due for due in dues if due is not None), default=None) if dues else self.clock.now()

    async def _ensure(self) -> None:
        plain = [(c, s) for c in self.consumers for s in c.sources if not any(sign in s for sign in _GLOB)]
        dead = {c.dead_letter_source(s) for c, s in plain if not c.direct}
        names = sorted(dead | {s for _, s in plain})
        await self.parts.broker.ensure([SourceSpec(name, letters=name in dead) for name in names])

    def _reporter(self) -> reports.Reporter:
        store = self.parts.store
        if store is not None and all(consumer.direct for consumer in self.consumers):
            send = reports.through_store(store, self.clock)
        else:
            send = reports.through_broker(self.parts.broker, self.parts.keyring)
        return reports.Reporter(self._unique_name(), self.environment.host, send, self.clock)

    def _engine(self, reporter: reports.Reporter) -> Engine:
        parts = self.parts
        return Engine(
            parts.broker, self.office, parts.attempts, reporter, self.metrics,
            parts.keyring, self.clock, self.environment, self._rng, Gate(),
        )  # fmt: skip

    def _unique_name(self) -> str:
        return f"{self.environment.host}-{self.environment.process}-{uuid.uuid4().hex[:8]}"

    # ---- the office's own workers

    def collector(self) -> Collector:
        """Brings every dead letter source that the settings or the consumers name into the store."""
        settings = [self.config.defaults, *self.config.sources.values()]
        patterns = {one.dead_letter for one in settings if one.dead_letter} or {DEFAULT_DEAD_LETTER}
        globs = {as_glob(one) for one in patterns} | {consumer.dead_letter_glob for consumer in self.consumers}
        parts = self.parts
        return Collector(
            parts.broker, self._store(), parts.keyring, self.clock, self.metrics,
            sources=sorted(globs), tell=self.office.tell,
        )  # fmt: skip

    def replayer(self) -> Replayer:
        parts = self.parts
        return Replayer(
            parts.broker, self._store(), parts.keyring, self.clock, self.metrics,
            owner=self._unique_name(), blobs=parts.blobs, quiet_seconds=self.config.replay.quiet_seconds,
        )  # fmt: skip

    def desk(self) -> Desk:
        replay = self.config.replay
        return Desk(self._store(), self.clock, blobs=self.parts.blobs, window=replay.window, rate=replay.rate)

    def _store(self) -> Store:
        if self.parts.store is None:
            raise ConfigError(
                "this needs a store", key="store", fix="e.g. store = 'sqlite://./redrive-data/letters.db'"
            )
        return self.parts.store

    # ---- your own loop, and the office without a server

    @property
    def letters(self) -> Letters:
        """Look at letters and act on them from code."""
        return Letters(self)

    async def publish(
        self, source: str, body: Any, *, key: bytes | str | None = None, headers: Headers = ()
    ) -> PublishResult:
        """Send one message: bytes as they are, text as UTF-8, anything else as JSON."""
        raw_key = key.encode() if isinstance(key, str) else key
        async with self.opened():
            [result] = await self.parts.broker.publish([Copy(source, raw_key, as_bytes(body), headers)])
        return result

    async def dead_letter(
        self, message: Any, error: BaseException, handler: str, source: str, attempt: int, *, group: str = ""
    ) -> str:
        """File this message now, and say its letter's id. Returns once it is durable, else raises."""
        stand_in = replace(STAND_IN, name=handler)
        consumer = declare(stand_in, (source,), group or handler, self._settings([source]))
        async with self.opened():
            return await self._guard().dead_letter(consumer, self._as_message(message, source), error, attempt)

    def should_retry(self, error: BaseException, attempt: int, *, consumer: str | None = None) -> bool:
        """Whether a message whose run number `attempt` ended in this error would be run again."""
        return self._guard().should_retry(self._known(consumer), error, attempt)

    def retry_delay(self, attempt: int, *, consumer: str | None = None) -> float:
        """Seconds to wait after failed run number `attempt`."""
        return self._known(consumer).policy.backoff.delay(attempt)

    async def execute_with_retry(
        self,
        message: Any,
        handler: Callable[..., Any],
        *,
        source: str = "",
        group: str = "",
        consumer: str | None = None,
    ) -> bool:
        """Run the handler until it succeeds (True) or its message is filed (False), waiting in place between runs."""
        whole = self._as_message(message, source)
        known = self._guarding(whole, handler_for(handler), group, consumer)
        async with self.opened():
            return await self._guard().execute(known, whole)

    @asynccontextmanager
    async def guard(
        self, message: Message, *, group: str = "", consumer: str | None = None, attempt: int | None = None
    ) -> AsyncIterator[Guarded]:
        """For your own loop: a failure inside the block is judged, and filed where no retry will help.

        Settle the message after the block. When it should run again instead, `Retry` comes out of the block, with
        the seconds to wait. Runs are counted in the attempts backend, unless you pass `attempt`, this run's number.
        """
        known = self._guarding(message, STAND_IN, group, consumer)
        async with self.opened(), self._guard().around(known, message, attempt) as guarded:
            yield guarded

    def _guard(self) -> Guard:
        parts = self.parts
        return Guard(
            parts.broker, self.office, parts.attempts, self.clock, self.environment, self._rng,
            direct=parts.store is not None,
        )  # fmt: skip

    def _guarding(self, message: Message, handler: Handler, group: str, name: str | None) -> Consumer:
        if name is not None:
            return replace(self._known(name), handler=handler)
        return declare(handler, (message.source,), group or handler.name, self._settings([message.source]))

    def _known(self, name: str | None) -> Consumer:
        """The consumer of this name; without a name, one that has the defaults."""
        if name is None:
            return declare(STAND_IN, (), "", self.config.defaults)
        for known in self.consumers:
            if known.name == name:
                return known
        names = ", ".join(known.name for known in self.consumers) or "none"
        raise ConfigError("no such consumer", key=name, fix=f"registered: {names}")

    def _as_message(self, given: Any, source: str) -> Message:
        if isinstance(given, Message):
            return given
        position = uuid.uuid4().hex
        return Message(self.parts.broker.name, source, 0, position, self.clock.now(), None, as_bytes(given))


class Letters:
    """`app.letters`: the office in code."""

    def __init__(self, app: Redrive) -> None:
        self._app = app

    async def list(self, source: str | None = None, limit: int = 50, *, filter_: Filter | None = None) -> Page:
        async with self._app.opened():
            return await self._app.desk().page(filter_ or Filter(source=source), limit)

    async def get(self, letter_id: str) -> LetterView:
        async with self._app.opened():
            return await self._app.desk().read(letter_id)

    async def replay(self, letter_id: str, *, who: str = "app", why: str = "") -> Job:
        """Send it back now; returns once the broker has confirmed the copy."""
        async with self._app.opened():
            job = await self._app.desk().replay_one(letter_id, Act(who, why))
            return await self._app.replayer().finish(job.id)

    async def purge(self, letter_id: str, *, who: str = "app", why: str = "") -> None:
        async with self._app.opened():
            await self._app.desk().purge(letter_id, Act(who, why))

    async def statistics(self) -> Statistics:
        async with self._app.opened():
            return await self._app.desk().statistics()


async def _all_or_first_error(workers: Sequence[Worker], beside: Sequence[asyncio.Task[None]]) -> None:
    """Workers end together. What runs beside them ends only by an error, which must not stay unheard."""
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        await asyncio.wait([*tasks, *beside], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for worker in workers:
            worker.stop()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in (*results, *(task.exception() for task in beside if task.done())):
        if isinstance(result, BaseException):
            raise result


def _config(broker: str | None, store: str | None, more: dict[str, Any]) -> Config:
    if broker is None:
        raise ConfigError("no broker", key="broker", fix="Redrive('embedded://./redrive-data/broker.db')")
    given = {"broker": broker, "store": store, **more}
    return config.from_mapping({key: value for key, value in given.items() if value is not None}, where="Redrive(…)")


def _environment(settings: Config) -> Environment:
    return Environment(socket.gethostname(), os.getpid(), settings.service, settings.version, settings.environment)


def as_bytes(body: Any) -> bytes | None:
    if body is None or isinstance(body, bytes):
        return body
    return body.encode() if isinstance(body, str) else msgspec.json.encode(body)
