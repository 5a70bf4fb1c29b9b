"""Joined datasets: fields of several datasets about the same samples, matched by key and read side by side."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.utils.data import Subset

from quiver.peer import PeerClient
from quiver_client import DataLoader, Dataset
from quiver_client.joined import matched
from quiver_client.loader.epoch import ShardLayout
from quiver_client.rack.needs import RackNeeds
from tests.support.daemon import Daemon
from tests.support.people import make_people

Make = Callable[..., Dataset]
IMAGES, SOUNDS = 120, 100
BOTH = 90  # ids 30 to 119


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Images with ids 0 to 119, and sounds with ids 30 to 129, both descending. Tests must not change them."""
    folder = tmp_path_factory.mktemp("joined")
    images = make_people(folder, IMAGES, name="images", seed=3)
    return images, make_people(folder, SOUNDS, name="sounds", seed=4, column="sound", low_id=30)


@pytest.fixture
def images(manifests: tuple[Path, Path], dataset: Make, tmp_path: Path) -> Dataset:
    return dataset(manifests[0], f"file://{tmp_path}/cache?capacity=1GiB")


@pytest.fixture
def sounds(manifests: tuple[Path, Path], dataset: Make, tmp_path: Path) -> Dataset:
    return dataset(manifests[1], f"file://{tmp_path}/cache?capacity=1GiB", fields=["sound", "id"])


def expected(images: Dataset, sounds: Dataset) -> list[dict[str, Any]]:
    by_id = {sample["id"]: sample for sample in sounds}
    return [sample | {"sound": by_id[sample["id"]]["sound"]} for sample in images if sample["id"] in by_id]


