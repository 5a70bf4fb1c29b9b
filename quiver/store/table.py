"""The files of one kind that a store holds, in memory: a dictionary for one file, arrays for all of them at once.

Evicting looks at all files each time that room is wanted. Columns that are kept up to date make that a few copies, where
a list of objects took a tenth of a second for a full disk.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from quiver.digest import DIGEST_BYTES, Digest
from quiver.residency.eviction import StoredFile

ROWS_FIRST: Final = 1024


class Listing(NamedTuple):
    """All files of one kind, ``(n,)`` each: as of one look."""

    digests: npt.NDArray[np.uint8]  # (n, 32)
    sizes: npt.NDArray[np.int64]
    used: npt.NDArray[np.float64]


class FileTable:
    """Size and time of last use of each file, by digest. Changed under its owner's lock; read without."""

    def __init__(self) -> None:
        self.rows: dict[Digest, int] = {}
        self._free: list[int] = []
        self._digests = np.zeros((ROWS_FIRST, DIGEST_BYTES), np.uint8)
        self._sizes = np.full(ROWS_FIRST, -1, np.int64)  # -1: no file
        self._used = np.zeros(ROWS_FIRST)

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self.rows

    def size(self, digest: Digest) -> int:
        """Return the bytes of a file, 0 if there is none."""
        row = self.rows.get(digest)
        return max(int(self._sizes[row]), 0) if row is not None else 0

    def set(self, digest: Digest, size_bytes: int, used: float) -> None:
        row = self.rows.get(digest)
        if row is None:
            row = self._free.pop() if self._free else len(self.rows)
            if row >= len(self._sizes):
                self._grow()
            self._digests[row] = np.frombuffer(digest, np.uint8)
            self.rows[digest] = row
        self._sizes[row], self._used[row] = size_bytes, used

    def touch(self, digest: Digest, used: float) -> None:
        row = self.rows.get(digest)
        if row is not None:
            self._used[row] = used

    def remove(self, digest: Digest) -> int:
        """Forget a file; return its bytes."""
        row = self.rows.pop(digest)
        size_bytes = int(self._sizes[row])
        self._sizes[row] = -1
        self._free.append(row)
        return size_bytes

    def digests(self) -> list[Digest]:
        return list(self.rows)

    def files(self) -> list[StoredFile]:
        return [StoredFile(it, int(self._sizes[row]), float(self._used[row])) for it, row in list(self.rows.items())]

    def listing(self) -> Listing:
        """Return all files. Without the owner's lock one that changes at this moment may be wrong: a digest of nobody's."""
        sizes = self._sizes.copy()
        live = np.flatnonzero(sizes >= 0)
        return Listing(self._digests[live], sizes[live], self._used[live])

    def _grow(self) -> None:
        more = len(self._sizes)
        # The sizes last: whoever reads them without a lock finds rows for all.
        self._digests = np.concatenate([self._digests, np.zeros((more, DIGEST_BYTES), np.uint8)])
        self._used = np.concatenate([self._used, np.zeros(more)])
        self._sizes = np.concatenate([self._sizes, np.full(more, -1, np.int64)])
