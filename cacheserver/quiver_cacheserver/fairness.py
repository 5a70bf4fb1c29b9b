"""What is evicted when room is wanted: pure functions.

Recency is a bad guide under epochs: with a dataset larger than the cache, least-recently-used drops every shard just
before it is read again. So what is needed is never dropped for something else; the newcomer is refused and read from
the origin instead. What is needed is what jobs report (``quiver.need``). Of a dataset that nobody reports on, which a
stock loader reads, all is taken to be needed until it was not read for ``IDLE_SECONDS``.

A daemon serves many, and anybody can have shards filled. So it knows for whom each was filled (its *holder*),
and one holder pushes out what is another's only as far as it holds less than that one, or after ``KEPT_SECONDS``: by
reading junk nobody comes to more than what the others keep. That a dataset is in use stops only those who hold more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from quiver.digest import Digest
from quiver.residency import StoredFile

IDLE_SECONDS: Final = 60.0  # longer than the pause between two epochs' reads, shorter than anyone waits for room
KEPT_SECONDS: Final = 600.0  # for which what nobody needs is kept from one who holds more: a validation, a restart
SHARED: Final = 0  # the holder of what several read, and of what was here before the daemon started


class _Gone(NamedTuple):
    """A thing on disk: how large it is and when it was last read (seconds on the caller's clock)."""

    digest: Digest
    size_bytes: int
    used: float


def choose_victims(
    held: Iterable[StoredFile], free_bytes: int, needed: Callable[[Digest], bool | None], now: float
) -> list[StoredFile] | None:
    """Return what to drop so that ``free_bytes`` become free, idle the longest first; ``None`` if that cannot be.

    ``needed`` says whether somebody needs it, and ``None`` where nobody said: then being idle decides.
    """
    if free_bytes <= 0:
        return []
    victims = []
    for item in sorted(held, key=lambda item: item.used):
        need = needed(item.digest)
        if need or (need is None and now - item.used < IDLE_SECONDS):
            continue
        victims.append(item)
        free_bytes -= item.size_bytes
        if free_bytes <= 0:
            return victims
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Shelf:
    """All shards that a daemon holds, ``(n,)`` each."""

    sizes: npt.NDArray[np.int64]  # bytes
    idle: npt.NDArray[np.float64]  # seconds since it was read
    needed: npt.NDArray[np.int8]  # 1: somebody needs it, 0: nobody does, -1: nobody said
    in_use: npt.NDArray[np.bool_]  # of a dataset that was read of late
    holders: npt.NDArray[np.int64]  # a number for each holder, ``SHARED`` for all together


def choose_fairly(shelf: Shelf, free_bytes: int, holder: int | None) -> list[int] | None:
    """Return the positions of what to drop on behalf of a holder; ``None`` if room cannot be made so.

    ``holder`` is None for what many want, which all give way to. First what nobody needs goes, idle the longest first;
    then what only its dataset's use keeps, of whoever holds most.
    """
    nobody = (shelf.needed == 0) | ((shelf.needed < 0) & ~shelf.in_use & (shelf.idle >= IDLE_SECONDS))
    kept_by_use = (shelf.needed < 0) & ~nobody
    order = np.argsort(-shelf.idle, kind="stable")
    distinct, which = np.unique(shelf.holders, return_inverse=True)
    sums = np.zeros(len(distinct), np.int64)
    np.add.at(sums, which, shelf.sizes)
    held = dict(zip(distinct.tolist(), sums.tolist(), strict=True))
    mine = held.get(holder, 0) if holder is not None else 0
    chosen: list[int] = []
    rounds = [(nobody, False)] if holder is None else [(nobody, False), (kept_by_use, True)]
    for candidates, strictly in rounds:
        for at in order[candidates[order]].tolist():
            if free_bytes <= 0:
                return chosen
            whose, size = int(shelf.holders[at]), int(shelf.sizes[at])
            if holder is not None and whose != holder:
                # What came for this one instead counts as its own already.
                less = mine + size <= held[whose] - size
                if strictly and (whose == SHARED or not less):
                    continue
                if not less and shelf.idle[at] < KEPT_SECONDS:
                    continue
                mine += size
            elif strictly:
                continue  # its own dataset in use: to drop it for another of its own would be to thrash
            held[whose] -= size
            free_bytes -= size
            chosen.append(at)
    return chosen if free_bytes <= 0 else None
