"""Indexes Parquet files: each row is a sample, whose fields ``parquet_schema`` derives from the columns.

Files are read row group by row group, and in batches inside of one, so that memory holds a few batches whatever the
files look like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import blake3
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from quiver.errors import BadRequest
from quiver.manifest import ABSENT, BLOB_TYPE, KEY_FIELD, Field, OriginObject
from quiver.manifest.schema import VARYING
from quiver.origin.arrays import inner_shape
from quiver.origin.parquet import chunks_of, column_of
from quiver.origin.parquet_footer import Chunk, chunks_by_group
from quiver.shard import U64
from quiver_client.indexing.columns import XXH3_OF_NOTHING, Rows, Samples, byte_rows
from quiver_client.indexing.objects import Listing
from quiver_client.indexing.parallel import Meter, in_order
from quiver_client.indexing.parquet_schema import check_same, fields_of, has_keys
from quiver_client.indexing.reading import Handle, ObjectFile, Objects
from quiver_client.indexing.report import NAMES_MAX, Notices
from quiver_client.indexing.selection import Selection

BATCH_BYTES: Final = 8 << 20
BATCH_ROWS_MAX: Final = 4096
READ_BYTES: Final = 1 << 20  # of a column at a time, instead of the column of a whole row group
LARGE_GROUP_BYTES: Final = 128 << 20
LARGE_GROUPS: Final = (
    "row groups over 128 MiB, which each daemon or process that needs a part of one reads and decodes whole"
)
FILES_REMOTE: Final = 8
HOLES: Final = (
    "rows left out, with a null among the values of a list; fill it with a value, make the whole list null,"
    " or leave the column out with --exclude"
)
PHYSICAL_BYTES: Final = {0: 1, 1: 4, 2: 8, 4: 4, 5: 8}  # of booleans, integers and floats, by ``parquet::Type``

_Sides = tuple[int | None, ...]  # of the arrays of nested lists, from the second dimension on


@dataclass(slots=True)
class _Hashed:
    """The result of a task: samples, the lengths of nested lists by field, and rows that cannot be samples."""

    samples: Samples
    sides: dict[str, _Sides]
    notices: Notices


@dataclass(frozen=True, slots=True)
class _Part:
    """Some row groups of one file: a task."""

    number: int
    listed: OriginObject
    metadata: pq.FileMetaData
    groups: range
    first_row: int
    decoded_bytes: int  # estimated
    keyed: bool  # a column names the samples


def index_parquet(
    listing: Listing, objects: Objects, meter: Meter, notices: Notices, selection: Selection
) -> tuple[Samples, tuple[Field, ...]]:
    """Hash every row of every file."""
    fields: list[Field] = []
    schemas: list[tuple[str, pa.Schema]] = []
    threads = objects.threads if listing.local else FILES_REMOTE

    def check(listed: OriginObject, schema: pa.Schema) -> None:
        if not schemas:
            selection.check(schema.names, listed.path)
            fields.extend(fields_of(listed.path, schema, selection, notices))
            schemas.append((listed.path, schema))
        else:
            check_same(fields, schemas[0], listed.path, schema, selection)

    def work(part: _Part) -> _Hashed:
        return _hash_part(part, objects, tuple(fields), plain_keys=listing.single)

    samples, firsts = Samples(), []
    sides: dict[str, _Sides] = {}
    for found in in_order(work, _parts(listing, objects, check, notices, selection), threads, meter.stop):
        notices.merge(found.notices)
        for name, those in found.sides.items():
            sides[name] = _agreed(name, sides.get(name, those), those)
        firsts.append(len(samples))
        samples.absorb(found.samples)
    samples.unit_firsts = firsts
    if schemas and has_keys(schemas[0][1], selection):
        _refuse_equal_keys(samples, schemas[0][0])
    return samples, tuple(_with_shape(field, samples, sides) for field in fields)


def _agreed(name: str, one: _Sides, other: _Sides, where: str = "") -> _Sides:
    """Return the shape that two parts of a column share. Raises ``BadRequest`` if they differ."""
    merged = tuple(a if b is None else b for a, b in zip(one, other, strict=True))
    if any(a is not None and a != side for a, side in zip(one, merged, strict=True)):
        raise _ragged(name, where or f"some rows have {_shown_sides(one)}, others {_shown_sides(other)}")
    return merged


def _ragged(name: str, why: str) -> BadRequest:
    return BadRequest(
        f"column {name} is lists of lists that are no arrays: {why};"
        f" make the inner lists equally long, or leave the column out with --exclude {name}"
    )


def _shown_sides(sides: _Sides) -> str:
    return " x ".join("?" if side is None else str(side) for side in sides)


def _with_shape(field: Field, samples: Samples, sides: dict[str, _Sides]) -> Field:
    """Return the field; for lists of variable length, with the shape that all of them have."""
    if not field.is_array or field.shape is not None or not len(samples):
        return field
    inner = tuple(side or 0 for side in sides.get(field.name, ()))
    if 0 in inner:
        return field  # not one row has a value
    field = msgspec.structs.replace(field, shape=(VARYING, *inner))
    lengths = samples.blobs[field.name].lengths.view()
    shortest = int(lengths.min())  # an absent one counts as longer than any
    longest = int(lengths.max(where=lengths != ABSENT, initial=0))
    if shortest == longest:
        return msgspec.structs.replace(field, shape=(longest // field.step_bytes, *inner))
    return field if inner else msgspec.structs.replace(field, shape=None)


def _refuse_equal_keys(samples: Samples, path: str) -> None:
    keys = samples.keys.view()
    if pa.compute.count_distinct(keys).as_py() != len(keys):
        counts = pa.compute.value_counts(keys)
        twice = counts.filter(pa.compute.greater(counts.field("counts"), 1))[0]["values"].as_py()
        raise BadRequest(
            f"column {KEY_FIELD} of {path} holds {twice[:80]!r} more than once, and samples need distinct names;"
            f" leave it out with --exclude {KEY_FIELD}, and samples are numbered"
        )


def _parts(
    listing: Listing,
    objects: Objects,
    check: Callable[[OriginObject, pa.Schema], None],
    notices: Notices,
    selection: Selection,
) -> Iterator[_Part]:
    """Read the footer of each file, and cut the file into tasks of a row group each."""
    for number in range(len(listing)):
        listed = listing.object(number)
        with _opened(objects.open(listed)) as file:
            metadata = file.metadata
            chunks = _chunks(listed, metadata)
            check(listed, file.schema_arrow)
            keyed = has_keys(file.schema_arrow, selection)
        if not metadata.num_rows:
            notices.add("Parquet files without a row", listed.path)
        row = 0
        for group in range(metadata.num_row_groups):
            if metadata.row_group(group).total_byte_size > LARGE_GROUP_BYTES:
                notices.add(LARGE_GROUPS, f"{listed.path}: {group}")
            yield _Part(number, listed, metadata, range(group, group + 1), row, _decoded_bytes(chunks[group]), keyed)
            row += metadata.row_group(group).num_rows


def _chunks(listed: OriginObject, metadata: pq.FileMetaData) -> list[list[Chunk]]:
    try:
        return chunks_by_group(metadata)
    except BadRequest as error:
        raise BadRequest(f"{listed.path} is not a Parquet file, or is damaged: {error}") from error


@contextmanager
def _opened(handle: Handle, metadata: pq.FileMetaData | None = None) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file; map pyarrow's exceptions to errors that name the file."""
    done = False
    try:
        with pq.ParquetFile(ObjectFile(handle), metadata=metadata, pre_buffer=False, buffer_size=READ_BYTES) as file:
            yield file
        done = True
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:  # the last of a column's name
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise BadRequest(f"{handle.url} is not a Parquet file, or is damaged: {why}; make or copy it again") from error
    finally:
        handle.close(check=done)


