from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive import query
from redrive.errors import BadParameter
from redrive.letter import Kind, State
from redrive.query import Filter, parse


def test_every_filter_can_be_asked_for() -> None:
    asked = [
        ("state", "pending"), ("state", "held"), ("source", "order*"), ("group", "billing"), ("kind", "timeout"),
        ("error_type", "ValueError"), ("handler", "bill"), ("message_type", "placed"), ("attribute", "order:a:b"),
        ("attribute", "user:"), ("text", "no customer"), ("since", "1000"), ("until", "1970-01-01T00:00:02Z"),
    ]  # fmt: skip
    assert parse(asked) == Filter(
        states=(State.PENDING, State.HELD),
        source="order*",
        group="billing",
        kind=Kind.TIMEOUT,
        error_type="ValueError",
        handler="bill",
        message_type="placed",
        attributes={"order": "a:b", "user": ""},
        text="no customer",
        since=1000,
        until=2000,
    )


@pytest.mark.parametrize(
    "text", ["2026-01-31T13:00:00+01:00", "2026-01-31T13:00:00 01:00", "2026-01-31T12:00:00.000Z", "1769860800000"]
)
def test_a_time_may_be_written_in_several_ways(text: str) -> None:
    """The second is what an address with an unescaped + comes to."""
    assert parse([("since", text)]).since == 1769860800000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("state", "PENDING"), ("kind", "boom"), ("since", "yesterday"), ("until", "2026-01-31T12:00:00"),
        ("since", "9" * 40), ("attribute", "order"), ("attribute", ":x"), ("colour", "red"), ("source", ""),
        ("text", "x" * 1001),
    ],
)  # fmt: skip
def test_what_cannot_be_understood_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(BadParameter) as refused:
        parse([(name, text)])
    assert refused.value.parameter == name
    assert str(refused.value).startswith(f"{name}: ")


def test_a_filter_that_cannot_be_repeated_is_refused_twice() -> None:
    with pytest.raises(BadParameter, match="twice"):
        parse([("source", "a"), ("source", "b")])


@given(st.lists(st.tuples(st.sampled_from(query.NAMES), st.text() | st.datetimes().map(str))))
def test_nothing_else_is_ever_raised(asked: list[tuple[str, str]]) -> None:
    with suppress(BadParameter):
        assert isinstance(parse(asked), Filter)
