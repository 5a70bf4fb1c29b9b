"""What Prometheus is told of datasets and tenants, by name: with a bound on the number of series.

Counters come from ``usage``, which bounds them. The levels here are of the largest datasets, and of the rest together
under ``other``. A level of the rest is their sum, and a share is weighted by size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from quiver_cacheserver.usage import OTHER, SERIES_MAX, TIERS, ByTier


class Level(NamedTuple):
    """A dataset as one tenant reads it; ``tenant`` is empty for one that nobody reads, or without a tenant's name.

    ``waited``: of its ranks together, a share each.
    """

    dataset: str
    tenant: str
    size_bytes: int
    resident_bytes: int
    saved_bytes: int = 0
    ranks: int = 0
    waited: float = 0.0


class Named:
    """Collects what is told by name, once."""

    def __init__(self, levels: Iterable[Level], used: dict[tuple[str, str], ByTier]) -> None:
        self._levels = bounded(levels)
        self._used = used

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        read = CounterMetricFamily(
            "quiver_dataset_read_bytes",
            "Bytes by tier: passed as files on this host, sent to the rack, read from the origin",
            labels=["dataset", "tenant", "tier"],
        )
        for (dataset, tenant), its in sorted(self._used.items()):
            for tier in TIERS:
                read.add_metric([dataset, tenant, tier], its[tier])
        yield read
        by_dataset = {level.dataset: level for level in self._levels}
        for name, text, values in (
            ("size_bytes", "Bytes of a dataset", {key: it.size_bytes for key, it in by_dataset.items()}),
            ("resident_bytes", "Bytes of it held here", {key: it.resident_bytes for key, it in by_dataset.items()}),
            ("saved_bytes", "Bytes that sharing saves here", {key: it.saved_bytes for key, it in by_dataset.items()}),
        ):
            family = GaugeMetricFamily(f"quiver_dataset_{name}", text, labels=["dataset"])
            for dataset, value in values.items():
                family.add_metric([dataset], value)
            yield family
        resident = GaugeMetricFamily(
            "quiver_dataset_resident_ratio", "Share of a dataset that is held here", labels=["dataset", "tenant"]
        )
        waited = GaugeMetricFamily(
            "quiver_dataset_wait_ratio", "Share of their time that readers waited", labels=["dataset", "tenant"]
        )
        for level in self._levels:
            resident.add_metric([level.dataset, level.tenant], level.resident_bytes / max(level.size_bytes, 1))
            if level.ranks:
                waited.add_metric([level.dataset, level.tenant], level.waited / level.ranks)
        yield resident
        yield waited


def bounded(levels: Iterable[Level], series_max: int = SERIES_MAX) -> list[Level]:
    """Return the levels of the largest, by name, and one of all the others."""
    by_name: dict[tuple[str, str], Level] = {}
    for level in levels:  # two sharing domains may have datasets of one name
        key = level.dataset, level.tenant
        by_name[key] = _sum(by_name[key], level, *key) if key in by_name else level
    ranked = sorted(by_name.values(), key=lambda it: (-it.resident_bytes, -it.size_bytes, it.dataset, it.tenant))
    ranked.sort(key=lambda it: (it.dataset, it.tenant) == (OTHER, ""))  # one that is really called so is among the rest
    shown, rest = ranked[:series_max], ranked[series_max:]
    if rest:
        other = Level(OTHER, "", 0, 0)
        for level in rest:
            other = _sum(other, level, OTHER, "")
        shown.append(other)
    return shown


def _sum(a: Level, b: Level, dataset: str, tenant: str) -> Level:
    return Level(
        dataset,
        tenant,
        a.size_bytes + b.size_bytes,
        a.resident_bytes + b.resident_bytes,
        a.saved_bytes + b.saved_bytes,
        a.ranks + b.ranks,
        a.waited + b.waited,
    )