def _hash_part(part: _Part, objects: Objects, fields: tuple[Field, ...], *, plain_keys: bool) -> _Hashed:
    found = _Hashed(Samples(), {}, Notices())
    row = part.first_row
    blobs = [field for field in fields if field.type == BLOB_TYPE]
    scalars = [field.name for field in fields if field.type != BLOB_TYPE]
    keyed = [KEY_FIELD] if part.keyed else []
    columns = list(dict.fromkeys([field.name for field in blobs] + scalars + keyed))
    prefix = "" if plain_keys else part.listed.path + "/"
    with _opened(objects.open(part.listed), part.metadata) as file:
        batches = file.iter_batches(_batch_rows(part), row_groups=list(part.groups), columns=columns, use_threads=False)
        for batch in batches:
            arrays, kept = _columns(batch, blobs, found, part.listed.path, row)
            _check_paths(batch, blobs, arrays, f"{part.listed.path}: row", row)
            rows = np.arange(row, row + batch.num_rows, dtype=np.uint64)
            row += batch.num_rows
            if kept is not None:
                batch, arrays, rows = batch.filter(kept), [array.filter(kept) for array in arrays], rows[kept]
            digests, hashed = _hash_rows(arrays, [field.name for field in blobs], rows)
            keys = _keys(batch, rows, prefix, part)
            numbers = np.full(len(rows), part.number, np.uint32)
            values = {name: batch.column(name) for name in scalars}
            found.samples.extend(Rows(keys, byte_rows(digests), numbers, hashed, values))
    return found


