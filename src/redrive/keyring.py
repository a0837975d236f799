"""Signs what redrive writes into headers, and tells its own headers from a stranger's."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from redrive.errors import ConfigError
from redrive.message import digest

MIN_KEY_BYTES = 16


class Keyring:
    """The first key signs; every key verifies, so keys rotate by adding the new one in front."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not keys:
            raise ConfigError("no signing key", key="signing_keys", fix="run: redrive keygen")
        for key in keys:
            if len(key) < MIN_KEY_BYTES:
                raise ConfigError(
                    f"a signing key of {len(key)} bytes is too short",
                    key="signing_keys",
                    fix="run: redrive keygen",
                )
        self._keys = {hashlib.sha256(b"redrive key id" + key).hexdigest()[:8]: key for key in keys}
        self._current = next(iter(self._keys))

    def sign(self, parts: Sequence[bytes | None]) -> bytes:
        return self._seal(self._current, parts).encode()

    def verify(self, parts: Sequence[bytes | None], signature: bytes | None) -> bool:
        """False for anything that one of our keys did not sign, whatever the bytes are."""
        if signature is None or len(signature) > 200:
            return False
        key_id = signature.partition(b":")[0].decode("ascii", "replace")
        return key_id in self._keys and hmac.compare_digest(self._seal(key_id, parts).encode(), signature)

    def _seal(self, key_id: str, parts: Sequence[bytes | None]) -> str:
        return key_id + ":" + hmac.new(self._keys[key_id], digest(parts), hashlib.sha256).hexdigest()


def generate() -> str:
    return secrets.token_hex(32)


def from_file(path: Path) -> bytes:
    """The key kept beside an embedded broker; made on first use, by one of several processes that race for it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        if not path.exists():
            draft.touch(mode=0o600)
            with draft.open("w") as file:
                file.write(generate())
                file.flush()
                os.fsync(file.fileno())
            try:
                path.hardlink_to(draft)
            except FileExistsError:
                pass
            finally:
                draft.unlink()
        return bytes.fromhex(path.read_text())
    except OSError as error:
        raise ConfigError(str(error), key="signing_keys", fix=f"make {path} readable and writable") from error
    except ValueError as error:
        fix = "put what redrive keygen prints there"
        raise ConfigError(f"{path} holds no key", key="signing_keys", fix=fix) from error
