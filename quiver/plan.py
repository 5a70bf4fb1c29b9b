"""A batch of indices as one plan: which bytes of which shard each sample is, by array operations alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quiver.cached import cached_property
from quiver.manifest import ABSENT, Manifest

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Plan:
    """Where the n samples of a batch lie: the byte fields ``first_field`` .. ``last_field`` of each.

    All arrays are int64, in bytes or positions. The span of a sample begins at ``offsets (n,)`` in shard
    ``shards (n,)`` and has ``sizes (n,)`` bytes; ``starts`` and ``lengths (n, fields)`` cut the fields from it. An
    absent field has length -1.
    """

    manifest: Manifest
    blobs: Ints
    shards: Ints
    offsets: Ints
    sizes: Ints
    starts: Ints
    lengths: Ints
    first_field: int

    def __len__(self) -> int:
        return len(self.blobs)

    @cached_property
    def _by_shard(self) -> tuple[Ints, Ints]:
        return _distinct(self.shards)

    def by_shard(self, positions: npt.NDArray[np.intp]) -> tuple[Ints, Ints]:
        """Return the distinct shards ``(s,)`` of the samples at these positions, ascending, and for each position the
        row of its shard in them. The positions must be distinct and ascending."""
        if len(positions) == len(self):  # all positions, which every tier asks for first: computed once
            return self._by_shard
        return _distinct(self.shards[positions])

    def take(self, positions: npt.NDArray[np.intp]) -> Plan:
        """Return the plan of some of the samples."""
        return Plan(
            self.manifest,
            self.blobs[positions],
            self.shards[positions],
            self.offsets[positions],
            self.sizes[positions],
            self.starts[positions],
            self.lengths[positions],
            self.first_field,
        )


def _distinct(shards: Ints) -> tuple[Ints, Ints]:
    distinct, which = np.unique(shards, return_inverse=True)
    return distinct, which


def plan_batch(manifest: Manifest, indices: npt.NDArray[np.intp], fields: tuple[int, int] | None = None) -> Plan:
    """Plan a batch of sample indices (each in ``0 .. len(manifest) - 1``, not checked here).

    ``fields``: the first and the last byte field wanted. What lies between is read as well: one range per sample.
    """
    return plan_blobs(manifest, manifest.tables.blob_of[indices], fields)


def plan_blobs(manifest: Manifest, rows: npt.NDArray[np.integer], fields: tuple[int, int] | None = None) -> Plan:
    """Plan distinct samples: rows of ``blobs``."""
    tables = manifest.tables
    blobs = rows.astype(np.int64)
    shards = np.searchsorted(tables.firsts, blobs.astype(tables.firsts.dtype), side="right") - 1
    raw = tables.lengths[blobs]
    offsets = tables.offsets[blobs].astype(np.int64)
    if raw.shape[1] == 1 and not (raw == np.uint64(ABSENT)).any():
        lengths = raw.astype(np.int64)
        return Plan(manifest, blobs, shards, offsets, lengths[:, 0], np.zeros_like(lengths), lengths, 0)
    first, last = fields if fields is not None else (0, raw.shape[1] - 1)
    wanted = slice(first, last + 1)
    absent = raw == np.uint64(ABSENT)
    present = np.where(absent, np.uint64(0), raw).astype(np.int64)
    ends = np.cumsum(present, axis=1)
    before = ends[:, first] - present[:, first]
    return Plan(
        manifest,
        blobs,
        shards,
        offsets + before,
        ends[:, last] - before,
        (ends - present)[:, wanted] - before[:, None],
        np.where(absent, np.int64(-1), present)[:, wanted],
        first,
    )


def plan_shards(manifest: Manifest, shards: npt.NDArray[np.integer]) -> Plan:
    """Return a plan of no bytes of these shards: executing it makes them resident."""
    blobs = manifest.tables.firsts[shards].astype(np.int64)
    nothing = np.zeros(len(blobs), np.int64)
    cuts = np.zeros((len(blobs), 0), np.int64)
    return Plan(manifest, blobs, shards.astype(np.int64), nothing, nothing, cuts, cuts, 0)
