"""A manifest as every process of a machine shares it: mapped, checked, answered from arrays.

Nothing is parsed per sample and nothing is copied: the arrays are views of the mapped file. Immutable.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import quote

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quiver.cached import cached_property
from quiver.digest import Digest
from quiver.errors import BadRequest, Misconfigured, NotFound
from quiver.manifest.checks import check_arrays, check_tables
from quiver.manifest.container import INDEX_AGAIN, map_file, only_batch
from quiver.manifest.schema import (
    FORMAT_VERSION,
    METADATA_KEY,
    Header,
    OriginObject,
    arrow_schema,
    check_header,
)
from quiver.manifest.tables import Tables
from quiver.manifest.writer import sample_sizes

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]


class Manifest:
    """An opened, checked manifest. Open one with ``Manifest.open``."""

    def __init__(self, path: Path, header: Header, tables: Tables) -> None:
        self.path = path
        self.header = header
        self.tables = tables

    @classmethod
    def open(cls, path: Path) -> Manifest:
        """Map and check the manifest at ``path``.

        Raises ``NotFound`` if there is none, ``BadRequest`` if it is foreign, truncated, newer or inconsistent.
        """
        try:
            mapped = map_file(path)
        except BadRequest as error:
            raise BadRequest(f"{path} is not a manifest: {error}") from error
        except FileNotFoundError as error:
            raise NotFound(f"no manifest at {path}; make one with `quiver index SOURCE -o {path}`") from error
        except OSError as error:
            raise NotFound(f"cannot open the manifest {path}: {error.strerror or error}") from error
        try:
            header, tables = _parse(pa.py_buffer(mapped))
            check_tables(tables, byte_ranges=header.source != "parquet")
            check_arrays(tables, header.blobs)
            mapped.madvise(mmap.MADV_DONTNEED)  # the checks walked the file; what stays mapped is what gets used
        except (BadRequest, Misconfigured) as error:
            raise type(error)(f"{path}: {error}") from error
        except (pa.ArrowException, ValueError, OSError) as error:
            raise BadRequest(f"{path} is not a manifest, or is truncated ({error}); {INDEX_AGAIN}") from error
        return cls(path, header, tables)

    def __len__(self) -> int:
        return len(self.tables.blob_of)

    def __repr__(self) -> str:
        return f"Manifest({str(self.path)!r}, {len(self)} samples, {self.shard_count} shards, {self.header.layout})"

    @cached_property
    def digest(self) -> Digest:
        """BLAKE3 of the file: the manifest's name in a rack."""
        return Digest.of_file(self.path)

    @property
    def shard_count(self) -> int:
        return len(self.tables.firsts)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of the distinct samples: what one epoch through an empty cache reads from the origin."""
        tables = self.tables
        counts = np.diff(np.append(tables.firsts.astype(np.int64), len(tables.offsets)))
        return int(tables.shard_sizes.sum()) - int(counts.sum()) * 40 - 8 * len(counts)

    def shard_digest(self, shard: int) -> Digest:
        return Digest(self.tables.shard_digests[shard].tobytes())

    @cached_property
    def shard_numbers(self) -> dict[Digest, int]:
        """Digest -> position in the shard table."""
        raw = self.tables.shard_digests.tobytes()
        return {Digest(raw[32 * i : 32 * i + 32]): i for i in range(self.shard_count)}

    def shard_blobs(self, shard: int) -> range:
        """Return the rows of ``blobs`` that make up the shard, in the order in which they stand in it."""
        firsts = self.tables.firsts
        end = int(firsts[shard + 1]) if shard + 1 < len(firsts) else len(self.tables.offsets)
        return range(int(firsts[shard]), end)

    def blob_sizes(self, blobs: slice | Indices) -> U64:
        """Return the bytes of distinct samples, all fields together."""
        return sample_sizes(self.tables.lengths[blobs])

    def key(self, index: int) -> str:
        return cast(str, self.tables.keys[index].as_py())

    def keys_of_blobs(self, blobs: Indices, limit: int = 100) -> list[str]:
        """Return the keys of samples that these distinct samples stand for: for error messages, not for hot paths."""
        rows = np.flatnonzero(np.isin(self.tables.blob_of, blobs))[:limit]
        return [self.key(int(row)) for row in rows]

    def keys(self, indices: Indices) -> list[str]:
        return cast(list[str], self.tables.keys.take(pa.array(indices)).to_pylist())

    def scalars(self, name: str, indices: Indices) -> list[Any]:
        """Return a scalar field of the samples as Python values."""
        return cast(list[Any], self.scalar_column(name, indices).to_pylist())

    def scalar_column(self, name: str, indices: Indices) -> pa.Array[Any]:
        """Return a scalar field of the samples as an Arrow array."""
        return self.tables.scalars[name].take(pa.array(indices))

    def object(self, number: int) -> OriginObject:
        tables = self.tables
        return OriginObject(
            path=tables.object_paths[number].as_py(),
            size=int(tables.object_sizes[number]),
            etag=tables.object_etags[number].as_py(),
            mtime_ns=int(tables.object_mtimes[number]),
        )

    def object_url(self, number: int) -> str:
        """Return the full URL of an origin object, for people."""
        return self.header.base + quote(self.object(number).path)


def _parse(file: pa.Buffer) -> tuple[Header, Tables]:
    reader = pa.ipc.open_file(pa.BufferReader(file))
    header = _header(reader.schema)
    check_header(header)
    expected = arrow_schema(header)
    if not reader.schema.equals(expected):
        raise BadRequest(f"its columns are not those of format {header.format}; {INDEX_AGAIN}")
    if reader.num_record_batches != 1:
        raise BadRequest(f"it has {reader.num_record_batches} record batches instead of one")
    batch = only_batch(file, reader.schema)
    batch.validate()
    if batch.num_rows != 1:
        raise BadRequest(f"it has {batch.num_rows} rows instead of one")
    rows = {name: _rows(batch.column(name), name) for name in ("samples", "blobs", "shards", "objects")}
    width = len(header.blobs)
    samples, blobs, shards, objects = rows["samples"], rows["blobs"], rows["shards"], rows["objects"]
    scalars = samples.get("scalars")
    return header, Tables(
        keys=samples["key"],
        blob_of=_numbers(samples["blob"]),
        scalars={f.name: scalars.field(i) for i, f in enumerate(header.scalars)} if scalars is not None else {},
        offsets=_numbers(blobs["offset"]),
        digests=_digests(blobs["digest"]),
        xxh3=_matrix(blobs["xxh3"], width),
        lengths=_matrix(blobs["length"], width),
        object_of=_numbers(blobs["object"]),
        origins=_matrix(blobs["origin"], width),
        shard_digests=_digests(shards["digest"]),
        shard_sizes=_numbers(shards["size"]),
        firsts=_numbers(shards["first"]),
        object_paths=objects["path"],
        object_sizes=_numbers(objects["size"]),
        object_etags=objects["etag"],
        object_mtimes=_numbers(objects["mtime_ns"]),
    )


def _header(schema: pa.Schema) -> Header:
    raw = (schema.metadata or {}).get(METADATA_KEY)
    if raw is None:
        raise BadRequest(f"it is an Arrow file but not a manifest; {INDEX_AGAIN}")
    try:
        version = msgspec.json.decode(raw, type=dict[str, Any]).get("format")
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise Misconfigured(
                f"manifest format {version} is newer than this Quiver reads ({FORMAT_VERSION}); upgrade quiver-cache"
            )
        header = msgspec.json.decode(raw, type=Header)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"its header cannot be read ({error}); {INDEX_AGAIN}") from error
    if header.format < 1:
        raise BadRequest(f"manifest format {header.format} is not read any more; {INDEX_AGAIN}")
    return header


def _rows(column: Any, name: str) -> dict[str, pa.Array[Any]]:
    start, end = int(column.offsets[0].as_py()), int(column.offsets[1].as_py())
    values = column.values
    if column.null_count or not 0 <= start <= end <= len(values):
        raise BadRequest(f"table {name} is damaged")
    rows = values[start:end]
    if rows.null_count:
        raise BadRequest(f"table {name} has rows without a value")
    columns = {}
    for i in range(rows.type.num_fields):
        child = rows.field(i)
        if child.null_count:
            raise BadRequest(f"column {name}.{rows.type.field(i).name} has rows without a value")
        columns[rows.type.field(i).name] = child
    return columns


def _numbers(column: Any) -> npt.NDArray[Any]:
    return cast("npt.NDArray[Any]", column.to_numpy(zero_copy_only=True))


def _digests(column: Any) -> U8:
    if not len(column):
        return np.empty((0, 32), np.uint8)
    data = column.buffers()[1]
    flat: U8 = np.frombuffer(data, np.uint8, len(column) * 32, column.offset * 32)
    return flat.reshape(-1, 32)


def _matrix(column: Any, width: Literal[1] | int) -> U64:
    flat = column.values
    if flat.null_count or len(flat) < (column.offset + len(column)) * width:
        raise BadRequest("a list column of table blobs is damaged")
    values = cast(U64, flat.to_numpy(zero_copy_only=True))
    return values[column.offset * width : (column.offset + len(column)) * width].reshape(-1, width)
