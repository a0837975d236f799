"""What every blob storage must do. A backend's test subclasses this, names its class and gives a `blobs` fixture."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from redrive.blobs.base import Blobs, claim_for

ONE, OTHER = "1a" * 16, "2b" * 16
BODY = bytes(range(256))
LONG_AGO, FAR_AHEAD = 0, 2**50


class BlobsSuite:
    backend: ClassVar[Any]

    async def test_a_body_comes_back_bit_for_bit(self, blobs: Blobs) -> None:
        await blobs.put(claim_for(ONE, BODY).name, BODY)
        assert await blobs.get(claim_for(ONE, BODY).name) == BODY

    async def test_an_empty_body_is_a_body(self, blobs: Blobs) -> None:
        await blobs.put(claim_for(ONE, b"").name, b"")
        assert await blobs.get(claim_for(ONE, b"").name) == b""

    async def test_a_large_body_comes_back_whole(self, blobs: Blobs) -> None:
        body = BODY * 40_000
        await blobs.put(claim_for(ONE, body).name, body)
        assert await blobs.get(claim_for(ONE, body).name) == body

    async def test_a_body_nobody_put_is_none(self, blobs: Blobs) -> None:
        assert await blobs.get(claim_for(ONE, BODY).name) is None

    async def test_putting_again_changes_nothing(self, blobs: Blobs) -> None:
        name = claim_for(ONE, BODY).name
        await blobs.put(name, BODY)
        await blobs.put(name, BODY)
        assert await blobs.get(name) == BODY
        assert await blobs.names(FAR_AHEAD) == [name]

    async def test_many_writers_of_one_name_agree(self, blobs: Blobs) -> None:
        name = claim_for(ONE, BODY).name
        await asyncio.gather(*(blobs.put(name, BODY) for _ in range(16)))
        assert await blobs.get(name) == BODY
        assert await blobs.names(FAR_AHEAD) == [name]

    async def test_two_letters_with_the_same_body_share_nothing(self, blobs: Blobs) -> None:
        one, other = claim_for(ONE, BODY).name, claim_for(OTHER, BODY).name
        await blobs.put(one, BODY)
        await blobs.put(other, BODY)
        assert await blobs.delete(one)
        assert await blobs.get(one) is None
        assert await blobs.get(other) == BODY

    async def test_deleting_says_whether_there_was_something(self, blobs: Blobs) -> None:
        name = claim_for(ONE, BODY).name
        await blobs.put(name, BODY)
        assert [await blobs.delete(name), await blobs.delete(name)] == [True, False]

    async def test_a_deleted_body_can_be_put_again(self, blobs: Blobs) -> None:
        name = claim_for(ONE, BODY).name
        await blobs.put(name, BODY)
        await blobs.delete(name)
        await blobs.put(name, BODY)
        assert await blobs.get(name) == BODY

    async def test_names_tells_only_what_is_older(self, blobs: Blobs) -> None:
        names = [claim_for(letter, BODY).name for letter in (ONE, OTHER)]
        for name in names:
            await blobs.put(name, BODY)
        assert await blobs.names(LONG_AGO) == []
        assert sorted(await blobs.names(FAR_AHEAD)) == names

    @pytest.mark.parametrize(
        "name",
        ["", "x", "../../etc/passwd", "/etc/passwd", f"{ONE}-", f"{ONE}-{'0' * 63}/", f"{ONE}-{'A' * 64}",
         f"{ONE}-{'0' * 64}\n", f"{ONE}-{'0' * 64}\0", f"1a/{ONE}-{'0' * 64}"],
    )  # fmt: skip
    async def test_a_name_that_is_not_ours_reaches_nothing(self, blobs: Blobs, name: str) -> None:
        with pytest.raises(ValueError, match="is not the name of this body"):
            await blobs.put(name, BODY)
        assert await blobs.get(name) is None
        assert not await blobs.delete(name)
        assert await blobs.names(FAR_AHEAD) == []

    async def test_a_body_under_another_bodys_name_is_refused(self, blobs: Blobs) -> None:
        name = claim_for(ONE, BODY).name
        with pytest.raises(ValueError, match="is not the name of this body"):
            await blobs.put(name, b"something else")
        assert await blobs.get(name) is None
