"""Block shuffle: the order of an epoch in which few shards are open at a time. Pure: seed and epoch determine it.

The shards stand in random order, and each sample is moved from its shard's place by a random distance, so that samples
of neighbouring shards mix. Invariant: at no position of the order more than ``block_shards`` shards are *open*, meaning
begun and not finished. So a cache needs room for that many shards, whatever the size of the dataset, reads each of them
once and never needs it again in this epoch. ``docs/shuffles.md`` says what this costs in randomness.

Mosaic Streaming's ``py1e`` moves samples in the same way. There distances are counted in samples; here they are counted
in shards, since what bounds the cache is how many shards are open, however many samples of each take part.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

BLOCK_SHARDS: Final = 16  # shards open by default, where each shard is a random subset of the dataset,
BLOCK_SHARDS_WHERE_ALIKE: Final = 64  # and where a shard's samples are alike (sequential layout);
BLOCK_SHARDS_MIN: Final = 4  # in small datasets fewer, down to this,
SHARDS_PER_OPEN: Final = 32  # so that a cache of a fifth of the dataset holds six times what is open
BLOCK_SHARDS_MAX: Final = 1 << 20


def default_block_shards(shard_count: int, *, alike: bool = False) -> int:
    """Return how many shards are open if the user does not say. ``alike``: a shard's samples stood together."""
    most = BLOCK_SHARDS_WHERE_ALIKE if alike else BLOCK_SHARDS
    return min(most, max(shard_count // SHARDS_PER_OPEN, BLOCK_SHARDS_MIN))


def block_permutation(shard_of: Ints, seed: int, epoch: int, block_shards: int) -> Ints:
    """Return the samples in the order of an epoch ``(samples,)``: the same on every machine, in every process.

    ``shard_of`` ``(samples,)``: the shard of each sample. Shards without samples do not count. With as many
    ``block_shards`` as there are shards, or more, all samples are mixed.
    """
    # Of NumPy's random streams this uses uniform numbers alone, and no ``permutation``, whose algorithm could change.
    chance = np.random.Generator(np.random.PCG64([seed, epoch, block_shards]))
    counts = np.bincount(shard_of)
    filled = np.flatnonzero(counts)
    shards = len(filled)
    place = np.zeros(len(counts), np.float64)
    place[filled[np.argsort(chance.random(shards), kind="stable")]] = np.arange(shards)
    keys = chance.random(len(shard_of))
    if block_shards < shards:
        # The shard at place k covers keys from k + (1 - block_shards) / 2 to k + (1 + block_shards) / 2, so each key is
        # covered by ``block_shards`` shards. What would lie beyond an end of the epoch is mirrored into it: then there
        # are as many samples per key near the ends as elsewhere, from half as many shards.
        keys -= 0.5
        keys *= block_shards
        keys += place[shard_of]
        keys += 0.5
        np.abs(keys, out=keys)
        np.minimum(keys, 2 * shards - keys, out=keys)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)
