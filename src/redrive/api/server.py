"""uvicorn inside a loop that is ours: it listens where we say and leaves signals alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

GRACE_SECONDS = 5


class Server(uvicorn.Server):
    def __init__(self, app: ASGIApp) -> None:
        config = uvicorn.Config(
            app, http="h11", ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
            proxy_headers=False, timeout_graceful_shutdown=GRACE_SECONDS,
        )  # fmt: skip
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Whoever started the server decides what signals mean."""
        yield

    def stop(self) -> None:
        self.should_exit = True
