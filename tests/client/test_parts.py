"""Parts of datasets: selections, splits, slices, torch's ``Subset`` and ``ConcatDataset``, and what the loader makes of
them: batched reads, and needs of only those shards that still matter."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
import torch.utils.data
from torch.utils.data import ConcatDataset, Subset, random_split

from quiver.peer import PeerClient
from quiver_client import BatchSampler, Concatenated, DataLoader, Dataset
from quiver_client import selection as selection_module
from quiver_client.rack.needs import RackNeeds
from quiver_client.resolution import resolved
from tests.support.daemon import Daemon
from tests.support.data import Files
from tests.support.people import make_people

Make = Callable[..., Dataset]
SAMPLES = 120


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two datasets with the same fields. Tests must not change them."""
    folder = tmp_path_factory.mktemp("people")
    return make_people(folder), make_people(folder, 60, name="more", seed=1)


@pytest.fixture(scope="module")
def daemon(manifests: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon") / "data", origins=[manifests[0].parent]) as daemon:
        yield daemon


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return f"file://{tmp_path}/cache?capacity=1GiB"


@pytest.fixture
def people(manifests: tuple[Path, Path], dataset: Make, cache: str) -> Dataset:
    return dataset(manifests[0], cache)


@pytest.fixture
def more(manifests: tuple[Path, Path], dataset: Make, cache: str) -> Dataset:
    return dataset(manifests[1], cache)


def ids(samples: Any) -> list[int]:
    return [sample["id"] for sample in samples]


def shards_of(data: Dataset) -> set[int]:
    tables = data.manifest.tables
    rows = np.arange(len(data.manifest)) if data.rows is None else data.rows
    return set((np.searchsorted(tables.firsts, tables.blob_of[rows], "right") - 1).tolist())


# -- a part is a dataset -----------------------------------------------------------------------------------------------


def test_a_selection_is_the_dataset_of_its_rows(people: Dataset) -> None:
    whole = list(people)
    part = people.select([7, 3, 7, -1])
    assert len(part) == 4
    assert list(part) == part.__getitems__([0, 1, 2, 3]) == [whole[7], whole[3], whole[7], whole[119]]
    assert part[-1] == whole[119]
    assert list(reversed(part)) == list(reversed(list(part)))
    with pytest.raises(IndexError, match="out of range for 4 samples"):
        part[4]
    assert part.rows is not None
    assert part.rows.tolist() == [7, 3, 7, 119]
    assert part.columns([1, 2])["id"].tolist() == ids([whole[3], whole[7]])
    assert part.manifest is people.manifest


def test_a_selection_of_a_selection_counts_rows_of_the_first(people: Dataset) -> None:
    of_label = people.select(pc.field("label") == 2)
    assert ids(of_label.select([1, -1])) == ids(people.select([6, 118]))
    again = of_label.select(pc.field("user") == 0)
    assert all(sample["label"] == 2 and sample["user"] == 0 for sample in again)
    both = people.select((pc.field("label") == 2) & (pc.field("user") == 0))
    assert again.identity == both.identity
    assert ids(people[10:20][2:4]) == ids(people[12:14])
    assert ids(people[::-1]) == ids(reversed(people))


def test_an_expression_may_be_over_the_key_and_over_fields_that_are_not_read(manifests: Any, dataset: Make) -> None:
    data = dataset(manifests[0], fields=["image"])
    assert list(data.select(pc.field("label") == 1)[0]) == ["image"]
    key = data.manifest.key(5)
    assert data.select(pc.field("__key__") == key)[0] == data[5]


def test_all_rows_in_order_are_the_dataset_itself(people: Dataset) -> None:
    for whole in (people[:], people.select(np.ones(SAMPLES, bool)), people.select(range(SAMPLES))):
        assert whole.rows is None
        assert whole.identity == people.identity == str(people.manifest.digest)
    assert people[::-1].identity != people.identity


def test_a_split_by_user_keeps_each_user_together(people: Dataset) -> None:
    train, valid = people.split(0.7, 0.3, seed=1, by="user")
    assert sorted(ids(train) + ids(valid)) == sorted(ids(people))
    users = [{sample["user"] for sample in part} for part in (train, valid)]
    assert not users[0] & users[1]
    assert 0.5 < len(train) / SAMPLES < 0.9
    for one, other in zip((train, valid), people.split(0.7, 0.3, seed=1, by="user"), strict=True):
        assert one.identity == other.identity
    assert [len({sample["user"] for sample in part}) for part in people.split(0.9999, 0.0001, by="user")] == [8, 1]
    with pytest.raises(ValueError, match=r"part of 0\.2 of 120 samples grouped by 'label' would be empty"):
        people.split(*[0.2] * 5, by="label")
    with pytest.raises(ValueError, match=r"part of 0\.0001 of 120 samples would be empty"):
        people.split(0.9999, 0.0001)
    with pytest.raises(ValueError, match="by: there is no field 'nobody'; there are label, user, id, __key__"):
        people.split(0.5, by="nobody")
    with pytest.raises(ValueError, match="by: 'image' holds bytes"):
        people.split(0.5, by="image")


def test_repr_says_samples_shards_bytes_and_cache(people: Dataset, more: Dataset) -> None:
    assert "120 samples, 23 shards, 586 KiB, cache=EmbeddedCache(" in repr(people)
    assert "1 of 120 samples, 1 of 23 shards, 4.88 KiB, cache=" in repr(people[3:4])
    assert repr(people + more).startswith("Concatenated(180 samples of [Dataset(")


def test_features_are_the_types_of_the_fields(people: Dataset, files: Files, dataset: Make) -> None:
    assert {name: each.dtype for name, each in people.features.items()} == {
        "image": "bytes",
        "label": "int32",
        "user": "int64",
        "id": "int64",
    }
    named = dataset(files.manifest, fields=["__key__", "label"]).features
    assert named["__key__"].dtype == "string"
    assert named["label"].classes == ("a", "b", "c")


def test_a_part_shares_the_session_of_the_whole_until_the_last_of_them_is_closed(people: Dataset) -> None:
    part = people.select([1, 2])
    first = people[0]
    assert part[0] == people[1]
    assert part._open() is people._open()
    session = people._open()
    people.close()
    assert part._open() is session
    assert part.stats()["samples"] == 3
    del part
    gc.collect()
    assert people[0] == first
    assert people._open() is not session


def test_pickled_parts_read_the_same(people: Dataset, more: Dataset) -> None:
    for part in (people[5:50:3], people[20:30] + more, (people + more)[100:140]):
        again = pickle.loads(pickle.dumps(part))
        assert ids(again) == ids(part)
        assert again.identity == part.identity
        again.close()


def test_a_spawned_worker_maps_the_rows_of_its_parent(people: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection_module, "SHARED_BYTES_MIN", 1)
    part = people.select(np.random.default_rng(0).permutation(SAMPLES)[:80])
    context = multiprocessing.get_context("spawn")
    loader = DataLoader(part + people[:2], 16, num_workers=1, multiprocessing_context=context)
    assert [id_ for batch in loader for id_ in batch["id"].tolist()] == ids(part) + ids(people[:2])
    loader.close()


def test_a_transform_that_fails_names_the_sample_as_the_user_counts(manifests: Any, dataset: Make, cache: str) -> None:
    def broken(sample: Any) -> Any:
        raise KeyError("absent")

    data = dataset(manifests[0], cache, transform=broken)
    part = data.select([50, 60])
    key = data.manifest.key(60)
    with pytest.raises(KeyError) as raised:
        part[1]
    assert any(f"1 ({key!r})" in note for note in raised.value.__notes__)
    with pytest.raises(KeyError) as raised:
        (data + part)[SAMPLES + 1]
    assert any(repr(key) in note for note in raised.value.__notes__)


# -- concatenations ----------------------------------------------------------------------------------------------------


def test_a_concatenation_counts_its_parts_one_after_another(people: Dataset, more: Dataset) -> None:
    whole = people + more + people[:5]
    assert isinstance(whole, Concatenated)
    expected = [*people, *more, *people[:5]]
    assert len(whole) == 185
    assert list(whole) == expected
    assert whole.__getitems__([184, 0, 130, -1]) == [expected[184], expected[0], expected[130], expected[184]]
    assert ids(whole[::40]) == ids(expected[::40])
    assert ids(whole.select(pc.field("label") == 3)) == [sample["id"] for sample in expected if sample["label"] == 3]
    parts = whole.split(0.5, 0.5)
    assert sorted(ids(parts[0]) + ids(parts[1])) == sorted(ids(expected))
    assert whole.columns([0, 150])["id"].tolist() == ids([expected[0], expected[150]])
    with pytest.raises(IndexError):
        whole[185]
    with pytest.raises(ValueError, match="at least one dataset"):
        Concatenated([])
    with pytest.raises(ValueError, match="no map-style dataset"):
        Concatenated([people, people.iterable()])


def test_a_concatenation_with_a_dataset_of_others_is_read_sample_by_sample_there(people: Dataset) -> None:
    mixed = Concatenated([people[:2], [10, 20]])  # type: ignore[list-item]
    assert list(mixed) == [people[0], people[1], 10, 20]
    with pytest.raises(ValueError, match=r"dataset: give a quiver_client.Dataset"):
        DataLoader(mixed, 2)


def test_parts_of_different_fields_are_refused_where_they_would_be_stacked(
    manifests: Any, dataset: Make, cache: str
) -> None:
    whole = dataset(manifests[0], cache, fields=["label", "id"]) + dataset(manifests[1], cache, fields=["id"])
    assert list(whole[119:121]) == [{"label": 3, "id": 0}, {"id": 59}]
    with pytest.raises(KeyError, match="label"):
        list(DataLoader(whole, 180))


# -- through the loader ------------------------------------------------------------------------------------------------


def wrappers(people: Dataset, more: Dataset) -> list[torch.utils.data.Dataset[Any]]:
    return [
        people.select(pc.field("label") == 1),
        Subset(people, [5, 3, 9, 3]),
        random_split(people, [0.3, 0.7], torch.Generator().manual_seed(0))[0],
        ConcatDataset([people, Subset(more, range(10, 40))]),
        Subset(ConcatDataset([people, people + more]), list(range(250, 100, -1))),
        random_split(people + more, [100, 80])[1],
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_reads_torchs_wrappers_each_sample_once(people: Dataset, more: Dataset, workers: int) -> None:
    for part in wrappers(people, more)[:: 1 if not workers else 4]:
        expected = [part[at] for at in range(len(part))]  # type: ignore[arg-type]
        loader = DataLoader(part, 16, shuffle=True, num_workers=workers)
        assert loader.dataset is part
        got = [id_ for batch in loader for id_ in batch["id"].tolist()]
        assert sorted(got) == sorted(ids(expected))
        loader.close()
        plain = DataLoader(part, 16, num_workers=workers, collate_fn=list)
        assert [sample for batch in plain for sample in batch] == expected
        plain.close()


def test_wrappers_of_one_content_have_one_identity(people: Dataset, more: Dataset) -> None:
    assert resolved(Subset(people, [5, 3])).identity == people.select([5, 3]).identity
    assert resolved(Subset(Subset(people, range(50)), [5, 3])).identity == people.select([5, 3]).identity
    assert resolved(ConcatDataset([people, more])).identity == (people + more).identity
    assert resolved(Subset(people + more, range(180))).identity == (people + more).identity
    assert (people + more).identity != (more + people).identity


class Marked(Subset[Any]):
    """What users write to give a part a transform of its own."""

    def __getitem__(self, index: Any) -> Any:
        return "marked", super().__getitem__(index)["id"]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Counted(ConcatDataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return "counted", super().__getitem__(index)["id"]


class CountedOurs(Concatenated):
    def __getitems__(self, indices: Any) -> list[Any]:
        return [("counted", sample["id"]) for sample in super().__getitems__(indices)]


class Own(Dataset):
    """A dataset whose samples depend on the number that they are asked by."""

    def __getitem__(self, index: Any) -> Any:
        return index, super().__getitem__(index)["id"]


def test_methods_that_a_subclass_overrides_are_called_for_every_sample(
    people: Dataset, more: Dataset, manifests: Any, cache: str
) -> None:
    own = Own(manifests[0], cache)
    for part in (
        Marked(people, [5, 90, 7]),
        Counted([people[:3], more[:3]]),
        CountedOurs([people[:3], more[:3]]),
        Subset(Marked(people, [5, 90, 7]), [2, 0]),
        Subset(own, [5, 90, 7]),
        Concatenated([Marked(people, [5, 90]), people[:2]]),
    ):
        expected = [part[at] for at in range(len(part))]
        loader = DataLoader(part, 4, shuffle=True, collate_fn=list)
        got = [sample for batch in loader for sample in batch]
        assert sorted(map(str, got)) == sorted(map(str, expected))
        loader.close()
    part = own.select(range(5, 8))
    assert [part[at] for at in range(3)] == [(at, own[5 + at][1]) for at in range(3)]
    own.close()


def test_a_wrapper_whose_indices_are_not_known_is_refused_with_what_to_write(people: Dataset) -> None:
    class Wrapper(torch.utils.data.Dataset[Any]):
        def __init__(self, dataset: Dataset) -> None:
            self.dataset = dataset

    with pytest.raises(ValueError, match=r"not Wrapper; .* Derive it from torch.utils.data.Subset"):
        DataLoader(Wrapper(people))
    with pytest.raises(ValueError, match="not IterableView; this loader decides the order"):
        DataLoader(people.iterable())
    with pytest.raises(ValueError, match=r"dataset: give a quiver_client.Dataset, or torch's Subset"):
        BatchSampler([1, 2, 3])  # type: ignore[arg-type]


def test_the_labels_of_a_part_are_watched(people: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(people[::2], 4, shuffle=True)  # labels 0 and 2
    with caplog.at_level(logging.WARNING, "quiver_client"):
        for _ in range(4):
            list(loader)
    assert "labels" not in caplog.text
    loader.close()


# -- with a daemon -----------------------------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """The reports of needs that this process makes: digests of manifests and reports."""
    made: list[tuple[Any, Any]] = []
    report = RackNeeds.report

    def remembered(self: RackNeeds, each: Any, *, leaving: bool = False) -> Any:
        if not leaving:
            made.append((self._manifest.digest, each))
        return report(self, each, leaving=leaving)

    monkeypatch.setattr(RackNeeds, "report", remembered)
    return made


def test_a_daemon_fetches_only_the_shards_that_a_selection_needs(
    manifests: Any, dataset: Make, told: Any, daemon: Daemon
) -> None:
    data = dataset(make_people(manifests[0].parent, name="unread", seed=9), daemon.url)  # nothing of it is resident
    part = data.select([3, 4, 50, 51, 52, 110])
    wanted = shards_of(part)
    assert 1 < len(wanted) < 6
    loader = DataLoader(part, 2, shuffle=True)
    assert sorted(id_ for batch in loader for id_ in batch["id"].tolist()) == sorted(ids(part))
    loader.close()
    resident = {path.name.split(".")[0] for path in daemon.files()}
    shards = {str(data.manifest.shard_digest(shard)): shard for shard in range(data.manifest.shard_count)}
    assert {shards[digest] for digest in resident & set(shards)} == wanted
    first = told[0][1].left
    assert set(np.flatnonzero(first).tolist()) == wanted
    assert first.max() < 255  # shares of whole shards


def test_two_parts_of_one_manifest_report_their_needs_under_names_of_their_own(
    manifests: Any, dataset: Make, daemon: Daemon, told: Any
) -> None:
    data = dataset(manifests[0], daemon.url)
    train, valid = data[:60], data[60:]
    loaders = [DataLoader(part, 8, shuffle=True, job="one") for part in (train, valid)]
    passes = [iter(loader) for loader in loaders]
    for each in passes:
        next(each)
    names = {}
    for _, report in told:
        names.setdefault(report.consumer, report.left)
    assert len(names) == 2
    needed = [set(np.flatnonzero(left).tolist()) for left in names.values()]
    assert sorted(map(sorted, needed)) == sorted([sorted(shards_of(train)), sorted(shards_of(valid))])
    for loader in loaders:
        loader.close()


def test_a_concatenation_of_two_manifests_reports_the_needs_of_each_under_one_name_per_manifest(
    manifests: Any, dataset: Make, daemon: Daemon, told: Any
) -> None:
    one, two = (dataset(manifest, daemon.url) for manifest in manifests)
    loader = DataLoader(one[:30] + two + one[90:], 8, shuffle=True)
    got = [id_ for batch in loader for id_ in batch["id"].tolist()]
    assert sorted(got) == sorted(ids(one[:30]) + ids(two) + ids(one[90:]))
    loader.close()
    by_manifest: dict[Any, set[bytes]] = {}
    for digest, report in told:
        by_manifest.setdefault(digest, set()).add(report.consumer)
    assert set(by_manifest) == {one.manifest.digest, two.manifest.digest}
    assert all(len(names) == 1 for names in by_manifest.values())
    assert len(set.union(*by_manifest.values())) == 2
    first = next(report for digest, report in told if digest == one.manifest.digest)
    assert set(np.flatnonzero(first.left).tolist()) == shards_of(one[:30]) | shards_of(one[90:])


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of ranges in each request of this process to a daemon."""
    made: list[int] = []
    read = PeerClient.read

    def counted(self: PeerClient, request: Any, *more: Any, **named: Any) -> Any:
        made.append(1)
        return read(self, request, *more, **named)

    monkeypatch.setattr(PeerClient, "read", counted)
    return made


@pytest.mark.usefixtures("patient_reads")
def test_a_batch_is_one_request_for_each_part_with_a_stock_loader_too(
    manifests: Any, dataset: Make, daemon: Daemon, requests: list[int]
) -> None:
    one, two = (dataset(manifest, daemon.url) for manifest in manifests)
    batch = 30
    for part, expected in (
        (one.select(range(0, SAMPLES, 2)), 2),
        (Subset(one, range(60)), 2),
        (Concatenated([one[:30], two[:30]]), 2),
        (Subset(one + two, [100, 170] * 15), 2),
        ((one + two)[100:130], 2),
    ):
        list(torch.utils.data.DataLoader(part, batch_size=batch, collate_fn=list))  # makes everything resident
        requests.clear()
        list(torch.utils.data.DataLoader(part, batch_size=batch, collate_fn=list))
        assert len(requests) == expected, part


# -- as a stream -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_gives_each_sample_once_over_workers_and_ranks(
    people: Dataset, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    def read(stream: Any) -> list[int]:
        loader = torch.utils.data.DataLoader(stream, batch_size=7, num_workers=workers)
        return [id_ for batch in loader for id_ in batch["id"].tolist()]

    stream = people[:50].iterable(shuffle=True, seed=3)
    assert isinstance(stream, torch.utils.data.IterableDataset)
    first = read(stream)
    assert sorted(first) == sorted(ids(people[:50]))
    assert read(stream) == first
    stream.set_epoch(1)
    assert sorted(read(stream)) == sorted(first)
    assert read(stream) != first
    assert ids(people[:50].iterable()) == ids(people[:50])
    monkeypatch.setenv("WORLD_SIZE", "3")
    got = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        assert len(stream) == len(read(stream))
        got += read(stream)
        assert len(people[:50].iterable(drop_last=True)) == 16
    assert sorted(got) == sorted(first)


def test_spawned_workers_read_the_share_of_their_rank(people: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """They inherit no process group, and there may be no variables that say which rank it is."""
    stream = people[:30].iterable()
    monkeypatch.setattr("quiver_client.iterable.rank_and_world_size", lambda *_: (1, 3))
    loader = torch.utils.data.DataLoader(stream, batch_size=5, num_workers=2, multiprocessing_context="spawn")
    got = [id_ for batch in loader for id_ in batch["id"].tolist()]
    assert sorted(got) == sorted(ids(people[10:20]))


def test_workers_that_persist_see_the_epoch_of_a_stream(people: Dataset) -> None:
    stream = people[:40].iterable(shuffle=True)
    loader = torch.utils.data.DataLoader(stream, batch_size=40, num_workers=1, persistent_workers=True)
    orders = []
    for epoch in (0, 1, 0):
        stream.set_epoch(epoch)
        orders.append(next(iter(loader))["id"].tolist())
    assert orders[0] == orders[2] != orders[1]
    del loader


@pytest.mark.filterwarnings("ignore")  # torchdata warns of what torch deprecated
def test_torchdatas_loader_resumes_a_stream_in_the_middle(people: Dataset) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

    def loader() -> Any:
        return StatefulDataLoader(people[:40].iterable(shuffle=True, seed=2), batch_size=8)

    whole = [batch["id"].tolist() for batch in loader()]
    assert len(whole) == 5
    first = loader()
    batches = iter(first)
    assert [next(batches)["id"].tolist() for _ in range(2)] == whole[:2]
    resumed = loader()
    resumed.load_state_dict(first.state_dict())
    assert [batch["id"].tolist() for batch in resumed] == whole[2:]
