"""The thread that talks to librdkafka for one subscription: polls, pauses, commits, and answers rebalances."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from redrive.brokers._kafka_client import Options, answer_with, words
from redrive.brokers.base import Subscription
from redrive.errors import BrokerUnavailable

log = logging.getLogger("redrive.kafka")

FETCH = 500
BUFFER_BYTES = 32 << 20
POLL_SECONDS = 0.1
COMMIT_SECONDS = 1.0
AHEAD = 8 * FETCH
"""So many messages may be read ahead of those who handle them, fewer when they are large."""
PATIENCE_SECONDS = 1.0
"""A full buffer waits this long before its partitions are paused: a pause throws away what was prefetched."""
LATE = 0.75
"""Of a session: its last heartbeat was sent some time before we stopped."""

Place = tuple[str, int]
"""A topic and its partition."""
Commit = tuple[int, str]
"""An offset, and what is written beside it."""


class Listener(Protocol):
    """The loop's side. The methods are called on the loop; the attributes are read from the thread."""

    subscription: Subscription
    accepted: int
    backlog: int
    blocked: frozenset[Place]

    def arrived(self, records: list[Any]) -> None: ...
    def assigned(self, places: Mapping[Place, int]) -> None: ...
    def lost(self, places: Collection[Place]) -> None: ...
    def stood_still(self) -> Coroutine[Any, Any, None]: ...
    def give_back(self, places: Collection[Place]) -> Coroutine[Any, Any, dict[Place, Commit]]: ...
    def fail(self, trouble: BrokerUnavailable) -> None: ...


