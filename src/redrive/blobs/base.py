"""The blob socket: bodies too large for a letter. Names are letter identity and sha256, never shared by two letters."""

from __future__ import annotations

import hashlib
import re
from typing import Protocol

from redrive.clock import Millis
from redrive.letter import Claim

_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{64}")


def claim_for(letter_id: str, body: bytes) -> Claim:
    sha = hashlib.sha256(body).hexdigest()
    return Claim(f"{letter_id}-{sha}", len(body), sha)


def valid_name(name: str) -> bool:
    """Whether this is a name we would have made: no path, no link, no surprise."""
    return _NAME.fullmatch(name) is not None


class Blobs(Protocol):
    async def put(self, name: str, body: bytes) -> None:
        """Durable on return. Putting the same name again changes nothing. Raises BlobsUnavailable."""
        ...

    async def get(self, name: str) -> bytes | None:
        """The body, or None when there is none of that name or the name is not one of ours."""
        ...

    async def delete(self, name: str) -> bool: ...

    async def names(self, older_than: Millis) -> list[str]:
        """What was put before this time, for collecting orphans."""
        ...

    async def close(self) -> None: ...
