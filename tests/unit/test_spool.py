"""The spool keeps letters while the store is down: whatever was acknowledged is there, in order, bit for bit."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from redrive import spool as spool_module
from redrive.errors import SpoolFailed, StoreUnavailable
from redrive.letter import Attempt, Claim, Environment, Kind, Letter, Reason
from redrive.message import Message
from redrive.spool import Spool

MESSAGE = Message("kafka", "orders", 3, "17", 1_800_000_000_000, b"\x00key", b"\xffbody", (("h", None), ("h", b"\x80")))
LETTER = Letter(
    id="1a" * 16, message=MESSAGE, group="billing", kind=Kind.PERMANENT, reason=Reason.PERMANENT,
    error_type="builtins.ValueError", error_message="no such order", first_attempt_at=1, last_attempt_at=2, attempts=3,
)  # fmt: skip


def letters(start: int, stop: int) -> list[Letter]:
    return [replace(LETTER, id=f"{n:032x}") for n in range(start, stop)]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Store:
    """Takes letters, and fails from the given call on."""

    def __init__(self, fails_at: int = 1_000_000) -> None:
        self.batches: list[list[Letter]] = []
        self.fails_at = fails_at

    async def file(self, batch: Sequence[Letter]) -> None:
        if len(self.batches) >= self.fails_at:
            raise StoreUnavailable("postgres")
        self.batches.append(list(batch))

    @property
    def letters(self) -> list[Letter]:
        return [letter for batch in self.batches for letter in batch]


Opened = Callable[[Path], Awaitable[Spool]]


@pytest.fixture
async def opened() -> AsyncIterator[Opened]:
    spools: list[Spool] = []

    async def open_(folder: Path) -> Spool:
        spools.append(Spool(folder))
        await spools[-1].open()
        return spools[-1]

    yield open_
    for spool in spools:
        await spool.close()


@pytest.fixture
async def spool(tmp_path: Path, opened: Opened) -> Spool:
    return await opened(tmp_path)


@pytest.fixture
def store() -> Store:
    return Store()


async def drained(folder: Path) -> tuple[list[Letter], Spool]:
    """What a fresh process finds in this folder."""
    spool, store = Spool(folder), Store()
    await spool.open()
    await spool.drain(store.file)
    await spool.close()
    return store.letters, spool


async def spooled(folder: Path, *batches: Sequence[Letter]) -> Path:
    """The file that a process which died left here, holding these batches."""
    spool = Spool(folder)
    for batch in batches:
        await spool.append(batch)
    await spool.close()
    return max(folder.glob("*.spool"))


# ---------------------------------------------------------------- order and forgetting


async def test_letters_are_handed_over_in_order_of_arrival(spool: Spool, store: Store, tmp_path: Path) -> None:
    await spool.append(letters(0, 3))
    await spool.append(letters(3, 7))
    assert spool.pending == 7
    assert await spool.drain(store.file, batch=2) == 7
    assert [len(batch) for batch in store.batches] == [2, 2, 2, 1]
    assert store.letters == letters(0, 7)
    assert spool.pending == 0
    assert files(tmp_path) == []


async def test_appending_nothing_makes_no_file(spool: Spool, tmp_path: Path) -> None:
    await spool.append([])
    assert files(tmp_path) == []


async def test_the_spool_can_be_filled_again_after_it_was_drained(spool: Spool, store: Store) -> None:
    for n in range(3):
        await spool.append(letters(n, n + 1))
        assert await spool.drain(store.file) == 1
    assert store.letters == letters(0, 3)


@pytest.mark.parametrize("fails_at", range(4))
async def test_an_outage_in_mid_drain_forgets_only_what_was_filed(
    spool: Spool, tmp_path: Path, fails_at: int, opened: Opened
) -> None:
    await spool.append(letters(0, 8))
    broken = Store(fails_at)
    with pytest.raises(StoreUnavailable):
        await spool.drain(broken.file, batch=2)
    assert broken.letters == letters(0, fails_at * 2)
    assert spool.pending == 8 - fails_at * 2
    await spool.append(letters(8, 9))
    await spool.close()
    assert (await drained(tmp_path))[0] == letters(fails_at * 2, 9)


async def test_letters_that_come_during_a_drain_wait_for_the_next_one(spool: Spool, store: Store) -> None:
    async def file_and_append(batch: Sequence[Letter]) -> None:
        await store.file(batch)
        await spool.append(letters(10, 11))

    await spool.append(letters(0, 1))
    assert await spool.drain(file_and_append) == 1
    assert spool.pending == 1
    assert await spool.drain(store.file) == 1
    assert store.letters == [*letters(0, 1), *letters(10, 11)]


async def test_a_drain_cancelled_while_filing_forgets_nothing(spool: Spool, store: Store) -> None:
    filing = asyncio.Event()

    async def never(_: Sequence[Letter]) -> None:
        filing.set()
        await asyncio.Event().wait()

    await spool.append(letters(0, 3))
    task = asyncio.create_task(spool.drain(never))
    await filing.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await spool.drain(store.file) == 3


async def test_an_append_cancelled_at_any_moment_leaves_whole_letters(spool: Spool, store: Store) -> None:
    tasks = [asyncio.create_task(spool.append(letters(n, n + 1))) for n in range(20)]
    for n, task in enumerate(tasks):
        if n % 2:
            task.cancel()
        await asyncio.sleep(0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    await spool.drain(store.file)
    acknowledged = [letters(n, n + 1)[0] for n, result in enumerate(results) if result is None]
    assert [letter for letter in store.letters if letter in acknowledged] == acknowledged


async def test_two_drains_at_once_hand_each_letter_over_once(spool: Spool, store: Store) -> None:
    await spool.append(letters(0, 50))
    assert sum(await asyncio.gather(spool.drain(store.file, 3), spool.drain(store.file, 3))) == 50
    assert store.letters == letters(0, 50)


async def test_files_rotate_and_keep_their_order(
    spool: Spool, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "ROTATE_BYTES", 2_000)
    for n in range(0, 40, 2):
        await spool.append(letters(n, n + 2))
    assert len(files(tmp_path)) > 5
    assert await spool.drain(store.file, batch=7) == 40
    assert store.letters == letters(0, 40)
    assert files(tmp_path) == []


async def test_a_batch_is_bounded_in_bytes_too(spool: Spool, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "BATCH_BYTES", 1)
    await spool.append(letters(0, 3))
    await spool.drain(store.file)
    assert [len(batch) for batch in store.batches] == [1, 1, 1]


async def test_a_closed_spool_says_so(spool: Spool, store: Store) -> None:
    await spool.close()
    await spool.close()
    with pytest.raises(SpoolFailed, match="closed"):
        await spool.append([LETTER])
    with pytest.raises(SpoolFailed, match="closed"):
        await spool.drain(store.file)


# ---------------------------------------------------------------- bytes


async def test_a_body_of_ten_megabytes_comes_back_bit_for_bit(spool: Spool, store: Store) -> None:
    letter = replace(LETTER, message=replace(MESSAGE, body=os.urandom(10_000_000)))
    await spool.append([letter])
    await spool.drain(store.file)
    assert store.letters == [letter]


async def test_null_and_empty_stay_apart(spool: Spool, store: Store) -> None:
    pair = [replace(LETTER, message=replace(MESSAGE, key=k, body=b)) for k, b in ((None, b""), (b"", None))]
    await spool.append(pair)
    await spool.drain(store.file)
    assert store.letters == pair


TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
"""With lone surrogates: they are how file names and header names arrive that are no UTF-8."""
BYTES = st.none() | st.binary(max_size=40)
NUMBER = st.integers() | st.integers(2**62, 2**70)
MESSAGES = st.builds(
    Message, TEXT, TEXT, NUMBER, TEXT, NUMBER, BYTES, BYTES, st.lists(st.tuples(TEXT, BYTES), max_size=4).map(tuple)
)
LETTERS = st.builds(
    Letter, id=TEXT, message=MESSAGES, group=TEXT, kind=st.sampled_from(Kind), reason=st.sampled_from(Reason),
    error_type=TEXT, error_message=TEXT, first_attempt_at=NUMBER, last_attempt_at=NUMBER, attempts=NUMBER, stack=TEXT,
    attributes=st.dictionaries(TEXT, TEXT, max_size=3), masked=st.lists(TEXT, max_size=2).map(tuple),
    history=st.lists(st.builds(Attempt, NUMBER, NUMBER, TEXT, delay=st.none() | NUMBER), max_size=2).map(tuple),
    environment=st.builds(Environment, TEXT), hop=NUMBER, verified=st.booleans(), marks=st.just(("tampered",)),
    claim=st.none() | st.builds(Claim, TEXT, NUMBER, TEXT),
)  # fmt: skip


@given(st.lists(st.lists(LETTERS, max_size=3), max_size=3))
@settings(max_examples=60, deadline=None)
async def test_any_letter_comes_back_as_it_was(batches: list[list[Letter]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spool = Spool(Path(folder))
        for batch in batches:
            await spool.append(batch)
        await spool.close()
        found, fresh = await drained(Path(folder))
        assert found == [letter for batch in batches for letter in batch]
        assert fresh.damaged == 0


# ---------------------------------------------------------------- crashes

APPEND_UNTIL_KILLED = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_spool import Spool, letters
async def main():
    spool = Spool(Path(sys.argv[1]))
    for n in range(0, 1_000_000, 3):
        await spool.append(letters(n, n + 3))
        print(n + 3, flush=True)
asyncio.run(main())
"""
DRAIN_AND_DIE = """
import asyncio, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_spool import Spool
async def main():
    spool, filed = Spool(Path(sys.argv[1])), []
    async def file(batch):
        filed.extend(batch)
        print(len(filed), flush=True)
        if len(filed) == 15:
            os.kill(os.getpid(), signal.SIGKILL)
    await spool.drain(file, batch=5)
asyncio.run(main())
"""


