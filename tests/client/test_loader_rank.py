"""Which share a loader reads: settled when its first pass begins, and compared with torch.distributed from then on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from quiver.substitution import permutation
from quiver_client import BatchSampler, DataLoader, Dataset, merge_states
from quiver_client.loader.rank import SettledRank
from tests.support.data import Files

SAMPLES = 150
Group = Callable[[int, int], None]


@pytest.fixture
def keys(files: Files, tmp_path: Path, dataset: Callable[..., Dataset]) -> Dataset:
    """The dataset with its keys only: no bytes are read."""
    return dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB", fields=["__key__"])


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def group() -> Iterator[Group]:
    """Make a process group in which this process is one of several. Nothing is communicated."""

    def make(rank: int, world_size: int) -> None:
        torch.distributed.init_process_group("fake", rank=rank, world_size=world_size)

    import torch.testing._internal.distributed.fake_pg  # registers the backend

    yield make
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def rows_of(dataset: Dataset, batches: Any) -> list[int]:
    number = {dataset.manifest.key(row): row for row in range(len(dataset))}
    return [number[key] for batch in batches for key in batch["__key__"]]


def test_a_process_group_made_after_the_loader_says_which_share_it_reads(keys: Dataset, group: Group) -> None:
    loader = DataLoader(keys, 10, shuffle=True, substitute=False)
    order = BatchSampler(keys, 10, substitute=False)
    assert (len(loader), len(loader.sampler), loader.sampler.num_replicas) == (15, 150, 1)  # type: ignore[attr-defined]
    group(1, 2)
    assert (len(loader), len(loader.sampler), loader.sampler.num_replicas) == (8, 75, 2)  # type: ignore[attr-defined]
    share = permutation(SAMPLES, 0, 0)[1::2].tolist()
    assert list(loader.sampler) == share
    assert rows_of(keys, loader) == share == [row for batch in order for row in batch]
    assert loader.state_dict()["rank"] == 1
    loader.close()
    order.close()


def test_a_rank_that_changed_since_the_first_pass_is_refused(keys: Dataset, group: Group) -> None:
    loader = DataLoader(keys, 50)
    assert len(rows_of(keys, loader)) == SAMPLES
    group(0, 2)
    assert len(loader) == 3  # what was taken stays
    with pytest.raises(ValueError, match=r"^rank: the first pass read the share of rank 0 of 1, and .* rank 0 of 2"):
        iter(loader)
    loader.close()


def test_a_ledger_is_named_by_the_rank_that_the_first_pass_takes(keys: Dataset, group: Group, tmp_path: Path) -> None:
    loader = DataLoader(keys, 10, shuffle=True, ledger=str(tmp_path / "run.ledger"))
    group(1, 2)
    rows = rows_of(keys, loader)
    loader.close()
    again = DataLoader(keys, 10, shuffle=True, replay=str(tmp_path / "run.ledger"))
    assert rows_of(keys, again) == rows
    assert [each.name for each in tmp_path.glob("run.ledger*")] == ["run.ledger.1"]
    again.close()


@pytest.mark.parametrize("how", ["arguments", "sampler"])
@pytest.mark.parametrize(("rank", "world_size"), [(1, 2), (0, 4)])
def test_a_given_rank_that_the_process_group_contradicts_is_refused(
    keys: Dataset, group: Group, how: str, rank: int, world_size: int
) -> None:
    given: dict[str, Any] = {"rank": rank, "world_size": world_size}
    if how == "sampler":
        given = {"sampler": DistributedSampler(keys, world_size, rank)}
    loader = DataLoader(keys, 10, **given)
    group(0, 2)
    with pytest.raises(ValueError, match=rf"^rank={rank}, world_size={world_size}: .* rank 0 of 2"):
        iter(loader)
    loader.close()


def test_several_processes_may_read_one_share(keys: Dataset, group: Group) -> None:
    group(3, 4)
    for rank, world_size in ((0, 1), (1, 2)):  # to validate everywhere; two halves of a model
        loader = DataLoader(keys, 10, rank=rank, world_size=world_size)
        assert len(rows_of(keys, loader)) == SAMPLES // world_size
        loader.close()


def test_torchruns_variables_are_compared_with_the_process_group(
    keys: Dataset, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = DataLoader(keys, 10)
    assert len(rows_of(keys, loader)) == SAMPLES // 2
    group(0, 2)
    with pytest.raises(ValueError, match="the first pass read the share of rank 1 of 2"):
        iter(loader)
    loader.close()


def test_a_world_size_without_a_rank_is_refused(keys: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # as Lightning's launcher does it before there is a process group
    loader = DataLoader(keys, 10)
    with pytest.raises(ValueError, match=r"^rank: WORLD_SIZE=2 is set and RANK is not"):
        iter(loader)
    os.environ["RANK"] = "0"
    assert len(rows_of(keys, loader)) == SAMPLES // 2
    loader.close()


def test_the_repr_of_a_rank_shows_whether_it_is_settled() -> None:
    place = SettledRank(None, None)
    assert repr(place) == "SettledRank(rank=0, world_size=1, open)"
    assert not place.is_known
    place.settle()
    assert place.is_known
    assert repr(place) == "SettledRank(rank=0, world_size=1, settled)"


def test_a_state_loaded_before_the_process_group_exists_is_for_the_rank_that_it_will_have(
    keys: Dataset, group: Group
) -> None:
    orders = [BatchSampler(keys, 10, rank=rank, world_size=2, substitute=False) for rank in range(2)]
    for order in orders:
        next(iter(order))
    states = [order.state_dict() for order in orders]
    mine, foreign = (BatchSampler(keys, 10, substitute=False) for _ in range(2))
    mine.load_state_dict(states[1])
    foreign.load_state_dict(states[0])
    group(1, 2)
    assert [row for batch in mine for row in batch] == permutation(SAMPLES, 0, 0)[1::2][10:].tolist()
    for _ in range(2):  # it is not forgotten
        with pytest.raises(ValueError, match=r"rank=0, and this loader has rank=1.*all_gather_object"):
            next(iter(foreign))
    with pytest.raises(ValueError, match=r"rank=0, and this loader has rank=1"):
        DataLoader(keys, 10, shuffle=True).load_state_dict(states[0])  # now it is known at once


def test_an_epochs_end_is_the_same_in_all_ranks(keys: Dataset) -> None:
    first = DataLoader(keys, 10, shuffle=True, rank=0, world_size=2, substitute=False)
    batches = iter(first)
    for _ in range(len(first)):
        next(batches)
    state = first.state_dict()
    second = DataLoader(keys, 10, shuffle=True, rank=1, world_size=2, substitute=False)
    second.load_state_dict(state)
    assert rows_of(keys, second) == permutation(SAMPLES, 0, 1)[1::2].tolist()
    first.close()
    second.close()


# -- the orders of samplers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_an_order_that_repeats_samples_is_saved_and_resumed(keys: Dataset, workers: int) -> None:
    def sampler(seed: int) -> WeightedRandomSampler:
        return WeightedRandomSampler([1.0] * SAMPLES, 60, generator=torch.Generator().manual_seed(seed))

    whole = list(sampler(1))
    assert len(set(whole)) < 60
    loader = DataLoader(keys, 7, sampler=sampler(1), num_workers=workers)
    assert loader.state_dict()["epoch"] == 0
    batches = iter(loader)
    got = [next(batches) for _ in range(4)]
    again = DataLoader(keys, 7, sampler=sampler(2), num_workers=workers)  # another order, as a new process has it
    again.load_state_dict(loader.state_dict())
    batches = iter(again)
    got += [next(batches) for _ in range(2)]
    state = again.state_dict()
    again.load_state_dict(state)
    assert rows_of(keys, got + list(again)) == whole
    assert rows_of(keys, again) == list(sampler(2))  # and then an epoch of its own
    loader.close()
    again.close()


def test_a_selected_part_of_a_dataset_is_resumed_as_it_was_selected(keys: Dataset) -> None:
    """Samples that were left stay selected, although the sampler selects others the next time."""
    loader = DataLoader(keys, 10, sampler=RandomSampler(range(SAMPLES), num_samples=40))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = rows_of(keys, batches)
    again = DataLoader(keys, 10, sampler=RandomSampler(range(SAMPLES), num_samples=40))
    again.load_state_dict(state)
    assert rows_of(keys, again) == rest
    loader.close()
    again.close()


def test_a_samplers_state_at_the_end_of_its_order_goes_on_with_the_next(keys: Dataset) -> None:
    loader = DataLoader(keys, 10, sampler=[5, 5, 7])
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    again = DataLoader(keys, 10, sampler=[1, 2])
    again.load_state_dict(state)
    assert rows_of(keys, again) == [1, 2]
    assert again.state_dict()["epoch"] == 2
    loader.close()
    again.close()


def test_the_state_of_torchs_distributed_sampler_is_resumed_by_its_own_rank_or_merged(keys: Dataset) -> None:
    def loader(rank: int) -> DataLoader:
        return DataLoader(keys, 10, sampler=DistributedSampler(keys, 2, rank, shuffle=False))

    first = loader(0)
    next(iter(first))
    state = first.state_dict()
    again = loader(0)
    again.load_state_dict(state)
    assert rows_of(keys, again) == list(range(20, SAMPLES, 2))
    for other in (loader(1), DataLoader(keys, 10)):
        with pytest.raises(ValueError, match=r"^state: .*a sampler"):
            other.load_state_dict(state)
        other.close()
    second = loader(1)
    next(iter(second))
    merged = merge_states([second.state_dict(), state])
    second.load_state_dict(merged)
    again.load_state_dict(merged)
    assert rows_of(keys, again) + rows_of(keys, second) == [*range(20, SAMPLES, 2), *range(21, SAMPLES, 2)]
    second.close()
    with pytest.raises(ValueError, match=r"^states: ranks \[0\] given"):
        merge_states([state])
    with pytest.raises(ValueError, match=r"^sampler: it is that of rank 1 of 2"):
        DataLoader(keys, 10, sampler=DistributedSampler(keys, 2, 1), rank=0, world_size=2)
    first.close()
    again.close()


@pytest.mark.fault("E6")
def test_a_malformed_list_of_what_is_left_is_refused(keys: Dataset) -> None:
    loader = DataLoader(keys, 1, sampler=[5, 5, 7])
    next(iter(loader))
    state = loader.state_dict()
    for rest in (b"", b"\0" * 7, [1], b"\xff" * 8, (SAMPLES).to_bytes(8, "little")):
        with pytest.raises(ValueError, match=r"^state: 'rest'"):
            loader.load_state_dict({**state, "rest": rest})
    loader.close()


def test_a_loader_has_what_trainers_look_for(keys: Dataset) -> None:
    loader = DataLoader(keys, 8, shuffle=True, drop_last=True, seed=3, rank=1, world_size=2)
    share = loader.sampler
    assert isinstance(share, DistributedSampler)
    assert (share.rank, share.num_replicas, share.seed, share.shuffle, share.drop_last) == (1, 2, 3, True, True)
    assert (len(share), share.num_samples, share.total_size, share.dataset) == (72, 72, 144, keys)
    batches: Any = loader.batch_sampler
    assert (loader.batch_size, loader.drop_last, list(batches.sampler)) == (8, True, list(share))
    share.set_epoch(4)  # as training scripts do it
    expected = sorted(share)
    assert (share.epoch, sorted(rows_of(keys, loader)), share.epoch) == (4, expected, 5)
    with pytest.raises(AttributeError, match="no_such"):
        share.no_such  # noqa: B018
    loader.close()


def test_gathered_metrics_that_count_samples_twice_are_reported_once(
    keys: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    even, uneven = (DataLoader(keys, 10, rank=0, world_size=world_size) for world_size in (3, 4))
    for loader in (even, uneven, uneven):
        assert loader.remainder == 0
        loader.close()
    assert [record.getMessage() for record in caplog.records] == [
        "gather_for_metrics: 2 of 150 samples are in it twice, so that every rank has the same number; give the"
        " loader drop_last=True, or tell samples apart by __key__"
    ]


def test_a_sampler_that_deals_nothing_does_not_pass_for_a_ranks_share(keys: Dataset, group: Group) -> None:
    """Accelerate took it for one, and each sample was read by both ranks."""
    whole = DataLoader(keys, 10, sampler=RandomSampler(keys))
    assert whole._is_accelerate_prepared  # there is one process
    group(0, 2)
    with pytest.raises(ValueError, match=r"^sampler: each of 2 ranks .*Wrap the sampler in a DistributedSampler"):
        getattr(whole, "_is_accelerate_prepared", False)
    meant = DataLoader(keys, 10, sampler=RandomSampler(keys), rank=0, world_size=1)
    dealt = DataLoader(keys, 10, sampler=DistributedSampler(keys))
    ours = DataLoader(keys, 10, shuffle=True)
    for loader in (meant, dealt, ours):
        loader._is_accelerate_prepared = True  # as Accelerate marks what it prepared
        assert loader._is_accelerate_prepared
        loader.close()
    whole.close()


def test_an_epoch_that_was_set_on_a_given_sampler_is_read(keys: Dataset) -> None:
    """It used to be set back to the loader's own count."""
    sampler, torchs = (DistributedSampler(keys, 2, 1) for _ in range(2))
    loader = DataLoader(keys, 10, sampler=sampler)

    def expected(epoch: int) -> list[int]:
        torchs.set_epoch(epoch)
        return list(torchs)

    for epoch in (7, 7, 3):
        sampler.set_epoch(epoch)
        assert rows_of(keys, loader) == expected(epoch)
    assert rows_of(keys, loader) == expected(4), "and counted on from there"
    loader.set_epoch(9)
    batches = iter(loader)
    first = [next(batches) for _ in range(2)]
    state = loader.state_dict()
    assert state["epoch"] == 9
    for named in (None, 9, 2):
        again = DataLoader(keys, 10, sampler=sampler)
        again.load_state_dict(state)
        if named is not None:
            sampler.set_epoch(named)
        rest = expected(2) if named == 2 else expected(9)[20:]
        assert rows_of(keys, again) == rest
        again.close()
    assert rows_of(keys, first) == expected(9)[:20]
    loader.close()


