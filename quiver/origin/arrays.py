"""Columns of lists of numbers as bytes: how tokens and tensors of a Parquet file become samples.

The bytes of a row are its values, little-endian, in C order, one byte per boolean, for every type of list. Indexing and
fills both convert them here, so that they agree. Only booleans are copied: Arrow stores the values of a column back to
back as well, and the offset of a row is computed.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

I64 = npt.NDArray[np.int64]
Rows = npt.NDArray[np.intp]

_NUMBERS: Final = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
_DTYPES: Final = {pa.type_for_alias(name): np.dtype(name).str for name in _NUMBERS}


class ArrayType(NamedTuple):
    """The type of a column's rows: ``shape`` if the type defines it, None for a side of any length."""

    dtype: str
    shape: tuple[int, ...] | None
    dimensions: int


def array_type(kind: Any) -> ArrayType | None:
    """Return the array type of the rows of a column of this Arrow type; None if they are not arrays."""
    tensor: tuple[int, ...] | None = None
    if isinstance(kind, pa.FixedShapeTensorType):
        permutation = kind.permutation
        if permutation is not None and list(permutation) != sorted(permutation):
            return None  # its values are not in C order
        tensor, kind = tuple(kind.shape), kind.storage_type
    elif isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type  # Hugging Face's Array2D and so on: nested lists
    sides: list[int | None] = []
    while (child := _child(kind)) is not None:
        sides.append(kind.list_size if pa.types.is_fixed_size_list(kind) else None)
        kind = child
    dtype = _DTYPES.get(kind)
    if not dtype or not sides:
        return None
    if tensor is not None:
        return ArrayType(dtype, tensor, len(tensor))
    known = tuple(side for side in sides if side is not None)
    return ArrayType(dtype, known if len(known) == len(sides) else None, len(sides))


def as_bytes(array: pa.Array[Any]) -> tuple[pa.Array[Any], Rows]:
    """Return an array of an ``array_type``, of a tensor its storage, as large binary, and which rows have a hole.

    A row with a null among its values, or among the lists inside it, has no bytes and is null in the result. A null
    among floating-point values becomes NaN. Raises pyarrow's errors for other types.
    """
    if array_type(array.type) is None:
        raise pa.ArrowTypeError(f"{array.type} is not a list of numbers")
    valid = np.asarray(array.is_valid()) if array.null_count else np.ones(len(array), np.bool_)
    holed = np.zeros(len(array), np.bool_)
    starts, values = np.arange(len(array) + 1, dtype=np.int64), array
    while _child(values.type) is not None:
        starts, values = _inside(starts, values)
        if pa.types.is_floating(values.type) and values.null_count:
            values = values.fill_null(np.nan)
        holed |= _holed(values, starts)
    holed &= valid  # a null row has no values, and Arrow may fill its place with nulls
    result = _large_binary(values.slice(starts[0], starts[-1] - starts[0]), starts - starts[0], valid & ~holed)
    return result, np.flatnonzero(holed)


def inner_shape(array: pa.Array[Any]) -> tuple[int | None, ...] | None:
    """Return the sides of the rows of nested lists, from the second dimension on; None for a side that no row has.

    Null rows are ignored. Returns None if rows differ in these sides, or lists inside a row do: such a
    column does not hold arrays.
    """
    if array.null_count:
        array = array.filter(array.is_valid())
    starts, values = np.arange(len(array) + 1, dtype=np.int64), array
    starts, values = _inside(starts, values)
    sides: list[int | None] = []
    while _child(values.type) is not None:
        window = np.arange(starts[0], starts[-1] + 1, dtype=np.int64)
        starts, values = _inside(window, values)
        lengths = np.diff(starts)
        if len(lengths) and lengths.min() != lengths.max():
            return None
        sides.append(int(lengths[0]) if len(lengths) else None)
    return tuple(sides)


def _child(kind: Any) -> Any:
    types = pa.types
    nested = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return kind.value_type if nested else None


def _inside(starts: I64, values: pa.Array[Any]) -> tuple[I64, pa.Array[Any]]:
    """Descend by one level: return the starts of rows counted in child values, and the child values."""
    if pa.types.is_fixed_size_list(values.type):  # .values ignores where a slice of the lists begins
        return (starts + values.offset) * values.type.list_size, values.values
    return np.asarray(values.offsets).astype(np.int64)[starts], values.values


def _holed(values: pa.Array[Any], starts: I64) -> npt.NDArray[np.bool_]:
    """Return which rows have a null among these values; ``starts`` (n + 1,) count values."""
    holed = np.zeros(len(starts) - 1, np.bool_)
    window = values.slice(starts[0], starts[-1] - starts[0])
    if window.null_count:
        at = np.flatnonzero(np.asarray(window.is_null())) + starts[0]
        holed[np.searchsorted(starts, at, "right") - 1] = True
    return holed


def _large_binary(values: pa.Array[Any], starts: I64, valid: npt.NDArray[np.bool_]) -> pa.Array[Any]:
    """Return one binary value per row that shares the memory of ``values``; ``starts`` (n + 1,) count values."""
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.uint8())  # Arrow packs eight into a byte
    item_bytes = values.type.bit_width // 8
    buffer = values.buffers()[1]
    data = buffer.slice(values.offset * item_bytes, len(values) * item_bytes) if buffer is not None else None
    mask = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    offsets = pa.py_buffer(np.ascontiguousarray(starts * item_bytes))
    buffers = [mask, offsets, data if data is not None else pa.py_buffer(b"")]
    result = pa.Array.from_buffers(pa.large_binary(), len(starts) - 1, buffers)
    result.validate()  # that the offsets stay inside the data
    return result
