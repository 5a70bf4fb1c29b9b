"""Which shards of a dataset a cache holds: one request per daemon, and so many shards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import numpy.typing as npt

from quiver.errors import QuiverError
from quiver.manifest import Manifest
from quiver.store import FolderInventory, Kind, Store
from quiver.transport.attempt import Attempt
from quiver.wire import RangeStatus
from quiver_client.rack.members import Members

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

SHARDS_AT_ONCE: Final = 4096  # in one request: a daemon has each one's file open while it answers
MEMBERS_AT_ONCE: Final = 16
ANSWER_SECONDS: Final = 30.0
HELD: Final = (RangeStatus.PRESENT, RangeStatus.FILLING, RangeStatus.FAILED)  # the latter two: not verified yet


def held_by_rack(members: Members, shards: Ints) -> Mask:
    """Return which of these shards some daemon holds that readers would ask for them. One that is away holds none."""
    ranks, urls = members.choices(shards)
    held = np.zeros(len(shards), bool)

    def ask(at: int) -> None:
        mine = np.flatnonzero((ranks == at).any(axis=1))
        for some in np.array_split(mine, max(-(-len(mine) // SHARDS_AT_ONCE), 1)):
            if len(some):
                try:
                    statuses = members.peer(urls[at]).resident(
                        members.digests(shards[some]), Attempt(limit_seconds=ANSWER_SECONDS)
                    )
                except QuiverError:
                    return
                held[some] |= np.isin(statuses, HELD)

    with ThreadPoolExecutor(MEMBERS_AT_ONCE) as pool:
        list(pool.map(ask, range(len(urls))))
    return held


def held_in_folder(store: Store[FolderInventory], manifest: Manifest) -> Mask:
    """Return which shards of a manifest a folder holds ``(shards,)``."""
    held = {file.digest for file in store.inventory.held(Kind.SHARD)}
    return np.fromiter((manifest.shard_digest(at) in held for at in range(manifest.shard_count)), bool)
