"""What a checkpoint restores: every sample of an epoch once, however often and wherever a run resumes."""

from __future__ import annotations

import io
import itertools
import json
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quiver.substitution import permutation
from quiver_client import BatchSampler, DataLoader, Dataset, merge_states
from quiver_client.loader.epoch import Deal
from quiver_client.loader.state import make_state, pack, unpack
from tests.support.data import Files, make_files, random_files
from tests.support.residency import scripted
from tests.support.scripts import Script
from tests.support.waiting import until

SAMPLES = 150
Make = Callable[..., Dataset]
State = dict[str, Any]


@pytest.fixture
def keys(files: Files, tmp_path: Path, dataset: Make) -> Dataset:
    """The dataset with its keys only: no bytes are read."""
    return dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB", fields=["__key__"])


def take(loader: DataLoader, count: int | None = None) -> list[int]:
    """Return the samples of the next pass's first ``count`` batches."""
    number = {loader.dataset.manifest.key(row): row for row in range(SAMPLES)}  # type: ignore[attr-defined]
    return [number[key] for batch in itertools.islice(loader, count) for key in batch["__key__"]]


def through_a_file(state: State) -> State:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: State = torch.load(file, weights_only=True)
    assert loaded == state == pickle.loads(pickle.dumps(state))
    return loaded


# -- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("batch_size", "at"), [(1, 7), (7, 1), (7, 5), (32, 0), (32, 1)])
@pytest.mark.fault("E1")
def test_an_interrupted_run_resumes_where_it_was(
    keys: Dataset, monkeypatch: pytest.MonkeyPatch, workers: int, world_size: int, batch_size: int, at: int
) -> None:
    counts: Counter[int] = Counter()
    for rank in range(world_size):
        scripted(monkeypatch, rank)
        place: dict[str, Any] = {"rank": rank, "world_size": world_size}
        loader = DataLoader(keys, batch_size, shuffle=True, num_workers=workers, **place)
        got = take(loader, at)
        state = through_a_file(loader.state_dict())
        loader.close()
        scripted(monkeypatch, 50 + rank)
        other = DataLoader(keys, batch_size, shuffle=True, num_workers=2 - workers, **place)
        other.load_state_dict(state)
        assert other.state_dict() == state
        rest = take(other)
        assert len(got) == at * batch_size
        assert len(got + rest) == -(-SAMPLES // world_size)
        counts.update(got + rest)
        assert len(take(other)) == len(got + rest)
        assert other.state_dict()["epoch"] == 2
        other.close()
    assert set(counts) == set(range(SAMPLES))
    assert counts.total() == SAMPLES + -SAMPLES % world_size


@pytest.mark.fault("E4")
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_the_start_method_of_the_workers_makes_no_difference(keys: Dataset, context: str) -> None:
    loader = DataLoader(keys, 16, shuffle=True, num_workers=1, multiprocessing_context=context, substitute=False)
    got = take(loader, 3)
    state = loader.state_dict()
    loader.close()
    loader.load_state_dict(state)
    assert got + take(loader) == permutation(SAMPLES, 0, 0).tolist()
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.fault("E1")
def test_the_tenth_resume_is_as_exact_as_the_first(
    keys: Dataset, monkeypatch: pytest.MonkeyPatch, workers: int, world_size: int, drop_last: bool
) -> None:
    got: list[int] = []
    lengths = []
    for rank in range(world_size):
        state: State | None = None
        mine: list[int] = []
        for resume in range(11):
            scripted(monkeypatch, 20 * rank + resume)
            loader = DataLoader(
                keys,
                5,
                shuffle=True,
                num_workers=workers if resume < 3 else 0,
                drop_last=drop_last,
                rank=rank,
                world_size=world_size,
            )
            if state is not None:
                loader.load_state_dict(state)
            mine += take(loader, 1 if resume < 10 else None)
            state = loader.state_dict()
            loader.close()
        got += mine
        lengths.append(len(mine))
    whole = SAMPLES // world_size // 5 * 5 * world_size if drop_last else SAMPLES + -SAMPLES % world_size
    assert len(got) == whole
    assert len(set(got)) == min(whole, SAMPLES)
    assert len(set(lengths)) == 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), drop_last=st.booleans(), seed=st.integers(0, 3))
