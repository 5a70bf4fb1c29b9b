"""The arguments of torch's loader mean with ours what they mean there."""

from __future__ import annotations

import inspect
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

from quiver_client import BatchSampler, DataLoader, Dataset
from tests.support.data import Files

Make = Callable[..., Dataset]


@pytest.fixture
def keys(files: Files, tmp_path: Path, dataset: Make) -> Dataset:
    return dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB", fields=["label"], transform=tell)


def tell(sample: Any) -> tuple[int, int, int]:
    """Return what a worker knows of itself: its seed, its process, and what ``worker_init_fn`` left."""
    info = get_worker_info()
    return info.seed if info is not None else -1, os.getpid(), len(started)


started: list[int] = []


def begin(worker: int) -> None:
    started.append(worker)


def test_a_generator_seeds_the_workers_and_each_calls_worker_init_fn_once(keys: Dataset) -> None:
    def seeds(loader: Any) -> tuple[set[int], set[int]]:
        told = list(loader)
        return {int(seed) for batch in told for seed in batch[0]}, {int(calls) for batch in told for calls in batch[2]}

    more: dict[str, Any] = {"num_workers": 2, "worker_init_fn": begin}
    ours = DataLoader(keys, 16, generator=torch.Generator().manual_seed(7), **more)
    stock: Any = torch.utils.data.DataLoader(keys, 16, generator=torch.Generator().manual_seed(7), **more)
    assert seeds(ours) == seeds(stock)
    assert seeds(ours) != seeds(DataLoader(keys, 16, generator=torch.Generator().manual_seed(8), **more))
    assert seeds(ours)[1] == {1}
    ours.close()


def test_without_workers_worker_init_fn_is_not_called_and_there_is_no_worker(keys: Dataset) -> None:
    loader = DataLoader(keys, 16, worker_init_fn=begin)
    assert {int(seed) for batch in loader for seed in batch[0]} == {-1}
    assert started == []
    loader.close()


def test_persistent_workers_stay_and_others_are_started_for_each_pass(keys: Dataset) -> None:
    def workers(loader: DataLoader) -> set[int]:
        return {int(process) for batch in loader for process in batch[1]}

    context = multiprocessing.get_context("fork")
    persistent = DataLoader(keys, 16, num_workers=1, persistent_workers=True, multiprocessing_context=context)
    assert workers(persistent) == workers(persistent)
    fresh = DataLoader(keys, 16, num_workers=1, multiprocessing_context="fork")
    assert workers(fresh) != workers(fresh)
    persistent.close()
    fresh.close()


def test_arguments_that_torch_refuses_are_refused(keys: Dataset) -> None:
    for wrong in (
        {"num_workers": -1},
        {"timeout": -1},
        {"persistent_workers": True},
        {"multiprocessing_context": "no"},
    ):
        refused: list[str] = []
        for loader in (DataLoader, torch.utils.data.DataLoader):
            with pytest.raises(ValueError) as caught:  # noqa: PT011 - the messages are compared
                loader(keys, 4, **wrong)  # type: ignore[arg-type]
            refused.append(str(caught.value))
        assert refused[0] == refused[1]


def test_every_argument_of_torchs_loader_is_one_of_ours(keys: Dataset) -> None:
    loader = DataLoader(keys, 4, num_workers=1, in_order=False, prefetch_factor=3, pin_memory=False, timeout=60)
    for name in inspect.signature(torch.utils.data.DataLoader.__init__).parameters:
        assert name in {"self", "shuffle"} or hasattr(loader, name), name
    assert sorted(int(label) for batch in loader for label in batch[2]) == [0] * 150
    assert (loader.prefetch_factor, loader.timeout) == (3, 60)
    loader.close()


def test_an_order_of_ones_own_determines_all_that_the_loader_would(keys: Dataset) -> None:
    order = BatchSampler(keys, 16, seed=3, drop_last=True)
    loader = DataLoader(keys, batch_sampler=order)
    assert (loader.order, loader.batch_size, loader.drop_last, len(loader)) == (order, 16, True, 9)
    assert sum(len(batch[0]) for batch in loader) == 144
    for more in ({"batch_size": 2}, {"shuffle": True}, {"drop_last": True}, {"sampler": range(3)}):
        with pytest.raises(ValueError, match="batch_sampler: it determines batch_size"):
            DataLoader(keys, batch_sampler=order, **more)  # type: ignore[arg-type]
    other = BatchSampler(Dataset(keys.manifest.path, "file:///tmp/none"), 16)
    with pytest.raises(ValueError, match="batch_sampler: it is over another dataset object"):
        DataLoader(keys, batch_sampler=other)
    loader.close()
