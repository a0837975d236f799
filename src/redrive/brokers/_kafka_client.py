"""What the Kafka broker asks of its cluster beside consuming: topics, offsets, single records and confirmed writes."""

from __future__ import annotations

import asyncio
import hashlib
import queue
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar

import msgspec
from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, OffsetSpec, ResourceType
from msgspec import Struct

from redrive.brokers.base import Confirmed, PublishResult, Refused, SourceSpec, Subscription, Unknown
from redrive.clock import Millis
from redrive.errors import BrokerUnavailable, ConfigError
from redrive.message import Copy, Headers

T = TypeVar("T")

OWN_PREFIX = "redrive."
DUE = "redrive-due"
ASK_SECONDS = 5.0
SETTINGS_SECONDS = 60.0
LARGEST_REQUEST = 100 << 20
"""What a Kafka server takes in one request unless told otherwise; a topic's own limit is judged by the server."""
FULL_BATCH = 1_000_000
"""Larger messages travel alone; smaller ones share a batch, which the topic's limit judges as one."""

_ILLEGAL = re.compile(r"[^a-zA-Z0-9._-]")
_RETRY = re.compile(r".+\.retry\.(\d{1,9})s")
_LONGEST_NAME = 240

_NOT_OURS_TO_MAKE = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.INVALID_PARTITIONS,
    KafkaError.INVALID_REPLICATION_FACTOR,
    KafkaError.INVALID_CONFIG,
    KafkaError.POLICY_VIOLATION,
}
_TOO_LARGE = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE}
_DEFINITE = _TOO_LARGE | {
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_TIMESTAMP,
    KafkaError.POLICY_VIOLATION,
}
MISSING = {KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART}


class Options(Struct, frozen=True, kw_only=True):
    """One connection's settings. The first block describes every topic that is created here."""

    partitions: int = 3
    replicas: int | None = None
    retention_seconds: float = 30 * 86400
    compression: str = "snappy"
    max_message_bytes: int = 2 << 20
    create_topics: bool = True
    retry_seconds: tuple[int, ...] = (1, 5, 30, 120, 600, 3600)
    """The delays that have a retry topic. A retry waits in the first that is no shorter, the longest more than once."""
    group_protocol: str = "classic"
    session_seconds: float = 45.0
    poll_seconds: float = 300.0
    drain_seconds: float = 10.0
    refresh_seconds: float = 10.0
    publish_seconds: float = 30.0
    client: Mapping[str, str] = {}
    """Properties of librdkafka for TLS and SASL."""

    def common(self, address: str) -> dict[str, Any]:
        return {"bootstrap.servers": address, "client.id": "redrive", "log_level": 2, **self.client}

    def topic(self) -> dict[str, str]:
        retention = round(self.retention_seconds * 1000)
        return {
            "retention.ms": str(retention),
            "compression.type": "uncompressed" if self.compression == "none" else self.compression,
            "max.message.bytes": str(self.max_message_bytes),
            "cleanup.policy": "delete",
        }

    def bucket(self, delay: Millis) -> int:
        """The shortest waiting time that covers this delay, else the longest there is."""
        long_enough = [seconds for seconds in self.retry_seconds if seconds * 1000 >= delay]
        return min(long_enough, default=max(self.retry_seconds))


# Names.


class Origin(Struct, frozen=True):
    """Whose messages a topic holds: a source's own, or its retries of one group that wait about so many seconds."""

    source: str
    seconds: int | None = None


class Due(Struct, frozen=True, array_like=True):
    """Rides on a retry, outside its signature: when it is due, when the original was written, and whose it is."""

    when: Millis
    timestamp: Millis
    source: str
    group: str


_due = msgspec.json.Decoder(Due)


def with_due(headers: Headers, due: Due) -> Headers:
    return (*headers, (DUE, msgspec.json.encode(due)))


def split_due(headers: Headers) -> tuple[Headers, Due | None]:
    """The headers as they were, and the due time; None where somebody else wrote this record."""
    if not headers or headers[-1][0] != DUE or headers[-1][1] is None:
        return headers, None
    try:
        return headers[:-1], _due.decode(headers[-1][1])
    except msgspec.MsgspecError:
        return headers, None


def retry_topic(source: str, group: str, seconds: int) -> str:
    return f"{_retry_prefix(source, group)}{seconds}s"


