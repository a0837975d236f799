"""The demo's way into the office: its HTTP API on the loopback address, as anybody's script would use it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Sequence
from typing import Any

from redrive.errors import RedriveError

HOST = "127.0.0.1"
PREFIX = "/api/v1"
TIMEOUT = 5.0


class OfficeRefused(RedriveError):
    """The API did not do what the story asks of it."""

    def __init__(self, status: int, answer: str) -> None:
        self.status, self.answer = status, answer
        super().__init__(f"the API answered {status}: {answer}")


class Front:
    """Asks the API. Every call is one short connection."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://{HOST}:{port}{PREFIX}"

    async def is_open(self) -> bool:
        try:
            status, _ = await asyncio.to_thread(self._call, "GET", "/ready")
        except (OSError, http.client.HTTPException):
            return False
        return status == http.HTTPStatus.OK

    async def replay(self, ids: Sequence[str], why: str) -> None:
        """Have these letters sent back, in one job."""
        wanted = {"ids": list(ids), "who": "redrive demo", "why": why}
        status, answer = await asyncio.to_thread(self._call, "POST", "/replays", wanted)
        if status != http.HTTPStatus.ACCEPTED:
            raise OfficeRefused(status, answer.decode("utf-8", "replace"))

    def _call(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=TIMEOUT)
        try:
            headers = {"content-type": "application/json", "accept": "application/json"}
            connection.request(method, PREFIX + path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port
