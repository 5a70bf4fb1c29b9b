"""``shuffle="block"``: a fixed order, the same in workers and threads, resumed by any number of ranks, and replayed."""

from __future__ import annotations

import io
import itertools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quiver.residency import ConsumerReport
from quiver.shuffles import block_permutation, default_block_shards
from quiver_client import BatchSampler, DataLoader, Dataset, index, merge_states
from quiver_client.loader.epoch import ShardLayout
from quiver_client.loader.several_needs import SeveralNeeds
from tests.client.test_loader import flat, rows_in
from tests.support.data import Files, make_files, random_files
from tests.support.residency import scripted

SAMPLES = 400
BLOCK = 5
Make = Callable[..., Dataset]
State = dict[str, Any]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Many shards of a few samples each."""
    content = random_files(SAMPLES, low=300, high=900)
    return make_files(tmp_path_factory.mktemp("small"), content, shard_bytes="8KiB")


@pytest.fixture
def keys(small: Files, tmp_path: Path, dataset: Make) -> Dataset:
    """The dataset with its keys only: no bytes are read."""
    return dataset(small.manifest, f"file://{tmp_path}/cache?capacity=1GiB", fields=["__key__"])


def order_of(ds: Dataset, epoch: int, *, seed: int = 0, block_shards: int = BLOCK) -> list[int]:
    order: list[int] = block_permutation(ShardLayout.of(ds.placement()).shard_of, seed, epoch, block_shards).tolist()
    return order


def block_loader(ds: Dataset, batch_size: int = 16, **more: Any) -> DataLoader:
    return DataLoader(ds, batch_size, shuffle="block", block_shards=BLOCK, **more)


def through_a_file(state: State) -> State:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: State = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("workers", [0, 2])
def test_every_epoch_is_the_block_shuffle_of_its_seed_and_number(
    keys: Dataset, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    scripted(monkeypatch, 1)  # what is resident changes all the time, and nothing follows from it
    loader = block_loader(keys, seed=3, num_workers=workers)
    assert [flat(rows_in(keys, loader)) for _ in range(2)] == [order_of(keys, epoch, seed=3) for epoch in range(2)]
    loader.close()


def test_few_shards_are_open_while_a_pass_is_read(keys: Dataset) -> None:
    assert keys.manifest.shard_count > 8 * BLOCK
    shards = ShardLayout.of(keys.placement()).shard_of[flat(rows_in(keys, block_loader(keys)))]
    at = [np.flatnonzero(shards == shard)[[0, -1]] for shard in range(keys.manifest.shard_count)]
    opened = np.zeros(len(shards) + 1, np.int64)
    for first, last in at:
        opened[first] += 1
        opened[last + 1] -= 1
    assert np.cumsum(opened).max() <= BLOCK


def test_ranks_read_the_same_shards_at_the_same_time(keys: Dataset) -> None:
    shard_of = ShardLayout.of(keys.placement()).shard_of
    passes = [rows_in(keys, block_loader(keys, 8, rank=rank, world_size=4)) for rank in range(4)]
    assert len({len(batches) for batches in passes}) == 1
    assert Counter(row for batches in passes for row in flat(batches)) == Counter(range(SAMPLES))
    for step in zip(*passes, strict=True):
        shards = {int(shard) for shard in shard_of[flat(list(step))]}
        assert len(shards) <= 2 * BLOCK  # of a step of all ranks: those open at its start, and those begun in it


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (3, 3), (3, 1), (4, 3), (2, 5)])
@pytest.mark.fault("E1")
def test_states_resume_in_any_world_size_with_every_sample_once(
    keys: Dataset, before: int, after: int, drop_last: bool
) -> None:
    counts: Counter[int] = Counter()
    states = []
    for rank in range(before):
        loader = block_loader(keys, 7, rank=rank, world_size=before, drop_last=drop_last)
        counts.update(flat(rows_in(keys, itertools.islice(loader, 4))))
        states.append(through_a_file(loader.state_dict()))
        loader.close()
    merged = through_a_file(merge_states(states))
    assert merge_states([merged]) == merged
    assert sum(counts.values()) == 4 * 7 * before
    rest: list[list[int]] = []
    again = []
    for rank in range(after):
        loader = block_loader(keys, 9, rank=rank, world_size=after, drop_last=drop_last)
        loader.load_state_dict(merged)
        rest.append(flat(rows_in(keys, itertools.islice(loader, 2))))
        again.append(through_a_file(loader.state_dict()))
        loader.close()
    counts.update(flat(rest))
    assert max(counts.values()) == 1
    last = block_loader(keys, 11)
    last.load_state_dict(merge_states(again))
    remaining = flat(rows_in(keys, last))
    last.close()
    pending = [row for row in order_of(keys, 0) if not counts[row]]
    if drop_last:  # what a deal leaves out counts as consumed
        assert len(remaining) > len(pending) - 7 * before - 9 * after
        pending = [row for row in pending if row in set(remaining)]
    assert remaining == pending


def test_a_resumed_pass_goes_on_in_the_same_order(keys: Dataset) -> None:
    loader = block_loader(keys)
    batches = rows_in(keys, itertools.islice(loader, 6))
    state = through_a_file(loader.state_dict())
    loader.close()
    other = block_loader(keys, num_workers=2)
    other.load_state_dict(state)
    assert flat(batches + rows_in(keys, other)) == order_of(keys, 0)
    assert flat(rows_in(keys, other)) == order_of(keys, 1)
    other.close()


def test_a_merged_state_may_be_saved_again_before_it_is_used(keys: Dataset) -> None:
    loader = block_loader(keys, rank=0, world_size=1)
    taken = flat(rows_in(keys, itertools.islice(loader, 6)))
    merged = merge_states([loader.state_dict()])
    ranks = [block_loader(keys, rank=rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(merged)
    taken += flat(rows_in(keys, itertools.islice(ranks[0], 2)))  # the other one has not begun
    last = block_loader(keys)
    last.load_state_dict(merge_states([rank.state_dict() for rank in ranks]))
    taken += flat(rows_in(keys, last))
    assert sorted(taken) == list(range(SAMPLES))
    for each in (loader, *ranks, last):
        each.close()


def test_ranks_at_both_sides_of_an_epochs_end_merge(keys: Dataset) -> None:
    loaders = [block_loader(keys, rank=rank, world_size=2) for rank in range(2)]
    assert [len(flat(rows_in(keys, loader))) for loader in loaders] == [SAMPLES // 2] * 2
    taken = flat(rows_in(keys, itertools.islice(loaders[0], 1)))
    merged = merge_states([loader.state_dict() for loader in loaders])
    last = block_loader(keys)
    last.load_state_dict(merged)
    assert sorted(taken + flat(rows_in(keys, last))) == list(range(SAMPLES))
    assert last.order.epoch == 2
    for each in (*loaders, last):
        each.close()


@pytest.mark.parametrize(
    "other",
    [{"shuffle": True}, {"shuffle": "full"}, {"shuffle": False}, {"shuffle": "block", "block_shards": BLOCK + 1}],
)
def test_a_state_of_another_shuffle_is_rejected_with_what_differs(keys: Dataset, other: dict[str, Any]) -> None:
    state = block_loader(keys).state_dict()
    loader = DataLoader(keys, 16, **other)
    with pytest.raises(ValueError, match=r"^state: it is of (block_shards|shuffle) .*cannot be resumed here"):
        loader.load_state_dict(state)
    with pytest.raises(ValueError, match=r"^state: it is of (block_shards|shuffle) .*cannot be resumed here"):
        block_loader(keys).load_state_dict(loader.state_dict())


def test_a_state_of_a_full_shuffle_has_no_field_of_blocks(keys: Dataset) -> None:
    assert "block_shards" not in DataLoader(keys, 16, shuffle="full").state_dict()
    assert DataLoader(keys, 16, shuffle="full").state_dict() == DataLoader(keys, 16, shuffle=True).state_dict()


@pytest.mark.parametrize(
    "damage",
    [{"block_shards": -1}, {"block_shards": "5"}, {"block_shards": True}, {"positions": b"x"}, {"positions": None}],
)
def test_a_damaged_state_is_rejected(keys: Dataset, damage: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^state: "):
        block_loader(keys).load_state_dict(block_loader(keys).state_dict() | damage)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_ledger_of_a_block_shuffle_is_replayed(
    keys: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    path = str(tmp_path / "run.ledger")
    scripted(monkeypatch, 1)
    for rank in range(world_size):
        place: dict[str, Any] = {"rank": rank, "world_size": world_size}
        run = block_loader(keys, ledger=path, **place)
        taken = rows_in(keys, itertools.islice(run, 3))
        state = run.state_dict()
        run.close()
        run = block_loader(keys, ledger=path, **place)
        run.load_state_dict(state)
        taken += rows_in(keys, run)
        run.close()
        again = block_loader(keys, replay=path, num_workers=2, **place)
        assert rows_in(keys, again) == taken
        again.close()
    with pytest.raises(ValueError, match=r"of another block_shards: 5 there, 0 in this run"):
        DataLoader(keys, 16, shuffle=True, replay=path, rank=0, world_size=world_size)


def test_what_trainers_read_of_the_loader_is_that_of_a_shuffled_share(keys: Dataset) -> None:
    loader = block_loader(keys, rank=1, world_size=2)
    sampler: Any = loader.sampler
    assert sampler.shuffle is True
    assert list(sampler) == order_of(keys, 0)[1::2]
    assert loader.order.substitute is False


def test_the_block_is_chosen_by_the_number_of_shards_and_the_layout(
    keys: Dataset, small: Files, tmp_path: Path, dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quiver.shuffles.SHARDS_PER_OPEN", 1)  # as in a dataset of many shards
    assert DataLoader(keys, shuffle="block").order.deal.block_shards == default_block_shards(keys.manifest.shard_count)
    path = tmp_path / "sequential.quiver"
    index(small.folder, path, layout="sequential", shard_bytes="4KiB")
    ds = dataset(path, f"file://{tmp_path}/c?capacity=1GiB", fields=["__key__"])
    blocks = DataLoader(ds, shuffle="block").order.deal.block_shards
    assert blocks == default_block_shards(ds.manifest.shard_count, alike=True) > 16


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shuffle": "blocks"}, r'^shuffle=\'blocks\': give True or "full", "block", or False'),
        ({"shuffle": True, "block_shards": 4}, r'^block_shards=4: .*shuffle="block"'),
        ({"block_shards": 4}, r'^block_shards=4: .*shuffle="block"'),
        ({"shuffle": "block", "block_shards": 0}, r"^block_shards=0: give an integer of at least 1"),
        ({"shuffle": "block", "block_shards": 2.5}, r"^block_shards=2.5: give an integer"),
        ({"shuffle": "block", "sampler": range(SAMPLES)}, r"^sampler: "),
    ],
)
@pytest.mark.parametrize("kind", [DataLoader, BatchSampler])
def test_a_wrong_argument_is_named(keys: Dataset, kind: Any, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(keys, 4, **wrong)


# -- parts of datasets ------------------------------------------------------------------------------------------------


def test_a_selection_has_a_block_shuffle_of_its_own(keys: Dataset) -> None:
    part = keys.select(np.arange(0, SAMPLES, 7))
    loader = block_loader(part, 4)
    taken = [rows_in(keys, itertools.islice(loader, 5))]
    state = through_a_file(merge_states([loader.state_dict()]))
    loader.close()
    ranks = [block_loader(part, 3, rank=rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
        taken.append(rows_in(keys, rank))
    rows = [row for batches in taken for row in flat(batches)]
    assert sorted(set(rows)) == list(range(0, SAMPLES, 7))
    assert len(rows) <= len(part) + 1  # padded, so that both ranks have the same number
    with pytest.raises(ValueError, match="dataset"):
        block_loader(keys).load_state_dict(state)


def test_a_concatenation_mixes_the_shards_of_its_parts(keys: Dataset, tmp_path: Path, dataset: Make) -> None:
    content = random_files(SAMPLES, seed=1, low=300, high=900)
    other = make_files(tmp_path, content, name="other", shard_bytes="8KiB")
    both = torch.utils.data.ConcatDataset(
        [keys, dataset(other.manifest, f"file://{tmp_path}/c?capacity=1GiB", fields=["__key__"])]
    )
    loader: Any = DataLoader(both, 16, shuffle="block", block_shards=BLOCK)  # type: ignore[arg-type]
    rows = list(loader.sampler)
    assert sorted(rows) == list(range(2 * SAMPLES))
    first_half = sum(row < SAMPLES for row in rows[:SAMPLES])
    assert 0.25 * SAMPLES < first_half < 0.75 * SAMPLES
    assert sum(len(batch["__key__"]) for batch in loader) == 2 * SAMPLES


# -- labels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "block_shards", "warns"), [("sequential", 2, True), ("sequential", 1000, False)])
def test_batches_of_few_labels_are_foreseen_when_the_loader_is_made(
    tmp_path: Path,
    dataset: Make,
    caplog: pytest.LogCaptureFixture,
    layout: str,
    block_shards: int,
    warns: bool,
) -> None:
    content = {f"{at // 50:02}/{at:04}.png": at.to_bytes(4, "big") * 200 for at in range(1000)}  # 20 classes in order
    files = make_files(tmp_path, content, format="imagefolder", layout=layout, shard_bytes="8KiB")
    ds = dataset(files.manifest, f"file://{tmp_path}/c?capacity=1GiB")
    with caplog.at_level(logging.WARNING, "quiver_client"):
        loader = DataLoader(ds, 32, shuffle="block", block_shards=block_shards)
        assert caplog.text.count("further from a uniform shuffle") == warns
        rows = [row for batch in loader for row in batch["label"].tolist()]
    assert len(rows) == 1000
    assert caplog.text.count("further from a uniform shuffle") == warns  # once, and not again by the batches themselves
    assert ("block_shards" in caplog.text) == warns


def test_a_mixed_layout_needs_no_warning(tmp_path: Path, dataset: Make, caplog: pytest.LogCaptureFixture) -> None:
    content = {f"{at // 50:02}/{at:04}.png": at.to_bytes(4, "big") * 200 for at in range(1000)}
    files = make_files(tmp_path, content, format="imagefolder", layout="mixed", shard_bytes="8KiB")
    ds = dataset(files.manifest, f"file://{tmp_path}/c?capacity=1GiB")
    with caplog.at_level(logging.WARNING, "quiver_client"):
        assert len(list(DataLoader(ds, 32, shuffle="block", block_shards=4))) == 32
    assert "uniform shuffle" not in caplog.text


@given(st.integers(0, 200), st.integers(1, 6))
def test_uses_to_come_are_divided_by_manifest(done: int, block_shards: int) -> None:
    sizes = [np.full(count, 100.0) for count in (4, 1, 7)]
    uses = block_permutation(np.arange(120) % 12, 0, 0, block_shards).astype(np.int32) % 12
    channels = [Heard() for _ in sizes]
    several = SeveralNeeds(channels, sizes)
    report = ConsumerReport(bytes(16), np.full(12, 255, np.uint8), 1.0, 0.0, 5.0, order=bytes(16), uses=uses)
    for at in (0, done):
        several.report(replace(report, order_at=at))
    begin = 0
    for channel, size in zip(channels, sizes, strict=True):
        first, last = channel.heard
        own = [shard - begin for shard in uses.tolist() if begin <= shard < begin + len(size)]
        assert last.uses is not None
        assert last.uses.tolist() == own
        assert own[last.order_at :] == [s - begin for s in uses[done:].tolist() if begin <= s < begin + len(size)]
        assert first.order == last.order
        begin += len(size)
    assert len({channel.heard[0].order for channel in channels}) == len(sizes)


class Heard:
    """A channel that keeps what is reported."""

    orphaned = None
    probe_wanted = False

    def __init__(self) -> None:
        self.heard: list[ConsumerReport] = []

    def report(self, report: ConsumerReport, *, leaving: bool = False) -> npt.NDArray[np.uint8]:
        self.heard.append(report)
        return np.ones(len(report.left), np.uint8)

    def close(self) -> None: ...
