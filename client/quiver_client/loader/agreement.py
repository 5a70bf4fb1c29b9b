"""Whether the ranks of a job read the same manifest: otherwise their shares of an epoch are of different samples.

The ranks share torch.distributed's key-value store. The first to begin an epoch says there what it reads; each other
one compares, by one request. No rank waits for another, so one that alone reads a dataset, to validate say, waits for
nobody: in a collective it would.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import torch.distributed

from quiver.digest import Digest
from quiver.errors import BadRequest, Misconfigured
from quiver.manifest import Manifest

PREFIX: Final = "quiver/manifest"
_begun: Counter[tuple[int, str]] = Counter()  # passes of this process by epoch and manifest


def compare_manifests(manifest: Manifest, epoch: int, rank: int, world_size: int) -> None:
    """Raise ``Misconfigured`` naming both if a rank began this epoch with another manifest at the same path.

    Only of ranks that are torch.distributed's. Whoever reads from another path may mean another dataset.
    """
    store = _store(rank, world_size)
    if store is None:
        return
    where = str(Digest.of(str(manifest.path).encode()))
    _begun[epoch, where] += 1  # the same epoch may be passed over again, after the manifest was made anew
    key = f"{PREFIX}/{where}/{epoch}/{_begun[epoch, where]}"
    try:
        said = store.compare_set(key, "", f"{manifest.digest} {rank}")  # set if there is none; returns what is there
        theirs, first = (said.decode() if isinstance(said, bytes) else str(said)).split()
        digest = Digest.parse(theirs)
    except (RuntimeError, ValueError, BadRequest):
        return  # a store that is gone, or cannot do this; torch.distributed says so where it matters
    if digest != manifest.digest:
        raise Misconfigured(
            f"{manifest.path} is the manifest {manifest.digest.short} for rank {rank}, and {digest.short} for rank"
            f" {first}: it was indexed again meanwhile, or is another file on another host. Give all ranks the same"
            " file, and make their Dataset anew"
        )


def _store(rank: int, world_size: int) -> Any:
    """Return the store that the ranks share; ``None`` if these are not its ranks, or there is none."""
    distributed = torch.distributed
    if world_size < 2 or not distributed.is_available() or not distributed.is_initialized():
        return None
    if (distributed.get_rank(), distributed.get_world_size()) != (rank, world_size):
        return None
    get_store = getattr(distributed.distributed_c10d, "_get_default_store", None)  # torch has no public name for it
    return get_store() if get_store is not None else None
