"""The order as a ``batch_sampler`` of other loaders: torch's own, and torchdata's with its states."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

from quiver.substitution import permutation
from quiver_client import BatchSampler, DataLoader, Dataset, merge_states
from tests.support.data import Files
from tests.support.residency import scripted

SAMPLES = 150
Make = Callable[..., Dataset]


@pytest.fixture
def keys(files: Files, tmp_path: Path, dataset: Make) -> Dataset:
    """The dataset with its keys only: no bytes are read."""
    return dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB", fields=["__key__"])


def rows_in(dataset: Dataset, batches: Any) -> list[list[int]]:
    number = {dataset.manifest.key(row): row for row in range(len(dataset))}
    return [[number[key] for key in batch["__key__"]] for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_loader_accepts_the_order_as_its_batch_sampler(
    keys: Dataset, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    scripted(monkeypatch, 4)
    order = BatchSampler(keys, 16, seed=3)
    loader = torch.utils.data.DataLoader(keys, batch_sampler=order, num_workers=workers)
    for _ in range(2):
        batches = rows_in(keys, loader)
        assert len(batches) == len(loader) == 10
        assert sorted(flat(batches)) == list(range(SAMPLES))
    order.set_epoch(7)
    monkeypatch.undo()
    plain = BatchSampler(keys, 16, seed=3, substitute=False)
    plain.set_epoch(7)
    loader = torch.utils.data.DataLoader(keys, batch_sampler=plain, num_workers=workers)
    assert flat(rows_in(keys, loader)) == permutation(SAMPLES, 3, 7).tolist()
    order.close()
    plain.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_order_of_our_loader_serves_torchs_as_well(keys: Dataset, workers: int) -> None:
    ours = DataLoader(keys, batch_size=16, shuffle=True, num_workers=workers)
    first = rows_in(keys, ours)
    stock = torch.utils.data.DataLoader(keys, batch_sampler=ours.batch_sampler)
    second = rows_in(keys, stock)
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(SAMPLES))
    ours.set_epoch(0)
    assert sorted(flat(rows_in(keys, ours))) == list(range(SAMPLES))
    ours.close()


def test_a_batch_that_torchs_loader_drew_is_consumed(keys: Dataset) -> None:
    order = BatchSampler(keys, 16)
    batches = iter(order)
    got = [next(batches) for _ in range(4)]
    state = order.state_dict()
    assert state["batches"] == 4
    batches.close()  # type: ignore[attr-defined]
    assert order.state_dict() == state
    order.load_state_dict(state)
    assert sorted(flat(got) + flat(list(order))) == list(range(SAMPLES))


def test_an_order_stays_in_its_process(keys: Dataset) -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(BatchSampler(keys, 4))


# -- torchdata --------------------------------------------------------------------------------------------------------


@pytest.fixture
def stateful() -> Iterator[Any]:
    """torchdata's ``StatefulDataLoader``, which warns when it is imported of what is not used here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torchdata\..*")
        from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

        yield StatefulDataLoader


@pytest.mark.parametrize("at", [0, 1, 4, 9, 10])
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_resumes_in_the_middle_of_an_epoch(
    keys: Dataset, monkeypatch: pytest.MonkeyPatch, stateful: Any, workers: int, at: int
) -> None:
    scripted(monkeypatch, 8)
    loader = stateful(keys, batch_sampler=BatchSampler(keys, 16, seed=3), num_workers=workers)
    batches = iter(loader)
    got = [next(batches) for _ in range(at)]
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    del batches
    scripted(monkeypatch, 9)
    order = BatchSampler(keys, 16, seed=3)
    again = stateful(keys, batch_sampler=order, num_workers=workers)
    again.load_state_dict(state)
    rest = list(again)
    if at == 10:  # all of it was taken: what comes is the next epoch
        assert sorted(flat(rows_in(keys, rest))) in ([], list(range(SAMPLES)))
    else:
        assert len(rest) == 10 - at
        assert sorted(flat(rows_in(keys, got + rest))) == list(range(SAMPLES))
    assert sorted(flat(rows_in(keys, again))) == list(range(SAMPLES))
    order.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_second_state_is_as_exact_as_its_first(
    keys: Dataset, monkeypatch: pytest.MonkeyPatch, stateful: Any, workers: int
) -> None:
    got: list[int] = []
    state = None
    for resume in range(4):
        scripted(monkeypatch, resume)
        loader = stateful(keys, batch_sampler=BatchSampler(keys, 16), num_workers=workers)
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        taken = [next(batches) for _ in range(2)] if resume < 3 else list(batches)
        got += flat(rows_in(keys, taken))
        state = loader.state_dict()
        del batches
    assert sorted(got) == list(range(SAMPLES))


def test_the_state_of_a_batch_sampler_can_be_merged(keys: Dataset) -> None:
    states, got = [], []
    for rank in range(2):
        order = BatchSampler(keys, 16, rank=rank, world_size=2)
        batches = iter(order)
        got += [next(batches), next(batches)]
        states.append(order.state_dict())
    order = BatchSampler(keys, 10)
    order.load_state_dict(merge_states(states))
    assert sorted(flat(got) + flat(list(order))) == list(range(SAMPLES))
