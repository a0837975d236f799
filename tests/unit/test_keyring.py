from __future__ import annotations

import multiprocessing
import stat
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.errors import ConfigError
from redrive.keyring import Keyring, from_file, generate

KEY = b"0123456789abcdef"


def test_what_a_key_signed_it_verifies_and_nothing_else() -> None:
    keyring = Keyring([KEY])
    signature = keyring.sign([b"a", None])
    assert keyring.verify([b"a", None], signature)
    assert not keyring.verify([b"a", b""], signature)
    assert not keyring.verify([b"a"], signature)
    assert not keyring.verify([b"", b"a"], signature)
    assert not keyring.verify([b"a", None], None)
    assert not Keyring([b"another key, long enough"]).verify([b"a", None], signature)


@given(st.binary(max_size=300))
def test_verifying_is_total(signature: bytes) -> None:
    assert not Keyring([KEY]).verify([b"a"], signature)


def test_the_first_key_signs_and_every_key_verifies() -> None:
    old, both = Keyring([KEY]), Keyring([b"the new key of this year", KEY])
    assert both.verify([b"a"], old.sign([b"a"]))
    assert not old.verify([b"a"], both.sign([b"a"]))


@pytest.mark.parametrize("keys", [[], [b""], [b"short"], [KEY, b"short"]])
def test_a_key_that_is_missing_or_too_short_is_refused(keys: list[bytes]) -> None:
    with pytest.raises(ConfigError) as caught:
        Keyring(keys)
    assert (caught.value.key, caught.value.fix) == ("signing_keys", "run: redrive keygen")
    assert "short" not in str(caught.value).replace("too short", "")


def test_generated_keys_are_long_and_differ() -> None:
    assert generate() != generate()
    Keyring([generate().encode()])


def test_the_key_beside_a_broker_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "signing.key"
    key = from_file(path)
    Keyring([key])
    assert from_file(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_threads_that_race_for_the_key_agree_on_one(tmp_path: Path) -> None:
    path, start = tmp_path / "signing.key", threading.Barrier(16)

    def race() -> bytes:
        start.wait()
        return from_file(path)

    with ThreadPoolExecutor(16) as pool:
        keys = {future.result() for future in [pool.submit(race) for _ in range(16)]}
    assert keys == {bytes.fromhex(path.read_text())}
    assert list(tmp_path.iterdir()) == [path]


def test_processes_that_race_for_the_key_agree_on_one(tmp_path: Path) -> None:
    path = tmp_path / "signing.key"
    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")) as pool:
        keys = set(pool.map(from_file, [path] * 16))
    assert keys == {bytes.fromhex(path.read_text())}
    assert list(tmp_path.iterdir()) == [path]


def test_a_key_file_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        from_file(tmp_path / "file" / "signing.key")
    assert "signing.key" in caught.value.fix


@pytest.mark.parametrize("content", [b"", b"  \n", b"\xff\xfe"])
def test_a_damaged_key_file_is_refused_not_used(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "signing.key"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        Keyring([from_file(path)])
