"""Plain files on local disk, one per sample, through torch's own DataLoader: the simplest setup."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.utils.data

from bench.data import Data
from bench.decode import decoded, stacked_batch
from bench.measure import Batch
from bench.peers.base import Peer


class FilesDataset(torch.utils.data.Dataset[Any]):
    """``dataset[i]`` is the content of file i, decoded if a decoder is given."""

    def __init__(self, data: Data, decode: Callable[[bytes], Any] | None = None) -> None:
        self._paths = [str(data.file(number)) for number in range(data.count)]
        self._decode = decode

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Any:
        with open(self._paths[index], "rb", buffering=0) as file:  # noqa: PTH123 - the cheapest way that there is
            content = file.read()
        return content if self._decode is None else self._decode(content)


class Files(Peer):
    """In this process, or with two workers; a trial finds the faster."""

    name = "files"
    ways = ("num_workers=0", "num_workers=2")
    settings = "one file per sample, opened unbuffered and read by one call; torch DataLoader"

    def prepare(self) -> None:
        self.data.files()

    def batches(self, way: str) -> Iterable[Batch]:
        return torch.utils.data.DataLoader(
            FilesDataset(self.data),
            self.work.batch_size,
            sampler=self.data.order.tolist(),
            num_workers=int(way.removeprefix("num_workers=")),
            collate_fn=list,
        )


class DecodedFiles(Peer):
    """Two persistent workers decode pictures to tensors."""

    name = "files-decoded"
    settings = "torch DataLoader, two persistent workers, JPEG decoded by Pillow, default collate"

    def prepare(self) -> None:
        self.data.files()
        self._loader = torch.utils.data.DataLoader(
            FilesDataset(self.data, decoded),
            self.work.batch_size,
            sampler=self.data.order.tolist(),
            num_workers=2,
            persistent_workers=True,
        )

    def batches(self, way: str) -> Iterable[Batch]:
        return map(stacked_batch, self._loader)