def _retry_prefix(source: str, group: str) -> str:
    legal = _ILLEGAL.sub("_", group)
    prefix = f"{source}.{legal}.retry."
    if legal == group and len(prefix) <= _LONGEST_NAME:
        return prefix
    mark = hashlib.sha256(f"{source}\0{group}".encode()).hexdigest()[:12]
    return f"{source[:100]}.{legal[:100]}.{mark}.retry."


def is_glob(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def wanted(subscription: Subscription, names: Collection[str]) -> dict[str, Origin]:
    """The topics this subscription reads: its sources, and its group's own retry topics of them."""
    found = {name: Origin(name) for name in names if _is_source(subscription, name)}
    retries = [(name, match) for name in names if (match := _RETRY.fullmatch(name))]
    for source in list(found) if retries else ():
        prefix = _retry_prefix(source, subscription.group)
        for name, match in retries:
            if name.startswith(prefix) and match.start(1) == len(prefix):
                found.setdefault(name, Origin(source, int(match[1])))
    return found


def _is_source(subscription: Subscription, name: str) -> bool:
    if any(fnmatchcase(name, pattern) for pattern in subscription.exclude):
        return False
    if name in subscription.sources:
        return True
    own = name.startswith((OWN_PREFIX, "__")) or _RETRY.fullmatch(name) is not None
    return not own and any(fnmatchcase(name, pattern) for pattern in subscription.sources if is_glob(pattern))


# Errors.


def words(problem: KafkaException | KafkaError) -> str:
    error = problem.args[0] if isinstance(problem, KafkaException) else problem
    return f"{error.name()}: {error.str()}" if isinstance(error, KafkaError) else str(error)


def code(problem: KafkaException) -> int | None:
    error = problem.args[0]
    return error.code() if isinstance(error, KafkaError) else None


@contextmanager
def translated(broker: str, what: str) -> Iterator[None]:
    try:
        yield
    except KafkaException as problem:
        raise BrokerUnavailable(broker, what, words(problem)) from problem


# The cluster.


class TopicSettings(Struct, frozen=True):
    retention: float | None
    """Seconds; None keeps for ever."""
    compacted: bool


class Cluster:
    """Questions about topics and offsets, and the creation of topics."""

    def __init__(self, name: str, address: str, options: Options) -> None:
        self._name, self._address, self._options = name, address, options
        self._admin = AdminClient({**options.common(address), "socket.connection.setup.timeout.ms": 3000})
        self._settings: dict[str, tuple[float, TopicSettings]] = {}

    async def names(self) -> dict[str, int]:
        """Every topic and its partitions. Asking for all of them never makes the server create one."""
        with translated(self._name, f"asking {self._address} for topics"):
            listed = await asyncio.to_thread(self._admin.list_topics, timeout=ASK_SECONDS)
        return {name: len(topic.partitions) for name, topic in listed.topics.items() if topic.partitions}

    async def ensure(self, specs: Sequence[SourceSpec]) -> dict[str, int]:
        found = await self.names()
        for spec in specs:
            if spec.name in found and spec.partitions not in (None, found[spec.name]):
                raise ConfigError(
                    f"topic {spec.name} has {found[spec.name]} partitions, the configuration asks for "
                    f"{spec.partitions}",
                    key="partitions", fix=f"set partitions to {found[spec.name]}, or use a new topic",
                )  # fmt: skip
            if spec.letters and spec.name in found:
                await self._refuse_compacted(spec.name)
        missing = {spec.name: spec.partitions for spec in specs if spec.name not in found}
        return await self.create(missing) if missing else found

    async def create(self, missing: Mapping[str, int | None]) -> dict[str, int]:
        """Make these topics and return once the cluster shows them."""
        if not self._options.create_topics:
            raise ConfigError(
                f"topic {', '.join(sorted(missing))} does not exist at {self._address}",
                key="kafka.create_topics", fix="create it, or set create_topics = true",
            )  # fmt: skip
        config, replicas = self._options.topic(), self._options.replicas or -1
        fresh = [NewTopic(t, n or self._options.partitions, replicas, config=config) for t, n in missing.items()]
        for topic, made in self._admin.create_topics(fresh, operation_timeout=ASK_SECONDS).items():
            await self._made(topic, made)
        deadline = time.monotonic() + 2 * ASK_SECONDS
        while True:
            found = await self.names()
            if found.keys() >= missing.keys() or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.05)

    async def _made(self, topic: str, made: Future[Any]) -> None:
        try:
            await asyncio.wrap_future(made)
        except KafkaException as problem:
            if code(problem) in _NOT_OURS_TO_MAKE:
                raise ConfigError(
                    f"topic {topic} cannot be created: {words(problem)}", key="kafka", fix="create it by hand"
                ) from problem
            if code(problem) != KafkaError.TOPIC_ALREADY_EXISTS:
                raise BrokerUnavailable(self._name, f"creating {topic}", words(problem)) from problem

    async def _refuse_compacted(self, topic: str) -> None:
        settings = await self.settings(topic)
        if settings is not None and settings.compacted:
            raise ConfigError(
                f"dead letter topic {topic} has cleanup.policy=compact: letters of one key would replace each other",
                key="dead_letter", fix=f"set cleanup.policy=delete on {topic}, or use another topic",
            )  # fmt: skip

    async def settings(self, topic: str) -> TopicSettings | None:
        """What the cluster says of this topic, at most a minute old; None when there is no such topic."""
        known = self._settings.get(topic)
        if known is not None and known[0] > time.monotonic():
            return known[1]
        asked = self._admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic)], request_timeout=ASK_SECONDS)
        try:
            [entries] = [await asyncio.wrap_future(answer) for answer in asked.values()]
        except KafkaException as problem:
            if code(problem) in MISSING:
                return None
            raise BrokerUnavailable(self._name, f"asking about {topic}", words(problem)) from problem
        millis = int(entries["retention.ms"].value)
        found = TopicSettings(None if millis < 0 else millis / 1000, "compact" in entries["cleanup.policy"].value)
        self._settings[topic] = (time.monotonic() + SETTINGS_SECONDS, found)
        return found

    async def unsettled(self, group: str, topics: Mapping[str, int]) -> dict[tuple[str, int], tuple[int, int]]:
        """From the group's committed offset to the last stable one, for each partition that has something between."""
        places = [TopicPartition(topic, p) for topic, count in topics.items() for p in range(count)]
        if not places:
            return {}
        with translated(self._name, f"asking for the offsets of {group}"):
            ends = await self._offsets(places, OffsetSpec.latest())
            begins = await self._offsets(places, OffsetSpec.earliest())
            asked = self._admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group, places)])
            committed = await asyncio.wrap_future(asked[group])
        found = {}
        for one in committed.topic_partitions:
            at = (one.topic, one.partition)
            start = max(one.offset if one.offset >= 0 else 0, begins[at])
            if start < ends[at]:
                found[at] = (start, ends[at])
        return found

    async def _offsets(self, places: list[TopicPartition], which: OffsetSpec) -> dict[tuple[str, int], int]:
        asked = self._admin.list_offsets(
            dict.fromkeys(places, which), isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=ASK_SECONDS
        )
        return {(at.topic, at.partition): (await asyncio.wrap_future(found)).offset for at, found in asked.items()}

    async def peek(self, places: Sequence[tuple[str, int, int]]) -> list[Any]:
        """The first record at or behind each place; None where the log ends before one comes."""
        with translated(self._name, "reading single records"):
            return await asyncio.to_thread(self._peek, places)

    def _peek(self, places: Sequence[tuple[str, int, int]]) -> list[Any]:
        settings = {"group.id": "redrive-peek", "enable.partition.eof": True, "enable.auto.commit": False}
        consumer = Consumer({**self._options.common(self._address), **settings, "isolation.level": "read_committed"})
        try:
            return [self._peek_one(consumer, TopicPartition(*place)) for place in places]
        finally:
            consumer.close()

    def _peek_one(self, consumer: Consumer, place: TopicPartition) -> Any:
        consumer.assign([place])
        deadline = time.monotonic() + ASK_SECONDS
        while time.monotonic() < deadline:
            record = consumer.poll(0.1)
            if record is None:
                continue
            error = record.error()
            if error is None:
                return record
            if error.code() in (KafkaError._PARTITION_EOF, KafkaError.OFFSET_OUT_OF_RANGE, *MISSING):
                return None
            raise KafkaException(error)
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"{place.topic} does not answer"))


