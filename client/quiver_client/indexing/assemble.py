"""From samples to a manifest: store equal samples once, keep the base's shards, place the rest, sort by shard.

Memory peaks here, so columns are moved one at a time, and every temporary takes a few bytes per sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quiver.errors import BadRequest
from quiver.layout import auto_shard_bytes, place
from quiver.manifest import Header, Manifest, ManifestParts
from quiver.manifest.schema import SourceFormat
from quiver.manifest.writer import sample_sizes
from quiver.shard import U8, U64
from quiver_client.indexing.columns import I64, Samples
from quiver_client.indexing.objects import Listing

U32 = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Assembled:
    """The parts of a manifest, and how many of the base's shards were kept and dropped."""

    parts: ManifestParts
    reused_shards: int
    left_shards: int


def assemble(samples: Samples, listing: Listing, header: Header, base: Manifest | None) -> Assembled:
    """Return what to write. Consumes ``samples``. A header without a shard size gets a suitable one."""
    count = len(samples)
    keys = samples.keys.take() if len(samples.keys) else listing.paths
    lengths, origins, xxh3 = samples.take_matrices([field.name for field in header.blobs])
    digests: U8 = samples.digests.take()
    objects: U32 = samples.objects.take()
    representative = representatives(digests, lengths)
    units = _units(header.source, objects, samples.unit_firsts)
    if not header.shard_bytes:
        header = msgspec.structs.replace(header, shard_bytes=_auto(header, lengths, units, representative))
    rows, firsts, reused = _lay_out(digests, lengths, units, representative, header, base)
    blob_of = _numbered(rows, representative, count)
    del representative
    if len(rows) < count or not np.array_equal(rows, np.arange(count)):
        digests = _reordered(digests.view(np.uint64), rows).view(np.uint8)
        lengths, origins, xxh3 = _reordered(lengths, rows), _reordered(origins, rows), _reordered(xxh3, rows)
        objects = objects[rows]
    scalars: dict[str, pa.Array] = {field.name: samples.take_scalar(field.name) for field in header.scalars}
    parts = ManifestParts(
        header=header,
        keys=keys,
        blob_of=blob_of,
        scalars=scalars,
        digests=digests,
        xxh3=xxh3,
        lengths=lengths,
        objects_of=objects,
        origins=origins,
        firsts=firsts,
        object_paths=listing.paths,
        object_sizes=listing.sizes,
        object_etags=listing.etags,
        object_mtimes=listing.mtimes,
    )
    return Assembled(parts, reused, (base.shard_count if base else 0) - reused)


def representatives(digests: U8, lengths: U64) -> U32:
    """Return for each sample the first one with the same bytes in the same fields, ``(n,)``."""
    count = len(digests)
    order = np.argsort(_prefixes(digests), kind="stable")  # stable: the first of equal samples comes first
    starts = np.ones(count, np.bool_)
    starts[1:] = ~_same_as_before(digests, lengths, order)
    _split_collisions(digests, lengths, order, starts)
    at = np.flatnonzero(starts)
    result = np.empty(count, np.uint32)
    result[order] = np.repeat(order[at].astype(np.uint32), np.diff(np.append(at, count)))
    return result


