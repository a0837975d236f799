from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from blobs_suite import BODY, FAR_AHEAD, ONE, BlobsSuite

from redrive.blobs.base import claim_for
from redrive.blobs.folder import FolderBlobs
from redrive.errors import BlobsUnavailable

NAME = claim_for(ONE, BODY).name


def place(root: Path) -> Path:
    return root / NAME[:2] / NAME


class TestFolderBlobs(BlobsSuite):
    backend = FolderBlobs

    @pytest.fixture
    async def blobs(self, tmp_path: Path) -> AsyncIterator[FolderBlobs]:
        blobs = FolderBlobs(tmp_path)
        yield blobs
        await blobs.close()

    async def test_another_process_sees_it(self, blobs: FolderBlobs, tmp_path: Path) -> None:
        await blobs.put(NAME, BODY)
        assert await FolderBlobs(tmp_path).get(NAME) == BODY

    async def test_only_the_owner_may_read_it(self, blobs: FolderBlobs, tmp_path: Path) -> None:
        await blobs.put(NAME, BODY)
        assert stat.S_IMODE(place(tmp_path).stat().st_mode) == 0o600

    async def test_a_body_that_rotted_is_reported_and_not_handed_out(self, blobs: FolderBlobs, tmp_path: Path) -> None:
        await blobs.put(NAME, BODY)
        place(tmp_path).write_bytes(BODY[:-1] + b"?")
        with pytest.raises(BlobsUnavailable, match="does not match"):
            await blobs.get(NAME)

    async def test_putting_heals_a_body_that_rotted(self, blobs: FolderBlobs, tmp_path: Path) -> None:
        await blobs.put(NAME, BODY)
        place(tmp_path).write_bytes(b"")
        await blobs.put(NAME, BODY)
        assert await blobs.get(NAME) == BODY

    async def test_putting_again_keeps_it_from_the_sweep_of_orphans(self, blobs: FolderBlobs, tmp_path: Path) -> None:
        await blobs.put(NAME, BODY)
        os.utime(place(tmp_path), (1, 1))
        assert await blobs.names(2_000) == [NAME]
        await blobs.put(NAME, BODY)
        assert await blobs.names(2_000) == []

    async def test_a_link_in_place_of_a_body_is_not_followed(self, blobs: FolderBlobs, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_bytes(BODY)
        place(tmp_path).parent.mkdir()
        place(tmp_path).symlink_to(secret)
        for call in (blobs.get(NAME), blobs.put(NAME, BODY)):
            with pytest.raises(BlobsUnavailable):
                await call
        await blobs.delete(NAME)
        assert secret.read_bytes() == BODY

    async def test_a_link_in_place_of_a_shard_is_not_followed(self, blobs: FolderBlobs, tmp_path: Path) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / NAME).write_bytes(BODY)
        (tmp_path / NAME[:2]).symlink_to(elsewhere)
        for call in (blobs.get(NAME), blobs.put(NAME, BODY), blobs.delete(NAME)):
            with pytest.raises(BlobsUnavailable):
                await call
        assert await blobs.names(FAR_AHEAD) == []
        assert (elsewhere / NAME).read_bytes() == BODY

    async def test_a_missing_folder_is_not_an_empty_one(self, tmp_path: Path) -> None:
        blobs = FolderBlobs(tmp_path / "unmounted")
        for call in (blobs.get(NAME), blobs.put(NAME, BODY), blobs.delete(NAME), blobs.names(FAR_AHEAD)):
            with pytest.raises(BlobsUnavailable, match="unmounted"):
                await call

    async def test_a_folder_of_our_own_is_made_when_asked(self, tmp_path: Path) -> None:
        blobs = FolderBlobs(tmp_path / "blobs", make=True)
        assert await blobs.get(NAME) is None
        await blobs.put(NAME, BODY)
        assert await blobs.get(NAME) == BODY

    @pytest.mark.parametrize("step", ["fsync", "rename"])
    async def test_a_disk_that_refuses_leaves_nothing_behind(
        self, blobs: FolderBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "no space left")

        with monkeypatch.context() as broken:
            broken.setattr(os, step, refuse)
            with pytest.raises(BlobsUnavailable, match="no space left"):
                await blobs.put(NAME, BODY)
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
        await blobs.put(NAME, BODY)
        assert await blobs.get(NAME) == BODY

    async def test_half_a_body_is_no_body_and_is_cleared_away(self, blobs: FolderBlobs, tmp_path: Path) -> None:
        half = place(tmp_path).with_name(f".{NAME}.0123.tmp")
        half.parent.mkdir()
        half.write_bytes(b"half")
        assert await blobs.get(NAME) is None
        with half.open("rb") as writer:
            fcntl.flock(writer, fcntl.LOCK_EX)
            assert await blobs.names(FAR_AHEAD) == []
            assert half.exists()
        assert await blobs.names(FAR_AHEAD) == []
        assert not half.exists()
