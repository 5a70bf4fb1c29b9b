"""Validation of a manifest. A manifest is untrusted, so nothing in it is used before these checks have passed.

Every check is a few array operations over blocks of rows, so that 1.3 million samples take tens of milliseconds and the
temporaries stay small. Afterwards every index is in range, the samples of a shard tile it exactly, and keys are
distinct.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from quiver.errors import BadRequest
from quiver.location import shown
from quiver.manifest.schema import ABSENT, NAME_CHARS_MAX, OBJECT_BYTES_MAX, Field
from quiver.manifest.tables import Tables
from quiver.shard import COUNT_BYTES, ROW_BYTES

BLOCK_ROWS: Final = 1 << 16  # temporaries of half a megabyte: they stay in the second-level cache
SAMPLES_MAX: Final = 1 << 32


def check_tables(tables: Tables, *, byte_ranges: bool) -> None:
    """Raise ``BadRequest`` naming the table and row that are wrong. ``byte_ranges``: the origin is read by range."""
    if not 0 < len(tables.blob_of) < SAMPLES_MAX:
        raise BadRequest(f"table samples has {len(tables.blob_of)} rows")
    _below("samples.blob", tables.blob_of, len(tables.offsets))
    _below("blobs.object", tables.object_of, len(tables.object_sizes))
    check_strings("samples.key", tables.keys)
    check_strings("objects.path", tables.object_paths)
    check_strings("objects.etag", tables.object_etags)
    _check_shards(tables)
    _check_tiling(tables)
    if byte_ranges:
        _check_ranges(tables)
    _check_distinct("samples.key", tables.keys)


def check_arrays(tables: Tables, blobs: Sequence[Field]) -> None:
    """Raise ``BadRequest`` if the length of an array field contradicts its shape: readers stack arrays by the shape."""
    for column, field in enumerate(blobs):
        if not field.is_array:
            continue
        for lo, hi in _blocks(len(tables.lengths)):
            lengths = tables.lengths[lo:hi, column]
            exact = field.array_bytes
            fits = lengths % np.uint64(field.step_bytes) == 0 if exact is None else lengths == np.uint64(exact)
            fits |= lengths == np.uint64(ABSENT)
            if not fits.all():
                at = int(np.argmin(fits))
                wanted = f"whole values of {field.step_bytes}" if exact is None else str(exact)
                name = shown(field.name, NAME_CHARS_MAX)
                raise BadRequest(
                    f"column blobs.length: row {lo + at} has {int(lengths[at])} bytes of field {name!r},"
                    f" an array of {wanted} bytes"
                )


def check_strings(name: str, strings: pa.Array[Any]) -> None:
    """Raise ``BadRequest`` for a string column whose offsets decrease or point outside of its data."""
    _, offsets_buffer, data = strings.buffers()
    if not len(strings):
        return
    offsets = np.frombuffer(offsets_buffer, np.int64, len(strings) + 1, strings.offset * 8)
    if offsets[0] < 0 or offsets[-1] > (data.size if data else 0):
        raise BadRequest(f"column {name} points outside its data")
    for lo, hi in _blocks(len(offsets) - 1):
        if (offsets[lo + 1 : hi + 1] < offsets[lo:hi]).any():
            raise BadRequest(f"column {name} has a negative length")
    try:
        strings.validate(full=True)  # checks that the text is UTF-8
    except (pa.ArrowException, ValueError) as error:
        raise BadRequest(f"column {name} is damaged: {shown(str(error))}") from error


def _check_shards(tables: Tables) -> None:
    firsts, blobs = tables.firsts, len(tables.offsets)
    if not len(firsts) or firsts[0] != 0 or firsts[-1] >= blobs or (firsts[1:] <= firsts[:-1]).any():
        raise BadRequest("column shards.first must rise from 0 and stay below the number of blobs")
    prefixes = np.sort(np.ascontiguousarray(tables.shard_digests[:, :8]).view("<u8").reshape(-1))
    if (prefixes[1:] == prefixes[:-1]).any() and len(np.unique(tables.shard_digests, axis=0)) != len(firsts):
        raise BadRequest("column shards.digest names one shard twice")


def _check_tiling(tables: Tables) -> None:
    """Check that each blob begins where the one before it ends, and that a shard's size is their sum plus its table."""
    limit = np.uint64(OBJECT_BYTES_MAX)
    firsts = tables.firsts.astype(np.int64)
    next_offset = np.uint64(0)
    for lo, hi in _blocks(len(tables.offsets)):
        offsets, parts = tables.offsets[lo:hi], _present(tables.lengths[lo:hi])
        if (parts > limit).any() or (offsets > limit).any():
            raise BadRequest(f"blobs {lo} to {hi}: a length or an offset is over {OBJECT_BYTES_MAX} bytes")
        sizes = _total(parts)
        expected = np.empty(hi - lo, np.uint64)
        expected[0] = next_offset
        np.add(offsets[:-1], sizes[:-1], out=expected[1:])
        begin, end = np.searchsorted(firsts, [lo, hi])
        expected[firsts[begin:end] - lo] = 0
        if (offsets != expected).any():
            at = lo + int(np.argmax(offsets != expected))
            raise BadRequest(f"column blobs.offset: row {at} overlaps the row before it or leaves a gap")
        next_offset = offsets[-1] + sizes[-1]
    bounds = np.append(firsts, len(tables.offsets))
    last = bounds[1:] - 1
    tables_bytes = np.diff(bounds).astype(np.uint64) * np.uint64(ROW_BYTES) + np.uint64(COUNT_BYTES)
    if (tables.shard_sizes != tables.offsets[last] + _total(_present(tables.lengths[last])) + tables_bytes).any():
        raise BadRequest("column shards.size does not agree with the blobs of the shard")


