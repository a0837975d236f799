from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import uuid4

import pytest
from broker_suite import BrokerSuite
from msgspec.structs import replace

from lab.server import Running
from redrive.brokers.base import Broker, Depth, Lane, Stream, Subscription
from redrive.brokers.kafka import KafkaBroker, KafkaStream
from redrive.clock import Millis

SESSION_SECONDS = 3.0


class Apart(KafkaBroker):
    """Has consumer groups of its own, so that tests may share a server at the same time."""

    def __init__(self, address: str, **options: Any) -> None:
        super().__init__(address, **options)
        self.prefix = uuid4().hex[:8]

    async def subscribe(self, subscription: Subscription) -> Stream:
        return await super().subscribe(replace(subscription, group=self.prefix + subscription.group))

    async def pause(self, group: str, lanes: Sequence[Lane]) -> None:
        await super().pause(self.prefix + group, lanes)

    async def resume(self, group: str, lanes: Sequence[Lane]) -> None:
        await super().resume(self.prefix + group, lanes)

    async def depth(self, source: str, group: str) -> Depth:
        return await super().depth(source, self.prefix + group)


class TestKafka(BrokerSuite):
    backend = KafkaBroker
    group_protocol = "classic"

    @pytest.fixture
    async def broker(self, kafka_server: Running) -> AsyncIterator[KafkaBroker]:
        broker = Apart(
            kafka_server.url.removeprefix("kafka://"), group_protocol=self.group_protocol, partitions=self.partitions,
            max_message_bytes=12 << 20, compression="none", retention_seconds=40 * 365 * 86400,
            session_seconds=SESSION_SECONDS, poll_seconds=SESSION_SECONDS, refresh_seconds=1.0,
        )  # fmt: skip
        await broker.open()
        yield broker
        await broker.close()

    def now(self, broker: Broker) -> Millis:
        return time.time_ns() // 1_000_000

    async def outlive_lease(self, broker: Broker) -> None:
        await asyncio.sleep(SESSION_SECONDS + 1)

    async def die(self, stream: Stream) -> None:
        """Its thread stands still, just after it last committed: it neither polls nor hears of anything."""
        assert isinstance(stream, KafkaStream)
        await stream.flush()
        reader = stream._reader
        reader._step = reader._stopping.wait  # type: ignore[method-assign]


class TestKafkaByTheConsumerProtocol(TestKafka):
    """KIP-848: the server assigns the partitions."""

    group_protocol = "consumer"
    # It has nothing to do with the protocol, and would find the topic that the other run of it made.
    test_a_pattern_never_matches_our_own_topics = None  # type: ignore[assignment]
