"""A service with one message that kills its process. Run as a program: it works until everything is settled."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from harness import make_app

from redrive import Message

FOLDER, HOW, CONCURRENCY = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
app = make_app(FOLDER, embedded={"lease_seconds": 1.0, "partitions": 1}, defaults={"batch": 500})


def limited() -> bool:
    """Put this process under a real memory limit, so that the kernel kills it; False where we may not."""
    for root, file in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / "redrive-crash-test"
        try:
            group.mkdir(exist_ok=True)
            (group / file).write_text(str(400 << 20))
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            continue
        return True
    return False


LIMITED = HOW == "memory" and limited()


def die() -> None:
    if HOW == "exit":
        os._exit(1)
    if HOW == "segfault":
        ctypes.string_at(0)
    if HOW == "memory" and LIMITED:
        hoard = []
        while True:
            hoard.append(b"x" * (64 << 20))
    if HOW == "memory":
        os.kill(os.getpid(), signal.SIGKILL)  # what the kernel would do, where no group of ours may be made
    time.sleep(3600)


def note(what: str, body: bytes | None) -> None:
    line = f"{what} {os.getpid()} {(body or b'').decode()}\n".encode()
    ledger = os.open(FOLDER / "ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(ledger, line)
    os.close(ledger)


async def handle(message: Message) -> None:
    note("start", message.body)
    if message.body == b"culprit":
        die()
    await asyncio.sleep(0.002)
    note("done", message.body)


def handle_in_thread(message: Message) -> None:
    note("start", message.body)
    if message.body == b"culprit":
        die()
    note("done", message.body)


async def main() -> None:
    handler = handle_in_thread if HOW == "hang" else handle
    settings = {"timeout": 0.3} if HOW == "hang" else {}
    app.consumer("jobs", group="g", concurrency=CONCURRENCY, attempts=3, name="jobs", **settings)(handler)
    async with app:
        working = asyncio.create_task(app.work())
        collector = app.collector()
        collecting = asyncio.create_task(collector.run())
        while not working.done():
            await asyncio.sleep(0.05)
            if (await app.parts.broker.depth("jobs", "g")).count == 0:
                app.stop()
        while (await app.parts.broker.depth("jobs.dlq", "redrive-collector")).count:
            await asyncio.sleep(0.05)
        collector.stop()
        await collecting
        try:
            await working
        except Exception as error:
            print(error, flush=True)
            os._exit(4)


asyncio.run(main())
