"""Which topics a Kafka subscription reads, and where a retry waits. Pure: names in, names out."""

from __future__ import annotations

import pytest

from redrive.brokers._kafka_client import Due, Options, Origin, retry_topic, split_due, wanted, with_due
from redrive.brokers.base import Subscription


@pytest.mark.parametrize(("delay", "seconds"), [(-5, 1), (1000, 1), (1001, 5), (3_600_000, 3600), (10**12, 3600)])
def test_a_delay_is_rounded_up_to_the_next_topic(delay: int, seconds: int) -> None:
    assert Options().bucket(delay) == seconds
    assert Options(retry_seconds=(3600, 1, 5)).bucket(delay) == seconds


def test_a_subscription_reads_its_own_retries_and_nobody_elses() -> None:
    names = ["orders", "orders.g.retry.5s", "orders.h.retry.5s", "orders.g.retry.x", "bills", "__consumer_offsets"]
    assert wanted(Subscription(("orders",), "g"), names) == {
        "orders": Origin("orders"),
        "orders.g.retry.5s": Origin("orders", 5),
    }


def test_a_pattern_finds_no_topic_of_ours_or_of_kafka() -> None:
    names = ["orders", "bills", "bills.dead", "redrive.reports", "__consumer_offsets", "orders.h.retry.5s"]
    found = wanted(Subscription(("*",), "g", exclude=("*.dead",)), names)
    assert set(found) == {"orders", "bills"}


@pytest.mark.parametrize("group", ["g", "a b/c", "x" * 300, "ünï"])
def test_any_group_gets_a_legal_name_that_is_found_again(group: str) -> None:
    name = retry_topic("orders", group, 30)
    assert len(name) <= 249
    assert name.replace(".", "").replace("-", "").replace("_", "").isalnum()
    assert name.isascii()
    assert wanted(Subscription(("orders",), group), ["orders", name])[name] == Origin("orders", 30)


def test_due_times_ride_behind_the_headers_and_come_off_again() -> None:
    headers, due = (("a", None), ("a", b"")), Due(1, 2, "orders", "g")
    assert split_due(with_due(headers, due)) == (headers, due)
    assert split_due(headers) == (headers, None)
