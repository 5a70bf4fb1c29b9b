"""The contents of a manifest file: an Arrow IPC file of one row, whose four columns are tables.

    samples   key, blob (which distinct sample), scalar fields           one row per sample, in the dataset's order
    blobs     offset, digest, xxh3, length, object, origin               one row per distinct sample, in shard order
    shards    digest, size, first (the first of its blobs)               one row per shard
    objects   path, size, etag, mtime_ns                                 one row per object of the origin

The tables are nested in one row because an IPC file has one schema and the tables have different lengths; any Arrow
library reads this. A *blob* row carries all byte fields of one distinct sample. The samples of a shard neither overlap
nor leave gaps: this follows from ``shards.first`` and ``blobs.length`` and is checked against ``blobs.offset``. Equal
samples are stored once, since several rows of ``samples`` may refer to one blob.

Format 2 added byte fields that are arrays, format 3 arrays whose first dimension varies, format 4 the dataset's name.
The writer chooses the oldest format that can express a manifest, since every reader knows it.
"""

from __future__ import annotations

import math
from typing import Any, Final, Literal

import msgspec
import pyarrow as pa

from quiver.errors import BadRequest
from quiver.identity import check_name
from quiver.layout import Layout
from quiver.location import Location, shown
from quiver.prepared import prepare

FORMAT_VERSION: Final = 4  # the newest that this version reads
FORMAT_OF_ARRAYS: Final = 2  # the first in which a byte field may be an array
FORMAT_OF_VARYING: Final = 3  # the first in which the first side of a shape may vary
FORMAT_OF_NAMES: Final = 4  # the first in which a dataset may have a name
VARYING: Final = -1
SUFFIX: Final = ".quiver"
METADATA_KEY: Final = b"quiver"
KEY_FIELD: Final = "__key__"
BLOB_TYPE: Final = "bytes"
ABSENT: Final = 2**64 - 1  # the length of a byte field that a sample lacks, which reads as None
OBJECT_BYTES_MAX: Final = 1 << 46
FIELDS_MAX: Final = 256
NAME_CHARS_MAX: Final = 80  # of a name in an error message: names are untrusted

SourceFormat = Literal["files", "imagefolder", "webdataset", "parquet"]
SCALAR_TYPES: Final = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("halffloat", "float", "double"),
)
# An allow list: none of these is numpy's object type, and all are little-endian.
ARRAY_DTYPES: Final = (
    *("|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8"),
    *("<f2", "<f4", "<f8"),
)
DIMENSIONS_MAX: Final = 32  # numpy's own limit before numpy 2
SKIP_BYTES_MAX: Final = 1 << 16


