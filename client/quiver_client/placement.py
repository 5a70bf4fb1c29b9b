"""Where the samples of a dataset lie: in which rows of which manifests. A value of arrays.

A dataset, a selection of one, a concatenation and a join all come down to this: some *leaves*, each a manifest read
through a cache, whose samples are numbered one leaf after another; and for each sample of the dataset one row in that
numbering, or several where fields of several manifests are joined. The loader needs nothing else to know which shards
a sample lies in, which are still needed, and whom to tell.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quiver.manifest import Manifest
from quiver_client.needs_reporter import NeedsChannel

Ints = npt.NDArray[np.int64]
NOWHERE = -1


class Leaf(Protocol):
    """A manifest that is read through a cache: what the loader knows of a ``Dataset``."""

    @property
    def manifest(self) -> Manifest: ...
    @property
    def place(self) -> Hashable:
        """Equal for leaves that are one manifest read through one cache."""
        ...

    def needs(self) -> NeedsChannel | None: ...
    def follow(self) -> None: ...
    def count(self, name: str, amount: int) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def read_seconds(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """``rows (n,)``: the row of each sample in all leaves together; ``beside``: further rows ``(n,)`` that the same
    samples have in joined leaves, ``NOWHERE`` for a sample that has none."""

    leaves: tuple[Leaf, ...]
    rows: Ints
    beside: tuple[Ints, ...] = ()

    @classmethod
    def of_leaf(cls, leaf: Leaf, rows: Ints | None = None) -> Placement:
        """Return the placement of some rows of a manifest, of all for ``None``."""
        return cls((leaf,), np.arange(len(leaf.manifest), dtype=np.int64) if rows is None else rows)

    @classmethod
    def concatenated(cls, parts: Sequence[Placement]) -> Placement:
        """Return the placement of the samples of all parts, one part after another.

        Parts of one manifest and cache share a leaf: it is needed once, by one consumer.
        """
        leaves, moved = _merged(parts)
        depth = max(len(each.beside) for each in moved)
        beside = tuple(np.concatenate([_nth(each.beside, at, len(each.rows)) for each in moved]) for at in range(depth))
        return cls(leaves, np.concatenate([each.rows for each in moved]), beside)

    @classmethod
    def joined(cls, main: Placement, others: Sequence[Placement]) -> Placement:
        """Return the placement of samples whose fields lie in several datasets; sample i of each is the same one."""
        leaves, moved = _merged([main, *others])
        further = [rows for each in moved[1:] for rows in (each.rows, *each.beside)]
        return cls(leaves, moved[0].rows, (*moved[0].beside, *further))

    def take(self, positions: Ints) -> Placement:
        """Return the placement of the samples at these positions."""
        return Placement(self.leaves, self.rows[positions], tuple(rows[positions] for rows in self.beside))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def bytes(self) -> int:
        """The bytes of all samples, without what lies beside."""
        sizes = [leaf.manifest.blob_sizes(slice(None))[leaf.manifest.tables.blob_of] for leaf in self.leaves]
        return int(np.concatenate(sizes)[self.rows].sum())

    @property
    def firsts(self) -> Ints:
        """The first row of each leaf ``(leaves,)``."""
        counts = [len(leaf.manifest) for leaf in self.leaves]
        return np.cumsum([0, *counts[:-1]], dtype=np.int64)


def _merged(parts: Sequence[Placement]) -> tuple[tuple[Leaf, ...], list[Placement]]:
    """Return the distinct leaves of all parts, and the parts with their rows counted over all of these."""
    places: dict[Hashable, Leaf] = {}
    for leaf in (leaf for part in parts for leaf in part.leaves):
        places.setdefault(leaf.place, leaf)
    leaves = tuple(places.values())
    numbers = {place: number for number, place in enumerate(places)}
    firsts = Placement(leaves, np.zeros(0, np.int64)).firsts
    moved = []
    for part in parts:
        own = part.firsts
        shifts = firsts[[numbers[leaf.place] for leaf in part.leaves]] - own
        moved.append(
            Placement(leaves, _shifted(part.rows, own, shifts), tuple(_shifted(r, own, shifts) for r in part.beside))
        )
    return leaves, moved


def _shifted(rows: Ints, firsts: Ints, shifts: Ints) -> Ints:
    """Return rows, each shifted as its leaf is."""
    if not shifts.any():
        return rows
    if len(shifts) == 1:
        return np.where(rows == NOWHERE, rows, rows + shifts[0])
    leaf = np.searchsorted(firsts, np.maximum(rows, 0), "right") - 1
    return np.where(rows == NOWHERE, rows, rows + shifts[leaf])


def _nth(beside: tuple[Ints, ...], at: int, count: int) -> Ints:
    return beside[at] if at < len(beside) else np.full(count, NOWHERE, np.int64)
