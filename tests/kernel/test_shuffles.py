"""Block shuffle: every sample once, few shards open at a time, and mixed as well as that allows."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.shuffles import (
    BLOCK_SHARDS,
    BLOCK_SHARDS_MIN,
    BLOCK_SHARDS_WHERE_ALIKE,
    Ints,
    block_permutation,
    default_block_shards,
)

datasets = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any)  # samples by shard; some have none
seeds = st.integers(0, 2**40)


def shards_of(counts: list[int], seed: int = 0) -> Ints:
    """Return the shard of each sample. As in a mixed layout, neighbours lie anywhere."""
    chance = np.random.default_rng(seed)
    shards: Ints = chance.permutation(np.repeat(np.arange(len(counts)), counts))
    return shards


def opened(shards: list[int]) -> list[int]:
    """Return how many shards are begun and not finished at each position, by going through the order."""
    left = {shard: shards.count(shard) for shard in set(shards)}
    begun: set[int] = set()
    counts = []
    for shard in shards:
        begun.add(shard)
        counts.append(len(begun))
        left[shard] -= 1
        if not left[shard]:
            begun.discard(shard)
    return counts


@given(datasets, seeds, st.integers(0, 5), st.integers(1, 50))
def test_every_sample_is_in_the_order_once(counts: list[int], seed: int, epoch: int, block_shards: int) -> None:
    order = block_permutation(shards_of(counts), seed, epoch, block_shards)
    assert sorted(order.tolist()) == list(range(sum(counts)))


@given(datasets, seeds, st.integers(0, 5), st.integers(1, 50))
def test_no_more_shards_are_open_than_a_block_has(counts: list[int], seed: int, epoch: int, block_shards: int) -> None:
    shard_of = shards_of(counts)
    order = block_permutation(shard_of, seed, epoch, block_shards)
    assert max(opened(shard_of[order].tolist())) <= block_shards


@given(datasets, seeds, st.integers(1, 20))
def test_a_shards_samples_lie_within_as_many_as_twice_the_block_has(
    counts: list[int], seed: int, block_shards: int
) -> None:
    shard_of = shards_of(counts)
    shards = shard_of[block_permutation(shard_of, seed, 0, block_shards)]
    for shard in set(shards.tolist()):
        first, last = np.flatnonzero(shards == shard)[[0, -1]].tolist()
        assert len(set(shards[first : last + 1].tolist())) <= 2 * block_shards - 1


def test_the_order_is_that_of_every_machine_and_version() -> None:
    order = block_permutation(np.arange(84) * 5 % 12, 5, 2, 4)
    assert order[:8].tolist() == [54, 18, 46, 78, 6, 70, 42, 22]
    assert hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()[:16] == "b2d41119eae4ef5a"
    assert order.dtype == np.int64


@pytest.mark.parametrize("other", [{"seed": 6}, {"epoch": 3}, {"block_shards": 5}])
def test_seed_epoch_and_block_each_make_another_order_of_shards(other: dict[str, int]) -> None:
    shard_of = shards_of([8] * 64)
    settings = {"seed": 5, "epoch": 2, "block_shards": 4}
    first, second = (shard_of[block_permutation(shard_of, **it)] for it in (settings, settings | other))
    begun = [list(dict.fromkeys(shards.tolist())) for shards in (first, second)]
    alike = np.mean([one == another for one, another in zip(*begun, strict=True)])
    assert alike < 0.1


def test_a_sample_follows_one_of_another_shard_as_often_as_chance_has_it() -> None:
    block = 16
    shard_of = shards_of([64] * 256)
    shards = shard_of[block_permutation(shard_of, 1, 1, block)]
    middle = shards[len(shards) // 10 : -len(shards) // 10]
    same = float(np.mean(middle[1:] == middle[:-1]))
    assert same == pytest.approx(1 / block, rel=0.15)  # a block of 16 evenly mixed shards


def test_near_both_ends_of_an_epoch_half_as_many_shards_mix() -> None:
    block = 32
    shard_of = shards_of([64] * 256)
    shards = shard_of[block_permutation(shard_of, 1, 1, block)]
    for end in (shards[:128], shards[-128:]):
        assert block / 2 - 2 <= len(set(end.tolist())) <= block / 2 + 4


def test_samples_of_a_shard_are_spread_evenly_over_its_block() -> None:
    block, size = 16, 512
    shard_of = shards_of([size] * 128)
    shards = shard_of[block_permutation(shard_of, 3, 0, block)]
    places = []
    for shard in set(shards[len(shards) // 4 : len(shards) // 4 * 3 : 8].tolist()):
        at = np.flatnonzero(shards == shard)
        if at[0] > block * size and at[-1] < len(shards) - block * size:
            places.append((at - at[0]) / (block * size))
    spread = np.concatenate(places)
    assert spread.max() < 1.1
    assert np.quantile(spread, [0.25, 0.5, 0.75]) == pytest.approx([0.25, 0.5, 0.75], abs=0.03)


def test_within_a_shard_the_order_is_not_that_of_the_dataset() -> None:
    order = block_permutation(np.repeat(np.arange(50), 40), 0, 0, 1)  # one shard after the other
    assert len(set((order // 40)[::40].tolist())) == 50
    rises = np.mean(np.diff(order.reshape(50, 40), axis=1) > 0)
    assert rises == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("block_shards", [12, 13, 1 << 20])
def test_a_block_of_all_shards_mixes_all_samples(block_shards: int) -> None:
    shard_of = np.repeat(np.arange(12), 500)
    order = block_permutation(shard_of, 0, 0, block_shards)
    thirds = np.array_split(shard_of[order], 3)
    counts = np.stack([np.bincount(third, minlength=12) for third in thirds])
    assert counts == pytest.approx(np.full((3, 12), 500 / 3), rel=0.25)


def test_by_default_more_shards_mix_where_their_samples_are_alike_and_fewer_in_small_datasets() -> None:
    assert default_block_shards(100_000) == BLOCK_SHARDS
    assert default_block_shards(100_000, alike=True) == BLOCK_SHARDS_WHERE_ALIKE
    assert default_block_shards(256, alike=True) == 8
    assert default_block_shards(3) == BLOCK_SHARDS_MIN
