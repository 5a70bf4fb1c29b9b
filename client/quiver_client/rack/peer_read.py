"""One request for samples to one daemon: which bytes to read of each, and where they go in the batch."""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from quiver.peer import PeerClient
from quiver.plan import Ints
from quiver.wire import RANGE
from quiver_client.batch import Batch, Positions
from quiver_client.buffers import Buffer


class PeerRead(NamedTuple):
    """A request to one daemon: the samples at ``positions`` of a batch, which lie in ``shards[which]``.

    Of each the bytes from ``offsets`` on, ``sizes`` of them, in which the chosen fields begin after ``inside``.
    """

    peer: PeerClient
    positions: Positions
    shards: Ints
    which: Ints
    offsets: Ints
    sizes: Ints
    inside: Ints

    @classmethod
    def of(cls, batch: Batch, peer: PeerClient, positions: Positions, shards: Ints, which: Ints) -> Self:
        """Return the request for these samples.

        Of a daemon that is not authenticated the whole sample is read, since only its BLAKE3 is worth anything.
        """
        plan = batch.plan
        if not batch.wants_whole(trusted=peer.is_authenticated) or not plan.sizes[positions].any():
            nothing = np.zeros(len(positions), np.int64)
            return cls(peer, positions, shards, which, plan.offsets[positions], plan.sizes[positions], nothing)
        inside = batch.inside(positions)
        sizes = plan.manifest.blob_sizes(plan.blobs[positions]).astype(np.int64)
        return cls(peer, positions, shards, which, plan.offsets[positions] - inside, sizes, inside)

    def pieces(self, shards: Ints, which: Ints, cuts: list[Positions]) -> list[Self]:
        """Return the request split at ``cuts``. ``which``: the number of each sample's shard among ``shards``."""
        if len(cuts) == 1:
            return [self]
        parts = []
        for cut in cuts:
            named, of_named = np.unique(which[cut], return_inverse=True)
            extents = self.offsets[cut], self.sizes[cut], self.inside[cut]
            parts.append(type(self)(self.peer, self.positions[cut], shards[named], of_named, *extents))
        return parts

    def ranges(self) -> npt.NDArray[np.void]:
        """Return the ranges of the request: ``wire.RANGE`` ``(n,)``."""
        ranges = np.zeros(len(self.positions), RANGE)
        ranges["shard"], ranges["offset"], ranges["length"] = self.which, self.offsets, self.sizes
        return ranges

    def put(self, batch: Batch, data: npt.NDArray[np.uint8], present: npt.NDArray[np.bool_] | None = None) -> None:
        """Put an answer: the bytes of the samples, or of those that are present, back to back."""
        positions, sizes, inside = self.positions, self.sizes, self.inside
        if present is not None:
            positions, sizes, inside = positions[present], sizes[present], inside[present]
        offsets = np.cumsum(sizes) - sizes + inside
        batch.put(positions, Buffer.of(data), offsets, trusted=self.peer.is_authenticated)
