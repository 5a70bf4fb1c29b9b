"""What a loader reports of the uses to come of a fixed order, and what a process alone with a folder makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.substitution import permutation
from quiver_client import BatchSampler, DataLoader, Dataset
from quiver_client.loader.epoch import Epoch, ShardLayout
from quiver_client.loader.known_order import KnownOrder
from tests.support.data import Files, make_files, random_files
from tests.support.residency import still

Make = Callable[..., Dataset]


@pytest.fixture
def keys(files: Files, tmp_path: Path, dataset: Make) -> Dataset:
    """The dataset with its keys only: no bytes are read."""
    return dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB", fields=["__key__"])


def shards_in(order: BatchSampler, rows: np.ndarray) -> list[int]:
    shards: list[int] = order._passes.layout.shard_of[rows].tolist()
    return shards


def test_all_uses_of_this_epoch_and_the_next_are_reported(keys: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    _, watches = still(monkeypatch)
    order = BatchSampler(keys, 8, seed=3, substitute=False)
    epoch = order.begin()
    report, _ = watches[0].report()
    assert report.uses is not None
    expected = shards_in(order, np.concatenate([permutation(len(keys), 3, 0), permutation(len(keys), 3, 1)]))
    assert report.uses.tolist() == expected
    assert (len(report.order), report.order_at) == (16, 0)
    drawn = order.draw(epoch)
    assert drawn is not None
    assert watches[0].report()[0].order_at == 0, "its bytes are not in memory yet"
    order.fetched(epoch, drawn.number)
    after, _ = watches[0].report()
    assert (after.order, after.order_at) == (report.order, 8)
    order.close()


def test_ranks_report_their_shares_and_a_resumed_pass_what_is_left(
    keys: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, watches = still(monkeypatch)
    order = BatchSampler(keys, 8, seed=3, substitute=False, rank=1, world_size=2)
    epoch = order.begin()
    drawn = order.draw(epoch)
    assert drawn is not None
    order.consumed(epoch, drawn.number)
    state = order.state_dict()
    order.close()
    again = BatchSampler(keys, 8, seed=3, substitute=False, rank=1, world_size=2)
    again.load_state_dict(state)
    again.begin()
    report, _ = watches[-1].report()
    assert report.uses is not None
    share = permutation(len(keys), 3, 0)[1::2][8:]
    assert report.uses[: len(share)].tolist() == shards_in(again, share)
    assert report.order_at == 0
    again.close()


def test_an_order_that_is_not_fixed_is_not_reported(keys: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    _, watches = still(monkeypatch)
    for order in (BatchSampler(keys, 8, seed=3), BatchSampler(keys, 8, seed=3, lookahead=40)):
        order.begin()
        report, _ = watches[-1].report()
        assert (report.order, report.uses) == (b"", None)
        order.close()


def test_of_a_sampler_this_epoch_is_reported_and_the_next_one_if_it_is_the_same(
    keys: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, watches = still(monkeypatch)
    rows = [5, 3, 3, 140, 9]
    order = BatchSampler(keys, 2, sampler=rows)
    order.begin()
    report, _ = watches[-1].report()
    assert report.uses is not None
    assert report.uses.tolist() == shards_in(order, np.asarray(rows * 2))
    order.close()


@given(st.integers(1, 300), st.integers(1, 40), st.data())
def test_a_long_list_is_sent_in_parts_that_always_reach_ahead(samples: int, part: int, data: st.DataObject) -> None:
    shard_of = np.random.default_rng(samples).integers(0, 7, samples)
    layout = ShardLayout(shard_of, np.bincount(shard_of, minlength=7), np.ones(7), 1.0)
    epoch = Epoch(0, np.arange(samples), layout)
    known = KnownOrder(shard_of, lambda of: np.arange(samples)[::-1], part=part)
    every = np.concatenate([shard_of, shard_of[::-1]])
    seen: dict[bytes, bytes] = {}
    for read in sorted(data.draw(st.lists(st.integers(0, samples), min_size=1, max_size=9))):
        uses = known.uses(epoch, read)
        assert uses.shards is not None
        assert 0 <= uses.at < part
        assert len(uses.shards) <= 2 * part
        assert (
            uses.shards[uses.at : uses.at + part].tolist()
            == every[read : read + len(uses.shards) - uses.at][:part].tolist()
        )
        assert seen.setdefault(uses.identifier, uses.shards.tobytes()) == uses.shards.tobytes()


@pytest.mark.parametrize("shuffle", [True, "block"])
def test_a_scarce_folder_reads_each_epoch_what_it_cannot_hold(tmp_path: Path, shuffle: bool | str) -> None:
    content = random_files(320, seed=6, low=4_000, high=4_001)
    files = make_files(tmp_path / "data", content, shard_bytes=66_000)
    total = int(files.opened().tables.shard_sizes.sum())
    dataset = Dataset(files.manifest, f"file://{tmp_path}/cache?capacity={int(0.4 * total)}")
    loader = DataLoader(dataset, 8, shuffle=shuffle, substitute=False, seed=1, collate_fn=len)
    for _ in range(2):
        assert sum(loader) == 320
    before = dataset.stats()["bytes_origin"]
    assert sum(loader) == 320
    assert 0 < dataset.stats()["bytes_origin"] - before <= 0.8 * total
    loader.close()
    dataset.close()
