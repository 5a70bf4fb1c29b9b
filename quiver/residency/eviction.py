"""What may be evicted to make room: one policy for fetches, readers' fills, uploads and manifests. Pure.

Recency is a bad guide under epochs: with a dataset larger than the cache, least-recently-used evicts every shard just
before it is read again. So a needed shard is never evicted for another one; the newcomer is refused and read from the
origin instead. Jobs report which shards they need (``needs``). If no job reports on a dataset, because a stock loader
reads it, each of its shards counts as needed until it was not read for ``IDLE_SECONDS``.

A daemon has many clients, and each can have shards filled. So the daemon records for whom each shard was filled (its
*holder*). A holder may evict another's shard only if it holds less than the other, or after ``KEPT_SECONDS``: reading
junk gains no client more of the cache than the others have. A dataset in use is protected only from holders of more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from quiver.digest import DIGEST_BYTES, Digest
from quiver.lookup import as_rows

IDLE_SECONDS: Final = 60.0  # longer than the pause between two epochs' reads, shorter than anyone waits for room
KEPT_SECONDS: Final = 600.0  # how long unneeded files are protected from a larger holder: a validation, a restart
SHARED: Final = 0  # the holder of files that several read, or that were here before the daemon started

U8 = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class StoredFile(NamedTuple):
    """A file in a store: its name, its size and when it was last read (seconds on the caller's clock)."""

    digest: Digest
    size_bytes: int
    used: float


class OnBehalf(NamedTuple):
    """On whose behalf room is made. ``holder`` is ``None`` for several: no holder's files are protected from them.

    ``own_only``: the holder had so much evicted that it may only replace its own files.
    """

    holder: int | None = None
    own_only: bool = False


SEVERAL: Final = OnBehalf()


@dataclass(frozen=True, slots=True, eq=False)
class Shelf:
    """All held files of one kind, ``(n,)`` each."""

    digests: U8  # (n, 32)
    sizes: Ints  # bytes
    idle: npt.NDArray[np.float64]  # seconds since it was read
    needed: npt.NDArray[np.int8]  # 1: some consumer needs it, 0: none does, -1: unknown
    in_use: Mask  # of a dataset that was read recently
    holders: Ints  # a number for each holder, ``SHARED`` for several

    def __len__(self) -> int:
        return len(self.sizes)

    @classmethod
    def of(
        cls, files: Sequence[StoredFile], now: float, needed: Callable[[U8], npt.NDArray[np.int8]] | None = None
    ) -> Shelf:
        """Return the shelf of a folder without holders. ``needed``: as ``Needs.needed_of``."""
        digests = as_rows(file.digest for file in files)
        count = len(files)
        return cls(
            digests,
            np.fromiter((file.size_bytes for file in files), np.int64, count),
            now - np.fromiter((file.used for file in files), np.float64, count),
            needed(digests) if needed is not None else np.full(count, -1, np.int8),
            np.zeros(count, bool),
            np.zeros(count, np.int64),
        )

    def rows_of(self, digests: Collection[Digest]) -> Ints:
        """Return the positions of the given digests that are on the shelf."""
        if not digests:
            return np.zeros(0, np.int64)
        wanted = set(digests)
        words = self.digests[:, :8].copy().view(np.uint64).reshape(-1)
        alike = np.flatnonzero(np.isin(words, as_rows(wanted)[:, :8].copy().view(np.uint64)))
        return alike[[self.name(at) in wanted for at in alike.tolist()]]

    def name(self, at: int) -> Digest:
        return Digest(self.digests[at].tobytes())


EMPTY_SHELF: Final = Shelf(
    np.zeros((0, DIGEST_BYTES), np.uint8),
    np.zeros(0, np.int64),
    np.zeros(0),
    np.zeros(0, np.int8),
    np.zeros(0, bool),
    np.zeros(0, np.int64),
)


class Candidates:
    """The eviction candidates of a shelf, in order of eviction. ``take`` removes them.

    First come the files that nobody needs, the longest idle first; then, for a holder of less, those that are protected
    only because their dataset is in use.
    """

    def __init__(self, shelf: Shelf, without: Collection[Digest] = (), keep: Mask | None = None) -> None:
        """``without``: files that are already being evicted, or must stay; ``keep`` ``(n,)``: the same, by position."""
        self._shelf = shelf
        idle = shelf.idle >= IDLE_SECONDS
        nobody = (shelf.needed == 0) | ((shelf.needed < 0) & ~shelf.in_use & idle)
        in_use = (shelf.needed < 0) & ~nobody
        excluded = shelf.rows_of(without)
        nobody[excluded] = False
        in_use[excluded] = False
        if keep is not None:
            nobody &= ~keep
            in_use &= ~keep
        self._nobody = _longest_idle_first(shelf, nobody)
        self._in_use = _longest_idle_first(shelf, in_use)
        self._gone = np.zeros(len(shelf), bool)
        self._gone[excluded] = True

    @property
    def nobody(self) -> Ints:
        """The positions of the candidates that nobody needs, in order of eviction."""
        return self._nobody

    def choose(self, free_bytes: float, on_behalf: OnBehalf = SEVERAL) -> list[int] | None:
        """Return the positions of what to evict to free ``free_bytes``; ``None`` if that is impossible."""
        chosen, freed_bytes = self.most(free_bytes, on_behalf)
        return chosen if freed_bytes >= free_bytes else None

    def most(self, free_bytes: float, on_behalf: OnBehalf = SEVERAL) -> tuple[list[int], int]:
        """Return the positions of what to evict to free ``free_bytes``, or of all candidates, and their bytes."""
        if on_behalf.holder is None:
            return self._unneeded(free_bytes)
        return self._fairly(free_bytes, on_behalf.holder, own_only=on_behalf.own_only)

    def take(self, chosen: Sequence[int]) -> None:
        """Remove what was chosen from the candidates."""
        self._gone[list(chosen)] = True
        self._nobody, self._in_use = self._nobody[~self._gone[self._nobody]], self._in_use[~self._gone[self._in_use]]

    def _unneeded(self, free_bytes: float) -> tuple[list[int], int]:
        if free_bytes <= 0:
            return [], 0
        freed = np.cumsum(self._shelf.sizes[self._nobody])
        count = min(int(np.searchsorted(freed, free_bytes)) + 1, len(freed))
        return self._nobody[:count].tolist(), int(freed[count - 1]) if count else 0

    def _fairly(self, free_bytes: float, holder: int, *, own_only: bool) -> tuple[list[int], int]:
        shelf = self._shelf
        held = self._held_bytes()
        mine, freed = held.get(holder, 0), 0
        chosen: list[int] = []
        for positions, strictly in ((self._nobody, False), (self._in_use, True)):
            for at in positions.tolist():
                if freed >= free_bytes:
                    return chosen, freed
                whose, size = int(shelf.holders[at]), int(shelf.sizes[at])
                if whose != holder:
                    # What replaces it already counts as this holder's own.
                    less = mine + size <= held[whose] - size
                    if own_only or (strictly and (whose == SHARED or not less)):
                        continue
                    if not less and shelf.idle[at] < KEPT_SECONDS:
                        continue
                    mine += size
                elif strictly:
                    continue  # its own dataset, in use: evicting it for another of its own shards would be thrashing
                held[whose] -= size
                freed += size
                chosen.append(at)
        return chosen, freed

    def _held_bytes(self) -> dict[int, int]:
        """Return the bytes that each holder has."""
        held = ~self._gone
        distinct, which = np.unique(self._shelf.holders[held], return_inverse=True)
        sums = np.bincount(which, weights=self._shelf.sizes[held], minlength=len(distinct)).astype(np.int64)
        return dict(zip(distinct.tolist(), sums.tolist(), strict=True))


def _longest_idle_first(shelf: Shelf, candidates: Mask) -> Ints:
    positions = np.flatnonzero(candidates)
    return positions[np.argsort(-shelf.idle[positions], kind="stable")]


def choose_idle(
    files: Iterable[StoredFile], free_bytes: int, needed: Callable[[Digest], bool | None], now: float
) -> list[StoredFile] | None:
    """Return what to evict from a folder to free ``free_bytes``, the longest idle first; ``None`` if impossible.

    ``needed`` returns whether some consumer needs a file; ``None`` if that is unknown: then its idle time decides.
    """
    several = list(files)
    said = {True: 1, False: 0, None: -1}

    def needed_of(digests: U8) -> npt.NDArray[np.int8]:
        return np.asarray([said[needed(Digest(row.tobytes()))] for row in digests], np.int8)

    chosen = Candidates(Shelf.of(several, now, needed_of)).choose(free_bytes)
    return None if chosen is None else [several[at] for at in chosen]
