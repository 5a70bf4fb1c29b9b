"""What a dataset's ``repr`` says of its size: samples, shards and bytes, from the manifest's arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quiver.manifest import Manifest
from quiver.sizes import format_size


def summary(manifest: Manifest, rows: npt.NDArray[np.int64] | None) -> str:
    """Return the samples, shards and bytes of a manifest, or of some rows of it; equal samples count once."""
    samples, shards = len(manifest), manifest.shard_count
    if rows is None:
        return f"{samples} samples, {shards} shards, {format_size(manifest.total_bytes)}"
    tables = manifest.tables
    blobs = np.unique(tables.blob_of[rows])
    some = len(np.unique(np.searchsorted(tables.firsts, blobs, "right")))
    size = format_size(int(manifest.blob_sizes(blobs.astype(np.intp)).sum()))
    return f"{len(rows)} of {samples} samples, {some} of {shards} shards, {size}"
