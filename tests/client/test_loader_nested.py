"""One loader that several loops iterate at once: each pass whole, and the state that of the outer loop."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, Sampler

from quiver.substitution import permutation
from quiver_client import BatchSampler, DataLoader, Dataset, merge_states
from tests.support.data import Files
from tests.support.residency import scripted
from tests.support.threads import alive
from tests.support.waiting import until

SAMPLES = 150
ALL = list(range(SAMPLES))
Make = Callable[..., Dataset]


@pytest.fixture
def keys(files: Files, tmp_path: Path, dataset: Make) -> Dataset:
    return dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB", fields=["__key__"])


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    until(lambda: not alive("quiver-draw") + alive("quiver-fetch") + alive("quiver-needs"), 5, "threads end")


def rows(dataset: Dataset, batch: Any) -> list[int]:
    if isinstance(batch, list):
        return batch
    number = {dataset.manifest.key(row): row for row in ALL}
    return [number[key] for key in batch["__key__"]]


def read(dataset: Dataset, batches: Any) -> list[int]:
    return [row for batch in batches for row in rows(dataset, batch)]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(residency=st.integers(0, 2**32), steps=st.lists(st.sampled_from(["begin", 0, 1, 2, "drop"]), max_size=40))
@pytest.mark.parametrize("ours", [True, False], ids=["loader", "order"])
def test_each_of_several_iterators_hands_out_every_sample_once(
    keys: Dataset, ours: bool, residency: int, steps: list[Any]
) -> None:
    """Against the plainest model: a set of what each has handed out."""
    with pytest.MonkeyPatch.context() as patched:
        scripted(patched, residency)
        loader: Any = DataLoader(keys, 30, shuffle=True) if ours else BatchSampler(keys, 30)
        passes: list[tuple[Any, list[int]]] = []
        for step in steps:
            if step == "begin" and len(passes) < 3:
                passes.append((iter(loader), []))
            elif step == "drop" and passes:
                passes.pop(0)
            elif isinstance(step, int) and step < len(passes):
                batches, got = passes[step]
                got += rows(keys, next(batches, []))
                assert len(got) == len(set(got))
        for batches, got in passes:
            for batch in batches:
                got += rows(keys, batch)
            assert sorted(got) == ALL
        assert sorted(read(keys, loader)) == ALL
        loader.close()


@pytest.mark.parametrize("on_error", ["raise", "replace"])
def test_a_sampler_of_ones_own_is_drawn_anew_by_each_loop(keys: Dataset, on_error: Any) -> None:
    loader = DataLoader(keys, 16, sampler=RandomSampler(keys), on_error=on_error)
    trained: list[int] = []
    for number, batch in enumerate(loader):
        trained += rows(keys, batch)
        if number in (0, 3):
            assert sorted(read(keys, loader)) == ALL
        if number == 3:
            state, at = loader.state_dict(), len(trained)
    assert sorted(trained) == ALL
    resumed = DataLoader(keys, 16, sampler=RandomSampler(keys))
    resumed.load_state_dict(state)
    assert sorted(trained[:at] + read(keys, resumed)) == ALL
    loader.close()
    resumed.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_validates_with_its_own_loader_trains_on_each_sample_once_and_resumes(
    keys: Dataset, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    """It used to end with a RuntimeError when the training loop asked again."""
    more: dict[str, Any] = {"num_workers": workers, "persistent_workers": bool(workers)}
    loader = DataLoader(keys, 16, shuffle=True, **more)
    trained: list[int] = []
    for number, batch in enumerate(loader):
        trained += rows(keys, batch)
        if number in (0, 4):
            assert sorted(read(keys, loader)) == ALL
            for _ in loader:
                break  # a look
        if number == 4:
            state = loader.state_dict()
            at = len(trained)
    assert sorted(trained) == ALL
    resumed = DataLoader(keys, 16, shuffle=True)
    resumed.load_state_dict(state)
    assert sorted(trained[:at] + read(keys, resumed)) == ALL
    assert sorted(read(keys, loader)) == ALL
    assert loader.state_dict()["epoch"] == 2, "the epochs are those of the training loop"
    assert caplog.messages.count(caplog.messages[0]) == 1
    assert "state_dict() is its state" in caplog.messages[0]
    loader.close()
    resumed.close()


def test_the_same_loader_twice_in_a_zip_gives_two_whole_passes_of_one_epoch(keys: Dataset) -> None:
    loader = DataLoader(keys, 16, shuffle=True, substitute=False)
    pairs = [(rows(keys, first), rows(keys, second)) for first, second in zip(loader, loader, strict=True)]
    assert [row for first, _ in pairs for row in first] == permutation(SAMPLES, 0, 0).tolist()
    assert all(first == second for first, second in pairs)
    assert loader.state_dict()["epoch"] == 1
    loader.close()


def test_the_state_stays_that_of_the_outer_loop_while_an_inner_one_reads(keys: Dataset) -> None:
    loader = DataLoader(keys, 16, shuffle=True)
    outer = iter(loader)
    for _ in range(3):
        next(outer)
    before = loader.state_dict()
    inner = iter(loader)
    next(inner), next(inner)
    assert loader.state_dict() == before
    del inner
    gc.collect()
    assert loader.state_dict() == before
    loader.close()
    assert loader.state_dict() == before


def test_an_epoch_that_is_named_ends_the_claim_of_an_iterator_that_was_kept(keys: Dataset) -> None:
    """A notebook keeps the iterator of a loop that was interrupted, and runs the loop again."""
    loader = DataLoader(keys, 16, shuffle=True)
    kept = iter(loader)
    next(kept), next(kept)
    loader.set_epoch(4)
    next(iter(loader))
    assert loader.state_dict()["epoch"] == 4
    del kept
    loader.close()


def test_a_loader_that_is_no_longer_referred_to_ends_though_its_iterator_had_company(keys: Dataset) -> None:
    loader = DataLoader(keys, 16, shuffle=True)
    first, second = iter(loader), iter(loader)
    next(first), next(second)
    del loader, first, second  # no_thread_is_left waits for their threads


def test_the_ledger_of_passes_within_passes_replays(keys: Dataset, tmp_path: Path) -> None:
    ledger = str(tmp_path / "ledger")
    got: dict[int, list[int]] = {}
    with pytest.MonkeyPatch.context() as patched:
        scripted(patched, 5)
        loader = DataLoader(keys, 16, shuffle=True, ledger=ledger)
        outer: list[int] = []
        for number, batch in enumerate(loader):
            outer += rows(keys, batch)
            if number == 3:
                got[1] = read(keys, loader)
        got[0] = outer
        loader.close()
    again = DataLoader(keys, 16, shuffle=True, replay=ledger)
    for epoch in (0, 1):
        assert read(keys, again) == got[epoch]
    again.close()


class Backwards(Sampler[int]):
    """A sampler that is read while the loop runs."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES - 1, -1, -1))


