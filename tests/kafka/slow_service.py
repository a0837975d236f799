"""A service whose message 5 hangs while all others succeed. Run as a program, until it is killed."""

from __future__ import annotations

import asyncio
import sys

from redrive import Message, Redrive

ADDRESS, TOPIC, GROUP = sys.argv[1:4]
app = Redrive(f"kafka://{ADDRESS}", signing_keys=("00" * 32,), kafka={"session_seconds": 2.0})


@app.consumer(TOPIC, group=GROUP, concurrency=32)
async def handle(message: Message) -> None:
    if message.body == b"5":
        await asyncio.sleep(600)
        raise ValueError
    print(message.body, flush=True)


asyncio.run(app.work())
