"""Samples that cannot be made: named in every exception, left out or replaced, counted, recorded, and limited."""

from __future__ import annotations

import gc
import itertools
import logging
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quiver.errors import Changed, Unavailable
from quiver.substitution import Order
from quiver_client import DataLoader, Dataset, merge_states
from quiver_client.loader.bad_samples import ErrorPolicy, is_bad_sample
from quiver_client.loader.ledger.amendments import Amendment, decode_and_take, encode_amended
from quiver_client.loader.ledger.batch_encoding import encode_batch, skipped
from tests.support.data import Files, make_files, random_files

SAMPLES = 120
BAD = (3, 50, 77)
Make = Callable[..., Dataset]


class TwoArguments(Exception):
    def __init__(self, what: str, code: int) -> None:
        super().__init__(what)
        self.code = code


class Silent(Exception):
    """Its text does not depend on what it is made of."""

    def __init__(self, what: str) -> None:
        super().__init__("no text")


class Decode:
    """Returns the key, and raises for some."""

    def __init__(self, bad: tuple[str, ...], error: type[Exception] = ValueError) -> None:
        self.bad, self.error = bad, error

    def __call__(self, sample: dict[str, Any]) -> Any:
        if sample["__key__"] in self.bad:
            raise self.error("no image", 3) if self.error is TwoArguments else self.error("no image")
        return sample["__key__"]


class Made(Dataset):
    """Decodes in a method of its own."""

    bad: tuple[str, ...] = ()

    def __getitem__(self, index: Any) -> Any:
        return Decode(self.bad)(super().__getitem__(index))


