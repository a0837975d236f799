"""The office over HTTP: letters, replays, statistics and the audit trail as JSON, on the desk and nothing below it."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from redrive.desk import Desk
from redrive.errors import MissingExtra

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from redrive.api.server import Server

_EXTRA = ("fastapi", "starlette", "uvicorn")


def create(desk: Desk, registry: CollectorRegistry) -> ASGIApp:
    """The API as an ASGI application. It has no authentication, so only this machine may reach it."""
    with _extra():
        from redrive.api.routes import build
    return build(desk, registry)


def make_server(desk: Desk, registry: CollectorRegistry) -> Server:
    """The API with the server that runs it; `serve` it on a socket, `stop` it when done."""
    with _extra():
        from redrive.api.server import Server
    return Server(create(desk, registry))


@contextmanager
def _extra() -> Iterator[None]:
    """Name the extra to whoever lacks it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        raise MissingExtra("redrive serve", "serve") from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can mean itself by this name. Other names can be made to lead here by DNS."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
