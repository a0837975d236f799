"""Counters for Prometheus. Children are bound once per consumer, so counting costs next to nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

MOST_VALUES = 100
_CONSUMER = ("source", "group", "handler")
_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)


class Metrics:
    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.registry = registry
        self.messages = Counter("redrive_messages", "Runs by outcome", (*_CONSUMER, "outcome"), registry=registry)
        self.seconds = Durations("redrive_handler_seconds", "Time in the handler", registry)
        self.letters = Counter(
            "redrive_letters", "Letters filed", ("source", "group", "reason", "kind"), registry=registry
        )
        self.letters_by_attribute = Counter(
            "redrive_letters_by_attribute",
            "Letters filed, by an attribute the consumer names in `labels`",
            ("source", "group", "attribute", "value"),
            registry=registry,
        )
        self.filing_errors = Counter(
            "redrive_filing_errors", "Attempts to file that failed", ("place", "error_type"), registry=registry
        )
        self.lease_lost = Counter(
            "redrive_leases_lost", "Deliveries that another owner took", _CONSUMER, registry=registry
        )
        self.stuck = Gauge("redrive_stuck_messages", "Messages that no place could file", _CONSUMER, registry=registry)
        self.spooled = Gauge("redrive_spooled_letters", "Letters waiting in the spool", registry=registry)
        self.collected = Counter("redrive_collected", "Letters collected by filing", ("filing",), registry=registry)
        self.replayed = Counter("redrive_replayed", "Copies sent by replays", ("outcome",), registry=registry)

    def consumer(self, source: str, group: str, handler: str) -> ConsumerMetrics:
        return ConsumerMetrics(self, source, group, handler)


class Durations(Collector):
    """A histogram for every consumer. The client's own takes two locks each time, which is most of a message's cost."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name, self._text = name, text
        self._children: dict[tuple[str, ...], Duration] = {}
        registry.register(self)

    def labels(self, *values: str) -> Duration:
        return self._children.setdefault(values, Duration())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=_CONSUMER)
        for values, child in list(self._children.items()):
            bounds = (*map(str, _BOUNDS), "+Inf")
            family.add_metric(values, list(zip(bounds, accumulate(child.counts), strict=True)), child.total)
        yield family


class Duration:
    """One histogram, filled by one event loop, so that it needs no lock."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(_BOUNDS, seconds)] += 1
        self.total += seconds


class ConsumerMetrics:
    """One consumer's counters, bound."""

    def __init__(self, metrics: Metrics, source: str, group: str, handler: str) -> None:
        def outcome(name: str) -> Counter:
            return metrics.messages.labels(source, group, handler, name)

        self.handled = outcome("handled")
        self.failed = outcome("failed")
        self.retried = outcome("retried")
        self.filed = outcome("filed")
        self.recorded = outcome("recorded")
        self.discarded = outcome("discarded")
        self.skipped = outcome("skipped")
        self.held = outcome("held")
        self.seconds = metrics.seconds.labels(source, group, handler)
        self.lease_lost = metrics.lease_lost.labels(source, group, handler)
        self.stuck = metrics.stuck.labels(source, group, handler)
        self._letters, self._source, self._group = metrics.letters, source, group
        self._by_attribute = metrics.letters_by_attribute
        self._values: dict[str, set[str]] = {}

    def letter(self, reason: str, kind: str, attributes: Mapping[str, str]) -> None:
        """Count a letter, and again under each of these attributes; values beyond the first hundred share a label."""
        self._letters.labels(self._source, self._group, reason, kind).inc()
        for name, value in attributes.items():
            known = self._values.setdefault(name, set())
            if len(known) < MOST_VALUES:
                known.add(value)
            label = value if value in known else "(other)"
            self._by_attribute.labels(self._source, self._group, name, label).inc()
