"""What decisions on residency are based on beside the needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from quiver.digest import Digest
from quiver.residency.commitments import Recipe
from quiver.residency.consumers import U8, Mask
from quiver.residency.eviction import EMPTY_SHELF, OnBehalf, Shelf
from quiver.residency.origin_estimate import OriginEstimate

NOT_KNOWN: Final = OriginEstimate()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Situation:
    """A snapshot of what is held, free and allowed."""

    now: float
    free_bytes: float  # room that is free and not promised to a shard that is coming
    fetches_max: int
    origin: OriginEstimate = NOT_KNOWN
    # What is held; of it, what nobody needs may be evicted. Called only if a wanted shard does not fit.
    shelf: Callable[[], Shelf] = lambda: EMPTY_SHELF
    on_behalf: Mapping[Digest, OnBehalf] = field(default_factory=dict)  # by dataset; others: several
    only: bytes | None = None  # fetch for this consumer alone, if each fetches for itself
    may_not_force: Set[bytes] = frozenset()  # consumers for which no needed shard is evicted
    left_out: Set[Digest] = frozenset()  # datasets of which no more can be fetched for now
    avoid: Set[Recipe] = frozenset()  # recipes that are not fetched for now, nor counted as coming
    # Which of these files ``(n, 32)`` must stay, whoever needs room: an operator wants it.
    pinned: Callable[[U8], Mask] = lambda files: np.zeros(len(files), bool)
    # Bytes that a dataset's needed shards may take at most, by dataset; one that is not named may take all.
    shares: Mapping[Digest, float] = field(default_factory=dict)
    # Bytes of this cache that each dataset should have (``division``). Empty: need alone decides between datasets too.
    division: Mapping[Digest, float] = field(default_factory=dict)
    # Seconds of its part of the origin's bandwidth that a dataset has to its credit, where the origin is the limit.
    credit: Mapping[Digest, float] = field(default_factory=dict)
