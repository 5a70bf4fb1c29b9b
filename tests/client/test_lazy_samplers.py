"""Samplers of the user's own are read while the loop runs."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader as StockLoader
from torch.utils.data import Sampler
from torchdata.stateful_dataloader.sampler import RandomSampler as TorchdataSampler

from quiver_client import BatchSampler, DataLoader, Dataset
from tests.support.data import Files

SAMPLES = 150
Make = Callable[..., Dataset]


def row_of(sample: dict[str, Any]) -> int:
    return int(sample["__key__"][2:6])


@pytest.fixture
def numbers(files: Files, tmp_path: Path, dataset: Make) -> Dataset:
    cache = f"file://{tmp_path}/cache?capacity=1GiB"
    return dataset(files.manifest, cache, fields=["__key__"], transform=row_of)


def loader(numbers: Dataset, sampler: Any, batch_size: int = 10, **more: Any) -> DataLoader:
    return DataLoader(numbers, batch_size, sampler=sampler, collate_fn=list, **more)


def rows(numbers: Dataset, given: Any) -> list[int]:
    return [int(numbers.manifest.key(row)[2:6]) for row in given]


class Endless(Sampler[int]):
    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        chance = np.random.default_rng(1)
        while True:
            self.drawn += 1
            yield int(chance.integers(SAMPLES))


class Shuffles(Sampler[int]):
    """Another order each time, each sample once."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng().permutation(SAMPLES).tolist())


