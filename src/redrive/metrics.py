"""Counters for Prometheus. Children are bound once per consumer, so counting costs next to nothing."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

_CONSUMER = ("source", "group", "handler")


class Metrics:
    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.registry = registry
        self.messages = Counter("redrive_messages", "Runs by outcome", (*_CONSUMER, "outcome"), registry=registry)
        self.seconds = Histogram("redrive_handler_seconds", "Time in the handler", _CONSUMER, registry=registry)
        self.letters = Counter(
            "redrive_letters", "Letters filed", ("source", "group", "reason", "kind"), registry=registry
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

    def letter(self, reason: str, kind: str) -> None:
        self._letters.labels(self._source, self._group, reason, kind).inc()
