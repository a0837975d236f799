"""Order by key: what follows a dead message of its key waits behind its letter, and goes out in its own order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from harness import letters, make_app, running, until, until_drained, until_letters

from redrive import ConfigError, Message, Redrive, State, delays
from redrive.errors import StoreUnavailable
from redrive.letter import Act, Reason


class Shop:
    """Handles numbered messages of keys, failing those in `broken`."""

    def __init__(self, app: Redrive, **settings: Any) -> None:
        self.done: list[tuple[str, int]] = []
        self.runs: list[tuple[str, int]] = []
        self.broken: set[tuple[str, int]] = set()
        given = {"attempts": 1, "route": "direct", "ordering": "key", **settings}

        @app.consumer("orders", group="billing", name="bill", **given)
        async def bill(message: Message) -> None:
            what = ((message.key or b"").decode(), int(message.body or b"0"))
            self.runs.append(what)
            await asyncio.sleep(0.001)
            if what in self.broken:
                raise ValueError(f"{what} is broken")
            self.done.append(what)

    def of(self, key: str) -> list[int]:
        return [number for name, number in self.done if name == key]


async def send(app: Redrive, key: str, numbers: range | list[int]) -> None:
    for number in numbers:
        await app.publish("orders", b"%d" % number, key=key)


async def test_messages_of_a_key_run_one_after_another(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    shop = Shop(app, concurrency=8)
    async with running(app):
        for number in range(30):
            for key in ("a", "b", "c"):
                await send(app, key, [number])
        await until(lambda: len(shop.done) == 90)
    assert shop.of("a") == shop.of("b") == shop.of("c") == list(range(30))


async def test_what_follows_a_dead_message_is_held_and_replayed_in_order(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    shop = Shop(app)
    shop.broken = {("a", 3)}
    async with running(app):
        await send(app, "a", range(20))
        await send(app, "b", range(5))
        await until_letters(app, 16, states=(State.HELD,))
        await until(lambda: shop.of("b") == list(range(5)))
        assert shop.of("a") == [0, 1, 2]
        [dead] = await letters(app, states=(State.PENDING,))
        held = await letters(app, states=(State.HELD,))
        assert {row.reason for row in held} == {Reason.HELD}
        shop.broken = set()
        await app.letters.replay(dead.id)
        await until_letters(app, 17, states=(State.RESOLVED,))
        await send(app, "a", [20, 21])
        await until(lambda: len(shop.of("a")) == 22)
        assert await letters(app, states=(State.HELD, State.PENDING, State.REPLAYING)) == []
    assert shop.of("a") == list(range(22))


async def test_messages_that_arrive_during_a_replay_wait_their_turn(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    shop = Shop(app)
    shop.broken = {("a", 0)}
    async with running(app):
        await send(app, "a", range(10))
        await until_letters(app, 9, states=(State.HELD,))
        [dead] = await letters(app, states=(State.PENDING,))
        shop.broken = set()
        replaying = asyncio.create_task(app.letters.replay(dead.id))
        await send(app, "a", range(10, 40))
        await replaying
        await until(lambda: len(shop.of("a")) >= 40)
    assert shop.of("a") == list(range(40))


async def test_a_copy_that_dies_again_sends_its_followers_back_to_wait(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    shop = Shop(app, max_replays=5)
    shop.broken = {("a", 2)}
    async with running(app):
        await send(app, "a", range(8))
        await until_letters(app, 5, states=(State.HELD,))
        [dead] = await letters(app, states=(State.PENDING,))
        shop.broken = {("a", 4)}
        await app.letters.replay(dead.id)
        await until_letters(app, 1, states=(State.PENDING,))
        await until_letters(app, 3, states=(State.HELD,))
        assert shop.of("a") == [0, 1, 2, 3]
        shop.broken = set()
        [dead] = await letters(app, states=(State.PENDING,))
        await app.letters.replay(dead.id)
        await until(lambda: len(shop.of("a")) == 8)
        await until(lambda: _no_open(app))
    assert shop.of("a") == list(range(8))


async def test_discarding_the_dead_one_lets_the_others_go(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    shop = Shop(app)
    shop.broken = {("a", 0)}
    async with running(app):
        await send(app, "a", range(5))
        await until_letters(app, 4, states=(State.HELD,))
        [dead] = await letters(app, states=(State.PENDING,))
        held = await letters(app, states=(State.HELD,))
        job = await app.desk().replay([held[0].id], Act("ann", "out of turn"))
        await until(lambda: _refused(app, job.id, 4))
        await app.desk().discard(dead.id, Act("ann", "a test order"))
        await until(lambda: len(shop.of("a")) == 4)
    assert shop.of("a") == [1, 2, 3, 4]


async def test_retries_block_their_own_key_only(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    shop = Shop(app, attempts=100, backoff=delays([0.3]), transient=[ValueError], concurrency=2)
    shop.broken = {("a", 0)}
    async with running(app):
        await send(app, "a", range(3))
        await send(app, "b", range(50))
        await until(lambda: len(shop.of("b")) == 50)
        assert shop.of("a") == []
        shop.broken = set()
        await until(lambda: shop.of("a") == [0, 1, 2])
        assert await letters(app) == []


async def test_order_survives_a_restart_and_a_store_outage(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    shop = Shop(app)
    shop.broken = {("a", 1)}
    async with running(app):
        await send(app, "a", range(3))
        await until_letters(app, 1, states=(State.HELD,))
    app = make_app(tmp_path)
    shop = Shop(app)
    async with running(app):
        real = app.parts.store.letters.hold
        calls: list[int] = []

        async def down(*args: Any) -> Any:
            calls.append(1)
            if len(calls) < 3:
                raise StoreUnavailable("sqlite", "down")
            return await real(*args)

        app.parts.store.letters.hold = down  # type: ignore[method-assign]
        await send(app, "a", [3])
        await until_letters(app, 2, states=(State.HELD,))
        assert shop.done == []
        [dead] = await letters(app, states=(State.PENDING,))
        await app.letters.replay(dead.id)
        await until(lambda: shop.of("a") == [1, 2, 3])
        await until_drained(app, "orders", "billing")


def test_order_is_refused_where_it_cannot_be_kept(tmp_path: Path) -> None:
    async def handler(message: Message) -> None: ...

    app = make_app(tmp_path)
    for wrong in ({"route": "broker"}, {"route": "direct", "mode": "delayed"}):
        with pytest.raises(ConfigError):
            app.consumer("orders", group="g", ordering="key", **wrong)(handler)
    storeless = Redrive(f"embedded://{tmp_path}/other.db")
    with pytest.raises(ConfigError, match="needs a store"):
        storeless.consumer("orders", group="g", ordering="key", route="direct")(handler)


async def _refused(app: Redrive, job_id: str, number: int) -> bool:
    found = await app.desk().job(job_id)
    return found is not None and found[0].refused == number


async def _no_open(app: Redrive) -> bool:
    return not await letters(app, states=(State.HELD, State.PENDING, State.REPLAYING))
