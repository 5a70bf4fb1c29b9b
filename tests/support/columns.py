"""A table with a column of each kind, its samples, and torch's collation of their batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import default_collate

from quiver.manifest import Manifest

Truth = dict[str, list[Any]]
SAMPLES = 120
RAGGED = "ragged"


def values() -> dict[str, pa.Array[Any]]:
    """Return a column of each kind."""
    rng = np.random.default_rng(0)
    count = SAMPLES
    rows = range(count)
    tokens = pa.array(rng.integers(0, 2**16, count * 40), pa.uint16())
    return {
        "blob": pa.array([rng.bytes(int(rng.integers(0, 300))) for _ in rows], pa.binary()),
        "empty": pa.array([b"" for _ in rows], pa.binary()),
        "tokens": pa.FixedSizeListArray.from_arrays(tokens, 40),
        "more": pa.array([[float(row), 0.5] for row in rows], pa.list_(pa.float32(), 2)),
        "flags": pa.array([[row % 2 == 0, row % 3 == 0, True] for row in rows], pa.list_(pa.bool_(), 3)),
        "holes": pa.array([None if row % 50 == 7 else [row, -row] for row in rows], pa.list_(pa.int64(), 2)),
        RAGGED: pa.array([list(range(row % 7)) for row in rows], pa.list_(pa.int32())),
        "gaps": pa.array([None if row % 40 == 3 else b"%04d" % row for row in rows], pa.binary()),
        "text": pa.array([f"sample {row}" for row in rows]),
        "int": pa.array(rng.integers(-(2**63), 2**63 - 1, count), pa.int64()),
        "small": pa.array(rng.integers(-100, 100, count), pa.int8()),
        "unsigned": pa.array([2**63 if row == 11 else row for row in rows], pa.uint64()),
        "double": pa.array([float("nan") if row == 5 else row / 3 for row in rows], pa.float64()),
        "half": pa.array(rng.normal(size=count).astype(np.float16)),
        "bool": pa.array([row % 3 == 0 for row in rows]),
        "null": pa.array([None if row % 60 == 9 else row for row in rows], pa.int32()),
    }


FIELDS = [*values(), "__key__"]
EVEN = ["tokens", "more", "flags"]  # of one size: gathered


def truth_of(manifest: Path) -> Truth:
    """Return the value of each field of each sample, from the table and not from the manifest."""
    found: Truth = {"__key__": Manifest.open(manifest).keys(np.arange(SAMPLES))}
    for name, column in values().items():
        plain = column.to_pylist()
        if pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
            kind = column.type.value_type.to_pandas_dtype()
            plain = [None if value is None else np.asarray(value, kind) for value in plain]
        elif name == "text":
            plain = [value.encode() for value in plain]
        elif name == "half":
            plain = [float(value) for value in plain]
        found[name] = plain
    return found


def collated(name: str, values: list[Any]) -> Any:
    """Return a field of a batch: torch's collation, but a list if byte fields differ or are missing."""
    missing = name != "null" and any(value is None for value in values)
    return values if missing or name == RAGGED else default_collate(values)


def outcome(make: Callable[[], dict[str, Any]]) -> dict[str, Any] | tuple[type, str]:
    """Return a batch, or the type and text of the error."""
    try:
        return make()
    except (ValueError, TypeError, RuntimeError) as error:
        return type(error), str(error).splitlines()[0]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        if type(one) is not type(other) or one.dtype != other.dtype or one.shape != other.shape:
            return False
        return bool(torch.equal(one, other) or torch.allclose(one, other, 0, 0, equal_nan=True))
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and bool(one == other or str(one) == str(other) == "nan")


def batch_of(truth: Truth, rows: Sequence[int], fields: Sequence[str]) -> dict[str, Any]:
    return {name: _column(name, truth[name], rows) for name in fields}


def _column(name: str, values: Sequence[Any], rows: Sequence[int]) -> Any:
    if name == "null":
        for row in (row % len(values) for row in rows):
            if values[row] is None:  # torch's own error says neither which field nor which sample
                raise ValueError(
                    f"field {name!r} of sample {row} ('{row:09d}') has no value, and a batch needs one;"
                    " give the Dataset a transform that puts one there, or fields=[…] without it"
                )
    return collated(name, [values[row] for row in rows])
