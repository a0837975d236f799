from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.attributes import VALUE_LIMIT, Attribute, extract, parse, parse_all
from redrive.errors import ConfigError
from redrive.message import Headers, Message

ORDER = b'{"order": {"id": 42, "lines": [{"sku": "a"}, {"sku": "b"}], "paid": true, "note": null}, "type": "placed"}'


def message(body: bytes | None = ORDER, key: bytes | None = b"k-1", headers: Headers = ()) -> Message:
    return Message("embedded", "orders", 0, "7", 1, key, body, headers)


def value(spec: str, given_message: Message) -> str | None:
    return extract(given_message, {"x": parse("x", spec)}).get("x")


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ("body:order.id", "42"),
        ("body:type", "placed"),
        ("body:order.lines.1.sku", "b"),
        ("body:order.paid", "true"),
        ("body:order.lines.0", '{"sku":"a"}'),
        ("body:order.note", None),
        ("body:order.lines.9.sku", None),
        ("body:order.lines.first", None),
        ("body:order.id.deeper", None),
        ("body:missing", None),
        ("header:x-type", "second"),
        ("header:x-null", None),
        ("header:missing", None),
        ("key", "k-1"),
        ("const:eu", "eu"),
        ("const:a:b", "a:b"),
    ],
)
def test_a_value_is_found_or_absent(spec: str, found: str | None) -> None:
    assert value(spec, message(headers=(("x-type", b"first"), ("x-type", b"second"), ("x-null", None)))) == found


def test_several_values_come_from_one_message() -> None:
    wanted = parse_all({"order_id": "body:order.id", "tenant": "header:t", "region": "const:eu"})
    assert extract(message(), wanted) == {"order_id": "42", "region": "eu"}


@pytest.mark.parametrize(
    "body",
    [None, b"", b"{", b"\xff\xfe", b"[" * 200_000, b'{"a":' * 100_000, b"1e999", b'"\\ud800"', b'{"a": "\\u0000"}',
     b"null", b"9" * 5000, b'{"a": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_a_body_nobody_can_read_has_no_values_and_no_error(body: bytes | None) -> None:
    found = extract(message(body), parse_all({"a": "body:a", "deep": "body:a.a.0.b", "key": "key"}))
    assert found["key"] == "k-1"
    assert "\0" not in "".join(found.values())


def test_a_body_too_large_to_search_is_not_searched() -> None:
    assert value("body:a", message(b'{"a": "' + b"x" * 2_000_000 + b'"}')) is None


def test_values_are_cut_and_always_text() -> None:
    long = value("key", message(key=b"\xf0\x9f" * 10_000))
    assert long is not None
    assert len(long) == VALUE_LIMIT
    assert value("key", message(key=b"a\0\xff")) == "a?�"
    assert value("key", message(key=b"")) == ""
    assert value("key", message(key=None)) is None


WHERE = st.sampled_from(["body", "header", "const", "key"])


@given(
    st.none() | st.binary() | st.recursive(st.integers() | st.text(), st.lists).map(lambda v: repr(v).encode()),
    st.none() | st.binary(),
    st.lists(st.tuples(st.text(), st.none() | st.binary())).map(tuple),
    st.dictionaries(st.text(), st.builds(Attribute, WHERE, st.text())),
)
def test_extraction_never_raises_and_gives_bounded_text(
    body: bytes | None, key: bytes | None, headers: Headers, wanted: dict[str, Attribute]
) -> None:
    for name, found in extract(message(body, key, headers), wanted).items():
        assert name in wanted
        assert len(found.encode()) <= VALUE_LIMIT * 4


@pytest.mark.parametrize("spec", ["", "body", "body:", "bdy:x", "key:x", "header", "const:", "order.id"])
def test_a_spec_nobody_can_read_is_refused_by_name(spec: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse("order_id", spec)
    assert caught.value.key == "attributes.order_id"
    assert "body:" in caught.value.fix
