"""Which samples a batch takes: a pure function of what is pending, what is resident, what others need, and a seed.

An epoch is a seeded permutation; a rank's *share* of it is a slice of that permutation, and an *entry* is a position in
the share. The entries of one shard are always taken in the order of the permutation. So what is left of a shard is a
suffix of them: one number per shard says how much is left, and one number per shard and batch says what was taken.

If capacity is scarce, the order decides how well jobs share a cache. If batches were drawn evenly from all resident
shards, some job would need every shard until the end of the epoch. So a consumer drains a few shards at a time, first
those that the fewest other consumers still need: they can be evicted early (``bench/cooperation.py``). Samples that are
not resident are taken later in the same epoch, as in Quiver (Kumar & Sivathanu, FAST 2020) and CoorDL (Mohan et al.,
VLDB 2021); here each is taken exactly once.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
DRAINED_AT_ONCE: Final = 6  # more mix better; fewer share a scarce cache better, so
RESIDENT_PER_DRAINED: Final = 12  # with less resident, fewer are drained at once (bench/simulation.py),
DRAINED_MIN: Final = 2  # down to this,
DRAINED_MIN_SHARED: Final = 1  # and if others need what is resident, to this: half-read shards occupy room
DRAINED_WHERE_ALIKE: Final = 64  # if a shard's samples are alike (sequential layout), a batch mixes more shards


class View(NamedTuple):
    """What a consumer knows of the cache, by shard ``(shards,)``. It may be out of date, which costs only time."""

    resident: Mask
    others: npt.NDArray[np.uint8]  # how many other consumers still need the shard
    arrived: Ints  # ordinal: the order in which the shards became resident
    orphaned: Mask | None = None  # shards that will not be fetched, since their owners do not answer


def permutation(count: int, seed: int, epoch: int, *, shuffle: bool = True) -> Ints:
    """Return the order of an epoch ``(count,)``: the same on every machine, in every process."""
    if not shuffle:
        return np.arange(count, dtype=np.int64)
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count).astype(np.int64, copy=False)


def dealt(order: Ints, rank: int, world_size: int, batch_size: int, *, drop_last: bool) -> tuple[Ints, Ints]:
    """Return one rank's share of ``order``, and the entries that no rank gets. Neither depends on the cache.

    As with torch's ``DistributedSampler`` every rank gets the same number, by repeating entries from the front or, with
    ``drop_last``, by leaving out the tail; each rank's last incomplete batch is then left out, too.
    """
    if drop_last:
        kept = len(order) // world_size // batch_size * batch_size * world_size
        return order[:kept][rank::world_size], order[kept:]
    padding = -len(order) % world_size
    return np.concatenate([order, np.resize(order, padding)])[rank::world_size], order[:0]


class Order:
    """The pending entries of one share. ``shards`` (entries,): the shard that each entry lies in.

    ``drained_at_once``: how many shards a batch is mixed from if not all are resident. A value up to
    ``DRAINED_AT_ONCE`` is reduced when the cache is scarce.
    """

    def __init__(self, shards: Ints, shard_count: int, drained_at_once: int = DRAINED_AT_ONCE) -> None:
        self._drained_at_once = drained_at_once
        self.shards = shards
        self._by_shard = np.argsort(shards, kind="stable")
        counts = np.bincount(shards, minlength=shard_count)
        self._ends = np.cumsum(counts)
        self._heads = self._ends - counts
        self._taken = np.zeros(len(shards), bool)
        self._cursor = 0
        self._drained: list[int] = []
        self._pending = len(shards)

    def __len__(self) -> int:
        return self._pending

    @property
    def left(self) -> Ints:
        """Pending entries by shard ``(shards,)``."""
        return self._ends - self._heads

    def plain(self, count: int) -> Ints:
        """Return the next ``count`` pending entries of the permutation."""
        while True:
            taken = self._taken[self._cursor : self._cursor + 4096]
            skip = int(np.argmin(taken)) if len(taken) and not taken.all() else len(taken)
            self._cursor += skip
            if not len(taken) or skip < len(taken):
                break
        span = count
        while True:
            found = np.flatnonzero(~self._taken[self._cursor : self._cursor + span])
            if len(found) >= count or self._cursor + span >= len(self._taken):
                return found[:count] + self._cursor
            span *= 2

    def substituted(self, count: int, view: View, lookahead: int | None) -> Ints | None:
        """Return a batch of resident entries, in the order of the permutation; ``None`` if there are not enough.

        With everything resident it is the next batch of the permutation. ``lookahead``: how many of the first pending
        entries a batch may choose from; ``None``: all.
        """
        count = min(count, self._pending)
        left = self.left
        if bool((view.resident | (left == 0)).all()):
            return self.plain(count)
        if lookahead is not None:
            window = self.plain(max(lookahead, count))
            found = window[view.resident[self.shards[window]]]
            return found[:count] if len(found) >= count else None
        return self._from_drained(count) if self._drain(count, left, view) else None

    def is_hopeless(self, view: View) -> bool:
        """Whether no missing pending shard will be fetched, so that waiting is useless."""
        if view.orphaned is None:
            return False
        return not bool(((self.left > 0) & ~view.resident & ~view.orphaned).any())

    def completed(self, count: int, view: View) -> Ints:
        """Return a batch without further waiting: resident entries, then the first of the others."""
        count = min(count, self._pending)
        resident = self._prefixes(np.flatnonzero(view.resident & (self.left > 0)).tolist(), count)
        if len(resident) >= count:
            return np.sort(resident[:count])
        waiting = self.plain(count)
        late = waiting[~np.isin(waiting, resident)]
        return np.sort(np.concatenate([resident, late[: count - len(resident)]]))

    def take(self, entries: Ints) -> None:
        """Mark entries as taken. They must be the next ones of each shard."""
        self._taken[entries] = True
        self._heads += np.bincount(self.shards[entries], minlength=len(self._heads))
        self._pending -= len(entries)

    def take_last(self, shard: int | None = None) -> tuple[int, int]:
        """Take the last pending entry, of a shard or of all; return it and its shard. It replaces one that is bad.

        So what is left of a shard stays a run of its entries, and batches that were drawn before stay the next ones.
        Raises ``ValueError`` if nothing is pending.
        """
        if shard is None and self._pending:
            shard = int(self.shards[np.flatnonzero(~self._taken)[-1]])
        if shard is None or not 0 <= shard < len(self._ends) or self._heads[shard] >= self._ends[shard]:
            raise ValueError("no entry is pending that could replace another")
        self._ends[shard] -= 1
        entry = int(self._by_shard[self._ends[shard]])
        self._taken[entry] = True
        self._pending -= 1
        return entry, shard

    def prefixes(self, shards: Ints, counts: Ints) -> Ints:
        """Return the next ``counts`` entries of each of ``shards``, in the order of the permutation."""
        parts = [
            self._by_shard[self._heads[shard] : self._heads[shard] + count]
            for shard, count in zip(shards.tolist(), counts.tolist(), strict=True)
        ]
        return np.sort(np.concatenate(parts)) if parts else np.zeros(0, np.int64)

    def _drain(self, count: int, left: Ints, view: View) -> bool:
        """Choose the shards to drain, so that they hold ``count`` entries; return whether they do."""
        self._drained = [shard for shard in self._drained if view.resident[shard] and left[shard]]
        have = int(left[self._drained].sum())
        at_once = self._drained_at_once
        if at_once <= DRAINED_AT_ONCE:
            scarce = int(np.count_nonzero(view.resident)) // RESIDENT_PER_DRAINED
            shared = bool(view.others[view.resident].any())
            at_once = min(at_once, max(scarce, DRAINED_MIN_SHARED if shared else DRAINED_MIN))
        if have >= count and len(self._drained) >= at_once:
            return True
        eligible = view.resident & (left > 0)
        eligible[self._drained] = False
        pool = np.flatnonzero(eligible)
        pool = pool[np.lexsort((view.arrived[pool], view.others[pool]))]
        for shard in pool.tolist():
            if len(self._drained) >= at_once and have >= count:
                break
            self._drained.append(shard)
            have += int(left[shard])
        return have >= count

    def _from_drained(self, count: int) -> Ints:
        """Return ``count`` entries, as evenly from the drained shards as their remaining entries allow."""
        shards = np.asarray(self._drained, np.int64)
        left = self.left[shards]
        ascending = np.argsort(left, kind="stable")
        counts = np.zeros(len(shards), np.int64)
        for done, at in enumerate(ascending.tolist()):
            counts[at] = min(int(left[at]), -(-count // (len(shards) - done)))
            count -= int(counts[at])
        return self.prefixes(shards, counts)

    def _prefixes(self, shards: list[int], count: int) -> Ints:
        """Return up to ``count`` next entries of the shards, one shard after another."""
        parts, have = [np.zeros(0, np.int64)], 0
        for shard in shards:
            if have >= count:
                break
            parts.append(self._by_shard[self._heads[shard] : min(self._heads[shard] + count - have, self._ends[shard])])
            have += len(parts[-1])
        return np.concatenate(parts)
