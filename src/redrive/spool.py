"""Where letters go while the store is down: files of checksummed records, durable when `append` returns.

Each process fills a file of its own and holds it with flock, so several processes share one folder; whoever can take
the lock of a file inherits it. A record is a marker, two checksums and the letter. The marker is random for each
file, so that no body can pass for a record, and it is how reading finds its way again behind damage.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import re
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, TypeVarTuple
from zlib import crc32

import msgspec

from redrive.errors import SpoolFailed
from redrive.letter import Letter

log = logging.getLogger("redrive.spool")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
ROTATE_BYTES = 64 * 1024 * 1024
BATCH_BYTES = 32 * 1024 * 1024
RECORD_LIMIT = 2**31 - 4096
"""What one pread returns at most."""
FILE_LIMIT = 128
"""Files held at once: each costs a descriptor, and the brokers need theirs."""

_MAGIC = b"redrive\x01"
_HEAD = struct.Struct(">8s8sQI")
"""Magic, marker, how far the file is drained, and the checksum of that."""
_DRAINED_AT = 16
_RECORD = struct.Struct(">8sIII")
"""Marker, length, checksum of the length, checksum of the letter. The first tells a torn record from a damaged one."""
_LENGTH = struct.Struct(">I")
_CHUNK = 1024 * 1024
_NAME = re.compile(r"(\d{12})\.")
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_OLD = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_ASIDE = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW

File = Callable[[Sequence[Letter]], Awaitable[object]]


class Spool:
    """Letters waiting for the store, in a folder that exists and outlives the process.

    Only `make` lets `open` make the folder: on a volume that failed to mount, it would put letters on the wrong disk.
    """

    def __init__(self, folder: Path, *, make: bool = False) -> None:
        self.folder = Path(folder)
        self._make = make
        self.damaged = 0
        """Records this process could not read and kept aside in `.bad` files."""
        self._bags: list[_Bag] = []
        self._filling: _Bag | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="redrive-spool")
        self._draining = asyncio.Lock()
        self._closed = False

    @property
    def pending(self) -> int:
        """Letters waiting in the files this process holds; a living neighbour counts its own."""
        return sum(bag.waiting for bag in tuple(self._bags))

    async def open(self) -> None:
        """Check the folder and inherit what dead processes left. Optional: it makes trouble show at start."""
        await self._call(self._open)

    async def append(self, letters: Sequence[Letter]) -> None:
        """All durable on return, or SpoolFailed and none of them kept.

        Cancelling the caller does not stop it: the letters may then be in the spool, which filing forgives.
        """
        if letters:
            await self._call(self._append, letters)

    async def drain(self, file: File, batch: int = 500) -> int:
        """Hand over what was waiting when this began, in order of arrival, and say how many letters that were.

        A batch is forgotten after `file` returned. What `file` raises comes out here, and nothing is forgotten.
        """
        handed = 0
        async with self._draining:
            for bag, end in await self._call(self._waiting):
                while bag.at < end:
                    taken = await self._call(_take, bag, end, batch)
                    if taken.letters:
                        await file(taken.letters)
                    await self._call(self._forget, bag, taken)
                    handed += len(taken.letters)
        return handed

    async def close(self) -> None:
        """Let go of the files. What still waits is inherited by the next process that looks."""
        if self._closed:
            return
        self._closed = True
        try:
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, self._close))
        finally:
            self._thread.shutdown(wait=False)

    async def _call(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        if self._closed:
            raise SpoolFailed(str(self.folder), "it is closed")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
        except OSError as error:
            raise SpoolFailed(str(self.folder), error) from error

    def _open(self) -> None:
        if self._make and not self.folder.is_dir():
            self.folder.mkdir(0o700, exist_ok=True)
            _sync_folder(self.folder.parent)
        self._adopt()
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "letters cannot be written here", str(self.folder))

    def _append(self, letters: Sequence[Letter]) -> None:
        payloads = [_encoded(letter) for letter in letters]
        self._bag_for(sum(map(len, payloads))).append(payloads)

    def _bag_for(self, size: int) -> _Bag:
        bag = self._filling
        if bag is not None and not bag.takes(size):
            self._filling = None
            if bag.empty:
                self._drop(bag)
        if self._filling is None:
            self._filling = self._new_bag()
            self._bags.append(self._filling)
        return self._filling

    def _new_bag(self) -> _Bag:
        number = 1 + max((int(m[1]) for name in os.listdir(self.folder) if (m := _NAME.match(name))), default=0)
        while (bag := _Bag.make(self.folder / f"{number:012d}.spool")) is None:
            number += 1
        return bag

    def _waiting(self) -> list[tuple[_Bag, int]]:
        self._adopt()
        return [(bag, bag.size) for bag in self._bags if bag.at < bag.size]

    def _adopt(self) -> None:
        """Hold every file whose owner is gone. A file that cannot be read stays where it is and stops nobody."""
        held = {bag.path.name for bag in self._bags if bag.linked}
        found = sorted(name for name in os.listdir(self.folder) if name.endswith(".spool") and name not in held)
        for name in found:
            if len(self._bags) >= FILE_LIMIT:
                break
            try:
                self._inherit(self.folder / name)
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("spool file %s cannot be read and stays as it is: %s", self.folder / name, error)
        self._bags = sorted(self._bags, key=lambda bag: bag.path.name)

    def _inherit(self, path: Path) -> None:
        bag = _Bag.inherit(path)
        if bag is None:
            return
        if not bag.ours:
            with closing(bag):
                path.rename(f"{path}.bad")
            self.damaged += 1
            log.warning("spool file %s was not written by this version and is kept as %s.bad", path, path.name)
        elif bag.empty:
            bag.remove()
        else:
            self._bags.append(bag)

    def _forget(self, bag: _Bag, taken: _Taken) -> None:
        try:
            self._set_aside(bag, taken.aside)
        except OSError as error:
            # The file then stays, drained only as far as its header says, so the next process tries again.
            log.warning("damaged letters stay in %s: they cannot be set aside: %s", bag.path, error)
            bag.stuck = True
        bag.forget(taken.end, len(taken.letters))
        if bag.empty:
            self._drop(bag)

    def _drop(self, bag: _Bag) -> None:
        self._bags.remove(bag)
        if bag is self._filling:
            self._filling = None
        bag.remove()

    def _set_aside(self, bag: _Bag, pieces: Sequence[tuple[int, int]]) -> None:
        if not pieces:
            return
        aside = bag.path.with_suffix(".bad")
        bag.copy(pieces, aside)
        self.damaged += len(pieces)
        log.warning("%d record(s) of %s cannot be read and are kept in %s", len(pieces), bag.path, aside)

    def _close(self) -> None:
        for bag in self._bags:
            with suppress(OSError):
                bag.remove() if bag.empty else bag.close()
        self._bags, self._filling = [], None


class _Record(NamedTuple):
    """A stretch of a file: one sound record, or, without a payload, bytes that are none."""

    start: int
    end: int
    payload: bytes | None


class _Taken(NamedTuple):
    """The next letters of a file, the stretches between them that hold none, and where they end."""

    letters: list[Letter]
    aside: list[tuple[int, int]]
    end: int


class _Bag:
    """One file, locked by the process that fills or empties it."""

    def __init__(self, path: Path, fd: int, head: bytes, size: int) -> None:
        self.marker: bytes
        magic, self.marker, drained, crc = _HEAD.unpack(head)
        self.path, self.fd, self.size, self.waiting = path, fd, size, 0
        self.ours = magic == _MAGIC
        self.at: int = drained if crc == crc32(_HEAD.pack(magic, self.marker, drained, 0)) else _HEAD.size
        self.sealed = self.stuck = False

    @classmethod
    def make(cls, path: Path) -> _Bag | None:
        """A new file under lock, its name durable. None when the name is taken."""
        try:
            fd = os.open(path, _NEW, 0o600)
        except FileExistsError:
            return None
        head = _head(os.urandom(8), _HEAD.size)
        try:
            # Between making and locking it, a neighbour may have inherited the empty file.
            if not _lock(fd):
                os.close(fd)
                return None
            _write(fd, head, 0)
            _sync_folder(path.parent)
        except BaseException:
            with suppress(OSError):
                cls(path, fd, head, len(head)).remove()
            raise
        return cls(path, fd, head, len(head))

    @classmethod
    def inherit(cls, path: Path) -> _Bag | None:
        """A dead process's file, as far as it is whole. None while it belongs to somebody."""
        fd = os.open(path, _OLD)
        try:
            if not _lock(fd):
                os.close(fd)
                return None
            size = os.fstat(fd).st_size
            if size < _HEAD.size:
                # Nothing was acknowledged: the first fsync covers the head.
                return cls(path, fd, _head(b"", size), size)
            bag = cls(path, fd, os.pread(fd, _HEAD.size, 0), size)
            bag.recover()
        except BaseException:
            os.close(fd)
            raise
        return bag

    @property
    def linked(self) -> bool:
        return os.fstat(self.fd).st_nlink > 0

    @property
    def empty(self) -> bool:
        return self.at >= self.size and not self.stuck

    def takes(self, size: int) -> bool:
        """Whether these bytes belong in this file: it is sound, still in its folder, and not too large already."""
        return not self.sealed and not self.stuck and self.linked and self._has_room(size)

    def append(self, payloads: Sequence[bytes]) -> None:
        data = b"".join(part for payload in payloads for part in (self._prefix(payload), payload))
        try:
            _write(self.fd, data, self.size)
            self._sync()
        except OSError:
            self._rewind()
            raise
        self.size += len(data)
        self.waiting += len(payloads)

    def recover(self) -> None:
        """Count the letters, and leave out a last record that a crash tore."""
        for record in self.records(self.size):
            if record.payload is not None:
                self.waiting += 1
            elif record.end == self.size and self._torn(record.start):
                self.size = record.start

    def records(self, end: int) -> Iterator[_Record]:
        at = self.at
        while at < end:
            payload = self._payload(at)
            after = self._next_sound(at + 1) if payload is None else at + _RECORD.size + len(payload)
            yield _Record(at, after, payload)
            at = after

    def forget(self, end: int, letters: int) -> None:
        """Nothing before `end` is handed over again, by this process or, after a crash, by another."""
        self.at, self.waiting = end, max(0, self.waiting - letters)
        if self.stuck:
            return
        try:
            _write(self.fd, _head(self.marker, end)[_DRAINED_AT:], _DRAINED_AT)
            os.fsync(self.fd)
        except OSError as error:
            log.warning("%s: a crash now would file letters again, progress cannot be written: %s", self.path, error)

    def copy(self, pieces: Sequence[tuple[int, int]], to: Path) -> None:
        """Append these stretches to another file, durably."""
        fd = os.open(to, _ASIDE, 0o600)
        try:
            for start, end in pieces:
                for at in range(start, end, _CHUNK):
                    _write(fd, os.pread(self.fd, min(_CHUNK, end - at), at), None)
            os.fsync(fd)
        finally:
            os.close(fd)
        _sync_folder(to.parent)

    def remove(self) -> None:
        """Unlink and let go. A file somebody else unlinked is left alone: its name may be a neighbour's by now."""
        with closing(self):
            if self.linked:
                self.path.unlink()

    def close(self) -> None:
        os.close(self.fd)

    def _has_room(self, size: int) -> bool:
        return self.size == _HEAD.size or self.size + size <= ROTATE_BYTES

    def _sync(self) -> None:
        try:
            os.fsync(self.fd)
        except OSError:
            # The kernel may now call pages clean that it never wrote; nothing more may rest on this file.
            self.sealed = True
            raise

    def _rewind(self) -> None:
        try:
            os.ftruncate(self.fd, self.size)
            os.fsync(self.fd)
        except OSError:
            self.sealed = True

    def _prefix(self, payload: bytes) -> bytes:
        length = _LENGTH.pack(len(payload))
        return _RECORD.pack(self.marker, len(payload), crc32(length), crc32(payload))

    def _payload(self, at: int) -> bytes | None:
        """The record that starts here, if one does and it is whole."""
        length = self._length(at)
        if length is None or at + _RECORD.size + length > self.size:
            return None
        found = os.pread(self.fd, _RECORD.size + length, at)
        payload = found[_RECORD.size :]
        return payload if found[: _RECORD.size] == self._prefix(payload) else None

    def _length(self, at: int) -> int | None:
        head = os.pread(self.fd, _RECORD.size, at)
        if len(head) < _RECORD.size:
            return None
        marker, length, crc, _ = _RECORD.unpack(head)
        return int(length) if marker == self.marker and crc == crc32(_LENGTH.pack(length)) else None

    def _next_sound(self, at: int) -> int:
        while (at := self._next_marker(at)) < self.size and self._payload(at) is None:
            at += 1
        return at

    def _next_marker(self, at: int) -> int:
        while at < self.size and (chunk := os.pread(self.fd, _CHUNK, at)):
            found = chunk.find(self.marker)
            if found >= 0:
                return min(at + found, self.size)
            at += max(1, len(chunk) - len(self.marker) + 1)
        return self.size

    def _torn(self, at: int) -> bool:
        """Whether the file simply ends inside this record; anything else is damage, and its bytes are kept."""
        head = os.pread(self.fd, _RECORD.size, at)
        if len(head) < _RECORD.size:
            return head.startswith(self.marker[: len(head)])
        length = self._length(at)
        return length is not None and at + _RECORD.size + length > self.size