def _check_ranges(tables: Tables) -> None:
    """Check that every byte range lies inside its object."""
    for lo, hi in _blocks(len(tables.offsets)):
        lengths, origins = tables.lengths[lo:hi], tables.origins[lo:hi]
        ends = np.where(lengths == np.uint64(ABSENT), np.uint64(0), lengths + origins)
        sizes = tables.object_sizes[tables.object_of[lo:hi]]
        if (origins > np.uint64(OBJECT_BYTES_MAX)).any() or (ends > sizes[:, None]).any():
            at = lo + int(np.argmax((ends > sizes[:, None]).any(axis=1)))
            raise BadRequest(f"column blobs.origin: row {at} reads past the end of its object")


def _check_distinct(name: str, keys: pa.Array[Any]) -> None:
    """Check that keys are distinct: ascending keys in one pass, others by counting."""
    for lo, hi in _blocks(len(keys) - 1):
        if not pc.all(pc.less(keys[lo:hi], keys[lo + 1 : hi + 1])).as_py():
            break
    else:
        return
    if pc.count_distinct(keys).as_py() != len(keys):
        counted = pc.value_counts(keys)
        twice = counted.field("values").filter(pc.greater(counted.field("counts"), 1))
        start = pc.utf8_slice_codeunits(twice[:1], 0, NAME_CHARS_MAX + 1)[0].as_py()
        raise BadRequest(f"column {name} holds {shown(start, NAME_CHARS_MAX)!r} more than once")


def _present(lengths: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    absent = lengths == np.uint64(ABSENT)
    return np.where(absent, np.uint64(0), lengths) if absent.any() else lengths


def _total(parts: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return parts[:, 0] if parts.shape[1] == 1 else parts.sum(axis=1, dtype=np.uint64)


def _below(name: str, column: npt.NDArray[np.uint32], bound: int) -> None:
    if len(column) and int(column.max()) >= bound:
        raise BadRequest(f"column {name}: row {int(np.argmax(column))} names number {int(column.max())} of {bound}")


def _blocks(rows: int) -> Iterator[tuple[int, int]]:
    for lo in range(0, rows, BLOCK_ROWS):
        yield lo, min(lo + BLOCK_ROWS, rows)
