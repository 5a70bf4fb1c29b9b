"""Fills: shards rebuilt from the origin ranges of their samples, as a ``ShardSource``."""

from __future__ import annotations

from typing import Final

import numpy as np

from quiver.digest import Bytes, Digest
from quiver.errors import BadRequest, Changed, Corrupt, NotFound, QuiverError
from quiver.manifest import Manifest
from quiver.origin import SampleOrigin
from quiver.shard import encode_table, name_of, read_table, rotten
from quiver.shard_memory import Take, fresh

LOST_MAX: Final = 64  # samples of one shard: each takes several reads to find


class OriginShards:
    """The shards of one manifest, rebuilt from its origin: the one source that can name lost samples."""

    def __init__(self, manifest: Manifest, origin: SampleOrigin, take: Take = fresh) -> None:
        """``take`` returns memory for a shard: ``ShardMemory.take`` reuses it for consecutive fills."""
        self.name = f"origin {origin.base}"
        self._manifest = manifest
        self._origin = origin
        self._take = take

    def load(self, digest: Digest, size_bytes: int) -> Bytes:
        """Return the shard. Raises ``Changed`` naming objects and samples if the origin no longer has their bytes."""
        number = self._manifest.shard_numbers.get(digest)
        if number is None:
            raise NotFound("the manifest does not list the shard")
        blobs = self._manifest.shard_blobs(number)
        rows = slice(blobs.start, blobs.stop)
        table = encode_table(self._manifest.tables.digests[rows], self._manifest.blob_sizes(rows))
        if name_of(table) != digest:
            raise BadRequest(f"the manifest of {self._origin.base}: shard {number} is not named by its samples")
        data = self._take(size_bytes)
        content = data[: size_bytes - len(table)]
        self._origin.read(blobs, content)
        data[len(content) :] = table
        return data

    def salvage(self, digest: Digest, size_bytes: int) -> Bytes:
        """Return the shard with zeros for the samples that the origin lost; they do not hash to their digests then.

        The others are verified. Raises ``Changed`` if more than ``LOST_MAX`` are lost, or all.
        """
        number = self._manifest.shard_numbers[digest]
        blobs = self._manifest.shard_blobs(number)
        rows = slice(blobs.start, blobs.stop)
        ends = np.concatenate([[0], np.cumsum(self._manifest.blob_sizes(rows), dtype=np.int64)]).tolist()
        data = np.zeros(size_bytes, np.uint8)
        table = encode_table(self._manifest.tables.digests[rows], self._manifest.blob_sizes(rows))
        data[ends[-1] :] = np.frombuffer(table, np.uint8)
        left, lost = [(0, len(blobs))], 0
        while left:
            # Bisect until each lost sample is isolated: everything else is read about once.
            begin, end = left.pop()
            try:
                self._origin.read(blobs[begin:end], data.data[ends[begin] : ends[end]])
            except Changed:
                lost += end - begin == 1
                if lost > LOST_MAX or lost == len(blobs):
                    raise
                data[ends[begin] : ends[end]] = 0
                middle = (begin + end) // 2
                left += [(middle, end), (begin, middle)] if end - begin > 1 else []
        bad = rotten(read_table(digest, data.data, self.name), data.data)
        if len(bad) > LOST_MAX or len(bad) == len(blobs):
            raise self.fault(digest, Corrupt("samples are lost", self.name, bad))
        for position in bad:
            data[ends[position] : ends[position + 1]] = 0
        return data.data

    def mend(self, digest: Digest, partial: Bytes) -> Bytes:
        """Return the whole shard, given a salvaged one, by reading only its lost samples. Raises ``Changed``."""
        first = self._manifest.shard_blobs(self._manifest.shard_numbers[digest]).start
        data = np.frombuffer(partial, np.uint8).copy()
        table = read_table(digest, data.data, self.name)
        ends = np.concatenate([[0], np.cumsum(table["length"], dtype=np.int64)]).tolist()
        for position in rotten(table, data.data):
            self._origin.read([first + position], data.data[ends[position] : ends[position + 1]])
        return data.data

    def fault(self, digest: Digest, error: Corrupt) -> QuiverError:
        """Return ``Changed`` naming object and samples: the origin no longer has what was indexed."""
        first = self._manifest.shard_blobs(self._manifest.shard_numbers[digest]).start
        blobs = np.asarray(error.positions, np.intp) + first
        if not len(blobs):
            return error
        url = self._manifest.object_url(int(self._manifest.tables.object_of[blobs[0]]))
        return Changed(url, "changed", self._manifest.keys_of_blobs(blobs))
