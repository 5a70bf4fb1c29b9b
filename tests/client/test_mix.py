"""Mixtures: exact proportions in every rank, each part exactly once per pass of its own, whatever is resident."""

from __future__ import annotations

import gc
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quiver_client import BatchSampler, Concatenated, DataLoader, Dataset, Guided, Mix, merge_states
from quiver_client.loader.epoch import ShardLayout
from quiver_client.loader.mix import mixed_pass as mix_pass_module
from quiver_client.loader.mix.schedule import Schedule
from tests.support.data import Files, make_files, random_files
from tests.support.residency import Rack, scripted, still, told
from tests.support.threads import alive
from tests.support.waiting import until

SIZES = {"a": 70, "b": 30, "c": 9}
Rows = list[tuple[str, str]]  # a batch: of each sample the part and the key


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """Three datasets of a few shards each."""
    folder = tmp_path_factory.mktemp("mixed")
    return {
        name: make_files(folder, random_files(size, seed=at, low=100, high=900), name=name, shard_bytes="4KiB")
        for at, (name, size) in enumerate(SIZES.items())
    }


@pytest.fixture
def parts(indexed: dict[str, Files], tmp_path: Path) -> Iterator[dict[str, Dataset]]:
    """Their keys only: no bytes are read."""
    cache = f"file://{tmp_path}/cache?capacity=1GiB"
    made = {name: Dataset(files.manifest, cache, fields=["__key__"]) for name, files in indexed.items()}
    yield made
    for each in made.values():
        each.close()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    until(lambda: not alive("quiver-draw") + alive("quiver-fetch") + alive("quiver-needs"), 20, "threads end")


def batches_of(loader: Any, count: int | None = None) -> list[Rows]:
    """Return the next ``count`` batches, all of the pass for ``None``."""
    found: list[Rows] = []
    if count == 0:
        return found
    for batch in loader:
        found.append(list(zip(batch["__part__"], batch["__key__"], strict=True)))
        if len(found) == count:
            break
    return found


def loader_of(mix: Mix, **more: Any) -> DataLoader:
    return DataLoader(mix, **({"batch_size": 16, "shuffle": True} | more))


def keys_of(batches: list[Rows], part: str) -> list[str]:
    return [key for batch in batches for name, key in batch if name == part]


def assert_passes(dataset: Any, ranks: list[list[str]], *, drop_last: bool = False) -> None:
    """Assert that the ranks together read a part once, then once more and so on, up to the padding of their shares."""
    size, world_size = len(dataset), len(ranks)
    share = size // world_size if drop_last else -(-size // world_size)
    assert len({len(rows) for rows in ranks}) == 1
    for begin in range(0, len(ranks[0]), share):
        counts = Counter(key for rows in ranks for key in rows[begin : begin + share])
        if len(ranks[0]) - begin >= share:  # a whole pass
            assert len(counts) == share * world_size if drop_last else len(counts) == size
        most = 1 + -(-(share * world_size - size) // size) if share * world_size > size else 1
        assert max(counts.values()) <= most
        assert sum(count - 1 for count in counts.values()) <= max(share * world_size - size, 0)


# -- proportions and passes -------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    residency=st.integers(0, 2**32),
    weights=st.sampled_from([[1, 1, 1], [5, 2, 0], [0.1, 0.6, 0.3], [70, 30, 9]]),
    batch_size=st.integers(1, 40),
    world_size=st.integers(1, 4),
    drop_last=st.booleans(),
    patience=st.sampled_from([0.0, 1e6]),
    lookahead=st.sampled_from(["auto", 7, 64]),
)
def test_proportions_are_exact_and_each_part_comes_once_per_pass_whatever_is_resident(
    parts: dict[str, Dataset],
    residency: int,
    weights: list[float],
    batch_size: int,
    world_size: int,
    drop_last: bool,
    **more: Any,
) -> None:
    mix = Mix(parts, weights=weights, epoch=300)
    numbers = np.asarray(weights) / sum(weights)
    by_rank: list[list[np.ndarray[Any, Any]]] = []
    with pytest.MonkeyPatch.context() as patch:
        for rank in range(world_size):
            scripted(patch, residency + rank, more["patience"])
            order = BatchSampler(
                mix, batch_size, rank=rank, world_size=world_size, drop_last=drop_last, lookahead=more["lookahead"]
            )
            by_rank.append([np.asarray(batch) for _ in range(2) for batch in order])
            assert len(by_rank[-1]) == 2 * len(order)
            order.close()
    firsts = np.cumsum([0, *SIZES.values()])
    assert len({tuple(map(len, batches)) for batches in by_rank}) == 1
    compositions = [[np.histogram(batch, firsts)[0] for batch in batches] for batches in by_rank]
    assert all(np.array_equal(each, compositions[0]) for each in compositions)
    total = np.cumsum(compositions[0], axis=0)
    assert (abs(total - total.sum(1)[:, None] * numbers) < 1 + 1e-9).all()
    for at, part in enumerate(parts.values()):
        ranks = [np.concatenate(batches) for batches in by_rank]
        own = [each[(each >= firsts[at]) & (each < firsts[at + 1])].astype(str).tolist() for each in ranks]
        assert_passes(part, own, drop_last=drop_last)


