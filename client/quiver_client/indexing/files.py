"""Formats in which each object is a sample: plain files, and images in one folder per class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa

from quiver.manifest import BLOB_TYPE, Field
from quiver_client.indexing.columns import Rows, Samples, byte_rows
from quiver_client.indexing.npy import NpyField, named_npy
from quiver_client.indexing.objects import Listing
from quiver_client.indexing.parallel import Meter, in_order
from quiver_client.indexing.reading import PIECE_BYTES, Objects, hash_object

TASK_OBJECTS_MAX: Final = 256  # spread over so many, the cost of a task is small beside opening a file
TASK_OBJECTS_REMOTE_MAX: Final = 16  # requests are slow: small tasks keep all connections busy to the end


def index_files(
    listing: Listing, objects: Objects, meter: Meter, blob: str, *, labels: bool
) -> tuple[Samples, tuple[Field, ...]]:
    """Hash every object; its bytes are the field ``blob``. ``labels``: the first folder of a path is the class."""
    classes = _classes(listing) if labels else {}
    possible = all(named_npy(path) for _, paths in listing.blocks() for path in paths)
    npy = NpyField(possible=possible)

    def work(span: tuple[int, int]) -> tuple[Rows, NpyField]:
        seen = NpyField(possible=possible)
        return _hash_span(listing, objects, span, blob, classes, seen), seen

    samples = Samples()
    for rows, seen in in_order(work, _spans(listing), objects.threads, meter.stop):
        samples.extend(rows)
        npy.merge(seen)
    fields = [npy.described(Field(blob, BLOB_TYPE))]
    if labels:
        fields.append(Field("label", "int64", classes=tuple(classes)))
    return samples, tuple(fields)


def _classes(listing: Listing) -> dict[str, int]:
    names = {path.partition("/")[0] for _, paths in listing.blocks() for path in paths}
    return {name: number for number, name in enumerate(sorted(names))}


def _spans(listing: Listing) -> Iterator[tuple[int, int]]:
    """Cut the listing into runs of about ``PIECE_BYTES``."""
    objects_max = TASK_OBJECTS_MAX if listing.local else TASK_OBJECTS_REMOTE_MAX
    first = 0
    while first < len(listing):
        ends = np.cumsum(listing.sizes[first : first + objects_max])
        count = max(int(np.searchsorted(ends, PIECE_BYTES, "right")), 1)
        yield first, first + count
        first += count


def _hash_span(
    listing: Listing, objects: Objects, span: tuple[int, int], blob: str, classes: dict[str, int], npy: NpyField
) -> Rows:
    first, end = span
    digests, xxh3 = [], []
    for listed in listing.span(first, end):
        digest, weak = hash_object(objects, listed, npy)
        digests.append(digest)
        xxh3.append(weak)
    scalars: dict[str, pa.Array] = {}
    if classes:
        paths = listing.paths[first:end].to_pylist()
        scalars["label"] = pa.array([classes[path.partition("/")[0]] for path in paths], pa.int64())
    columns = (listing.sizes[first:end], np.zeros(end - first, np.uint64), np.asarray(xxh3, np.uint64))
    return Rows(None, byte_rows(digests), np.arange(first, end, dtype=np.uint32), {blob: columns}, scalars)
