from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from broker_suite import BrokerSuite
from confluent_kafka.admin import AdminClient

from lab.server import Running
from redrive.brokers._kafka_stream import KafkaStream
from redrive.brokers.base import Broker, Stream
from redrive.brokers.kafka import KafkaBroker
from redrive.clock import Millis

SESSION_SECONDS = 3.0


@pytest.mark.xdist_group("kafka")
class TestKafka(BrokerSuite):
    backend = KafkaBroker
    group_protocol = "classic"

    @pytest.fixture
    async def broker(self, kafka_server: Running) -> AsyncIterator[KafkaBroker]:
        broker = KafkaBroker(
            kafka_server.url.removeprefix("kafka://"), group_protocol=self.group_protocol, partitions=self.partitions,
            max_message_bytes=12 << 20, compression="none", retention_seconds=40 * 365 * 86400,
            session_seconds=SESSION_SECONDS, poll_seconds=SESSION_SECONDS, refresh_seconds=1.0,
        )  # fmt: skip
        await broker.open()
        yield broker
        await broker.close()
        await self.forget_topics(broker.address)

    async def forget_topics(self, address: str) -> None:
        """Patterns would find what earlier tests left."""
        admin = AdminClient({"bootstrap.servers": address})
        left = [
            name
            for name in (await asyncio.to_thread(admin.list_topics, timeout=5)).topics
            if name.startswith("redrawn.")
        ]
        for deleted in admin.delete_topics(left).values() if left else ():
            await asyncio.wrap_future(deleted)

    def now(self, broker: Broker) -> Millis:
        return time.time_ns() // 1_000_000

    async def outlive_lease(self, broker: Broker) -> None:
        await asyncio.sleep(SESSION_SECONDS + 1)

    async def die(self, stream: Stream) -> None:
        """Its thread stands still, a second after it last committed: it neither polls nor hears of anything."""
        assert isinstance(stream, KafkaStream)
        await stream.flush()
        reader = stream._reader
        reader._step = reader._stopping.wait  # type: ignore[method-assign]


class TestKafkaByTheConsumerProtocol(TestKafka):
    """KIP-848: the server assigns the partitions."""

    group_protocol = "consumer"
