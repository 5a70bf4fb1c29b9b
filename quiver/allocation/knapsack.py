"""Which bytes to cache: those that save most demand per byte first, a fractional knapsack.

A cached byte of a dataset of d bytes that is read at D bytes per second saves D/d bytes per second of its origin,
however many are cached already. So savings are linear, and greedy is exact: ``cover`` finds the fewest bytes with
which origins carry a demand, ``spread`` the bytes that save most of what room is left. Datasets whose bytes save the
same are filled in the same proportion: equals are treated equally, and a trifle does not move a whole dataset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from quiver.allocation.charges import Charges, still_free
from quiver.allocation.instance import Floats, Indices, Instance

_SAME: Final = 1e-9  # densities that differ by less, relatively, are the same


@dataclass(frozen=True)
class Cover:
    """``cached`` bytes by dataset, pinned ones included; ``bytes_`` of them, not pinned, by origin.

    ``uncovered``: by origin, the demand that quotas do not let anyone cover.
    """

    cached: Floats
    bytes_: Floats
    uncovered: Floats


def cover(instance: Instance, demand: Floats, *, even: bool = True) -> Cover:
    """Return the fewest bytes to cache so that every origin carries what is left of ``demand``.

    With quotas and several origins it may take more bytes than the fewest: origins then compete for quotas as well,
    and are served in the order of what their bytes save. ``even=False`` leaves equals unequal, which is faster.
    """
    room = instance.sizes - instance.pinned
    density = _density(instance, demand)
    short = instance.by_origin(demand * instance.missing(instance.pinned)) - instance.bandwidth
    if Charges.binding(instance):
        taken, uncovered = _cover_within_quotas(instance, density, room, short)
    else:
        order = np.lexsort((-density, instance.origin))
        taken = _fill_segments(density[order], room[order], instance.origin[order], short)
        if even:
            taken = _even_out(density[order], room[order], taken, instance.origin[order])
        taken = _unsorted(order, taken)
        uncovered = np.zeros(len(instance.origins))
    return Cover(instance.pinned + taken, instance.by_origin(taken), uncovered)


def spread(instance: Instance, cached: Floats, value: Floats, *, only: int | None = None) -> Floats:
    """Return ``cached`` and, of the room that is left, the bytes of most ``value``.

    ``value``: of each dataset, per second, if all of it is cached. ``only``: leave all datasets but this as they are.
    """
    free = instance.capacity - float(cached.sum())
    room = instance.sizes - cached
    if only is not None:
        room = np.where(np.arange(len(room)) == only, room, 0.0)
    density = _density(instance, value)
    if free <= 0 or not len(room):
        return cached
    order = np.argsort(-density, kind="stable")
    if Charges.binding(instance):
        return cached + _spread_within_quotas(still_free(instance, cached), room, order, free)
    before = np.cumsum(room[order]) - room[order]
    taken = np.clip(free - before, 0.0, room[order])
    return cached + _unsorted(order, _even_out(density[order], room[order], taken))


def _density(instance: Instance, value: Floats) -> Floats:
    return np.divide(value, instance.sizes, out=np.zeros_like(value), where=instance.sizes > 0)


def _unsorted(order: Indices, values: Floats) -> Floats:
    result = np.empty_like(values)
    result[order] = values
    return result


def _fill_segments(density: Floats, room: Floats, origin: Indices, short: Floats) -> Floats:
    """Return the bytes of each dataset, sorted by origin and then density, that together save ``short`` of each
    origin."""
    saves = density * room
    total = np.cumsum(saves)
    first = np.searchsorted(origin, np.arange(len(short)))
    start = np.concatenate(([0.0], total))[first]
    wanted = short[origin] - (total - saves - start[origin])
    return np.clip(np.divide(wanted, saves, out=np.zeros_like(saves), where=saves > 0), 0.0, 1.0) * room


def _even_out(density: Floats, room: Floats, taken: Floats, origin: Indices | None = None) -> Floats:
    """Give datasets of the same density, neighbours in this order, the same part of their room."""
    if len(density) < 2:
        return taken
    begins = np.ones(len(density), dtype=bool)
    begins[1:] = density[1:] < density[:-1] * (1 - _SAME)
    if origin is not None:
        begins[1:] |= origin[1:] != origin[:-1]
    group = np.cumsum(begins) - 1
    rooms, totals = np.bincount(group, weights=room), np.bincount(group, weights=taken)
    part = np.divide(totals, rooms, out=np.zeros_like(totals), where=rooms > 0)
    alone = np.bincount(group)[group] == 1
    return np.where(alone, taken, np.minimum(part[group], 1.0) * room)


def _cover_within_quotas(instance: Instance, density: Floats, room: Floats, short: Floats) -> tuple[Floats, Floats]:
    charges = Charges(instance)
    taken = [0.0] * len(room)
    left = np.maximum(short, 0.0).tolist()
    saved, rooms, origins = density.tolist(), room.tolist(), instance.origin.tolist()
    for dataset in np.argsort(-density, kind="stable").tolist():
        wanted = left[origins[dataset]]
        if wanted > 0 and saved[dataset] > 0:
            taken[dataset] = charges.take(dataset, min(rooms[dataset], wanted / saved[dataset]))
            left[origins[dataset]] = wanted - taken[dataset] * saved[dataset]
    uncovered = np.array(left)
    return np.array(taken), np.where(uncovered > np.maximum(short, 0.0) * _SAME, uncovered, 0.0)


def _spread_within_quotas(charges: Charges, room: Floats, order: Indices, free: float) -> Floats:
    taken = np.zeros_like(room)
    for dataset in order.tolist():
        if free <= 0:
            break
        taken[dataset] = charges.take(dataset, min(float(room[dataset]), free))
        free = max(free - float(taken[dataset]), 0.0)
    return taken
