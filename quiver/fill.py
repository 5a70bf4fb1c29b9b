"""Filling: a shard rebuilt from the origin ranges of its samples, as a ``ShardSource``."""

from __future__ import annotations

from typing import Any

import numpy as np

from quiver.digest import Bytes, Digest
from quiver.errors import BadRequest, Changed, NotFound
from quiver.manifest import Manifest
from quiver.origin import SampleOrigin
from quiver.shard import ROW, encode_table, name_of, rotten


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
            raise BadRequest(f"manifest {self._manifest.path}: shard {number} is not named by its samples")
        data = memoryview(np.empty(size_bytes, np.uint8)).cast("B")
        content = data[: size_bytes - len(table)]
        self._origin.read(blobs, content)
        data[len(content) :] = table
        entries: np.ndarray[Any, np.dtype[np.void]] = np.frombuffer(table, ROW, len(blobs))
        bad = rotten(entries, content)
        if bad:
            self._raise_changed(np.asarray(blobs, np.intp)[bad])
        return data

    def _raise_changed(self, blobs: np.ndarray[Any, np.dtype[np.intp]]) -> None:
        first = int(self._manifest.tables.object_of[blobs[0]])
        raise Changed(self._manifest.object_url(first), "changed", self._manifest.keys_of_blobs(blobs))
