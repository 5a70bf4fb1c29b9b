"""States of loaders whose order a sampler gives: merged over ranks, and dealt again to any number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, WeightedRandomSampler

from quiver_client import BatchSampler, Dataset, merge_states
from quiver_client.loader.epoch import Deal
from quiver_client.loader.state import fitted, is_untouched, make_state, of_sampler, rest_of
from tests.support.data import Files

SAMPLES = 150


@pytest.fixture(scope="module")
def keys(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset(files.manifest, f"file://{tmp_path_factory.mktemp('cache')}?capacity=1GiB", fields=["__key__"])


def distributed(keys: Dataset, batch: int, rank: int, ranks: int, **more: Any) -> BatchSampler:
    return BatchSampler(keys, batch, sampler=DistributedSampler(keys, ranks, rank, **more), job="test")


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def run(orders: list[BatchSampler], batches: int) -> list[int]:
    """Let every rank read some batches; return their samples."""
    read = []
    for order in orders:
        passing = iter(order)
        for _, batch in zip(range(batches), passing, strict=False):
            read += batch
        passing.close()  # type: ignore[attr-defined]
    return read


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_ranks_of_a_distributed_sampler_merge_into_any_number_of_ranks(data: st.DataObject, keys: Dataset) -> None:
    read: list[int] = []
    merged = None
    shuffle = data.draw(st.booleans())
    for _ in range(2):
        ranks = data.draw(st.sampled_from([1, 2, 3, 4]))
        batch = data.draw(st.sampled_from([2, 5]))
        orders = [distributed(keys, batch, rank, ranks, shuffle=shuffle) for rank in range(ranks)]
        for order in orders:
            if merged is not None:
                order.load_state_dict(merged)
        read += run(orders, data.draw(st.integers(1, 3)))
        merged = merge_states(data.draw(st.permutations([order.state_dict() for order in orders])))
        for order in orders:
            order.close()
    ranks = data.draw(st.sampled_from([1, 2, 5]))
    orders = [distributed(keys, 8, rank, ranks, shuffle=shuffle) for rank in range(ranks)]
    lengths = []
    for order in orders:
        order.load_state_dict(merged)
        rest = list(order)
        lengths.append(list(map(len, rest)))
        read += flat(rest)
        order.close()
    assert all(each == lengths[0] for each in lengths), "as many batches in every rank, and as large ones"
    assert set(read) == set(range(SAMPLES))
    assert len(read) < SAMPLES + 3 * 5, "none twice, but for what evens out the ranks, in each of three deals"


def test_a_merged_state_gives_the_same_number_of_ranks_the_order_that_they_had(keys: Dataset) -> None:
    straight = [flat(distributed(keys, 10, rank, 2)) for rank in range(2)]
    orders = [distributed(keys, 10, rank, 2) for rank in range(2)]
    run(orders, 3)
    merged = merge_states([order.state_dict() for order in orders])
    assert merged["before"] == 3
    for rank, order in enumerate(orders):
        order.load_state_dict(merged)
        assert len(order) == 8
        assert flat(order) == straight[rank][30:]


def test_what_samplers_repeat_on_purpose_is_left_as_often_as_they_repeat_it(keys: Dataset) -> None:
    lists = [[1, 1, 1, 2, 2, 2, 9, 9], [2, 2, 2, 2, 3, 3, 9, 9]]
    orders = [BatchSampler(keys, 2, sampler=rows, rank=rank, world_size=2) for rank, rows in enumerate(lists)]
    read = run(orders, 2)
    merged = merge_states([order.state_dict() for order in orders])
    for order in orders:
        order.load_state_dict(merged)
    assert Counter(read + run(orders, 9)) == Counter(flat(lists))
    weighted = [WeightedRandomSampler([1.0] * SAMPLES, 60) for _ in range(2)]
    orders = [BatchSampler(keys, 5, sampler=each, rank=rank, world_size=2) for rank, each in enumerate(weighted)]
    assert len(run(orders, 4)) == 40
    merged = merge_states([order.state_dict() for order in orders])
    left = rest_of(merged)
    assert left is not None
    assert len(left) == 80
    alone = BatchSampler(keys, 5, sampler=weighted[0])
    alone.load_state_dict(merged)
    assert flat(alone) == left.tolist()


def test_ranks_between_two_epochs_merge_and_ranks_in_different_ones_do_not(keys: Dataset) -> None:
    orders = [distributed(keys, 10, rank, 2) for rank in range(2)]
    fresh = merge_states([order.state_dict() for order in orders])
    assert is_untouched(fresh)
    run(orders, 99)
    ends = [order.state_dict() for order in orders]
    merged = merge_states(ends)
    assert (merged["epoch"], is_untouched(merged)) == (1, True)
    for order in orders:
        order.load_state_dict(ends[0])  # the end of an epoch is the same in all ranks
        order.load_state_dict(merged)
    assert set(run(orders, 99)) == set(range(SAMPLES))
    run(orders[:1], 1)
    with pytest.raises(ValueError, match=r"^states: rank 1 has not begun epoch 2, and others have"):
        merge_states([order.state_dict() for order in orders])
    with pytest.raises(ValueError, match=r"^states: a sampler gave the order of some ranks"):
        merge_states([orders[0].state_dict(), BatchSampler(keys, 10, rank=1, world_size=2).state_dict()])
    with pytest.raises(ValueError, match=r"^states: ranks \[0.*give one state of each of 2 ranks"):
        merge_states([orders[0].state_dict(), orders[0].state_dict()])


def test_what_one_rank_left_of_a_whole_epoch_is_dealt_to_several(keys: Dataset) -> None:
    alone = BatchSampler(keys, 10, sampler=range(SAMPLES))
    read = run([alone], 4)
    state = alone.state_dict()
    assert "rest" not in state
    orders = [distributed(keys, 10, rank, 4) for rank in range(4)]
    for order in orders:
        order.load_state_dict(state)
    shares = [run([order], 99) for order in orders]
    assert [len(share) for share in shares] == [28] * 4
    assert sorted({row for share in shares for row in share} | set(read)) == list(range(SAMPLES))


def test_the_rest_of_one_deal_is_even_in_every_rank_whatever_is_left() -> None:
    rest = np.arange(7)
    for drop_last, sizes in ((False, [3, 3, 3]), (True, [2, 2, 2])):
        shares = []
        for rank in range(3):
            deal = Deal(9, 0, False, rank, 3, 2, drop_last)
            one = Deal(9, 0, False, 0, 1, 2, drop_last)
            nothing = np.zeros(0, bool)
            state = of_sampler(make_state("00", one, 0, 1, nothing, nothing), rest)
            found = rest_of(fitted(state, "00", deal, sampler=True))
            assert found is not None
            shares.append(found.tolist())
        assert [len(share) for share in shares] == sizes
        assert len({row for share in shares for row in share}) == min(7, sum(sizes))
