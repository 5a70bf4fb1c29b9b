"""A batch on its way in: what has arrived, from which tier, and the one door at which it is checked.

A tier says in which buffer a sample lies and where; only what passed ``check`` counts as there. What did not is taken
out again, so that the next try or the next tier brings it. Nothing is copied on the way, with one exception: samples
that are small and of one size are gathered into one array first, since a batch of them is wanted as one, and what was
hashed is then what is handed out.

A mapped file may become shorter, or its disk fail, at any moment. What cannot be read is wrong when it is checked, and
missing again when it is copied: then the tiers are asked once more, for those samples alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal, Protocol

import blake3
import numpy as np
import numpy.typing as npt

from quiver.errors import QuiverError, Unavailable
from quiver.plan import Ints, Plan
from quiver_client.buffers import SMALL_BYTES_MAX, Buffer, Mask, copy_each, copy_rows, xxh3_64

Verify = Literal["fast", "full", "off"]
Positions = npt.NDArray[np.intp]
COPIES_MAX: Final = 3  # of a sample that was torn, and torn again where it came from the next time


class Batch:
    """The bytes of a plan's samples; position i is the plan's sample i. Tiers may put from several threads."""

    def __init__(self, plan: Plan, verify: Verify) -> None:
        self.plan = plan
        self.verified = np.zeros(len(plan), bool)
        self._verify = verify
        self._lock = threading.Lock()
        self._buffers: list[Buffer] = []
        self._in = np.full(len(plan), -1, np.intp)  # which buffer a sample lies in; -1: it has not come
        self._at = np.zeros(len(plan), np.int64)  # and at which byte of it
        self._whole: npt.NDArray[np.uint8] | None = None  # all samples, gathered in order
        self.on_torn: Callable[[Batch, Positions], None] = lambda batch, positions: None  # brings them anew

    # -- what a tier does ---------------------------------------------------------------------------------------------

    def not_verified(self) -> Positions:
        """Return the positions that still have to come."""
        return np.flatnonzero(~self.verified)

    def not_received(self) -> Positions:
        """Return the positions of which nothing came since the last check."""
        return np.flatnonzero(self._in < 0)

    def put(self, positions: Positions, buffer: Buffer, offsets: Ints) -> None:
        """Say that the samples at ``positions`` begin at ``offsets`` of a buffer. One that would end past it is not."""
        inside = (offsets >= 0) & (offsets <= len(buffer.view) - self.plan.sizes[positions])
        if not inside.all():
            positions, offsets = positions[inside], offsets[inside]
        self._put(positions, [buffer], 0, offsets)

    def put_mapped(self, positions: Positions, shards: Mapping[int, Buffer]) -> None:
        """Say that the samples at ``positions`` lie in these shards, by number. Those of other shards have not come."""
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
        self._put(positions, list(shards.values()), which, offsets)

    def check(self) -> Positions:
        """Check what came since the last call; return the positions that were wrong, now missing again."""
        came = np.flatnonzero((self._in >= 0) & ~self.verified)
        if not len(came):
            return came
        right = self._right(came)
        self.verified[came[right]] = True
        bad = came[~right]
        if len(bad):
            self._in[bad], self._whole = -1, None
        return bad

    def bytes_at(self, positions: Positions) -> int:
        return int(self.plan.sizes[positions].sum())

    # -- what a reader takes ------------------------------------------------------------------------------------------

    def views(self, field: int) -> list[memoryview | None]:
        """Return the bytes of a wanted byte field, counted from the plan's first, of each sample; ``None``: it lacks.

        Nothing is copied: a view keeps the mapping or the answer that it is part of in memory. It is read-only, since
        the same bytes may be another sample's too. It was readable when it was checked; of a file that becomes shorter
        afterwards, whoever touches it is ended by SIGBUS.
        """
        starts, lengths = self._cuts(slice(None), field)
        ends = (starts + np.maximum(lengths, 0)).tolist()
        cuts = zip(self._in.tolist(), starts.tolist(), ends, lengths.tolist(), strict=True)
        buffers = [buffer.view.toreadonly() for buffer in self._buffers]
        return [buffers[which][start:end] if length >= 0 else None for which, start, end, length in cuts]

    def copies(self, field: int) -> Iterator[bytes | None]:
        """Yield the bytes of a byte field of each sample, as ``views``, copied when their turn comes."""
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
            torn = self._gone(slice(at, None))
            torn[0] = True
            self._mend(at + np.flatnonzero(torn))
        raise Unavailable("the cache", "a sample cannot be read: its shard becomes shorter again and again")

    def rows(self, field: int, skip: int = 0) -> npt.NDArray[np.uint8] | None:
        """Return a field of all samples as one array ``(n, bytes)``, without the first ``skip`` bytes of each.

        ``None`` if they are not of one size, or if some sample lacks the field. The array may be written to; views that
        were taken of small samples may be of it.
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
            rows, torn = self._gathered(starts + skip, slice(None), length)
            torn |= self._gone(slice(None))
            if not torn.any():
                return rows
            self._mend(np.flatnonzero(torn))
            starts, _ = self._cuts(slice(None), field)
        raise Unavailable("the cache", "samples cannot be read: their shards become shorter again and again")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _put(self, positions: Positions, buffers: list[Buffer], which: Positions | int, offsets: Ints) -> None:
        """As one step: what one thread puts must not be found with where another one put it."""
        with self._lock:
            self._at[positions] = offsets
            self._in[positions] = len(self._buffers) + which
            self._buffers += buffers

    def _cuts(self, positions: Positions | slice, field: int) -> tuple[Ints, Ints]:
        plan = self.plan
        return self._at[positions] + plan.starts[positions, field], plan.lengths[positions, field]

    def _gathered(self, starts: Ints, positions: Positions | slice, length: int) -> tuple[npt.NDArray[np.uint8], Mask]:
        return copy_rows(self._buffers, self._in[positions], starts, length)

    def _gone(self, positions: Positions | slice) -> Mask:
        """Return which samples lie in files that are not whole any more."""
        used = self._in[positions]
        return np.isin(used, [at for at in np.unique(used).tolist() if not self._buffers[at].is_whole])

    def _mend(self, positions: Positions) -> None:
        """Have samples that were here, and whose file is not whole any more, come from elsewhere."""
        self.verified[positions], self._in[positions], self._whole = False, -1, None
        self.on_torn(self, positions)
        if not self.verified.all():
            raise Unavailable("the cache", f"{len(positions)} samples cannot be read: shards become shorter")

    def _right(self, came: Positions) -> npt.NDArray[np.bool_]:
        plan = self.plan
        fields = plan.lengths.shape[1]
        if self._verify == "off" or not fields:
            return np.ones(len(came), bool)
        tables, blobs = plan.manifest.tables, plan.blobs[came]
        if self._verify == "full":
            same: npt.NDArray[np.bool_] = (self._blake3(came) == tables.digests[blobs]).all(axis=1)
            return same
        self._bring_together(came)
        expected = tables.xxh3[blobs, plan.first_field : plan.first_field + fields]
        right = np.ones(len(came), bool)
        for field in range(fields):
            starts, lengths = self._cuts(came, field)
            found, torn = xxh3_64(self._buffers, self._in[came], starts, np.maximum(lengths, 0))
            right &= (lengths < 0) | ((found == expected[:, field]) & ~torn)
        return right

    def _bring_together(self, came: Positions) -> None:
        """Gather small samples of one size into an array, where from now on they lie; what is torn is zeros there."""
        sizes = self.plan.sizes[came]
        size = int(sizes[0])
        if not 0 < size <= SMALL_BYTES_MAX or len(came) < 2 or (sizes != size).any():
            return
        together, torn = self._gathered(self._at[came], came, size)
        together[torn] = 0
        self.put(came, Buffer.of(together), np.arange(len(came)) * size)
        self._whole = together if len(came) == len(self.plan) else None

    def _blake3(self, positions: Positions) -> npt.NDArray[np.uint8]:
        """Return the BLAKE3 of the samples, ``(n, 32)``. It takes so long that calls and copies do not matter."""
        starts, sizes = self._at[positions], self.plan.sizes[positions]
        cuts = zip(self._in[positions].tolist(), starts.tolist(), (starts + sizes).tolist(), strict=True)
        digests = b"".join([_digest(self._buffers[which], start, end) for which, start, end in cuts])
        return np.frombuffer(digests, np.uint8).reshape(-1, 32)


def _digest(buffer: Buffer, start: int, end: int) -> bytes:
    data = buffer.copy(start, end) if buffer.mapped else buffer.view[start:end]
    return bytes(32) if data is None else blake3.blake3(data).digest()


class Tier(Protocol):
    """A place that samples come from: this host, the rack, the origin."""

    name: str

    def fetch(self, batch: Batch) -> None:
        """Put into the batch what this tier has of the missing. What it has not stays missing: that is no error."""
        ...

    def blame(self, batch: Batch, bad: Positions) -> None:
        """Hear that these were wrong, and see to it that asking again can help."""
        ...

    def close(self) -> None: ...


class Cache(Tier, Protocol):
    """A tier that brings in what it does not have."""

    def why(self, shard: int) -> QuiverError | None:
        """Return why a shard was not filled, or not whole, when it was asked for last; ``None`` if it was."""
        ...