# Confirmed writes.


class _Job:
    """One batch on its way, and how each of its copies fared."""

    def __init__(self, copies: Sequence[Copy], done: Callable[[list[PublishResult]], None]) -> None:
        self.copies, self._done = copies, done
        self._results: list[PublishResult] = [Unknown("not reported")] * len(copies)
        self._left = len(copies)

    def report(self, index: int, result: PublishResult) -> None:
        self._results[index] = result
        self._left -= 1
        if not self._left:
            self._done(self._results)


class Outbox:
    """One idempotent producer, and the thread that feeds it and hears its reports."""

    def __init__(self, address: str, options: Options) -> None:
        timeout = round(options.publish_seconds * 1000)
        self._settings = {
            **options.common(address), "enable.idempotence": True, "acks": "all", "delivery.timeout.ms": timeout,
            "request.timeout.ms": min(timeout, 30_000), "message.max.bytes": LARGEST_REQUEST, "linger.ms": 2,
            "batch.size": FULL_BATCH, "partitioner": "murmur2_random", "topic.metadata.propagation.max.ms": 5000,
        }  # fmt: skip
        self._producer = Producer(self._settings)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._open = 0
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="redrive-kafka-outbox", daemon=True)
        self._thread.start()

    async def send(self, copies: Sequence[Copy]) -> list[PublishResult]:
        """One answer for each, once all are known. What only its company made too large is sent again alone."""
        results = await self._submit(copies)
        for index, result in enumerate(results):
            small = isinstance(result, Refused) and result.too_large and _size(copies[index]) < FULL_BATCH
            if small and len(copies) > 1:
                [results[index]] = await self._submit([copies[index]])
        return results

    async def close(self) -> None:
        """Wait for what is on its way, then end."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, 2 * ASK_SECONDS)

    async def _submit(self, copies: Sequence[Copy]) -> list[PublishResult]:
        if not copies:
            return []
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[PublishResult]] = loop.create_future()

        def done(results: list[PublishResult]) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits for it any more
                loop.call_soon_threadsafe(answer_with, answer, results)

        self._jobs.put(_Job(copies, done))
        return await answer

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(block=not self._open)
            except queue.Empty:
                self._producer.poll(0.02)
                continue
            if job is None:
                break
            self._produce(job)
            self._producer.poll(0)
        self._producer.flush(ASK_SECONDS)

    def _produce(self, job: _Job) -> None:
        if self._broken and not self._open:
            self._producer, self._broken = Producer(self._settings), False
        for index, copy in enumerate(job.copies):
            refused = self._hand_over(copy, partial(self._reported, job, index))
            if refused is None:
                self._open += 1
            else:
                job.report(index, refused)

    def _hand_over(self, copy: Copy, report: Callable[[Any, Any], None]) -> PublishResult | None:
        """None once the producer has it."""
        if (size := _size(copy)) > LARGEST_REQUEST:
            return Refused(f"{size} bytes are more than one request may hold", too_large=True)
        headers: list[Any] | None = list(copy.headers) if copy.headers else None
        if any("\0" in name for name, _ in copy.headers):
            return Refused("this client cuts a header's name at its NUL")
        while True:
            try:
                self._producer.produce(
                    copy.destination, copy.body, copy.key, on_delivery=report, timestamp=copy.timestamp or 0,
                    headers=headers,
                )  # fmt: skip
            except BufferError:
                self._producer.poll(0.1)
            except KafkaException as problem:
                return _result(problem.args[0])
            except (TypeError, ValueError, OverflowError) as problem:
                return Refused(f"{copy.destination!r}: {problem}")
            else:
                return None

    def _reported(self, job: _Job, index: int, error: KafkaError | None, record: Any) -> None:
        self._open -= 1
        if error is None:
            job.report(index, Confirmed(f"{record.partition()}/{record.offset()}"))
            return
        self._broken = self._broken or error.fatal()
        job.report(index, _result(error))


def answer_with(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _result(error: KafkaError) -> PublishResult:
    if error.code() in _DEFINITE:
        return Refused(words(error), too_large=error.code() in _TOO_LARGE)
    return Unknown(words(error))


def _size(copy: Copy) -> int:
    size = len(copy.key or b"") + len(copy.body or b"")
    return size + sum(len(name) + len(value or b"") for name, value in copy.headers)


def headers_of(record: Any) -> Headers:
    """The record's headers. A name that is not UTF-8 cannot be had from this client: then there are none."""
    try:
        found: list[tuple[str, bytes | None]] | None = record.headers()
    except UnicodeDecodeError:
        return ()
    return tuple(found) if found else ()
