"""The columns of a manifest, as arrays over its content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quiver.shard import U8, U64

U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """The columns of a manifest as arrays over its content; f byte fields, see ``quiver.manifest.schema``."""

    keys: pa.Array[Any]  # (samples,) large_utf8
    blob_of: U32  # (samples,)
    scalars: dict[str, pa.Array[Any]]  # name -> (samples,)
    offsets: U64  # (blobs,) bytes into the shard
    digests: U8  # (blobs, 32)
    xxh3: U64  # (blobs, f)
    lengths: U64  # (blobs, f) bytes
    object_of: U32  # (blobs,)
    origins: U64  # (blobs, f) bytes into the object, or the row of a Parquet file
    shard_digests: U8  # (shards, 32)
    shard_sizes: U64  # (shards,) bytes, table included
    firsts: U32  # (shards,) the first blob of each shard
    object_paths: pa.Array[Any]  # (objects,) large_utf8
    object_sizes: U64  # (objects,) bytes
    object_etags: pa.Array[Any]  # (objects,) large_utf8
    object_mtimes: I64  # (objects,) nanoseconds