class Field(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A field of a sample. ``type`` is ``bytes`` for a blob, an Arrow type's name for a scalar.

    ``classes`` are the names behind an integer label, ``column`` is a blob's column in a Parquet file. A blob with a
    ``dtype`` (numpy's little-endian name) is an array in C order, of ``shape`` in every sample that has it, with -1 as
    first dimension if that varies, or of one dimension of any length if ``shape`` is None. ``skip`` bytes precede the
    values: the header of a .npy file.
    """

    name: str
    type: str
    classes: tuple[str, ...] = ()
    column: str = ""
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    skip: int = 0

    @property
    def is_array(self) -> bool:
        return self.dtype != ""

    @property
    def item_bytes(self) -> int:
        """The size of one value of an array, in bytes."""
        return int(self.dtype[2:])

    @property
    def fixed_shape(self) -> tuple[int, ...] | None:
        """The shape in every sample that has the field, or None if it varies."""
        return None if self.shape is None or VARYING in self.shape else self.shape

    @property
    def step_bytes(self) -> int:
        """The unit in bytes in which a field of varying shape grows: one value, or one row of values."""
        return self.item_bytes * math.prod(self.shape[1:] if self.shape else ())

    @property
    def array_bytes(self) -> int | None:
        """The size of the field in bytes in every sample that has it, or None if it varies."""
        shape = self.fixed_shape
        return None if shape is None else self.skip + math.prod(shape) * self.item_bytes


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A manifest's description of itself: the JSON under the schema's metadata key ``quiver``.

    ``name``: what people call the dataset; empty: nobody said, and clients call it by the file that they opened.
    """

    format: int
    layout: Layout
    shard_bytes: int
    source: SourceFormat
    base: str
    fields: tuple[Field, ...]
    name: str = ""

    @property
    def blobs(self) -> tuple[Field, ...]:
        return tuple(field for field in self.fields if field.type == BLOB_TYPE)

    @property
    def scalars(self) -> tuple[Field, ...]:
        return tuple(field for field in self.fields if field.type != BLOB_TYPE)


class OriginObject(msgspec.Struct, frozen=True):
    """An object of the origin at the time of indexing. ``path`` is relative to the manifest's base URL."""

    path: str
    size: int
    etag: str
    mtime_ns: int


def check_header(header: Header) -> None:
    """Raise ``BadRequest`` for a header that the indexer would not write."""
    names = [field.name for field in header.fields]
    if len(set(names)) != len(names) or "" in names or KEY_FIELD in names or len(names) > FIELDS_MAX:
        raise BadRequest(
            f"field names must be distinct, not empty, not {KEY_FIELD} and at most {FIELDS_MAX}:"
            f" {[shown(name, NAME_CHARS_MAX) for name in names[:8]]}"
        )
    if not header.blobs:
        raise BadRequest("no field of the manifest holds bytes")
    for field in header.scalars:
        if field.type not in SCALAR_TYPES:
            raise BadRequest(f"{_described(field)} has a type that is not a scalar type")
    for field in header.fields:
        _check_array(field, header)
    _check_name(header)
    if header.shard_bytes <= 0:
        raise BadRequest(f"shard_bytes is {header.shard_bytes}")
    try:
        Location.parse(header.base)
    except BadRequest as error:
        raise BadRequest(f"its base cannot be used: {error}") from error


def _check_name(header: Header) -> None:
    """A name is shown in tables, logs and metrics, so a manifest with one that could mislead there is not read."""
    if header.name and header.format < FORMAT_OF_NAMES:
        raise BadRequest(f"a manifest of format {header.format} cannot have a name")
    try:
        check_name("its name", header.name)
    except ValueError as error:
        raise BadRequest(shown(str(error))) from error


def _check_array(field: Field, header: Header) -> None:
    what = _described(field)
    if not field.is_array:
        if field.shape is not None or field.skip:
            raise BadRequest(f"{what} has a shape or a header but no dtype")
        return
    if field.type != BLOB_TYPE or header.format < FORMAT_OF_ARRAYS:
        raise BadRequest(f"{what} in a manifest of format {header.format} cannot be an array")
    if field.dtype not in ARRAY_DTYPES:
        raise BadRequest(f"{what} has dtype {field.dtype[:20]!r}, which is none of {', '.join(ARRAY_DTYPES)}")
    if not 0 <= field.skip <= SKIP_BYTES_MAX or (field.skip and (field.shape is None or header.source == "parquet")):
        raise BadRequest(f"{what} skips {field.skip} bytes before its values")
    sides = field.shape
    if sides is not None and sides[:1] == (VARYING,):
        sides = sides[1:]
        if header.format < FORMAT_OF_VARYING or field.skip or not all(side > 0 for side in sides):
            raise BadRequest(f"{what} in a manifest of format {header.format} cannot vary in shape")
    if sides is not None and not is_shape(sides, field.item_bytes):
        raise BadRequest(f"{what} has a shape that is impossible for an array: {str(field.shape)[:80]}")


def _described(field: Field) -> str:
    """Return a description of a field that is safe in an error message."""
    return f"field {shown(field.name, NAME_CHARS_MAX)!r} of type {shown(field.type, NAME_CHARS_MAX)!r}"


def is_shape(shape: tuple[int, ...], item_bytes: int) -> bool:
    """Whether an array can have this shape, and fit into an object of an origin."""
    if len(shape) > DIMENSIONS_MAX or any(not 0 <= size <= OBJECT_BYTES_MAX for size in shape):
        return False
    # Without zeros: numpy limits the product of the other dimensions.
    return math.prod(size for size in shape if size) * item_bytes <= OBJECT_BYTES_MAX


def with_format(header: Header) -> Header:
    """Return the header in the oldest format that can express it, for readers of an older version."""
    varies = any(field.shape is not None and field.fixed_shape is None for field in header.fields)
    arrays = any(field.is_array for field in header.fields)
    oldest = FORMAT_OF_VARYING if varies else FORMAT_OF_ARRAYS if arrays else 1
    return msgspec.structs.replace(header, format=FORMAT_OF_NAMES if header.name else oldest)


def encode_header(header: Header) -> bytes:
    """Return the header as JSON. Fields that are no arrays omit the array properties, and no name is omitted, as in
    format 1: a manifest without these has the digest that it had before there were any.
    """
    plain = msgspec.to_builtins(header)
    if not header.name:
        del plain["name"]
    for field in plain["fields"]:
        if not field["dtype"]:
            for name in ("dtype", "shape", "skip"):
                del field[name]
    return msgspec.json.encode(plain)


def arrow_schema(header: Header) -> pa.Schema:
    """Return the one schema that a manifest with this header has."""
    width = len(header.blobs)
    scalars = [pa.field(field.name, scalar_type(field.type)) for field in header.scalars]
    samples: list[pa.Field[Any]] = [_required("key", pa.large_utf8()), _required("blob", pa.uint32())]
    if scalars:
        samples.append(_required("scalars", pa.struct(scalars)))
    blobs = [
        _required("offset", pa.uint64()),
        _required("digest", pa.binary(32)),
        _required("xxh3", pa.list_(_required("item", pa.uint64()), width)),
        _required("length", pa.list_(_required("item", pa.uint64()), width)),
        _required("object", pa.uint32()),
        _required("origin", pa.list_(_required("item", pa.uint64()), width)),
    ]
    shards = [_required("digest", pa.binary(32)), _required("size", pa.uint64()), _required("first", pa.uint32())]
    objects = [
        _required("path", pa.large_utf8()),
        _required("size", pa.uint64()),
        _required("etag", pa.large_utf8()),
        _required("mtime_ns", pa.int64()),
    ]
    tables = {"samples": samples, "blobs": blobs, "shards": shards, "objects": objects}
    fields = [_required(name, pa.large_list(_required("item", pa.struct(rows)))) for name, rows in tables.items()]
    return pa.schema(fields, {METADATA_KEY: encode_header(header)})


def _required(name: str, kind: pa.DataType) -> pa.Field[Any]:
    return pa.field(name, kind, nullable=False)


def scalar_type(name: str) -> pa.DataType:
    return pa.type_for_alias(name)


prepare(Field, Header, OriginObject)
