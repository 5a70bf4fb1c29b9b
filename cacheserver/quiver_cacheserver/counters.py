"""What the daemon counted: one set of numbers behind ``/v1/status`` and ``/metrics``. Never a digest, never a path."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from quiver_cacheserver.node import Node


@dataclass(slots=True)
class Counters:
    """Counted since the daemon started. Threads add through ``add`` and ``count``, which do not lose any."""

    origin_read_bytes: int = 0
    served_bytes: int = 0
    uploaded_bytes: int = 0
    reads_in_flight: int = 0
    overloads: int = 0
    # Known labels start at 0, so that a rate can be taken from the first one on.
    fills: Counter[str] = field(default_factory=lambda: Counter(peer=0, origin=0, upload=0))
    failures: Counter[str] = field(default_factory=Counter)  # fills that failed, by error code
    corruptions: Counter[str] = field(default_factory=lambda: Counter(disk=0, peer=0, upload=0, origin=0))
    ranges: Counter[str] = field(default_factory=Counter)  # by status
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, name: str, amount: int) -> None:
        with self._lock:
            setattr(self, name, getattr(self, name) + amount)

    def count(self, name: str, label: str, amount: int = 1) -> None:
        with self._lock:
            getattr(self, name)[label] += amount


class Collector:
    """Shows a node's numbers to Prometheus, read when it asks."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        node, counters = self._node, self._node.counters
        totals = (
            ("quiver_origin_read_bytes", "Bytes read from origins", counters.origin_read_bytes),
            ("quiver_served_bytes", "Payload bytes sent to readers", counters.served_bytes),
            ("quiver_uploaded_bytes", "Bytes of shards that clients put here", counters.uploaded_bytes),
            ("quiver_overloads", "Requests refused because too many were under way", counters.overloads),
            ("quiver_ring_records_ignored", "Ring entries that could not be members", node.registry.ignored_total),
        )
        for name, text, value in totals:
            yield CounterMetricFamily(name, text, value)
        gauges: tuple[tuple[str, str, float], ...] = (
            ("quiver_resident_bytes", "Bytes held or reserved on disk", node.store.inventory.resident_bytes()),
            ("quiver_capacity_bytes", "Bytes that may be held", node.store.capacity_bytes),
            ("quiver_resident_shards", "Shards held", node.shard_count),
            ("quiver_ring_members", "Members of the ring as this daemon knows it", len(node.registry.ring.members)),
            ("quiver_ring_age_seconds", "Age of what is known of the ring", node.registry.age_seconds),
            ("quiver_reads_in_flight", "Batched reads being answered", counters.reads_in_flight),
            ("quiver_fills_in_flight", "Shards being brought in", node.fills.in_flight),
            ("quiver_disk_writable", "1 while the disk takes writes", float(node.disk == "ok")),
        )
        for name, text, level in gauges:
            yield GaugeMetricFamily(name, text, level)
        yield _labelled("quiver_fills", "Shards brought in, by where from", "source", counters.fills)
        yield _labelled("quiver_fill_failures", "Fills that failed, by error", "error", counters.failures)
        yield _labelled("quiver_corruptions", "Wrong bytes found, by who had them", "source", counters.corruptions)
        yield _labelled("quiver_read_ranges", "Ranges asked for, by outcome", "status", counters.ranges)


def _labelled(name: str, text: str, label: str, counts: Counter[str]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family
