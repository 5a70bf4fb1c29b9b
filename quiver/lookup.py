"""The row of a digest in a table of digests: a mapping that takes 12 bytes per row where a dict takes 165.

The rows are sorted by their first eight bytes: bisection finds one row, one numpy call finds many. Digests are
untrusted, so rows that share these eight bytes, which never happens by chance, are sorted by all 32.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Final

import numpy as np
import numpy.typing as npt

from quiver.digest import DIGEST_BYTES, Digest

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

FEW: Final = 16  # with shared prefixes, a lookup of so many times fewer digests than rows avoids a copy


class DigestRows(Mapping[Digest, int]):
    """Digest -> row of ``digests`` ``(n, 32)``, which are distinct. Immutable; safe from threads."""

    __slots__ = ("_alike", "_order", "_words", "digests")

    def __init__(self, digests: U8) -> None:
        self.digests = digests
        words = _words(digests)
        order = np.argsort(words, kind="stable")
        sorted_words = words[order]
        self._alike = bool((sorted_words[1:] == sorted_words[:-1]).any())
        if self._alike:
            order = np.argsort(_whole(digests), kind="stable")
            sorted_words = words[order]
        self._words, self._order = sorted_words, order.astype(np.uint32)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Digest]:
        return map(self.name, range(len(self)))

    def __getitem__(self, digest: Digest) -> int:
        word = np.uint64(int.from_bytes(digest[:8], "big"))
        at = int(np.searchsorted(self._words, word))
        if self._alike:
            end = int(np.searchsorted(self._words, word, "right"))
            at = bisect_left(range(len(self)), digest, at, end, key=lambda i: self.digests[self._order[i]].tobytes())
        if at < len(self) and self.digests[row := int(self._order[at])].tobytes() == digest:
            return row
        raise KeyError(digest)

    def name(self, row: int) -> Digest:
        return Digest(self.digests[row].tobytes())

    def rows_of(self, digests: U8) -> I64:
        """Return the row of each of many digests ``(m, 32)``, -1 for those that are not here."""
        if not len(self):
            return np.full(len(digests), -1, np.int64)
        few = len(digests) * FEW <= len(self)
        if self._alike and not few:
            sorted_names = _whole(self.digests)[self._order]
            places = np.searchsorted(sorted_names, _whole(digests))
        else:
            places = np.searchsorted(self._words, _words(digests))
        rows = self._order[np.minimum(places, len(self) - 1)].astype(np.int64)
        found = np.where((self.digests[rows] == digests).all(axis=1), rows, -1)
        if self._alike and few:
            for at in np.flatnonzero((found < 0) & (self.digests[rows, :8] == digests[:, :8]).all(axis=1)).tolist():
                found[at] = self.get(Digest(digests[at].tobytes()), -1)
        return found

    def among(self, digests: Sequence[Digest]) -> frozenset[Digest]:
        """Return which of many digests are here."""
        if not digests:
            return frozenset()
        return frozenset(compress(digests, (self.rows_of(as_rows(digests)) >= 0).tolist()))

    def only(self, kept: npt.NDArray[np.bool_]) -> DigestRows:
        """Return the mapping of the rows in the mask ``(n,)`` alone, renumbered in order. Nothing is sorted again."""
        place = np.cumsum(kept) - 1
        left = kept[self._order]
        fewer = object.__new__(DigestRows)
        fewer.digests = self.digests[kept]
        fewer._alike, fewer._words = self._alike, self._words[left]
        fewer._order = place[self._order[left]].astype(np.uint32)
        return fewer


def as_rows(digests: Iterable[Digest]) -> U8:
    """Return digests as an array ``(n, 32)``."""
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)


def _words(digests: U8) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(digests[:, :8]).view(">u8").reshape(-1).astype(np.uint64)


def _whole(digests: U8) -> npt.NDArray[np.bytes_]:
    return np.ascontiguousarray(digests).view(f"S{DIGEST_BYTES}").reshape(-1)
