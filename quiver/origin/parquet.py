"""Samples in Parquet files. Values are encoded in pages, so a read decodes whole columns of a row group.

Each shard of a row group would read all of it; so the last few decoded row groups are kept (``row_group_cache``), and
shards that are filled in origin order read each row group once.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quiver import forks
from quiver.cached import cached_property
from quiver.errors import BadRequest, Changed, OverCapacity, Unavailable
from quiver.manifest import ABSENT, Manifest
from quiver.origin.arrays import Rows, array_type, as_bytes
from quiver.origin.base import READ_SECONDS, Extent, ObjectStore
from quiver.origin.parquet_footer import Chunk, chunks_by_group
from quiver.origin.row_group_cache import row_groups
from quiver.origin.samples import naming_samples
from quiver.sizes import format_size

FILES_OPEN_MAX: Final = 64
_NONE: Final[Rows] = np.empty(0, np.intp)
PIECE_BYTES: Final = 32 << 20  # decoded at a time, about, if a row group may be too large
PIECE_ROWS_MAX: Final = 1024
RETRY_AFTER_SECONDS: Final = 60.0  # the row group will still be too large


class ParquetOrigin:
    """``SampleOrigin`` over Parquet files: ``origin`` of a blob is its row in the file."""

    def __init__(self, manifest: Manifest, store: ObjectStore, within_seconds: float = READ_SECONDS) -> None:
        self.base = store.base
        self._manifest = manifest
        self._store = store
        self._columns = [field.column for field in manifest.header.blobs]
        self._files: OrderedDict[int, _File] = OrderedDict()
        self._asked = _Asked(store, within_seconds)
        self._lock = forks.lock()  # one reader at a time: the next one finds the row groups that this one decoded

    def read(self, blobs: Sequence[int], out: memoryview) -> int:
        rows = np.asarray(blobs, np.intp)
        tables = self._manifest.tables
        lengths = tables.lengths[rows]
        sizes = np.where(lengths == np.uint64(ABSENT), np.uint64(0), lengths)
        starts = np.concatenate([[0], np.cumsum(sizes.reshape(-1), dtype=np.int64)])[:-1].reshape(sizes.shape)
        order = np.lexsort((tables.origins[rows, 0], tables.object_of[rows]))
        read_bytes = 0
        with self._reading(), naming_samples(self._manifest, rows):
            for at in order.tolist():
                number, row = int(tables.object_of[rows[at]]), int(tables.origins[rows[at], 0])
                group, inside, delivered = self._group(number, row)
                read_bytes += delivered
                for field, column in enumerate(group):
                    size, start = int(sizes[at, field]), int(starts[at, field])
                    if lengths[at, field] != np.uint64(ABSENT):
                        out[start : start + size] = self._value(column, inside, size, number)
        return read_bytes

    def close(self) -> None:
        row_groups.drop(self)
        self._store.close()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Be the only reader. Raises ``Unavailable`` if another one makes no progress for ``within_seconds``."""
        answers = -1
        within_seconds = self._asked.within_seconds
        while not self._lock.acquire(timeout=max(within_seconds, 0.0)):
            if answers == self._asked.answers:
                raise Unavailable(self.base, f"another read of it got no answer within {within_seconds:.0f} s")
            answers = self._asked.answers
        try:
            yield
        finally:
            self._lock.release()

    def _value(self, column: pa.Array[Any], row: int, size: int, number: int) -> memoryview:
        buffer = column[row].as_buffer() if row < len(column) else None
        if buffer is None or buffer.size != size:
            raise Changed(self.base + self._manifest.object(number).path, "changed")
        return memoryview(buffer).cast("B")  # Arrow's buffers have signed bytes, which a bytearray rejects

    def _group(self, number: int, row: int) -> tuple[list[pa.Array[Any]], int, int]:
        """Return the columns of the row group that holds the row, the row inside it, and the bytes read for it."""
        delivered = 0
        file = self._files.get(number)
        if file is None:
            file = self._files[number] = _File(self._asked, self._manifest, number)
            delivered += file.take_read_bytes()
            while len(self._files) > FILES_OPEN_MAX:
                self._files.popitem(last=False)
        group = int(np.searchsorted(file.firsts, row, "right")) - 1
        if row >= file.rows:
            raise Changed(file.url, "lost rows")
        columns = row_groups.get((self, number, group))
        if columns is None:
            columns = file.columns(group, self._columns)
            delivered += file.take_read_bytes()
            row_groups.put((self, number, group), columns)
        return columns, row - int(file.firsts[group]), delivered


class _Asked:
    """The store that open files read from, with a count of its answers."""

    def __init__(self, store: ObjectStore, within_seconds: float) -> None:
        self.base = store.base
        self._store = store
        self.within_seconds = within_seconds
        self.answers = 0

    def read(self, extent: Extent, out: memoryview) -> int:
        read_bytes = self._store.read([extent], out, self.within_seconds)
        self.answers += 1
        return read_bytes