@pytest.mark.parametrize(("epoch", "samples"), [("longest", 210), ("shortest", 45), (100, 100)])
def test_an_epoch_is_as_long_as_the_part_whose_pass_takes_longest_or_shortest(
    parts: dict[str, Dataset], epoch: Any, samples: int
) -> None:
    two = {name: parts[name] for name in "ab"}
    mix = Mix(two, weights={"b": 0.2, "a": 0.1}, epoch=epoch, part_field="__part__")
    loader = loader_of(mix)
    assert len(loader) == len(loader.sampler) // 16 + 1 == -(-samples // 16)  # type: ignore[arg-type]
    batches = [batches_of(loader) for _ in range(3)]
    assert [sum(map(len, each)) for each in batches] == [samples] * 3
    together = [batch for each in batches for batch in each]
    for name, part in two.items():
        assert_passes(part, [keys_of(together, name)])
    loader.close()
    loader = loader_of(mix, drop_last=True)
    assert len(loader) == len(batches_of(loader)) == samples // 16
    loader.close()


def test_without_weights_each_sample_comes_once_per_epoch(parts: dict[str, Dataset]) -> None:
    mix = Mix(parts, part_field="__part__")
    loader = loader_of(mix, batch_size=10)
    for _ in range(2):
        counts = Counter(row for batch in batches_of(loader) for row in batch)
        assert len(counts) == len(mix) == 109
        assert set(counts.values()) == {1}
    loader.close()
    flat = Mix(parts, temperature=1e9)
    assert flat.weights == pytest.approx((1 / 3,) * 3)
    assert repr(flat) == "Mix(a: 70 samples at 0.333, b: 30 samples at 0.333, c: 9 samples at 0.333; epoch='longest')"


def test_the_parts_have_orders_of_their_own_and_seeds_change_them(parts: dict[str, Dataset]) -> None:
    twice = {"x": parts["a"], "y": parts["a"]}
    orders = []
    for seeds in ((0, 0), (0, 0), (1, 0), (0, 1)):
        mix = Mix(twice, seed=seeds[0], part_field="__part__")
        loader = loader_of(mix, substitute=False, seed=seeds[1])
        rows = batches_of(loader)
        orders.append([keys_of(rows, name) for name in "xy"])
        loader.close()
    assert orders[0] == orders[1]
    assert len({tuple(order) for both in orders[1:] for order in both}) == 6


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_come_from_their_parts_with_the_transform_of_each(
    indexed: dict[str, Files], tmp_path: Path, workers: int
) -> None:
    cache = f"file://{tmp_path}/cache?capacity=1GiB"
    a = Dataset(indexed["a"].manifest, cache, transform=Suffixed("A"))
    b = Dataset(indexed["b"].manifest, cache, transform=Suffixed("B")).select(pc.field("label") == 1)
    mix = Mix({"a": a, "b": b + b}, weights=[1, 1], part_field="__part__")
    loader = loader_of(mix, collate_fn=list, num_workers=workers)
    samples = [sample for batch in loader for sample in batch]
    assert Counter(sample["__part__"] for sample in samples) == {"a": 70, "b": 70}
    for sample in samples:
        name = sample["__part__"]
        assert sample["image"][-1:] == name.upper().encode()
        assert sample["image"][:-1] in indexed[name].content.values()
    assert bool(mix.stats()["a"]["samples"]) == (not workers)  # workers count for themselves
    loader.close()
    assert mix[3]["__part__"] == mix.parts_of([3])[0] == "a"
    assert mix[-1] == b[len(b) - 1] | {"__part__": "b"}
    assert len(list(mix)) == len(mix) == 70 + 2 * len(b)
    stats = mix.stats()
    assert {name: each["drawn"] for name, each in stats.items()} == {"a": 70, "b": 70}
    assert (stats["a"]["passes"], stats["b"]["passes"]) == (1, 70 // (2 * len(b)))
    assert stats["b"]["weight"] == 0.5
    mix.close()


class Suffixed:
    """A transform that can be sent to a worker."""

    def __init__(self, text: str) -> None:
        self._text = text.encode()

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "image": sample["image"] + self._text}


