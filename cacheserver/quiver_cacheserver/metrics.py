"""``/metrics``: a node's numbers in the format of Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from quiver.wire import OK, UNCHECKED
from quiver_cacheserver.node import Node


class Collector:
    """Collects a node's numbers whenever Prometheus scrapes them."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        node, counters, access = self._node, self._node.counters, self._node.access.audit
        overloads = counters.overloads + sum(node.budgets.refused.values())
        totals = (
            ("quiver_origin_read_bytes", "Bytes read from origins", counters.origin_read_bytes),
            ("quiver_served_bytes", "Payload bytes sent to readers", counters.served_bytes),
            ("quiver_uploaded_bytes", "Bytes of shards that clients uploaded", counters.uploaded_bytes),
            ("quiver_handed_over_bytes", "Bytes of shards handed over to other members", counters.handed_over_bytes),
            ("quiver_handed_files", "Shard files passed to readers on this host", counters.handed_files),
            ("quiver_overloads", "Requests refused because too many were under way", overloads),
            ("quiver_need_fetches", "Fetches begun because a consumer needs the shard", counters.need_fetches),
            ("quiver_forced_drops", "Shards evicted although a consumer needs them", counters.forced_drops),
            ("quiver_ring_records_ignored", "Ring entries that could not be members", node.registry.ignored_total),
        )
        for name, text, value in totals:
            yield CounterMetricFamily(name, text, value)
        faults = [state for state in node.origins.states.values() if state not in (OK, UNCHECKED)]
        gauges: tuple[tuple[str, str, float], ...] = (
            ("quiver_resident_bytes", "Bytes held or reserved on disk", node.inventory.resident_bytes()),
            ("quiver_capacity_bytes", "Bytes that may be held", node.store.capacity_bytes),
            ("quiver_resident_shards", "Shards held", node.shard_count),
            ("quiver_ring_members", "Members of the ring as this daemon knows it", len(node.registry.ring.members)),
            ("quiver_ring_age_seconds", "Seconds since the ring was last confirmed", node.registry.age_seconds),
            ("quiver_reads_in_flight", "Batched reads being answered", counters.reads_in_flight),
            ("quiver_consumers", "Consumers whose needs are known", node.consumers),
            ("quiver_fills_in_flight", "Shards being filled", node.fills.in_flight),
            ("quiver_disk_writable", "1 while the disk accepts writes", float(node.disk.state == OK)),
            ("quiver_origins_unreadable", "Origins of --origin that cannot be read", len(faults)),
        )
        for name, text, level in gauges:
            yield GaugeMetricFamily(name, text, level)
        yield _labelled("quiver_limit_refusals", "Refusals, by limit", "limit", node.budgets.refused)
        yield _labelled(
            "quiver_connections_closed", "Connections it closed, by reason", "why", counters.connections_closed
        )
        yield _labelled("quiver_refusals", "Requests refused by access control, by reason", "reason", access.refusals)
        yield _labelled("quiver_tls_refusals", "TLS handshakes that failed, by reason", "why", counters.tls_refusals)
        if node.tls is not None:
            left = node.tls.expires_at - time.time()
            yield GaugeMetricFamily("quiver_tls_certificate_left_seconds", "Until its certificate expires", left)
        under_way = GaugeMetricFamily("quiver_under_way", "The amount held of a limited resource", labels=["limit"])
        for what in node.budgets.held_max:
            under_way.add_metric([what], node.budgets.used[what])
        yield under_way
        yield _labelled("quiver_fills", "Shards filled, by source", "source", counters.fills)
        yield _labelled("quiver_fill_failures", "Fills that failed, by error", "error", counters.failures)
        yield _labelled("quiver_corruptions", "Wrong bytes found, by source", "source", counters.corruptions)
        yield _labelled("quiver_read_ranges", "Ranges asked for, by outcome", "status", counters.ranges)


def _labelled(name: str, text: str, label: str, counts: Counter[str]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family
