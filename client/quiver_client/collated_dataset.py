"""A batch by columns: what torch's ``default_collate`` makes of its samples, made without making the samples.

Scalars come out of the manifest's columns, and byte fields that are known to be arrays of one shape (tokens in Parquet,
``.npy`` files) are stacked by one gather, so that nothing here takes a Python step a sample where a tensor comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data
from torch.utils.data import default_collate

from quiver.manifest import KEY_FIELD, Field
from quiver_client.batch import Batch
from quiver_client.dataset import Dataset, as_values

Rows = npt.NDArray[np.intp]


class CollatedDataset(torch.utils.data.Dataset[Any]):
    """A dataset without a transform whose ``__getitems__`` is the collated batch: a dictionary of columns.

    An array field of one shape is a tensor ``(batch, *shape)``; other bytes, and a field that some sample lacks, are a
    list. Scalars are what ``default_collate`` makes of them: int64, float64 or bool. A ``.npy`` file is its array here,
    and its bytes in ``dataset[i]``.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    @staticmethod
    def can_read(dataset: Dataset) -> bool:
        """Whether nothing is to be done with each sample: no transform, nor what a subclass does in its place."""
        kind = type(dataset)
        own = kind.__getitem__ is Dataset.__getitem__ and kind.__getitems__ is Dataset.__getitems__
        return own and dataset.transform is None

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        dataset = self._dataset
        rows = dataset.checked(indices)
        batch = dataset.read(rows)
        return {name: self._column(name, rows, batch) for name in dataset.fields}

    def _column(self, name: str, rows: Rows, batch: Batch | None) -> Any:
        dataset = self._dataset
        if batch is not None and name in dataset.blobs:
            field, at = dataset.blobs[name]
            stacked = _stacked(batch, field, at)
            return stacked if stacked is not None else list(dataset.column(name, rows, batch))
        if name == KEY_FIELD:
            return dataset.manifest.keys(rows)
        column = dataset.manifest.scalar_column(name, rows)
        if column.null_count:
            row = int(rows[int(np.argmin(np.asarray(column.is_valid())))])
            raise ValueError(
                f"field {name!r} of sample {row} ({dataset.manifest.key(row)!r}) has no value, and a batch needs one;"
                " give the Dataset a transform that puts one there, or fields=[…] without it"
            )
        return _scalars(column)


def collated(batch: Any) -> Any:
    """Return a batch that is collated already."""
    return batch


def _stacked(batch: Batch, field: Field, at: int) -> torch.Tensor | None:
    if not field.dtype or field.fixed_shape is None:
        return None
    rows = batch.rows(at, field.skip)
    if rows is None:  # some sample lacks it
        return None
    return torch.from_numpy(as_values(rows, field).reshape(len(rows), *field.fixed_shape))


def _scalars(column: Any) -> Any:
    """Return a tensor of the type that Python's numbers get, which is what samples hold."""
    values = column.to_numpy(zero_copy_only=False)
    if values.dtype.kind == "u" and values.dtype.itemsize == 8:
        return default_collate(values.tolist())  # beyond an int64 there is an error
    if values.dtype.kind == "f":
        return torch.from_numpy(values.astype(np.float64))
    return torch.from_numpy(values if values.dtype.kind == "b" else values.astype(np.int64))
