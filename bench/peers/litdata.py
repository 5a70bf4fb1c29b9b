"""LitData: chunks of 64 MB, streamed from local disk."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from typing import Any

from bench.data import Data
from bench.measure import Batch
from bench.peers.base import Peer


class LitData(Peer):
    """The chunks are written in the order of reading and read without a shuffle: the best case for it."""

    name = "litdata"
    extra = "bench-litdata"
    packages = ("litdata",)
    ways = ("num_workers=0", "num_workers=2")
    settings = "optimize() into chunks of 64 MB in the order of reading, StreamingDataLoader, no compression"

    def check(self) -> None:
        home = str(self.work.folder)
        os.environ.update(DATA_OPTIMIZER_CACHE_FOLDER=f"{home}/cache", DATA_OPTIMIZER_DATA_CACHE_FOLDER=f"{home}/data")
        os.environ.update(LITDATA_DISABLE_VERSION_CHECK="1", HOME=home)  # it keeps its own files in the home folder
        super().check()

    def prepare(self) -> None:
        import litdata

        self.work.folder.mkdir(parents=True, exist_ok=True)
        litdata.optimize(
            functools.partial(_sample, self.data),
            self.data.order.tolist(),
            str(self.work.folder / "chunks"),
            chunk_bytes="64MB",
            num_workers=1,
            reorder_files=False,
            start_method="fork",
        )

    def batches(self, way: str) -> Iterable[Batch]:
        import litdata

        dataset = litdata.StreamingDataset(str(self.work.folder / "chunks"), shuffle=False, drop_last=False)
        workers = int(way.removeprefix("num_workers="))
        collate = _copies if workers else list  # it gives views of its chunks, which cannot come from another process
        loader: Any = litdata.StreamingDataLoader(
            dataset, batch_size=self.work.batch_size, num_workers=workers, collate_fn=collate
        )
        return loader  # type: ignore[no-any-return]


def _sample(data: Data, number: int) -> bytes:
    return data.sample(number)


def _copies(samples: list[Any]) -> Batch:
    return [bytes(sample) for sample in samples]
