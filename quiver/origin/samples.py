"""The samples of a manifest, read from the origin: a ``SampleOrigin`` turns blob rows into bytes, back to back.

It knows nothing of shards and verifies nothing: the caller checks the bytes against the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quiver.errors import Changed
from quiver.manifest import ABSENT, Manifest
from quiver.origin.base import READ_SECONDS, Extent, ObjectStore

Rows = npt.NDArray[np.intp]


class SampleOrigin(Protocol):
    """Reads distinct samples (rows of ``blobs``) of one manifest."""

    base: str

    def read(self, blobs: Sequence[int], out: memoryview) -> int:
        """Read the samples, back to back, into ``out``; return how many bytes the origin delivered.

        Raises ``Changed`` naming the object and the samples that are lost with it, ``Unavailable`` if the origin does
        not answer within the time given when it was opened.
        """
        ...

    def close(self) -> None: ...


class RangeOrigin:
    """Samples that are byte ranges of objects: separate files, members of tars."""

    def __init__(self, manifest: Manifest, store: ObjectStore, within_seconds: float = READ_SECONDS) -> None:
        self.base = store.base
        self._manifest = manifest
        self._store = store
        self._within_seconds = within_seconds

    def read(self, blobs: Sequence[int], out: memoryview) -> int:
        rows = np.asarray(blobs, np.intp)
        tables = self._manifest.tables
        numbers = tables.object_of[rows]
        distinct, inverse = np.unique(numbers, return_inverse=True)
        paths = [self._manifest.object(int(number)).path for number in distinct]
        extents = [
            Extent(paths[at], offset, length)
            for at, offsets, lengths in zip(
                inverse.tolist(), tables.origins[rows].tolist(), tables.lengths[rows].tolist(), strict=True
            )
            for offset, length in zip(offsets, lengths, strict=True)
            if length != ABSENT
        ]
        with naming_samples(self._manifest, rows):
            return self._store.read(extents, out, self._within_seconds)

    def close(self) -> None:
        self._store.close()


@contextmanager
def naming_samples(manifest: Manifest, rows: Rows) -> Iterator[None]:
    """Add to a ``Changed`` which of the samples being read (rows of ``blobs``) are lost with the object."""
    try:
        yield
    except Changed as error:
        if error.keys:
            raise
        objects = manifest.tables.object_of[rows]
        paths = {number: manifest.object(number).path for number in np.unique(objects).tolist()}
        ends = [number for number, path in paths.items() if error.url.endswith("/" + path)]
        gone = max(ends, key=lambda number: len(paths[number]), default=None)  # a/b.png ends in b.png as well
        lost = rows[objects == gone] if gone is not None else rows
        raise Changed(error.url, error.why, manifest.keys_of_blobs(lost)) from error


class Counted:
    """A ``SampleOrigin`` that reports how many bytes the origin delivered."""

    def __init__(self, inner: SampleOrigin, count: Callable[[int], None]) -> None:
        self.base = inner.base
        self._inner = inner
        self._count = count

    def read(self, blobs: Sequence[int], out: memoryview) -> int:
        read_bytes = self._inner.read(blobs, out)
        self._count(read_bytes)
        return read_bytes

    def close(self) -> None:
        self._inner.close()
