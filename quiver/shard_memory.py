"""Memory for shards between an origin and the disk, reused from one fill to the next.

A fill needs memory for a whole shard for a moment. If each fill took it from the system, the kernel would clear every
page, and on a virtual machine fetch it from the host, before a byte is read into it. So fills reuse memory.

Invariant: memory is reused only once no view of it exists. ``take`` returns a view; the memory is free again when that
view and all views made of it (slices, arrays, those that an exception's traceback refers to) are garbage. No caller
returns it explicitly, so none can read what another fill writes into it.

Bounded: at most ``idle_max`` pieces of ``piece_bytes`` are kept. A larger shard gets memory of its own, which is
unmapped with its last view, as is every piece beyond ``idle_max``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

PIECE_BYTES: Final = 33 << 20  # a shard of the default size (32 MiB) and its table

Take = Callable[[int], memoryview]
"""Return writable memory of a size in bytes, of undefined content, valid as long as a reference to it exists."""


def fresh(size_bytes: int) -> memoryview:
    """A ``Take`` that keeps no memory for reuse."""
    return np.empty(size_bytes, np.uint8).data


class ShardMemory:
    """Keeps memory for the next ``take``. Safe from threads; empty in a forked child."""

    def __init__(self, idle_max: int, piece_bytes: int = PIECE_BYTES) -> None:
        self._idle_max = idle_max
        self._piece_bytes = piece_bytes
        # The last view may be freed in any thread and at any moment, during garbage collection too, so there is no
        # lock: operations of a deque are atomic, and a full one drops its oldest piece.
        self._idle: deque[mmap.mmap] = deque(maxlen=idle_max)
        self._used = time.monotonic()
        self._owner = os.getpid()

    def __repr__(self) -> str:
        return f"ShardMemory({len(self._idle)} of {self._idle_max} pieces idle)"

    @property
    def idle_bytes(self) -> int:
        """How many bytes are kept and not in use."""
        return len(self._idle) * self._piece_bytes

    def take(self, size_bytes: int) -> memoryview:
        """Return memory of this size, which is free again when the last view of it is garbage."""
        self._used = time.monotonic()
        if size_bytes > self._piece_bytes:
            return fresh(size_bytes)
        piece = self._popped() or _piece(self._piece_bytes)
        array = np.frombuffer(piece, np.uint8, size_bytes)  # every view of the memory refers to this one object
        weakref.finalize(array, self._idle.append, piece).atexit = False
        return array.data

    def drop_if_idle(self, seconds: float) -> None:
        """Return idle memory to the system if ``take`` was not called for so long."""
        if time.monotonic() - self._used >= seconds:
            self._idle.clear()

    def _popped(self) -> mmap.mmap | None:
        if self._owner != os.getpid():  # the parent's pages: each would be copied when it is written to
            self._owner = os.getpid()
            self._idle.clear()
        try:
            return self._idle.pop()  # the piece used last, whose pages are in the CPU's cache
        except IndexError:
            return None


def _piece(size_bytes: int) -> mmap.mmap:
    """Map memory that no other process sees, in huge pages where the system has them."""
    piece = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages knows no such advice
        piece.madvise(mmap.MADV_HUGEPAGE)
    return piece