def process(script: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, str(folder), str(Path(__file__).parent)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def killed_after(lines: int, child: subprocess.Popen[str]) -> int:
    """Kill -9 in the middle of things; says what the child acknowledged last."""
    assert child.stdout is not None
    with child, child.stdout:
        told = [child.stdout.readline() for _ in range(lines)]
        child.kill()
        told += child.stdout.readlines()
    assert child.returncode == -signal.SIGKILL
    return int([line for line in told if line.endswith("\n")][-1])


@pytest.mark.parametrize("lines", [1, 7, 60])
async def test_whatever_was_acknowledged_survives_kill_9(tmp_path: Path, lines: int) -> None:
    acknowledged = killed_after(lines, process(APPEND_UNTIL_KILLED, tmp_path))
    found, fresh = await drained(tmp_path)
    assert len(found) >= acknowledged
    assert found == letters(0, len(found))
    assert fresh.damaged == 0
    assert files(tmp_path) == []


async def test_a_crash_in_mid_drain_hands_at_most_one_batch_over_again(tmp_path: Path) -> None:
    await spooled(tmp_path, letters(0, 30))
    assert killed_after(3, process(DRAIN_AND_DIE, tmp_path)) == 15
    assert (await drained(tmp_path))[0] == letters(10, 30)


async def test_a_torn_last_record_is_cut_off_wherever_it_tore(tmp_path: Path) -> None:
    whole = (await spooled(tmp_path, letters(0, 2))).stat().st_size
    file = await spooled(tmp_path, letters(0, 3))
    data = file.read_bytes()
    for at in range(whole, len(data)):
        folder = tmp_path / str(at)
        folder.mkdir()
        (folder / file.name).write_bytes(data[:at])
        found, fresh = await drained(folder)
        assert found == letters(0, 2), at
        assert fresh.damaged == 0
        assert files(folder) == []


async def test_a_file_torn_inside_its_head_held_nothing(tmp_path: Path) -> None:
    file = await spooled(tmp_path, letters(0, 1))
    head = file.read_bytes()[:27]
    for at in range(len(head) + 1):
        file.write_bytes(head[:at])
        assert (await drained(tmp_path))[0] == []
        assert files(tmp_path) == []


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("place", ["marker", "length", "checksum", "letter"])
async def test_a_damaged_record_is_kept_aside_and_the_rest_goes_on(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = [(await spooled(_folder(tmp_path, str(n)), letters(0, n))).stat().st_size for n in (1, 2)]
    file = await spooled(_folder(tmp_path, "all"), letters(0, 5))
    at = sizes[0] + {"marker": 2, "length": 9, "checksum": 17, "letter": 40}[place]
    data = bytearray(file.read_bytes())
    data[at] ^= 0xFF
    file.write_bytes(data)
    found, fresh = await drained(file.parent)
    assert found == [letter for n, letter in enumerate(letters(0, 5)) if n != 1]
    assert fresh.damaged == 1
    assert files(file.parent) == [f"{file.stem}.bad"]
    assert (file.parent / f"{file.stem}.bad").read_bytes() == data[sizes[0] : sizes[1]]
    assert "cannot be read" in caplog.text


async def test_damage_at_the_very_end_is_kept_not_cut(tmp_path: Path) -> None:
    file = await spooled(tmp_path, letters(0, 2))
    data = bytearray(file.read_bytes())
    data[-1] ^= 0xFF
    file.write_bytes(data)
    found, fresh = await drained(tmp_path)
    assert found == letters(0, 1)
    assert fresh.damaged == 1
    assert files(tmp_path) == [f"{file.stem}.bad"]


async def test_bytes_that_nobody_wrote_at_any_place_lose_no_other_letter(tmp_path: Path) -> None:
    """Wherever a byte flips behind the head, one letter is set aside and its bytes are kept."""
    file = await spooled(tmp_path, letters(0, 3))
    sound = file.read_bytes()
    for at in range(28, len(sound), 3):
        data = bytearray(sound)
        data[at] ^= 0x55
        folder = _folder(tmp_path, str(at))
        (folder / file.name).write_bytes(data)
        found, fresh = await drained(folder)
        assert len(found) == 2
        assert fresh.damaged == 1
        assert data[28:].find((folder / f"{file.stem}.bad").read_bytes()) >= 0


async def test_a_body_that_looks_like_a_record_is_never_taken_for_one(tmp_path: Path) -> None:
    forged = await spooled(_folder(tmp_path, "forger"), [replace(LETTER, id="forged")])
    body = forged.read_bytes()[28:]
    file = await spooled(_folder(tmp_path, "a"), [replace(LETTER, message=replace(MESSAGE, body=body)), LETTER])
    data = bytearray(file.read_bytes())
    data[60] ^= 0xFF
    file.write_bytes(data)
    found, fresh = await drained(file.parent)
    assert found == [LETTER]
    assert fresh.damaged == 1


async def test_a_letter_of_another_version_goes_aside_and_blocks_nobody(
    spool: Spool, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await spool.append(letters(0, 1))
    with monkeypatch.context() as newer:
        newer.setattr(spool_module, "_encoded", lambda _: msgspec.msgpack.encode({"id": 7}))
        await spool.append([LETTER])
    await spool.append(letters(1, 2))
    await spool.drain(store.file)
    assert store.letters == letters(0, 2)
    assert spool.damaged == 1
    assert [name[-4:] for name in files(tmp_path)] == [".bad"]


async def test_a_file_of_another_version_is_kept_whole(tmp_path: Path) -> None:
    file = await spooled(tmp_path, letters(0, 1))
    file.write_bytes(b"redrive\x02" + file.read_bytes()[8:])
    found, fresh = await drained(tmp_path)
    assert found == []
    assert fresh.damaged == 1
    assert files(tmp_path) == [f"{file.name}.bad"]


async def test_damage_that_cannot_be_set_aside_blocks_nobody_and_is_not_lost(tmp_path: Path) -> None:
    file = await spooled(tmp_path, letters(0, 3))
    sound = file.read_bytes()
    file.write_bytes(sound.replace(letters(1, 2)[0].id.encode(), b"?" * 32))
    aside = tmp_path / f"{file.stem}.bad"
    aside.mkdir()
    found, _ = await drained(tmp_path)
    assert [letter.id for letter in found] == [letter.id for letter in (*letters(0, 1), *letters(2, 3))]
    assert file.exists()
    aside.rmdir()
    _, fresh = await drained(tmp_path)
    assert fresh.damaged == 1
    assert b"?" * 32 in aside.read_bytes()
    assert files(tmp_path) == [aside.name]


# ---------------------------------------------------------------- disks


@pytest.fixture
def little_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte, or, without the right to mount, the folder itself."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=False, stderr=subprocess.DEVNULL
    )
    yield tmp_path
    if mounted.returncode == 0:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


async def test_a_full_disk_loses_nothing_and_space_mends_it(little_disk: Path, opened: Opened, store: Store) -> None:
    spool = await opened(little_disk)
    limit = 1_000_000
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    large = replace(LETTER, message=replace(MESSAGE, body=bytes(600_000)))
    await spool.append(letters(0, 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        await spool.append([large])
        for _ in range(3):
            with pytest.raises(SpoolFailed, match=str(little_disk)):
                await spool.append([large])
        await spool.append(letters(1, 2))
        await spool.drain(store.file)
        assert store.letters == [*letters(0, 1), large, *letters(1, 2)]
        await spool.append([large])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    await spool.drain(store.file)
    assert store.letters[3:] == [large]


async def test_a_write_cut_short_leaves_no_half_letter(spool: Spool, tmp_path: Path) -> None:
    await spool.append(letters(0, 2))
    (file,) = tmp_path.glob("*.spool")
    before = file.read_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (1, 10, 100, 500):
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, hard))
        try:
            with pytest.raises(SpoolFailed) as failed:
                await spool.append(letters(2, 9))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert failed.value.folder == str(tmp_path)
        assert file.read_bytes() == before
    await spool.append(letters(2, 3))
    assert spool.pending == 3
    await spool.close()
    assert (await drained(tmp_path))[0] == letters(0, 3)


async def test_after_a_failed_fsync_the_file_is_not_trusted_again(
    spool: Spool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.EIO, "the disk is going")

    await spool.append(letters(0, 1))
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", refuse)
        for _ in range(5):
            with pytest.raises(SpoolFailed, match="the disk is going"):
                await spool.append(letters(1, 2))
        assert len(files(tmp_path)) == 1
    await spool.append(letters(2, 3))
    assert len(files(tmp_path)) == 2
    await spool.close()
    assert (await drained(tmp_path))[0] == [*letters(0, 1), *letters(2, 3)]


async def test_a_new_file_whose_name_is_not_durable_is_taken_back(
    spool: Spool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> None:
        raise OSError(errno.EIO, "the disk is going")

    with monkeypatch.context() as broken:
        broken.setattr(spool_module, "_sync_folder", refuse)
        with pytest.raises(SpoolFailed, match="the disk is going"):
            await spool.append([LETTER])
    assert files(tmp_path) == []
    assert spool.pending == 0


async def test_a_missing_folder_is_named(tmp_path: Path, store: Store) -> None:
    spool = Spool(tmp_path / "unmounted")
    for call in (spool.open(), spool.append([LETTER]), spool.drain(store.file)):
        with pytest.raises(SpoolFailed, match="unmounted") as failed:
            await call
        assert failed.value.folder == str(tmp_path / "unmounted")
    await spool.close()


async def test_a_folder_of_our_own_is_made_when_asked(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", make=True)
    await spool.open()
    await spool.append([LETTER])
    await spool.close()
    assert (await drained(tmp_path / "spool"))[0] == [LETTER]


async def test_a_folder_that_cannot_be_written_shows_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    spool = Spool(tmp_path)
    with pytest.raises(SpoolFailed, match="cannot be written"):
        await spool.open()
    await spool.close()


async def test_a_file_removed_under_our_feet_takes_no_more_letters(spool: Spool, store: Store, tmp_path: Path) -> None:
    await spool.append(letters(0, 1))
    for path in tmp_path.iterdir():
        path.unlink()
    await spool.append(letters(1, 2))
    assert len(files(tmp_path)) == 1
    await spool.drain(store.file)
    assert store.letters == letters(0, 2)


async def test_a_file_that_cannot_be_read_stops_nobody(tmp_path: Path) -> None:
    await spooled(tmp_path, letters(0, 1))
    (tmp_path / "000000000000.spool").mkdir()
    assert (await drained(tmp_path))[0] == letters(0, 1)


# ---------------------------------------------------------------- neighbours


async def test_neighbours_fill_files_of_their_own(tmp_path: Path, opened: Opened) -> None:
    one, other = await opened(tmp_path), await opened(tmp_path)
    stores = Store(), Store()
    await one.append(letters(0, 2))
    await other.append(letters(2, 4))
    assert [await one.drain(stores[0].file), await other.drain(stores[1].file)] == [2, 2]
    assert [store.letters for store in stores] == [letters(0, 2), letters(2, 4)]


async def test_what_a_dead_neighbour_left_is_inherited_at_the_next_drain(
    spool: Spool, store: Store, tmp_path: Path
) -> None:
    await spool.append(letters(0, 1))
    child = process(APPEND_UNTIL_KILLED, tmp_path)
    assert child.stdout is not None
    child.stdout.readline()
    assert await spool.drain(store.file) == 1
    acknowledged = killed_after(3, child)
    assert await spool.drain(store.file) >= acknowledged
    assert store.letters[1 : acknowledged + 1] == letters(0, acknowledged)
    assert files(tmp_path) == []


async def test_what_was_left_counts_as_pending_from_the_start(tmp_path: Path, opened: Opened) -> None:
    await spooled(tmp_path, letters(0, 4))
    assert (await opened(tmp_path)).pending == 4


async def test_many_leftovers_do_not_use_up_the_descriptors(
    tmp_path: Path, store: Store, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "FILE_LIMIT", 2)
    neighbours = [await opened(tmp_path) for _ in range(5)]
    for n, neighbour in enumerate(neighbours):
        await neighbour.append(letters(n, n + 1))
    for neighbour in neighbours:
        await neighbour.close()
    spool = await opened(tmp_path)
    assert [await spool.drain(store.file) for _ in range(4)] == [2, 2, 1, 0]
    assert store.letters == letters(0, 5)


async def test_a_crowd_filling_and_draining_one_folder_loses_and_repeats_nothing(tmp_path: Path) -> None:
    crowd, store = [Spool(tmp_path) for _ in range(8)], Store()

    async def work(n: int, spool: Spool) -> None:
        for m in range(20):
            await spool.append(letters(n * 100 + m, n * 100 + m + 1))
            await spool.drain(store.file)
        await spool.close()

    await asyncio.gather(*(work(n, spool) for n, spool in enumerate(crowd)))
    found = (await drained(tmp_path))[0]
    ids = [letter.id for letter in (*store.letters, *found)]
    assert sorted(ids) == sorted(letter.id for n in range(8) for letter in letters(n * 100, n * 100 + 20))
    assert files(tmp_path) == []


def _folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name
