"""A problem as arrays, in one order whatever order it was given in, and the model of what reading costs.

Readers of a dataset form *streams*: those that substitute share one, each that reads in a fixed order has its own. A
stream reads as fast as its fastest reader, and a dataset's *demand* D is the sum over its streams. Of it, the part
that is not in the cache comes from the origin: D · (1 − c/d), with c of d bytes cached (SiloD, EuroSys 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quiver.allocation.values import DatasetDemand, Problem, Reader
from quiver.cached import cached_property

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

WEIGHT_RANGE: Final = 1e6  # a weight below a millionth of the largest counts as that: zero means after all others
_NEVER_SLOWER_THAN: Final = 0.01  # an infinite rate is what the origin gives with 99 % cached, at most


@dataclass(frozen=True)
class Instance:
    """Arrays over datasets (n), streams (s), readers (r) and origins (o). Datasets, then readers, are sorted by
    name."""

    capacity: float
    names: tuple[str, ...]
    sizes: Floats  # n
    origins: tuple[str, ...]
    origin: Indices  # n: which origin
    bandwidth: Floats  # o: bytes per second, possibly infinite
    pinned: Floats  # n: bytes that are kept whatever the policy
    readers: tuple[Reader, ...]
    dataset: Indices  # r: which dataset
    stream: Indices  # r: which stream
    stream_start: Indices  # s: its first reader
    stream_dataset: Indices  # s
    rate: Floats  # r: f*; NaN where it is unknown
    weight: Floats  # r
    tenant: Indices  # r: which of ``tenants``
    tenants: tuple[str, ...]
    quota: Floats  # by tenant; infinite where there is none

    @classmethod
    def of(cls, problem: Problem) -> Instance:
        """Arrange a problem. Numbers that mean nothing are replaced: see the functions below."""
        datasets = sorted(problem.datasets, key=lambda dataset: dataset.name)
        if len({dataset.name for dataset in datasets}) < len(datasets):
            raise ValueError("two datasets have the same name; give each its own")
        origins = tuple(sorted({dataset.origin for dataset in datasets}))
        origin_index = {name: index for index, name in enumerate(origins)}
        readers = [
            (index, reader)
            for index, dataset in enumerate(datasets)
            for reader in sorted(dataset.readers, key=lambda reader: (reader.ordered, reader.name, reader.rate))
        ]
        tenants = tuple(sorted({reader.tenant for _, reader in readers}))
        tenant_index = {name: index for index, name in enumerate(tenants)}
        sizes = np.array([_amount(dataset.size_bytes) for dataset in datasets], dtype=np.float64)
        origin = np.array([origin_index[dataset.origin] for dataset in datasets], dtype=np.intp)
        bandwidth = np.array(
            [_bandwidth(problem.origin_rates.get(name, math.inf)) for name in origins], dtype=np.float64
        )
        capacity = _amount(min(problem.capacity_bytes, float(sizes.sum())))  # more room than that changes nothing
        starts, stream = _streams(readers)
        dataset_of = np.array([index for index, _ in readers], dtype=np.intp)
        alone = bandwidth[origin] / np.maximum(1 - _part(np.minimum(capacity, sizes), sizes), _NEVER_SLOWER_THAN)
        return cls(
            capacity=capacity,
            names=tuple(dataset.name for dataset in datasets),
            sizes=sizes,
            origins=origins,
            origin=origin,
            bandwidth=bandwidth,
            pinned=_pinned(datasets, sizes, capacity),
            readers=tuple(reader for _, reader in readers),
            dataset=dataset_of,
            stream=stream,
            stream_start=starts,
            stream_dataset=dataset_of[starts],
            rate=np.array([_rate(reader.rate, alone[index]) for index, reader in readers], dtype=np.float64),
            weight=_weights([problem.weights.get(reader.tenant, 1.0) for _, reader in readers]),
            tenant=np.array([tenant_index[reader.tenant] for _, reader in readers], dtype=np.intp),
            tenants=tenants,
            quota=np.array([_bandwidth(problem.quotas.get(name, math.inf)) for name in tenants], dtype=np.float64),
        )

    @cached_property
    def dataset_weight(self) -> Floats:
        """Return the sum of the weights of each dataset's readers."""
        return total(self.dataset, self.weight, len(self.names))

    @cached_property
    def stream_weight(self) -> Floats:
        return total(self.stream, self.weight, len(self.stream_start))

    @cached_property
    def reader_origin(self) -> Indices:
        return self.origin[self.dataset]

    @cached_property
    def payers(self) -> tuple[tuple[int, ...] | None, ...]:
        """Return the tenants that each dataset may be charged to; None: it is not charged."""
        payers: list[set[int] | None] = [set() for _ in self.names]
        for dataset, tenant in zip(self.dataset.tolist(), self.tenant.tolist(), strict=True):
            known = payers[dataset]
            if np.isinf(self.quota[tenant]):
                payers[dataset] = None
            elif known is not None:
                known.add(tenant)
        return tuple(tuple(sorted(known)) if known else None for known in payers)

    def fastest(self, x: Floats) -> Floats:
        """Return the rate of each stream: that of its fastest reader."""
        return np.maximum.reduceat(x, self.stream_start) if len(x) else x

    def demand(self, x: Floats) -> Floats:
        """Return what readers at rates ``x`` read of each dataset, in bytes per second: D."""
        return total(self.stream_dataset, self.fastest(x), len(self.names))

    def missing(self, cached: Floats) -> Floats:
        """Return the part of each dataset that is not among its ``cached`` bytes."""
        return np.clip(1 - _part(cached, self.sizes), 0.0, 1.0)

    def by_origin(self, values: Floats) -> Floats:
        return total(self.origin, values, len(self.origins))