def test_a_pass_that_was_put_aside_goes_on_drawing_from_a_lazy_sampler(keys: Dataset) -> None:
    order = BatchSampler(keys, 16, sampler=Backwards())
    outer = order.begin()
    inner = order.begin()
    drawn = [order.draw(each) for each in (outer, inner, outer)]
    assert [each.rows.tolist() for each in drawn if each is not None] == [
        ALL[:-17:-1],
        ALL[:-17:-1],
        ALL[-17:-33:-1],
    ]
    order.close()


def test_the_state_stays_that_of_the_outer_loop_over_a_lazy_sampler(keys: Dataset) -> None:
    loader = DataLoader(keys, 16, sampler=Backwards())
    outer = iter(loader)
    next(outer), next(outer)
    before = loader.state_dict()
    inner = iter(loader)
    next(inner)
    assert loader.state_dict() == before
    inner.close()
    outer.close()
    loader.close()


def test_what_a_state_left_of_a_sampler_is_kept_while_an_inner_loop_reads_all_of_it(keys: Dataset) -> None:
    halves = []
    for rank in range(2):
        half = DataLoader(keys, 16, sampler=ALL[rank::2], rank=rank, world_size=2)
        next(iter(half))
        halves.append(half.state_dict())
        half.close()
    loader = DataLoader(keys, 16, sampler=ALL)
    loader.load_state_dict(merge_states(halves))
    outer = iter(loader)
    next(outer), next(outer)
    before = loader.state_dict()
    inner = iter(loader)
    next(inner)
    assert loader.state_dict() == before
    assert "rest" in before
    inner.close()
    outer.close()
    loader.close()


def test_a_replayed_pass_that_was_put_aside_keeps_the_sizes_of_the_ledger(keys: Dataset, tmp_path: Path) -> None:
    ledger = str(tmp_path / "ledger")
    recorded = DataLoader(
        Dataset(keys._opened.path, f"file://{tmp_path}/cache?capacity=1GiB", fields=["__key__"], transform=_odd),
        16,
        shuffle=True,
        ledger=ledger,
        on_error="skip",
        errors_max=SAMPLES,
        collate_fn=list,
    )
    sizes = [len(batch) for batch in recorded]
    recorded.close()
    recorded.dataset.close()  # type: ignore[attr-defined]
    assert sizes[0] != 16
    order = BatchSampler(keys, 16, replay=ledger)
    outer, _ = order.begin(), order.begin()
    assert [len(each.rows) for each in iter(lambda: order.draw(outer), None) if each] == sizes
    order.close()


def _odd(sample: dict[str, Any]) -> Any:
    if int(sample["__key__"][2:6]) % 2:
        raise ValueError("odd")
    return sample["__key__"]


def test_a_copy_of_a_loaders_attributes_has_its_methods(keys: Dataset) -> None:
    """Fabric's wrapper is one: it used to lose ``state_dict``."""

    class Named(DataLoader):
        def state_dict(self) -> Any:
            return {"name": "train", **super().state_dict()}

    class Wrapper(torch.utils.data.DataLoader[Any]):
        def __init__(self, loader: Any) -> None:
            self.__dict__.update(loader.__dict__)
            self.loader = loader

    loader = Named(keys, 16, shuffle=True)
    wrapper: Any = Wrapper(loader)
    wrapper.set_epoch(3)
    next(iter(loader))
    assert wrapper.state_dict()["epoch"] == 3
    assert wrapper.state_dict()["name"] == loader.state_dict()["name"] == "train"
    wrapper.load_state_dict(DataLoader(keys, 16, shuffle=True).state_dict())
    assert loader.order.epoch == 0
    wrapper.close()


def test_a_second_warning_is_not_logged(keys: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(keys, 16)
    with caplog.at_level(logging.WARNING):
        for _ in loader:
            list(loader)
    assert len(caplog.messages) == 1
    loader.close()
