"""A loader under an adversary: a cache that hides shards or drips, an hour in which nothing happens, a dead worker."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quiver_client import BatchSampler, DataLoader, Dataset
from quiver_client.loader import draw_wait
from tests.support.data import Files
from tests.support.residency import HOUR, still
from tests.support.waiting import until

SAMPLES = 150
Make = Callable[..., Dataset]


@pytest.fixture
def keys(files: Files, tmp_path: Path, dataset: Make) -> Dataset:
    return dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB", fields=["__key__"])


@pytest.mark.fault("E3")
@pytest.mark.parametrize("drips", [False, True])
def test_a_shard_that_never_becomes_resident_is_read_by_the_epochs_end(
    keys: Dataset, monkeypatch: pytest.MonkeyPatch, drips: bool
) -> None:
    """The worst that a hit pattern can do: hide one shard for ever, or show others just before patience ends."""
    clock, watches = still(monkeypatch)
    order = BatchSampler(keys, 8, seed=3)
    epoch = order.begin()
    shards = np.arange(keys.manifest.shard_count)
    watches[0].holds(shards[1:] if not drips else [])
    shown, waits, got = 0, [], Counter[int]()
    while True:
        began = clock.now
        while not order.poll(epoch):
            clock.now += draw_wait.PATIENCE_SECONDS * 0.9
            if drips:
                shown += 1
                watches[0].holds(shards[1 + shown % 3 : 2 + shown % 3])
        waits.append(clock.now - began)
        drawn = order.draw(epoch)
        if drawn is None:
            break
        order.consumed(epoch, drawn.number)
        got.update(drawn.rows.tolist())
    order.end(epoch)
    assert got == Counter(range(SAMPLES))
    assert max(waits) > 0, "it never had to wait, so nothing was hidden"
    assert max(waits) <= draw_wait.WAIT_SECONDS_MAX + draw_wait.PATIENCE_SECONDS
    order.close()


@pytest.mark.fault("E3")
def test_entries_of_a_hidden_shard_do_not_hold_back_the_others(keys: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is resident comes without a wait, and the hidden shard's samples last: nobody starves meanwhile."""
    _, watches = still(monkeypatch)
    order = BatchSampler(keys, 5, seed=4)
    epoch = order.begin()
    hidden = int(np.argmax(order._passes.layout.counts))
    watches[0].holds([shard for shard in range(keys.manifest.shard_count) if shard != hidden])
    counts = order._passes.layout.counts
    free = int(counts.sum() - counts[hidden]) // 5
    for _ in range(free):
        assert order.poll(epoch)
        drawn = order.draw(epoch)
        assert drawn is not None
        order.consumed(epoch, drawn.number)
        assert hidden not in order._passes.layout.shard_of[drawn.rows]
    assert not order.poll(epoch)
    order.close()


@pytest.mark.fault("E3")
def test_a_wait_in_which_a_little_arrives_again_and_again_ends_all_the_same(
    keys: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch larger than what drips in: each arrival renews patience, and there is a limit to that."""
    clock, watches = still(monkeypatch)
    order = BatchSampler(keys, 140, seed=5)
    epoch = order.begin()
    began = clock.now
    for shown in range(1, keys.manifest.shard_count):
        if order.poll(epoch):
            break
        clock.now += draw_wait.PATIENCE_SECONDS * 0.9
        watches[0].holds(range(shown))
    else:
        pytest.fail("it waits for as long as something arrives")
    assert clock.now - began <= draw_wait.WAIT_SECONDS_MAX + draw_wait.PATIENCE_SECONDS
    assert order.draw(epoch) is not None
    order.close()


@pytest.mark.fault("E5")
def test_a_job_that_stood_still_for_an_hour_goes_on(
    files: Files, tmp_path: Path, dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, watches = still(monkeypatch)
    ds = dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB", fields=["__key__"])
    loader = DataLoader(ds, 10, shuffle=True, prefetch_factor=3)
    batches = iter(loader)
    watches[0].holds(range(ds.manifest.shard_count))
    seen = Counter(key for _ in range(4) for key in next(batches)["__key__"])
    current = loader.order._passes.current
    assert current is not None
    until(lambda: current.drawn == 7)
    clock.now += HOUR
    report, _ = watches[0].report()
    assert not report.left.any(), "it pins nothing meanwhile"
    assert current.drawn == 7, "what is ahead is bounded, however long it stands"
    state = loader.state_dict()
    assert state["batches"] == 4, "what was prefetched is not consumed"
    seen.update(key for batch in batches for key in batch["__key__"])
    assert set(seen.values()) == {1}
    assert len(seen) == SAMPLES
    loader.close()


@pytest.mark.fault("E2")
def test_a_worker_that_is_killed_is_an_error_that_says_so_and_a_resumed_run_is_exact(keys: Dataset) -> None:
    others = set(multiprocessing.active_children())
    loader = DataLoader(keys, 10, shuffle=True, num_workers=2)
    batches = iter(loader)
    got = [key for _ in range(3) for key in next(batches)["__key__"]]
    victim = next(child for child in multiprocessing.active_children() if child not in others)
    os.kill(victim.pid or 0, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"worker.*(killed|exited)"):
        got.extend(key for batch in batches for key in batch["__key__"])
    state = loader.state_dict()
    loader.close()
    assert state["batches"] * 10 == len(got), "what the loop was given is what counts"
    resumed = DataLoader(keys, 10, shuffle=True, num_workers=1)
    resumed.load_state_dict(state)
    got += [key for batch in resumed for key in batch["__key__"]]
    resumed.close()
    assert Counter(got) == Counter(keys.manifest.key(row) for row in range(SAMPLES))
