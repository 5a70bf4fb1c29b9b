"""``IterableView``: a dataset as a stream, for programs that are written for torch's ``IterableDataset``.

The stream is divided over the ranks and, within a rank, over the loader's workers, so that each sample is given once.
Each of them reads its part in blocks, so that a sample that is yielded costs no request of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from quiver.substitution import permutation
from quiver_client.loader.arguments import rank_and_world_size, whole
from quiver_client.readable import Readable
from quiver_client.selection import Ints

BLOCK_BYTES: Final = 32 << 20  # of samples that are read together,
BLOCK_SAMPLES_MAX: Final = 256  # and at most so many of them


class IterableView(IterableDataset[Any]):
    """The samples of a dataset as an iterable: ``dataset.iterable(shuffle=True, seed=0)``.

    ``shuffle``: in the order of a permutation that follows from ``seed`` and the epoch; else in the dataset's order.
    Over all ranks (torch.distributed's, else torchrun's) and workers each sample is given exactly once per epoch. If
    the ranks do not divide the samples, some have one more; with ``drop_last`` the rest is left out.

    There is no substitution here: ``quiver_client.DataLoader`` reads what is resident first, this view in its order.
    """

    def __init__(self, dataset: Readable, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False) -> None:
        self.dataset = dataset
        self._shuffle, self._seed, self._drop_last = bool(shuffle), whole("seed", seed, 0), bool(drop_last)
        self._sent_by: tuple[int, int] | None = None  # the rank of the process that pickled this, and of how many
        # In shared memory: workers that persist see the epoch that the training process sets.
        self._epoch = torch.zeros((), dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]
        leaves = dataset.placement().leaves
        sample_bytes = sum(leaf.manifest.total_bytes for leaf in leaves) / sum(len(leaf.manifest) for leaf in leaves)
        self._block = min(max(int(BLOCK_BYTES / max(sample_bytes, 1)), 1), BLOCK_SAMPLES_MAX)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        order = self._of_rank(permutation(len(self.dataset), self._seed, int(self._epoch), shuffle=self._shuffle))
        if worker is not None:
            order = np.array_split(order, worker.num_workers)[worker.id]
        for at in range(0, len(order), self._block):
            yield from self.dataset.__getitems__(order[at : at + self._block].tolist())

    def __len__(self) -> int:
        """Return the number of samples of this rank."""
        return len(self._of_rank(np.arange(len(self.dataset))))

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration read in the order of this epoch, in workers that persist as well."""
        self._epoch.fill_(whole("epoch", epoch, 0))

    def __getstate__(self) -> dict[str, Any]:
        """A spawned worker is in no process group: it reads a part of the share of the rank that spawned it."""
        return {**self.__dict__, "_sent_by": rank_and_world_size(None, None)}

    def _of_rank(self, order: Ints) -> Ints:
        """Return this rank's part of the order."""
        rank, world_size = rank_and_world_size(None, None)
        if world_size == 1 and get_worker_info() is not None and self._sent_by is not None:
            rank, world_size = self._sent_by
        if self._drop_last:
            order = order[: len(order) // world_size * world_size]
        return np.array_split(order, world_size)[rank]
