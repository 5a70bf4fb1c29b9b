"""Buffers that samples lie in, and what is done with pieces of them: copied together, copied one by one, hashed.

A batch's samples lie in as many buffers as it has shards and peers. Native code (``quiver_client.native``) reaches all
of them by address, in one call per batch and without the GIL, so that a batch of small samples costs the same from one
mapped file as from a hundred. Without native code the same is done in Python, piece by piece.

Invariant: every piece is compared with the bounds of its buffer before it is touched, and a mapped file that was
truncated is reported, not read: a plain read of it would end the process by SIGBUS.
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
SMALL_BYTES_MAX: Final = 16 << 10  # larger samples are hashed and copied as fast one by one
JOINED_BYTES: Final = 256 << 10  # of small samples, copied by one call and split while in the CPU's cache
JOINED_MIN: Final = 24  # fewer are copied one by one as fast


class Buffer(NamedTuple):
    """Bytes in memory and their address. Holding it keeps them there.

    ``mapped``: the bytes are a mapped file, which may be truncated, so only the functions here read them.
    """

    view: memoryview
    address: int
    mapped: bool = False

    @classmethod
    def of(cls, data: Any, *, mapped: bool = False) -> Buffer:
        """Return the buffer of an object that supports the buffer protocol: a mapping, an array, bytes."""
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        address = int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if len(view) else 0
        return cls(view, address, mapped)

    @property
    def is_whole(self) -> bool:
        """Whether a mapped shard's file has not been truncated, so that everything read from it was its content.

        Past the end of a file, the rest of its last page reads as zeros. A shard ends in its count of samples, never 0.
        """
        if not self.mapped:
            return True
        start = max(len(self.view) - COUNT_BYTES, 0)
        return self.copy(start, len(self.view)) is not None

    def copy(self, start: int, end: int) -> bytes | None:
        """Return a copy of some bytes; ``None`` if they cannot be read, or the file was truncated."""
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
    """Copy ``length`` bytes of buffer ``which (n,)`` from byte ``starts (n,)`` on into an array ``(n, length)`` uint8.

    Return it, and ``(n,)`` which rows could not be read. Raises ``IndexError`` if a piece is outside its buffer.
    """
    lengths = np.full(len(which), length, np.int64)
    addresses = _addresses(buffers, which, starts, lengths)
    if not length or not len(which):
        return np.empty((len(which), length), np.uint8), np.zeros(len(which), bool)
    if native.pieces is not None:
        torn = np.zeros(len(which), bool)
        return native.pieces.copy(addresses, length, torn), torn
    torn = _torn(buffers, which, addresses, lengths)
    rows = np.zeros((len(which), length), np.uint8)
    views = [buffer.view for buffer in buffers]
    for row, at, start, is_torn in zip(rows, which.tolist(), starts.tolist(), torn.tolist(), strict=True):
        if not is_torn:
            row[:] = np.frombuffer(views[at], np.uint8, length, start)
    return rows, torn


def copy_each(buffers: Sequence[Buffer], which: Places, starts: I64, lengths: I64) -> Iterator[bytes | None]:
    """Yield a copy of ``lengths (n,)`` bytes of each piece, made by ``Buffer.copy`` when it is yielded.

    ``None`` for a piece that is torn, and for a negative length. Small pieces of mapped files are copied in groups.
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
    """Yield copies of pieces of mapped files: one native call reads several, which are then split."""
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

    And ``(n,)``, which of them could not be read. Raises ``IndexError`` if a piece is outside its buffer.
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
    """Return where pieces begin ``(n,)`` int64, all inside their buffers: nothing checks bounds after this."""
    if not which.shape == starts.shape == lengths.shape == (len(which),):
        raise IndexError(f"arrays of unequal lengths: {which.shape}, {starts.shape}, {lengths.shape}")
    if not starts.dtype == lengths.dtype == np.int64:
        raise TypeError(f"starts and lengths are int64, not {starts.dtype} and {lengths.dtype}")
    sizes = np.asarray([len(buffer.view) for buffer in buffers], np.int64)
    # Do not compare the sum of start and length: it could overflow.
    if (which < 0).any() or ((starts < 0) | (lengths < 0) | (starts > sizes[which] - lengths)).any():
        raise IndexError("bytes outside a buffer")
    return np.asarray([buffer.address for buffer in buffers], np.int64)[which] + starts
