"""The machine's limit on one host: slices of one mapped file, and one numpy gather out of it."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator

import numpy as np

from bench.measure import Batch
from bench.peers.base import Peer


class MappedSlices(Peer):
    """A loop that cuts views out of a mapped file. Nothing is looked up, checked or planned."""

    name = "mapped"
    settings = "views of one mapped file, populated; offsets as Python integers made beforehand"

    def prepare(self) -> None:
        with self.data.blob.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._view = memoryview(mapped)
        begins, ends = self.data.offsets[:-1].tolist(), self.data.offsets[1:].tolist()
        self._cuts = [
            [(begins[number], ends[number]) for number in batch] for batch in self.data.batches(self.work.batch_size)
        ]

    def batches(self, way: str) -> Iterable[Batch]:
        view = self._view
        return ([view[begin:end] for begin, end in cuts] for cuts in self._cuts)


class MappedGather(Peer):
    """One ``numpy.take`` a batch out of a mapped array of samples that are all of one size."""

    name = "gather"
    settings = "numpy.take(mapped, rows, axis=0) a batch; rows as arrays made beforehand"

    def prepare(self) -> None:
        shape = self.data.count, self.data.sample_bytes // 4
        self._mapped = np.memmap(self.data.blob, np.int32, mode="r", shape=shape)
        self._rows = [np.asarray(batch) for batch in self.data.batches(self.work.batch_size)]

    def batches(self, way: str) -> Iterator[Batch]:
        for rows in self._rows:
            yield [np.take(self._mapped, rows, axis=0).reshape(-1).view(np.uint8)]