class Counts(Sampler[int]):
    """Has a state of its own."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 70:
            self.at += 1
            yield self.at * 7 % SAMPLES

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_without_an_end_is_read_no_further_than_is_fetched_ahead(numbers: Dataset, workers: int) -> None:
    sampler = Endless()
    reading = loader(numbers, sampler, num_workers=workers, prefetch_factor=2)
    batches = iter(reading)
    got = [row for _ in range(5) for row in next(batches)]
    expected = rows(numbers, np.random.default_rng(1).integers(SAMPLES, size=200).tolist())
    assert got == expected[:50]
    assert sampler.drawn <= 10 * (5 + 2 * max(workers, 1) + 1)
    state = reading.state_dict()
    reading.close()
    resumed = loader(numbers, Endless())
    resumed.load_state_dict(state)
    assert next(iter(resumed)) == expected[50:60], "by its position: the sampler gives the same again"
    resumed.close()
    with pytest.raises(TypeError, match="no len"):
        len(reading)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_that_adapts_sees_what_happened_in_the_loop(numbers: Dataset, workers: int) -> None:
    class Adapts(Sampler[int]):
        best = 0

        def __len__(self) -> int:
            return 100

        def __iter__(self) -> Iterator[int]:
            for _ in range(100):
                yield self.best

    keys = rows(numbers, range(SAMPLES))
    sampler = Adapts()
    reading = loader(numbers, sampler, num_workers=workers, prefetch_factor=2)
    got = []
    for batch in reading:
        got.append(keys.index(batch[0]))
        sampler.best += 1
    reading.close()
    assert len(got) == 10
    assert all(row >= at - 4 for at, row in enumerate(got)), got


def test_a_sampler_may_wait_for_the_loop(numbers: Dataset) -> None:
    """A lock that the loop takes as well would end in a deadlock."""
    losses: queue.Queue[int] = queue.Queue()

    def order() -> Iterator[int]:
        yield from range(20)
        for _ in range(3):
            yield from range(losses.get(timeout=60), SAMPLES, 15)

    class Waits(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return order()

    reading = loader(numbers, Waits(), prefetch_factor=1)
    for number, _ in enumerate(reading):
        if number in (1, 2, 3):
            losses.put(number)
    assert number == 4
    reading.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_of_a_sampler_with_a_length_is_resumed_exactly(numbers: Dataset, workers: int) -> None:
    reading = loader(numbers, Shuffles(), num_workers=workers)
    batches = iter(reading)
    got = [row for _ in range(5) for row in next(batches)]
    state = reading.state_dict()
    assert "rest" not in state
    assert sorted(itertools.chain(got, *batches)) == list(range(SAMPLES)), "the pass goes on"
    assert reading.state_dict()["epoch"] == 1
    reading.close()
    resumed = loader(numbers, Shuffles(), num_workers=workers)
    resumed.load_state_dict(state)
    batches = iter(resumed)
    more = next(batches)
    state = resumed.state_dict()
    resumed.close()
    again = loader(numbers, Shuffles(), 25, num_workers=workers)
    again.load_state_dict(state)
    assert sorted(itertools.chain(got, more, *again)) == list(range(SAMPLES))
    again.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_has_the_samplers_own_as_of_the_last_batch_that_was_handed_out(numbers: Dataset, workers: int) -> None:
    whole = [row for batch in loader(numbers, Counts()) for row in batch]
    reading = loader(numbers, Counts(), num_workers=workers)
    batches = iter(reading)
    got = [row for _ in range(3) for row in next(batches)]
    state = reading.state_dict()
    assert state["sampler_state"] == {"at": 30}
    reading.close()
    resumed = loader(numbers, Counts(), num_workers=workers)
    resumed.load_state_dict(state)
    assert got + [row for batch in resumed for row in batch] == whole
    resumed.close()
    other = loader(numbers, Endless())
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="this sampler has no load_state_dict"):
        iter(other)
    other.close()


def test_a_sampler_of_torchdata_is_resumed_by_the_state_of_its_iterator(numbers: Dataset) -> None:
    reading = loader(numbers, TorchdataSampler(range(SAMPLES)))
    batches = iter(reading)
    got = [row for _ in range(4) for row in next(batches)]
    state = reading.state_dict()
    rest = [row for batch in batches for row in batch]
    reading.close()
    resumed = loader(numbers, TorchdataSampler(range(SAMPLES)))
    resumed.load_state_dict(state)
    assert [row for batch in resumed for row in batch] == rest
    assert sorted(got + rest) == list(range(SAMPLES))
    resumed.close()


def test_the_last_incomplete_batch_of_a_lazy_sampler_is_dropped_where_asked(numbers: Dataset) -> None:
    class Some(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(37))

    reading = loader(numbers, Some(), drop_last=True)
    for _ in range(2):
        assert [len(batch) for batch in reading] == [10, 10, 10]
    assert reading.state_dict()["epoch"] == 2
    kept = loader(numbers, Some())
    assert [len(batch) for batch in kept] == [10, 10, 10, 7]
    reading.close()
    kept.close()


def test_a_lazy_sampler_orders_the_batches_of_a_stock_loader(numbers: Dataset) -> None:
    order = BatchSampler(numbers, 10, sampler=Endless())
    batches = iter(StockLoader(numbers, batch_sampler=order, collate_fn=list))
    got = [row for _ in range(5) for row in next(batches)]
    assert got == rows(numbers, np.random.default_rng(1).integers(SAMPLES, size=50).tolist())
    order.close()


def test_an_index_that_a_lazy_sampler_gives_wrongly_is_refused_where_it_is_drawn(numbers: Dataset) -> None:
    class Strays(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(40)
            yield SAMPLES

    reading = loader(numbers, Strays())
    with pytest.raises(ValueError, match=f"outside the dataset's {SAMPLES} samples"):
        list(reading)
    reading.close()


def test_only_shards_of_what_was_drawn_are_needed(numbers: Dataset) -> None:
    order = BatchSampler(numbers, 5, sampler=Endless())
    epoch = order.begin()
    drawn = order.draw(epoch)
    assert drawn is not None
    shards = order._passes.layout.shard_of
    assert np.flatnonzero(epoch.left).tolist() == sorted(set(shards[drawn.rows].tolist()))
    order.fetched(epoch, drawn.number)
    assert not epoch.left.any()
    order.abandon(epoch)
    order.close()


@pytest.mark.parametrize("kind", [Shuffles, Counts, Endless])
def test_a_state_can_be_that_of_some_batches_ago(numbers: Dataset, kind: type[Any]) -> None:
    """A stock loader draws before the loop asks, and the Trainer then saves what was trained."""
    order = BatchSampler(numbers, 10, sampler=kind())
    batches = iter(order)
    drawn = [next(batches) for _ in range(4)]
    states = [order.state_dict(batches=count) for count in (2, 3)]
    order.close()
    for state, trained in zip(states, (2, 3), strict=True):
        resumed = BatchSampler(numbers, 10, sampler=kind())
        resumed.load_state_dict(state)
        rest = iter(resumed)
        again = [next(rest) for _ in range(4 - trained)]
        if kind is Shuffles:  # another order, of the same samples
            left = set(itertools.chain(*again, *rest))
            assert left == set(range(SAMPLES)) - set(itertools.chain(*drawn[:trained]))
        else:
            assert again == drawn[trained:]
        resumed.close()
