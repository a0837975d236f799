"""A consumer to be frozen from outside: takes one message, and settles it when a line comes on its input."""

from __future__ import annotations

import asyncio
import sys

from redrive.brokers.base import Ack, Batch, Subscription
from redrive.brokers.kafka import KafkaBroker

ADDRESS, TOPIC, GROUP = sys.argv[1:4]


async def main() -> None:
    broker = KafkaBroker(ADDRESS, session_seconds=2.0, poll_seconds=2.0)
    await broker.open()
    stream = await broker.subscribe(Subscription((TOPIC,), GROUP))
    async for event in stream:
        if isinstance(event, Batch):
            print("taken", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            print(*await broker.settle([Ack(delivery) for delivery in event.deliveries]), flush=True)
            break
    await broker.close()


asyncio.run(main())
