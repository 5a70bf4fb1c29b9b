"""Why a dataset has the share that it has, in words for operators."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from quiver.allocation.instance import Floats, Indices, Instance
from quiver.allocation.values import Policy
from quiver.sizes import format_decimal, format_rate

_NEARLY: Final = 0.001  # of a whole: not worth a word
_AIMS: Final = {
    Policy.MAX_MIN: "so that the slowest job gets as close to its full speed as possible",
    Policy.THROUGHPUT: "so that all jobs together read most",
    Policy.COST: "so that the origin is read least",
    Policy.LAS: "so that the origin is read least; bandwidth goes to who has been served least",
}


def reasons(instance: Instance, policy: Policy, cached: Floats, x: Floats, full: Floats) -> list[str]:
    """Return a sentence or two for each dataset, whose readers reach ``x`` of the rates ``full``."""
    demand = instance.demand(full)
    density = np.divide(demand, instance.sizes, out=np.zeros_like(demand), where=instance.sizes > 0)
    readers = np.bincount(instance.dataset, minlength=len(demand))
    unknown = np.bincount(instance.dataset[np.isnan(instance.rate)], minlength=len(demand)) > 0
    worst = np.ones(len(demand))
    np.minimum.at(worst, instance.dataset, np.divide(x, full, out=np.ones_like(x), where=full > 0))
    rank = _ranks(density)
    return [
        " ".join(
            (
                _reads(int(readers[i]), bool(unknown[i]), float(demand[i])),
                _keeps(instance, policy, i, float(cached[i]), float(density[i]), int(rank[i])),
                _reaches(instance, i, float(worst[i]), int(readers[i])),
            )
        ).strip()
        for i in range(len(instance.names))
    ]


def _ranks(density: Floats) -> Indices:
    """Return how many datasets save more per byte than each."""
    return np.searchsorted(np.sort(-density), -density, side="left")


def _reads(readers: int, unknown: bool, demand: float) -> str:
    if not readers:
        return "Nobody reads it;"
    if unknown:
        return "How fast it can be read is not known yet, so it counts as an equal share;"
    return f"Reads at most {format_rate(demand)};"


def _keeps(instance: Instance, policy: Policy, i: int, cached: float, density: float, rank: int) -> str:
    size = float(instance.sizes[i])
    whole, none = cached >= size * (1 - _NEARLY), cached <= size * _NEARLY
    how_much = "all of it" if whole else "none of it" if none else f"{format_decimal(cached)} of {format_decimal(size)}"
    if size <= 0:
        return "it holds no bytes."
    if instance.pinned[i] > 0:
        return f"pinned: {how_much} is kept" + ("." if whole else ", which is all there is room for.")
    if density <= 0:
        return f"{how_much} is kept, since {'there is no room left' if none else 'there is room left'}."
    saves = f"a cached GB saves its origin {format_rate(density * 1e9)}"
    if none and rank == 0:
        return f"none of it is kept, though {saves}: there is no room, or no quota left."
    if none:
        return f"none of it is kept: {saves}, and {_others(rank)} {'save' if rank != 1 else 'saves'} more."
    place = "more than any other dataset" if rank == 0 else f"{_others(rank)} {'save' if rank != 1 else 'saves'} more"
    return f"{how_much} is kept, {_AIMS[policy]}: {saves}, {place}."


def _others(rank: int) -> str:
    return "one other dataset" if rank == 1 else f"{rank} other datasets" if rank else "others"


def _reaches(instance: Instance, i: int, worst: float, readers: int) -> str:
    if not readers:
        return ""
    if worst >= 1 - _NEARLY:
        return "Its jobs would run at full speed." if readers > 1 else "Its job would run at full speed."
    bandwidth = format_rate(float(instance.bandwidth[instance.origin[i]]))
    who = "Its slowest job would reach" if readers > 1 else "Its job would reach"
    return (
        f"{who} {math.floor(worst * 100)} % of its full speed: the origin gives {bandwidth} to all that read from it."
    )