def test_a_sampler_that_gives_no_integers_or_is_exhausted_is_refused(keys: Dataset) -> None:
    for given in ([1.5, 2.0], ["1"], [None]):
        with pytest.raises(ValueError, match=r"^sampler: it must give integers"):
            iter(DataLoader(keys, 10, sampler=given))  # type: ignore[arg-type]
    assert rows_of(keys, DataLoader(keys, 10, sampler=[torch.tensor(3), 4])) == [3, 4]  # type: ignore[list-item]
    once = DataLoader(keys, 10, sampler=iter(range(SAMPLES)))
    assert len(rows_of(keys, once)) == SAMPLES
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^sampler: it gives no samples in epoch 1"):
            iter(once)
    assert rows_of(keys, DataLoader(keys, 10, sampler=[])) == []


def test_a_rank_that_is_not_a_number_is_refused(keys: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(ValueError, match=r"^RANK='x': it is set but is not a number"):
        DataLoader(keys, 10)


def test_only_a_reproducible_order_may_be_resumed_by_skipping(keys: Dataset) -> None:
    def known(sampler: Any, epoch: int | None = None) -> bool:
        order = BatchSampler(keys, 10, sampler=sampler)
        if epoch is not None:
            order.set_epoch(epoch)
        return order._passes.is_reproducible

    dealt = DistributedSampler(keys, 2, 0)
    assert [known(each) for each in ([1], (1,), range(5), SequentialSampler(keys))] == [True] * 4
    assert [known(RandomSampler(keys)), known(RandomSampler(keys), 0), known(dealt, 0)] == [False, False, True]


def test_the_length_of_a_resumed_epoch_is_what_was_read_and_what_is_left(keys: Dataset) -> None:
    """Trainers that count batches used to end it as early as an epoch that is read from its beginning."""
    first = DataLoader(keys, 5, shuffle=True)
    batches = iter(first)
    for _ in range(12):
        next(batches)
    again = DataLoader(keys, 20, shuffle=True, rank=0, world_size=2)
    assert len(again) == 4
    again.load_state_dict(merge_states([first.state_dict()]))
    assert len(again) == 12 + 3
    batches = iter(again)
    next(batches)
    assert len(again) == len(batches) == 15
    other = DataLoader(keys, 20, shuffle=True, rank=1, world_size=2)
    other.load_state_dict(merge_states([first.state_dict()]))
    next(iter(other))
    last = DataLoader(keys, 40, shuffle=True)
    last.load_state_dict(merge_states([again.state_dict(), other.state_dict()]))
    assert len(last) == 13 + 2
    assert len(rows_of(keys, last)) == 50
    assert len(last) == 4
    with pytest.raises(ValueError, match="batches out of range"):
        last.load_state_dict({**first.state_dict(), "before": -1})
    for each in (first, again, other, last):
        each.close()
