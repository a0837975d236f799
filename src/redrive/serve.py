"""The office as one process: collector, replayer and API together, until told to stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from redrive import api
from redrive.app import Redrive
from redrive.errors import ConfigError


async def serve(
    app: Redrive, stopping: asyncio.Event, *, host: str, port: int, announce: Callable[[str], None]
) -> None:
    """Serve until `stopping`, and say at which address. The first part that fails stops the others."""
    server = api.make_server(app.desk(), app.metrics.registry)
    with listen(host, port) as listener:
        async with app.opened():
            parts = (app.collector(), app.replayer(), server)
            tasks = [asyncio.create_task(run) for run in (parts[0].run(), parts[1].run(), server.serve([listener]))]
            draining = asyncio.create_task(app.office.drain_spool())
            waiting = asyncio.create_task(stopping.wait())
            announce(address(listener))
            try:
                await asyncio.wait([*tasks, draining, waiting], return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
                draining.cancel()
                for part in parts:
                    part.stop()
                results = await asyncio.gather(*tasks, draining, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result


def listen(host: str, port: int) -> socket.socket:
    """A socket that hears this machine and no other: whoever reaches the API may do everything."""
    if not api.is_loopback(host):
        raise ConfigError(
            f"{host!r} can be reached from other machines, and the API has no authentication yet",
            key="serve.host",
            fix="use 127.0.0.1, and reach it from afar through ssh -L",
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server(("127.0.0.1" if host.lower() == "localhost" else host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}", key="serve.port", fix="give another port, or 0 for any"
        ) from error


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
