"""The weighted equal split of the cache and of each origin's bandwidth: what nobody is worse off than, under max-min.

Each reader has a slice in proportion to its weight, of the cache that no pin takes and of its origin's bandwidth.
Readers of a dataset put their slices of the cache together, and those of a stream their bandwidth. What one cannot
use, since the dataset is smaller or its readers are slower, is divided among the others (water-filling).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quiver.allocation.instance import Floats, Instance, total

_HALVINGS: Final = 100  # to the last bit, however unequal the weights are


def equal_cache(instance: Instance) -> Floats:
    """Return the bytes of each dataset, pinned ones included. A slice counts against its reader's quota."""
    if not len(instance.weight):
        return instance.pinned
    weight, dataset, tenant = instance.weight, instance.dataset, instance.tenant
    room = instance.sizes - instance.pinned
    # Above this level, a reader's slice would be more than its part of the dataset.
    useful = (room[dataset] / instance.dataset_weight[dataset]).astype(np.float64)
    paid = total(tenant, instance.pinned[dataset] * weight / instance.dataset_weight[dataset], len(instance.tenants))
    quota = np.maximum(instance.quota - paid, 0.0)

    def charged(level: Floats) -> Floats:
        return total(tenant, weight * np.minimum(level[tenant], useful), len(quota))

    top = float(useful.max())
    by_tenant = _highest(lambda level: charged(level) <= quota, np.full(len(quota), top))
    useful = np.minimum(useful, by_tenant[tenant])
    free = max(instance.capacity - float(instance.pinned.sum()), 0.0)
    level = _highest(lambda level: np.array([(weight * np.minimum(level, useful)).sum() <= free]), np.array([top]))
    slices = weight * np.minimum(level[0], useful)
    return instance.pinned + np.minimum(total(dataset, slices, len(room)), room)


def equal_rates(instance: Instance, cached: Floats, limit: Floats, *, part: float = 1.0) -> Floats:
    """Return the rate of each reader where ``cached`` bytes are held and ``part`` of each origin's bandwidth is
    split.

    ``limit``: the rate that each can use, possibly infinite; the result is infinite where nothing else limits it.
    """
    if not len(limit):
        return limit
    missing = instance.missing(cached)[instance.stream_dataset]
    origin, weight = instance.origin[instance.stream_dataset], instance.stream_weight
    fastest = instance.fastest(limit)
    needed = np.multiply(fastest, missing, out=np.zeros_like(missing), where=missing > 0)
    lightest = np.full(len(instance.origins), np.inf)
    np.minimum.at(lightest, origin, weight)

    def load(level: Floats) -> Floats:
        used = np.minimum(needed, level[origin] * weight)
        return total(origin, used, len(level))

    bandwidth = instance.bandwidth * part
    ample = total(origin, needed, len(instance.origins)) <= bandwidth
    top = np.where(ample, 0.0, np.divide(bandwidth, lightest, where=~ample, out=np.zeros_like(lightest)))
    level = np.where(ample, np.inf, _highest(lambda level: load(level) <= bandwidth, top))
    given = level[origin] * weight
    speed = np.divide(given, missing, out=np.full_like(given, np.inf), where=(missing > 0) & (given < needed))
    return np.minimum(limit, speed[instance.stream])


def _highest(fits: Callable[[Floats], NDArray[np.bool_]], top: Floats) -> Floats:
    """Return, for each element, the highest level up to ``top`` that ``fits``; levels that fit are an interval from
    0."""
    low, high = np.zeros_like(top), top
    whole = fits(top)
    if whole.all():
        return top
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if ((middle == low) | (middle == high) | whole).all():
            break
        good = fits(middle)
        low, high = np.where(good, middle, low), np.where(good, high, middle)
    return np.where(whole, top, low)
