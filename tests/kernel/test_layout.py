"""Which samples share a shard: by content alone (``mixed``), or in order with cuts that stay (``sequential``)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.layout import Layout, place
from quiver.shard import ROW_BYTES, table_bytes

LIMIT = 4096
count_and_seed = st.tuples(st.integers(1, 400), st.integers(0, 2**32 - 1))


def dataset(count: int, seed: int, size_max: int = 1500) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 32), np.uint8), rng.integers(0, size_max, count).astype(np.uint64)


def shards(
    layout: Layout, digests: Any, sizes: Any, objects: Any = None, limit: int = LIMIT
) -> list[tuple[bytes, ...]]:
    """Return each shard as its samples' digests, in their order."""
    objects = np.zeros(len(sizes), np.uint32) if objects is None else objects
    order, firsts = place(layout, digests, sizes, objects, limit)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    assert firsts[0] == 0
    assert firsts[-1] == len(sizes)
    assert (np.diff(firsts) > 0).all()
    for lo, hi in zip(firsts[:-1].tolist(), firsts[1:].tolist(), strict=True):
        assert hi - lo == 1 or int(sizes[order[lo:hi]].sum()) + table_bytes(hi - lo) <= limit
    names = [digests[row].tobytes() for row in order.tolist()]
    return [tuple(names[lo:hi]) for lo, hi in zip(firsts[:-1].tolist(), firsts[1:].tolist(), strict=True)]


@given(count_and_seed)
def test_mixed_shards_depend_on_content_and_not_on_order(drawn: tuple[int, int]) -> None:
    digests, sizes = dataset(*drawn)
    shuffled = np.random.default_rng(1).permutation(len(sizes))
    before = shards("mixed", digests, sizes)
    assert shards("mixed", digests[shuffled], sizes[shuffled]) == before
    assert [name for shard in before for name in shard] == sorted(name for shard in before for name in shard)


@settings(max_examples=60)
@given(count_and_seed, st.data())
def test_n_removed_samples_leave_at_most_n_shards_that_the_other_copy_lacks(
    drawn: tuple[int, int], draw: st.DataObject
) -> None:
    digests, sizes = dataset(*drawn)
    n = draw.draw(st.integers(0, min(10, len(sizes) - 1)))
    kept = np.sort(np.random.default_rng(2).permutation(len(sizes))[n:])
    full, fewer = set(shards("mixed", digests, sizes)), set(shards("mixed", digests[kept], sizes[kept]))
    assert len(fewer - full) <= n


def test_samples_that_share_64_bits_are_ordered_by_the_rest() -> None:
    digests, sizes = dataset(60, 3)
    digests[:40, :8] = 7
    shuffled = np.random.default_rng(1).permutation(60)
    assert shards("mixed", digests, sizes, limit=10**6) == shards(
        "mixed", digests[shuffled], sizes[shuffled], limit=10**6
    )


@pytest.mark.parametrize("layout", ["mixed", "sequential"])
def test_a_sample_larger_than_the_limit_is_a_shard_of_its_own(layout: Layout) -> None:
    digests, sizes = dataset(50, 4, 100)
    sizes[20] = 10 * LIMIT
    alone = [shard for shard in shards(layout, digests, sizes) if digests[20].tobytes() in shard]
    assert alone == [(digests[20].tobytes(),)]


@pytest.mark.parametrize("layout", ["mixed", "sequential"])
def test_empty_samples_and_single_samples_are_placed(layout: Layout) -> None:
    digests, sizes = dataset(30, 5, 1)
    assert sum(map(len, shards(layout, digests, sizes))) == 30
    assert shards(layout, digests[:1], sizes[:1]) == [(digests[0].tobytes(),)]


@given(count_and_seed)
def test_sequential_shards_keep_the_order_of_the_origin(drawn: tuple[int, int]) -> None:
    digests, sizes = dataset(*drawn)
    placed = shards("sequential", digests, sizes)
    assert [name for shard in placed for name in shard] == [row.tobytes() for row in digests]


@given(count_and_seed, st.integers(1, 100))
def test_an_appended_dataset_keeps_all_sequential_shards_but_the_last(drawn: tuple[int, int], more: int) -> None:
    digests, sizes = dataset(*drawn)
    after_digests, after_sizes = dataset(more, drawn[1] + 1)
    before = shards("sequential", digests, sizes)
    after = shards("sequential", np.concatenate([digests, after_digests]), np.concatenate([sizes, after_sizes]))
    assert after[: len(before) - 1] == before[:-1]


def test_sequential_shards_are_about_half_the_limit_and_no_splinters() -> None:
    digests, sizes = dataset(5000, 6, 200)
    placed = shards("sequential", digests, sizes, limit=16384)
    mean = (int(sizes.sum()) + len(sizes) * ROW_BYTES) / len(placed)
    assert 0.3 < mean / 16384 < 0.8


def test_sequential_shards_end_with_their_object_where_objects_are_large() -> None:
    digests, sizes = dataset(600, 7, 200)
    objects = np.repeat(np.arange(6, dtype=np.uint32), 100)
    placed = shards("sequential", digests, sizes, objects, limit=4096)
    of = {row.tobytes(): int(number) for row, number in zip(digests, objects, strict=True)}
    crossing = [shard for shard in placed if len({of[name] for name in shard}) > 1]
    assert len(crossing) <= 3, "only an object's last quarter of a shard may run on into the next object"
