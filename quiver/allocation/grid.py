"""For few datasets: the best of many ways to cache, evaluated together, for the policy of most throughput.

The ways are those of a grid over the room, and those that fill one dataset after the other in any order; then room is
moved between two datasets at a time, in smaller and smaller steps. With four datasets that is some thousand ways, in a
few milliseconds.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np

from quiver.allocation.instance import Floats, Indices, Instance, total

DATASETS_MAX: Final = 4
_PARTS: Final = {1: 32, 2: 32, 3: 20, 4: 12}  # of the room, by the number of datasets: up to 1,800 ways
_ROUNDS: Final = 10


@dataclass(frozen=True)
class Steps:
    """The steps in which streams are raised, each from the rate of one of its readers (``low``) to the next (``top``).

    A step raises the reader of that rate and all that are faster: ``gain`` is their weight. So the steps of a stream
    are worth less and less, and to take the most useful first is exact. Sorted by stream.
    """

    stream: Indices
    low: Floats
    top: Floats
    gain: Floats
    dataset: Indices
    origin: Indices

    @classmethod
    def of(cls, instance: Instance, full: Floats) -> Steps:
        order = np.lexsort((full, instance.stream))
        stream, top = instance.stream[order], full[order]
        first = np.ones(len(order), dtype=bool)
        first[1:] = stream[1:] != stream[:-1]
        return cls(
            stream=stream,
            low=np.where(first, 0.0, np.roll(top, 1)),
            top=top,
            gain=_weight_above(instance.weight[order], stream),
            dataset=instance.dataset[order],
            origin=instance.reader_origin[order],
        )


def _weight_above(weight: Floats, stream: Indices) -> Floats:
    """Return the weight of each reader and of those after it in its stream."""
    sums = np.cumsum(weight)
    streams = int(stream[-1]) + 1 if len(stream) else 0
    ends = np.cumsum(total(stream, weight, streams))
    return ends[stream] - sums + weight


def best_of_few(instance: Instance, steps: Steps) -> Floats:
    """Return what to cache for the most throughput. Quotas are not considered."""
    room = instance.sizes - instance.pinned
    free = max(instance.capacity - float(instance.pinned.sum()), 0.0)
    ways = np.vstack((_grid(room, free), _one_after_the_other(room, free)))
    best: Floats = ways[np.argmax(_values(instance, steps, instance.pinned + ways))]
    move = free / _PARTS[len(room)]
    for _ in range(_ROUNDS):
        ways = np.vstack((best, _moved(best, room, free, move)))
        best = ways[np.argmax(_values(instance, steps, instance.pinned + ways))]
        move /= 2
    return instance.pinned + best


def _grid(room: Floats, free: float) -> Floats:
    return np.minimum(_counts(len(room)) * (free / _PARTS[len(room)]), room)


@functools.cache
def _counts(datasets: int) -> Floats:
    """Return the ways to divide the parts, some of which may stay free."""
    parts = _PARTS[datasets]
    ways = np.indices((parts + 1,) * datasets).reshape(datasets, -1).T
    counts: Floats = ways[ways.sum(axis=1) <= parts].astype(np.float64)
    return counts


def _one_after_the_other(room: Floats, free: float) -> Floats:
    ways = []
    for order in itertools.permutations(range(len(room))):
        taken, left = np.zeros_like(room), free
        for dataset in order:
            taken[dataset] = min(room[dataset], left)
            left -= taken[dataset]
        ways.append(taken)
    return np.array(ways)


def _moved(taken: Floats, room: Floats, free: float, most: float) -> Floats:
    """Return ways that differ in up to ``most`` bytes, which one dataset has instead of another, or of nobody."""
    ways = []
    spare = free - float(taken.sum())
    for to, out_of in itertools.permutations(range(-1, len(room)), 2):
        there = float(room[to] - taken[to]) if to >= 0 else most
        here = float(taken[out_of]) if out_of >= 0 else max(spare, 0.0)
        amount = min(most, there, here)
        if amount > 0:
            way = taken.copy()
            if to >= 0:
                way[to] += amount
            if out_of >= 0:
                way[out_of] -= amount
            ways.append(way)
    return np.array(ways).reshape(-1, len(room))


def _values(instance: Instance, steps: Steps, cached: Floats) -> Floats:
    """Return Σ w · x for each row of ``cached``, the bandwidth being divided as well as it can be."""
    sizes = np.maximum(instance.sizes, np.finfo(np.float64).tiny)
    missing = np.where(instance.sizes > 0, np.clip(1 - cached / sizes, 0.0, 1.0), 0.0)
    values = np.zeros(len(cached))
    width = steps.top - steps.low
    for origin, bandwidth in enumerate(instance.bandwidth.tolist()):
        here = np.flatnonzero(steps.origin == origin)
        cost = missing[:, steps.dataset[here]]
        worth = np.divide(steps.gain[here], cost, out=np.full_like(cost, np.inf), where=cost > 0)
        rank = np.argsort(-worth, axis=1, kind="stable")
        needs = np.take_along_axis(width[here] * cost, rank, axis=1)
        free = np.maximum(bandwidth - (np.cumsum(needs, axis=1) - needs), 0.0)
        part = np.clip(np.divide(free, needs, out=np.ones_like(needs), where=needs > 0), 0.0, 1.0)
        values += (part * (steps.gain[here] * width[here])[rank]).sum(axis=1)
    return values
