"""How a dataset is split into parts at random: a pure function of the sizes, a seed, and groups that stay whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ints = npt.NDArray[np.int64]
STREAM: Final = 0x73706C6974  # "split": its random numbers are not those of an epoch of the same seed
ROUNDING: Final = 1e-9  # by which fractions such as 0.7 + 0.2 + 0.1 may exceed 1


def bounds_of(sizes: Sequence[Any], count: int) -> Ints:
    """Return where the parts end ``(parts,)`` out of ``count`` samples. ``sizes`` are fractions, or numbers of samples.

    Each end is rounded, and not each size, so that fractions that add up to one leave out no sample. Raises
    ``ValueError``.
    """
    if not sizes:
        raise ValueError("split: give the size of each part, as fractions (0.9, 0.1) or as numbers of samples")
    if any(isinstance(size, bool | np.bool_) or not isinstance(size, Real) for size in sizes):
        raise ValueError(f"split{tuple(sizes)}: sizes are fractions (0.9, 0.1) or numbers of samples")
    whole = [isinstance(size, Integral) for size in sizes]
    if any(whole) and not all(whole):
        raise ValueError(f"split{tuple(sizes)}: give either fractions or numbers of samples, not both")
    if any(not size > 0 or math.isinf(size) for size in sizes):
        raise ValueError(f"split{tuple(sizes)}: each size must be above 0; a dataset has at least one sample")
    total = sum(sizes)
    if all(whole):
        if total > count:
            raise ValueError(f"split{tuple(sizes)}: {total} samples in all, but the dataset has {count}")
        ends: Ints = np.cumsum(np.asarray(sizes), dtype=np.int64)
        return ends
    if total > 1 + ROUNDING:
        raise ValueError(f"split{tuple(sizes)}: the fractions add up to {total:g}; at most 1 can be given out")
    shares = np.cumsum(np.asarray(sizes, np.float64))
    if total > 1 - ROUNDING:
        shares[-1] = 1.0
    rounded: Ints = np.rint(np.minimum(shares, 1.0) * count).astype(np.int64)
    return rounded


def split_rows(count: int, ends: Ints, seed: int) -> list[Ints]:
    """Return the rows of each part, ascending: the same for the same arguments, on every machine."""
    order = _permuted(count, seed)
    return [np.sort(part) for part in np.split(order[: ends[-1]], ends[:-1])]


def split_groups(groups: Ints, ends: Ints, seed: int) -> list[Ints]:
    """Return the rows of each part so that no group is in two; ``groups (n,)``: the group of each sample, from 0.

    The groups are put in a random order and dealt to the parts where the middle of each falls, so that each end is off
    by half a group at most; or by more, if a part would otherwise be empty and there is a group for each part.
    """
    sizes = np.bincount(groups)
    order = _permuted(len(sizes), seed)
    middles = np.cumsum(sizes[order]) - sizes[order] / 2
    cuts = np.searchsorted(middles, ends, "right")  # how many groups precede the end of each part
    if len(sizes) >= len(ends):
        for part in range(len(ends)):
            least = int(cuts[part - 1]) + 1 if part else 1
            cuts[part] = min(max(int(cuts[part]), least), len(sizes) - (len(ends) - 1 - part))
    part_of = np.empty(len(sizes), np.int64)
    part_of[order] = np.searchsorted(cuts, np.arange(len(sizes)), "right")
    parts = part_of[groups]
    return [np.flatnonzero(parts == part).astype(np.int64) for part in range(len(ends))]


def groups_of(column: pa.ChunkedArray[Any]) -> Ints:
    """Return the group of each sample ``(n,)``: equal values are one group, and so are samples without a value."""
    encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
    groups: Ints = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return groups


def _permuted(count: int, seed: int) -> Ints:
    order = np.random.Generator(np.random.PCG64([seed, STREAM])).permutation(count)
    return order.astype(np.int64, copy=False)
