"""What the files of this daemon, and those that it is offered, are worth: the inputs of ``quiver.residency.worth``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quiver.digest import Digest
from quiver.lookup import as_rows
from quiver.residency import Needs, Shelf
from quiver.residency.worth import Floats, worth_of
from quiver_cacheserver.residency.rooms import Rooms

PINNED: int = 1  # at least, as if one group needed it


def of_held(needs: Needs, shelf: Shelf) -> Floats:
    """Return what each file of the shelf is worth. Any thread may call it."""
    counts, _ = needs.shown.counted(shelf.digests)
    counts = np.where(shelf.needed > 0, np.maximum(counts, PINNED), counts)
    return worth_of(counts, shelf.needed >= 0, shelf.in_use)


def of_absent(needs: Needs, rooms: Rooms, digests: Sequence[Digest], names: Sequence[Digest]) -> Floats:
    """Return what absent shards are worth to those whom this daemon hears. ``names``: theirs in their domain."""
    shown, files = needs.shown, as_rows(digests)
    counts, known = np.zeros(len(names), np.int64), np.zeros(len(names), bool)
    if len(shown.counts):
        slots: npt.NDArray[np.int64] = shown.shards.rows_of(as_rows(names))
        known = slots >= 0
        counts = np.where(known, shown.counts[slots], 0).astype(np.int64)
    pinned = rooms.pinned_of(files)
    return worth_of(np.where(pinned, np.maximum(counts, PINNED), counts), known | pinned, rooms.in_use_of(files))