def test_a_join_has_the_fields_of_all_for_the_samples_that_all_have(
    images: Dataset, sounds: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    both = Dataset.join(images, sounds, on="id")
    assert list(both) == expected(images, sounds)
    assert len(both) == BOTH
    assert both.fields == ("image", "label", "user", "id", "sound")
    assert list(both.features) == list(both.fields)
    assert (
        "30 of 120 samples of dataset 1 (29, 28, 27, …); 10 of 100 samples of dataset 2 (129, 128, 127, …)"
        in caplog.text
    )
    with pytest.raises(ValueError, match="30 of 120 samples of dataset 1"):
        Dataset.join(images, sounds, on="id", how="strict")


def test_a_complete_join_says_nothing(images: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "quiver_client"):
        again = Dataset.join(images.select(range(0, IMAGES, 2)), images[::2], suffixes=("", "_2"), how="strict")
    assert not caplog.text
    assert list(again[3]) == ["image", "label", "user", "id", "image_2", "label_2", "user_2", "id_2"]
    assert again[3]["image"] == again[3]["image_2"] == images[6]["image"]


def test_a_join_by_key_takes_the_key_from_the_first(manifests: Any, dataset: Make) -> None:
    images = dataset(manifests[0], fields=["image", "__key__"])
    labels = dataset(manifests[0], fields=["label", "__key__"])[::-1]
    both = Dataset.join(images, labels)
    assert both.fields == ("image", "__key__", "label")
    assert [sample["label"] for sample in both] == [label % 4 for label in range(IMAGES)]


def test_parts_of_joins_and_joins_of_parts_are_the_same(images: Dataset, sounds: Dataset) -> None:
    whole = expected(images, sounds)
    both = Dataset.join(images, sounds, on="id")
    assert list(both[10:20]) == whole[10:20]
    assert list(both.select(pc.field("label") == 3)) == [sample for sample in whole if sample["label"] == 3]
    first, second = both.split(0.5, 0.5, by="user")
    assert not {sample["user"] for sample in first} & {sample["user"] for sample in second}
    assert list(both[:3] + images[:2]) == [*whole[:3], images[0], images[1]]
    early = Dataset.join(Subset(images, range(40)), sounds, on="id")
    assert early.identity == both[:40].identity != both.identity
    again = pickle.loads(pickle.dumps(both[5:8]))
    assert list(again) == whole[5:8]
    again.close()


def test_transforms_of_the_parts_come_before_that_of_the_join(manifests: Any, dataset: Make) -> None:
    def named(sample: dict[str, Any]) -> dict[str, Any]:
        return {"bytes": len(sample["image"]), "id": sample["id"]}

    images = dataset(manifests[0], transform=named, fields=["image", "id"])
    sounds = dataset(manifests[1], fields=["sound"])
    assert list(Dataset.join(images, sounds, on="id")[0]) == ["bytes", "id", "sound"]
    joined = Dataset.join(images, sounds, on="id", transform=lambda sample: (sample["bytes"], len(sample["sound"])))
    assert joined[0] == (5000, 5000)
    assert joined.__getitems__([1, 2]) == [(5000, 5000)] * 2
    assert Dataset.join(images, sounds, on="id", fields=["sound"])[0].keys() == {"sound"}
    with pytest.raises(TypeError, match="must return a dictionary"):
        Dataset.join(dataset(manifests[0], transform=len), sounds, on="id")[0]
    with pytest.raises(ValueError, match="'sound' is a field of two parts"):
        Dataset.join(dataset(manifests[0], transform=lambda sample: {"sound": 1}), sounds, on="id")[0]


def test_fields_that_were_not_chosen_are_not_read(manifests: Any, dataset: Make, tmp_path: Path) -> None:
    cache = f"file://{tmp_path}/cache?capacity=1GiB"
    images, sounds = (dataset(manifest, cache) for manifest in manifests)
    both = Dataset.join(images, sounds, on="id", suffixes=("", "_2"), fields=["sound", "label"])
    assert list(both[0]) == ["label", "sound"]
    assert both.parts[0].stats()["samples"] == 0
    assert both.parts[1].stats()["samples"] == 1
    assert [leaf.manifest for leaf in both.placement().leaves] == [sounds.manifest]  # no needs of the others


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on": "nothing"}, "on: there is no field 'nothing'.*dataset 1"),
        ({"on": "sound"}, r"there is no field 'sound'.*\(in dataset 1\)"),
        ({"on": "image"}, "'image' holds bytes"),
        (
            {"on": "label", "suffixes": ("", "_2")},
            r"116 samples of dataset 1 have a 'label' that another one has \(0, 1, 2, …\)",
        ),
        ({"on": "id", "how": "left"}, "how='left': choose inner or strict"),
        ({"on": "id", "fields": ["nothing"]}, "give a list of names out of image, label, user, id, sound"),
        ({"on": "id", "suffixes": ("",)}, "give one for each of 2"),
    ],
)
def test_a_join_that_makes_no_sense_is_refused(
    images: Dataset, sounds: Dataset, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Dataset.join(images, sounds, **arguments)


def test_a_join_of_which_no_sample_is_in_all_is_refused_with_keys_of_each(images: Dataset, sounds: Dataset) -> None:
    with pytest.raises(ValueError, match=r"dataset 1 \(119, .*dataset 2 \(79, .*No sample is in all"):
        Dataset.join(images[:10], sounds[50:].select(range(20)), on="id")


def test_field_names_that_collide_are_refused_unless_suffixes_tell_them_apart(images: Dataset) -> None:
    with pytest.raises(ValueError, match=r"field 'image' is in several datasets; .* suffixes="):
        Dataset.join(images, images)
    with pytest.raises(ValueError, match="two fields would be named"):
        Dataset.join(images, images, suffixes=("", ""))
    with pytest.raises(ValueError, match="at least two datasets"):
        Dataset.join(images)


@settings(deadline=None)
@given(some.lists(some.lists(some.integers(0, 30), unique=True, max_size=20), min_size=2, max_size=4))
def test_keys_are_matched_as_sets_are_in_the_order_of_the_first(keys: list[list[int]]) -> None:
    common = set.intersection(*map(set, keys))
    arrays = [pa.array(each, pa.int64()) for each in keys]
    if not common and any(keys):
        with pytest.raises(ValueError, match="not in every dataset"):
            matched(arrays, "id", strict=False)
        return
    rows = matched(arrays, "id", strict=False)
    for each, own in zip(keys, rows, strict=True):
        assert [each[row] for row in own] == [key for key in keys[0] if key in common]


def test_keys_of_other_types_are_compared_where_they_can_be() -> None:
    small, large = pa.array([3, 1], pa.int8()), pa.array([1, 2, 3], pa.int64())
    assert [rows.tolist() for rows in matched([small, large[:1].take([0]), large], "id", strict=False)] == [
        [1],
        [0],
        [0],
    ]
    with pytest.raises(ValueError, match=r"cannot be compared: int64, string"):
        matched([large, pa.array(["1"])], "id", strict=False)
    with pytest.raises(ValueError, match="1 of 2 samples of dataset 1"):  # a sample without a value matches nothing
        matched([pa.array([1, None]), pa.array([1, None])], "id", strict=True)


# -- through the loader ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_reads_a_join_each_sample_once(images: Dataset, sounds: Dataset, workers: int) -> None:
    both = Dataset.join(images, sounds, on="id")
    truth = {sample["id"]: sample for sample in expected(images, sounds)}
    loader = DataLoader(both, 16, shuffle=True, num_workers=workers)
    got = []
    for batch in loader:
        got += batch["id"].tolist()
        assert batch["image"] == [truth[id_]["image"] for id_ in batch["id"].tolist()]
        assert batch["sound"] == [truth[id_]["sound"] for id_ in batch["id"].tolist()]
    assert sorted(got) == sorted(truth)
    loader.close()
    stock = torch.utils.data.DataLoader(both, batch_size=16, num_workers=workers, collate_fn=list)
    assert [sample for batch in stock for sample in batch] == expected(images, sounds)


def test_a_sample_counts_as_resident_by_the_part_with_most_bytes(images: Dataset, sounds: Dataset) -> None:
    small = sounds[:40]
    both = Dataset.join(small, images, on="id")
    placement = both.placement()
    main = placement.leaves[int(np.searchsorted(placement.firsts, placement.rows[0], "right")) - 1]
    assert main.manifest in (images.manifest, sounds.manifest)
    layout = ShardLayout.of(placement)
    shards = images.manifest.shard_count + sounds.manifest.shard_count
    assert len(layout.counts) == shards
    assert layout.counts.sum() == IMAGES + SOUNDS  # of whole shards
    assert layout.beside_of(np.arange(len(both))).sum() == len(both)
    assert layout.bytes(np.arange(len(both))) == pytest.approx(2 * len(both) * 5000, rel=0.05)


@pytest.fixture(scope="module")
def daemon(manifests: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon") / "data", origins=[manifests[0].parent]) as daemon:
        yield daemon


@pytest.mark.usefixtures("patient_reads")
def test_a_joined_batch_is_one_request_per_part_and_the_needs_of_all_parts_are_reported(
    manifests: Any, dataset: Make, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = dataset(manifests[0], daemon.url)
    sounds = dataset(manifests[1], daemon.url, fields=["sound"])
    both = Dataset.join(images, sounds, on="id")
    told: dict[Any, list[Any]] = {}
    names: set[bytes] = set()
    report = RackNeeds.report

    def remembered(self: RackNeeds, each: Any, *, leaving: bool = False) -> Any:
        told.setdefault(self._manifest.digest, []).append(each.left)
        names.add(each.consumer)
        return report(self, each, leaving=leaving)

    monkeypatch.setattr(RackNeeds, "report", remembered)
    loader = DataLoader(both, 30, shuffle=True)
    assert sum(len(batch["id"]) for batch in loader) == BOTH
    loader.close()
    assert len(names) == 2
    for data in (images, sounds):
        lefts = told[data.manifest.digest]
        rows = np.flatnonzero(np.isin(data.scalars["id"].to_numpy(), np.arange(30, 120)))
        tables = data.manifest.tables
        shards = np.searchsorted(tables.firsts, tables.blob_of[rows], "right") - 1
        assert set(np.flatnonzero(lefts[0])) == set(shards.tolist())

    requests = []
    read = PeerClient.read

    def counted(self: PeerClient, *arguments: Any, **named: Any) -> Any:
        requests.append(1)
        return read(self, *arguments, **named)

    monkeypatch.setattr(PeerClient, "read", counted)
    list(torch.utils.data.DataLoader(both, batch_size=30, collate_fn=list))
    assert len(requests) == 2 * BOTH / 30
