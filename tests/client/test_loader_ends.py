"""A pass ends where the epoch does: no exception of the user's code is taken for the end of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Sampler, default_collate

from quiver.substitution import permutation
from quiver_client import BatchSampler, DataLoader, Dataset
from tests.support.data import Files

SAMPLES = 150
ROW = 40  # in the second batch of 32
Make = Callable[..., Dataset]
ENDINGS = pytest.mark.parametrize("error", [StopIteration, IndexError])


class Raises:
    """Raises for the sample with this key."""

    def __init__(self, error: type[Exception], key: str) -> None:
        self._error, self._key = error, key

    def __call__(self, sample: dict[str, Any]) -> Any:
        if sample["__key__"] == self._key:
            raise self._error("out of crops")
        return sample


class Collates:
    """A collate function that raises for the batch with this key."""

    def __init__(self, key: str) -> None:
        self._key = key

    def __call__(self, samples: list[Any]) -> Any:
        if self._key in [sample["__key__"] for sample in samples]:
            raise StopIteration
        return default_collate(samples)


class Made(Dataset):
    """A dataset that makes its samples itself."""

    def __getitem__(self, index: int) -> Any:
        if index == ROW:
            raise StopIteration
        return super().__getitem__(index)


class MadeInBatches(Dataset):
    """A dataset that makes batches itself."""

    def __getitems__(self, indices: Any) -> list[Any]:
        if ROW in indices:
            raise StopIteration
        return super().__getitems__(indices)


@pytest.fixture
def make(files: Files, tmp_path: Path, dataset: Make) -> Make:
    cache = f"file://{tmp_path}/cache?capacity=1GiB"
    return lambda kind=Dataset, **more: (
        dataset(files.manifest, cache, fields=["__key__"], **more)
        if kind is Dataset
        else kind(files.manifest, cache, fields=["__key__"], **more)
    )


def names_the_sample(ds: Dataset) -> str:
    return rf"sample {ROW} \('{ds.manifest.key(ROW)}'\)"


@ENDINGS
def test_a_transform_that_ends_a_loop_by_mistake_names_its_sample(make: Make, error: type[Exception]) -> None:
    key = make().manifest.key(ROW)
    ds = make(transform=Raises(error, key))
    expected = rf"transform raised {error.__name__}: out of crops.*{names_the_sample(ds)}"
    for read in (lambda: ds[ROW], lambda: ds.__getitems__([3, ROW, 5]), lambda: list(ds), lambda: list(reversed(ds))):
        with pytest.raises(RuntimeError, match=expected):
            read()


@ENDINGS
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("loader", [DataLoader, torch.utils.data.DataLoader], ids=["ours", "torch"])
def test_no_loader_takes_an_exception_of_a_transform_for_the_end(
    make: Make, loader: Any, workers: int, error: type[Exception]
) -> None:
    ds = make(transform=Raises(error, make().manifest.key(ROW)))
    made = loader(ds, 32, num_workers=workers)
    batches = iter(made)
    next(batches)
    with pytest.raises(RuntimeError, match=names_the_sample(ds)):
        next(batches)
    rest = [len(batch["__key__"]) for batch in batches]
    assert rest == [32, 32, 22]
    if isinstance(made, DataLoader):
        made.close()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("what", ["collate_fn", "samples", "batches"])
def test_an_exception_of_a_collate_function_or_a_subclass_is_no_end(make: Make, what: str, workers: int) -> None:
    kind = {"samples": Made, "batches": MadeInBatches}.get(what, Dataset)
    ds = make(kind)
    collate = Collates(ds.manifest.key(ROW)) if what == "collate_fn" else None
    loader = DataLoader(ds, 32, num_workers=workers, collate_fn=collate)
    batches = iter(loader)
    next(batches)
    named = ROW if what == "samples" else 32
    with pytest.raises(RuntimeError, match=rf"StopIteration.*samples? {named} \('{ds.manifest.key(named)}'\)"):
        next(batches)
    assert [len(batch["__key__"]) for batch in batches] == [32, 32, 22]
    loader.close()
    ds.close()


def test_a_dataset_is_iterated_from_its_first_sample_to_its_last(make: Make) -> None:
    ds = make()
    keys = [ds.manifest.key(row) for row in range(SAMPLES)]
    assert [sample["__key__"] for sample in ds] == keys
    assert [sample["__key__"] for sample in reversed(ds)] == keys[::-1]
    assert ds[0] in ds
    with pytest.raises(IndexError):
        ds[SAMPLES]


class Broken(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        raise StopIteration


def test_a_sampler_that_raises_instead_of_giving_an_order_is_named(make: Make) -> None:
    loader = DataLoader(make(), 8, sampler=Broken())
    with pytest.raises(RuntimeError, match=r"^sampler: it raised StopIteration"):
        iter(loader)
    loader.close()


def test_a_sampler_that_gives_fewer_than_it_says_is_reported(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    class Short(Sampler[int]):
        def __len__(self) -> int:
            return 20

        def __iter__(self) -> Iterator[int]:
            return iter(range(17))

    loader = DataLoader(make(), 8, sampler=Short())
    assert [len(batch["__key__"]) for batch in loader] == [8, 8, 1]
    assert "sampler: it gave 17 samples where its len() says 20" in caplog.text
    loader.close()


def test_a_pass_that_a_loaded_state_ended_does_not_end_as_if_it_were_complete(make: Make) -> None:
    order = BatchSampler(make(), 10, substitute=False)
    first = iter(order)
    got = next(first)
    second = iter(order)
    assert next(second) == permutation(SAMPLES, 0, 1)[:10].tolist()
    assert got + [row for batch in first for row in batch] == permutation(SAMPLES, 0, 0).tolist(), (
        "another pass does not end it"
    )
    third = iter(order)
    next(third)
    order.load_state_dict(order.state_dict())
    with pytest.raises(RuntimeError, match="a state that was loaded"):
        next(third)
    order.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_whose_loader_loads_a_state_raises(make: Make, workers: int) -> None:
    loader = DataLoader(make(), 10, shuffle=True, num_workers=workers)
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(RuntimeError, match="a state that was loaded"):
        for _ in batches:
            pass
    assert sum(len(batch["__key__"]) for batch in loader) == SAMPLES - 10
    loader.close()