@pytest.fixture(autouse=True, scope="module")
def short_joins() -> Iterator[None]:
    """torch waits up to 5 s for a worker of a loader that failed, whatever the dataset; here that would be 20 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.25)
        yield
        gc.collect()  # ends what failed loaders left


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("own"), random_files(SAMPLES, seed=4, low=100, high=2000), name="own")


@pytest.fixture
def make(own: Files, tmp_path: Path) -> Iterator[Make]:
    made: list[Dataset] = []

    def dataset(transform: Any = None, kind: type[Dataset] = Dataset, **more: Any) -> Dataset:
        cache = f"file://{tmp_path}/cache?capacity=1GiB"
        fields = more.pop("fields", ["image", "__key__"])
        made.append(kind(more.pop("manifest", own.manifest), cache, transform=transform, fields=fields, **more))
        return made[-1]

    yield dataset
    for each in made:
        each.close()


@pytest.fixture
def bad(own: Files) -> tuple[str, ...]:
    return tuple(own.opened().key(row) for row in BAD)


def loader(ds: Dataset, batch_size: int = 10, **more: Any) -> DataLoader:
    return DataLoader(ds, batch_size, **{"shuffle": True, "collate_fn": list, **more})


def read(reading: DataLoader) -> list[list[str]]:
    batches = list(reading)
    reading.close()
    return batches


def flat(batches: Any) -> list[str]:
    return list(itertools.chain.from_iterable(batches))


# -- exceptions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyError, TwoArguments, Silent])
@pytest.mark.parametrize("kind", [DataLoader, torch.utils.data.DataLoader], ids=["ours", "torch"])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_of_a_transform_names_its_sample(
    make: Make, bad: tuple[str, ...], kind: Any, workers: int, error: type[Exception]
) -> None:
    ds = make(Decode(bad[:1], error), fields=["__key__"])
    with pytest.raises(Exception) as caught:  # noqa: PT011 - its text is looked at below
        list(kind(ds, 50, num_workers=workers, collate_fn=list))
    notes = "\n".join(getattr(caught.value, "__notes__", []))
    if not workers:
        assert type(caught.value) is error
        assert f"sample {BAD[0]} ({bad[0]!r}) of {ds.manifest.path}" in notes
    elif error is not Silent or kind is DataLoader:  # torch drops all that the type ignores
        assert f"sample {BAD[0]} ({bad[0]!r})" in f"{caught.value}\n{notes}"


def test_an_exception_names_its_sample_however_it_is_read(make: Make, bad: tuple[str, ...]) -> None:
    ds = make(Decode(bad), fields=["__key__"])
    its = make(kind=Made, fields=["__key__"])
    its.bad = bad  # type: ignore[attr-defined]
    for fetch in (
        lambda: ds[BAD[1]],
        lambda: ds.__getitems__([1, BAD[1], 5]),
        lambda: list(ds.__getitems__(range(BAD[0] + 1, BAD[2]))),
        lambda: its.__getitems__([1, BAD[1]]),
        lambda: list(loader(its, 1, sampler=[1, BAD[1]], shuffle=False)),
    ):
        with pytest.raises(ValueError, match="no image") as caught:
            fetch()
        [note] = caught.value.__notes__
        assert f"sample {BAD[1]} ({bad[1]!r})" in note


def test_one_exception_that_is_raised_twice_names_the_last_sample_alone(make: Make) -> None:
    error = ValueError("the same object")
    error.add_note("a note of the user")

    def fail(sample: Any) -> Any:
        raise error

    ds = make(fail, fields=["__key__"])
    for row in (4, 9):
        with pytest.raises(ValueError, match="the same object"):
            ds[row]
        user, ours = error.__notes__
        assert user == "a note of the user"
        assert f"sample {row} " in ours


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_of_a_collate_function_names_its_batch(make: Make, workers: int) -> None:
    ds = make(fields=["__key__"])
    with pytest.raises(TypeError) as caught:
        list(loader(ds, 40, shuffle=False, num_workers=workers, collate_fn=sum))
    told = f"{caught.value}\n" + "\n".join(getattr(caught.value, "__notes__", []))
    assert f"samples 0 ({ds.manifest.key(0)!r}), 1 (" in told
    assert "and 37 more" in told


# -- skip and replace --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_bad_samples_are_left_out_or_replaced_once_and_a_replay_repeats_it(
    make: Make,
    bad: tuple[str, ...],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    workers: int,
    on_error: str,
) -> None:
    ds = make(Decode(bad))
    good = sorted({ds.manifest.key(row) for row in range(SAMPLES)} - set(bad))
    made = loader(ds, on_error=on_error, errors_max=3, num_workers=workers, ledger=str(tmp_path / "ledger"))
    batches, second = list(made), list(made)
    assert sorted(flat(batches)) == sorted(flat(second)) == good
    sizes = [len(batch) for batch in batches]
    if on_error == "replace":
        assert sizes == [10] * 11 + [7]
    else:
        assert len(sizes) == 12
        assert sum(sizes) == SAMPLES - 3
    stats = made.stats()
    made.close()
    assert (stats["skipped"], stats["replaced"]) == ((6, 0) if on_error == "skip" else (0, 6))
    named = [record.getMessage() for record in caplog.records if "bad sample" in record.getMessage()]
    assert sorted(key for key in bad for line in named if repr(key) in line) == sorted(bad), "once, in two epochs"
    assert all("ValueError: no image" in line for line in named)
    replay = loader(ds, replay=str(tmp_path / "ledger"))
    assert (list(replay), list(replay)) == (batches, second)
    replay.close()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("drop_last", [False, True])
def test_bad_samples_are_not_read_again_after_a_resume(
    make: Make, bad: tuple[str, ...], tmp_path: Path, workers: int, drop_last: bool
) -> None:
    ds = make(Decode(bad))
    seen: Counter[str] = Counter()
    ledger = str(tmp_path / "ledger")
    for until in (4, 5, None):
        reading = loader(
            ds, on_error="replace", errors_max=3, num_workers=workers, ledger=ledger, drop_last=drop_last, seed=6
        )
        if until != 4:
            reading.load_state_dict(state)  # noqa: F821 - of the loader before
        batches = list(itertools.islice(reading, until))
        assert all(len(batch) == 10 for batch in (batches if drop_last else batches[:-1]))
        seen.update(flat(batches))
        state = reading.state_dict()
        reading.close()
    assert state["epoch"] == 1
    assert len(seen) == SAMPLES - 3
    assert seen.total() == (SAMPLES if drop_last else SAMPLES - 3), "with drop_last good ones are repeated"
    replay = loader(ds, replay=ledger, drop_last=drop_last, seed=6)
    assert Counter(flat(replay)) == seen
    replay.close()


def test_all_ranks_have_as_many_whole_batches_whoever_has_the_bad_samples(make: Make, bad: tuple[str, ...]) -> None:
    ds = make(Decode(bad))
    both: Counter[str] = Counter()
    states = []
    for rank in range(2):
        reading = loader(ds, on_error="replace", errors_max=3, rank=rank, world_size=2, seed=1)
        batches = list(itertools.islice(reading, 4))
        states.append(reading.state_dict())
        reading.close()
        rest = loader(ds, on_error="replace", errors_max=3, rank=rank, world_size=2, seed=1)
        rest.load_state_dict(states[-1])
        batches += read(rest)
        assert [len(batch) for batch in batches] == [10] * 6
        both.update(flat(batches))
    assert len(both) == SAMPLES - 3
    assert both.total() == SAMPLES
    merged = loader(ds, on_error="replace", errors_max=3, seed=1)
    merged.load_state_dict(merge_states(states))
    assert len(flat(read(merged))) <= SAMPLES - 80, "in another world size nothing is owed"


@pytest.mark.parametrize("shuffle", [True, "block"])
def test_ranks_that_replaced_samples_resume_with_as_many_whole_batches(make: Make, shuffle: bool | str) -> None:
    """What took the place of bad samples is missing at the end, where ``drop_last`` has left some out."""
    batch, world_size, early = 11, 2, 2
    first = DataLoader(make(fields=["__key__"]), batch, shuffle=shuffle, rank=0, world_size=world_size)
    bad = (next(iter(first))["__key__"][0],)
    first.close()
    ds = make(Decode(bad), fields=["__key__"])
    more = {"shuffle": shuffle, "on_error": "replace", "world_size": world_size, "drop_last": True}
    before, states = Counter[Any](), []
    for rank in range(world_size):
        made = DataLoader(ds, batch, rank=rank, substitute=False, **more)
        batches = iter(made)
        before.update(flat([next(batches) for _ in range(early)]))
        states.append(made.state_dict())
        made.close()
    assert states[0]["owed"] == 1
    merged = merge_states(states)
    for rank in range(world_size):
        made = DataLoader(ds, batch, rank=rank, substitute=False, **more)
        made.load_state_dict(merged)
        after = list(made)
        assert [len(each) for each in after] == [batch] * (len(made) - early)
        before.update(flat(after))
        made.close()
    assert before.most_common(1)[0][1] == 1


@pytest.mark.parametrize(("world_size", "drop_last"), [(2, False), (2, True), (1, True)])
def test_batches_that_only_repeat_good_samples_are_handed_out_and_replayed(
    make: Make, own: Files, tmp_path: Path, world_size: int, drop_last: bool
) -> None:
    """Half of the samples are bad, so the last batches of a rank have nothing else."""
    ds = make(
        Decode(tuple(own.opened().key(row) for row in range(0, SAMPLES, 2))), fields=["image", "label", "__key__"]
    )
    more = {"world_size": world_size, "drop_last": drop_last}
    for rank in range(world_size):
        ledger = str(tmp_path / f"ledger-{world_size}-{drop_last}")
        made = loader(ds, 5, on_error="replace", errors_max=SAMPLES, rank=rank, ledger=ledger, **more)
        batches = read(made)
        assert {len(batch) for batch in batches} == {5}
        assert len(batches) == SAMPLES // world_size // 5
        assert read(loader(ds, 5, rank=rank, replay=ledger, **more)) == batches


def test_what_is_random_in_a_replacement_follows_from_its_sample(make: Make, bad: tuple[str, ...]) -> None:
    def draw(sample: dict[str, Any]) -> Any:
        return Decode(bad)(sample), float(torch.rand(()))

    found = [
        dict(flat(read(loader(make(draw), size, on_error="replace", errors_max=3, num_workers=workers))))
        for size, workers in ((10, 0), (7, 1))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("decoded", [True, False], ids=["transform", "columns"])
def test_samples_that_the_origin_lost_are_replaced(tmp_path: Path, make: Make, workers: int, decoded: bool) -> None:
    own = make_files(tmp_path, random_files(60, seed=5, low=100, high=2000), name="lost")
    manifest = own.opened()
    gone, changed = manifest.key(7), manifest.key(31)
    (own.folder / gone).unlink()
    (own.folder / changed).write_bytes(b"other bytes")
    ds = make(Decode(()) if decoded else None, manifest=own.manifest)
    collate = {} if decoded else {"collate_fn": None}
    reading = loader(ds, on_error="replace", errors_max=2, num_workers=workers, **collate)
    batches = list(reading)
    keys = flat(batches if decoded else [batch["__key__"] for batch in batches])
    assert sorted(keys) == sorted({manifest.key(row) for row in range(60)} - {gone, changed})
    assert reading.stats()["replaced"] == 2
    reading.close()
    with pytest.raises(Changed):
        read(loader(ds, **collate))


def test_more_bad_samples_than_are_tolerated_are_an_error_that_names_them_all(make: Make, bad: tuple[str, ...]) -> None:
    ds = make(Decode(bad))
    for on_error, errors_max, tolerated in (("skip", 2, 2), ("replace", 0.01, 1), ("replace", None, 1), ("skip", 0, 0)):
        with pytest.raises(RuntimeError, match=rf"errors_max={tolerated}: {tolerated + 1} samples") as caught:
            read(loader(ds, 1, on_error=on_error, errors_max=errors_max))
        assert sum(f"({key!r}): ValueError: no image" in str(caught.value) for key in bad) == tolerated + 1
    many = loader(make(Decode(tuple(ds.manifest.key(row) for row in range(SAMPLES)))), on_error="skip", errors_max=500)
    assert read(many) == [], "no batch is empty"


def test_what_is_no_fault_of_a_sample_is_raised_whatever_on_error_says(make: Make) -> None:
    assert is_bad_sample(ValueError("x"))
    assert is_bad_sample(Changed("url", "vanished"))
    for error in (MemoryError(), torch.OutOfMemoryError(), Unavailable("origin", "away"), KeyboardInterrupt()):
        assert not is_bad_sample(error)

    def fail(sample: Any) -> Any:
        raise MemoryError

    with pytest.raises(MemoryError):
        read(loader(make(fail), on_error="skip", errors_max=500))


def test_wrong_arguments_are_refused(make: Make) -> None:
    ds = make(fields=["__key__"])
    for on_error in ("Skip", "ignore", None, True):
        with pytest.raises(ValueError, match=r"^on_error="):
            loader(ds, on_error=on_error)
    for errors_max in (-1, 1.5, 0.0, True, "3", float("nan")):
        with pytest.raises(ValueError, match=r"^errors_max="):
            loader(ds, on_error="skip", errors_max=errors_max)
    with pytest.raises(ValueError, match=r"^errors_max: with on_error='raise'"):
        loader(ds, errors_max=3)
    assert ErrorPolicy.parsed("skip", np.int64(3)).most(10**6) == 3
    assert ErrorPolicy.parsed("skip", None).most(10**6) == 1000
    assert ErrorPolicy.parsed("skip", 0.5).most(7) == 3
    assert ErrorPolicy.parsed("skip", None).most(5) == 1


# -- what a ledger says ------------------------------------------------------------------------------------------------


@given(st.data())
def test_any_amended_batch_survives_an_encoding_even_if_later_ones_were_drawn_before(data: st.DataObject) -> None:
    shards = np.array(data.draw(st.lists(st.integers(0, 3), min_size=12, max_size=40)), np.int64)
    batch_size = data.draw(st.integers(1, 4))
    drawn, order = [], Order(shards, 4)
    for _ in range(2):  # the second is drawn before the first is amended
        entries = order.plain(batch_size)
        drawn.append((entries, encode_batch(order, entries, batch_size)))
        order.take(entries)
    added, entries_of = [], drawn[0][0].tolist()
    for _ in range(data.draw(st.integers(0, 3))):
        if data.draw(st.booleans()):
            added.append((True, data.draw(st.integers(0, 1000))))
            entries_of.append(-1)
        else:
            entry, shard = order.take_last()
            added.append((False, shard))
            entries_of.append(entry)
    failed = tuple(sorted(data.draw(st.sets(st.integers(0, len(entries_of) - 1)))))
    encoded = encode_amended(drawn[0][1], Amendment(tuple(added), failed), batch_size)
    was_skipped = data.draw(st.booleans())
    again = Order(shards, 4)
    found = decode_and_take(again, skipped(encoded) if was_skipped else encoded, batch_size)
    assert found.was_skipped == was_skipped
    kept = [at for at in range(len(entries_of)) if at not in failed]
    assert found.entries.tolist() == [entries_of[at] for at in kept if entries_of[at] >= 0]
    assert found.failed.tolist() == [entries_of[at] for at in failed if entries_of[at] >= 0]
    values = [None] * len(drawn[0][0]) + [value for _, value in added]
    assert found.repeated.tolist() == [values[at] for at in kept if entries_of[at] < 0]
    assert decode_and_take(again, drawn[1][1], batch_size).entries.tolist() == drawn[1][0].tolist()
    assert (again.left == order.left).all()


@given(st.binary(min_size=1, max_size=24))
def test_any_bytes_are_an_amended_batch_or_are_refused(encoded: bytes) -> None:
    marked = bytes([(2 + 1) << 2]) + encoded
    order = Order(np.array([0, 1, 0, 1, 2], np.int64), 3)
    before = len(order)
    try:
        found = decode_and_take(order, marked, 2)
    except ValueError:
        return
    assert before - len(order) == len(found.entries) + len(found.failed)


def test_a_bad_sample_is_sent_by_a_worker_whatever_its_exception_is() -> None:
    from quiver_client.failure import Named
    from quiver_client.loader.bad_samples import BadSample

    sample = BadSample.of(3, Named(7, "a.png", "m.quiver"), TwoArguments("no image", 3))
    assert str(pickle.loads(pickle.dumps(sample))) == "7 ('a.png'): TwoArguments: no image"
    assert logging.getLogger("quiver_client").level <= logging.WARNING
