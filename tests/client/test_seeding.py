"""A random transform draws the same for a sample of an epoch, wherever and with whatever the sample is made."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quiver.digest import Digest
from quiver_client import DataLoader, Dataset
from quiver_client.loader.randomness import QUIET_STEPS
from quiver_client.seeding import asked_for, seeds_of
from tests.support.data import Files

SAMPLES = 150
Drawn = dict[str, tuple[float, ...]]


def global_draws(sample: dict[str, Any]) -> Any:
    return sample["__key__"], random.random(), float(np.random.rand()), float(torch.rand(()))


def own_draws(sample: dict[str, Any], rng: np.random.Generator, *, generator: torch.Generator) -> Any:
    return sample["__key__"], float(rng.random()), float(torch.rand((), generator=generator))


def rare_draws(sample: dict[str, Any]) -> Any:
    """Draws for one sample in fifty."""
    return sample["__key__"], random.random() if int(sample["__key__"][2:6]) % 50 == 7 else 0.0


class Made(Dataset):
    def __getitem__(self, index: Any) -> Any:
        return global_draws(super().__getitem__(index))


class MadeInBatches(Dataset):
    def __getitems__(self, indices: Any) -> list[Any]:
        return [global_draws(sample) for sample in super().__getitems__(indices)]


Make = Callable[..., Any]


@pytest.fixture
def make(files: Files, tmp_path: Path) -> Iterator[Make]:
    made: list[Dataset] = []

    def dataset(transform: Any = None, kind: type[Dataset] = Dataset) -> Dataset:
        cache = f"file://{tmp_path}/cache?capacity=1GiB"
        made.append(kind(files.manifest, cache, fields=["__key__"], transform=transform))
        return made[-1]

    yield dataset
    for each in made:
        each.close()


def drawn(loader: DataLoader, batches: Any = None) -> Drawn:
    found = {name: tuple(values) for batch in (loader if batches is None else batches) for name, *values in batch}
    loader.close()
    return found


def loader(ds: Dataset, batch_size: int, **more: Any) -> DataLoader:
    return DataLoader(ds, batch_size, shuffle=True, collate_fn=list, **more)


@pytest.mark.parametrize("kind", [Dataset, Made, MadeInBatches])
def test_a_sample_is_augmented_alike_in_threads_and_workers(make: Make, kind: type[Dataset]) -> None:
    transform = global_draws if kind is Dataset else None
    first = drawn(loader(make(transform, kind), 16))
    assert len(first) == len(set(first.values())) == SAMPLES
    for batch_size, more in [
        (7, {"prefetch_factor": 1}),
        (5, {"prefetch_factor": 4}),
        (16, {"num_workers": 1}),
        (9, {"num_workers": 2}),
    ]:
        assert drawn(loader(make(transform, kind), batch_size, **more)) == first, more
    other_epoch = loader(make(transform, kind), 16)
    other_epoch.set_epoch(1)
    assert not set(drawn(other_epoch).values()) & set(first.values())
    assert not set(drawn(loader(make(transform, kind), 16, seed=1)).values()) & set(first.values())


def test_a_sample_is_augmented_alike_in_a_spawned_worker(make: Make) -> None:
    first = drawn(loader(make(global_draws), 16))
    assert drawn(loader(make(global_draws), 50, num_workers=1, multiprocessing_context="spawn")) == first


def test_a_resumed_epoch_is_augmented_as_the_one_that_was_broken_off(make: Make) -> None:
    whole = drawn(loader(make(global_draws), 10))
    for workers in (0, 1):
        begun = loader(make(global_draws), 10, num_workers=workers)
        batches = iter(begun)
        got = {name: tuple(values) for _ in range(4) for name, *values in next(batches)}
        state = begun.state_dict()
        begun.close()
        resumed = loader(make(global_draws), 25, num_workers=1 - workers)
        resumed.load_state_dict(state)
        assert {**got, **drawn(resumed)} == whole


def test_a_transform_may_ask_for_generators_of_its_sample(make: Make) -> None:
    first = drawn(loader(make(own_draws), 16))
    assert len(set(first.values())) == SAMPLES
    assert drawn(loader(make(own_draws), 7, num_workers=1)) == first
    ds = make(own_draws)
    torch.manual_seed(5)
    alone = ds[3]
    assert ds[3] != alone
    torch.manual_seed(5)
    assert ds[3] == alone, "outside a loader of ours torch's seed determines them"


def test_a_loop_that_draws_keeps_its_sequence_and_does_not_disturb_the_samples(make: Make) -> None:
    first = drawn(loader(make(global_draws), 5))

    def draw() -> tuple[float, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seed() -> None:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    seed()
    expected = [draw() for _ in range(SAMPLES // 5)]
    seed()
    reading = loader(make(global_draws), 5, prefetch_factor=4)
    got, found = [], {}
    for batch in reading:
        found.update({name: tuple(values) for name, *values in batch})
        got.append(draw())
    reading.close()
    assert got == expected
    assert found == first


def test_a_loop_that_does_not_draw_has_its_samples_made_ahead_in_threads(make: Make) -> None:
    threads: list[str] = []

    def transform(sample: dict[str, Any]) -> Any:
        threads.append(threading.current_thread().name)
        return global_draws(sample)

    found = drawn(loader(make(transform), 5))
    own = threading.current_thread().name
    assert found == drawn(loader(make(global_draws), 25))
    assert threads[:5].count(own) == 0, "the first batch, which the loop waits for"
    assert threads[10 : 5 * QUIET_STEPS // 2].count(own) == len(threads[10 : 5 * QUIET_STEPS // 2])
    assert threads[-5:].count(own) == 0


def test_a_transform_that_rarely_draws_is_noticed_when_it_does(make: Make) -> None:
    first = drawn(loader(make(rare_draws), 10))
    assert len(set(first.values())) == 4
    for more in ({}, {"num_workers": 1}):
        assert drawn(loader(make(rare_draws), 7, **more)) == first


def test_a_loop_that_draws_beside_a_transform_that_does_not_costs_a_few_samples_twice(make: Make) -> None:
    made: list[str] = []

    def transform(sample: dict[str, Any]) -> Any:
        made.append(sample["__key__"])
        random.random()  # as if the loop drew at this moment: nothing tells the two apart
        random.setstate(state)
        return sample

    state = random.getstate()
    reading = loader(make(transform), 10)
    assert sum(len(batch) for batch in reading) == SAMPLES
    reading.close()
    assert len(made) == SAMPLES, "it restores what it drew, so nothing changed"


@pytest.mark.parametrize("draws", [False, True])
def test_a_transform_may_read_another_loader_and_a_loop_keeps_its_sequence(make: Make, draws: bool) -> None:
    inner = DataLoader(make(own_draws if not draws else global_draws), batch_size=50)
    seen: list[float] = []

    def reads_another(sample: dict[str, Any]) -> Any:
        before = random.random() if draws else 0.0
        count = sum(len(keys) for keys, *_ in inner)
        return sample["__key__"], before, random.random() if draws else 0.0, count

    made = make(reads_another)
    few = made.select(range(24))
    random.seed(7)
    expected = [random.random() for _ in range(3)]
    random.seed(7)
    with contextlib.closing(DataLoader(few, batch_size=8, seed=3)) as outer, contextlib.closing(inner):
        first = {}
        for keys, *values, counts in outer:
            seen.append(random.random())
            assert set(counts.tolist()) == {SAMPLES}
            first.update(zip(keys, zip(*(each.tolist() for each in values), strict=True), strict=True))
    assert seen == expected
    assert len(first) == 24
    if draws:
        assert len({value for pair in first.values() for value in pair}) == 48
    with contextlib.closing(DataLoader(few, batch_size=8, seed=3, prefetch_factor=1)) as again:
        for keys, *values, _ in again:
            assert {key: first[key] for key in keys} == dict(
                zip(keys, zip(*(each.tolist() for each in values), strict=True), strict=True)
            )


def test_the_generators_of_accelerators_are_left_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("it seeds accelerators, too"))
    assert len(drawn(loader(make(global_draws), 50))) == SAMPLES


def test_which_generators_a_transform_asks_for() -> None:
    class Module(torch.nn.Module):
        def forward(self, sample: Any, rng: Any) -> Any:
            return sample

    assert asked_for(own_draws) == ("rng", "generator")
    assert asked_for(functools.partial(own_draws, rng=np.random.default_rng(0))) == ("generator",)
    assert asked_for(Module()) == ("rng",)
    assert asked_for(lambda rng: rng) == (), "its only argument is the sample"
    assert asked_for(lambda sample, **rng: sample) == asked_for(dict) == asked_for(global_draws) == ()


def test_seeds_are_distinct_and_follow_from_seed_epoch_dataset_and_row() -> None:
    rows = np.arange(100_000)
    one = Digest.of(b"one")
    seeds = seeds_of(0, 0, one, rows)
    assert len(np.unique(seeds)) == len(rows)
    assert (seeds_of(0, 0, one, rows[500:600]) == seeds[500:600]).all()
    assert (seeds_of(0, np.zeros(100, np.int64), one, rows[:100]) == seeds[:100]).all()
    others = [seeds_of(1, 0, one, rows), seeds_of(0, 1, one, rows), seeds_of(0, 0, Digest.of(b"two"), rows)]
    assert all(not np.isin(other, seeds).any() for other in others)
    bits = np.unpackbits(seeds.view(np.uint8)).reshape(len(rows), 64).mean(axis=0)
    assert 0.49 < bits.min() < bits.max() < 0.51
