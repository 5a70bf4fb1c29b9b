"""Samples that lie anywhere in memory, copied into one array by one array operation.

A batch's samples lie in as many buffers as it has shards and peers. An index into an array reaches one buffer; an index
into the address space reaches them all, so that a batch costs the same out of one mapped file or out of a hundred.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
ADDRESSES_MAX: Final = 1 << 62
ROW_BYTES_MAX: Final = (1 << 31) - 1  # of one element of an array


class Buffer(NamedTuple):
    """Bytes in memory, and where they are. Whoever holds it keeps them there."""

    view: memoryview
    address: int

    @classmethod
    def of(cls, data: Any) -> Buffer:
        """Return the buffer of anything that has one: a mapping, an array, bytes."""
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        return cls(view, int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if len(view) else 0)


def gather(addresses: I64, length: int) -> U8:
    """Return ``(n, length)`` uint8: the ``length`` bytes at each of ``addresses (n,)``, copied.

    Nothing is checked here: all of these bytes must be inside buffers that the caller holds.
    """
    if not length or not len(addresses):
        return np.empty((len(addresses), length), np.uint8)
    kind = np.dtype(f"V{length}")
    rows: npt.NDArray[np.void] = _Memory(kind, int(addresses.min())).array[addresses - addresses.min()]
    together: U8 = rows.view(np.uint8).reshape(len(addresses), length)
    return together


class _Memory:
    """All memory from an address on, as an array of overlapping rows that begin at each byte."""

    def __init__(self, kind: np.dtype[Any], address: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "typestr": kind.str,
            "shape": (ADDRESSES_MAX // kind.itemsize,),
            "strides": (1,),
        }

    @property
    def array(self) -> npt.NDArray[np.void]:
        return np.asarray(self)