def total(group: Indices, values: Floats, groups: int) -> Floats:
    """Return the sum of the values of each group."""
    sums: Floats = np.bincount(group, weights=values, minlength=groups).astype(np.float64, copy=False)
    return sums


def _part(bytes_: Floats, sizes: Floats) -> Floats:
    """Return ``bytes_`` of ``sizes``; all, where there is nothing to read."""
    return np.divide(bytes_, sizes, out=np.ones_like(sizes), where=sizes > 0)


def _streams(readers: list[tuple[int, Reader]]) -> tuple[Indices, Indices]:
    starts: list[int] = []
    stream: list[int] = []
    before: tuple[int, bool] | None = None
    for place, (index, reader) in enumerate(readers):
        if reader.ordered or before != (index, False):
            starts.append(place)
        before = (index, reader.ordered)
        stream.append(len(starts) - 1)
    return np.array(starts, dtype=np.intp), np.array(stream, dtype=np.intp)


def _amount(number: float) -> float:
    """Return bytes: what is not a number, or less than nothing, is nothing."""
    return float(number) if number > 0 and math.isfinite(number) else 0.0


def _bandwidth(number: float) -> float:
    """Return a limit: what is not a number is none."""
    return math.inf if math.isnan(number) else max(float(number), 0.0)


def _rate(number: float, alone: float) -> float:
    """Return f*, NaN where it is unknown. An infinite one is what the reader would reach if it were alone."""
    if math.isinf(number) and number > 0:
        return float(alone) if 0 < alone < math.inf else math.nan
    return float(number) if number > 0 else math.nan


def _weights(numbers: list[float]) -> Floats:
    weights = np.array([float(w) if math.isfinite(w) and w >= 0 else 1.0 for w in numbers], dtype=np.float64)
    largest = weights.max(initial=0.0)
    return np.maximum(weights, largest / WEIGHT_RANGE) if largest > 0 else np.ones_like(weights)


def _pinned(datasets: list[DatasetDemand], sizes: Floats, capacity: float) -> Floats:
    """Return the bytes that pins keep: all, or in proportion to the sizes where they are more than there is room
    for."""
    wanted = np.where([dataset.pinned for dataset in datasets], sizes, 0.0) if datasets else sizes
    total = wanted.sum()
    return wanted * (capacity / total) if total > capacity else wanted
