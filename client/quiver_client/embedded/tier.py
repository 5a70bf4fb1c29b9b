"""The host tier without a daemon: a folder that all processes of the machine share, its shards mapped read-only.

Files are immutable and only ever unlinked, so processes can read without coordination. ``filling`` fills missing
shards. If this process may not write to the folder, it reads what is there and fills nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from quiver.errors import Corrupt, DiskFailed, Misconfigured, NotFound, OverCapacity, QuiverError
from quiver.manifest import Manifest
from quiver.origin import SampleOrigin
from quiver.sizes import format_size
from quiver.store import FolderInventory, Store
from quiver_client.batch import Batch, Positions
from quiver_client.buffers import Buffer
from quiver_client.embedded.deciding import FolderDecider
from quiver_client.embedded.filling import FolderFiller
from quiver_client.embedded.mapped_shards import MappedShards
from quiver_client.embedded.origin_reads import OriginReads
from quiver_client.embedded.shared_needs import SharedNeeds
from quiver_client.origin_patience import OriginPatience
from quiver_client.shard_maps import TIDY_SECONDS
from quiver_client.stats import Stats


def check_capacity(manifest: Manifest, root: Path, capacity_bytes: int) -> None:
    """Raise ``Misconfigured`` if a folder of this capacity cannot hold a single shard of the dataset."""
    largest = int(manifest.tables.shard_sizes.max())
    if largest > capacity_bytes:
        raise Misconfigured(
            f"{root}: a capacity of {format_size(capacity_bytes)} is smaller than one shard of {manifest.path}"
            f" ({format_size(largest)}); give it more, or index with a smaller --shard-size"
        )


class EmbeddedTier:
    """Shards in a local folder. One per process and dataset."""

    name = "host"

    def __init__(
        self,
        manifest: Manifest,
        store: Store[FolderInventory],
        origin: Callable[[], SampleOrigin],
        stats: Stats,
        patience: OriginPatience | None = None,
    ) -> None:
        self.store = store
        self.stats = stats
        self._manifest = manifest
        self.needs = SharedNeeds(manifest, store.root)
        self.decider = FolderDecider(manifest, store, self.needs)
        self.origin = OriginReads(manifest, origin, patience or OriginPatience(manifest.header.base, 0.0))
        self._mapped = MappedShards(manifest, store, stats)
        self.filler = FolderFiller(manifest, store, self.origin, self._mapped, self.decider, stats)
        self._tidied = time.monotonic()

    def fetch(self, batch: Batch) -> None:
        self._tidy()
        plan, missing = batch.plan, batch.not_verified()
        shards = plan.by_shard(missing)[0].tolist()
        lost_before = self._mapped.lost
        here = self._mapped.get_all(shards)
        if len(here) < len(shards):
            here.update(self._map_or_fill([shard for shard in shards if shard not in here]))
        batch.put_mapped(self._without_lost(batch, missing, here, lost_before), here)

    def blame(self, batch: Batch, bad: Positions) -> None:
        """Verify whole shards: a wrong one is quarantined, and filled again later."""
        for shard in np.unique(batch.plan.shards[bad]).tolist():
            self._mapped.drop(shard)
            with contextlib.suppress(Corrupt, NotFound, DiskFailed, OverCapacity):
                self.store.check(self._manifest.shard_digest(shard))

    def why(self, shard: int) -> QuiverError | None:
        return self.filler.failures.reason(shard) or self._mapped.loss(shard)

    def close(self) -> None:
        """Unmap everything, and begin no more fills."""
        self.filler.close()
        self._mapped.close()
        self.store.close()

    def _map_or_fill(self, shards: list[int]) -> dict[int, Buffer]:
        """Map those of the shards that are in the folder, and fill the others; return all that are mapped."""
        found: dict[int, Buffer] = {}
        absent: list[int] = []
        for shard in shards:
            buffer = self._mapped.map(shard)
            if buffer is not None:
                found[shard] = buffer
            else:
                absent.append(shard)
        self.stats.add("misses_host", len(absent))
        if absent:
            found.update(self.filler.fill_missing(absent))
        return found

    def _without_lost(
        self, batch: Batch, missing: Positions, here: dict[int, Buffer], before: Mapping[int, Positions]
    ) -> Positions:
        """Return those of the positions that are not lost in a partial shard; try to mend such shards now and then.

        ``before``: what was lost before ``here`` was looked up. Another thread may map a shard again meanwhile; samples
        that are lost in either state are not handed out.
        """
        now = self._mapped.lost
        if not before and not now:
            return missing
        lost_in = [known[shard] for known in (before, now) for shard in here if shard in known]
        if not lost_in:
            return missing
        lost = np.isin(batch.plan.blobs[missing], np.concatenate(lost_in))
        mended = []
        for shard in set(batch.plan.shards[missing[lost]].tolist()):
            loss = self._mapped.loss(shard)
            if loss is not None and self.filler.failures.begin_mending(shard, loss):
                with contextlib.suppress(QuiverError):
                    whole = self.filler.mend(shard)
                    if whole is not None:
                        here[shard] = whole
                        mended.append(shard)
        return missing[~lost | np.isin(batch.plan.shards[missing], mended)]

    def _tidy(self) -> None:
        """Unmap what was evicted, now and then."""
        now = time.monotonic()
        if now - self._tidied >= TIDY_SECONDS:
            self._tidied = now
            self._mapped.drop_evicted()
