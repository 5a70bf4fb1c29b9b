"""Samples that lie anywhere in memory, copied into one array or hashed by one call.

A batch's samples lie in as many buffers as it has shards and peers. An index into an array reaches one buffer; an
address reaches them all, so that a batch of small samples costs the same out of one mapped file or out of a hundred.
Native code does it by address, without the interpreter's lock (``quiver_client.native``). Without that, small samples
are copied by an index into the address space, and larger ones, or hashes, are taken one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from quiver.shard import COUNT_BYTES
from quiver_client import native
from quiver_client.pages import is_readable, reaches

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.intp]
SMALL_BYTES_MAX: Final = 16 << 10  # a larger sample is hashed and copied as fast where it lies
JOINED_BYTES: Final = 256 << 10  # of small samples: copied by one call, and cut apart while the CPU's cache holds them
JOINED_MIN: Final = 24  # fewer are copied one by one as fast
ARRAY_BYTES_MAX: Final = 1 << 62  # of any array: with rows of 16 KiB it reaches 2^48 bytes, which is all that there are


class Buffer(NamedTuple):
    """Bytes in memory, and where they are. Whoever holds it keeps them there.

    What is ``mapped`` is a file, which may become shorter: nothing reads it but the functions here.
    """

    view: memoryview
    address: int
    mapped: bool = False

    @classmethod
    def of(cls, data: Any, *, mapped: bool = False) -> Buffer:
        """Return the buffer of anything that has one: a mapping, an array, bytes."""
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        address = int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if len(view) else 0
        return cls(view, address, mapped)

    @property
    def is_whole(self) -> bool:
        """Whether a mapped shard's file is still as long as it was: then what was read of it before is what it held.

        Where a file ends now, the rest of the page reads as zeros. A shard ends in its count of samples, never 0.
        """
        if not self.mapped:
            return True
        start = max(len(self.view) - COUNT_BYTES, 0)
        return self.copy(start, len(self.view)) is not None

    def copy(self, start: int, end: int) -> bytes | None:
        """Return a copy of some bytes; ``None`` if they are not what they were, or cannot be read."""
        if not self.mapped or start == end:
            return bytes(self.view[start:end])
        ends = self.address + len(self.view)
        if native.pieces is not None and len(self.view) >= COUNT_BYTES:
            return native.pieces.take(self.address + start, end - start, ends)
        if not reaches(ends) or not is_readable(self.address + start, end - start):
            return None
        data = bytes(self.view[start:end])
        return data if reaches(ends) and any(self.view[-COUNT_BYTES:]) else None


def copy_rows(buffers: Sequence[Buffer], which: Places, starts: I64, length: int) -> tuple[U8, Mask]:
    """Return ``(n, length)`` uint8: ``length`` bytes of buffer ``which (n,)`` from byte ``starts (n,)`` on, copied.

    And ``(n,)``, which of them could not be read. Raises ``IndexError`` if any is outside its buffer: nothing below
    would notice.
    """
    addresses = _addresses(buffers, which, starts, np.full(len(which), length, np.int64))
    torn = np.zeros(len(which), bool)
    if not length or not len(which):
        return np.empty((len(which), length), np.uint8), torn
    if native.pieces is not None:
        return native.pieces.copy(addresses, length, torn), torn
    torn = _torn(buffers, which, addresses, np.full(len(which), length))
    if torn.any():
        rows = np.zeros((len(which), length), np.uint8)
        rows[~torn] = copy_rows(buffers, which[~torn], starts[~torn], length)[0]
        return rows, torn
    if length > SMALL_BYTES_MAX:
        rows = np.empty((len(which), length), np.uint8)
        views = [buffer.view for buffer in buffers]
        for row, at, start in zip(rows, which.tolist(), starts.tolist(), strict=True):
            row[:] = np.frombuffer(views[at], np.uint8, length, start)
        return rows, torn
    lowest = int(addresses.min())
    found: npt.NDArray[np.void] = _Memory(np.dtype(f"V{length}"), lowest).array[addresses - lowest]
    together: U8 = found.view(np.uint8).reshape(len(which), length)
    return together, torn


def copy_each(buffers: Sequence[Buffer], which: Places, starts: I64, lengths: I64) -> Iterator[bytes | None]:
    """Yield a copy of ``lengths (n,)`` bytes of each piece, as ``Buffer.copy`` when its turn comes.

    ``None`` if they are torn, or if the length is negative. Small pieces of mapped files are copied some ahead.
    """
    joins = np.zeros(len(which), bool)
    if native.pieces is not None and len(which) >= JOINED_MIN:
        mapped = np.asarray([buffer.mapped and len(buffer.view) >= COUNT_BYTES for buffer in buffers], bool)
        joins = mapped[which] & (lengths > 0) & (lengths <= SMALL_BYTES_MAX)
    joined = _joined(buffers, which[joins], starts[joins], lengths[joins])
    if joins.all():
        yield from joined
        return
    views = [None if buffer.mapped else buffer.view for buffer in buffers]
    places = zip(which.tolist(), starts.tolist(), lengths.tolist(), joins.tolist(), strict=True)
    for at, start, length, is_joined in places:
        if is_joined:
            yield next(joined)
        elif length < 0:
            yield None
        elif (view := views[at]) is None:
            yield buffers[at].copy(start, start + length)
        else:
            yield bytes(view[start : start + length])


def _joined(buffers: Sequence[Buffer], which: Places, starts: I64, lengths: I64) -> Iterator[bytes | None]:
    """Yield copies of pieces of mapped files, read by one native call for some of them, and cut out of what it read."""
    if native.pieces is None or not len(which):
        return
    addresses = _addresses(buffers, which, starts, lengths)
    ends = np.asarray([buffer.address + len(buffer.view) for buffer in buffers], np.int64)[which]
    after = np.cumsum(lengths)
    runs = np.flatnonzero(np.diff(after // JOINED_BYTES)) + 1
    for first, last in pairwise([0, *runs.tolist(), len(which)]):
        run, torn = slice(first, last), np.zeros(last - first, bool)
        stops = after[run] - (after[first] - lengths[first])
        begins = stops - lengths[run]
        data = native.pieces.join(addresses[run], lengths[run], begins, ends[run], torn)
        for begin, stop, gone in zip(begins.tolist(), stops.tolist(), torn.tolist(), strict=True):
            yield None if gone else data[begin:stop]


def xxh3_64(buffers: Sequence[Buffer], which: Places, starts: I64, lengths: I64) -> tuple[U64, Mask]:
    """Return the XXH3-64 ``(n,)`` of ``lengths (n,)`` bytes of buffer ``which (n,)`` from byte ``starts (n,)`` on.

    And ``(n,)``, which of them could not be read. Raises ``IndexError`` if any of them is outside its buffer.
    """
    addresses = _addresses(buffers, which, starts, lengths)
    torn = np.zeros(len(which), bool)
    if native.pieces is not None:
        return native.pieces.xxh3_64(addresses, lengths, torn), torn
    torn = _torn(buffers, which, addresses, lengths)
    views = [buffer.view for buffer in buffers]
    ends = np.where(torn, starts, starts + lengths)
    cuts = zip(which.tolist(), starts.tolist(), ends.tolist(), strict=True)
    return np.asarray([xxhash.xxh3_64_intdigest(views[at][start:end]) for at, start, end in cuts], np.uint64), torn


def _torn(buffers: Sequence[Buffer], which: Places, addresses: I64, lengths: npt.NDArray[np.int64]) -> Mask:
    """Return ``(n,)`` which pieces cannot be read."""
    used = set(which.tolist())
    short = [at in used and it.mapped and not reaches(it.address + len(it.view)) for at, it in enumerate(buffers)]
    torn = np.asarray(short, bool)[which]
    mapped = np.asarray([buffer.mapped for buffer in buffers], bool)[which]
    for at in np.flatnonzero(mapped & ~torn & (lengths > 0)).tolist():
        torn[at] = not is_readable(int(addresses[at]), int(lengths[at]))
    return torn


def _addresses(buffers: Sequence[Buffer], which: Places, starts: I64, lengths: I64) -> I64:
    """Return where pieces begin ``(n,)``, all of them int64 and inside their buffers: nobody asks after this."""
    if not which.shape == starts.shape == lengths.shape == (len(which),):
        raise IndexError(f"pieces of unlike numbers: {which.shape}, {starts.shape}, {lengths.shape}")
    if not starts.dtype == lengths.dtype == np.int64:
        raise TypeError(f"starts and lengths are int64, not {starts.dtype} and {lengths.dtype}")
    sizes = np.asarray([len(buffer.view) for buffer in buffers], np.int64)
    # The sum of a start and a length could wrap.
    if (which < 0).any() or ((starts < 0) | (lengths < 0) | (starts > sizes[which] - lengths)).any():
        raise IndexError("bytes outside a buffer")
    return np.asarray([buffer.address for buffer in buffers], np.int64)[which] + starts


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
