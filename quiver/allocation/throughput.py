"""Most throughput in all: Σ w · x as high as it can be.

What is cached being settled, the rates follow exactly: an origin's bandwidth goes where a byte of it moves most
readers most (``best_rates``). Which bytes to cache is then hard in general: with an origin that gives nothing, a
reader gets on only if all of its dataset is cached, and choosing is the 0/1 knapsack. With up to four datasets, and
no quota that binds, thousands of ways are compared (``grid``). Otherwise the search begins from several starts, by
demand saved per byte (as Quiver, FAST 2020, and SiloD, EuroSys 2023), and goes on by what a byte saved at each origin
is worth at the rates reached, as long as that gains. Where the cache lets every origin carry all, it is optimal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from quiver.allocation import grid
from quiver.allocation.charges import Charges
from quiver.allocation.equal_split import equal_rates
from quiver.allocation.fair import share_streams
from quiver.allocation.instance import Floats, Indices, Instance, total
from quiver.allocation.knapsack import spread

SET_ASIDE: Final = 0.01  # of the bandwidth, for an equal split: a loop that gets nothing at all would time out
_STEPS_MAX: Final = 8
SEARCHED_MAX: Final = 8  # datasets: with more, adding them one by one takes too long


def most_throughput(instance: Instance, fair: Floats, full: Floats) -> tuple[Floats, Floats]:
    """Return the bytes cached and the rates. ``fair``: what max-min would cache, one of the starts."""
    best: tuple[float, Floats, Floats] | None = None
    everything = float((instance.weight * full).sum())
    for start in _starts(instance, fair, full):
        if best is not None and best[0] >= everything * (1 - 1e-9):
            break
        cached = start
        for _ in range(_STEPS_MAX):
            x, worth = best_rates(instance, cached, full)
            value = float((instance.weight * x).sum())
            if best is not None and value <= best[0] * (1 + 1e-9):
                break
            best = value, cached, x
            if value >= everything * (1 - 1e-9):
                break
            cached = spread(instance, instance.pinned, worth[instance.origin] * instance.demand(x))
    if best is None:
        return instance.pinned, full
    cached = spread(instance, best[1], instance.demand(best[2]))
    return cached, best_rates(instance, cached, full)[0]


def best_rates(instance: Instance, cached: Floats, full: Floats) -> tuple[Floats, Floats]:
    """Return the rates of most throughput, ``cached`` bytes being held, and what a byte per second more of each
    origin adds.
    """
    missing = instance.missing(cached)
    least = equal_rates(instance, cached, full, part=SET_ASIDE)
    left = instance.bandwidth - instance.by_origin(instance.demand(least) * missing)
    steps = grid.Steps.of(instance, full)
    base = instance.fastest(least)
    width = np.maximum(steps.top - np.maximum(steps.low, base[steps.stream]), 0.0)
    added, marginal = _fill(width, steps.gain, missing[steps.dataset], steps.origin, left)
    level = base + total(steps.stream, added, len(base))
    x = np.maximum(least, np.minimum(full, level[instance.stream]))
    return share_streams(instance, cached, x, full), marginal


def _fill(width: Floats, gain: Floats, cost: Floats, origin: Indices, left: Floats) -> tuple[Floats, Floats]:
    """Return how much of the width of each step there is bandwidth for, and the worth of the best that is left
    out.
    """
    worth = np.divide(gain, cost, out=np.full_like(gain, np.inf), where=cost > 0)
    rank = np.lexsort((np.arange(len(worth)), -worth, origin))
    needs, where = (width * cost)[rank], origin[rank]
    sums = np.cumsum(needs)
    begins = np.concatenate(([0.0], sums))[np.searchsorted(where, np.arange(len(left)))]
    free = np.maximum(left[where] - (sums - needs - begins[where]), 0.0)
    part = np.clip(np.divide(free, needs, out=np.ones_like(needs), where=needs > 0), 0.0, 1.0)
    added = np.empty_like(width)
    added[rank] = part * width[rank]
    marginal = np.zeros(len(left))
    np.maximum.at(marginal, where[part < 1], worth[rank][part < 1])
    return added, marginal


def _starts(instance: Instance, fair: Floats, full: Floats) -> Iterator[Floats]:
    yield fair
    demand = instance.demand(full)
    tight = instance.by_origin(demand * instance.missing(instance.pinned)) > instance.bandwidth
    every = total(instance.dataset, instance.weight * full, len(demand))
    for value in (demand, every):
        yield spread(instance, instance.pinned, value * tight[instance.origin])
    if 0 < len(demand) <= grid.DATASETS_MAX and not Charges.binding(instance):
        yield grid.best_of_few(instance, grid.Steps.of(instance, full))
    elif len(demand) <= SEARCHED_MAX:
        yield _whole_by_whole(instance, full)


def _whole_by_whole(instance: Instance, full: Floats) -> Floats:
    """Return what is cached if dataset by dataset is added, each time the one with which readers gain most per
    byte.
    """
    cached = instance.pinned
    before = _value(instance, cached, full)
    while True:
        best = (0.0, before, cached)
        for dataset in range(len(cached)):
            larger = spread(instance, cached, np.ones_like(cached), only=dataset)
            added = float((larger - cached).sum())
            if added <= 0:
                continue
            value = _value(instance, larger, full)
            if (value - before) / added > best[0]:
                best = ((value - before) / added, value, larger)
        if best[2] is cached:
            return cached
        _, before, cached = best


def _value(instance: Instance, cached: Floats, full: Floats) -> float:
    return float((instance.weight * best_rates(instance, cached, full)[0]).sum())
