"""Loaders that are deep-copied, or pickled for the processes that a trainer spawns."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import SequentialSampler, Subset

from quiver_client import DataLoader, Dataset, Mix
from tests.support.data import Files

SAMPLES = 150
SECONDS = 120
Make = Callable[..., Dataset]
Copy = Callable[[Any], Any]


@pytest.fixture
def keys(files: Files, tmp_path: Path, dataset: Make) -> Dataset:
    """The dataset with its keys only: no bytes are read."""
    return dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB", fields=["__key__"])


def pickled(loader: Any) -> Any:
    return pickle.loads(pickle.dumps(loader))


def read(loader: Any) -> list[str]:
    """Return the keys of a pass."""
    return [key for batch in loader for key in batch["__key__"]]


def every_key(dataset: Dataset) -> list[str]:
    return sorted(dataset.manifest.key(row) for row in range(len(dataset)))


copies = pytest.mark.parametrize("copied", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])


@copies
@pytest.mark.parametrize("shuffle", [False, True, "block"])
def test_a_copied_loader_reads_every_sample_and_leaves_the_first_one_as_it_was(
    keys: Dataset, copied: Copy, shuffle: bool | str
) -> None:
    loader = DataLoader(keys, 16, shuffle=shuffle, drop_last=False, on_error="skip")
    other = copied(loader)
    assert type(other) is DataLoader
    assert (other.batch_size, other.drop_last, len(other)) == (16, False, 10)
    assert sorted(read(other)) == every_key(keys)
    assert loader.state_dict()["epoch"] == 0
    assert sorted(read(loader)) == every_key(keys)
    loader.close()
    other.close()


@copies
def test_a_loader_copied_in_the_middle_of_an_epoch_goes_on_where_it_was(keys: Dataset, copied: Copy) -> None:
    loader = DataLoader(keys, 16, shuffle=True)
    batches = iter(loader)
    got = read([next(batches) for _ in range(3)])
    other = copied(loader)
    rest, own_rest = read(other), read(batches)
    assert sorted(rest) == sorted(own_rest)
    assert sorted(got + rest) == every_key(keys)
    loader.close()
    other.close()


def test_a_copied_loader_with_persistent_workers_has_workers_of_its_own(keys: Dataset) -> None:
    loader = DataLoader(keys, 16, num_workers=1, persistent_workers=True)
    first = read(loader)
    other = pickled(loader)
    assert read(other) == first == read(loader)
    loader.close()
    other.close()


@copies
def test_loaders_over_parts_mixtures_and_samplers_are_copied(keys: Dataset, copied: Copy) -> None:
    mix = Mix({"first": keys[:100], "last": keys[100:]})
    loaders = [
        DataLoader(Subset(keys, range(20)), 8, shuffle=True),
        DataLoader(keys[:10] + keys[20:30], 8, shuffle=True),
        DataLoader(keys[:20], 8, sampler=SequentialSampler(range(20))),
        DataLoader(mix, 8, shuffle=True),
    ]
    for loader in loaders:
        other = copied(loader)
        assert sorted(read(other)) == sorted(read(loader))
        loader.close()
        other.close()


def _read_second_share(loader: DataLoader, answers: Any) -> None:
    """Read the share of the second of two ranks, in a process of its own."""
    os.environ.update(RANK="1", WORLD_SIZE="2")
    answers.put(read(loader))


def test_a_spawned_rank_that_is_given_a_loader_reads_its_own_share(
    keys: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = DataLoader(keys, 16, shuffle=True)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_read_second_share, args=(loader, answers))
    process.start()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    first, second = read(loader), answers.get(timeout=SECONDS)
    process.join(SECONDS)
    assert process.exitcode == 0
    assert len(first) == len(second) == 75
    assert sorted(first + second) == every_key(keys)
    answers.close()
    loader.close()
