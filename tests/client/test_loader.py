"""What a training loop receives of an epoch: every sample once, resident ones first, and no more ahead than allowed."""

from __future__ import annotations

import gc
import logging
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from quiver.substitution import permutation
from quiver_client import BatchSampler, DataLoader, Dataset
from quiver_client.loader import arguments, draw_wait
from quiver_client.loader import consumer as consumer_module
from tests.support.data import Files, make_files
from tests.support.residency import Rack, scripted, still, told
from tests.support.threads import alive
from tests.support.waiting import until

SAMPLES = 150
Make = Callable[..., Dataset]


@pytest.fixture
def keys(files: Files, tmp_path: Path, dataset: Make) -> Dataset:
    """The dataset with its keys only: no bytes are read."""
    return dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB", fields=["__key__"])


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Any:
    yield
    gc.collect()
    until(lambda: not alive("quiver-draw") + alive("quiver-fetch") + alive("quiver-needs"), 5, "threads end")


def rows_in(dataset: Dataset, batches: Any) -> list[list[int]]:
    """Return the samples' numbers of batches of keys."""
    number = {dataset.manifest.key(row): row for row in range(len(dataset))}
    return [[number[key] for key in batch["__key__"]] for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


# -- exactly once -----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    residency=st.integers(0, 2**32),
    seed=st.integers(0, 5),
    batch_size=st.integers(1, 40),
    world_size=st.integers(1, 4),
    drop_last=st.booleans(),
    lookahead=st.sampled_from(["auto", 1, 7, 64, 1000]),
    patience=st.sampled_from([0.0, 1e6]),
)
@pytest.mark.fault("E3")
def test_each_sample_comes_once_per_epoch_whatever_is_resident(
    keys: Dataset, residency: int, seed: int, batch_size: int, world_size: int, drop_last: bool, **more: Any
) -> None:
    share: dict[bool, Counter[int]] = {}
    for adversarial in (True, False):
        counts: Counter[int] = Counter()
        lengths = set()
        for rank in range(world_size):
            with pytest.MonkeyPatch.context() as patch:
                if adversarial:
                    scripted(patch, residency + rank, more["patience"])
                else:
                    patch.setattr(Dataset, "needs", lambda self: None)
                order = BatchSampler(
                    keys,
                    batch_size,
                    seed=seed,
                    rank=rank,
                    world_size=world_size,
                    drop_last=drop_last,
                    lookahead=more["lookahead"],
                )
                batches = list(order)
                assert len(batches) == len(order)
                assert all(len(batch) == batch_size for batch in batches[:-1])
                assert not drop_last or all(len(batch) == batch_size for batch in batches)
                counts.update(flat(batches))
                lengths.add(tuple(map(len, batches)))
                order.close()
        assert len(lengths) == 1  # every rank sees the same
        share[adversarial] = counts
    assert share[True] == share[False]
    padding = 0 if drop_last else -SAMPLES % world_size
    assert sum(share[True].values()) == len(share[True]) + padding
    assert drop_last or len(share[True]) == SAMPLES


