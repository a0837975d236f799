"""The commands that run until they are told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from argparse import Namespace
from contextlib import suppress
from types import FrameType
from typing import Any

from redrive import __version__, cli
from redrive.app import Redrive
from redrive.cli.settings import app_of, load_app, where
from redrive.cli.text import lines, plural, safe
from redrive.errors import ConfigError
from redrive.runtime import SlotsLost

LEAVE_SECONDS = 5.0
ASK_SECONDS = 0.1


def work(args: Namespace) -> int:
    app = load_app(args.app, args)
    log_to_stderr()
    say(f"redrive {__version__} works on {plural(len(app.consumers), 'consumer')} of {args.app}:")
    for consumer in app.consumers:
        say(f"  {safe(consumer.name)}: {safe(', '.join(consumer.sources))} as {safe(consumer.group)}")
    try:
        asyncio.run(_work(app))
    except ConfigError as error:
        raise error.at(args.app) from None
    say("stopped")
    return cli.DONE


def serve(args: Namespace) -> int:
    from redrive import serve as office

    app = load_app(args.app, args) if args.app else app_of(args)
    log_to_stderr()
    chosen = app.config.serve
    host = chosen.host if args.host is None else args.host
    port = chosen.port if args.port is None else args.port

    async def run() -> None:
        await office.serve(app, stop_on_signals(), host=host, port=port, announce=_announce)

    try:
        asyncio.run(run())
    except ConfigError as error:
        flag = "--host" if error.key == "serve.host" else "--port"
        given = (args.host if flag == "--host" else args.port) is not None
        raise error.at(flag if given else where(args)) from None
    say("stopped")
    return cli.DONE


async def _work(app: Redrive) -> None:
    stopping = stop_on_signals()
    working = asyncio.create_task(app.work())
    waiting = asyncio.create_task(stopping.wait())
    await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    while not working.done():  # asked again, because a signal may come before there are workers to stop
        app.stop()
        await asyncio.wait([working], timeout=ASK_SECONDS)
    try:
        await working
    except SlotsLost as error:
        cli.complain(error)
        leave(cli.REPLACE)
    except Exception as error:
        _leave_after(LEAVE_SECONDS, cli.code_of(error))
        raise
    _leave_after(LEAVE_SECONDS, cli.DONE)


def stop_on_signals() -> asyncio.Event:
    """An event that the first SIGINT or SIGTERM sets; the second ends the process at once."""
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    asked: list[int] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        if asked:  # not through the loop, which a handler may be blocking
            os._exit(cli.INTERRUPTED)
        asked.append(number)
        with suppress(RuntimeError):  # the loop has just ended by itself
            loop.call_soon_threadsafe(stop)

    def stop() -> None:
        say("stopping; once more to exit at once")
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return stopping


def leave(code: int) -> None:
    """End the process now, whatever still runs in it, with everything that was said written out."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave_after(seconds: float, code: int) -> None:
    """A thread that hangs must not keep the process: asyncio and Python would both wait for it for ever."""
    timer = threading.Timer(seconds, leave, (code,))
    timer.daemon = True
    timer.start()


def log_to_stderr() -> None:
    """Unless the app has its own idea of logging."""
    handler = logging.StreamHandler()
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


class SafeFormatter(logging.Formatter):
    """Messages quote errors, and errors quote whatever a message said: neither may steer a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        return safe(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name is logging's
        return lines(super().formatException(ei))


def _announce(address: str) -> None:
    say(f"redrive {__version__} serves {address}/api/v1")
    say("Ctrl-C stops it")


def say(sentence: str) -> None:
    print(sentence, flush=True)
