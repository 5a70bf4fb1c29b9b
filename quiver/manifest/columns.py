"""The columns of a manifest, made from the buffers of its record batch in the order in which Arrow lays them out.

Each column has exactly the rows and bytes that its type requires. A column without nulls has no validity bitmap.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quiver.errors import BadRequest
from quiver.manifest.container import Frame
from quiver.manifest.schema import Header, scalar_type
from quiver.manifest.tables import Tables
from quiver.shard import U8, U64

_SLACK_BYTES: Final = 64  # Arrow may write the padding of a buffer as a part of it


def tables_of(frame: Frame, header: Header) -> Tables:
    """Return the columns of a file whose schema is ``arrow_schema(header)``. Raises ``BadRequest``, naming one."""
    take, width = _Taking(frame), len(header.blobs)
    samples = take.table("samples")
    keys = take.strings("samples.key", samples)
    blob_of = take.numbers("samples.blob", samples, np.uint32)
    scalars = {}
    if header.scalars:
        take.node("samples.scalars", samples)
        scalars = {it.name: take.scalars(f"samples.scalars.{it.name}", samples, it.type) for it in header.scalars}
    blobs = take.table("blobs")
    offsets = take.numbers("blobs.offset", blobs, np.uint64)
    digests = take.digests("blobs.digest", blobs)
    xxh3 = take.matrix("blobs.xxh3", blobs, width)
    lengths = take.matrix("blobs.length", blobs, width)
    object_of = take.numbers("blobs.object", blobs, np.uint32)
    origins = take.matrix("blobs.origin", blobs, width)
    shards = take.table("shards")
    shard_digests = take.digests("shards.digest", shards)
    shard_sizes = take.numbers("shards.size", shards, np.uint64)
    firsts = take.numbers("shards.first", shards, np.uint32)
    objects = take.table("objects")
    tables = Tables(
        keys=keys,
        blob_of=blob_of,
        scalars=scalars,
        offsets=offsets,
        digests=digests,
        xxh3=xxh3,
        lengths=lengths,
        object_of=object_of,
        origins=origins,
        shard_digests=shard_digests,
        shard_sizes=shard_sizes,
        firsts=firsts,
        object_paths=take.strings("objects.path", objects),
        object_sizes=take.numbers("objects.size", objects, np.uint64),
        object_etags=take.strings("objects.etag", objects),
        object_mtimes=take.numbers("objects.mtime_ns", objects, np.int64),
    )
    take.nothing_else()
    return tables


class _Taking:
    """The nodes and buffers that have not been consumed yet."""

    def __init__(self, frame: Frame) -> None:
        self._nodes = iter(frame.nodes)
        self._buffers = iter(frame.buffers)

    def table(self, name: str) -> int:
        """Consume the list and the struct that make up a table; return its number of rows."""
        self.node(name, 1)
        bounds = np.frombuffer(self._buffer(name, 16), np.int64)
        rows = int(bounds[1])
        if bounds[0] or rows < 1:
            raise BadRequest(f"table {name} has no rows, or does not begin with its first")
        self.node(name, rows)
        return rows

    def node(self, name: str, rows: int) -> None:
        """Consume the node of a column that has a value in each row, and thus no validity bitmap."""
        if self._next_node(name) != (rows, 0):
            raise BadRequest(f"column {name} is not of {rows} rows, or has rows without a value")
        self._buffer(name, 0)

    def numbers(self, name: str, rows: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        self.node(name, rows)
        size = rows * np.dtype(dtype).itemsize
        return np.frombuffer(self._buffer(name, size)[:size], dtype)

    def digests(self, name: str, rows: int) -> U8:
        self.node(name, rows)
        return np.frombuffer(self._buffer(name, rows * 32)[: rows * 32], np.uint8).reshape(-1, 32)

    def matrix(self, name: str, rows: int, width: int) -> U64:
        self.node(name, rows)
        return self.numbers(name, rows * width, np.uint64).reshape(-1, width)

    def strings(self, name: str, rows: int) -> pa.Array[Any]:
        """Consume a text column. ``check_strings`` later checks its offsets and that it is UTF-8."""
        self.node(name, rows)
        size = (rows + 1) * 8
        ends = self._buffer(name, size)[:size]
        first, last = np.frombuffer(ends, np.int64)[[0, -1]].tolist()
        if first or last < 0:
            raise BadRequest(f"column {name} points outside its data")
        data = self._buffer(name, last)
        return pa.Array.from_buffers(
            pa.large_utf8(), rows, [None, pa.py_buffer(ends), pa.py_buffer(data)], null_count=0
        )

    def scalars(self, name: str, rows: int, kind: str) -> pa.Array[Any]:
        found, nulls = self._next_node(name)
        if found != rows or not 0 <= nulls <= rows:
            raise BadRequest(f"column {name} is not of {rows} rows")
        bitmap_bytes = -(-rows // 8) if nulls else 0
        bitmap = self._buffer(name, bitmap_bytes)[:bitmap_bytes]
        if nulls:
            present = np.unpackbits(np.frombuffer(bitmap, np.uint8), count=rows, bitorder="little")
            if rows - int(np.count_nonzero(present)) != nulls:
                raise BadRequest(f"column {name} has another number of nulls than it declares")
        of_arrow = scalar_type(kind)
        data = self._buffer(name, -(-rows * of_arrow.bit_width // 8))
        return pa.Array.from_buffers(
            of_arrow, rows, [pa.py_buffer(bitmap) if nulls else None, pa.py_buffer(data)], null_count=nulls
        )

    def nothing_else(self) -> None:
        if next(self._nodes, None) is not None or next(self._buffers, None) is not None:
            raise BadRequest("it has more columns than its schema")

    def _next_node(self, name: str) -> tuple[int, int]:
        try:
            return next(self._nodes)
        except StopIteration:
            raise BadRequest(f"column {name} is missing") from None

    def _buffer(self, name: str, size: int) -> memoryview:
        try:
            buffer = next(self._buffers)
        except StopIteration:
            raise BadRequest(f"column {name} is missing") from None
        if not size <= len(buffer) < size + _SLACK_BYTES or (not size and len(buffer)):
            raise BadRequest(f"column {name} has {len(buffer)} bytes where {size} are wanted")
        return buffer
