"""The shards of one dataset that this process has mapped from the folder, and which samples are lost in partial ones.

Invariant: a map is of a file of the shard's exact size, or of a partial shard whose lost samples are in ``lost``. The
content is not verified here: every batch is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from quiver import forks
from quiver.errors import Changed, Corrupt, DiskFailed, NotFound, OverCapacity
from quiver.manifest import Manifest
from quiver.shard import read_table, rotten
from quiver.store import FolderInventory, Kind, Store
from quiver.store.inventory import file_of
from quiver_client.batch import Positions
from quiver_client.buffers import Buffer
from quiver_client.shard_maps import ShardMaps
from quiver_client.stats import Stats


class _File(NamedTuple):
    """Identifies a mapped file: a shard that was evicted and filled again is another file of the same name."""

    path: str
    inode: int  # 0: there was no file

    @classmethod
    def at(cls, path: str) -> _File:
        try:
            return cls(path, os.lstat(path).st_ino)
        except OSError:
            return cls(path, 0)

    def exists(self) -> bool:
        return self.inode != 0 and self == _File.at(self.path)


class MappedShards:
    """Maps of whole files, by shard number. Safe from threads."""

    def __init__(self, manifest: Manifest, store: Store[FolderInventory], stats: Stats) -> None:
        self._manifest = manifest
        self._store = store
        self._stats = stats
        self._maps: ShardMaps[_File] = ShardMaps()
        self._lock = forks.lock()  # for changing ``_lost``
        self._lost: dict[int, Positions] = {}

    def __len__(self) -> int:
        return len(self._maps)

    def __contains__(self, shard: int) -> bool:
        return shard in self._maps

    @property
    def lost(self) -> Mapping[int, Positions]:
        """The blobs that are lost, by partial shard. Replaced, never changed, so that it may be kept and compared."""
        return self._lost

    def get_all(self, shards: Iterable[int]) -> dict[int, Buffer]:
        """Return those of the shards that are mapped."""
        return self._maps.get_all(shards)

    def get(self, shard: int) -> Buffer | None:
        return self._maps.get(shard)

    def map(self, shard: int) -> Buffer | None:
        """Map the file that the folder has now under a shard's name, in place of an earlier map; ``None``: it has none.

        A partial shard is mapped where there is no whole one.
        """
        digest = self._manifest.shard_digest(shard)
        file = _File.at(str(file_of(self._store.root, Kind.SHARD, digest)))  # first: a map of an older file is dropped
        try:
            view = self._store.map_file(Kind.SHARD, digest)
        except NotFound:
            return self._map_partial(shard)
        except (DiskFailed, OverCapacity) as error:
            self._stats.warn("disk", f"{error}; meanwhile shards that are not mapped are read from the origin")
            return None
        if len(view) != self._manifest.tables.shard_sizes[shard]:
            self._stats.add("corruptions")
            self._store.quarantine(Kind.SHARD, digest)
            return None
        buffer = self._maps.put(shard, view, file)
        self._set_lost(shard, None)  # last: no thread may find the partial map without knowing what is lost in it
        return buffer

    def drop(self, shard: int) -> None:
        """Unmap a shard."""
        self._maps.drop(shard)

    def drop_evicted(self) -> None:
        """Unmap the shards whose files were evicted: until then their room is not free. Marks used shards as read."""
        for shard, file in self._mark_used():
            if not file.exists():
                self._maps.drop(shard, file)

    def close(self) -> None:
        """Unmap everything."""
        self._mark_used()
        self._maps.clear()

    def loss(self, shard: int) -> Changed | None:
        """Return what is lost in a partial shard as an error that names object and samples."""
        blobs = self._lost.get(shard)
        if blobs is None:
            return None
        url = self._manifest.object_url(int(self._manifest.tables.object_of[blobs[0]]))
        return Changed(url, "was lost or changed", self._manifest.keys_of_blobs(blobs))

    def _map_partial(self, shard: int) -> Buffer | None:
        """Map a shard some of whose samples the origin lost: those that do not hash to their digest."""
        digest = self._manifest.shard_digest(shard)
        file = _File.at(str(file_of(self._store.root, Kind.PARTIAL, digest)))
        if not file.inode:
            return None
        try:
            view = self._store.map_file(Kind.PARTIAL, digest)
            lost = rotten(read_table(digest, view, self._store.name), view)
        except NotFound:
            return None
        except (Corrupt, DiskFailed, OverCapacity):
            self._store.drop(Kind.PARTIAL, digest)
            return None
        self._set_lost(shard, np.asarray(lost, np.int64) + self._manifest.shard_blobs(shard).start)
        return self._maps.put(shard, view, file)

    def _set_lost(self, shard: int, blobs: Positions | None) -> None:
        if blobs is None and shard not in self._lost:
            return
        with self._lock:
            lost = dict(self._lost)
            if blobs is None:
                lost.pop(shard, None)
            else:
                lost[shard] = blobs
            self._lost = lost

    def _mark_used(self) -> list[tuple[int, _File]]:
        """Mark in the folder which shards were used since the last call: the least recently read are evicted first."""
        mapped = []
        for shard, file, used in self._maps.mapped():
            if used:
                kind = Kind.PARTIAL if shard in self._lost else Kind.SHARD
                self._store.inventory.touched(kind, self._manifest.shard_digest(shard))
            mapped.append((shard, file))
        return mapped
