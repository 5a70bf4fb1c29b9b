"""A batch while it is read: which samples arrived, from where, and the one function that verifies them.

A tier puts in which buffer and at which offset each sample lies; only samples that pass ``check`` count as received.
``check`` removes the others, so that a retry or the next tier delivers them. Nothing is copied, with one exception:
small samples of one size are first copied into one array, since the caller wants such a batch as one array, and the
bytes that were hashed are then the bytes that are handed out.

How a sample is verified depends on its source (``verify="auto"``, docs/adr/0024). XXH3 finds accidents, and is enough
for bytes of this host's own store and of daemons that TLS has authenticated. Anybody can forge bytes of equal XXH3, so
all others are compared with their BLAKE3. That is over a whole sample: such a source delivers samples whole, whichever
of their fields were chosen (``wants_whole``).

A mapped file may be truncated, or its disk may fail, at any moment. Bytes that cannot be read fail the check. If bytes
cannot be read later, when they are copied, only those samples are requested from the tiers again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal

import blake3
import numpy as np
import numpy.typing as npt

from quiver.errors import Unavailable
from quiver.plan import Ints, Plan
from quiver_client.buffers import SMALL_BYTES_MAX, Buffer, Mask, copy_each, copy_rows, xxh3_64

Verify = Literal["auto", "fast", "full", "off"]
Positions = npt.NDArray[np.intp]
COPIES_MAX: Final = 3  # attempts to copy a sample whose file was truncated; before each it is delivered again


class Batch:
    """The bytes of a plan's samples; position i is the plan's sample i. Tiers may put from several threads."""

    def __init__(
        self,
        plan: Plan,
        verify: Verify,
        on_torn: Callable[[Batch, Positions], None] = lambda batch, positions: None,
    ) -> None:
        """``on_torn`` delivers samples again whose file was truncated after they were verified."""
        self.plan = plan
        self.verified = np.zeros(len(plan), bool)
        self.is_retry = False  # all tiers were asked for it before, and the origin did not answer
        self._verify = verify
        self._lock = threading.Lock()
        self._buffers: list[Buffer] = []
        self._in = np.full(len(plan), -1, np.intp)  # which buffer a sample lies in; -1: none, it was not received
        self._at = np.zeros(len(plan), np.int64)  # and at which byte of it
        self._trusted = np.zeros(len(plan), bool)  # whether XXH3 is enough for it
        self._whole: npt.NDArray[np.uint8] | None = None  # all samples, copied together in order
        self._on_torn = on_torn

    # -- what a tier does ---------------------------------------------------------------------------------------------

    def not_verified(self) -> Positions:
        """Return the positions of samples that no tier has delivered correctly."""
        return np.flatnonzero(~self.verified)

    def not_received(self) -> Positions:
        """Return the positions of samples that no tier has put, or that failed the last check."""
        return np.flatnonzero(self._in < 0)

    def wants_whole(self, *, trusted: bool) -> bool:
        """Whether a source has to deliver whole samples, and not only the fields that were chosen."""
        return self._verify == "auto" and not trusted

    def inside(self, positions: Positions) -> Ints:
        """Return how many bytes of each sample precede the chosen fields."""
        plan = self.plan
        return plan.offsets[positions] - plan.manifest.tables.offsets[plan.blobs[positions]].astype(np.int64)

    def put(self, positions: Positions, buffer: Buffer, offsets: Ints, *, trusted: bool = False) -> None:
        """Put the samples at ``positions``, whose chosen fields begin at ``offsets`` of a buffer; ignore those that end
        past it. ``trusted``: nobody but this host's own daemon or user, or a peer with a certificate, wrote them."""
        inside = (offsets >= 0) & (offsets <= len(buffer.view) - self.plan.sizes[positions])
        if not inside.all():
            positions, offsets = positions[inside], offsets[inside]
        self._put(positions, [buffer], 0, offsets, trusted=trusted)

    def put_mapped(self, positions: Positions, shards: Mapping[int, Buffer]) -> None:
        """Put those of the samples at ``positions`` that lie in these whole shards, given by number.

        They were verified as shards, by BLAKE3, before they were written or when they were received: they are trusted.
        """
        if not shards:
            return
        plan, wanted = self.plan, self.plan.shards[positions]
        numbers = np.fromiter(shards, np.int64, len(shards))
        order = np.argsort(numbers)
        rank = np.searchsorted(numbers, wanted, sorter=order)
        which = order[np.minimum(rank, len(order) - 1)]
        sizes = np.asarray([len(buffer.view) for buffer in shards.values()], np.int64)
        offsets = plan.offsets[positions]
        here = (numbers[which] == wanted) & (offsets >= 0) & (offsets <= sizes[which] - plan.sizes[positions])
        if not here.all():
            positions, which, offsets = positions[here], which[here], offsets[here]
        self._put(positions, list(shards.values()), which, offsets, trusted=True)

    def adopt(self, positions: Positions, other: Batch) -> None:
        """Put all samples of another batch, which are those at ``positions`` of this one."""
        with self._lock:
            self._trusted[positions] = other._trusted
            self._at[positions] = other._at
            self._in[positions] = len(self._buffers) + other._in
            self._buffers += other._buffers

    def adopt_verified(self, position: int, other: Batch) -> None:
        """Put the sample of a batch of one that is verified."""
        at = np.array([position])
        self.adopt(at, other)
        self.verified[at] = True

    def only(self, positions: Positions, plan: Plan) -> Batch:
        """Return the samples at ``positions``, which are those of ``plan``, as a batch of their own."""
        part = Batch(plan, self._verify, self._on_torn)
        part.verified[:] = self.verified[positions]
        part._buffers = list(self._buffers)
        part._in, part._at, part._trusted = self._in[positions], self._at[positions], self._trusted[positions]
        return part

    def check(self) -> Positions:
        """Verify what was put since the last call; remove the samples that are wrong, and return their positions."""
        new = np.flatnonzero((self._in >= 0) & ~self.verified)
        if not len(new):
            return new
        right = self._right(new)
        self.verified[new[right]] = True
        bad = new[~right]
        if len(bad):
            self._in[bad], self._whole = -1, None
        return bad

    def bytes_at(self, positions: Positions) -> int:
        return int(self.plan.sizes[positions].sum())

    # -- what a reader takes ------------------------------------------------------------------------------------------

    def views(self, field: int) -> list[memoryview | None]:
        """Return a byte field of each sample, the field counted from the plan's first; ``None`` where it is absent.

        Nothing is copied: a view keeps the mapping or the answer that it is part of in memory. It is read-only, since
        two samples may share bytes. It was readable when it was verified; if its file is truncated afterwards, touching
        it ends the process by SIGBUS.
        """
        starts, lengths = self._cuts(slice(None), field)
        ends = (starts + np.maximum(lengths, 0)).tolist()
        cuts = zip(self._in.tolist(), starts.tolist(), ends, lengths.tolist(), strict=True)
        buffers = [buffer.view.toreadonly() for buffer in self._buffers]
        return [buffers[which][start:end] if length >= 0 else None for which, start, end, length in cuts]

    def copies(self, field: int) -> Iterator[bytes | None]:
        """Yield the bytes of a byte field of each sample, as ``views`` does; each is copied when it is yielded."""
        at = tries = 0
        while tries < COPIES_MAX:
            starts, lengths = self._cuts(slice(at, None), field)
            copied = copy_each(self._buffers, self._in[at:], starts, lengths)
            for data, length in zip(copied, lengths.tolist(), strict=True):
                if data is None and length >= 0:
                    break
                yield data
                at, tries = at + 1, 0
            else:
                return
            tries += 1
            torn = self._truncated(slice(at, None))
            torn[0] = True
            self._fetch_again(at + np.flatnonzero(torn))
        raise Unavailable("the cache", "a sample cannot be read: the file of its shard was truncated again and again")

    def rows(self, field: int, skip: int = 0) -> npt.NDArray[np.uint8] | None:
        """Return a field of all samples as one array ``(n, bytes)``, without the first ``skip`` bytes of each.

        ``None`` if they are not of one size, or if some sample lacks the field. The array may be written to; views of
        small samples may share its memory.
        """
        starts, lengths = self._cuts(slice(None), field)
        if not len(lengths) or (lengths != lengths[0]).any() or lengths[0] < skip:
            return None
        length = int(lengths[0]) - skip
        firsts = self.plan.starts[:, field]
        if self._whole is not None and (firsts == firsts[0]).all():
            start = int(firsts[0]) + skip
            return np.ascontiguousarray(self._whole[:, start : start + length])
        for _ in range(COPIES_MAX):
            rows, torn = self._copied(starts + skip, slice(None), length)
            torn |= self._truncated(slice(None))
            if not torn.any():
                return rows
            self._fetch_again(np.flatnonzero(torn))
            starts, _ = self._cuts(slice(None), field)
        raise Unavailable("the cache", "samples cannot be read: files of shards were truncated again and again")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _put(
        self, positions: Positions, buffers: list[Buffer], which: Positions | int, offsets: Ints, *, trusted: bool
    ) -> None:
        """Put in one step: a thread must not find one sample's buffer with another's offset."""
        with self._lock:
            self._trusted[positions] = trusted
            self._at[positions] = offsets
            self._in[positions] = len(self._buffers) + which
            self._buffers += buffers

    def _cuts(self, positions: Positions | slice, field: int) -> tuple[Ints, Ints]:
        plan = self.plan
        return self._at[positions] + plan.starts[positions, field], plan.lengths[positions, field]

    def _copied(self, starts: Ints, positions: Positions | slice, length: int) -> tuple[npt.NDArray[np.uint8], Mask]:
        return copy_rows(self._buffers, self._in[positions], starts, length)

    def _truncated(self, positions: Positions | slice) -> Mask:
        """Return which samples lie in files that were truncated."""
        used = self._in[positions]
        return np.isin(used, [at for at in np.unique(used).tolist() if not self._buffers[at].is_whole])

    def _fetch_again(self, positions: Positions) -> None:
        """Have samples delivered again whose file was truncated."""
        self.verified[positions], self._in[positions], self._whole = False, -1, None
        self._on_torn(self, positions)
        if not self.verified.all():
            raise Unavailable("the cache", f"{len(positions)} samples cannot be read: files of shards were truncated")

    def _right(self, new: Positions) -> npt.NDArray[np.bool_]:
        plan = self.plan
        fields = plan.lengths.shape[1]
        if self._verify == "off" or not fields:
            return np.ones(len(new), bool)
        if self._verify == "full":
            return self._same_blake3(new)
        if self._verify == "fast":
            return self._same_xxh3(new)
        trusted = self._trusted[new] | (plan.sizes[new] == 0)  # of nothing, nothing can be wrong
        if trusted.all():
            return self._same_xxh3(new)
        right = np.ones(len(new), bool)
        right[~trusted] = self._same_blake3(new[~trusted])
        if trusted.any():
            right[trusted] = self._same_xxh3(new[trusted])
        elif right.all():
            self._copy_together(new)  # out of memory of this process, so that these are the bytes that were hashed
        return right

    def _same_xxh3(self, new: Positions) -> Mask:
        """Return which samples have the XXH3 of each chosen field."""
        plan = self.plan
        fields = plan.lengths.shape[1]
        tables, blobs = plan.manifest.tables, plan.blobs[new]
        self._copy_together(new)
        expected = tables.xxh3[blobs, plan.first_field : plan.first_field + fields]
        right = np.ones(len(new), bool)
        for field in range(fields):
            starts, lengths = self._cuts(new, field)
            found, torn = xxh3_64(self._buffers, self._in[new], starts, np.maximum(lengths, 0))
            right &= (lengths < 0) | ((found == expected[:, field]) & ~torn)
        return right

    def _copy_together(self, new: Positions) -> None:
        """Copy small samples of one size into an array, and refer to them there; torn ones are zeros in it."""
        sizes = self.plan.sizes[new]
        size = int(sizes[0])
        if not 0 < size <= SMALL_BYTES_MAX or len(new) < 2 or (sizes != size).any():
            return
        together, torn = self._copied(self._at[new], new, size)
        together[torn] = 0
        self._put(new, [Buffer.of(together)], 0, np.arange(len(new)) * size, trusted=True)  # from here on our own
        self._whole = together if len(new) == len(self.plan) else None

    def _same_blake3(self, new: Positions) -> Mask:
        """Return which samples have their BLAKE3, which is over all of their fields, in the buffers as they lie there.

        The calls and slices cost little compared with hashing, but for samples of less than a kilobyte.
        """
        manifest, blobs = self.plan.manifest, self.plan.blobs[new]
        starts = self._at[new] - self.inside(new)
        ends = starts + manifest.blob_sizes(blobs).astype(np.int64)
        cuts = zip(self._in[new].tolist(), starts.tolist(), ends.tolist(), strict=True)
        hasher = blake3.blake3()  # one for all: making one takes a tenth of hashing 4 kB
        digests = b"".join([_digest(hasher, self._buffers[which], start, end) for which, start, end in cuts])
        found = np.frombuffer(digests, np.uint8).reshape(-1, 32)
        same: Mask = (found == manifest.tables.digests[blobs]).all(axis=1)
        return same


def _digest(hasher: blake3.blake3, buffer: Buffer, start: int, end: int) -> bytes:
    if not 0 <= start <= end <= len(buffer.view):
        return bytes(32)  # not the whole sample
    data = buffer.copy(start, end) if buffer.mapped else buffer.view[start:end]
    if data is None:
        return bytes(32)
    hasher.reset()
    return hasher.update(data).digest()
