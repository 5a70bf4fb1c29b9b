"""The fields that a dataset hands out, and the two forms of a batch: samples one by one, or collated columns.

Both are made here, from the same parts: byte fields of a verified ``Batch``, scalars and keys of the manifest. Columns
are what torch's ``default_collate`` makes of the samples, made without making the samples: scalars come out of the
manifest's columns, and byte fields that are arrays of one shape (tokens in Parquet, ``.npy`` files) are copied into one
tensor by one call, so that making a tensor takes no Python step per sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from quiver.manifest import KEY_FIELD, Field, Header, Manifest
from quiver_client.batch import Batch

Rows = npt.NDArray[np.int64]
Sample = dict[str, Any]
VARYING: Final = -1
CLASSES_SHOWN: Final = 4


@dataclass(frozen=True, slots=True)
class Feature:
    """The type of a field. ``dtype``: ``"bytes"``, ``"string"``, an Arrow type's name for a scalar, numpy's for the
    values of an array, whose ``shape`` has ``None`` where it varies. ``classes``: the names behind integer labels."""

    dtype: str
    shape: tuple[int | None, ...] = ()
    classes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        shape = f", shape={self.shape}" if self.shape else ""
        more = ", …" if len(self.classes) > CLASSES_SHOWN else ""
        classes = f", classes=({', '.join(map(repr, self.classes[:CLASSES_SHOWN]))}{more})" if self.classes else ""
        return f"Feature({self.dtype!r}{shape}{classes})"


def features_of(header: Header, names: Sequence[str]) -> dict[str, Feature]:
    """Return the types of these fields."""
    known = {field.name: field for field in header.fields}
    return {name: _feature(known.get(name)) for name in names}


def _feature(field: Field | None) -> Feature:
    if field is None:
        return Feature("string")  # the key
    if not field.is_array or field.skip:
        return Feature(field.type, classes=field.classes)  # a .npy file's sample is its bytes
    sides = (VARYING,) if field.shape is None else field.shape
    return Feature(np.dtype(field.dtype).name, tuple(None if side == VARYING else side for side in sides))


@dataclass(frozen=True, slots=True)
class Fields:
    """Which fields of each sample to hand out. A value: it is pickled with its dataset."""

    names: tuple[str, ...]  # in the order of a sample's dictionary
    blobs: Mapping[str, tuple[Field, int]]  # the byte fields among them, each with its place among the fields read
    span: tuple[int, int] | None  # the first and the last byte field to read; None: no byte field was chosen
    copy: bool  # whether bytes are copied, or handed out as views

    @classmethod
    def chosen(cls, manifest: Manifest, names: Sequence[str] | None, *, whole: bool, copy: bool) -> Fields:
        """Choose fields by name, all for ``None``; ``whole``: read samples whole. Raises ``ValueError``."""
        header = manifest.header
        known = [field.name for field in header.fields]
        wanted = known if names is None else list(names)
        if not wanted or isinstance(names, str):
            raise ValueError(f"fields={names!r}: give a list of names out of {', '.join(known)}, {KEY_FIELD}")
        unknown = [name for name in wanted if name not in known and name != KEY_FIELD]
        if unknown:
            there = f"there are {', '.join(known)}, {KEY_FIELD}"
            raise ValueError(f"fields: no field {unknown[0]!r} in {manifest.path}; {there}")
        blobs = [field.name for field in header.blobs]
        chosen = [blobs.index(name) for name in wanted if name in blobs]
        if not chosen:
            return cls(tuple(wanted), {}, None, copy)
        first, last = (0, len(blobs) - 1) if whole else (min(chosen), max(chosen))
        return cls(tuple(wanted), {blobs[at]: (header.blobs[at], at - first) for at in chosen}, (first, last), copy)

    def samples(self, manifest: Manifest, rows: Rows, batch: Batch | None) -> Iterator[Sample]:
        """Yield the samples one by one. The bytes of each are copied when it is yielded, so that they reuse the memory
        that a transform released."""
        columns = [self._values(name, manifest, rows, batch) for name in self.names]
        for values in zip(*columns, strict=True):
            yield dict(zip(self.names, values, strict=True))

    def columns(self, manifest: Manifest, rows: Rows, batch: Batch | None) -> dict[str, Any]:
        """Return the collated batch: by field a tensor, or a list where values cannot be stacked.

        Raises ``ValueError`` naming a sample whose scalar has no value.
        """
        return {name: self._column(name, manifest, rows, batch) for name in self.names}

    def _values(self, name: str, manifest: Manifest, rows: Rows, batch: Batch | None) -> Iterable[Any]:
        """Return one field of the samples, value by value."""
        if name == KEY_FIELD:
            return manifest.keys(rows)
        if batch is None or name not in self.blobs:
            return manifest.scalars(name, rows)
        field, at = self.blobs[name]
        if field.dtype and not field.skip:
            return (None if data is None else _array(data, field) for data in batch.copies(at))
        return batch.copies(at) if self.copy else batch.views(at)

    def _column(self, name: str, manifest: Manifest, rows: Rows, batch: Batch | None) -> Any:
        if name == KEY_FIELD:
            return manifest.keys(rows)
        if batch is not None and name in self.blobs:
            stacked = _stacked(batch, *self.blobs[name])
            return stacked if stacked is not None else list(self._values(name, manifest, rows, batch))
        column = manifest.scalar_column(name, rows)
        if column.null_count:
            row = int(rows[int(np.argmin(np.asarray(column.is_valid())))])
            raise ValueError(
                f"field {name!r} of sample {row} ({manifest.key(row)!r}) has no value, and a batch needs one;"
                " give the Dataset a transform that puts one there, or fields=[…] without it"
            )
        return _scalars(column)


def _as_values(data: npt.NDArray[np.uint8], field: Field) -> npt.NDArray[Any]:
    """Return bytes as values of the field's type, those of a sample along the last dimension; copied only for bools.

    A bool is any byte but 0, in numpy as in a file that somebody else wrote; torch requires it to be 1.
    """
    return data != 0 if field.dtype == "|b1" else data.view(field.dtype)


def _array(data: bytes, field: Field) -> npt.NDArray[Any]:
    """Return the values of an array field, as an array of its own that may be written to."""
    return _as_values(np.frombuffer(bytearray(data), np.uint8), field).reshape(field.shape or -1)


def _stacked(batch: Batch, field: Field, at: int) -> torch.Tensor | None:
    if not field.dtype or field.fixed_shape is None:
        return None
    rows = batch.rows(at, field.skip)
    if rows is None:  # some sample lacks the field
        return None
    return torch.from_numpy(_as_values(rows, field).reshape(len(rows), *field.fixed_shape))


def _scalars(column: Any) -> Any:
    """Return a tensor of the type that ``default_collate`` gives Python's numbers, which is what samples hold."""
    values = column.to_numpy(zero_copy_only=False)
    if values.dtype.kind == "u" and values.dtype.itemsize == 8:
        return default_collate(values.tolist())  # raises for what exceeds an int64
    if values.dtype.kind == "f":
        return torch.from_numpy(values.astype(np.float64))
    return torch.from_numpy(values if values.dtype.kind == "b" else values.astype(np.int64))
