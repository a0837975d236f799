"""A letter is durable before its message is settled, whatever is down. Nothing is lost, and the user is told."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import letters, make_app, running, until, until_drained, until_letters

from redrive import ConfigError, Message, Redrive, State
from redrive.brokers.base import Batch, Subscription
from redrive.errors import BrokerUnavailable, SpoolFailed, StoreUnavailable
from redrive.letter import Reason
from redrive.message import Copy
from redrive.office import Notice


class Outage:
    """Makes one method fail until it is over, as a dead server would."""

    def __init__(self, owner: Any, method: str, error: Exception) -> None:
        self._owner, self._method, self._error = owner, method, error
        self.calls = 0

    def __enter__(self) -> Outage:
        self._real = getattr(self._owner, self._method)

        async def down(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            raise self._error

        setattr(self._owner, self._method, down)
        return self

    def __exit__(self, *error: object) -> None:
        setattr(self._owner, self._method, self._real)


def failing(app: Redrive, **settings: Any) -> list[bytes | None]:
    seen: list[bytes | None] = []

    @app.consumer("orders", group="billing", attempts=1, **settings)
    async def bill(message: Message) -> None:
        seen.append(message.body)
        raise ValueError("bug")

    return seen


async def test_the_direct_route_files_without_a_collector(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    failing(app, route="direct")
    async with running(app, office=False):
        await app.publish("orders", b"1")
        await until_letters(app, 1)
        await until_drained(app, "orders", "billing")
        assert (await app.parts.broker.depth("orders.dlq", "redrive-collector")).count == 0


async def test_a_store_outage_goes_to_the_spool_and_comes_back_by_itself(tmp_path: Path) -> None:
    notices: list[Notice] = []
    app = make_app(tmp_path, notify=notices.append)
    failing(app, route="direct")
    async with running(app, office=False):
        with Outage(app.parts.store.letters, "file", StoreUnavailable("sqlite", "down")):
            for number in range(20):
                await app.publish("orders", b"%d" % number)
            await until_drained(app, "orders", "billing")
            assert app.parts.spool is not None
            assert app.parts.spool.pending == 20
            assert await letters(app) == []
        found = await until_letters(app, 20)
    assert {row.reason for row in found} == {Reason.PERMANENT}
    assert "spooled" in {notice.kind for notice in notices}


async def test_store_and_spool_down_leave_the_message_unsettled_and_say_so(tmp_path: Path) -> None:
    notices: list[Notice] = []
    app = make_app(tmp_path, notify=notices.append)
    seen = failing(app, route="direct")
    async with running(app, office=False):
        with (
            Outage(app.parts.store.letters, "file", StoreUnavailable("sqlite", "down")),
            Outage(app.parts.spool, "append", SpoolFailed("spool", "disk full")) as spool,
        ):
            await app.publish("orders", b"1", key="k")
            await until(lambda: spool.calls >= 2)
            assert (await app.parts.broker.depth("orders", "billing")).count == 1
        [row] = await until_letters(app, 1)
        await until_drained(app, "orders", "billing")
    assert seen == [b"1"], "the handler must not run again because filing failed"
    assert [n.kind for n in notices].count("stuck") == 1
    assert row.state is State.PENDING


async def test_a_broker_that_refuses_dead_letters_keeps_the_message(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    failing(app)
    async with running(app):
        with Outage(app.parts.broker, "settle", BrokerUnavailable("embedded", "settle", "no space")) as broker:
            await app.publish("orders", b"1")
            await until(lambda: broker.calls >= 3)
        await until_letters(app, 1)
        await until_drained(app, "orders", "billing")


async def test_the_collector_waits_for_its_store_and_settles_nothing_meanwhile(tmp_path: Path) -> None:
    notices: list[Notice] = []
    app = make_app(tmp_path, notify=notices.append)
    failing(app)
    async with running(app):
        with Outage(app.parts.store.letters, "file", StoreUnavailable("sqlite", "down")) as store:
            await app.publish("orders", b"1")
            await until(lambda: store.calls >= 2)
            assert (await app.parts.broker.depth("orders.dlq", "redrive-collector")).count == 1
        await until_letters(app, 1)
    assert "store_down" in {notice.kind for notice in notices}


async def test_a_real_locked_store_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redrive.sqlite.BUSY_SECONDS", 0.2)
    app = make_app(tmp_path)
    failing(app, route="direct")
    async with running(app, office=False):
        rude = sqlite3.connect(tmp_path / "letters.db", isolation_level=None)
        rude.execute("BEGIN IMMEDIATE")
        for number in range(10):
            await app.publish("orders", b"%d" % number)
        await until_drained(app, "orders", "billing")
        rude.execute("ROLLBACK")
        rude.close()
        await until_letters(app, 10)


async def test_collecting_twice_changes_nothing(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    failing(app)
    async with running(app):
        await app.publish("orders", b"1")
        [row] = await until_letters(app, 1)
        before = await app.parts.store.letters.get(row.id)
        dead = await _first(app, "orders.dlq")
        await app.parts.broker.publish([Copy("orders.dlq", dead.key, dead.body, dead.headers, dead.timestamp)])
        await until_drained(app, "orders.dlq", "redrive-collector")
        assert await app.parts.store.letters.get(row.id) == before


async def test_strangers_in_the_dead_letter_source_are_adopted_unverified(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    failing(app)
    async with running(app):
        await app.publish("orders.dlq", b"\xffnot ours", headers=(("redrive-letter", b"{}"), ("x", b"1")))
        [row] = await until_letters(app, 1)
        letter = await app.letters.get(row.id)
        job = await app.letters.replay(row.id)
        assert (job.sent, job.refused) == (0, 1)
    assert (row.reason, row.verified, letter.marks) == (Reason.ADOPTED, False, ("tampered",))
    assert [header.name for header in letter.headers] == ["x"]


async def test_the_same_message_that_comes_back_is_the_same_letter(tmp_path: Path) -> None:
    """A crash between filing and settling redelivers the message; the second filing must change nothing."""
    app = make_app(tmp_path)
    seen = failing(app, route="direct")
    async with running(app, office=False):
        real = app.parts.broker.settle
        lost: list[int] = []

        async def settle_once_in_vain(settlements: Sequence[Any]) -> Any:
            if not lost:
                lost.append(1)
                app.stop()
                raise BrokerUnavailable("embedded", "settle", "crash")
            return await real(settlements)

        app.parts.broker.settle = settle_once_in_vain  # type: ignore[method-assign]
        await app.publish("orders", b"1")
        await until(lambda: lost)
    again = make_app(tmp_path)
    failing(again, route="direct")
    async with running(again, office=False):
        await until_drained(again, "orders", "billing")
        [row] = await letters(again)
    assert seen == [b"1"]
    assert row.occurrences == 1


async def test_guard_judges_counts_and_files(tmp_path: Path) -> None:
    app = make_app(tmp_path, defaults={"attempts": 2, "backoff": 0.5})
    message = Message("mine", "jobs", 0, "17", 1, b"k", b"{}")
    async with app:
        from redrive import Retry

        with pytest.raises(Retry) as again:
            async with app.guard(message, group="g"):
                raise ConnectionError("down")
        assert 0.4 < (again.value.after or 0) <= 0.5
        async with app.guard(message, group="g") as guarded:
            raise ConnectionError("down")
        assert guarded.filed is not None
        [row] = await letters(app)
        assert (row.id, row.attempts, row.group) == (guarded.filed, 2, "g")
        async with app.guard(message, group="other") as fine:
            pass
        assert fine.handled
        assert fine.filed is None


async def test_execute_with_retry_says_whether_it_was_handled(tmp_path: Path) -> None:
    app = make_app(tmp_path, defaults={"attempts": 3, "backoff": 0.01})
    runs: list[int] = []

    async def flaky(message: Message) -> None:
        runs.append(1)
        if len(runs) < 3:
            raise TimeoutError

    def broken(message: Message) -> None:
        raise ValueError("no")

    assert await app.execute_with_retry(b"{}", flaky, source="users-events") is True
    assert await app.execute_with_retry({"id": 1}, broken, source="users-events") is False
    [row] = (await app.letters.list("users-events", limit=10)).rows
    assert row.error_type == "ValueError"
    letter_id = await app.dead_letter({"id": 2}, KeyError("x"), "Handler", "users-events", 4)
    assert (await app.letters.get(letter_id)).attempts == 4
    await app.letters.purge(letter_id)
    assert (await app.letters.statistics()).total == 1


def test_the_two_questions(tmp_path: Path) -> None:
    app = make_app(tmp_path, defaults={"attempts": 5, "backoff": {"seconds": 5, "cap": 300}})
    assert app.should_retry(TimeoutError(), 1)
    assert not app.should_retry(ValueError(), 1)
    assert not app.should_retry(TimeoutError(), 5)
    assert [app.retry_delay(n) for n in (1, 2, 3, 9)] == [5, 10, 20, 300]


def test_what_cannot_work_is_refused_at_once(tmp_path: Path) -> None:
    app = make_app(tmp_path)

    def register(name: str = "bill", **settings: Any) -> None:
        app.consumer("orders", **{"group": "billing", **settings}, name=name)(_handler)

    register()
    for settings in (
        {"group": "other"},
        {"name": "second"},
        {"name": "n", "group": "g", "attempts": 0},
        {"name": "n", "group": "g", "mode": "sometimes"},
        {"name": "n", "group": "g", "identity": "order_id"},
        {"name": "n", "group": "g", "masked": ["user"]},
        {"name": "n", "group": "g", "attributes": {"u": "key"}, "masked": ["u"], "labels": ["u"]},
        {"name": "n", "group": "g", "attempts_key": "count:{user}"},
        {"name": "n", "group": "g", "dead_letter": "dlq.{cluster_id}"},
        {"name": "n", "group": "g", "attributes": {"a": "nowhere"}},
    ):
        with pytest.raises(ConfigError) as refused:
            register(**settings)
        assert refused.value.fix
    with pytest.raises(ConfigError, match="not callable"):
        app.consumer("orders", group="g")(42)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="unknown scheme 'kafak'"):
        Redrive("kafak://localhost")
    with pytest.raises(ConfigError, match="no address"):
        Redrive("localhost:9092")


async def test_an_inline_backoff_longer_than_the_lease_is_refused_at_start(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    app.consumer("orders", group="billing", mode="inline", backoff=60.0)(_handler)
    with pytest.raises(ConfigError, match="outlasts the broker's lease"):
        await app.work()
    assert not (tmp_path / "letters.db").exists()


async def _handler(message: Message) -> None: ...


async def _first(app: Redrive, source: str) -> Message:
    stream = await app.parts.broker.subscribe(Subscription((source,), "peek"))
    async for event in stream:
        if isinstance(event, Batch):
            await stream.aclose()
            return event.deliveries[0].message
    raise AssertionError(source)


async def test_masked_attributes_show_nowhere(tmp_path: Path) -> None:
    app = make_app(tmp_path)

    @app.consumer(
        "orders",
        group="billing",
        attempts=1,
        attributes={"cpf": "body:customer.cpf", "type": "header:kind"},
        message_type="header:kind",
        masked=["cpf"],
    )
    async def bill(message: Message) -> None:
        raise ValueError("invalid cpf 123.456.789-00")

    async with running(app):
        body = b'{"customer": {"cpf": "123.456.789-00"}, "n": 1}'
        await app.publish("orders", body, headers=(("kind", b"OrderPlaced"),))
        [row] = await until_letters(app, 1)
        view = await app.letters.get(row.id)
        assert await letters(app, text="123.456.789") == []
        [same] = await letters(app, attributes={"type": "OrderPlaced"})
        [also] = await letters(app, attributes={"cpf": "123.456.789-00"})
    assert same.id == also.id == row.id
    assert row.message_type == "OrderPlaced"
    assert "123.456" not in repr(view) + repr(row)
    assert view.body is not None
    assert view.body.masked


async def test_a_declared_identity_makes_one_letter_of_two_messages(tmp_path: Path) -> None:
    app = make_app(tmp_path)

    @app.consumer("orders", group="billing", attempts=1, attributes={"event": "body:event_id"}, identity="event")
    async def bill(message: Message) -> None:
        raise ValueError("no")

    async with running(app):
        await app.publish("orders", {"event_id": "e1", "try": 1})
        await app.publish("orders", {"event_id": "e1", "try": 2})
        await app.publish("orders", {"event_id": "e2"})
        await until_letters(app, 2)
        await until_drained(app, "orders.dlq", "redrive-collector")
        assert len(await letters(app)) == 2
        await asyncio.sleep(0)


async def test_attributes_name_run_counts_and_metric_labels(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    counts: list[list[int]] = []

    @app.consumer(
        "tickets",
        group="workers",
        attempts=3,
        backoff=0.02,
        mode="redeliver",
        attributes={"ticket_id": "body:ticket_id", "task_type": "body:task_type"},
        attempts_key="ticket:retry_count:{ticket_id}",
        labels=["task_type"],
    )
    async def work(message: Message) -> None:
        counts.append(await app.parts.attempts.counts(["ticket:retry_count:T1"], app.clock.now()))
        raise ConnectionError("down")

    async with running(app):
        await app.publish("tickets", {"ticket_id": "T1", "task_type": "BUILD"})
        [row] = await until_letters(app, 1)
        await until_drained(app, "tickets", "workers")
        assert await app.parts.attempts.counts(["ticket:retry_count:T1"], app.clock.now()) == [0]
    assert counts == [[0], [1], [2]]
    assert row.attempts == 3
    name, labels = "redrive_letters_by_attribute_total", {"source": "tickets", "group": "workers"}
    value = {**labels, "attribute": "task_type", "value": "BUILD"}
    assert app.metrics.registry.get_sample_value(name, value) == 1
