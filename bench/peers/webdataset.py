"""WebDataset: tar files, read in sequence."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from typing import Any

from bench.measure import Batch
from bench.peers.base import Peer

SHARD_BYTES = 64 << 20


class WebDataset(Peer):
    """The tars are written in the order of reading, so that its shuffle costs nothing here: the best case for it."""

    name = "webdataset"
    extra = "bench-webdataset"
    packages = ("webdataset",)
    ways = ("num_workers=0", "num_workers=2")
    settings = "tars of 64 MiB in the order of reading, WebLoader, batched in the pipeline as its documentation says"

    def prepare(self) -> None:
        self.work.folder.mkdir(parents=True, exist_ok=True)
        self._tars: list[str] = []
        order, at = self.data.order.tolist(), 0
        while at < len(order):
            self._tars.append(str(self.work.folder / f"{len(self._tars):05}.tar"))
            with tarfile.open(self._tars[-1], "w", format=tarfile.USTAR_FORMAT) as file:
                while at < len(order) and file.offset < SHARD_BYTES:
                    content = self.data.sample(order[at])
                    info = tarfile.TarInfo(f"{at:08}.bin")
                    info.size = len(content)
                    file.addfile(info, io.BytesIO(content))
                    at += 1

    def batches(self, way: str) -> Iterable[Batch]:
        import webdataset

        workers = int(way.removeprefix("num_workers="))
        if workers > len(self._tars):
            return
        pipeline = webdataset.WebDataset(
            self._tars, shardshuffle=False, nodesplitter=webdataset.single_node_only, empty_check=False
        )
        batched = pipeline.to_tuple("bin").batched(self.work.batch_size, collation_fn=_contents, partial=True)
        yield from webdataset.WebLoader(batched, batch_size=None, num_workers=workers)


def _contents(samples: list[tuple[Any, ...]]) -> Batch:
    return [content for (content,) in samples]