class _File:
    """One open Parquet file: its footer, and its row groups on demand."""

    def __init__(self, store: _Asked, manifest: Manifest, number: int) -> None:
        self._object = manifest.object(number)
        self.url = store.base + self._object.path
        self._too_large: set[int] = set()  # row groups that proved too large
        self._raw = _ObjectFile(store, self._object.path, self._object.size)
        try:
            self._parquet = pq.ParquetFile(self._raw, pre_buffer=False)
        except (
            pa.ArrowException,
            OSError,
            UnicodeDecodeError,
        ) as error:  # pyarrow raises OSError for bytes that are no longer Parquet
            raise Changed(self.url, "changed") from error
        metadata = self._parquet.metadata
        counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self.rows = sum(counts)
        self.firsts = np.concatenate([[0], np.cumsum(counts)])[:-1].astype(np.int64)

    def columns(self, group: int, names: list[str]) -> list[pa.Array[Any]]:
        """Return the byte columns (``image`` or ``image.bytes``) of a row group, each one array of large binary."""
        try:
            if row_groups.group_bytes_max is not None:
                return self._bounded(group, names, row_groups.group_bytes_max)
            table = self._parquet.read_row_group(group, columns=names, use_threads=False)
            return [column_of(table, name)[0] for name in names]
        except (pa.ArrowException, OSError, KeyError, IndexError, UnicodeDecodeError, BadRequest) as error:
            raise Changed(self.url, "changed") from error

    @cached_property
    def _chunks(self) -> list[list[Chunk]]:
        return chunks_by_group(self._parquet.metadata)

    def _bounded(self, group: int, names: list[str], bytes_max: int) -> list[pa.ChunkedArray]:
        """Return the columns, decoded piece by piece. Raises ``OverCapacity`` past ``bytes_max``.

        A few kilobytes can decode to any size: a value that is stored once may be that of a million rows.
        """
        found = self._parquet.metadata.row_group(group)
        paths = set(names) | {name.partition(".")[0] for name in names}
        told = sum(it.uncompressed_bytes for it in self._chunks[group] if paths & {it.path, it.path.partition(".")[0]})
        if group in self._too_large or told > bytes_max:
            raise self._refusal(bytes_max)
        # No value is larger than its column in the file, so no piece is much larger than the bound.
        rows = max(min(PIECE_ROWS_MAX, PIECE_BYTES * found.num_rows // max(told, 1), bytes_max // max(told, 1)), 1)
        pieces: list[list[pa.Array[Any]]] = []
        size_bytes = 0
        for batch in self._parquet.iter_batches(rows, row_groups=[group], columns=names, use_threads=False):
            pieces.append([column_of(batch, name)[0] for name in names])
            size_bytes += sum(column.nbytes for column in pieces[-1])
            if size_bytes > bytes_max:
                self._too_large.add(group)
                raise self._refusal(bytes_max)
        columns = zip(*pieces, strict=True) if pieces else ([] for _ in names)
        return [pa.chunked_array(list(column), pa.large_binary()) for column in columns]

    def _refusal(self, bytes_max: int) -> OverCapacity:
        return OverCapacity(
            f"{self.url}: a row group is larger than {format_size(bytes_max)} when it is decoded;"
            " write it with smaller row groups",
            RETRY_AFTER_SECONDS,
        )

    def take_read_bytes(self) -> int:
        read_bytes, self._raw.read_bytes = self._raw.read_bytes, 0
        return read_bytes


def column_of(table: pa.Table | pa.RecordBatch, name: str) -> tuple[pa.Array[Any], Rows]:
    """Return a column, or a field of a struct column (``image.bytes``), as one array of large binary.

    Lists of numbers become the bytes of their values; also returns the rows that have none, because of a null inside.
    """
    parts: list[pa.Array[Any]] = []
    holes: list[Rows] = []
    rows = 0
    for chunk in chunks_of(table, name):
        part, holed = _large_binary(chunk)
        parts.append(part)
        holes.append(holed + rows)
        rows += len(part)
    if len(parts) == 1:
        return parts[0], holes[0]
    return (pa.concat_arrays(parts), np.concatenate(holes)) if parts else (pa.array([], pa.large_binary()), _NONE)


def chunks_of(table: pa.Table | pa.RecordBatch, name: str) -> Iterator[pa.Array[Any]]:
    """Yield the arrays that a column, or a field of a struct column, is made of; of an extension type its storage."""
    exact = name in table.schema.names  # a column may have a dot in its name
    outer, inner = (name, "") if exact else (name.rpartition(".")[0], name.rpartition(".")[2])
    column: Any = table.column(outer)
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        array = pa.compute.struct_field(chunk, inner) if inner else chunk
        # The bytes must not depend on whether this process knows the extension type.
        yield array.storage if isinstance(array, pa.ExtensionArray) else array


def _large_binary(array: pa.Array[Any]) -> tuple[pa.Array[Any], Rows]:
    if array.type == pa.large_binary():
        return array, _NONE
    return as_bytes(array) if array_type(array.type) is not None else (array.cast(pa.large_binary()), _NONE)


class _ObjectFile(io.RawIOBase):
    """An object of a store as a seekable file, which is what the Parquet reader takes. Counts what it read."""

    def __init__(self, store: _Asked, path: str, size: int) -> None:
        self._store = store
        self._path = path
        self._size = size
        self._at = 0
        self.read_bytes = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> Any:  # pyarrow takes any buffer, without a copy, and never None
        left = max(self._size - self._at, 0)
        take = left if size is None or size < 0 else min(size, left)
        data = bytearray(take)
        self.read_bytes += self._store.read(Extent(self._path, self._at, take), memoryview(data)) if take else 0
        self._at += take
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
