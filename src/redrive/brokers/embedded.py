"""A durable broker in one SQLite file: a log with consumer groups, shared by the processes of one machine."""

from __future__ import annotations

import asyncio
import itertools
import os
import sqlite3
import zlib
from collections import deque
from collections.abc import Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from redrive.brokers import _embedded_sql as sql
from redrive.brokers.base import (
    Abilities,
    Ack,
    Assigned,
    Batch,
    Bury,
    Confirmed,
    Delivery,
    Depth,
    Event,
    Lane,
    LeaseLost,
    PublishResult,
    Refused,
    RetryAt,
    Revoked,
    Settled,
    Settlement,
    SettleResult,
    SourceSpec,
    Stream,
    Subscription,
)
from redrive.clock import Clock, Millis, SystemClock
from redrive.errors import BrokerUnavailable
from redrive.message import Coordinates, Copy, Message
from redrive.sqlite import MEMORY, Database, Work

T = TypeVar("T")

SLOWEST_POLL = 0.1
TRIM_ROUNDS = 20
_SETTLED = Settled()
DIGITS = 18
"""No offset has more, and SQLite takes no larger number."""


class EmbeddedBroker:
    """Any number of processes on one machine may share the file; `:memory:` is for one process and forgets."""

    def __init__(
        self, path: str, *, name: str = "embedded", clock: Clock | None = None, partitions: int = 4,
        lease_seconds: float = 15.0, poll_seconds: float = 0.02, max_message_bytes: int = 64 << 20,
        retention_seconds: float | None = 7 * 86400,
    ) -> None:  # fmt: skip
        self.path, self.name, self.clock = path, name, clock or SystemClock()
        self.partitions, self.lease_seconds, self.poll_seconds = partitions, lease_seconds, poll_seconds
        self.max_message_bytes, self.retention_seconds = max_message_bytes, retention_seconds
        self.can = Abilities(
            delay_natively=True, order_by_key=True, retains_settled=retention_seconds is None or retention_seconds > 0,
            durable=path != MEMORY, max_message_bytes=max_message_bytes, lease_seconds=lease_seconds,
        )  # fmt: skip
        self._database: Database | None = None
        self._streams: dict[int, EmbeddedStream] = {}
        self._paused: set[tuple[str, Lane]] = set()
        self._topics: set[str] = set()
        self._spread = itertools.count(os.getpid())
        self._running: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        if self._database is not None:
            return
        database = Database(self.path, [sql.SCHEMA])
        try:
            with self._translated(f"opening {self.path}"):
                await database.open()
        except BaseException:
            await database.close()
            raise
        self._database = database

    async def close(self) -> None:
        for stream in list(self._streams.values()):
            with suppress(BrokerUnavailable):  # leases that cannot be given back run out by themselves
                await stream.aclose()
        database, self._database = self._database, None
        if database is not None:
            await database.close()

    async def ensure(self, sources: Sequence[SourceSpec]) -> None:
        await self.write("ensure", lambda connection: sql.ensure(connection, sources, self.partitions))
        self._noticed({spec.name for spec in sources})

    async def subscribe(self, subscription: Subscription) -> Stream:
        named = [name for name in subscription.sources if not sql.is_glob(name) and sql.wanted(subscription, name)]
        await self.ensure([SourceSpec(name) for name in named])
        until = self.clock.now() + self.lease_millis
        member = await self.write("subscribe", lambda connection: sql.enlist(connection, subscription, until))
        stream = self._streams[member] = EmbeddedStream(self, subscription, member)
        try:
            await stream.start()
        except BaseException:
            self.forget(member)
            raise
        return stream

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettleResult]:
        return await self.unbroken(self._settle(settlements))

    async def publish(self, copies: Sequence[Copy]) -> list[PublishResult]:
        return await self.unbroken(self._publish(copies))

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        until = self.clock.now() + self.lease_millis
        held = {(until, d.token.lane, d.token.member, d.token.generation) for d in deliveries}
        await self.write("extend", lambda connection: connection.executemany(sql.EXTEND, held))

    async def pause(self, group: str, lanes: Sequence[Lane]) -> None:
        self._paused.update((group, lane) for lane in lanes)

    async def resume(self, group: str, lanes: Sequence[Lane]) -> None:
        self._paused.difference_update((group, lane) for lane in lanes)
        self._wake()

    async def read(self, coordinates: Sequence[Coordinates]) -> list[Message | None]:
        return await self.query("read", lambda connection: [self._find(connection, place) for place in coordinates])

    async def depth(self, source: str, group: str) -> Depth:
        count, oldest = await self.query("depth", lambda connection: sql.depth(connection, source, group))
        return Depth(count, oldest, self.retention_seconds)

    @property
    def lease_millis(self) -> int:
        return int(self.lease_seconds * 1000)

    def due(self) -> Millis | None:
        """When its streams have something to do: now, later, or None until somebody publishes. `:memory:` only."""
        if self._running:
            return self.clock.now()
        dues = [stream.due() for stream in self._streams.values()]
        return min((due for due in dues if due is not None), default=None)

    def is_paused(self, group: str, lane: Lane) -> bool:
        return (group, lane) in self._paused

    async def write(self, what: str, work: Work[T]) -> T:
        with self._translated(what):
            return await self._opened(what).write(work)

    async def query(self, what: str, work: Work[T]) -> T:
        with self._translated(what):
            return await self._opened(what).read(work)

    async def unbroken(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end even when the caller is cancelled, so that memory never falls behind the database."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    def forget(self, member: int) -> None:
        self._streams.pop(member, None)

    def rebalance(self) -> None:
        """Have the streams of this process look at once at who owns what; other processes see the group's epoch."""
        for stream in self._streams.values():
            stream.look.set()

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as problem:
            raise BrokerUnavailable(self.name, what, problem) from problem

    def _opened(self, what: str) -> Database:
        if self._database is None:
            raise BrokerUnavailable(self.name, what, "it is not open")
        return self._database

    def _wake(self) -> None:
        for stream in self._streams.values():
            stream.wake.set()

    def _noticed(self, topics: set[str]) -> None:
        self._wake()
        if not topics <= self._topics:
            self._topics |= topics
            self.rebalance()

    async def _publish(self, copies: Sequence[Copy]) -> list[PublishResult]:
        refusals = [self._refusal(copy) for copy in copies]
        accepted = [copy for copy, refused in zip(copies, refusals, strict=True) if refused is None]
        offsets = iter(await self.write("publish", lambda connection: self._append(connection, accepted)))
        self._noticed({copy.destination for copy in accepted})
        return [refused or Confirmed(str(next(offsets))) for refused in refusals]

    async def _settle(self, settlements: Sequence[Settlement]) -> list[SettleResult]:
        now = self.clock.now()
        results = await self.write("settle", lambda connection: self._apply(connection, settlements, now))
        for settlement, result in zip(settlements, results, strict=True):
            stream = self._streams.get(settlement.delivery.token.member)
            if stream is not None and not isinstance(result, Refused):
                stream.finished(settlement.delivery.token)
        self._noticed({s.copy.destination for s in settlements if isinstance(s, Bury)})
        return results

    def _apply(
        self, connection: sqlite3.Connection, settlements: Sequence[Settlement], now: Millis
    ) -> list[SettleResult]:
        results: list[SettleResult] = []
        buried: list[Copy] = []
        cursor = connection.cursor()
        acked = sql.settle_all(connection, [s.delivery.token for s in settlements if isinstance(s, Ack)])
        for settlement in settlements:
            if acked and isinstance(settlement, Ack):
                results.append(_SETTLED)
                continue
            refused = self._refusal(settlement.copy) if isinstance(settlement, Bury | RetryAt) else None
            if refused is not None:
                results.append(refused)
                continue
            done = sql.settle_one(cursor, settlement, now)
            results.append(_SETTLED if done else LeaseLost())
            if done and isinstance(settlement, Bury):
                buried.append(settlement.copy)
        self._append(connection, buried)
        return results

    def _refusal(self, copy: Copy) -> Refused | None:
        size = len(copy.key or b"") + len(copy.body or b"")
        size += sum(len(name) + len(value or b"") for name, value in copy.headers)
        if size > self.max_message_bytes:
            return Refused(f"{size} bytes are more than the {self.max_message_bytes} allowed", too_large=True)
        if not copy.destination or sql.is_glob(copy.destination) or not sql.is_text(copy.destination):
            return Refused(f"{copy.destination!r} is no name for a topic")
        return None

    def _append(self, connection: sqlite3.Connection, copies: Sequence[Copy]) -> list[int]:
        """Write the copies to the ends of their logs; their offsets, in order."""
        now = self.clock.now()
        topics: dict[str, list[sql.Log]] = {}
        rows = []
        for copy in copies:
            if copy.destination not in topics:
                topics[copy.destination] = sql.topic_logs(connection, copy.destination, self.partitions)
            log = self._log_for(copy.key, topics[copy.destination])
            at = now if copy.timestamp is None else copy.timestamp
            rows.append((log.id, log.head, at, now, copy.key, copy.body, sql.pack(copy.headers)))
            log.head += 1
        connection.executemany("INSERT INTO messages VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        heads = [(log.head, log.id) for logs in topics.values() for log in logs]
        connection.executemany("UPDATE logs SET head = ? WHERE id = ?", heads)
        return [row[1] for row in rows]

    def _log_for(self, key: bytes | None, logs: Sequence[sql.Log]) -> sql.Log:
        return logs[(next(self._spread) if key is None else zlib.crc32(key)) % len(logs)]

    def _find(self, connection: sqlite3.Connection, place: Coordinates) -> Message | None:
        if place.broker != self.name or not place.position.isdecimal() or len(place.position) > DIGITS:
            return None
        values = (place.source, place.partition, int(place.position), place.timestamp)
        row = connection.execute(sql.FIND, values).fetchone()
        if row is None:
            return None
        key, body, headers = row
        where = (place.source, place.partition, place.position, place.timestamp)
        return Message(self.name, *where, key, body, sql.unpack(headers))


class _Held(Struct):
    """A lane this stream owns. `in_flight` has the turn of every offset that is handed out or about to be."""

    id: int
    lane: Lane
    generation: int
    in_flight: dict[int, int]
    draining_since: Millis | None = None


class EmbeddedStream:
    """A subscription of one member. A heartbeat renews leases, shares lanes fairly and trims what is settled."""

    def __init__(self, broker: EmbeddedBroker, subscription: Subscription, member: int) -> None:
        self.wake, self.look = asyncio.Event(), asyncio.Event()
        self._broker, self._clock, self._subscription, self._member = broker, broker.clock, subscription, member
        self._held: dict[int, _Held] = {}
        self._events: deque[Event] = deque()
        self._parked: list[Delivery] = []
        self._lock = asyncio.Lock()  # a fetch and a heartbeat never interleave
        self._heart: asyncio.Task[None] | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._epoch = self._version = -1
        self._next_due: Millis | None = None
        self._rotation = 0
        self._resting = False

    async def start(self) -> None:
        await self._beat()
        self._heart = asyncio.create_task(self._keep_beating())
        self._broker.rebalance()

    def __aiter__(self) -> EmbeddedStream:
        return self

    async def __anext__(self) -> Event:
        while self._closing is None:
            event = self._next_event()
            if event is not None:
                return event
            await self._fetch_once()
            if not self._events:
                await self._idle()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._leave())
        await asyncio.shield(self._closing)

    def finished(self, lease: sql.Lease) -> None:
        """The delivery is settled or lost: it takes no room any more."""
        held = self._held.get(lease.lane)
        if held is None or held.in_flight.get(lease.offset) != lease.turn:
            return
        del held.in_flight[lease.offset]
        self._look_when_drained(held)

    def due(self) -> Millis | None:
        """When it has something to do: now, when its next delay runs out, or None until somebody publishes."""
        at_work = self._lock.locked() or bool(self._events) or self.wake.is_set() or self.look.is_set()
        return self._next_due if self._resting and not at_work else self._clock.now()

    def _look_when_drained(self, held: _Held) -> None:
        if held.draining_since is not None and not held.in_flight:
            self.look.set()

    def _next_event(self) -> Event | None:
        self._unpark()
        while self._events:
            event = self._events.popleft()
            if not isinstance(event, Batch):
                return event
            ready = tuple(d for d in event.deliveries if self._may_go_out(d))
            if ready:
                return Batch(ready)
        return None

    def _may_go_out(self, delivery: Delivery) -> bool:
        """Not when its lane was lost while it waited here, and not yet when its lane was paused meanwhile."""
        held = self._held.get(delivery.token.lane)
        if held is None or held.generation != delivery.token.generation:
            return False
        paused = self._broker.is_paused(delivery.group, held.lane)
        if paused:
            self._parked.append(delivery)
        return not paused

    def _unpark(self) -> None:
        if any(not self._broker.is_paused(d.group, d.lane) for d in self._parked):
            self._events.appendleft(Batch(tuple(self._parked)))
            self._parked = []

    async def _fetch_once(self) -> None:
        """A cancelled caller leaves the fetch running; the next call finds what it brought."""
        if self._fetching is None:
            self._fetching = asyncio.create_task(self._fetch())
        try:
            await asyncio.shield(self._fetching)
        finally:
            if self._fetching is not None and self._fetching.done():
                self._fetching = None

    async def _fetch(self) -> None:
        async with self._lock:
            self.wake.clear()  # here and not in the reader, who may find an older fetch that has not seen what woke him
            room = self._room()
            if room <= 0:
                self._next_due = None
                return
            open_lanes = {h.id: h.generation for h in self._held.values() if self._is_open(h)}
            now, rotation = self._clock.now(), self._rotation
            self._rotation += 1
            fetched = await self._broker.write(
                "fetch",
                lambda c: sql.fetch(c, self._subscription.group, self._member, open_lanes, room, now, rotation),
            )
            self._take_in(fetched)

    def _room(self) -> int:
        unsettled = sum(len(held.in_flight) for held in self._held.values())
        return min(self._subscription.batch, self._subscription.in_flight - unsettled)

    def _is_open(self, held: _Held) -> bool:
        return held.draining_since is None and not self._broker.is_paused(self._subscription.group, held.lane)

    def _take_in(self, fetched: sql.Fetched) -> None:
        self._next_due, self._version = fetched.next_due, fetched.version
        if fetched.epoch != self._epoch:
            self.look.set()
        deliveries: list[Delivery] = []
        for lane, rows in fetched.rows:
            deliveries += self._deliveries(self._held[lane], rows)
        if deliveries:
            self._events.append(Batch(tuple(deliveries)))

    def _deliveries(self, held: _Held, rows: Sequence[sql.Row]) -> Iterator[Delivery]:
        where = (self._broker.name, held.lane.source, held.lane.partition)
        for offset, turn, ts, key, body, headers in rows:
            held.in_flight[offset] = turn
            message = Message(*where, str(offset), ts, key, body, sql.unpack(headers))
            lease = sql.Lease(self._member, held.id, held.generation, offset, turn)
            yield Delivery(message, self._subscription.group, lease, turn)

    async def _idle(self) -> None:
        """Wait until this process changed something, a delay ran out, or another process committed."""
        pause = self._broker.poll_seconds
        while not self.wake.is_set() and self._closing is None:
            self._raise_dead_heart()
            left = pause if self._next_due is None else (self._next_due - self._clock.now()) / 1000
            if left <= 0:
                return
            self._resting = True
            await self._clock.wait(self.wake, min(pause, left))
            self._resting = False
            if await self._broker.query("poll", sql.version) != self._version:
                return
            pause = min(2 * pause, SLOWEST_POLL)

    def _raise_dead_heart(self) -> None:
        if self._heart is not None and self._heart.done() and not self._heart.cancelled():
            self._heart.result()

    async def _keep_beating(self) -> None:
        while True:
            await self._clock.wait(self.look, self._broker.lease_seconds / 3)
            self.look.clear()
            try:
                await self._beat()
                await self._trim()
            except BrokerUnavailable:
                # The fetch meets the same trouble and raises it to the caller; leases may outlive a short one.
                continue

    async def _beat(self) -> None:
        async with self._lock:
            now = self._clock.now()
            overdue = now - self._broker.lease_millis
            movable = {
                held.id for held in self._held.values()
                if not held.in_flight or (held.draining_since is not None and held.draining_since <= overdue)
            }  # fmt: skip
            until = now + self._broker.lease_millis
            view = await self._broker.write(
                "heartbeat", lambda c: sql.beat(c, self._subscription, self._member, movable, now, until)
            )
            self._adopt(view, now)

    def _adopt(self, view: sql.View, now: Millis) -> None:
        owned = {row.id: row for row in view.owned}
        gone = [h for h in self._held.values() if h.id not in owned or owned[h.id].generation != h.generation]
        for held in gone:
            del self._held[held.id]
        new = [row for row in view.owned if row.id not in self._held]
        for row in new:
            self._held[row.id] = _Held(row.id, Lane(row.topic, row.partition), row.generation, {})
        for held in self._held.values():
            held.draining_since = (held.draining_since or now) if held.id in view.draining else None
            self._look_when_drained(held)
        self._epoch = view.epoch
        self._announce(gone, [self._held[row.id].lane for row in new])

    def _announce(self, gone: Collection[_Held], new: Collection[Lane]) -> None:
        for clean in (True, False):
            lanes = tuple(held.lane for held in gone if clean is not bool(held.in_flight))
            if lanes:
                self._events.append(Revoked(lanes, clean))
        if new:
            self._events.append(Assigned(tuple(new)))
        if gone or new:
            self.wake.set()
        if gone:
            self._broker.rebalance()
        ids = {held.id for held in gone}
        self._parked = [d for d in self._parked if d.token.lane not in ids]

    async def _trim(self) -> None:
        if self._broker.retention_seconds is None:
            return
        lanes = list(self._held)
        cutoff = self._clock.now() - int(self._broker.retention_seconds * 1000)
        for _ in range(TRIM_ROUNDS):
            lanes = await self._broker.write("retention", partial(sql.trim, lanes=lanes, cutoff=cutoff))
            if not lanes:
                return

    async def _leave(self) -> None:
        self.wake.set()
        tasks = [task for task in (self._heart, self._fetching) if task is not None]
        if self._heart is not None:
            self._heart.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._broker.forget(self._member)
        group = self._subscription.group
        await self._broker.resume(group, [held.lane for held in self._held.values()])
        await self._broker.write("unsubscribe", lambda connection: sql.leave(connection, group, self._member))
        self._broker.rebalance()
