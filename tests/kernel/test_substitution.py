"""Which samples a batch takes: each once, whatever the cache does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from quiver.substitution import Ints, Order, View, dealt, permutation

GOLDEN = [1, 5, 3, 4, 6, 9, 0, 8, 2, 7]  # permutation(10, 7, 2): if it changes, ledgers and states are worthless


def full(shards: int) -> View:
    return View(np.ones(shards, bool), np.zeros(shards, np.uint8), np.zeros(shards, np.int64))


@st.composite
def views(draw: st.DrawFn, shards: int) -> View:
    """Any answer that a rack may give."""
    resident = draw(st.lists(st.booleans(), min_size=shards, max_size=shards))
    others = draw(st.lists(st.integers(0, 255), min_size=shards, max_size=shards))
    arrived = draw(st.lists(st.integers(0, 5), min_size=shards, max_size=shards))
    return View(np.array(resident), np.array(others, np.uint8), np.array(arrived, np.int64))


@st.composite
def shares(draw: st.DrawFn) -> tuple[Ints, int]:
    """The shard of each entry, and how many shards there are; some hold nothing of this share."""
    shards = draw(st.integers(1, 8))
    return np.array(draw(st.lists(st.integers(0, shards - 1), max_size=80)), np.int64), shards


@settings(deadline=None)
@given(shares(), st.data())
@pytest.mark.fault("E3")
def test_every_entry_is_taken_once_in_full_batches_and_by_shard_in_the_order_of_the_permutation(
    share: tuple[Ints, int], data: st.DataObject
) -> None:
    shards, count = share
    order, taken = Order(shards, count), []
    while len(order):
        size = data.draw(st.integers(1, 12), label="batch")
        lookahead = data.draw(st.none() | st.integers(1, 100), label="lookahead")
        view = data.draw(views(count), label="view")
        pending = len(order)
        front = order.plain(max(lookahead or pending, min(size, pending)))
        batch = order.substituted(size, view, lookahead)
        if batch is not None:
            assert view.resident[shards[batch]].all(), "what is not resident is not waited for"
            assert np.isin(batch, front).all(), "nothing from beyond the lookahead"
        elif lookahead is None:
            assert (view.resident & (order.left > 0)).sum() == 0 or order.left[view.resident].sum() < min(size, pending)
        else:
            assert view.resident[shards[front]].sum() < min(size, pending)
        if batch is None or data.draw(st.booleans(), label="given up"):
            batch = order.completed(size, view)
            resident = int(order.left[view.resident].sum())
            assert view.resident[shards[batch]].sum() == min(resident, len(batch)), (
                "what is there comes before the rest"
            )
        assert len(batch) == min(size, pending)
        assert (np.diff(batch) > 0).all()
        order.take(batch)
        assert len(order) == pending - len(batch)
        taken.append(batch)
    everything = np.concatenate([*taken, np.zeros(0, np.int64)])
    assert sorted(everything.tolist()) == list(range(len(shards)))
    for shard in range(count):
        assert (np.diff(everything[shards[everything] == shard]) > 0).all(), "what is left of a shard is a suffix"
    assert not order.left.any()


@given(shares(), st.integers(1, 20), st.none() | st.integers(1, 40))
def test_where_all_is_resident_the_order_is_the_permutation(
    share: tuple[Ints, int], size: int, lookahead: int | None
) -> None:
    shards, count = share
    order, taken = Order(shards, count), []
    while len(order):
        batch = order.substituted(size, full(count), lookahead)
        assert batch is not None
        order.take(batch)
        taken += batch.tolist()
    assert taken == list(range(len(shards)))


@given(shares(), st.data())
def test_a_count_per_shard_tells_which_entries_were_taken(share: tuple[Ints, int], data: st.DataObject) -> None:
    """A ledger and a state keep counts alone."""
    shards, count = share
    order, again = Order(shards, count), Order(shards, count)
    while len(order):
        batch = order.completed(data.draw(st.integers(1, 12)), data.draw(views(count)))
        counts = np.bincount(shards[batch], minlength=count)
        assert again.prefixes(np.arange(count), counts).tolist() == batch.tolist()
        order.take(batch)
        again.take(batch)
    assert again.prefixes(np.arange(count), np.zeros(count, np.int64)).tolist() == []


def test_the_plain_order_skips_what_was_taken_however_far() -> None:
    order = Order(np.arange(30_000) // 10_000, 3)
    order.take(np.arange(10_000, 20_000))
    assert order.plain(10_001).tolist() == [*range(10_000), 20_000]
    order.take(np.arange(10_000))
    assert order.plain(3).tolist() == [20_000, 20_001, 20_002]
    assert order.plain(20_000).tolist() == list(range(20_000, 30_000))
    order.take(order.plain(10_000))
    assert order.plain(1).tolist() == []


def test_shards_that_fewest_others_need_are_drained_first_and_a_few_at_a_time() -> None:
    shards = np.tile(np.arange(60), 50)
    resident = np.arange(60) > 0  # one is away: else it is the plain permutation
    others = np.arange(60, dtype=np.uint8)[::-1].copy()
    order, touched = Order(shards, 60), []
    view = View(resident, others, np.zeros(60, np.int64))
    while (order.left[1:] > 0).any():
        batch = order.substituted(16, view, None)
        if batch is None:
            break
        order.take(batch)
        touched.append(set(shards[batch].tolist()))
    assert touched[0] <= set(range(54, 60))
    assert len(touched[0]) > 1, "a batch is mixed"
    first = [next(at for at, batch in enumerate(touched) if shard in batch) for shard in range(1, 60)]
    assert first == sorted(first, reverse=True)


@pytest.mark.parametrize(("others", "at_once"), [(0, 2), (1, 1)])
def test_fewer_shards_are_drained_at_once_where_others_need_the_few_that_are_resident(
    others: int, at_once: int
) -> None:
    shards = np.tile(np.arange(20), 50)
    view = View(np.arange(20) > 0, np.full(20, others, np.uint8), np.zeros(20, np.int64))
    batch = Order(shards, 20).substituted(16, view, None)
    assert batch is not None
    assert len(set(shards[batch].tolist())) == at_once


def test_of_those_equally_needed_the_one_that_came_first_is_drained_first() -> None:
    shards = np.repeat(np.arange(30), 10)
    arrived = np.random.default_rng(5).permutation(30)
    view = View(np.arange(30) > 0, np.zeros(30, np.uint8), arrived)
    order = Order(shards, 30)
    batch = order.substituted(8, view, None)
    assert batch is not None
    first = set(shards[batch].tolist())
    assert first <= set(sorted(range(1, 30), key=lambda shard: arrived[shard])[:9])


@given(st.integers(1, 60), st.integers(1, 9), st.booleans())
def test_ranks_share_an_epoch_as_torch_has_them(count: int, world_size: int, drop_last: bool) -> None:
    if drop_last and count < world_size:
        return  # torch gives every rank one entry all the same, and then fails
    data = torch.zeros(count)
    for rank in range(world_size):
        sampler: DistributedSampler[torch.Tensor] = DistributedSampler(
            data,  # type: ignore[arg-type]
            num_replicas=world_size,
            rank=rank,
            shuffle=False,
            drop_last=drop_last,
        )
        share, _ = dealt(np.arange(count), rank, world_size, 1, drop_last=drop_last)
        assert share.tolist() == list(sampler)


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 7), st.booleans())
@pytest.mark.fault("E3")
def test_every_rank_has_the_same_number_of_batches_and_no_sample_is_lost_silently(
    count: int, world_size: int, batch_size: int, drop_last: bool
) -> None:
    order = permutation(count, 3, 1)
    parts = [dealt(order, rank, world_size, batch_size, drop_last=drop_last) for rank in range(world_size)]
    assert len({len(share) for share, _ in parts}) == 1
    assert len({tuple(rest.tolist()) for _, rest in parts}) == 1
    shares, rest = [share for share, _ in parts], parts[0][1]
    everything = np.concatenate([*shares, rest])
    assert set(everything.tolist()) == set(range(count))
    if drop_last:
        assert len(everything) == count
        assert len(shares[0]) % batch_size == 0
        assert len(rest) < world_size * batch_size
    else:
        assert len(everything) - count == (-count % world_size if count else 0)


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_is_the_same_on_every_machine_and_in_every_release(shuffle: bool) -> None:
    first = permutation(10, 7, 2, shuffle=shuffle)
    assert first.dtype == np.int64
    assert first.tolist() == (GOLDEN if shuffle else list(range(10)))


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = {tuple(permutation(50, seed, epoch).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_a_batch_takes_nothing_from_beyond_the_lookahead() -> None:
    view = View(np.array([False, True]), np.zeros(2, np.uint8), np.zeros(2, np.int64))
    order = Order(np.array([0, 1, 0, 0, 1, 1]), 2)
    assert order.substituted(2, view, 4) is None
    batch = order.substituted(2, view, 5)
    assert batch is not None
    assert batch.tolist() == [1, 4]


def test_waiting_is_hopeless_where_missing_shards_will_not_be_fetched() -> None:
    order = Order(np.array([0, 1, 2, 1], np.int64), 3)
    view = full(3)._replace(resident=np.array([True, False, False]))
    assert not order.is_hopeless(view), "nobody is known to be silent"
    assert not order.is_hopeless(view._replace(orphaned=np.array([True, True, False]))), "shard 2 may come"
    orphaned = view._replace(orphaned=np.array([False, True, True]))
    assert order.is_hopeless(orphaned)
    order.take(np.array([1, 2, 3]))
    assert order.is_hopeless(orphaned._replace(orphaned=np.zeros(3, bool))), "all that is pending is resident"
