"""LitData: chunks of 64 MB, streamed from local disk."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import Any, ClassVar

import torch.utils.data

from bench.data import Data
from bench.measure import Batch
from bench.peers.base import Peer


class LitData(Peer):
    """The chunks are written in the order of reading and read without a shuffle: the best case for it."""

    name = "litdata"
    extra = "bench-litdata"
    packages = ("litdata",)
    ways: ClassVar[tuple[str, ...]] = ("num_workers=0", "num_workers=2")
    settings = "optimize() into chunks of 64 MB in the order of reading, StreamingDataLoader, no compression"

    def check(self) -> None:
        home = str(self.work.folder)
        os.environ.update(DATA_OPTIMIZER_CACHE_FOLDER=f"{home}/cache", DATA_OPTIMIZER_DATA_CACHE_FOLDER=f"{home}/data")
        os.environ.update(LITDATA_DISABLE_VERSION_CHECK="1", HOME=home)  # it writes files to the home folder
        super().check()

    def prepare(self) -> None:
        import litdata

        self.work.folder.mkdir(parents=True, exist_ok=True)
        litdata.optimize(
            functools.partial(_sample, self.data),
            self.laid_out(),
            str(self.work.folder / "chunks"),
            chunk_bytes="64MB",
            num_workers=1,
            reorder_files=False,
            start_method="fork",
        )

    def laid_out(self) -> list[int]:
        """Return the samples in the order in which they are written."""
        return self.data.order.tolist()  # type: ignore[no-any-return]

    def batches(self, way: str) -> Iterable[Batch]:
        import litdata

        dataset = litdata.StreamingDataset(str(self.work.folder / "chunks"), shuffle=False, drop_last=False)
        workers = int(way.removeprefix("num_workers="))
        collate = _copies if workers else list  # it returns views of its chunks, which cannot cross processes
        loader: Any = litdata.StreamingDataLoader(
            dataset, batch_size=self.work.batch_size, num_workers=workers, collate_fn=collate
        )
        return loader  # type: ignore[no-any-return]


class LitDataIndexed(LitData):
    """The chunks are in the data's own order, and each sample is read by its number, so that the order can differ from
    epoch to epoch, as Quiver's does.
    """

    name = "litdata-indexed"
    ways = ("num_workers=0",)
    settings = "optimize() into chunks of 64 MB, dataset[i] in the order of reading, torch DataLoader, no compression"

    def laid_out(self) -> list[int]:
        return list(range(self.data.count))

    def batches(self, way: str) -> Iterable[Batch]:
        import litdata

        dataset: Any = litdata.StreamingDataset(str(self.work.folder / "chunks"), shuffle=False, drop_last=False)
        order = self.data.order.tolist()
        return torch.utils.data.DataLoader(_ByNumber(dataset), self.work.batch_size, sampler=order, collate_fn=list)


class _ByNumber(torch.utils.data.Dataset[Any]):
    """The samples by number; as an iterable dataset it would impose its own order."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


def _sample(data: Data, number: int) -> bytes:
    return data.sample(number)


def _copies(samples: list[Any]) -> Batch:
    return [bytes(sample) for sample in samples]
