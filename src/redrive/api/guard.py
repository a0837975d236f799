"""Stands before every route: refuses what a page on another site could make a browser send, and hardens each answer."""

from __future__ import annotations

import asyncio
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redrive.api import is_loopback
from redrive.api.problems import problem

MAX_BODY = 1 << 20
READ_SECONDS = 15.0
_SAFE = ("GET", "HEAD", "OPTIONS")
_HOST = re.compile(r"(\[(?P<bracketed>[^\[\]]+)\]|(?P<plain>[^:\[\]]+))(:\d{1,5})?")
_HARDENED = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


class Guard:
    """The API behind its checks."""

    def __init__(self, app: ASGIApp, *, read_seconds: float = READ_SECONDS) -> None:
        self._app, self._read_seconds = app, read_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        hardened = _Answer(send)
        headers = Headers(scope=scope)
        refusal = _wrong_host(headers)
        if refusal is None and scope["method"] not in _SAFE:
            refusal = _forged(headers) or _wrong_type(headers)
            body = await _read(receive) if refusal is None else b""
            if body is None:
                refusal = problem(413, f"a body may have {MAX_BODY} bytes")
            else:
                receive = _replayed(body, receive)
        if refusal is not None:
            await refusal(scope, receive, hardened)
        elif scope["method"] in _SAFE:
            await self._look(scope, receive, hardened)
        else:
            # A change runs to its end: half-known is worse than late.
            await self._app(scope, receive, hardened)

    async def _look(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        """Nobody waits long for an answer to begin; a slow reader may take its time."""
        try:
            async with asyncio.timeout(self._read_seconds) as answer.limit:
                await self._app(scope, receive, answer)
        except TimeoutError:
            if answer.limit is None or not answer.limit.expired():
                raise
            await problem(503, f"no answer within {self._read_seconds:g} s")(scope, receive, answer)


class _Answer:
    """Sends on, with headers that every answer has unless its route knows better."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.limit: asyncio.Timeout | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self.limit is not None and not self.limit.expired():
                self.limit.reschedule(None)
            headers = MutableHeaders(scope=message)
            for name, value in _HARDENED.items():
                headers.setdefault(name, value)
        await self._send(message)


def _wrong_host(headers: Headers) -> Response | None:
    """A name that leads here by DNS rebinding is not one of ours."""
    hosts = headers.getlist("host")
    if len(hosts) == 1 and is_loopback(_name(hosts[0])):
        return None
    return problem(421, "ask for localhost, 127.0.0.1 or [::1]; redrive answers to no other name yet")


def _name(host: str) -> str:
    """The host without its port and without the brackets of IPv6; nothing when it is not written like one."""
    found = _HOST.fullmatch(host)
    return (found["bracketed"] or found["plain"] or "") if found else ""


def _forged(headers: Headers) -> Response | None:
    """Browsers say where a request comes from; what is not from this very origin may be forged."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    foreign = origin is not None and origin.partition("://")[2] != headers["host"]
    if site in ("cross-site", "same-site") or foreign:
        return problem(403, "changes are refused from pages of another site")
    return None


def _wrong_type(headers: Headers) -> Response | None:
    """A form can be sent across sites without asking, JSON cannot."""
    given = headers.get("content-type")
    bare = given is None and headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
    if bare or (given or "").partition(";")[0].strip().lower() == "application/json":
        return None
    return problem(415, "send application/json, or nothing at all")


async def _read(receive: Receive) -> bytes | None:
    """The whole body, or None when it is too large."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MAX_BODY:
            return None
        if not message.get("more_body"):
            return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A channel that hands over the body that was read, then goes on with the real one."""
    waiting = [body]

    async def replay() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replay
