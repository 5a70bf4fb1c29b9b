"""What a shard is worth to its rack, and which shards may be evicted for one that another daemon hands over. Pure.

A shard that groups of consumers report to need is worth their number. If nobody reports on its dataset and a stock
loader reads it, it is worth something less than a reported need (``IN_USE``). Anything else is worth nothing: it is
kept where there is room, for the next epoch, and nothing is evicted for it.

A drain makes the rack smaller. What is handed over then competes with what is held, and of both the less needed ones
must go. So a shard is evicted only for one that is worth *more*: never for an equal one, since one read of the origin
is as good as the other, and two draining daemons would make receivers exchange shards back and forth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

IN_USE: Final = 0.5

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class Offered(NamedTuple):
    """A shard that another daemon hands over."""

    size_bytes: int
    worth: float


def worth_of(counts: Ints, known: Mask, in_use: Mask) -> Floats:
    """Return what files ``(n,)`` are worth.

    ``counts``: how many groups need each; ``known``: whether anybody reports on its dataset; ``in_use``: whether its
    dataset was read recently.
    """
    worth: Floats = np.where(known, counts.astype(np.float64), np.where(in_use, IN_USE, 0.0))
    return worth


def most_needed_first(worth: Floats, idle: Floats) -> Ints:
    """Return positions by decreasing worth; of equal ones those first that were read last."""
    return np.lexsort((idle, -worth))


def rooms_for(
    offered: Sequence[Offered], free_bytes: float, sizes: Ints, worth: Floats, idle: Floats
) -> list[Ints | None]:
    """Decide on a room for each offered shard, in their order: what to evict for it; ``None`` if it gets no room.

    ``sizes``, ``worth`` and ``idle`` ``(n,)``: of the held files that may be evicted at all; results are positions in
    them, the least worth first and of equal ones the longest idle first. Each file is evicted for one shard at most.
    What its evictions free beyond a shard's own size is not given to the next one, which may be written first.
    """
    order = np.lexsort((-idle, worth))
    in_order, of_worth = sizes[order].tolist(), worth[order].tolist()
    taken, rooms = 0, list[Ints | None]()
    free_bytes = max(free_bytes, 0.0)
    for shard in offered:
        lacking_bytes, end = shard.size_bytes - free_bytes, taken
        while lacking_bytes > 0 and end < len(in_order) and of_worth[end] < shard.worth:
            lacking_bytes -= in_order[end]
            end += 1
        if lacking_bytes > 0:
            rooms.append(None)
            continue
        free_bytes -= min(free_bytes, shard.size_bytes)
        rooms.append(order[taken:end])
        taken = end
    return rooms
