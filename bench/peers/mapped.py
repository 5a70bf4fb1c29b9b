"""The machine's limit on one host: slices of one mapped file, and one numpy gather from it."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import numpy.typing as npt

from bench.measure import Batch
from bench.peers.base import Peer
from bench.servers import CannotRun
from quiver_client import native


class MappedSlices(Peer):
    """A loop that takes slices of a mapped file. It looks up, checks and plans nothing."""

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


class MappedVerified(MappedSlices):
    """The same loop, with a thread that hashes each batch first: the cost of reading each byte twice here."""

    name = "mapped-verified"
    settings = "mapped; one thread ahead verifies the XXH3 of a batch's samples by one native call"

    def check(self) -> None:
        super().check()
        if native.pieces is None:
            raise CannotRun("no native code was built; install with a C compiler")

    def prepare(self) -> None:
        super().prepare()
        starts, ends = self.data.offsets[:-1], self.data.offsets[1:]
        self._address = np.frombuffer(self._view, np.uint8).ctypes.data
        self._numbers = [np.asarray(batch) for batch in self.data.batches(self.work.batch_size)]
        self._starts, self._sizes = starts.astype(np.int64), (ends - starts).astype(np.int64)
        self._expected = self._hashed(np.arange(len(starts)))

    def batches(self, way: str) -> Iterator[Batch]:
        with ThreadPoolExecutor(1) as ahead:
            checked = ahead.submit(self._is_right, self._numbers[0])
            for batch, following in zip(super().batches(way), chain(self._numbers[1:], [None]), strict=True):
                if not checked.result():
                    raise ValueError("the bytes changed while they were read")
                if following is not None:
                    checked = ahead.submit(self._is_right, following)
                yield batch

    def _is_right(self, numbers: npt.NDArray[np.int64]) -> bool:
        return bool((self._hashed(numbers) == self._expected[numbers]).all())

    def _hashed(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        assert native.pieces is not None
        return native.pieces.xxh3_64(
            self._address + self._starts[numbers], self._sizes[numbers], np.zeros(len(numbers), bool)
        )


class MappedGather(Peer):
    """One ``numpy.take`` per batch from a mapped array of samples of one size."""

    name = "gather"
    settings = "one numpy.take(mapped, rows, axis=0) per batch; rows as arrays made beforehand"

    def prepare(self) -> None:
        shape = self.data.count, self.data.sample_bytes // 4
        self._mapped = np.memmap(self.data.blob, np.int32, mode="r", shape=shape)
        self._rows = [np.asarray(batch) for batch in self.data.batches(self.work.batch_size)]

    def batches(self, way: str) -> Iterator[Batch]:
        for rows in self._rows:
            yield [np.take(self._mapped, rows, axis=0).reshape(-1).view(np.uint8)]
