from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from broker_suite import BrokerSuite
from clocks import ManualClock

from redrive.brokers.base import Broker, Stream
from redrive.brokers.embedded import EmbeddedBroker, EmbeddedStream
from redrive.clock import Millis
from redrive.sqlite import MEMORY


class Embedded(BrokerSuite):
    def now(self, broker: Broker) -> Millis:
        assert isinstance(broker, EmbeddedBroker)
        return broker.clock.now()

    async def pass_time(self, broker: Broker, seconds: float) -> None:
        assert isinstance(broker, EmbeddedBroker)
        assert isinstance(broker.clock, ManualClock)
        broker.clock.advance(seconds)

    async def outlive_lease(self, broker: Broker) -> None:
        assert isinstance(broker, EmbeddedBroker)
        await self.pass_time(broker, broker.lease_seconds + 1)

    async def die(self, stream: Stream) -> None:
        assert isinstance(stream, EmbeddedStream)
        assert stream._heart is not None
        stream._heart.cancel()


class TestEmbeddedInAFile(Embedded):
    @pytest.fixture
    async def broker(self, tmp_path: Path) -> AsyncIterator[EmbeddedBroker]:
        broker = EmbeddedBroker(str(tmp_path / "broker.db"), clock=ManualClock(), max_message_bytes=12 << 20)
        await broker.open()
        yield broker
        await broker.close()


class TestEmbeddedInMemory(Embedded):
    @pytest.fixture
    async def broker(self) -> AsyncIterator[EmbeddedBroker]:
        broker = EmbeddedBroker(MEMORY, clock=ManualClock(), max_message_bytes=12 << 20)
        await broker.open()
        yield broker
        await broker.close()
