"""``allocate``: a policy chooses what to cache and how fast everybody may read; shares and reasons follow.

The same for all policies: pins come first, what room is left is given to the bytes that save their origin most, and
what bandwidth is left is split by weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from quiver.allocation.attained import serve_least_attained
from quiver.allocation.equal_split import equal_cache, equal_rates
from quiver.allocation.fair import raise_together, raise_within
from quiver.allocation.instance import Floats, Instance
from quiver.allocation.knapsack import spread
from quiver.allocation.reasons import reasons
from quiver.allocation.throughput import best_rates, most_throughput
from quiver.allocation.values import Allocation, Policy, Problem, Share

_ROUNDING: Final = 1e-9  # the same rates, computed in another way, may come out as much too high


def allocate(
    problem: Problem, policy: Policy = Policy.MAX_MIN, *, kept: Mapping[str, float] | None = None
) -> Allocation:
    """Return the share of each dataset. Deterministic, whatever the order of the datasets. Raises ``ValueError`` if
    two datasets have one name.

    ``kept``: bytes of the cache by dataset, to be shared so and no otherwise: only the bandwidth is divided anew.
    """
    instance = Instance.of(problem)
    split = equal_cache(instance)
    unlimited = np.where(np.isnan(instance.rate), np.inf, instance.rate)
    floor = equal_rates(instance, split, unlimited)
    full = full_rates(instance, floor)
    if kept is None:
        cached, x = _chosen(instance, policy, split, np.minimum(floor, full), full)
    else:
        cached = np.array([kept.get(name, 0.0) for name in instance.names], dtype=np.float64)
        x = _rates(instance, policy, cached, full)
    resident = {dataset.name: dataset.resident_bytes for dataset in problem.datasets}
    held = np.array([math.inf if (now := resident[name]) is None else max(now, 0.0) for name in instance.names])
    held = np.minimum(cached, held)
    wanted = serve_least_attained(instance, held, full) if policy == Policy.LAS else x
    rates = _bandwidth(instance, held, instance.demand(wanted))
    words = reasons(instance, policy, cached, x, full)
    shares = {
        name: Share(cache_bytes=float(cached[i]), origin_rate=float(rates[i]), reason=words[i])
        for i, name in enumerate(instance.names)
    }
    predicted: dict[tuple[str, str], float] = {}
    known = ~np.isnan(instance.rate) | np.isfinite(floor)
    for place, reader in enumerate(instance.readers):
        key = (instance.names[instance.dataset[place]], reader.name)
        predicted[key] = predicted.get(key, 0.0) + (float(x[place]) if known[place] else 0.0)
    return Allocation(policy=policy, shares=shares, predicted=predicted)


def full_rates(instance: Instance, floor: Floats) -> Floats:
    """Return f* of each reader. One of unknown rate is taken to want what the equal split gives it, and where that is
    no limit, to be as fast as the fastest that is known.
    """
    unknown = np.isnan(instance.rate)
    known = instance.rate[~unknown]
    usual = np.full(len(floor), known.max()) if len(known) else instance.sizes[instance.dataset]
    guess = np.where(np.isfinite(floor) & (floor > 0), floor, usual)
    return np.where(unknown, guess, instance.rate)


def _chosen(instance: Instance, policy: Policy, split: Floats, floor: Floats, full: Floats) -> tuple[Floats, Floats]:
    """Return the bytes cached and the rates of readers."""
    if policy in (Policy.COST, Policy.LAS):
        cached = spread(instance, instance.pinned, instance.demand(full))
        return cached, _rates(instance, policy, cached, full)
    cached, x = _max_min(instance, split, floor, full)
    if policy == Policy.THROUGHPUT:
        return most_throughput(instance, cached, full)
    return cached, x


def _rates(instance: Instance, policy: Policy, cached: Floats, full: Floats) -> Floats:
    """Return the rates of readers where ``cached`` bytes are held, whoever chose them."""
    if policy == Policy.LAS:
        return serve_least_attained(instance, cached, full)
    if policy == Policy.THROUGHPUT:
        return best_rates(instance, cached, full)[0]
    least = equal_rates(instance, cached, full)
    if policy == Policy.MAX_MIN:
        # To split the bandwidth alone equally would give those with little of the cache less than their equal split of
        # both. Where the origins carry that, it is what nobody is below.
        floor = np.minimum(equal_rates(instance, equal_cache(instance), full), full)
        load = instance.by_origin(instance.demand(floor) * instance.missing(cached))
        least = np.where((load <= instance.bandwidth * (1 + _ROUNDING))[instance.reader_origin], floor, least)
    return raise_within(instance, cached, least, full)


def _max_min(instance: Instance, split: Floats, floor: Floats, full: Floats) -> tuple[Floats, Floats]:
    x, cached = raise_together(instance, floor, full)
    if cached is None:
        x, cached = floor, split
    x = raise_within(instance, cached, x, full)
    cached = spread(instance, cached, instance.demand(x))
    return cached, raise_within(instance, cached, x, full)


def _bandwidth(instance: Instance, held: Floats, demand: Floats) -> Floats:
    """Return the origin's bandwidth by dataset: what its misses need, then what is left by weight.

    ``held``: the bytes that are resident now. Where those are less than the share, misses are more for now: if that
    is more than there is, everybody gets the same part of what it needs.
    """
    needed = demand * instance.missing(held)
    bandwidth, origin = instance.bandwidth, instance.origin
    total = instance.by_origin(needed)
    scale = np.divide(bandwidth, total, out=np.ones_like(total), where=total > bandwidth)
    weight = instance.dataset_weight
    weights = instance.by_origin(weight)
    part = np.divide(weight, weights[origin], out=np.zeros_like(weight), where=weight > 0)
    spare = np.where(np.isinf(bandwidth), 0.0, np.maximum(bandwidth - total, 0.0))
    return np.where(np.isinf(bandwidth)[origin], np.inf, needed * scale[origin] + spare[origin] * part)
