"""A dataset of whole batches: ``Dataset`` read as collated columns, for datasets that process no sample by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.utils.data

from quiver_client.readable import Readable


class CollatedDataset(torch.utils.data.Dataset[Any]):
    """A dataset without a transform whose ``__getitems__`` is the collated batch: a dictionary of columns.

    An array field of one shape is a tensor ``(batch, *shape)``; other bytes, and a field that some sample lacks, are a
    list. Scalars are what ``default_collate`` makes of them: int64, float64 or bool. A ``.npy`` file is its array here,
    and its bytes in ``dataset[i]``.
    """

    def __init__(self, dataset: Readable) -> None:
        self._dataset = dataset

    @staticmethod
    def can_read(dataset: Readable) -> bool:
        """Whether no sample is processed alone: no transform is given, and no subclass overrides a method."""
        return dataset.can_collate

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        return self._dataset.columns(indices)


def collated(batch: Any) -> Any:
    """Return a batch unchanged: a collate function for batches that are collated already."""
    return batch
