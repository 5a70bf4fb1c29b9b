"""Filling: a shard rebuilt from the origin ranges of its samples, as a ``ShardSource``."""

from __future__ import annotations

import numpy as np

from quiver.digest import Bytes, Digest
from quiver.errors import BadRequest, Changed, Corrupt, NotFound, QuiverError
from quiver.manifest import Manifest
from quiver.origin import SampleOrigin
from quiver.shard import encode_table, name_of


class OriginShards:
    """The shards of one manifest, rebuilt from where its samples lie. The one source that can say what was lost."""

    def __init__(self, manifest: Manifest, origin: SampleOrigin) -> None:
        self.name = f"origin {origin.base}"
        self._manifest = manifest
        self._origin = origin

    def load(self, digest: Digest, size_bytes: int) -> Bytes:
        """Return the shard. Raises ``Changed`` naming objects and samples if the origin no longer has what it had."""
        number = self._manifest.shard_numbers.get(digest)
        if number is None:
            raise NotFound("the manifest does not know the shard")
        blobs = self._manifest.shard_blobs(number)
        rows = slice(blobs.start, blobs.stop)
        table = encode_table(self._manifest.tables.digests[rows], self._manifest.blob_sizes(rows))
        if name_of(table) != digest:
            raise BadRequest(f"the manifest of {self._origin.base}: shard {number} is not named by its samples")
        data = np.empty(size_bytes, np.uint8).data
        content = data[: size_bytes - len(table)]
        self._origin.read(blobs, content)
        data[len(content) :] = table
        return data

    def fault(self, digest: Digest, error: Corrupt) -> QuiverError:
        """Return ``Changed`` naming object and samples: what does not hash to its digest is not what was indexed."""
        first = self._manifest.shard_blobs(self._manifest.shard_numbers[digest]).start
        blobs = np.asarray(error.positions, np.intp) + first
        if not len(blobs):
            return error
        url = self._manifest.object_url(int(self._manifest.tables.object_of[blobs[0]]))
        return Changed(url, "changed", self._manifest.keys_of_blobs(blobs))