@pytest.mark.fault("E1")
def test_merged_states_load_into_any_world_size(keys: Dataset, data: st.DataObject, drop_last: bool, seed: int) -> None:
    taken: Counter[int] = Counter()
    state: State | None = None
    padding = 0
    worlds = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(0, 4)), max_size=5))
    for world_size, batch_size, at in [*worlds, (data.draw(st.integers(1, 4)), 6, 999)]:
        states, lengths = [], set()
        remaining = SAMPLES - len(taken)
        for rank in range(world_size):
            with pytest.MonkeyPatch.context() as patch:
                scripted(patch, data.draw(st.integers(0, 99)))
                order = BatchSampler(keys, batch_size, seed=seed, rank=rank, world_size=world_size, drop_last=drop_last)
                if state is not None:
                    order.load_state_dict(state)
                order.set_epoch(0)
                batches = list(itertools.islice(order, at))
                taken.update(row for batch in batches for row in batch)
                lengths.add(tuple(map(len, batches)))
                states.append(order.state_dict())
                order.close()
        assert len(lengths) == 1
        if not drop_last:
            padding += -remaining % world_size
        if any(state["epoch"] for state in states):  # nothing is left, and every rank says so
            assert all(state["epoch"] == 1 for state in states)
            break
        state = merge_states(data.draw(st.permutations(states)))
    assert taken.total() <= len(taken) + padding
    assert drop_last or len(taken) == SAMPLES


def test_a_merged_state_stays_the_same_until_the_first_batch(keys: Dataset) -> None:
    states = []
    for rank in range(3):
        order = BatchSampler(keys, 4, rank=rank, world_size=3)
        list(itertools.islice(order, 2))
        states.append(order.state_dict())
    joined = merge_states(states)
    again = []
    for rank in range(2):
        order = BatchSampler(keys, 8, rank=rank, world_size=2)
        order.load_state_dict(joined)
        again.append(order.state_dict())
    rejoined = merge_states(again)
    assert rejoined["done"] == joined["done"]
    assert unpack(joined["done"], SAMPLES).sum() == 24


def test_one_rank_alone_changes_its_batch_size_without_merging(keys: Dataset) -> None:
    loader = DataLoader(keys, 16, shuffle=True)
    got = take(loader, 3)
    other = DataLoader(keys, 11, shuffle=True)
    other.load_state_dict(loader.state_dict())
    got += take(other, 2)
    third = DataLoader(keys, 64, shuffle=True, num_workers=2)
    third.load_state_dict(other.state_dict())
    got += take(third)
    assert sorted(got) == list(range(SAMPLES))
    for each in (loader, other, third):
        each.close()


