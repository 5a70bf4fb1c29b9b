"""The files of one kind that a store holds, in memory: a dictionary for one file, arrays for all of them at once.

Each decision on what to evict examines all files. With columns that are kept up to date it takes a few copies; with a
list of objects it took a tenth of a second for a full disk.
"""

from __future__ import annotations

import itertools
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from quiver.digest import DIGEST_BYTES, Digest
from quiver.residency.eviction import StoredFile

ROWS_FIRST: Final = 1024


class FileListing(NamedTuple):
    """A snapshot of all files of one kind, ``(n,)`` each. ``stamps``: a number that no two files ever share."""

    names: list[Digest]
    digests: npt.NDArray[np.uint8]  # (n, 32)
    sizes: npt.NDArray[np.int64]
    used: npt.NDArray[np.float64]
    stamps: npt.NDArray[np.int64]


class FileTable:
    """Size and time of last use of each file, by digest. Changed under its owner's lock; read without it."""

    def __init__(self) -> None:
        self.rows: dict[Digest, int] = {}
        self._names: list[Digest] = []  # by row, as the arrays: rows are dense
        self._digests = np.zeros((ROWS_FIRST, DIGEST_BYTES), np.uint8)
        self._sizes = np.zeros(ROWS_FIRST, np.int64)
        self._used = np.zeros(ROWS_FIRST)
        self._stamps = np.zeros(ROWS_FIRST, np.int64)
        self._next_stamp = itertools.count(1)

    def __len__(self) -> int:
        return len(self.rows)

    def size(self, digest: Digest) -> int:
        """Return the bytes of a file, 0 if there is none."""
        row = self.rows.get(digest)
        return int(self._sizes[row]) if row is not None else 0

    def set(self, digest: Digest, size_bytes: int, used: float) -> None:
        row = self.rows.get(digest)
        if row is None:
            row = len(self._names)
            if row >= len(self._sizes):
                self._grow()
            self._digests[row] = np.frombuffer(digest, np.uint8)
            self._stamps[row] = next(self._next_stamp)
            self.rows[digest] = row
            self._sizes[row], self._used[row] = size_bytes, used
            self._names.append(digest)  # last: a reader without the lock reads this many rows
        else:
            self._sizes[row], self._used[row] = size_bytes, used

    def touch(self, digest: Digest, used: float) -> None:
        row = self.rows.get(digest)
        if row is not None:
            self._used[row] = used

    def remove(self, digest: Digest) -> int:
        """Forget a file; return its size in bytes. The last row moves into its place."""
        row, last = self.rows.pop(digest), len(self._names) - 1
        size_bytes = int(self._sizes[row])
        if row != last:
            for column in (self._digests, self._sizes, self._used, self._stamps):
                column[row] = column[last]
            self._names[row] = self._names[last]
            self.rows[self._names[row]] = row
        self._names.pop()
        return size_bytes

    def digests(self) -> list[Digest]:
        return list(self.rows)

    def files(self) -> list[StoredFile]:
        sizes, used = self._sizes.tolist(), self._used.tolist()
        return [StoredFile(name, sizes[row], used[row]) for row, name in enumerate(self._names)]

    def listing(self) -> FileListing:
        """Return all files. Without the owner's lock an entry that is changing at this moment may be wrong."""
        names = list(self._names)
        count = len(names)
        return FileListing(
            names,
            self._digests[:count].copy(),
            self._sizes[:count].copy(),
            self._used[:count].copy(),
            self._stamps[:count].copy(),
        )

    def _grow(self) -> None:
        more = len(self._sizes)
        self._digests = np.concatenate([self._digests, np.zeros((more, DIGEST_BYTES), np.uint8)])
        self._used = np.concatenate([self._used, np.zeros(more)])
        self._stamps = np.concatenate([self._stamps, np.zeros(more, np.int64)])
        self._sizes = np.concatenate([self._sizes, np.zeros(more, np.int64)])