@pytest.mark.parametrize(
    "more",
    [
        {"num_workers": 0},
        {"num_workers": 0, "prefetch_factor": 7},
        {"num_workers": 2},
        {"num_workers": 2, "in_order": False},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 2, "prefetch_factor": 1, "in_order": False, "persistent_workers": True},
        {"num_workers": 2, "drop_last": True},
        {"num_workers": 0, "lookahead": 30},
        {"num_workers": 2, "lookahead": 8},
    ],
    ids=str,
)
@pytest.mark.parametrize("patience", [0.0, 1e6])
def test_every_loader_gives_each_sample_once_per_epoch(
    keys: Dataset, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], patience: float
) -> None:
    scripted(monkeypatch, 7, patience)
    loader = DataLoader(keys, 16, shuffle=True, **more)
    seen = []
    for _ in range(3):
        batches = rows_in(keys, loader)
        assert len(batches) == len(loader) == (9 if more.get("drop_last") else 10)
        assert sorted(map(len, batches), reverse=True)[:9] == [16] * 9
        assert len(set(flat(batches))) == len(flat(batches)) == (144 if more.get("drop_last") else SAMPLES)
        seen.append(flat(batches))
    assert seen[0] != seen[1] != seen[2]
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_without_substitution_the_order_is_the_seeded_permutation(
    keys: Dataset, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    scripted(monkeypatch, 3)
    loader = DataLoader(keys, 32, shuffle=True, substitute=False, seed=11, num_workers=workers)
    for epoch in (0, 1):
        assert flat(rows_in(keys, loader)) == permutation(SAMPLES, 11, epoch).tolist()
    loader.set_epoch(9)
    assert flat(rows_in(keys, loader)) == permutation(SAMPLES, 11, 9).tolist()
    assert keys.stats()["substitutions"] == 0
    loader.close()
    plain = DataLoader(keys, 32)
    assert flat(rows_in(keys, plain)) == list(range(SAMPLES))
    plain.close()


def test_with_everything_resident_the_order_is_the_seeded_permutation(
    keys: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    for lookahead in ("auto", 1):
        told(monkeypatch, Rack(keys.manifest.shard_count))
        loader = DataLoader(keys, 32, shuffle=True, seed=5, lookahead=lookahead)
        assert flat(rows_in(keys, loader)) == permutation(SAMPLES, 5, 0).tolist()
        loader.close()
    assert keys.stats()["substitutions"] == 0


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 64, 200])
def test_ranks_get_what_torchs_distributed_sampler_gives_them(keys: Dataset, world_size: int, drop_last: bool) -> None:
    for rank in {0, 1, world_size - 1} & set(range(world_size)):
        order = BatchSampler(keys, 1, shuffle=False, rank=rank, world_size=world_size, drop_last=drop_last)
        theirs: DistributedSampler[Any] = DistributedSampler(keys, world_size, rank, shuffle=False, drop_last=drop_last)
        theirs_rows = list(theirs)
        if drop_last:  # torch pads up to a whole share even here if a rank would get one more
            theirs_rows = theirs_rows[: SAMPLES // world_size]
        assert flat(list(order)) == theirs_rows
        assert len(order) == len(theirs_rows)
        order.close()


def test_a_sampler_decides_the_order_and_the_length(keys: Dataset) -> None:
    chosen = list(range(SAMPLES - 1, 20, -3))
    for workers in (0, 2):
        loader = DataLoader(keys, 8, sampler=chosen, num_workers=workers, rank=1, world_size=2)
        assert len(loader) == 6
        assert flat(rows_in(keys, loader)) == chosen
    sampler: DistributedSampler[Any] = DistributedSampler(keys, 2, 1, seed=3)
    loader = DataLoader(keys, 8, sampler=sampler)
    loader.set_epoch(4)
    got = flat(rows_in(keys, loader))
    sampler.set_epoch(4)
    assert got == list(sampler)
    loader.close()


# -- substitution -----------------------------------------------------------------------------------------------------


def shards_of(order: BatchSampler, rows: list[int]) -> set[int]:
    return {int(order._passes.layout.shard_of[row]) for row in rows}


@pytest.mark.fault("E3")
def test_what_is_resident_comes_first_and_the_rest_in_the_same_epoch(
    keys: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, watches = still(monkeypatch)
    order = BatchSampler(keys, 10, seed=1)
    epoch = order.begin()
    here = list(range(0, keys.manifest.shard_count, 3))
    watches[0].holds(here)
    first = []
    while order.poll(epoch):
        drawn = order.draw(epoch)
        assert drawn is not None
        first += drawn.rows.tolist()
        assert shards_of(order, drawn.rows.tolist()) <= set(here)
    resident = [row for row in range(SAMPLES) if int(order._passes.layout.shard_of[row]) in here]
    assert len(first) == len(resident) // 10 * 10
    assert 0 < keys.stats()["substitutions"] <= len(first)
    watches[0].holds(range(keys.manifest.shard_count))
    while (drawn := order.draw(epoch)) is not None:
        first += drawn.rows.tolist()
    assert sorted(first) == list(range(SAMPLES))
    order.close()


def test_a_substitution_is_a_sample_that_came_before_its_turn(keys: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    _, watches = still(monkeypatch)
    order = BatchSampler(keys, 10, seed=1)
    epoch = order.begin()
    watches[0].holds([4, 5, 6])
    drawn = order.draw(epoch)
    assert drawn is not None
    turn = set(permutation(SAMPLES, 1, 0)[:10].tolist())
    assert keys.stats()["substitutions"] == len(set(drawn.rows.tolist()) - turn) > 0
    order.close()


@pytest.mark.fault("E5")
def test_a_loop_that_pauses_holds_no_claim_on_the_cache(keys: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, watches = still(monkeypatch)
    order = BatchSampler(keys, 10, seed=1)
    epoch = order.begin()
    watches[0].holds(range(keys.manifest.shard_count))

    def needs() -> bool:
        report, _ = watches[0].report()
        return bool(report.left.any())

    for _ in range(2):
        order.asked()
        drawn = order.draw(epoch)
        assert drawn is not None
        clock.now += 100
        assert needs(), "it waits for its batch"
        order.consumed(epoch, drawn.number)
        clock.now += 1.5
        assert needs(), "it takes its step"
    clock.now += 60
    assert not needs(), "it validates, for instance, and holds no claim on the cache"
    order.asked()
    assert needs()
    order.close()


def test_a_loop_that_is_stuck_reports_that_it_waits(keys: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, watches = still(monkeypatch)
    order = BatchSampler(keys, 10, seed=1)
    epoch = order.begin()
    watches[0].holds(range(keys.manifest.shard_count))

    def waited() -> float:
        report, _ = watches[0].report()
        return report.measured.waited

    assert waited() == 0, "it has asked for nothing"
    order.asked()
    clock.now += 100
    assert waited() == 1, "before its first batch too"
    drawn = order.draw(epoch)
    while drawn is not None:
        order.consumed(epoch, drawn.number)
        clock.now += 1
        assert waited() < 0.1, "it takes its step"
        order.asked()
        drawn = order.draw(epoch)
    clock.now += 1000
    assert waited() < 0.1, "nothing is left: it does not wait for data"
    order.close()


def test_with_a_lookahead_missing_shards_are_requested_and_not_waited_for(
    keys: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, watches = still(monkeypatch)
    order = BatchSampler(keys, 10, seed=1, lookahead=40)
    epoch = order.begin()
    window = permutation(SAMPLES, 1, 0)[:40].tolist()
    report, _ = watches[0].report()
    assert report.ordered
    assert set(report.soon) == shards_of(order, window)
    drawn = order.draw(epoch)
    assert drawn is not None
    assert set(drawn.rows.tolist()) <= set(window)
    assert watches[0].waits == 0
    order.close()


@pytest.mark.fault("E3")
def test_shards_that_will_not_be_fetched_are_not_waited_for(keys: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    _, watches = still(monkeypatch)
    order = BatchSampler(keys, 10, seed=1)
    epoch = order.begin()
    silent = np.ones(keys.manifest.shard_count, bool)
    silent[3] = False
    watches[0].now = watches[0].now._replace(orphaned=silent)
    assert not order.poll(epoch), "shard 3 may be fetched"
    watches[0].now = watches[0].now._replace(orphaned=np.ones_like(silent))
    rows = []
    while (drawn := order.draw(epoch)) is not None:
        rows += drawn.rows.tolist()
    assert sorted(rows) == list(range(SAMPLES))
    assert watches[0].waits == 0
    order.close()


@pytest.mark.fault("E3")
def test_shards_that_are_of_no_use_do_not_lengthen_the_wait(keys: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, watches = still(monkeypatch)
    order = BatchSampler(keys, SAMPLES, seed=1)  # a batch that is never all there
    epoch = order.begin()
    begun = clock.now

    def other_jobs_shard(watch: Any) -> None:
        clock.now += 1
        watch.holds([0] if watch.waits % 2 else [])

    watches[0].when_waiting = other_jobs_shard
    assert order.draw(epoch) is not None
    assert clock.now - begun <= draw_wait.WAIT_SECONDS_MAX + 1
    order.close()


def test_with_nothing_resident_a_batch_waits_for_the_first_that_arrives(
    keys: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, watches = still(monkeypatch)
    order = BatchSampler(keys, 4, seed=1)
    epoch = order.begin()
    assert not order.poll(epoch)
    watches[0].when_waiting = lambda watch: watch.holds([7]) if watch.waits == 3 else None
    drawn = order.draw(epoch)
    assert drawn is not None
    assert watches[0].waits == 3
    assert shards_of(order, drawn.rows.tolist()) == {7}
    order.close()


@pytest.mark.fault("E3")
def test_a_wait_is_bounded_by_how_long_nothing_arrives(keys: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, watches = still(monkeypatch)
    order = BatchSampler(keys, 30, seed=1)
    epoch = order.begin()
    assert not order.poll(epoch)
    clock.now += draw_wait.PATIENCE_SECONDS - 0.1
    assert not order.poll(epoch)
    watches[0].holds([3])  # not enough for a batch, but something: patience begins anew
    assert not order.poll(epoch)
    clock.now += draw_wait.PATIENCE_SECONDS - 0.1
    assert not order.poll(epoch)
    clock.now += 0.1
    drawn = order.draw(epoch)
    assert drawn is not None
    assert watches[0].waits == 0
    assert len(drawn.rows) == 30
    resident = [row for row in drawn.rows.tolist() if shards_of(order, [row]) == {3}]
    assert len(resident) == int(
        order._passes.layout.counts[3]
    )  # what is resident is in it, and the rest is read anyway
    # After a wait in vain the next one is half as long, until something arrives in time again.
    assert not order.poll(epoch)
    clock.now += draw_wait.PATIENCE_SECONDS / 2
    assert order.poll(epoch)
    assert order.draw(epoch) is not None
    for _ in range(2):
        watches[0].holds([])
        assert not order.poll(epoch)
        watches[0].holds(range(keys.manifest.shard_count))
        assert order.draw(epoch) is not None
    order.close()


def test_a_batch_has_no_sample_from_beyond_its_lookahead(keys: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, watches = still(monkeypatch)
    order = BatchSampler(keys, 10, seed=1, lookahead=25)
    epoch = order.begin()
    pending = permutation(SAMPLES, 1, 0).tolist()
    here = [0, 1, 2, 3]
    watches[0].holds(here)
    for _ in range(len(order)):
        if not order.poll(epoch):
            clock.now += draw_wait.PATIENCE_SECONDS
        window = pending[:25]
        resident = [row for row in window if shards_of(order, [row]) <= set(here)]
        drawn = order.draw(epoch)
        assert drawn is not None
        assert set(drawn.rows.tolist()) <= set(window)
        assert set(drawn.rows.tolist()) >= set(resident[:10])
        pending = [row for row in pending if row not in set(drawn.rows.tolist())]
    assert not pending
    order.close()


def test_a_ready_batch_is_not_held_back_by_one_that_waits_for_the_cache(
    keys: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, watches = still(monkeypatch)
    loader = DataLoader(keys, 4, shuffle=True, num_workers=2)
    here = [0, 1]
    monkeypatch.setattr(consumer_module.NeedsReporter, "first_answer", _holding(here))  # type: ignore[attr-defined]
    batches = iter(loader)
    counts = loader.order._passes.layout.counts
    ready = int(counts[here].sum()) // 4
    got = [next(batches) for _ in range(ready)]
    assert watches[0].waits == 0
    assert shards_of(loader.order, flat(rows_in(keys, got))) == set(here)
    watches[0].when_waiting = lambda watch: watch.holds(range(keys.manifest.shard_count))
    got += list(batches)
    assert watches[0].waits == 1
    assert sorted(flat(rows_in(keys, got))) == list(range(SAMPLES))
    loader.close()


def _holding(shards: list[int]) -> Any:
    return lambda watch, timeout_seconds: watch.holds(shards)


def test_without_a_cache_nothing_is_waited_for(keys: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dataset, "needs", lambda self: None)
    loader = DataLoader(keys, 32, shuffle=True)
    assert flat(rows_in(keys, loader)) == permutation(SAMPLES, 0, 0).tolist()
    assert not alive("quiver-needs")
    loader.close()


# -- what is told to the cache ----------------------------------------------------------------------------------------


def test_what_is_left_is_reported_until_nothing_is_and_then_withdrawn(
    keys: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    rack = Rack(keys.manifest.shard_count)
    told(monkeypatch, rack)
    loader = DataLoader(keys, 16, shuffle=True, prefetch_factor=1)
    batches = iter(loader)
    until(lambda: rack.reports)
    assert (rack.reports[0].left == 255).all()
    assert not rack.reports[0].ordered
    for _ in batches:
        pass
    until(lambda: not rack.reports[-1].left.any())
    loader.close()
    assert rack.left
    assert rack.closed
    assert not alive("quiver-needs")


def test_a_pass_that_was_broken_off_needs_nothing(keys: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    rack = Rack(keys.manifest.shard_count)
    told(monkeypatch, rack)
    loader = DataLoader(keys, 16, shuffle=True)
    for _ in loader:
        break
    until(lambda: not rack.reports[-1].left.any())
    loader.close()


def test_the_shards_of_a_fixed_order_are_requested_ahead_in_the_order_of_their_use(
    keys: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, watches = still(monkeypatch)
    order = BatchSampler(keys, 5, seed=2, substitute=False)
    epoch = order.begin()
    expected = list(dict.fromkeys(int(order._passes.layout.shard_of[row]) for row in permutation(SAMPLES, 2, 0)))
    report, again = watches[0].report()
    assert report.ordered
    assert list(report.soon) == expected
    assert again > 0
    watches[0].holds(expected[:3])
    report, _ = watches[0].report()
    assert list(report.soon) == expected[3:]
    assert report.ahead_bytes == pytest.approx(
        sum(order._passes.layout.sample_bytes[shard] * order._passes.layout.counts[shard] for shard in expected[:3])
    )
    drawn = order.draw(epoch)
    assert drawn is not None
    before = watches[0].report()[0].left
    order.fetched(epoch, drawn.number)
    assert watches[0].report()[0].left.astype(int).sum() < before.astype(int).sum()
    order.close()


def test_every_loader_of_a_job_is_a_separate_consumer(
    keys: Dataset, tmp_path: Path, dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_files(tmp_path, {f"{at}.bin": bytes([at]) * 9 for at in range(9)}, name="other")
    ds = dataset(other.manifest, f"file://{tmp_path}/cache?capacity=1GiB")

    def names() -> list[bytes]:
        monkeypatch.setattr(arguments, "_made", Counter())  # as in a process that has just begun
        made = [BatchSampler(ds, 1, job="j", rank=rank, world_size=2) for ds in (keys, ds) for rank in (0, 1)]
        made.append(BatchSampler(keys, 9, seed=9, job="j", rank=0, world_size=2))  # to validate, for instance
        return [order._consumer_name for order in made]

    assert len(set(names())) == 5
    assert names() == names(), "restarted it replaces its former self"


# -- faults, ends and limits ------------------------------------------------------------------------------------------


class Fails:
    """Raises for the samples with these keys."""

    def __init__(self, error: type[Exception], *keys: str) -> None:
        self._error, self._keys = error, keys

    def __call__(self, sample: dict[str, Any]) -> Any:
        if sample["__key__"] in self._keys:
            raise self._error("this sample is bad")
        return sample


@pytest.mark.parametrize("error", [RuntimeError, TimeoutError, KeyError])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_transforms_exception_reaches_the_loop_and_its_batch_stays_pending(
    files: Files, tmp_path: Path, dataset: Make, workers: int, error: type[Exception]
) -> None:
    cache = f"file://{tmp_path}/cache?capacity=1GiB"
    plain = dataset(files.manifest, cache, fields=["__key__"])
    third = permutation(SAMPLES, 0, 0)[64:96].tolist()
    transform = Fails(error, plain.manifest.key(third[5]))
    ds = dataset(files.manifest, cache, fields=["__key__"], transform=transform)
    loader = DataLoader(ds, 32, shuffle=True, substitute=False, num_workers=workers)
    batches = iter(loader)
    got = [next(batches), next(batches)]
    with pytest.raises(error, match="this sample is bad"):
        next(batches)
    again = DataLoader(plain, 32, shuffle=True, substitute=False)
    again.load_state_dict(loader.state_dict())
    assert flat(rows_in(plain, again))[:32] == third
    got += list(batches)  # as with torch's, the loop may go on with the next
    assert sorted(flat(rows_in(plain, got)) + third) == list(range(SAMPLES))
    loader.close()
    again.close()


class Gate:
    """A transform that counts and waits until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.samples = 0
        self._lock = threading.Lock()

    def __call__(self, sample: dict[str, Any]) -> Any:
        with self._lock:
            self.samples += 1
        assert self.opened.wait(20)
        return sample


def test_a_batch_that_takes_longer_than_the_timeout_is_an_error(files: Files, tmp_path: Path, dataset: Make) -> None:
    gate = Gate()
    ds = dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB", fields=["__key__"], transform=gate)
    loader = DataLoader(ds, 10, shuffle=True, timeout=0.05)
    batches = iter(loader)
    with pytest.raises(RuntimeError, match=r"timed out after 0\.05 seconds"):
        next(batches)
    assert loader.state_dict()["batches"] == 0
    gate.opened.set()
    loader.close()


@pytest.mark.parametrize("ahead", [1, 2, 5])
@pytest.mark.fault("E5")
def test_no_more_than_prefetch_factor_batches_are_ahead_of_the_loop(
    files: Files, tmp_path: Path, dataset: Make, ahead: int
) -> None:
    gate = Gate()
    gate.opened.set()
    ds = dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB", fields=["__key__"], transform=gate)
    loader = DataLoader(ds, 10, shuffle=True, prefetch_factor=ahead)
    batches = iter(loader)
    for taken in range(4):
        until(lambda taken=taken: gate.samples == 10 * (taken + ahead))  # type: ignore[misc]
        assert loader.order._passes.current is not None
        assert loader.order._passes.current.drawn == taken + ahead
        next(batches)
    loader.close()
    assert gate.samples <= 10 * (4 + ahead)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_that_is_dropped_leaves_no_thread(keys: Dataset, workers: int) -> None:
    loader = DataLoader(keys, 4, shuffle=True, num_workers=workers)
    batches = iter(loader)
    next(batches)
    del batches
    until(lambda: not alive("quiver-draw") + alive("quiver-fetch"))
    assert len(list(loader)) == len(loader)
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_is_dropped_leaves_no_thread_and_no_lease(
    keys: Dataset, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    rack = Rack(keys.manifest.shard_count)
    told(monkeypatch, rack)
    loader = DataLoader(keys, 4, shuffle=True, num_workers=workers)
    batches = iter(loader)
    next(batches)
    del loader, batches
    gc.collect()
    until(lambda: not alive("quiver-draw") + alive("quiver-fetch") + alive("quiver-needs"))
    assert rack.left
    assert rack.closed


def test_a_loader_that_waits_for_the_cache_can_be_closed(keys: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, Rack(keys.manifest.shard_count, resident=False))
    loader = DataLoader(keys, 4, shuffle=True)
    batches = iter(loader)
    until(lambda: alive("quiver-draw"))
    loader.close()
    assert not alive("quiver-draw") + alive("quiver-fetch") + alive("quiver-needs")
    with pytest.raises(StopIteration):
        next(batches)


def test_a_pass_that_begins_after_a_look_at_one_batch_is_the_next_epoch(keys: Dataset) -> None:
    """The iterator of the look is still there: it used to raise when it was asked again, and now it goes on."""
    loader = DataLoader(keys, 30, shuffle=True, substitute=False)
    first = iter(loader)
    got = rows_in(keys, [next(first)])
    second = iter(loader)
    assert flat(rows_in(keys, second)) == permutation(SAMPLES, 0, 1).tolist()
    assert loader.state_dict()["epoch"] == 2
    assert flat(got + rows_in(keys, first)) == permutation(SAMPLES, 0, 0).tolist()
    assert len(first) == 5
    loader.close()


def test_a_closed_loader_can_be_iterated_again(keys: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dataset, "needs", lambda self: Rack(self.manifest.shard_count))
    loader = DataLoader(keys, 30, shuffle=True)
    for epoch in (0, 1):
        assert flat(rows_in(keys, loader)) == permutation(SAMPLES, 0, epoch).tolist()
        loader.close()
        loader.close()
    loader.close()


# -- as torch's -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_memory_is_pinned_only_where_there_is_an_accelerator(keys: Dataset, workers: int) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has one")
    loader = DataLoader(keys, 50, shuffle=True, pin_memory=True, num_workers=workers)
    with pytest.warns(UserWarning, match=r"pin_memory.*no accelerator"):
        batches = list(loader)
    assert sorted(flat(rows_in(keys, batches))) == list(range(SAMPLES))
    loader.close()


@pytest.mark.parametrize(
    "more", [{}, {"num_workers": 2}, {"num_workers": 2, "multiprocessing_context": "spawn"}], ids=str
)
def test_bytes_are_those_of_the_files(files: Files, tmp_path: Path, dataset: Make, more: dict[str, Any]) -> None:
    blob = files.opened().header.blobs[0].name
    ds = dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB", fields=["__key__", blob])
    loader = DataLoader(ds, 40, shuffle=True, collate_fn=list, **more)
    got = {sample["__key__"]: sample[blob] for batch in loader for sample in batch}
    assert got == files.content
    loader.close()


def test_batches_are_collated_as_torch_does_it(files: Files, tmp_path: Path, dataset: Make) -> None:
    blob = files.opened().header.blobs[0].name
    ds = dataset(
        files.manifest,
        f"file://{tmp_path}/cache?capacity=1GiB",
        fields=["__key__", blob],
        transform=lambda sample: {"key": sample["__key__"], "size": len(sample[blob])},
    )
    batch = next(iter(DataLoader(ds, 8)))
    stock = next(iter(torch.utils.data.DataLoader(ds, 8)))
    assert batch["key"] == stock["key"]
    assert torch.equal(batch["size"], stock["size"])
    assert batch["size"].tolist() == [len(files.content[key]) for key in batch["key"]]


def test_a_loader_has_the_attributes_of_torchs(keys: Dataset) -> None:
    loader = DataLoader(keys, 8, shuffle=True, drop_last=True, num_workers=2, prefetch_factor=3)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert (loader.batch_size, loader.drop_last, loader.num_workers, loader.prefetch_factor) == (8, True, 2, 3)
    assert loader.dataset is keys
    assert len(loader) == SAMPLES // 8


# -- labels -----------------------------------------------------------------------------------------------------------


def test_a_loader_warns_of_batches_that_are_not_mixed(
    tmp_path: Path, dataset: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    content = {f"{'abcd'[at // 400]}/{at:04}.png": at.to_bytes(4, "big") * 8 for at in range(1600)}
    files = make_files(tmp_path, content, shard_bytes="4KiB", layout="sequential", format="imagefolder")
    ds = dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB", fields=["__key__"])
    _, watches = still(monkeypatch)
    order = BatchSampler(ds, 16)
    epoch = order.begin()
    shard = 0
    with caplog.at_level(logging.WARNING, "quiver_client"):
        for _ in range(60):
            while not order.poll(epoch):
                shard += 1
                watches[0].holds(range(max(shard - 2, 0), shard))
            drawn = order.draw(epoch)
            assert drawn is not None
            order.consumed(epoch, drawn.number)
    assert sum("labels" in record.message for record in caplog.records) == 1
    order.close()
    caplog.clear()
    plain = BatchSampler(ds, 16, substitute=False)
    assert len([batch for _ in range(2) for batch in plain]) == 200
    assert not caplog.records
    plain.close()
