"""Making a manifest file from arrays: lay out the distinct samples, name the shards, write one Arrow file.

The file appears under its name complete or not at all, and the same input gives the same bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import blake3
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quiver.digest import Digest
from quiver.errors import BadRequest, DiskFailed
from quiver.manifest.checksums import CHECKSUMS_KEY, checksums_of
from quiver.manifest.schema import ABSENT, METADATA_KEY, Header, arrow_schema, check_header, with_format
from quiver.shard import DOMAIN, U8, U64, encode_table, table_bytes

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]

TABLE_BLOCK_ROWS: Final = 1 << 13


@dataclass(frozen=True, slots=True, eq=False)
class ManifestParts:
    """The contents of a manifest as arrays: f byte fields, n samples, b blobs in shard order, s shards, o objects.

    keys (n,) large_utf8 · blob_of (n,) uint32 · scalars: name -> Arrow array (n,) · digests (b, 32) uint8 ·
    xxh3, lengths, origins (b, f) uint64 · objects_of (b,) uint32 · firsts (s + 1,) int64 ·
    object_paths, object_etags (o,) large_utf8 · object_sizes (o,) uint64 bytes · object_mtimes (o,) int64 nanoseconds.
    """

    header: Header
    keys: pa.Array[Any]
    blob_of: U32
    scalars: dict[str, pa.Array[Any]]
    digests: U8
    xxh3: U64
    lengths: U64
    objects_of: U32
    origins: U64
    firsts: I64
    object_paths: pa.Array[Any]
    object_sizes: U64
    object_etags: pa.Array[Any]
    object_mtimes: I64


def sample_sizes(lengths: U64) -> U64:
    """Return the size in bytes of each sample, from its fields' lengths ``(b, f)``; an absent field counts as 0."""
    sizes: U64 = np.where(lengths == np.uint64(ABSENT), np.uint64(0), lengths).sum(axis=1, dtype=np.uint64)
    return sizes


def write_manifest(path: Path, parts: ManifestParts) -> None:
    """Write the manifest to ``path``, atomically, in the oldest format that can express it.

    Raises ``BadRequest`` for an empty dataset.
    """
    if not len(parts.keys):
        raise BadRequest("a manifest needs at least one sample")
    header = with_format(parts.header)
    check_header(header)
    schema = arrow_schema(header)
    tables = {
        "samples": _samples(parts),
        "blobs": _blobs(parts),
        "shards": _shards(parts),
        "objects": {
            "path": parts.object_paths,
            "size": pa.array(parts.object_sizes),
            "etag": parts.object_etags,
            "mtime_ns": pa.array(parts.object_mtimes),
        },
    }
    row = [_one_row(schema.field(name).type, columns) for name, columns in tables.items()]
    write_atomically(path, pa.record_batch(row, schema=schema))


def write_atomically(path: Path, batch: pa.RecordBatch) -> None:
    """Write one record batch with its checksums as an Arrow IPC file: temporary name in its folder, fsync, rename."""
    header = batch.schema.metadata[METADATA_KEY]
    batch = batch.replace_schema_metadata({METADATA_KEY: header, CHECKSUMS_KEY: checksums_of(header, batch)})
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            with pa.ipc.new_file(file, batch.schema) as writer:
                writer.write_batch(batch)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise DiskFailed(f"cannot write {path}: {error.strerror or error}; choose a folder with space") from error
    finally:
        temporary.unlink(missing_ok=True)


def _one_row(kind: pa.DataType, columns: dict[str, pa.Array[Any]]) -> pa.Array[Any]:
    struct = kind.value_type
    rows = pa.StructArray.from_arrays(
        [columns[struct.field(i).name] for i in range(struct.num_fields)],
        fields=[struct.field(i) for i in range(struct.num_fields)],
    )
    return pa.LargeListArray.from_arrays(pa.array([0, len(rows)], pa.int64()), rows, type=kind)


def _samples(parts: ManifestParts) -> dict[str, pa.Array[Any]]:
    columns: dict[str, pa.Array[Any]] = {"key": parts.keys, "blob": pa.array(parts.blob_of)}
    if parts.scalars:
        fields = [pa.field(field.name, parts.scalars[field.name].type) for field in parts.header.scalars]
        arrays = [parts.scalars[field.name] for field in parts.header.scalars]
        columns["scalars"] = pa.StructArray.from_arrays(arrays, fields=fields)
    return columns


def _blobs(parts: ManifestParts) -> dict[str, pa.Array[Any]]:
    sizes = sample_sizes(parts.lengths)
    before = np.concatenate([np.zeros(1, np.uint64), np.cumsum(sizes, dtype=np.uint64)])
    counts = np.diff(parts.firsts)
    offsets = before[:-1] - np.repeat(before[parts.firsts[:-1]], counts)
    return {
        "offset": pa.array(offsets),
        "digest": _fixed(parts.digests),
        "xxh3": _lists(parts.xxh3),
        "length": _lists(parts.lengths),
        "object": pa.array(parts.objects_of),
        "origin": _lists(parts.origins),
    }


def _shards(parts: ManifestParts) -> dict[str, pa.Array[Any]]:
    sizes = sample_sizes(parts.lengths)
    names = np.empty((len(parts.firsts) - 1, 32), np.uint8)
    totals = np.empty(len(parts.firsts) - 1, np.uint64)
    for i, (lo, hi) in enumerate(zip(parts.firsts[:-1].tolist(), parts.firsts[1:].tolist(), strict=True)):
        names[i] = np.frombuffer(_name(parts.digests[lo:hi], sizes[lo:hi]), np.uint8)
        totals[i] = int(sizes[lo:hi].sum()) + table_bytes(hi - lo)
    return {
        "digest": _fixed(names),
        "size": pa.array(totals),
        "first": pa.array(parts.firsts[:-1].astype(np.uint32)),
    }


def _name(digests: U8, sizes: U64) -> Digest:
    """Return the name of a shard, block by block: with tiny samples the table is as large as the samples."""
    tail = encode_table(digests[:0], sizes[:0])
    hasher = blake3.blake3(DOMAIN)
    for lo in range(0, len(sizes), TABLE_BLOCK_ROWS):
        rows = encode_table(digests[lo : lo + TABLE_BLOCK_ROWS], sizes[lo : lo + TABLE_BLOCK_ROWS])
        hasher.update(memoryview(rows)[: -len(tail)])
    return Digest(hasher.update(len(sizes).to_bytes(len(tail), "little")).digest())


def _fixed(rows: U8) -> pa.Array[Any]:
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(32), len(rows), [None, pa.py_buffer(np.ascontiguousarray(rows))]
    )


def _lists(values: U64) -> pa.Array[Any]:
    kind = pa.list_(pa.field("item", pa.uint64(), nullable=False), values.shape[1])
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), type=kind)
