"""Growing columns: what indexing learns about the samples, in a few arrays instead of objects.

A Python object per sample would cost a kilobyte; a column costs the bytes of its values and at most an eighth more.
It grows by ``realloc``, which for arrays of this size moves page tables and not bytes, so that there are never two
copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from quiver.manifest import ABSENT
from quiver.shard import U8, U64

I64 = npt.NDArray[np.int64]
XXH3_OF_NOTHING: Final = xxhash.xxh3_64_intdigest(b"")
ROWS_MIN: Final = 256


class Growing:
    """A numeric column of ``width`` values per row."""

    def __init__(self, dtype: npt.DTypeLike, width: int | None = None) -> None:
        self._tail = () if width is None else (width,)
        self._data: npt.NDArray[Any] = np.empty((0, *self._tail), dtype)
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def extend(self, values: npt.ArrayLike) -> None:
        """Append rows."""
        rows = np.asarray(values, self._data.dtype).reshape(-1, *self._tail)
        self._reserve(len(rows))
        self._data[self._rows : self._rows + len(rows)] = rows
        self._rows += len(rows)

    def fill(self, rows: int, value: int) -> None:
        """Append ``count`` rows of one value."""
        self._reserve(rows)
        self._data[self._rows : self._rows + rows] = value
        self._rows += rows

    def view(self) -> npt.NDArray[Any]:
        """Return the current rows; do not keep them while the column grows."""
        return self._data[: self._rows]

    def take(self) -> npt.NDArray[Any]:
        """Return the rows and release them."""
        data, rows = self._data, self._rows
        self._data, self._rows = np.empty((0, *self._tail), data.dtype), 0
        data.resize((rows, *self._tail), refcheck=False)
        return data

    def _reserve(self, more: int) -> None:
        wanted = self._rows + more
        if wanted > len(self._data):
            capacity = max(wanted, len(self._data) + len(self._data) // 8, ROWS_MIN)
            self._data.resize((capacity, *self._tail), refcheck=False)


class GrowingStrings:
    """A text column in Arrow's layout."""

    def __init__(self) -> None:
        self._data = Growing(np.uint8)
        self._ends = Growing(np.int64)
        self._ends.extend([0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def extend(self, texts: Sequence[str]) -> None:
        """Append texts."""
        encoded = [text.encode() for text in texts]
        self._append(np.frombuffer(b"".join(encoded), np.uint8), np.fromiter(map(len, encoded), np.int64, len(encoded)))

    def extend_array(self, texts: pa.Array) -> None:
        """Append an array of large_utf8."""
        _, offsets_buffer, data = texts.buffers()
        if not len(texts) or offsets_buffer is None:
            return
        offsets = np.frombuffer(offsets_buffer, np.int64, len(texts) + 1, texts.offset * 8)
        size = int(offsets[-1] - offsets[0])
        raw = np.frombuffer(data, np.uint8, size, int(offsets[0])) if size else np.empty(0, np.uint8)
        self._append(raw, np.diff(offsets))

    def view(self) -> pa.Array:
        """Return the current column as large_utf8; do not keep it while the column grows."""
        return _strings(self._ends.view(), self._data.view())

    def take(self) -> pa.Array:
        """Return the column as large_utf8 and release it."""
        ends, data = self._ends.take(), self._data.take()
        self._ends.extend([0])
        return _strings(ends, data)

    def _append(self, raw: U8, lengths: I64) -> None:
        start = len(self._data)
        self._data.extend(raw)
        self._ends.extend(start + np.cumsum(lengths))


def _strings(ends: I64, data: U8) -> Any:
    return pa.LargeStringArray.from_buffers(len(ends) - 1, pa.py_buffer(ends), pa.py_buffer(data))


class BlobColumn:
    """One byte field: its places in the origin, its lengths and its hashes."""

    def __init__(self) -> None:
        self.lengths = Growing(np.uint64)
        self.origins = Growing(np.uint64)
        self.xxh3 = Growing(np.uint64)

    def absent(self, rows: int) -> None:
        self.lengths.fill(rows, ABSENT)
        self.origins.fill(rows, 0)
        self.xxh3.fill(rows, XXH3_OF_NOTHING)

    def extend(self, lengths: npt.ArrayLike, origins: npt.ArrayLike, xxh3: npt.ArrayLike) -> None:
        self.lengths.extend(lengths)
        self.origins.extend(origins)
        self.xxh3.extend(xxh3)


@dataclass(slots=True, eq=False)
class Rows:
    """A run of samples as found. ``keys`` is None if the key of each sample is the path of its object.

    digests (n, 32) uint8 · objects (n,) uint32 · blobs: field -> (lengths, origins, xxh3), each (n,) uint64 ·
    scalars: field -> Arrow array (n,).
    """

    keys: pa.Array | None
    digests: U8
    objects: npt.NDArray[np.uint32]
    blobs: dict[str, tuple[U64, U64, U64]]
    scalars: dict[str, pa.Array]


class Samples:
    """All samples, in the order of the dataset. A field that some rows lack is absent or null there."""

    def __init__(self) -> None:
        self.keys = GrowingStrings()
        self.digests = Growing(np.uint8, 32)
        self.objects = Growing(np.uint32)
        self.blobs: dict[str, BlobColumn] = {}
        self.scalars: dict[str, list[pa.Array]] = {}
        self.unit_firsts: list[int] = []  # the first rows of row groups of Parquet files

    def __len__(self) -> int:
        return len(self.objects)

    def extend(self, rows: Rows) -> None:
        before, more = len(self), len(rows.objects)
        if rows.keys is not None:
            self.keys.extend_array(rows.keys)
        self.digests.extend(rows.digests)
        self.objects.extend(rows.objects)
        for name in rows.blobs.keys() - self.blobs.keys():
            self.blobs[name] = BlobColumn()
            self.blobs[name].absent(before)
        for name, column in self.blobs.items():
            if name in rows.blobs:
                column.extend(*rows.blobs[name])
            else:
                column.absent(more)
        for name in rows.scalars.keys() - self.scalars.keys():
            self.scalars[name] = [pa.nulls(before, rows.scalars[name].type)]
        for name, chunks in self.scalars.items():
            chunks.append(rows.scalars[name] if name in rows.scalars else pa.nulls(more, chunks[0].type))

    def absorb(self, other: Samples) -> None:
        """Append the rows of ``other``, which must not be used afterwards: the first is moved without a copy."""
        if not len(self):
            self.keys, self.digests, self.objects = other.keys, other.digests, other.objects
            self.blobs, self.scalars = other.blobs, other.scalars
            return
        blobs = {name: (c.lengths.view(), c.origins.view(), c.xxh3.view()) for name, c in other.blobs.items()}
        scalars = {name: other.take_scalar(name) for name in list(other.scalars)}
        keys = other.keys.take() if len(other.keys) else None
        self.extend(Rows(keys, other.digests.view(), other.objects.view(), blobs, scalars))

    def keep(self, rows: npt.NDArray[np.intp]) -> None:
        """Drop all rows but these."""
        taken = pa.array(rows)
        keys = self.keys.take()
        self.keys = GrowingStrings()
        self.keys.extend_array(keys.take(taken))
        self.scalars = {name: [self.take_scalar(name).take(taken)] for name in list(self.scalars)}
        for column in (self.digests, self.objects):
            column.extend(column.take()[rows])
        for blob in self.blobs.values():
            for column in (blob.lengths, blob.origins, blob.xxh3):
                column.extend(column.take()[rows])

    def take_scalar(self, name: str) -> pa.Array:
        chunks = self.scalars.pop(name)
        return pa.concat_arrays(chunks)

    def take_matrices(self, names: Sequence[str]) -> tuple[U64, U64, U64]:
        """Return lengths, origins and xxh3 of the byte fields in this order, each ``(n, f)``, and release them."""
        columns = [self.blobs.pop(name) for name in names]
        lengths = _matrix(column.lengths for column in columns)
        origins = _matrix(column.origins for column in columns)
        return lengths, origins, _matrix(column.xxh3 for column in columns)


def _matrix(columns: Iterable[Growing]) -> U64:
    parts = list(columns)
    if len(parts) == 1:
        return parts[0].take().reshape(-1, 1)
    whole = np.empty((len(parts[0]), len(parts)), np.uint64)
    for at, part in enumerate(parts):
        whole[:, at] = part.take()
    return whole


def byte_rows(digests: Sequence[bytes]) -> U8:
    """Return digests as ``(n, 32)``."""
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)
