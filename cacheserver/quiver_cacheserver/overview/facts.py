"""What stays the same of a manifest, without the manifest: a few dozen bytes per shard are kept in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quiver.manifest import Manifest


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """``shards`` ``(n, 32)`` and their ``sizes`` ``(n,)`` in bytes. ``repeated_bytes``: see ``DatasetView``."""

    name: str  # that the manifest has, "" for none
    samples: int
    repeated_bytes: int
    shards: npt.NDArray[np.uint8]
    sizes: npt.NDArray[np.int64]

    @property
    def size_bytes(self) -> int:
        return int(self.sizes.sum())

    @classmethod
    def of(cls, manifest: Manifest) -> Facts:
        """In a thread: a million samples take milliseconds."""
        tables = manifest.tables
        sizes = manifest.blob_sizes(slice(None)).astype(np.int64)
        repeated = int(sizes[tables.blob_of].sum()) - int(sizes.sum())
        return cls(
            name_of(manifest),
            len(manifest),
            max(repeated, 0),
            np.array(tables.shard_digests),
            tables.shard_sizes.astype(np.int64),
        )


def name_of(manifest: Manifest) -> str:
    """Return the name that is written in a manifest, "" for none."""
    name = getattr(manifest.header, "name", "")
    return name if isinstance(name, str) else ""
