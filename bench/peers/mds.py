"""MosaicML Streaming: MDS shards of 64 MiB, from local disk."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Iterable
from typing import Any, Final

import torch.utils.data

from bench.measure import Batch
from bench.peers.base import Peer

_TORCHVISION: Final = (
    "torchvision",
    "torchvision.datasets",
    "torchvision.transforms",
    "torchvision.transforms.functional",
)


class Mds(Peer):
    """The shards are written in the order of reading and read without a shuffle: the best case for it."""

    name = "mds"
    extra = "bench-mds"
    packages = ("streaming",)
    # With workers it hung or failed with newer versions of filelock; one process is faster in any case.
    settings = "MDSWriter, shards of 64 MiB in the order of reading, no compression, no hashes; local= and no remote"

    def check(self) -> None:
        _without_torchvision()
        super().check()

    def prepare(self) -> None:
        from streaming import MDSWriter
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        with MDSWriter(out=str(self.work.folder), columns={"data": "bytes"}, size_limit=64 << 20) as writer:
            for number in self.laid_out():
                writer.write({"data": self.data.sample(number)})
        self._dataset: Any = None

    def laid_out(self) -> list[int]:
        """Return the samples in the order in which they are written."""
        return self.data.order.tolist()  # type: ignore[no-any-return]

    def batches(self, way: str) -> Iterable[Batch]:
        from streaming import StreamingDataset

        if self._dataset is None:
            self._dataset = StreamingDataset(
                local=str(self.work.folder), shuffle=False, batch_size=self.work.batch_size, num_canonical_nodes=1
            )
        return torch.utils.data.DataLoader(
            self._dataset,
            self.work.batch_size,
            num_workers=0,
            collate_fn=_contents,
        )


class MdsIndexed(Mds):
    """The shards are in the data's own order, and each sample is read by its number, so that the order can differ from
    epoch to epoch, as Quiver's does.
    """

    name = "mds-indexed"
    settings = "MDSWriter, shards of 64 MiB, no compression, no hashes; dataset[i] in the order of reading"

    def laid_out(self) -> list[int]:
        return list(range(self.data.count))

    def batches(self, way: str) -> Iterable[Batch]:
        from streaming import StreamingDataset

        if self._dataset is None:
            self._dataset = StreamingDataset(local=str(self.work.folder), shuffle=False, batch_size=1)
        dataset = _ByNumber(self._dataset)
        order = self.data.order.tolist()
        return torch.utils.data.DataLoader(dataset, self.work.batch_size, sampler=order, collate_fn=_contents)


class _ByNumber(torch.utils.data.Dataset[Any]):
    """The samples by number; as an iterable dataset it would impose its own order."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


def _contents(samples: list[dict[str, bytes]]) -> Batch:
    return [sample["data"] for sample in samples]


def _without_torchvision() -> None:
    """Install an empty torchvision module if there is none that works with this torch.

    The package imports it on import, for image datasets that this bench does not use.
    """
    try:
        import torchvision  # type: ignore[import-not-found] # noqa: F401
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        empty = {name: types.ModuleType(name) for name in _TORCHVISION}
        empty["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
        empty["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]
        for name, module in empty.items():
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules.update(empty)
