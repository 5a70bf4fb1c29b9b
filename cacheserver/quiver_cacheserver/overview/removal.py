"""Evicts a dataset because an operator says so: what no other dataset in use shares.

Files are only unlinked: a process that has one open or mapped keeps it, and a job that reads the dataset misses and
reads again from the origin.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from quiver.digest import Digest
from quiver.domain import Domain
from quiver.lookup import DigestRows
from quiver.store import Kind, MemoryInventory, Store
from quiver.store.files import disk_errors
from quiver_cacheserver.overview.facts import Facts

Mask = npt.NDArray[np.bool_]


def shared_with(facts: Facts, others: Iterable[Facts]) -> Mask:
    """Return which of a dataset's shards ``(n,)`` other datasets have as well."""
    shared = np.zeros(len(facts.shards), bool)
    rows = DigestRows(facts.shards)
    for other in others:
        at = rows.rows_of(other.shards)
        shared[at[at >= 0]] = True
    return shared


def evict(store: Store[MemoryInventory], facts: Facts, keep: Mask, domain: Domain) -> tuple[int, int]:
    """In a thread: have the domain no longer hold a dataset's shards, but for those to ``keep`` ``(n,)``.

    Returns the bytes that it held of either. Raises ``DiskFailed``.
    """
    evicted = kept = 0
    for row, is_kept in zip(facts.shards, keep.tolist(), strict=True):
        digest = Digest(row.tobytes())
        if is_kept:
            kept += store.inventory.size(Kind.SHARD, digest) if store.inventory.has(Kind.SHARD, digest, domain) else 0
            continue
        with disk_errors(store.root):
            evicted += store.leave(Kind.SHARD, digest, domain)
    return evicted, kept