def _take(bag: _Bag, end: int, batch: int) -> _Taken:
    letters: list[Letter] = []
    aside: list[tuple[int, int]] = []
    start = at = bag.at
    for record in bag.records(end):
        letter = None if record.payload is None else _decoded(record.payload)
        if letter is None:
            aside.append((record.start, record.end))
        else:
            letters.append(letter)
        at = record.end
        if len(letters) >= batch or at - start >= BATCH_BYTES:
            break
    return _Taken(letters, aside, at)


def _head(marker: bytes, drained: int) -> bytes:
    return _HEAD.pack(_MAGIC, marker, drained, crc32(_HEAD.pack(_MAGIC, marker, drained, 0)))


def _lock(fd: int) -> bool:
    """False when somebody holds the file, or removed it before we came to hold it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(fd).st_nlink > 0


def _write(fd: int, data: bytes, at: int | None) -> None:
    """Write all of it, at this place or at the end: a short write is how a full disk begins."""
    view = memoryview(data)
    while view:
        written = os.write(fd, view) if at is None else os.pwrite(fd, view, at)
        view, at = view[written:], None if at is None else at + written


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_letter = msgspec.msgpack.Decoder(Letter)
_TEXT, _PAIRS, _NUMBER = 1, 2, 3
"""Extensions for what msgpack cannot hold: text with lone surrogates, maps keyed by it, numbers beyond 64 bits."""


def _encoded(letter: Letter) -> bytes:
    try:
        payload = msgspec.msgpack.encode(letter)
    except (UnicodeEncodeError, OverflowError):
        payload = msgspec.msgpack.encode(_extended(msgspec.to_builtins(letter, builtin_types=(bytes,))))
    if len(payload) > RECORD_LIMIT:
        raise OSError(errno.EFBIG, f"letter {letter.id} has {len(payload)} bytes")
    return payload


def _decoded(payload: bytes) -> Letter | None:
    """The letter, or None where another version wrote something this one does not know."""
    with suppress(msgspec.MsgspecError, ValueError):
        return _letter.decode(payload)
    with suppress(msgspec.MsgspecError, ValueError, TypeError):
        return msgspec.convert(msgspec.msgpack.decode(payload, ext_hook=_plain), Letter)
    return None


def _extended(value: Any) -> Any:
    match value:
        case str() if not _encodable(value):
            return msgspec.msgpack.Ext(_TEXT, value.encode("utf-8", "surrogatepass"))
        case dict():
            pairs = [(_extended(key), _extended(item)) for key, item in value.items()]
            return msgspec.msgpack.Ext(_PAIRS, msgspec.msgpack.encode(pairs))
        case list() | tuple():
            return [_extended(item) for item in value]
        case int() if not -(2**63) <= value < 2**64:
            return msgspec.msgpack.Ext(_NUMBER, str(value).encode())
        case _:
            return value


def _plain(code: int, data: memoryview) -> Any:
    match code:
        case 1:
            return str(data, "utf-8", "surrogatepass")
        case 2:
            return dict(msgspec.msgpack.decode(data, ext_hook=_plain))
        case 3:
            return int(bytes(data))
        case _:
            raise ValueError(f"no extension has the code {code}")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
