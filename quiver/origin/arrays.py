"""Columns of lists of numbers as bytes: what tokens and tensors of a Parquet file are to a manifest.

The bytes of a row are its values, little-endian, in C order, a boolean in a byte of its own, whatever type of list they
stand in. Indexing and fills make them here, so that they agree. Only booleans are copied: the values of a column lie
back to back in Arrow's memory as well, and where a row begins is arithmetic.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

I64 = npt.NDArray[np.int64]

_NUMBERS: Final = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
_DTYPES: Final = {pa.type_for_alias(name): np.dtype(name).str for name in _NUMBERS}


class NullInside(ValueError):
    """A row that is there has a null among its values; ``row`` is its number."""

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row} has a null among its values")
        self.row = row


def array_type(kind: Any) -> tuple[str, tuple[int, ...] | None] | None:
    """Return dtype and shape of the rows of a column of this Arrow type; None if they are no arrays.

    The shape is None for lists of any length.
    """
    tensor: tuple[int, ...] | None = None
    if isinstance(kind, pa.FixedShapeTensorType):
        permutation = kind.permutation
        if permutation is not None and list(permutation) != sorted(permutation):
            return None  # its values stand in another order than C's
        tensor, kind = tuple(kind.shape), kind.storage_type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        dtype = _DTYPES.get(kind.value_type)
        return (dtype, None) if dtype else None
    shape = []
    while pa.types.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    dtype = _DTYPES.get(kind)
    if not dtype or not shape:
        return None
    return dtype, tuple(shape) if tensor is None else tensor


def as_bytes(array: pa.Array[Any]) -> pa.Array[Any]:
    """Return an array of an ``array_type``, of a tensor its storage, as large binary.

    Raises ``NullInside``, and pyarrow's errors for other types.
    """
    if array_type(array.type) is None:
        raise pa.ArrowTypeError(f"{array.type} is no list of numbers")
    valid = np.asarray(array.is_valid()) if array.null_count else None
    if pa.types.is_fixed_size_list(array.type):
        starts, values = np.arange(len(array) + 1, dtype=np.int64), array
        while pa.types.is_fixed_size_list(values.type):  # .values are all of them, wherever a slice of the lists begins
            starts, values = (starts + values.offset) * values.type.list_size, values.values
            _refuse_nulls(values, starts, valid)
    else:
        starts, values = np.asarray(array.offsets).astype(np.int64), array.values
        _refuse_nulls(values, starts, valid)
    return _large_binary(values.slice(starts[0], starts[-1] - starts[0]), starts - starts[0], valid)


def _refuse_nulls(values: pa.Array[Any], starts: I64, valid: npt.NDArray[np.bool_] | None) -> None:
    """Raise ``NullInside`` if there is a null in a row that is none itself; ``starts`` (n + 1,) count values."""
    window = values.slice(starts[0], starts[-1] - starts[0])
    if not window.null_count:
        return
    at = np.flatnonzero(np.asarray(window.is_null())) + starts[0]
    rows = np.searchsorted(starts, at, "right") - 1
    if valid is not None:
        rows = rows[valid[rows]]  # under a null there is nothing, and Arrow may fill that up with nulls
    if len(rows):
        raise NullInside(int(rows[0]))


def _large_binary(values: pa.Array[Any], starts: I64, valid: npt.NDArray[np.bool_] | None) -> pa.Array[Any]:
    """Return one binary value a row over the memory of ``values``; ``starts`` (n + 1,) count values."""
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.uint8())  # Arrow packs eight into a byte
    item_bytes = values.type.bit_width // 8
    buffer = values.buffers()[1]
    data = buffer.slice(values.offset * item_bytes, len(values) * item_bytes) if buffer is not None else None
    mask = pa.py_buffer(np.packbits(valid, bitorder="little")) if valid is not None else None
    offsets = pa.py_buffer(np.ascontiguousarray(starts * item_bytes))
    buffers = [mask, offsets, data if data is not None else pa.py_buffer(b"")]
    result = pa.Array.from_buffers(pa.large_binary(), len(starts) - 1, buffers)
    result.validate()  # that the offsets stay inside the data
    return result
