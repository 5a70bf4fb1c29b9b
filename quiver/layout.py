"""Which samples share a shard: a pure function of their digests, sizes and (for ``sequential``) order.

``mixed`` places samples by their own digest, as in extendible hashing (Fagin, Nievergelt, Pippenger and Strong, 1979):
a prefix bucket that holds more than the shard size splits in two by the next bit. So the shards depend on content
alone: two copies of a dataset under different names give the same shards, and copies that differ in n samples share all
but about n shards. Every shard is an unbiased sample of the dataset.

``sequential`` keeps the order of the origin and cuts at content-defined boundaries (as content-defined chunking does,
but by the sample's digest instead of a rolling hash), so that a fill is one ranged read and an appended dataset keeps
all old shards but the last.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from quiver.shard import COUNT_BYTES, ROW_BYTES, U8, U64

Layout = Literal["mixed", "sequential"]
SHARD_BYTES_DEFAULT: Final = 32 << 20
SHARD_BYTES_MIN: Final = 4 << 10
SHARD_BYTES_AUTO_MIN: Final = 16 << 10  # below it a shard's file and fsync cost more than its samples
SHARDS_WANTED: Final = 256
SHARD_BYTES_MAX: Final = 1 << 30

I64 = npt.NDArray[np.int64]


def auto_shard_bytes(layout: Layout, samples: int, total_bytes: int, unit_bytes: int = 0) -> int:
    """Return a shard size that cuts ``total_bytes`` of distinct samples into some hundred shards, 32 MiB at most.

    A cache holds whole shards: a few large ones are too coarse for a cache that is smaller than the dataset.
    ``unit_bytes``: the size of what is read as a whole, a row group of Parquet. A shard has room for one and a quarter
    more, since otherwise several shards would each read all of it. The size is a power of two: two copies of a dataset
    share shards only if both have the same shard size.
    """
    wanted = SHARDS_WANTED // 2 if layout == "sequential" else SHARDS_WANTED  # whose shards are half full on average
    by_total = max(1 << (total_bytes // wanted).bit_length() >> 1, SHARD_BYTES_AUTO_MIN)
    if samples > 2 * SHARDS_WANTED:  # then a shard is of several: the files are fewer, and there are enough
        by_total = max(by_total, 1 << (4 * total_bytes // samples).bit_length())
    by_unit = 1 << (unit_bytes * 4 // 3).bit_length()
    return min(max(by_total, by_unit), SHARD_BYTES_DEFAULT)


def place(layout: Layout, digests: U8, sizes: U64, units: npt.NDArray[np.uint32], limit_bytes: int) -> tuple[I64, I64]:
    """Cut distinct samples into shards.

    All in origin order: digests ``(n, 32)`` uint8, sizes ``(n,)`` in bytes, and ``units (n,)``, the number of the tar
    or row group that each sample is in (all the same where the origin has no such units).
    Return ``order (n,)``, the samples in shard order, and ``firsts (shards + 1,)``, the positions in that order at
    which each shard begins (the last is n). A shard file with its table has at most ``limit_bytes``, unless it holds a
    single sample.
    """
    if layout == "mixed":
        return _mixed(digests, sizes, limit_bytes)
    return _sequential(digests, sizes, units, limit_bytes)


def _mixed(digests: U8, sizes: U64, limit_bytes: int) -> tuple[I64, I64]:
    prefixes = np.ascontiguousarray(digests[:, :8]).view(">u8").reshape(-1).astype(np.uint64)
    order = np.argsort(prefixes, kind="stable").astype(np.int64, copy=False)
    ordered = prefixes[order]
    for i in np.flatnonzero(ordered[1:] == ordered[:-1]).tolist():  # digests that share 64 bits: practically never
        lo, hi = np.searchsorted(ordered, ordered[i], "left"), np.searchsorted(ordered, ordered[i], "right")
        order[lo:hi] = sorted(order[lo:hi].tolist(), key=lambda at: digests[at].tobytes())
    cost = sizes[order].astype(np.int64)
    cost += ROW_BYTES
    ends = np.zeros(len(order) + 1, np.int64)
    np.cumsum(cost, out=ends[1:])
    del prefixes, cost  # see _sequential

    firsts: list[int] = []
    stack = [(0, len(order), 0, 0)]  # first, past the last, bits of the prefix, the prefix
    while stack:
        lo, hi, bits, prefix = stack.pop()
        if lo == hi:
            continue
        if hi - lo == 1 or bits == 64 or int(ends[hi] - ends[lo]) + COUNT_BYTES <= limit_bytes:
            firsts.append(lo)
            continue
        split = prefix | (1 << (63 - bits))
        middle = int(np.searchsorted(ordered[lo:hi], np.uint64(split), "left")) + lo
        stack.append((middle, hi, bits + 1, split))
        stack.append((lo, middle, bits + 1, prefix))
    return order, np.asarray([*firsts, len(order)], np.int64)


def _sequential(digests: U8, sizes: U64, units: npt.NDArray[np.uint32], limit_bytes: int) -> tuple[I64, I64]:
    """Cut where a digest ends in enough zero bits, between a quarter and the whole of the limit.

    The chance of a cut at a sample is about ``4 * size / limit``: beyond the first quarter the next cut is another
    quarter away on average, so shards are about half the limit. The end of a unit cuts too. Inside a unit of up to
    three quarters of the limit nothing else cuts, since the unit's end comes before the limit. So a shard consists of
    whole units, or of a part of one larger unit.
    """
    count = len(sizes)
    cost = sizes.astype(np.int64) + ROW_BYTES
    ends = np.zeros(count + 1, np.int64)
    np.cumsum(cost, out=ends[1:])
    draw = np.ascontiguousarray(digests[:, 24:32]).view("<u8").reshape(-1).astype(np.float64)
    draw /= 2.0**64  # in place, as below: temporaries of all samples are where the memory of indexing peaks
    chance = 4.0 * cost
    chance /= limit_bytes
    cuts_after = draw < chance
    del draw, chance
    if count:
        ends_unit = np.append(units[1:] != units[:-1], False)
        firsts_of_units = np.append(0, np.flatnonzero(ends_unit) + 1)
        whole = np.add.reduceat(cost, firsts_of_units) <= limit_bytes * 3 // 4 - COUNT_BYTES
        cuts_after &= ~np.repeat(whole, np.diff(np.append(firsts_of_units, count)))
        cuts_after |= ends_unit
    candidates = np.flatnonzero(cuts_after) + 1
    firsts = [0] if count else []
    first = 0
    while first < count:
        soft = int(np.searchsorted(ends, ends[first] + limit_bytes // 4, "left"))
        hard = int(np.searchsorted(ends, ends[first] + limit_bytes - COUNT_BYTES, "right")) - 1
        at = int(np.searchsorted(candidates, max(soft, first + 1), "left"))
        cut = int(candidates[at]) if at < len(candidates) else count
        first = max(min(cut, hard, count), first + 1)
        if first < count:
            firsts.append(first)
    return np.arange(count, dtype=np.int64), np.asarray([*firsts, count], np.int64)
