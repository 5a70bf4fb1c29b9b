"""What the footer of a Parquet file says of its column chunks, without pyarrow's accessor of them.

``RowGroupMetaData.column`` ends the process (``std::terminate``) on a footer in which some sizes do not agree: pyarrow
does not catch what Arrow throws there. A daemon reads files that other people wrote. So the sizes of column chunks are
taken from the footer itself, as Arrow writes it back: Thrift's compact protocol, in which a field is a header and a
value. Only that accessor is affected; Arrow's readers return such errors.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from quiver.errors import BadRequest

FOOTER_BYTES_MAX: Final = 64 << 20  # parsed at some 6 MB/s, once per file
_DEPTH_MAX: Final = 32
_MAGIC_BYTES: Final = 4
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_ROW_GROUPS, _COLUMNS, _META_DATA = 4, 1, 3  # of FileMetaData, RowGroup and ColumnChunk (parquet.thrift)
_TYPE, _PATH, _VALUES, _UNCOMPRESSED = 1, 3, 5, 6  # of ColumnMetaData


class Chunk(NamedTuple):
    """A column of a row group. ``path``: its names from the outermost one on, joined by dots."""

    path: str
    physical_type: int  # the number of ``parquet::Type``
    values: int
    uncompressed_bytes: int


def chunks_by_group(metadata: Any) -> list[list[Chunk]]:
    """Return the column chunks of each row group of a ``pyarrow.parquet.FileMetaData``.

    Raises ``BadRequest`` for a footer that is too large or makes no sense.
    """
    out = io.BytesIO()
    metadata.write_metadata_file(out)
    footer = out.getbuffer()[_MAGIC_BYTES:]
    if len(footer) > FOOTER_BYTES_MAX:
        raise BadRequest(f"its footer has {len(footer)} bytes, and {FOOTER_BYTES_MAX} are allowed")
    reader = _Reader(bytes(footer))
    try:
        groups = [list(_chunks(reader)) for _ in _structs_in(reader, _ROW_GROUPS)]
    except IndexError:
        raise BadRequest("its footer ends early") from None
    if len(groups) != metadata.num_row_groups:
        raise BadRequest("its footer lists its row groups more than once")
    return groups


def _chunks(reader: _Reader) -> Iterator[Chunk]:
    """Yield the column chunks of the row group at which the reader stands."""
    for _ in _structs_in(reader, _COLUMNS):
        path, numbers, found = "", {_TYPE: 0, _VALUES: 0, _UNCOMPRESSED: 0}, False
        for field, kind in reader.fields():
            if field != _META_DATA or kind != _STRUCT:
                reader.skip(kind)
                continue
            found = True
            for inner, of in reader.fields():
                if inner in numbers and of in (_I32, _I64):
                    numbers[inner] = reader.integer()
                elif inner == _PATH and of == _LIST:
                    count, _ = reader.list_head()
                    path = ".".join(reader.binary().decode(errors="replace") for _ in range(count))
                else:
                    reader.skip(of)
        if found:
            yield Chunk(path, numbers[_TYPE], max(numbers[_VALUES], 0), max(numbers[_UNCOMPRESSED], 0))


def _structs_in(reader: _Reader, wanted: int) -> Iterator[None]:
    """Yield once for each struct of the list ``wanted`` in the struct where the reader stands; the caller reads it."""
    for field, kind in reader.fields():
        if field != wanted or kind != _LIST:
            reader.skip(kind)
            continue
        count, of = reader.list_head()
        if of != _STRUCT and count:
            raise BadRequest("its footer makes no sense")
        for _ in range(count):
            yield


class _Reader:
    """Thrift's compact protocol. ``IndexError`` past the end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yield number and type of each field of a struct; the caller reads or skips its value."""
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self.integer()
            yield number, head & 15

    def integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def binary(self) -> bytes:
        size = self._varint()
        self._skip_bytes(size)
        return self._data[self._at - size : self._at]

    def list_head(self) -> tuple[int, int]:
        """Return how many elements follow, and their type."""
        head = self._byte()
        count = head >> 4
        return (self._varint() if count == 15 else count), head & 15

    def skip(self, kind: int, depth: int = 0) -> None:
        if depth > _DEPTH_MAX:
            raise BadRequest("its footer is nested too deep")
        if kind == _BYTE:
            self._skip_bytes(1)
        elif kind in (_I16, _I32, _I64):
            self._varint()
        elif kind == _DOUBLE:
            self._skip_bytes(8)
        elif kind == _BINARY:
            self._skip_bytes(self._varint())
        elif kind in (_LIST, _SET):
            count, of = self.list_head()
            for _ in range(count):
                self._skip_element(of, depth)
        elif kind == _MAP:
            count = self._varint()
            kinds = self._byte() if count else 0
            for _ in range(count):
                self._skip_element(kinds >> 4, depth)
                self._skip_element(kinds & 15, depth)
        elif kind == _STRUCT:
            for _, of in self.fields():
                self.skip(of, depth + 1)
        elif kind not in (_TRUE, _FALSE):  # a boolean field is its header alone
            raise BadRequest("its footer makes no sense")

    def _skip_element(self, kind: int, depth: int) -> None:
        if kind in (_TRUE, _FALSE):  # in a list it is a byte
            self._skip_bytes(1)
        else:
            self.skip(kind, depth + 1)

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 0x80:
            value |= (byte & 0x7F) << shift
            shift += 7
            if shift > 63:
                raise BadRequest("its footer makes no sense")
        return value | byte << shift

    def _skip_bytes(self, count: int) -> None:
        self._at += count
        if self._at > len(self._data):
            raise IndexError
