"""Samples that lie anywhere in memory, copied into one array by one array operation.

A batch's samples lie in as many buffers as it has shards and peers. An index into an array reaches one buffer; an
index into the address space reaches them all, so that a batch of small samples costs the same out of one mapped file or
out of a hundred. Larger ones are copied one by one, which then costs nothing beside the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
Places = npt.NDArray[np.intp]
GATHERED_BYTES_MAX: Final = 16 << 10  # a larger sample is hashed and copied as fast where it lies
ARRAY_BYTES_MAX: Final = 1 << 62  # of any array: with rows of 16 KiB it reaches 2^48 bytes, which is all that there are


class Buffer(NamedTuple):
    """Bytes in memory, and where they are. Whoever holds it keeps them there."""

    view: memoryview
    address: int

    @classmethod
    def of(cls, data: Any) -> Buffer:
        """Return the buffer of anything that has one: a mapping, an array, bytes."""
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        return cls(view, int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if len(view) else 0)


def gather(buffers: Sequence[Buffer], which: Places, starts: I64, length: int) -> U8:
    """Return ``(n, length)`` uint8: ``length`` bytes of buffer ``which (n,)`` from byte ``starts (n,)`` on, copied.

    Raises ``IndexError`` if any of them is outside its buffer: nothing below would notice.
    """
    sizes = np.asarray([len(buffer.view) for buffer in buffers], np.int64)
    if ((starts < 0) | (starts + length > sizes[which])).any():
        raise IndexError("bytes outside a buffer")
    if not length or not len(which):
        return np.empty((len(which), length), np.uint8)
    if length > GATHERED_BYTES_MAX:
        rows = np.empty((len(which), length), np.uint8)
        views = [buffer.view for buffer in buffers]
        for row, at, start in zip(rows, which.tolist(), starts.tolist(), strict=True):
            row[:] = np.frombuffer(views[at], np.uint8, length, start)
        return rows
    addresses = np.asarray([buffer.address for buffer in buffers], np.int64)[which] + starts
    lowest = int(addresses.min())
    found: npt.NDArray[np.void] = _Memory(np.dtype(f"V{length}"), lowest).array[addresses - lowest]
    together: U8 = found.view(np.uint8).reshape(len(which), length)
    return together


class _Memory:
    """All memory from an address on, as an array of overlapping rows that begin at each byte."""

    def __init__(self, kind: np.dtype[Any], address: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "typestr": kind.str,
            "shape": (ARRAY_BYTES_MAX // kind.itemsize,),
            "strides": (1,),
        }

    @property
    def array(self) -> npt.NDArray[np.void]:
        return np.asarray(self)
