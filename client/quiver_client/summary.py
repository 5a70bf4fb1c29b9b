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
    taken = np.zeros(len(tables.offsets), bool)
    taken[tables.blob_of[rows]] = True
    some = int(np.count_nonzero(np.logical_or.reduceat(taken, tables.firsts.astype(np.int64))))
    size = format_size(int(manifest.blob_sizes(slice(None))[taken].sum()))
    return f"{len(rows)} of {samples} samples, {some} of {shards} shards, {size}"