class Reader:
    """Everything that touches the consumer happens in this thread, so what is owned and what is committed agree."""

    def __init__(
        self, stream: Listener, broker: str, settings: dict[str, Any], options: Options, topics: Iterable[str]
    ) -> None:
        self._room = threading.Event()
        self.polled_at = time.monotonic()
        self._stream, self._options, self._topics = stream, options, sorted(topics)
        self._broker = broker
        self._settings = {**settings, "error_cb": self._on_error, "on_commit": self._on_commit}
        self._loop = asyncio.get_running_loop()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._owed: dict[Place, Commit] = {}
        self._owned: set[Place] = set()
        self._paused: set[Place] = set()
        self._posted = 0
        self._limit = float(max(2 * stream.subscription.batch, AHEAD))
        self._is_throttled = False
        self._commit_at = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="redrive-kafka-reader", daemon=True)

    # For the loop.

    @property
    def is_late(self) -> bool:
        """Whether it has not polled for so long that the group may have given us up."""
        return time.monotonic() - self.polled_at > LATE * self._options.session_seconds

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        self._stopping.set()
        self._room.set()
        await asyncio.to_thread(self._thread.join, 15.0)

    def look_again(self) -> None:
        """The backlog is smaller, perhaps by enough to read on."""
        if self._ahead() <= self._limit / 2:
            self._room.set()

    def owe(self, commits: Mapping[Place, Commit]) -> None:
        """To be committed within a second, unless the partition is somebody else's by then."""
        if commits:
            with self._lock:
                self._owed.update(commits)

    def subscribe(self, topics: Iterable[str]) -> None:
        names = sorted(topics)

        def order() -> None:
            self._topics = names
            self._subscribe()

        self._orders.put(order)

    async def flush(self) -> None:
        done: asyncio.Future[None] = self._loop.create_future()

        def order() -> None:
            self._commit(wait=True)
            self._post(answer_with, done, None)

        self._orders.put(order)
        await asyncio.wait({done}, timeout=self._options.session_seconds)

    # In the thread.

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._read()
            except Exception as problem:
                log.exception("the reader of %s begins anew", self._topics)
                self._post(self._stream.fail, BrokerUnavailable(self._broker, "reading", problem))
                self._post(self._stream.lost, self._owned)
                self._owned, self._paused = set(), set()
                self._stopping.wait(COMMIT_SECONDS)

    def _read(self) -> None:
        self._consumer = Consumer(self._settings)
        try:
            self._subscribe()
            while not self._stopping.is_set():
                self._step()
            self._commit(wait=True)
        finally:
            with suppress(KafkaException, RuntimeError):
                self._consumer.close()

    def _subscribe(self) -> None:
        if self._topics:
            self._consumer.subscribe(
                self._topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
            )
        else:
            self._consumer.unsubscribe()

    def _step(self) -> None:
        if self.is_late and self._owned:
            self._start_over()
        self.polled_at = time.monotonic()
        with suppress(queue.Empty):
            while True:
                self._orders.get_nowait()()
        if self.polled_at >= self._commit_at:
            self._commit_at = self.polled_at + COMMIT_SECONDS
            self._commit(wait=False)
        self._room.clear()
        if self._ahead() >= self._limit and not self._is_throttled and self._room.wait(PATIENCE_SECONDS):
            return
        self._is_throttled = self._ahead() >= (self._limit / 2 if self._is_throttled else self._limit)
        self._adjust()
        self._fetch()

    def _start_over(self) -> None:
        """We stood still, and others may own what we remember: first the loop forgets it, then we join again."""
        with suppress(RuntimeError, TimeoutError):
            asyncio.run_coroutine_threadsafe(self._stream.stood_still(), self._loop).result(PATIENCE_SECONDS)
        self._consumer.unsubscribe()
        self._subscribe()

    def _ahead(self) -> float:
        return self._posted - self._stream.accepted + self._stream.backlog

    def _adjust(self) -> None:
        """Pause what may not bring more, resume what may."""
        wanted = set(self._owned) if self._is_throttled else self._owned & self._stream.blocked
        if wanted == self._paused:
            return
        if stop := wanted - self._paused:
            self._consumer.pause([TopicPartition(*place) for place in stop])
        if go := (self._paused & self._owned) - wanted:
            self._consumer.resume([TopicPartition(*place) for place in go])
        self._paused = wanted

    def _fetch(self) -> None:
        """All that has arrived; when that is nothing, wait for the next record."""
        records = self._consumer.consume(FETCH, 0)
        if not records:
            first = self._consumer.poll(POLL_SECONDS)
            if first is None:
                return
            records = [first, *self._consumer.consume(FETCH - 1, 0)]
        good = [record for record in records if record.error() is None]
        for record in records if len(good) < len(records) else ():
            if (error := record.error()) is not None:
                self._on_error(error)
        if good:
            size = sum(map(len, good)) / len(good)
            self._limit = min(float(max(2 * self._stream.subscription.batch, AHEAD)), BUFFER_BYTES / (size + 1))
            self._posted += len(good)
            self._post(self._stream.arrived, good)

    def _commit(self, *, wait: bool) -> None:
        with self._lock:
            owed, self._owed = self._owed, {}
        offsets = [TopicPartition(*at, *owed[at]) for at in owed if at in self._owned]
        if not offsets:
            return
        try:
            if wait:
                self._consumer.commit(offsets=offsets, asynchronous=False)
            else:
                self._consumer.commit(offsets=offsets)
        except KafkaException as problem:
            log.warning("cannot commit yet: %s", words(problem))
            self._owe_again(offsets)

    def _on_commit(self, error: KafkaError | None, offsets: list[TopicPartition]) -> None:
        if error is None or error.code() == KafkaError._NO_OFFSET:
            return
        level = logging.INFO if error.code() in _COMES_WITH_REBALANCE else logging.WARNING
        log.log(level, "a commit was refused: %s", words(error))
        self._owe_again(offsets)

    def _owe_again(self, offsets: list[TopicPartition]) -> None:
        with self._lock:
            for one in offsets:
                self._owed.setdefault((one.topic, one.partition), (one.offset, one.metadata or ""))

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if not partitions:
            return
        try:
            known = consumer.committed(partitions, timeout=5.0)
        except KafkaException:
            known = partitions
        places = {(one.topic, one.partition): _seen(one.metadata) for one in known}
        self._owned |= places.keys()
        self._post(self._stream.assigned, places)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        places = {(one.topic, one.partition) for one in partitions}
        with suppress(RuntimeError, TimeoutError):
            asked = asyncio.run_coroutine_threadsafe(self._stream.give_back(places), self._loop)
            self.owe(asked.result(self._options.session_seconds))
            self._commit(wait=True)
        self._disown(consumer, places)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        places = {(one.topic, one.partition) for one in partitions}
        self._disown(consumer, places)
        self._post(self._stream.lost, places)

    def _disown(self, consumer: Consumer, places: set[Place]) -> None:
        if paused := places & self._paused:
            with suppress(KafkaException):  # else it would still be paused when it comes back
                consumer.resume([TopicPartition(*place) for place in paused])
        self._owned -= places
        self._paused -= places
        with self._lock:
            for place in places:
                self._owed.pop(place, None)

    def _on_error(self, error: KafkaError) -> None:
        """Kafka's own client mends what can be mended; people should hear of it all the same."""
        log.info("kafka says: %s", words(error))
        if error.code() in _WORTH_RAISING:
            self._post(self._stream.fail, BrokerUnavailable(self._broker, "reading", words(error)))
        if error.fatal():
            raise KafkaException(error)

    def _post(self, call: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to read for
            self._stopping.set()


_COMES_WITH_REBALANCE = {KafkaError.ILLEGAL_GENERATION, KafkaError.REBALANCE_IN_PROGRESS}
"""Sent just before the group changed. What is still ours afterwards is committed again."""
_WORTH_RAISING = {
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._AUTHENTICATION,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.SASL_AUTHENTICATION_FAILED,
}


def _seen(metadata: str | None) -> int:
    """How far an earlier owner handed out, as its last commit says; others may have written anything there."""
    return int(metadata) if metadata and metadata.isdecimal() and metadata.isascii() and len(metadata) <= 18 else 0
