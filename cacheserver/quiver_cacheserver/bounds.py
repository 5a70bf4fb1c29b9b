"""How much a manifest may make a daemon do, and how much memory its fills may take together.

Any client can upload a manifest, and sending one costs little. No manifest of the indexer comes near these bounds;
docs/protocol.md lists them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from quiver.digest import Digest
from quiver.errors import BadRequest, Corrupt, DiskFailed, Misconfigured, NotFound, OverCapacity
from quiver.layout import SHARD_BYTES_MAX
from quiver.manifest import ABSENT, Manifest

SHARDS_MAX: Final = 1 << 20  # of one manifest: 32 TiB in shards of the default size
FILL_THREADS: Final = 4  # each holds a shard in memory while it fills
FILL_BYTES_MAX: Final = SHARD_BYTES_MAX * 4  # a shard of one sample may be larger than the shard size
FILLING_BYTES_MAX: Final = 1 << 30  # of all shards in memory while they are filled; a larger one is filled alone
# As it is decoded, one for each thread that fills; a file of some kilobytes can hold one of any size.
ROW_GROUP_BYTES_MAX: Final = 1 << 30
# Samples may share bytes of the origin, as a text that stands behind several images. But a file of 64 KiB must not fill
# the cache, named over and over.
NAMED_TIMES_MAX: Final = 4
NAMED_BYTES_FREE: Final = 16 << 20
_START_BITS: Final = 48  # an origin's range ends below 2**47
_OBJECTS_AT_ONCE: Final = 1 << (63 - _START_BITS)

Ints = npt.NDArray[np.int64]


def open_manifest(path: Path, digest: Digest) -> Manifest:
    """Open the manifest of this digest, ready for use on an event loop.

    Raises ``Corrupt``, ``BadRequest``, ``Misconfigured``, ``NotFound`` and ``DiskFailed``. None names the path, since
    that holds a digest.
    """
    try:
        manifest = Manifest.open(path, digest)
        check_cost(manifest)
    except Corrupt:
        raise Corrupt("the manifest does not hash to its name", "upload") from None
    except (BadRequest, Misconfigured, NotFound, DiskFailed) as error:
        raise type(error)(str(error).replace(str(path), "the manifest")) from None
    assert manifest.shard_numbers is not None  # sorted here, in a thread
    return manifest


def check_cost(manifest: Manifest) -> None:
    """Raise ``BadRequest`` for a manifest that would cost a daemon more than any that the indexer writes."""
    tables = manifest.tables
    if manifest.shard_count > SHARDS_MAX:
        raise BadRequest(
            f"a daemon takes manifests of at most {SHARDS_MAX} shards, not {manifest.shard_count};"
            " index with a larger --shard-size"
        )
    counts = np.diff(np.append(tables.firsts.astype(np.int64), len(tables.offsets)))
    if ((tables.shard_sizes > SHARD_BYTES_MAX) & (counts > 1)).any():
        raise BadRequest(f"a shard of several samples has at most {SHARD_BYTES_MAX} bytes")
    _check_shared(manifest)


def _check_shared(manifest: Manifest) -> None:
    tables = manifest.tables
    lengths = np.where(tables.lengths == np.uint64(ABSENT), np.uint64(0), tables.lengths)
    named = int(lengths.sum(dtype=np.float64))
    if named <= NAMED_BYTES_FREE:
        return
    # Objects of one path are one object.
    paths = tables.object_paths.dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.uint32)
    objects = paths[tables.object_of]
    if manifest.header.source == "parquet":
        covered = _values_bytes(objects, tables.origins[:, 0], lengths, [it.column for it in manifest.header.blobs])
    else:
        width = lengths.shape[1]
        covered = covered_bytes(np.repeat(objects, width), tables.origins.reshape(-1), lengths.reshape(-1))
    if named > NAMED_TIMES_MAX * covered + NAMED_BYTES_FREE:
        raise BadRequest(
            f"its samples name {named} bytes of the origin that are {covered} in all: a daemon fills bytes that are"
            f" named {NAMED_TIMES_MAX} times over at most"
        )


def _values_bytes(
    objects: npt.NDArray[np.uint32], rows: npt.NDArray[Any], lengths: npt.NDArray[Any], columns: Sequence[str]
) -> int:
    """Return how many bytes the values of Parquet rows have, each counted once.

    ``lengths`` ``(n, f)`` are of f fields, of these columns. Only the file says how long a value is: of several lengths
    the largest counts, since at most one of them can be filled.
    """
    total = 0
    for column in dict.fromkeys(columns):
        longest = lengths[:, [name == column for name in columns]].max(axis=1)
        order = np.lexsort((longest, rows, objects))
        of, at = objects[order], rows[order]
        last = np.append((of[1:] != of[:-1]) | (at[1:] != at[:-1]), True)
        total += int(longest[order][last].sum(dtype=np.float64))
    return total


def covered_bytes(objects: npt.NDArray[np.uint32], starts: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> int:
    """Return how many bytes of objects lie in any of these ranges ``(n,)``; ranges end below ``2**47``."""
    if int(np.bincount(objects).max()) == 1:  # each object is a sample
        return int(lengths.sum(dtype=np.float64))
    order = np.argsort(objects, kind="stable")
    objects, starts, lengths = objects[order], starts[order].astype(np.int64), lengths[order].astype(np.int64)
    ranks = np.cumsum(np.append(0, objects[1:] != objects[:-1]), dtype=np.int64)
    total = 0
    for first in range(0, int(ranks[-1]) + 1, _OBJECTS_AT_ONCE):
        lo, hi = np.searchsorted(ranks, [first, first + _OBJECTS_AT_ONCE])
        # One number line for all: each object has its own stretch of it.
        begins = ((ranks[lo:hi] - first) << _START_BITS) + starts[lo:hi]
        by_start = np.argsort(begins, kind="stable")
        begins = begins[by_start]
        ends = begins + lengths[lo:hi][by_start]
        seen = np.append(0, np.maximum.accumulate(ends)[:-1])
        total += int(np.maximum(ends - np.maximum(begins, seen), 0).sum())
    return total


class FillMemory:
    """The memory that all fills may take together. A fill that finds none waits for its turn."""

    def __init__(self, bytes_max: int = FILLING_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._taken = 0
        self._turn = threading.Lock()
        self._less = threading.Condition()

    @contextlib.contextmanager
    def taken(self, size_bytes: int) -> Iterator[None]:
        """Take memory until the end of the block. Raises ``OverCapacity`` for more than one shard may have."""
        if size_bytes > FILL_BYTES_MAX:
            raise OverCapacity(f"a shard of {size_bytes} bytes is larger than a daemon fills ({FILL_BYTES_MAX})", 60.0)
        with self._turn, self._less:
            self._less.wait_for(lambda: not self._taken or self._taken + size_bytes <= self._bytes_max)
            self._taken += size_bytes
        try:
            yield
        finally:
            with self._less:
                self._taken -= size_bytes
                self._less.notify_all()