def test_a_batch_is_mixed_throughout(parts: dict[str, Dataset]) -> None:
    loader = loader_of(Mix(parts, weights=[1, 1, 2], part_field="__part__"), batch_size=32)
    for batch in batches_of(loader, 5):
        assert Counter(name for name, _ in batch[:16]) == {"a": 4, "b": 4, "c": 8}
    loader.close()


def test_a_stock_loader_reads_a_mixture_by_its_batch_sampler(parts: dict[str, Dataset]) -> None:
    mix = Mix(parts, part_field="__part__")
    order = BatchSampler(mix, 10)
    assert isinstance(order, BatchSampler)
    stock = torch.utils.data.DataLoader(mix, batch_sampler=order, num_workers=2)
    counts = Counter(row for batch in batches_of(stock) for row in batch)
    assert len(stock) == 11
    assert len(counts) == 109
    assert set(counts.values()) == {1}
    order.close()


def test_the_share_shows_the_plain_order(parts: dict[str, Dataset]) -> None:
    mix = Mix(parts, weights=[1, 2, 3], epoch=100)
    order = BatchSampler(mix, 16, substitute=False, rank=1, world_size=2)
    share = order.sampler
    assert (len(share), share.num_replicas, share.rank, share.drop_last) == (50, 2, 1, False)  # type: ignore[arg-type, attr-defined]
    assert list(share) == [row for batch in order for row in batch]
    assert list(share) == [row for batch in order for row in batch]
    order.close()


# -- residency --------------------------------------------------------------------------------------------------------


