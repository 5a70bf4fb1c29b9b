"""The origin tier: samples read straight from where the user's data lies, with the user's own credentials.

The last tier of every batch. No tier comes after it, so samples that are lost here become an error.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quiver.errors import Changed, Unavailable
from quiver.origin import SampleOrigin
from quiver_client.batch import Batch, Positions
from quiver_client.buffers import Buffer


class OriginTier:
    """Reads what no cache holds. Raises ``Changed``, ``Unavailable`` or ``Forbidden``, naming object and samples."""

    name = "origin"

    def __init__(self, origin: Callable[[], SampleOrigin]) -> None:
        self._origin = origin

    def fetch(self, batch: Batch) -> None:
        plan, missing = batch.plan, batch.not_verified()
        if not len(missing):
            return
        blobs, which = np.unique(plan.blobs[missing], return_inverse=True)
        sizes = plan.manifest.blob_sizes(blobs).astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        data = np.empty(int(starts[-1]), np.uint8).data
        try:
            self._origin().read(blobs.tolist(), data)
        except Changed:
            self._one_by_one(batch, missing, blobs, data)
            raise
        batch.put(missing, Buffer.of(data), starts[which] + batch.inside(missing))

    def blame(self, batch: Batch, bad: Positions) -> None:
        """Raise ``Changed``: the origin's bytes are not what was indexed, and there is no other source."""
        manifest, blobs = batch.plan.manifest, batch.plan.blobs[bad]
        url = manifest.object_url(int(manifest.tables.object_of[blobs[0]]))
        raise Changed(url, "changed", manifest.keys_of_blobs(blobs))

    def close(self) -> None:
        pass

    def _one_by_one(self, batch: Batch, missing: Positions, blobs: Positions, data: memoryview) -> None:
        """Read each sample by itself, and put those that are there. Then raise for the first that is lost: the error
        names it, not its batch."""
        sizes = batch.plan.manifest.blob_sizes(blobs).astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        there = np.zeros(len(blobs), bool)
        lost: Changed | None = None
        for at, blob in enumerate(blobs.tolist()):
            try:
                self._origin().read([blob], data[int(starts[at]) : int(starts[at + 1])])
                there[at] = True
            except Changed as error:
                lost = lost or error
            except Unavailable:  # the caller raises the error that it caught
                break
        which = np.searchsorted(blobs, batch.plan.blobs[missing])
        found = there[which]
        batch.put(missing[found], Buffer.of(data), starts[which[found]] + batch.inside(missing[found]))
        if lost is not None:
            raise lost