def _columns(
    batch: pa.RecordBatch, blobs: list[Field], found: _Hashed, path: str, row: int
) -> tuple[list[pa.Array], pa.Array | None]:
    """Return the byte columns, each as large binary, and which rows can be samples, None if all.

    An array with a null inside has no bytes, so its row is left out and named.
    """
    kept = np.ones(batch.num_rows, np.bool_)
    arrays = []
    for field in blobs:
        array, holed = column_of(batch, field.column)
        if len(holed):
            kept[holed] = False
            names = [f"{path}: row {row + at}, column {field.column}" for at in holed[:NAMES_MAX].tolist()]
            found.notices.add(HOLES, *names, count=len(holed))
        if field.is_array and field.shape is None:
            for chunk in chunks_of(batch, field.column):
                sides = inner_shape(chunk.filter(pa.array(kept)) if not kept.all() else chunk)
                if sides is None:
                    raise _ragged(field.name, f"lists in {path}, rows {row} to {row + batch.num_rows - 1}, differ")
                if sides:
                    found.sides[field.name] = _agreed(field.name, found.sides.get(field.name, sides), sides)
        arrays.append(array)
    return arrays, None if kept.all() else pa.array(kept)


def _keys(batch: pa.RecordBatch, rows: U64, prefix: str, part: _Part) -> pa.Array:
    """Return the names of the samples, a large_utf8 array: their own, or the numbers of their rows."""
    if not part.keyed:
        return pa.array([f"{prefix}{at:09d}" for at in rows.tolist()], pa.large_utf8())
    keys = batch.column(KEY_FIELD).cast(pa.large_utf8())
    if keys.null_count:
        at = int(rows[int(np.argmin(np.asarray(keys.is_valid())))])
        raise BadRequest(
            f"{part.listed.path}: row {at} has no {KEY_FIELD}; fill it, or leave the column out with"
            f" --exclude {KEY_FIELD}, and samples are numbered"
        )
    return pa.compute.binary_join_element_wise(pa.scalar(prefix, pa.large_utf8()), keys, pa.scalar("", pa.large_utf8()))


def _hash_rows(arrays: list[pa.Array], names: list[str], rows: U64) -> tuple[list[bytes], dict[str, Any]]:
    """Return the digest of each row, and for each field lengths, origins and XXH3-64."""
    count = len(arrays[0])
    hashers: list[Any] = []
    hashed = {}
    for name, array in zip(names, arrays, strict=True):
        views = _views(array)
        if len(arrays) > 1 and not hashers:
            hashers = [blake3.blake3() for _ in range(count)]
        for hasher, view in zip(hashers, views, strict=False):
            if view is not None:
                hasher.update(view)
        xxh3 = [XXH3_OF_NOTHING if view is None else xxhash.xxh3_64_intdigest(view) for view in views]
        lengths = [ABSENT if view is None else len(view) for view in views]
        hashed[name] = np.asarray(lengths, np.uint64), rows, np.asarray(xxh3, np.uint64)
    if not hashers:
        return [blake3.blake3(b"" if view is None else view).digest() for view in _views(arrays[0])], hashed
    return [hasher.digest() for hasher in hashers], hashed


def _views(array: pa.Array) -> list[memoryview | None]:
    """Return the values of a large binary array without copying them; None for a null."""
    _, offsets_buffer, data_buffer = array.buffers()
    if not len(array):
        return []
    data = memoryview(data_buffer if data_buffer is not None else b"")
    offsets = np.frombuffer(offsets_buffer, np.int64, len(array) + 1, array.offset * 8).tolist()
    valid = array.is_valid().to_pylist() if array.null_count else None
    return [data[offsets[at] : offsets[at + 1]] if valid is None or valid[at] else None for at in range(len(array))]


def _batch_rows(part: _Part) -> int:
    """Return how many rows make up about ``BATCH_BYTES``."""
    rows = sum(part.metadata.row_group(group).num_rows for group in part.groups)
    return max(1, min(BATCH_ROWS_MAX, int(rows * BATCH_BYTES // max(part.decoded_bytes, 1))))


def _decoded_bytes(chunks: list[Chunk]) -> int:
    """Estimate a row group's size in memory: a page of a million equal numbers is a few bytes in the file."""
    numbers = sum(chunk.values * PHYSICAL_BYTES.get(chunk.physical_type, 0) for chunk in chunks)
    return max(sum(chunk.uncompressed_bytes for chunk in chunks), numbers)


def _check_paths(batch: pa.RecordBatch, blobs: list[Field], arrays: list[pa.Array], where: str, row: int) -> None:
    """Raise ``BadRequest`` for a row whose image is a path without bytes: a manifest cannot name where they lie."""
    for field, array in zip(blobs, arrays, strict=True):
        if field.column == field.name or not array.null_count:
            continue
        outer = batch.column(field.name)
        if outer.type.get_field_index("path") < 0:
            continue
        paths = pa.compute.struct_field(outer, "path")
        torn = np.flatnonzero(pa.compute.and_(array.is_null(), paths.is_valid()).to_numpy(zero_copy_only=False))
        if len(torn):
            at = int(torn[0])
            raise BadRequest(
                f"{where} {row + at} has a path in column {field.name} ({paths[at].as_py()!r}) but no bytes;"
                " embed the files when writing the dataset, or index the files themselves"
            )
