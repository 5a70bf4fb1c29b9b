"""The listed objects of a source: the input of the manifest's table of objects and of the tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from quiver.manifest import OriginObject
from quiver.shard import U64
from quiver_client.indexing.columns import I64, Growing, GrowingStrings

BLOCK: Final = 4096  # paths that exist as Python objects at a time


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """Objects below ``base`` (a URL that ends in a slash) in byte order of their paths.

    ``single``: the source names this object itself, and not a folder or a pattern that may later match more.
    """

    base: str
    single: bool
    paths: pa.Array  # (n,) large_utf8, relative to base, not quoted
    sizes: U64  # (n,) bytes
    etags: pa.Array  # (n,) large_utf8
    mtimes: I64  # (n,) nanoseconds

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def local(self) -> bool:
        return self.base.startswith("file://")

    @property
    def total_bytes(self) -> int:
        return int(self.sizes.sum())

    def object(self, number: int) -> OriginObject:
        return OriginObject(
            path=self.paths[number].as_py(),
            size=int(self.sizes[number]),
            etag=self.etags[number].as_py(),
            mtime_ns=int(self.mtimes[number]),
        )

    def span(self, first: int, end: int) -> list[OriginObject]:
        """Return the objects ``first`` up to ``end``, in a twentieth of the time of fetching them one by one."""
        columns = (self.paths[first:end], self.sizes[first:end], self.etags[first:end], self.mtimes[first:end])
        return [OriginObject(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]

    def blocks(self) -> Iterator[tuple[int, list[str]]]:
        """Yield all paths in blocks: the position of the first, and the paths."""
        for first in range(0, len(self), BLOCK):
            yield first, self.paths[first : first + BLOCK].to_pylist()

    def only(self, chosen: npt.NDArray[np.intp]) -> Listing:
        """Return the listing of only these objects."""
        if len(chosen) == len(self):
            return self
        rows = pa.array(chosen)
        return Listing(
            self.base,
            self.single,
            self.paths.take(rows),
            self.sizes[chosen],
            self.etags.take(rows),
            self.mtimes[chosen],
        )


class ListingBuilder:
    """Collects objects in any order."""

    def __init__(self) -> None:
        self._paths = GrowingStrings()
        self._etags = GrowingStrings()
        self._sizes = Growing(np.uint64)
        self._mtimes = Growing(np.int64)
        self._waiting: list[OriginObject] = []

    def add(self, found: OriginObject) -> None:
        self._waiting.append(found)
        if len(self._waiting) == BLOCK:
            self._flush()

    def finish(self, base: str, *, single: bool = False) -> Listing:
        """Return the listing, sorted."""
        self._flush()
        listing = Listing(base, single, self._paths.take(), self._sizes.take(), self._etags.take(), self._mtimes.take())
        names = listing.paths.cast(pa.large_binary())  # text sorts by bytes too, but only binary promises it
        if len(names) < 2 or pc.all(pc.less(names[:-1], names[1:])).as_py():
            return listing
        order = pc.sort_indices(names).to_numpy()
        rows = pa.array(order)
        return Listing(
            base,
            single,
            listing.paths.take(rows),
            listing.sizes[order],
            listing.etags.take(rows),
            listing.mtimes[order],
        )

    def _flush(self) -> None:
        found, self._waiting = self._waiting, []
        self._paths.extend([item.path for item in found])
        self._etags.extend([item.etag for item in found])
        self._sizes.extend([item.size for item in found])
        self._mtimes.extend([item.mtime_ns for item in found])