def test_a_resumed_state_of_one_rank_equals_its_own_merge(keys: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed rank alone keeps its state merged as it goes; merging it afterwards must give the same."""
    for drop_last in (False, True):
        scripted(monkeypatch, 5)
        order = BatchSampler(keys, 8, drop_last=drop_last)
        list(itertools.islice(order, 3))
        resumed = BatchSampler(keys, 9, drop_last=drop_last)
        resumed.load_state_dict(order.state_dict())
        for _ in itertools.islice(resumed, 4):
            pass
        epoch = resumed._passes.current
        assert epoch is not None
        slow = make_state(
            str(keys.manifest.digest), resumed.deal, 0, epoch.batches, resumed._passes.done, epoch.consumed
        )
        assert resumed.state_dict() == merge_states([{**slow, "before": 3}])


# -- what counts as consumed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.fault("E1")
def test_what_was_prefetched_and_not_yielded_is_not_consumed(keys: Dataset, workers: int) -> None:
    loader = DataLoader(keys, 10, shuffle=True, num_workers=workers, prefetch_factor=4, substitute=False)
    batches = iter(loader)
    for taken in range(5):
        state = loader.state_dict()
        assert (state["epoch"], state["batches"]) == (0, taken)
        own = unpack(state["own"], SAMPLES)
        assert own[: taken * 10].all()
        assert not own[taken * 10 :].any()
        next(batches)
    loader.close()


def test_out_of_order_what_was_yielded_is_what_is_consumed(keys: Dataset) -> None:
    loader = DataLoader(keys, 10, shuffle=True, num_workers=2, in_order=False)
    got = take(loader, 6)
    state = loader.state_dict()
    assert sorted(permutation(SAMPLES, 0, 0)[unpack(state["own"], SAMPLES)].tolist()) == sorted(got)
    loader.load_state_dict(state)
    assert sorted(got + take(loader)) == list(range(SAMPLES))
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_of_the_very_end_of_an_epoch_resumes_with_the_next(keys: Dataset, workers: int) -> None:
    loader = DataLoader(keys, 50, shuffle=True, num_workers=workers, substitute=False)
    states = [loader.state_dict() for _ in loader]
    states.append(loader.state_dict())
    assert [state["epoch"] for state in states] == [0, 0, 0, 1]
    for state in states[2:]:
        again = DataLoader(keys, 50, shuffle=True, substitute=False)
        again.load_state_dict(state)
        assert take(again) == permutation(SAMPLES, 0, 1).tolist()
        again.close()
    again = DataLoader(keys, 50, shuffle=True, substitute=False)
    again.load_state_dict(states[2])
    again.set_epoch(0)  # a loop that counts epochs itself gets what is left of this one: nothing
    assert take(again) == []
    assert take(again) == permutation(SAMPLES, 0, 1).tolist()
    loader.close()
    again.close()


def test_ranks_at_the_end_of_an_epoch_and_past_it_can_be_merged(keys: Dataset) -> None:
    orders = [BatchSampler(keys, 30, rank=rank, world_size=2) for rank in range(2)]
    passes = [iter(order) for order in orders]
    for each in passes:
        for _ in range(3):
            next(each)
    ended = list(passes[0])
    assert not ended
    joined = merge_states([order.state_dict() for order in orders])
    assert (joined["epoch"], joined["done"]) == (1, None)
    next(iter(orders[0]))
    assert merge_states([order.state_dict() for order in orders])["epoch"] == 1
    behind = BatchSampler(keys, 30, rank=1, world_size=2)
    next(iter(behind))
    with pytest.raises(ValueError, match="rank 1 is in epoch 0, another in epoch 1"):
        merge_states([orders[0].state_dict(), behind.state_dict()])


def test_a_state_survives_a_break_and_a_close(keys: Dataset) -> None:
    loader = DataLoader(keys, 10, shuffle=True, substitute=False)
    assert loader.state_dict()["batches"] == 0
    first = take(loader, 4)
    state = loader.state_dict()
    loader.close()
    assert loader.state_dict() == state
    assert take(loader, 1) == permutation(SAMPLES, 0, 1)[:10].tolist()  # the next pass is the next epoch
    loader.load_state_dict(state)
    assert first + take(loader) == permutation(SAMPLES, 0, 0).tolist()
    loader.close()


def test_set_epoch_resumes_a_state_of_that_epoch_and_drops_one_of_another(keys: Dataset) -> None:
    loader = DataLoader(keys, 10, shuffle=True, substitute=False)
    loader.set_epoch(3)
    got = take(loader, 4)
    state = loader.state_dict()
    assert state["epoch"] == 3
    loader.load_state_dict(state)
    loader.set_epoch(3)
    assert got + take(loader) == permutation(SAMPLES, 0, 3).tolist()
    loader.load_state_dict(state)
    loader.set_epoch(4)
    assert take(loader) == permutation(SAMPLES, 0, 4).tolist()
    loader.load_state_dict(state)
    assert got + take(loader) == permutation(SAMPLES, 0, 3).tolist()
    assert take(loader) == permutation(SAMPLES, 0, 4).tolist()
    loader.close()


def test_a_state_loaded_in_the_middle_of_a_pass_counts_from_the_next(keys: Dataset) -> None:
    loader = DataLoader(keys, 10, shuffle=True, substitute=False)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    next(batches)
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    assert take(loader) == permutation(SAMPLES, 0, 0)[10:].tolist()
    loader.close()


def test_a_samplers_order_is_resumed_by_sample(keys: Dataset) -> None:
    chosen = list(range(100, 40, -1))
    loader = DataLoader(keys, 7, sampler=chosen)
    got = take(loader, 3)
    loader.load_state_dict(loader.state_dict())
    got += take(loader, 2)
    loader.load_state_dict(through_a_file(loader.state_dict()))
    assert got + take(loader) == chosen
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_of_which_nothing_was_handed_out_is_begun_again(keys: Dataset, workers: int) -> None:
    """Trainers make an iterator to inspect it, and then the one that they read."""
    loader = DataLoader(keys, 10, shuffle=True, substitute=False, num_workers=workers)
    iter(loader)
    got = take(loader, 4)
    state = loader.state_dict()
    loader.load_state_dict(state)
    iter(loader)
    loader.set_epoch(0)
    iter(loader)
    assert loader.state_dict() == state
    assert got + take(loader) == permutation(SAMPLES, 0, 0).tolist()
    at_end = DataLoader(keys, 10, shuffle=True, substitute=False, num_workers=workers)
    batches = iter(at_end)
    for _ in range(15):
        next(batches)
    loader.load_state_dict(at_end.state_dict())
    for _ in range(2):
        iter(loader)
    loader.set_epoch(1)
    assert take(loader) == permutation(SAMPLES, 0, 1).tolist()
    loader.close()
    at_end.close()


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.fault("E6")
def test_a_state_of_something_else_is_refused_with_the_reason(keys: Dataset, tmp_path: Path, dataset: Make) -> None:
    loader = DataLoader(keys, 10, shuffle=True, seed=4)
    take(loader, 2)
    state = loader.state_dict()
    foreign = make_files(tmp_path, random_files(150, seed=3, high=2_000), name="foreign")
    others = {
        r"of dataset .*this loader of": DataLoader(dataset(foreign.manifest), 10, shuffle=True, seed=4),
        r"of seed 4, this loader of 5": DataLoader(keys, 10, shuffle=True, seed=5),
        r"of shuffle True, this loader of False": DataLoader(keys, 10, seed=4),
    }
    for reason, other in others.items():
        with pytest.raises(ValueError, match=reason):
            other.load_state_dict(state)
        assert other.state_dict()["batches"] == 0
    wrong: list[tuple[str, Any]] = [
        (r"version 2, .* version 1", {**state, "version": 2}),
        (r"'own' is missing", {name: value for name, value in state.items() if name != "own"}),
        (r"'done' is missing or not bytes", {**state, "done": "x"}),
        (r"'rank' is missing or not int", {**state, "rank": True}),
        (r"rank, world_size", {**state, "rank": 1}),
        (r"rank, world_size", {**state, "batch_size": 0}),
        (r"epoch or batches", {**state, "epoch": -1}),
        (r"give a dictionary made by", [1]),
        (r"give a dictionary made by", None),
        (r"of a dataset of 149", {**state, "samples": 149}),
    ]
    for reason, each in wrong:
        with pytest.raises(ValueError, match=reason):
            loader.load_state_dict(each)
        assert loader.state_dict() == state  # what was refused changes nothing
    loader.close()


@pytest.mark.fault("E6")
def test_bits_that_do_not_fit_are_refused(keys: Dataset) -> None:
    loader = DataLoader(keys, 10, shuffle=True)
    state = loader.state_dict()
    for name in ("own", "done"):
        with pytest.raises(ValueError, match=r"^state: 3 bytes of bits"):
            loader.load_state_dict({**state, name: b"\1\2\3"})
        assert loader.state_dict() == state
    loader.close()


@pytest.mark.fault("E6")
def test_the_state_of_one_of_several_ranks_is_refused_by_another(keys: Dataset) -> None:
    order = BatchSampler(keys, 5, rank=0, world_size=2)
    next(iter(order))
    state = order.state_dict()
    places: list[dict[str, Any]] = [
        {"rank": 1, "world_size": 2},
        {"rank": 0, "world_size": 3},
        {"rank": 0, "world_size": 1},
    ]
    for place in places:
        with pytest.raises(ValueError, match="merge_states"):
            BatchSampler(keys, 5, **place).load_state_dict(state)
    with pytest.raises(ValueError, match=r"batch_size=5.*merge_states"):
        BatchSampler(keys, 6, rank=0, world_size=2).load_state_dict(state)


@pytest.mark.fault("E6")
def test_states_that_are_not_of_all_ranks_of_a_run_are_not_merged(keys: Dataset) -> None:
    orders = [BatchSampler(keys, 5, rank=rank, world_size=3) for rank in range(3)]
    for order in orders:
        next(iter(order))
    states = [order.state_dict() for order in orders]
    with pytest.raises(ValueError, match="none given"):
        merge_states([])
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] given"):
        merge_states(states[:2])
    with pytest.raises(ValueError, match=r"ranks \[0, 1, 1\] given"):
        merge_states([*states[:2], states[1]])
    for name, value in {"seed": 9, "dataset": "0" * 64, "batch_size": 6, "drop_last": True}.items():
        with pytest.raises(ValueError, match=f"different runs: {name}"):
            merge_states([*states[:2], {**states[2], name: value}])
    with pytest.raises(ValueError, match="different runs"):
        merge_states([*states[:2], {**states[2], "done": pack(np.ones(SAMPLES, bool))}])


# -- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64])
def test_a_state_of_imagenet_is_small_also_after_resumes(world_size: int) -> None:
    count = 1_300_000
    chance = np.random.default_rng(0)
    for done_share in (0.0, 0.01, 0.5):
        done = chance.random(count) < done_share
        deal = Deal(count, 0, True, 0, world_size, 256, False)
        share, _ = deal.share(deal.order(0, done))
        if world_size == 1 and done_share:  # one rank joins its own, as the test above has it
            done, share = done | (chance.random(count) < 0.5), share[:0]
        state = make_state("0" * 64, deal, 0, 1000, done, chance.random(len(share)) < 0.5)
        assert len(pickle.dumps(state)) < 250_000


@given(bits=st.lists(st.booleans()))
def test_bits_come_back_as_they_were(bits: list[bool]) -> None:
    mask = np.array(bits, bool)
    assert unpack(pack(mask), len(mask)).tolist() == bits


# -- kill -9 ----------------------------------------------------------------------------------------------------------

TRAINING = """
import json, os, signal, sys
from quiver_client import DataLoader, Dataset

manifest, cache, folder, workers, rank, world_size, held_at = sys.argv[1:]
ds = Dataset(manifest, cache, fields=["__key__"])
loader = DataLoader(ds, 4, shuffle=True, num_workers=int(workers), rank=int(rank), world_size=int(world_size))
state = f"{folder}/state.{rank}"
if os.path.exists(state):
    with open(state, "rb") as file:
        saved = json.loads(file.read())
    bits = {name: saved[name] and bytes.fromhex(saved[name]) for name in ("done", "own")}
    loader.load_state_dict({**saved, **bits})
before = loader.state_dict()["batches"]
for number, batch in enumerate(loader, before):
    print(number, flush=True)
    if number == int(held_at):
        signal.pause()
    # A checkpoint and what it covers are one file: with the step done both are there or neither.
    took = loader.state_dict()
    bits = {name: took[name] and took[name].hex() for name in ("done", "own")}
    entry = {**took, **bits, "keys": batch["__key__"]}
    path = f"{folder}/step.{rank}.{number:04}"
    with open(path + ".tmp", "w") as file:
        json.dump(entry, file)
    os.replace(path + ".tmp", path)
    if os.path.lexists(state):
        os.unlink(state)
    os.symlink(path, state)
print("end", flush=True)
loader.close()
"""


@pytest.mark.parametrize(("workers", "rank", "world_size"), [(2, 0, 1), (0, 1, 2)])
@pytest.mark.fault("E1")
def test_a_training_process_that_is_killed_resumes_exactly(
    files: Files, tmp_path: Path, workers: int, rank: int, world_size: int
) -> None:
    chance = np.random.default_rng(workers + rank)
    cache = f"file://{tmp_path}/cache?capacity=1GiB"
    batches = -(-SAMPLES // world_size // 4)
    stops = sorted(chance.choice(np.arange(1, batches), 2, replace=False).tolist())
    for stop in [*stops, None]:
        held_at = -1 if stop is None else batches - 1  # one that is to be killed does not come to the end before
        arguments = [files.manifest, cache, tmp_path, workers, rank, world_size, held_at]
        script = Script(TRAINING, arguments, tmp_path / f"training.{stop}.log")
        if stop is None:
            assert script.wait() == 0
            assert script.lines()[-1] == "end"
        else:
            until(lambda: script.ended or (script.lines() and int(script.lines()[-1]) >= stop), 30)  # noqa: B023
            assert not script.ended
            script.kill()
    steps = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("step.*[0-9]"))]
    keys = [key for step in steps for key in step["keys"]]
    manifest = files.opened()
    share = permutation(SAMPLES, 0, 0)[rank::world_size].tolist()
    assert sorted(keys) == sorted(manifest.key(row) for row in share)


@pytest.mark.fault("E1")
def test_what_drop_last_left_out_stays_left_out_when_states_are_merged(keys: Dataset) -> None:
    states, got = [], set()
    for rank in range(2):
        order = BatchSampler(keys, 8, rank=rank, world_size=2, drop_last=True)
        got |= set(next(iter(order)))
        states.append(order.state_dict())
    left_out = permutation(SAMPLES, 0, 0)[144:].tolist()
    done = np.flatnonzero(unpack(merge_states(states)["done"], SAMPLES)).tolist()
    assert set(done) == got | set(left_out)


def test_numbers_of_numpy_are_accepted_and_absurd_ones_are_refused_at_once(keys: Dataset) -> None:
    loader = DataLoader(keys, 10, shuffle=True)
    first = take(loader, 4)
    state = loader.state_dict()
    numpys = {name: np.int64(value) if type(value) is int else value for name, value in state.items()}
    loader.load_state_dict(numpys)
    assert sorted(first + take(loader)) == list(range(SAMPLES))
    for name in ("samples", "world_size"):
        with pytest.raises(ValueError, match="state"):
            loader.load_state_dict({**state, name: 10**12})
    loader.close()


def test_an_epoch_set_after_a_break_is_the_one_in_the_state(keys: Dataset) -> None:
    loader = DataLoader(keys, 10, shuffle=True)
    take(loader, 4)
    assert loader.state_dict()["epoch"] == 0
    loader.set_epoch(7)
    state = loader.state_dict()
    assert (state["epoch"], state["own"], state["done"]) == (7, None, None)
    loader.close()
