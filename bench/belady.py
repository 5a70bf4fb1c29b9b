"""What jobs in fixed orders need of an origin at least, by whatever policy: Belady's question, for shards.

The model: a cache has room for so many bytes of whole shards. A job uses one sample after the other, at known times. A
use costs nothing if its shard is held; else it costs either the sample's bytes, which nobody keeps, or the fetch of the
whole shard. So reading past the cache is allowed, and fetching early as well. For one job that uses each sample once
per epoch the answer is simple: (1 - cached) of the dataset per epoch after the first, and cached of it once, since in
each epoch what the cache saves is at most what it holds when the epoch begins, plus what is fetched in between.

For several jobs ``needed`` gives a lower bound by Lagrangian relaxation: room has a price at each moment, each shard by
itself is held when that is cheapest, and the prices paid for the room that there is are given back. Any prices make a
valid lower bound; subgradient steps raise it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

STEPS: Final = 300
SLICES: Final = 160  # of time: room has one price in each


@dataclass(frozen=True)
class Uses:
    """All uses in the order of time: when ``(n,)``, and of which shard ``(n,)``. One sample each."""

    times: Floats
    shards: Ints

    @classmethod
    def merged(cls, orders: list[Ints], starts: list[float], seconds_per_use: list[float]) -> Uses:
        """``orders``: for each job, the shard of each of its uses."""
        times = [
            start + pace * np.arange(len(order))
            for order, start, pace in zip(orders, starts, seconds_per_use, strict=True)
        ]
        merged = np.concatenate(times)
        by_time = np.argsort(merged, kind="stable")
        return cls(merged[by_time], np.concatenate(orders)[by_time])


def needed(uses: Uses, counts: Ints, room: float, *, slices: int = SLICES, steps: int = STEPS) -> float:
    """Return a lower bound, in samples, of what is read from the origin. ``counts``: samples by shard; ``room`` too.

    The uses of a slice of time count as a whole: a shard is held throughout a slice or not at all, and a fetch is at
    the beginning of one. Room is relaxed in the policy's favour: a shard may be fetched in the slice in which it is
    used, and its uses are saved from the beginning of that slice on. But nothing is replaced within a slice, so it is a
    bound for certain only where each use has a slice of its own. Coarser slices can put it above the least by a little.
    """
    shards = len(counts)
    slice_of = np.minimum((uses.times - uses.times[0]) / np.ptp(uses.times) * slices, slices - 1).astype(np.int64)
    used = np.bincount(slice_of * shards + uses.shards, minlength=slices * shards).reshape(slices, shards)
    sizes = counts.astype(np.float64)
    prices, best, step = np.zeros(slices), 0.0, 1.0
    total = float(used.sum())
    for number in range(steps):
        held, cost = _held(used, sizes, prices)
        bound = cost - float(prices.sum()) * room
        best = max(best, bound)
        excess = held @ sizes - room
        norm = float(excess @ excess)
        if norm == 0:
            break
        step = 0.5 * 0.985**number
        prices = np.maximum(prices + step * max(total * 0.02, best * 0.05) * excess / norm, 0.0)
    return best


def _held(used: Ints, sizes: Floats, prices: Floats) -> tuple[Floats, float]:
    """Return which shards are held in which slice at these prices, ``(slices, shards)``, and what all that costs."""
    slices, shards = used.shape
    out, held = np.zeros(shards), np.full(shards, np.inf)  # the least cost so far, ending out or held
    from_held = np.zeros((slices, shards, 2), bool)
    for at in range(slices):
        rent = prices[at] * sizes
        stay, enter = held, out + sizes
        from_held[at, :, 1] = stay <= enter
        from_held[at, :, 0] = held < out
        held, out = np.minimum(stay, enter) + rent, np.minimum(out, held) + used[at]
    states = np.zeros((slices, shards))
    now_held = held < out
    for at in range(slices - 1, -1, -1):
        states[at] = now_held
        now_held = np.where(now_held, from_held[at, :, 1], from_held[at, :, 0])
    return states, float(np.minimum(held, out).sum())
