"""Max-min: the normalised throughput x/f*, weighted, of the worst off is as high as it can be, then that of the next.

``raise_together`` searches the highest t at which every reader can have clip(t · w · f*, e, f*), with e what it
reaches under the equal split. That a demand can be carried is decided exactly, by the fewest bytes that have to be
cached for it (``knapsack.cover``); so t is optimal. Readers of an origin that cannot go higher stay there and the
others go on. ``raise_within`` does the same for bandwidth alone, where what is cached is settled.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from quiver.allocation.instance import Floats, Instance
from quiver.allocation.knapsack import Cover, cover

_HALVINGS: Final = 44  # to a ten-trillionth of full speed
_ROUNDS_MAX: Final = 32  # each stops at least one origin; the rest of the way is found without moving cached bytes
_ROUNDING: Final = 1e-9  # the equal split itself, recomputed as the fewest bytes, may come out as much too large
_JUMP: Final = 1e-6  # of the capacity: more than this between two rates that differ by rounding is a jump


def raise_together(instance: Instance, floor: Floats, full: Floats) -> tuple[Floats, Floats | None]:
    """Return the rates of readers, and the bytes cached for them; None if not even ``floor`` is known to fit.

    Several origins compete for the cache. Where one is dead, its readers need all of their dataset or read nothing:
    such an origin is left at its floor if there is no room for all of them, and holds nobody else back.
    """
    free = instance.capacity - float(instance.pinned.sum())
    held = floor
    active = np.ones(len(floor), dtype=bool)

    def at(t: float) -> Floats:
        return np.where(active, np.minimum(full, np.maximum(floor, t * instance.weight * full)), held)

    for _ in range(_ROUNDS_MAX):
        low, high = 0.0, float((1 / instance.weight[active]).max(initial=0.0))
        if _fits(_quick(instance, at(high)), free):
            held = at(high)
            break
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if _fits(_quick(instance, at(middle)), free):
                low = middle
            else:
                high = middle
        stopped, exhausted = _stopped(_quick(instance, at(low)), _quick(instance, at(high)), free)
        held = at(low)
        active &= ~stopped[instance.reader_origin]
        if exhausted or not active.any():
            break
    found = cover(instance, instance.demand(held))
    if found.uncovered.any() or float(found.bytes_.sum()) > free * (1 + _ROUNDING):
        return held, None
    taken = found.cached - instance.pinned
    return held, instance.pinned + taken * min(1.0, free / max(float(taken.sum()), 1e-300))


def raise_within(instance: Instance, cached: Floats, x: Floats, full: Floats) -> Floats:
    """Return the rates, none below ``x``, that the origins carry where ``cached`` bytes are held."""
    if not len(x):
        return x
    missing = instance.missing(cached)
    origin = instance.reader_origin
    speed = instance.weight * full

    def at(t: Floats) -> Floats:
        return np.minimum(full, np.maximum(x, t[origin] * speed))

    def load(t: Floats) -> Floats:
        return instance.by_origin(instance.demand(at(t)) * missing)

    low = np.zeros(len(instance.origins))
    high = np.zeros(len(instance.origins))
    np.maximum.at(high, origin, 1 / instance.weight)
    whole, top = load(high) <= instance.bandwidth, high
    for _ in range(0 if whole.all() else _HALVINGS):
        middle = (low + high) / 2
        good = load(middle) <= instance.bandwidth
        low, high = np.where(good, middle, low), np.where(good, high, middle)
    return share_streams(instance, cached, at(np.where(whole, top, low)), full)


def share_streams(instance: Instance, cached: Floats, x: Floats, full: Floats) -> Floats:
    """Return the rates with what costs no origin anything: all of a dataset that is cached, and the pace of a
    stream."""
    if not len(x):
        return x
    x = np.where((instance.missing(cached) <= 0)[instance.dataset], full, x)
    return np.maximum(x, np.minimum(full, instance.fastest(x)[instance.stream]))


def _quick(instance: Instance, x: Floats) -> Cover:
    return cover(instance, instance.demand(x), even=False)


def _fits(found: Cover, free: float) -> bool:
    return not found.uncovered.any() and float(found.bytes_.sum()) <= free


def _stopped(low: Cover, high: Cover, free: float) -> tuple[np.ndarray, bool]:
    """Return which origins cannot go beyond the rates of ``low``, and whether the cache is what stops them.

    ``high`` is what rates need that are higher by rounding and do not fit.
    """
    if high.uncovered.any():
        return high.uncovered > 0, False
    grown = high.bytes_ - low.bytes_
    jumps = grown > _JUMP * max(free, 0.0)
    if jumps.any():
        over = float(high.bytes_.sum()) - free
        stopped = np.zeros(len(grown), dtype=bool)
        for origin in np.argsort(-grown, kind="stable").tolist():  # the largest first, until the others fit
            if over <= free * _ROUNDING or not jumps[origin]:
                break
            stopped[origin] = True
            over -= float(grown[origin])
        if stopped.any():
            return stopped, False
    return grown > 0, True
