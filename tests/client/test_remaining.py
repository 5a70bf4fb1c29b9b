"""What a saved job still needs: what a loader that resumes from the same state reads, in the order in which it does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import RandomSampler

from quiver_client import BatchSampler, Dataset, Mix, merge_states
from quiver_client.loader.epoch import ShardLayout
from quiver_client.migration.remaining import Remaining, remaining
from tests.support.data import Files, make_files, random_files


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Files:
    files = random_files(230, seed=4, low=500, high=3000)
    return make_files(tmp_path_factory.mktemp("remaining"), files, shard_bytes="16KiB")


@pytest.fixture
def dataset(data: Files, tmp_path: Path) -> Iterator[Dataset]:
    opened = Dataset(data.manifest, f"file://{tmp_path}/cache")
    yield opened
    opened.close()


def read(dataset: Any, batches: int, **how: Any) -> BatchSampler:
    """Return an order of which so many batches were read."""
    order = BatchSampler(dataset, how.pop("batch_size", 16), **how)
    drawing = iter(order)
    for _ in range(batches):
        next(drawing)
    drawing.close()  # type: ignore[attr-defined]
    return order


def uses(dataset: Any, state: Any, **how: Any) -> np.ndarray[Any, Any]:
    """Return the shards of what is left in the order of their use, by a loader that resumes."""
    order = BatchSampler(dataset, 16, **how)
    order.load_state_dict(state)
    rows = np.array([row for batch in order for row in batch])
    order.close()
    layout = ShardLayout.of(dataset.placement())
    columns = [layout.shard_of[rows], *(beside[rows] for beside in layout.beside)]
    return np.stack(columns, axis=1).reshape(-1)


def need_of(dataset: Any, *states: Any, **more: Any) -> Remaining:
    return remaining(states, dataset.identity, dataset.placement(), **more)


FIXED: list[dict[str, Any]] = [
    {"shuffle": True, "substitute": False},
    {"shuffle": False},
    {"shuffle": "block", "block_shards": 4},
    {"shuffle": True, "substitute": False, "drop_last": True},
]


@pytest.mark.parametrize("how", FIXED, ids=str)
@pytest.mark.parametrize("batches", [0, 5])
def test_in_a_fixed_order_the_shards_come_in_the_order_of_their_first_use(
    dataset: Dataset, how: dict[str, Any], batches: int
) -> None:
    state = read(dataset, batches, seed=7, **how).state_dict()
    need = need_of(dataset, state)
    used = uses(dataset, state, seed=7, **how)
    assert need.in_order
    assert need.shards.tolist() == list(dict.fromkeys(used.tolist()))
    assert need.left.tolist() == np.bincount(used, minlength=len(need.left)).tolist()
    assert need.samples == len(used)


@pytest.mark.parametrize("how", [*FIXED, {"shuffle": True}], ids=str)
def test_the_states_of_all_ranks_need_what_none_of_them_has_read(dataset: Dataset, how: dict[str, Any]) -> None:
    orders = [read(dataset, 3, rank=rank, world_size=2, **how) for rank in range(2)]
    states = [order.state_dict() for order in orders]
    need = need_of(dataset, *states)
    merged = merge_states(states)
    used = uses(dataset, merged, **how)
    assert set(need.shards.tolist()) == set(used.tolist())
    assert (need.left >= np.bincount(used, minlength=len(need.left))).all()
    assert need.shards.tolist() == need_of(dataset, merged).shards.tolist()
    with pytest.raises(ValueError, match="give one state of each of 2 ranks"):
        need_of(dataset, states[1])


def test_with_substitution_a_shard_comes_before_those_of_which_less_is_left(dataset: Dataset) -> None:
    state = read(dataset, 6, seed=1).state_dict()
    need = need_of(dataset, state)
    counts = np.bincount(ShardLayout.of(dataset.placement()).shard_of)
    shares = (need.left / counts)[need.shards]
    assert not need.in_order
    assert (np.diff(shares) <= 0).all()
    assert set(need.shards.tolist()) == set(np.flatnonzero(need.left).tolist())
    assert need_of(dataset, state, substitute=False).in_order


@pytest.mark.parametrize("world_size", [1, 2])
def test_at_the_end_of_an_epoch_all_of_the_next_one_is_needed(dataset: Dataset, world_size: int) -> None:
    order = BatchSampler(dataset, 16, rank=0, world_size=world_size, substitute=False)
    drawing = iter(order)
    for _ in range(len(order)):
        next(drawing)
    need = need_of(dataset, order.state_dict())
    drawing.close()  # type: ignore[attr-defined]
    assert (need.epoch, need.samples) == (1, len(dataset))


def test_of_a_part_only_the_shards_of_its_samples_are_needed(dataset: Dataset) -> None:
    part = dataset.select(np.arange(0, 60))
    state = read(part, 2, shuffle=False).state_dict()
    need = need_of(part, state)
    assert need.samples == 28
    assert need.shards.tolist() == list(dict.fromkeys(uses(part, state, shuffle=False).tolist()))
    with pytest.raises(ValueError, match=r"it is of dataset \w{12}… with 60 samples, and this one is \w{12}… with 230"):
        need_of(dataset, state)


def test_of_a_join_the_shards_of_all_its_manifests_are_needed(data: Files, dataset: Dataset, tmp_path: Path) -> None:
    texts = {key: b"%0300d" % at for at, key in enumerate(data.content)}
    others = Dataset(make_files(tmp_path, texts, name="texts", shard_bytes="8KiB").manifest, f"file://{tmp_path}/c2")
    both = Dataset.join(dataset, others, suffixes=["", "_text"])
    state = read(both, 9, shuffle=True, substitute=False).state_dict()
    need = need_of(both, state)
    assert need.shards.tolist() == list(dict.fromkeys(uses(both, state, substitute=False).tolist()))
    assert need.shards.max() >= dataset.manifest.shard_count
    others.close()


def test_what_a_sampler_has_left_is_needed_in_its_order(dataset: Dataset) -> None:
    sampler = RandomSampler(range(len(dataset)), replacement=True, num_samples=100)
    order = read(dataset, 4, sampler=sampler)
    state = order.state_dict()
    need = need_of(dataset, state)
    assert need.in_order
    assert need.samples == 36
    assert need.shards.tolist() == list(dict.fromkeys(uses(dataset, state, sampler=sampler).tolist()))


def test_what_a_sampler_without_an_end_has_left_is_not_known(dataset: Dataset) -> None:
    class Endless:
        def __iter__(self) -> Iterator[int]:
            while True:
                yield from range(len(dataset))

    state = read(dataset, 4, sampler=Endless()).state_dict()
    with pytest.raises(ValueError, match="what it has left is not known"):
        need_of(dataset, state)


def test_a_part_of_a_mixture_is_needed_as_far_as_the_mixture_will_read_it(dataset: Dataset, tmp_path: Path) -> None:
    rare = Dataset(make_files(tmp_path, random_files(90, seed=9, low=500, high=900), name="rare").manifest, None)
    off = Dataset(make_files(tmp_path, random_files(9, seed=2), name="off").manifest, None)
    mix = Mix({"most": dataset, "rare": rare, "off": off}, weights=[0.9, 0.1, 0], epoch=460)
    order = read(mix, 5)
    state = order.state_dict()
    most, few, none = (remaining([state], part.identity, part.placement()) for part in (dataset, rare, off))
    assert most.samples == 230 - 72
    assert len(most.shards) == dataset.manifest.shard_count  # it will be read to its end, and again
    assert few.samples == 90 - 8
    assert not len(none.shards)
    other = Dataset(make_files(tmp_path, random_files(9, seed=3), name="other").manifest, None)
    with pytest.raises(ValueError, match=r"of a mixture of 'most' \(.*none of them"):
        remaining([state], other.identity, other.placement())
    for each in (rare, off, other):
        each.close()
