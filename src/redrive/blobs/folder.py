"""Bodies in a folder: written under a passing name, made durable, renamed; checked against their name when read."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from redrive.blobs.base import valid_name
from redrive.clock import Millis
from redrive.errors import BlobsUnavailable

T = TypeVar("T")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_SHARD = _FOLDER | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_SHARD_NAME = re.compile(r"[0-9a-f]{2}")
_PASSING = ".tmp"


class FolderBlobs:
    """Blobs in a folder that exists already: a volume that failed to mount must not look like an empty one.

    Only `make` has the folder made at first use. Below the root nothing is reached through a link, and nothing is
    named by anybody but us.
    """

    def __init__(self, root: Path, *, make: bool = False) -> None:
        self.root = Path(root)
        self._make = make
        self._synced: set[str] = set()

    async def put(self, name: str, body: bytes) -> None:
        """Durable on return. Putting the same name again makes it young again. Raises ValueError for a false name."""
        if not valid_name(name) or not await asyncio.to_thread(_matches, name, body):
            raise ValueError(f"{name!r} is not the name of this body")
        await self._off_loop(lambda: self._put(name, body))

    async def get(self, name: str) -> bytes | None:
        """The body, or None when there is none. Raises BlobsUnavailable when it is not what it was."""
        return await self._off_loop(lambda: self._get(name)) if valid_name(name) else None

    async def delete(self, name: str) -> bool:
        return valid_name(name) and await self._off_loop(lambda: self._delete(name))

    async def names(self, older_than: Millis) -> list[str]:
        """What was put before this time. Clears away what writers that died by then left half-written."""
        return await self._off_loop(lambda: self._names(older_than))

    async def close(self) -> None:
        """Nothing is held open between calls."""

    async def _off_loop(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            raise BlobsUnavailable(str(self.root), error) from error

    def _put(self, name: str, body: bytes) -> None:
        with self._root() as root:
            self._make_shard(root, name[:2])
            with _opened(name[:2], _SHARD, root) as shard:
                if not _refreshed(shard, name, body):
                    _write(shard, name, body)
                os.fsync(shard)

    def _get(self, name: str) -> bytes | None:
        with self._root() as root:
            try:
                with _opened(name[:2], _SHARD, root) as shard:
                    body = _read(shard, name)
            except FileNotFoundError:
                return None
        if not _matches(name, body):
            raise BlobsUnavailable(str(self.root), f"{name} does not match its sha256")
        return body

    def _delete(self, name: str) -> bool:
        with self._root() as root:
            try:
                with _opened(name[:2], _SHARD, root) as shard:
                    os.unlink(name, dir_fd=shard)
            except FileNotFoundError:
                return False
        return True

    def _names(self, older_than: Millis) -> list[str]:
        found: list[str] = []
        with self._root() as root:
            for shard in sorted(filter(_SHARD_NAME.fullmatch, os.listdir(root))):
                # A link or a file of that name is not ours.
                with suppress(NotADirectoryError, FileNotFoundError):
                    found += self._in_shard(root, shard, older_than)
        return found

    def _in_shard(self, root: int, name: str, older_than: Millis) -> list[str]:
        with _opened(name, _SHARD, root) as shard:
            entries = sorted(entry for entry in os.listdir(shard) if _older(shard, entry, older_than))
            for entry in entries:
                if entry.endswith(_PASSING):
                    _clear_away(shard, entry)
        return [entry for entry in entries if valid_name(entry)]

    def _root(self) -> AbstractContextManager[int]:
        if self._make and not self.root.is_dir():
            self.root.mkdir(0o700, exist_ok=True)
            with _opened(str(self.root.parent), _FOLDER) as parent:
                os.fsync(parent)
        return _opened(str(self.root), _FOLDER)

    def _make_shard(self, root: int, name: str) -> None:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=root)
        # Another process may have made it and not yet synced it, so the first use here always does.
        if name not in self._synced:
            os.fsync(root)
            self._synced.add(name)


@contextmanager
def _opened(name: str, flags: int, folder: int | None = None) -> Iterator[int]:
    fd = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)


def _matches(name: str, body: bytes) -> bool:
    return name.endswith(hashlib.sha256(body).hexdigest())


def _read(shard: int, name: str) -> bytes:
    with _opened(name, _READ, shard) as fd, open(fd, "rb", closefd=False) as reader:
        return reader.read()


def _refreshed(shard: int, name: str, body: bytes) -> bool:
    """Whether it is there already and sound. It then counts as put now, so that no sweep of orphans takes it."""
    try:
        with _opened(name, _READ, shard) as fd, open(fd, "rb", closefd=False) as reader:
            if reader.read() != body:
                return False
            os.utime(fd)
            # An unlink between opening and here would have taken the last name of what we read.
            return os.fstat(fd).st_nlink > 0
    except FileNotFoundError:
        return False


def _write(shard: int, name: str, body: bytes) -> None:
    passing = f".{name}.{secrets.token_hex(8)}{_PASSING}"
    with _opened(passing, _NEW, shard) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            with open(fd, "wb", closefd=False) as writer:
                writer.write(body)
            os.fsync(fd)
            os.rename(passing, name, src_dir_fd=shard, dst_dir_fd=shard)
        except BaseException:
            with suppress(OSError):
                os.unlink(passing, dir_fd=shard)
            raise


def _older(shard: int, entry: str, than: Millis) -> bool:
    try:
        return os.stat(entry, dir_fd=shard, follow_symlinks=False).st_mtime_ns < than * 1_000_000
    except FileNotFoundError:
        return False


def _clear_away(shard: int, entry: str) -> None:
    """Remove a half-written body, unless its writer still holds it."""
    with suppress(FileNotFoundError, BlockingIOError), _opened(entry, _READ, shard) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(entry, dir_fd=shard)
