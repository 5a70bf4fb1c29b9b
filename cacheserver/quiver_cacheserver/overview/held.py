"""What is held of each dataset, and what it saves that shards are stored once. Pure, on arrays.

A shard that several datasets of a domain have in common is stored once. Of k datasets each is counted as saving (k-1)/k
of it, so that what all save adds up to what is really saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from quiver.lookup import DigestRows
from quiver_cacheserver.overview.facts import Facts

K = TypeVar("K")


class Held(NamedTuple):
    """Bytes of a dataset that are held here, and what is saved by storing them once (``DatasetView.saved_bytes``)."""

    resident_bytes: int = 0
    saved_bytes: int = 0


def look(held: npt.NDArray[np.uint8], datasets: Mapping[K, Facts]) -> dict[K, Held]:
    """Return what is held of each dataset of one domain. ``held`` ``(n, 32)``: the digests that the domain holds."""
    if not len(held):
        return dict.fromkeys(datasets, Held())
    rows = DigestRows(held)
    found = {key: rows.rows_of(facts.shards) for key, facts in datasets.items()}
    sharing = np.zeros(len(held), np.int64)
    for at in found.values():
        sharing[at[at >= 0]] += 1  # a dataset has each shard once
    return {key: _held(datasets[key], at, sharing) for key, at in found.items()}


def _held(facts: Facts, at: npt.NDArray[np.int64], sharing: npt.NDArray[np.int64]) -> Held:
    here = at >= 0
    sizes = facts.sizes[here]
    resident = int(sizes.sum())
    others = sharing[at[here]] - 1
    shared = float((sizes * others / (others + 1)).sum())
    repeated = facts.repeated_bytes * resident / max(facts.size_bytes, 1)
    return Held(resident, int(shared + repeated))
