"""A dataset of whole batches: ``Dataset`` read as collated columns, for datasets that process no sample by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.utils.data

from quiver_client.dataset import Dataset
from quiver_client.mix import Mix


class CollatedDataset(torch.utils.data.Dataset[Any]):
    """A dataset without a transform whose ``__getitems__`` is the collated batch: a dictionary of columns.

    An array field of one shape is a tensor ``(batch, *shape)``; other bytes, and a field that some sample lacks, are a
    list. Scalars are what ``default_collate`` makes of them: int64, float64 or bool. A ``.npy`` file is its array here,
    and its bytes in ``dataset[i]``.
    """

    def __init__(self, dataset: Dataset | Mix) -> None:
        self._dataset = dataset

    @staticmethod
    def can_read(dataset: Dataset | Mix) -> bool:
        """Whether no sample is processed alone: no transform is given, and no subclass overrides a method."""
        if isinstance(dataset, Mix):
            parts = dataset.parts.values()
            return len({part.fields for part in parts}) == 1 and all(map(CollatedDataset.can_read, parts))
        kind = type(dataset)
        own = kind.__getitem__ is Dataset.__getitem__ and kind.__getitems__ is Dataset.__getitems__
        return own and dataset.transform is None

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        return self._dataset.columns(indices)


def collated(batch: Any) -> Any:
    """Return a batch unchanged: a collate function for batches that are collated already."""
    return batch
