"""Turns settings into a consumer. What is unset keeps the consumer's own default; what cannot work is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from redrive import attributes, classify, config, retry
from redrive.breaker import BreakerPolicy
from redrive.brokers.base import Abilities
from redrive.classify import Rule
from redrive.config import BreakerSettings, ConsumerSettings
from redrive.consumer import Consumer
from redrive.errors import ConfigError
from redrive.handlers import Handler
from redrive.retry import Backoff, Mode, Policy

_PLAIN = (
    "mode", "timeout", "concurrency", "batch", "dead_letter", "names", "identity", "masked", "labels", "attempts_key",
    "max_replays",
)  # fmt: skip


def declare(
    handler: Handler,
    sources: tuple[str, ...],
    group: str,
    settings: ConsumerSettings,
    rules: tuple[Rule, ...] = (),
    backoff: Backoff | None = None,
) -> Consumer:
    """A consumer from merged settings; `rules` and `backoff` are the code's own, which settings override."""
    plain: dict[str, Any] = {name: getattr(settings, name) for name in _PLAIN}
    consumer = Consumer(
        name=handler.name,
        sources=sources,
        group=group,
        handler=handler,
        policy=_policy(settings, backoff),
        rules=(*classify.rules(**(settings.rules or {})), *rules),
        block=settings.on_exhausted == "block" or settings.enabled is False,
        direct=settings.route == "direct",
        ordered=settings.ordering == "key",
        breaker=_breaker(settings.breaker),
        attributes=attributes.parse_all(settings.attributes or {}),
        message_type=attributes.parse("message_type", settings.message_type) if settings.message_type else None,
        **{name: value for name, value in plain.items() if value is not None},
    )
    _check_attributes(consumer)
    if consumer.ordered:
        _check_order(consumer, settings)
    for source in sources:
        consumer.dead_letter_source(source)
    return consumer


def check_against(consumer: Consumer, can: Abilities) -> None:
    """Refuse settings that this broker cannot honour."""
    if consumer.ordered and not can.order_by_key:
        raise ConfigError(
            "this broker does not keep order by key", key=f"{consumer.name}.ordering", fix="leave ordering out"
        )
    longest = consumer.policy.backoff.longest(consumer.policy.attempts)
    if consumer.mode is Mode.INLINE and can.lease_seconds is not None and longest > can.lease_seconds:
        raise ConfigError(
            f"a back-off of {longest:g} s outlasts the broker's lease of {can.lease_seconds:g} s in mode 'inline'",
            key=f"{consumer.name}.backoff",
            fix="use mode='delayed', a shorter back-off, or a longer lease",
        )


def check_beside(consumer: Consumer, others: Sequence[Consumer]) -> None:
    """Refuse a second consumer of the same name, or one that would take another's messages."""
    for known in others:
        if known.name == consumer.name:
            raise ConfigError("two consumers have this name", key=consumer.name, fix="give one of them name='…'")
        shared = set(known.sources) & set(consumer.sources)
        if known.group == consumer.group and shared:
            raise ConfigError(
                f"{known.name} and {consumer.name} would share the messages of {', '.join(sorted(shared))}",
                key="group",
                fix="give each handler its own group",
            )


def _breaker(settings: BreakerSettings | None) -> BreakerPolicy:
    given = {} if settings is None else {n: getattr(settings, n) for n in settings.__struct_fields__}
    known: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if "counted" in known:
        known["counted"] = frozenset(known["counted"])
    return BreakerPolicy(**known)


def _check_order(consumer: Consumer, settings: ConsumerSettings) -> None:
    """Order by key retries in place and files where every worker sees it at once."""
    if settings.mode not in (None, Mode.INLINE):
        raise ConfigError(
            f"order by key retries in place, not {settings.mode}", key=f"{consumer.name}.mode", fix="leave mode out"
        )
    if not consumer.direct:
        raise ConfigError("order by key needs the store", key=f"{consumer.name}.route", fix="set route = 'direct'")
    if consumer.handler.batch:
        raise ConfigError(
            "order by key runs one message at a time", key=f"{consumer.name}.batch", fix="leave batch out"
        )


def as_backoff(given: Backoff | Sequence[float] | float | None) -> Backoff | None:
    if given is None or isinstance(given, Backoff):
        return given
    return retry.constant(given) if isinstance(given, (int, float)) else retry.delays(given)


def _policy(settings: ConsumerSettings, backoff: Backoff | None) -> Policy:
    if settings.backoff is not None:
        backoff = config.backoff_of(settings.backoff)
    default = Policy()
    return Policy(settings.attempts or default.attempts, backoff or default.backoff, settings.budget)


def _check_attributes(consumer: Consumer) -> None:
    for name in set(consumer.labels) & set(consumer.masked):
        raise ConfigError(f"{name!r} is masked", key=f"{consumer.name}.labels", fix="metrics show labels to everybody")
    wanted = {
        "identity": (consumer.identity,) if consumer.identity else (),
        "masked": consumer.masked,
        "labels": consumer.labels,
        "attempts_key": re.findall(r"\{(.*?)\}", consumer.attempts_key or ""),
    }
    for key, names in wanted.items():
        for name in names:
            if name not in consumer.attributes:
                raise ConfigError(
                    f"{name!r} is no attribute of this source", key=f"{consumer.name}.{key}", fix="add it to attributes"
                )