def _same_as_before(digests: U8, lengths: U64, order: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """Return whether each sample, in this order, equals the one before it; in blocks, to keep temporaries small."""
    same = np.empty(max(len(order) - 1, 0), np.bool_)
    for lo in range(0, len(same), 1 << 14):
        here, before = order[lo + 1 : lo + 1 + (1 << 14)], order[lo : lo + (1 << 14)]
        before = before[: len(here)]
        same[lo : lo + len(here)] = (digests[here] == digests[before]).all(axis=1) & (
            lengths[here] == lengths[before]
        ).all(axis=1)
    return same


def _split_collisions(digests: U8, lengths: U64, order: npt.NDArray[np.intp], starts: npt.NDArray[np.bool_]) -> None:
    """Sort runs that share 64 bits but are not equal: the same bytes cut into different fields, or an attack."""
    prefixes = _prefixes(digests)
    mixed = np.flatnonzero(starts[1:] & (prefixes[order[1:]] == prefixes[order[:-1]])) + 1
    done = 0
    for at in mixed.tolist():
        if at < done:
            continue
        lo = hi = at
        while lo > 0 and prefixes[order[lo - 1]] == prefixes[order[at]]:
            lo -= 1
        while hi < len(order) and prefixes[order[hi]] == prefixes[order[at]]:
            hi += 1
        names = {int(row): (digests[row].tobytes(), lengths[row].tobytes()) for row in order[lo:hi]}
        run = sorted(names, key=lambda row: (names[row], row))
        order[lo:hi] = run
        starts[lo:hi] = [i == 0 or names[row] != names[run[i - 1]] for i, row in enumerate(run)]
        done = hi


def _lay_out(
    digests: U8, lengths: U64, units: U32, representative: U32, header: Header, base: Manifest | None
) -> tuple[I64, I64, int]:
    """Return the distinct samples in shard order, the starts of shards (and the end), and how many are the base's."""
    distinct = np.flatnonzero(representative == np.arange(len(representative), dtype=np.uint32))
    kept, kept_firsts = np.empty(0, np.int64), np.empty(0, np.int64)
    if base is not None:
        kept, kept_firsts = _kept_shards(base, digests, lengths, distinct)
        rest = np.ones(len(digests), np.bool_)
        rest[kept] = False
        distinct = distinct[rest[distinct]]
    if not len(distinct):
        return kept, np.append(kept_firsts, len(kept)), len(kept_firsts)
    sizes = sample_sizes(_some(lengths, distinct))
    chosen = _some(digests, distinct), sizes, _some(units, distinct)
    order, firsts = place(header.layout, *chosen, header.shard_bytes)
    rows = np.concatenate([kept, distinct[order]]) if len(kept) else distinct[order]
    return rows, np.concatenate([kept_firsts, firsts + len(kept)]), len(kept_firsts)


def _kept_shards(base: Manifest, digests: U8, lengths: U64, distinct: npt.NDArray[np.intp]) -> tuple[I64, I64]:
    """Return the rows of the base's shards of which all samples still exist, and the first row of each shard."""
    old = base.tables
    row_of = _found(old.digests, old.lengths, digests, lengths, distinct)
    firsts = old.firsts.astype(np.int64)
    counts = np.diff(np.append(firsts, len(row_of)))
    whole = np.minimum.reduceat(row_of, firsts) >= 0
    kept = row_of[np.repeat(whole, counts)]
    ends = np.cumsum(counts[whole])
    return kept, ends - counts[whole]


def _found(
    old_digests: U8, old_lengths: U64, digests: U8, lengths: U64, distinct: npt.NDArray[np.intp]
) -> npt.NDArray[np.int64]:
    """Return for each old sample the row of ``distinct`` with the same bytes in the same fields, or -1."""
    prefixes = _prefixes(digests[distinct])
    order = np.argsort(prefixes, kind="stable")
    ordered = prefixes[order]
    wanted = _prefixes(old_digests)
    lo, hi = np.searchsorted(ordered, wanted, "left"), np.searchsorted(ordered, wanted, "right")
    result = np.full(len(wanted), -1, np.int64)
    at = lo.copy()
    while (open_ := np.flatnonzero((at < hi) & (result < 0))).size:  # further rounds only for colliding prefixes
        rows = distinct[order[at[open_]]]
        same = (digests[rows] == old_digests[open_]).all(axis=1) & (lengths[rows] == old_lengths[open_]).all(axis=1)
        result[open_[same]] = rows[same]
        at[open_] += 1
    return result


def _units(source: SourceFormat, objects: U32, unit_firsts: list[int]) -> U32:
    """Return the units that are best read whole: tars, or row groups of Parquet files; separate files have none."""
    if source == "parquet":
        return np.searchsorted(unit_firsts, np.arange(len(objects)), "right").astype(np.uint32)
    return objects if source == "webdataset" else np.zeros(len(objects), np.uint32)


def _auto(header: Header, lengths: U64, units: U32, representative: U32) -> int:
    """Return the shard size that suits the samples."""
    sizes = sample_sizes(lengths)
    distinct = representative == np.arange(len(representative), dtype=np.uint32)
    count, total_bytes = int(distinct.sum()), int(sizes[distinct].sum())
    if header.source != "parquet":  # all other formats can be read in part
        return auto_shard_bytes(header.layout, count, total_bytes)
    firsts = np.flatnonzero(np.append(True, units[1:] != units[:-1]))
    return auto_shard_bytes(header.layout, count, total_bytes, int(np.add.reduceat(sizes, firsts).max()))


def _numbered(rows: I64, representative: U32, count: int) -> U32:
    """Return for each sample the position of its representative in ``rows``."""
    position = np.zeros(count, np.uint32)
    position[rows] = np.arange(len(rows), dtype=np.uint32)
    return position[representative]


def _prefixes(digests: U8) -> U64:
    return np.ascontiguousarray(digests[:, :8]).view("<u8").reshape(-1)


def _some(values: npt.NDArray[Any], ascending: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
    """Return these rows, without a copy if they are all the rows."""
    return values if len(ascending) == len(values) else values[ascending]


def _reordered(matrix: U64, rows: npt.NDArray[np.intp]) -> U64:
    """Return these rows, in the memory of ``matrix``: column by column, so that only one column exists twice."""
    for column in range(matrix.shape[1]):
        matrix[: len(rows), column] = matrix[rows, column]
    return matrix[: len(rows)]


def check_base(base: Manifest, header: Header) -> None:
    """Raise ``BadRequest`` if shards of ``base`` cannot be shards of a manifest with this header."""
    old, new = [field.name for field in base.header.blobs], [field.name for field in header.blobs]
    if old != new:
        raise BadRequest(
            f"the base {base.path} has the byte fields {', '.join(old)}, the source {', '.join(new)}:"
            " shards cannot be shared; index without --base"
        )