def test_a_part_that_is_not_resident_is_waited_for_and_no_other_takes_its_place(
    parts: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, watches = still(monkeypatch)
    monkeypatch.setattr(mix_pass_module, "time", clock)
    two = {name: parts[name] for name in "ab"}
    mix = Mix(two, weights=[3, 1], part_field="__part__")
    order = BatchSampler(mix, 8)
    epoch = order.begin()
    a, b = watches
    a.holds(slice(None))
    assert not order.poll(epoch)

    def arrives(watch: Any) -> None:
        assert watch is b, "part a is resident, so it is not waited for"
        clock.now += 0.25
        b.holds([0, 1])

    b.when_waiting = arrives
    drawn = order.draw(epoch)
    assert drawn is not None
    rows = drawn.rows
    assert np.bincount(rows >= 70).tolist() == [6, 2]
    shards = parts["b"].placement()
    assert len(shards.rows) == 30
    first = parts["b"].manifest.tables
    held = np.searchsorted(first.firsts.astype(np.int64), first.blob_of[rows[rows >= 70] - 70], "right") - 1
    assert set(held.tolist()) <= {0, 1}
    assert {name: each["waits"] for name, each in mix.stats().items()} == {"a": 0, "b": 1}
    assert mix.stats()["b"]["wait_seconds"] == pytest.approx(0.25)
    order.close()


def test_each_part_reports_what_it_still_needs(parts: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch) -> None:
    racks = {name: Rack(part.manifest.shard_count) for name, part in parts.items()}
    told(monkeypatch, racks["a"])
    monkeypatch.setattr(Dataset, "needs", lambda self: racks[Path(self.manifest.path).stem])
    mix = Mix(parts, weights=[1, 1, 0], epoch=56)
    order = BatchSampler(mix, 8)
    batches = iter(order)
    for _ in range(4):
        next(batches)
    for name, drawn in (("a", 16), ("b", 16)):
        part = parts[name]
        counts = np.bincount(
            np.searchsorted(part.manifest.tables.firsts.astype(np.int64), part.manifest.tables.blob_of, "right") - 1
        )
        expected = len(part) - drawn
        until(lambda: _left(racks[name], counts) == expected, 20, f"{name} needs {expected} samples")  # noqa: B023
    assert not racks["c"].reports
    names = {racks[name].reports[-1].consumer for name in "ab"}
    assert len(names) == 2
    order.close()
    assert racks["a"].left
    assert racks["b"].left


def test_a_part_that_is_repeated_every_few_batches_keeps_its_drained_shards(
    parts: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs them again soon; but not before all that its present pass needs is resident."""
    _, watches = still(monkeypatch)
    mix = Mix({name: parts[name] for name in "ab"}, weights=[1, 100], epoch="longest")
    order = BatchSampler(mix, 2)
    epoch = order.begin()
    often = watches[1]
    often.holds(slice(None))
    watches[0].holds(slice(None))
    shard_of = ShardLayout.of(parts["b"].placement()).shard_of
    left = np.bincount(shard_of)
    for number in range(12):
        drawn = order.draw(epoch)
        assert drawn is not None
        order.fetched(epoch, number)
        order.consumed(epoch, number)
        left -= np.bincount(shard_of[drawn.rows[drawn.rows >= 70] - 70], minlength=len(left))
    assert 0 < (left == 0).sum() < len(left), "some shards are drained, and some are not"
    assert (often.report()[0].left > 0).all()  # type: ignore[call-arg]
    often.holds(np.flatnonzero(np.arange(len(left)) != np.argmax(left)))
    assert ((often.report()[0].left > 0) == (left > 0)).all()  # type: ignore[call-arg]
    order.close()


def _left(rack: Rack, counts: Any) -> int:
    return int(np.floor(rack.reports[-1].left / 255 * counts + 1e-6).sum()) if rack.reports else -1


# -- state ------------------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    stop=st.lists(st.integers(0, 12), min_size=1, max_size=3), batch_size=st.integers(3, 20), seed=st.integers(0, 99)
)
def test_a_run_that_is_killed_and_resumed_anywhere_reads_each_part_once_per_pass(
    parts: dict[str, Dataset], stop: list[int], batch_size: int, seed: int
) -> None:
    mix = Mix(parts, weights=[4, 1, 3], epoch=150, seed=seed, part_field="__part__")
    with pytest.MonkeyPatch.context() as patch:
        scripted(patch, seed)
        rows: list[Rows] = []
        state = None
        for count in [*stop, None]:
            loader = loader_of(mix, batch_size=batch_size, prefetch_factor=4)
            if state is not None:
                loader.load_state_dict(state)
            rows += batches_of(loader, count)
            state = torch_saved(loader.state_dict())
            loader.close()
    sizes = [len(batch) for batch in rows]
    assert sum(sizes) % 150 == 0
    assert sum(sizes) <= 150 * (1 + len(stop))
    for name, part in parts.items():
        assert_passes(part, [keys_of(rows, name)])
    weights = np.asarray([4, 1, 3]) / 8
    total = np.cumsum([[sum(name == each for name, _ in batch) for each in parts] for batch in rows], axis=0)
    assert (abs(total - total.sum(1)[:, None] * weights) < 1).all()


def torch_saved(state: Any) -> Any:
    """Return the state as ``torch.load`` reads it by default, without running code."""
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("other", [1, 2, 3, 4])
def test_the_states_of_four_ranks_merge_into_another_world_size(
    parts: dict[str, Dataset], other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, 5)
    mix = Mix(parts, weights=[2, 1, 1], part_field="__part__")
    rows: dict[str, list[str]] = {name: [] for name in parts}
    states = []
    for rank in range(4):
        loader = loader_of(mix, batch_size=8, rank=rank, world_size=4)
        own = batches_of(loader, 4)
        states.append(loader.state_dict())
        loader.close()
        for name in parts:
            rows[name] += keys_of(own, name)
    merged = torch_saved(merge_states(states))
    assert merge_states([merged]) == merged
    first = {name: len(each) for name, each in rows.items()}
    assert first == {"a": 64, "b": 32, "c": 32}
    lengths = set()
    whole = -(-70 // other) * 2 * other
    for rank in range(other):
        loader = loader_of(mix, batch_size=8, rank=rank, world_size=other)
        loader.load_state_dict(merged)
        length = len(loader)
        own = batches_of(loader)
        assert sum(map(len, own)) == -(-(whole - 128) // other)
        assert length >= len(own) + 4
        lengths.add(tuple(map(len, own)))
        loader.close()
        for name in parts:
            rows[name] += keys_of(own, name)
    assert len(lengths) == 1
    # Of part a: 64 of 70 were read by four ranks; the rest was dealt to the others, padded where it does not divide.
    counts = Counter(rows["a"])
    assert set(counts) == set(keys_in(parts["a"]))
    assert sum(counts.values()) - 70 <= len(rows["a"]) - 70
    head = Counter(rows["a"][:64])
    assert max(head.values()) == 1


def keys_in(part: Any) -> list[str]:
    return [part.manifest.key(row) for row in range(len(part))]


def test_merged_states_resume_each_pass_exactly(parts: dict[str, Dataset]) -> None:
    """Two ranks as one: what is left of the open pass of each part comes once, and then the next pass begins."""
    mix = Mix(parts, weights=[1, 1, 1], part_field="__part__")
    read: dict[str, list[str]] = {name: [] for name in parts}
    states = []
    for rank in range(2):
        loader = loader_of(mix, batch_size=9, rank=rank, world_size=2)
        own = batches_of(loader, 4)
        states.append(loader.state_dict())
        loader.close()
        for name in parts:
            read[name] += keys_of(own, name)
    loader = loader_of(mix, batch_size=9)
    loader.load_state_dict(merge_states(states))
    rows = batches_of(loader)
    loader.close()
    assert len(set(read["a"])) == 24
    a = keys_of(rows, "a")
    assert set(a[:46]) | set(read["a"]) == set(keys_in(parts["a"]))
    # Part b has 15 per rank: 12 of each were read.
    b = keys_of(rows, "b")
    assert set(b[:6]) | set(read["b"]) == set(keys_in(parts["b"]))
    assert sorted(b[6:36]) == sorted(keys_in(parts["b"]))
    # Part c has 5 of 9 per rank, padded: 12 of each rank are two passes and two samples.
    c = keys_of(rows, "c")
    assert len(set(c[:5])) == 5
    assert sorted(c[5:14]) == sorted(keys_in(parts["c"]))


def test_block_shuffles_of_the_parts_merge_over_ranks(parts: dict[str, Dataset]) -> None:
    mix = Mix({name: parts[name] for name in "ab"}, weights=[1, 1])
    read, states = [], []
    for rank in range(2):
        order = BatchSampler(mix, 6, shuffle="block", rank=rank, world_size=2)
        batches = iter(order)
        read += [row for _ in range(4) for row in next(batches)]
        states.append(order.state_dict())
        order.close()
    order = BatchSampler(mix, 6, shuffle="block")
    order.load_state_dict(merge_states(states))
    rest = [row for batch in order for row in batch]
    order.close()
    assert (len(read), len(rest)) == (48, 92)
    assert sorted(row for row in [*read, *rest] if row < 70) == list(range(70))


def test_a_mixture_is_sent_to_workers_without_what_only_the_loop_needs(parts: dict[str, Dataset]) -> None:
    mix = Mix(parts, guided=lambda losses: losses[-1] + 1, part_field="__part__")
    mix.report("a", 1.0)
    sent = pickle.loads(pickle.dumps(mix))
    assert sent[75] == mix[75]
    assert sent.take_reports() == []
    assert mix.take_reports() == [("a", 1.0)]
    sent.close()


def test_ranks_at_both_sides_of_an_epochs_end_merge(parts: dict[str, Dataset]) -> None:
    mix = Mix(parts, epoch=64, part_field="__part__")
    states = []
    for rank in range(2):
        loader = loader_of(mix, batch_size=8, rank=rank, world_size=2)
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        if rank:
            assert next(batches, None) is None
        states.append(loader.state_dict())
        loader.close()
    assert [state["epoch"] for state in states] == [0, 1]
    merged = merge_states(states)
    assert (merged["epoch"], merged["before"]) == (1, 0)
    loader = loader_of(mix, batch_size=8)
    loader.load_state_dict(merged)
    assert loader.order.epoch == 1
    assert len(batches_of(loader)) == 8
    loader.close()


def test_other_weights_apply_from_the_resume_on(parts: dict[str, Dataset]) -> None:
    loader = loader_of(Mix(parts, weights=[1, 1, 0], epoch=200, part_field="__part__"), batch_size=10)
    first = batches_of(loader, 6)
    state = loader.state_dict()
    loader.close()
    loader = loader_of(Mix(parts, weights=[1, 0, 3], epoch=200, part_field="__part__"), batch_size=10)
    loader.load_state_dict(state)
    rest = batches_of(loader)
    loader.close()
    assert len(rest) == 14
    counts = np.cumsum([[sum(name == each for name, _ in batch) for each in parts] for batch in rest], axis=0)
    assert (abs(counts - np.arange(10, 141, 10)[:, None] * np.asarray([0.25, 0, 0.75])) < 1).all()
    together = first + rest
    assert_passes(parts["a"], [keys_of(together, "a")])
    assert_passes(parts["c"], [keys_of(together, "c")])


def test_a_loop_that_breaks_off_goes_on_with_the_parts_where_they_were(parts: dict[str, Dataset]) -> None:
    mix = Mix(parts, weights=[1, 1, 1], epoch=100, part_field="__part__")
    loader = loader_of(mix, batch_size=10, prefetch_factor=4)
    rows = batches_of(loader, 3)
    assert loader.order.epoch == 0
    rows += batches_of(loader)
    loader.set_epoch(2)
    rows += batches_of(loader, 5)
    assert loader.order.epoch == 2
    assert len(rows) == 18
    for name, part in parts.items():
        assert_passes(part, [keys_of(rows, name)])
    loader.close()


def test_an_epoch_that_is_set_begins_where_the_epochs_before_it_end(parts: dict[str, Dataset]) -> None:
    mix = Mix(parts, weights=[1, 2, 5], epoch=96, part_field="__part__")
    loader = loader_of(mix, substitute=False)
    epochs = [batches_of(loader) for _ in range(4)]
    loader.set_epoch(2)
    assert loader.state_dict()["epoch"] == 2
    assert batches_of(loader) == epochs[2]
    assert batches_of(loader) == epochs[3]
    loader.close()
    loader = loader_of(mix, substitute=False)
    loader.set_epoch(3)
    assert loader.order.epoch == 3
    assert batches_of(loader) == epochs[3]
    loader.close()


def test_a_batch_that_raises_is_not_read_again_in_its_pass(parts: dict[str, Dataset]) -> None:
    mix = Mix(parts, weights=[1, 1, 1], epoch=90, part_field="__part__")
    loader = loader_of(mix, batch_size=15, collate_fn=Failing(at=2))
    batches, found, raised = iter(loader), [], []
    for _ in range(6):
        try:
            found.append(next(batches))
        except RuntimeError as error:
            raised.append(str(error))
    assert next(batches, None) is None
    assert len(found) == 5
    assert len(raised) == 1
    assert "broken" in raised[0]
    again = [list(batch) for batch in loader]
    rows = [[(sample["__part__"], sample["__key__"]) for sample in batch] for batch in [*found, *again]]
    lost = Counter(keys_in(parts["b"])) - Counter(keys_of(rows[:5], "b"))
    assert sum(lost.values()) == 5
    assert set(keys_of(rows[5:7], "b")) <= set(keys_in(parts["b"]))
    assert sorted(keys_of(rows[5:], "b")) == sorted(keys_in(parts["b"]))
    loader.close()


class Failing:
    """A collate function whose n-th call raises."""

    def __init__(self, at: int) -> None:
        self._at, self._calls = at, 0

    def __call__(self, samples: list[Any]) -> list[Any]:
        self._calls += 1
        if self._calls == self._at:
            raise RuntimeError("broken")
        return samples


# -- guided -----------------------------------------------------------------------------------------------------------


def test_a_guided_mixture_draws_parts_with_a_higher_loss_more_often_and_resumes_alike(
    parts: dict[str, Dataset],
) -> None:
    def run(stops: list[int]) -> list[Rows]:
        guided = Guided(interval=4, bias=2, explore=0, availability=0)
        rows: list[Rows] = []
        state: Any = None
        for stop in stops:
            mix = Mix(parts, weights=[1, 1, 2], epoch=600, guided=guided, part_field="__part__")
            loader = loader_of(mix, batch_size=20)
            if state is not None:
                loader.load_state_dict(state)
            for batch in loader:
                rows.append(list(zip(batch["__part__"], batch["__key__"], strict=True)))
                mix.report("a", 4.0)
                mix.report(["b", "c", "b"], torch.tensor([1.0, 1.0, 1.0]))
                if len(rows) == stop:
                    break
            else:
                weights = {name: each["weight"] for name, each in mix.stats().items()}
                assert weights == pytest.approx({"a": 0.5, "b": 1 / 6, "c": 1 / 3})
            state = torch_saved(loader.state_dict())
            loader.close()
        return rows

    rows = run([30])
    parts_drawn = [[name for name, _ in batch] for batch in rows]
    assert Counter(parts_drawn[0]) == {"a": 5, "b": 5, "c": 10}
    assert Counter(parts_drawn[-1])["a"] == 10
    for name, part in parts.items():
        assert_passes(part, [keys_of(rows, name)])
    resumed = run([9, 30])
    assert [sorted(name for name, _ in batch) for batch in resumed] == [sorted(batch) for batch in parts_drawn]


def test_guided_ranks_that_see_other_losses_still_share_each_pass(parts: dict[str, Dataset]) -> None:
    states, rows = [], []
    guided = Guided(interval=2, availability=0)
    for rank in range(2):
        mix = Mix(parts, weights=[1, 1, 1], epoch=400, guided=guided, part_field="__part__")
        loader = loader_of(mix, batch_size=10, rank=rank, world_size=2)
        own = []
        for batch in loader:
            own.append(list(zip(batch["__part__"], batch["__key__"], strict=True)))
            mix.report("ab"[rank], 5.0)
            mix.report("c", 1.0)
            if len(own) == 15:
                break
        states.append(loader.state_dict())
        loader.close()
        rows.append(own)
    assert list(map(len, rows[0])) == list(map(len, rows[1]))
    assert len(keys_of(rows[0], "a")) > len(keys_of(rows[1], "a")) + 10
    mix = Mix(parts, weights=[1, 1, 1], epoch=400, part_field="__part__")  # not guided from here on
    loader = loader_of(mix, batch_size=10)
    loader.load_state_dict(merge_states(states))
    rest = batches_of(loader)
    loader.close()
    assert sum(map(len, rest)) == 400 - 300
    # Each pass of part a: what one rank had read further than the other is not read again.
    share = 35
    second = Counter(each for own in rows for each in keys_of(own, "a")[share : 2 * share])
    first = Counter(each for own in rows for each in keys_of(own, "a")[:share])
    assert max(first.values()) == 1
    assert max(second.values(), default=1) == 1
    left = [key for key in keys_in(parts["a"]) if key not in first]
    assert set(keys_of(rest, "a")[: len(left)]) == set(left)


# -- what is refused --------------------------------------------------------------------------------------------------


def wrong_mixes(parts: dict[str, Any]) -> list[tuple[Callable[[], Any], str]]:
    a = parts["a"]
    return [
        (lambda: Mix({}), "parts: give datasets by name"),
        (lambda: Mix([a]), "parts: give datasets by name"),  # type: ignore[arg-type]
        (lambda: Mix({"": a}), "parts: '' is no name"),
        (lambda: Mix({"a": Mix({"b": a})}), "parts: 'a' is a Mix"),
        (lambda: Mix({"a": [1, 2]}), "parts: 'a' is a list"),  # type: ignore[dict-item]
        (lambda: Mix({"a": torch.utils.data.TensorDataset(torch.zeros(3))}), "parts: 'a': dataset: give"),
        (lambda: Mix({"a": a}, weights=[1], temperature=2), "temperature: it gives the weights"),
        (lambda: Mix({"a": a}, weights={"b": 1}), "weights: no part is called 'b'"),
        (lambda: Mix({"a": a}, epoch="long"), "epoch='long'"),
        (lambda: Mix({"a": a}, epoch=0), "epoch=0"),
        (lambda: Mix({"a": a}, seed=-1), "seed=-1"),
        (lambda: Mix({"a": a}, part_field=""), "part_field=''"),
        (lambda: Mix({"a": a}, guided="yes"), "guided='yes'"),
        (lambda: Mix({"a": a}).select([1]), "Mix: a selection of a mixture"),
        (lambda: Mix({"a": a})[0:2], "Mix: a slice of a mixture would have other proportions"),
        (lambda: Mix({"a": a}).report("b", 1.0), "part='b'"),
        (lambda: Mix({"a": a}).report("a", float("nan")), "loss=nan"),
        (lambda: Mix({"a": a}).report(["a"], [1.0, 2.0]), "loss: (2,) for 1"),
        (lambda: BatchSampler(Mix({"a": a}), 4, ledger="x"), "ledger: a mixture has one order per part"),
        (lambda: BatchSampler(Mix({"a": a}), 4, replay="x"), "replay: a mixture has one order per part"),
        (lambda: DataLoader(Mix({"a": a}), 4, sampler=[1]), "sampler: the Mix decides the order"),
        (lambda: next(iter(BatchSampler(Mix(parts), 4, rank=0, world_size=20, drop_last=True))), "drop_last: part 'c'"),
    ]


def test_wrong_mixtures_are_refused_by_name(parts: dict[str, Dataset]) -> None:
    for make, message in wrong_mixes(parts):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - compared in full below
            make()
        assert str(caught.value).startswith(message)


def test_states_that_do_not_fit_are_refused(parts: dict[str, Dataset]) -> None:
    def order_of(*names: str, given: dict[str, Any] | None = None, **more: Any) -> BatchSampler:
        return BatchSampler(Mix({name: parts[name] for name in names}, **(given or {})), 4, **more)

    state = order_of("a", "b").state_dict()
    cases: list[tuple[BatchSampler, Any, str]] = [
        (order_of("a", "c"), state, "it has 'b', which this mix lacks and it lacks 'c'"),
        (order_of("a"), state, "with weight 0 for those"),
        (order_of("a", "b", seed=3), state, "its seed is 0"),
        (order_of("a", "b", given={"seed": 3}), state, "its Mix's seed is 0"),
        (order_of("a", "b", shuffle=False), state, "its shuffle is True"),
        (order_of("a", "b"), {**state, "version": 9}, "version 9"),
        (order_of("a", "b"), {**state, "taken": -1}, "'taken'"),
        (order_of("a", "b"), {**state, "parts": {**state["parts"], "a": {}}}, "'weight' of part 'a'"),
        (BatchSampler(parts["a"], 4), state, "it is of a Mix"),
        (order_of("a", "b"), BatchSampler(parts["a"], 4).state_dict(), "it is not of a Mix"),
    ]
    swapped = BatchSampler(Mix({"a": parts["b"], "b": parts["a"]}), 4)
    cases.append((swapped, state, "its set of datasets is"))
    for order, given_state, message in cases:
        with pytest.raises(ValueError, match=r"^state: ") as caught:
            order.load_state_dict(given_state)
        assert message in str(caught.value), message
    ranks = []
    for rank in range(2):
        order = order_of("a", "b", rank=rank, world_size=2)
        next(iter(order))
        ranks.append(order.state_dict())
        order.close()
    with pytest.raises(ValueError, match=r"^state: it is that of rank 1 of 2, and this is rank 0 of 2; merge"):
        order_of("a", "b", rank=0, world_size=2).load_state_dict(ranks[1])
    for wrong, message in (
        ([ranks[0]], "ranks \\[0\\] given"),
        ([ranks[0], ranks[0]], "ranks \\[0\\] given"),
        ([{**it, "world_size": 10**18} for it in ranks], "of each of 1000000000000000000 ranks"),
        ([ranks[0], {**ranks[1], "seed": 7}], "of different runs: seed"),
        ([ranks[0], BatchSampler(parts["a"], 4).state_dict()], "not of a Mix"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_states(wrong)


def test_a_transform_that_gives_no_dictionary_has_no_field_for_its_part(indexed: dict[str, Files]) -> None:
    with_tuple = Dataset(indexed["a"].manifest, fields=["__key__"], transform=tuple)
    with pytest.raises(ValueError, match="part_field='p': the transform of part 'a' returns tuple"):
        Mix({"a": with_tuple}, part_field="p")[0]
    with_tuple.close()


def test_the_schedule_is_shown_in_the_state(parts: dict[str, Dataset]) -> None:
    loader = loader_of(Mix(parts, weights=[1, 2, 3], part_field="__part__"), batch_size=10)
    batches_of(loader, 1)
    kept = loader.state_dict()["parts"]
    deficits = [part["deficit"] for part in kept.values()]
    schedule = Schedule.fresh((1, 2, 3))
    assert deficits == list(schedule.after(schedule.counts(10)).deficits)
    loader.close()


def test_a_mix_that_nothing_draws_by_its_weights_says_so(
    parts: dict[str, Dataset], caplog: pytest.LogCaptureFixture
) -> None:
    mix = Mix(parts, weights=dict.fromkeys(parts, 1))
    assert mix[0]
    assert "weights do not apply" not in caplog.text
    mix.__getitems__([0, 1])
    mix.__getitems__([2, 3])
    assert caplog.text.count("weights do not apply") == 1
    drawn = Mix(parts)
    BatchSampler(drawn, 4)
    caplog.clear()
    drawn.__getitems__([0, 1])
    assert "weights do not apply" not in caplog.text
    with pytest.raises(ValueError, match="weights of a Mix would be lost"):
        Concatenated([mix, next(iter(parts.values()))])
    with pytest.raises(ValueError, match=r"^part_field='__key__'"):
        Mix(parts, part_field="__key__")
