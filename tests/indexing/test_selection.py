"""Which fields are indexed, which column names samples in Parquet, and which files a manifest may overwrite."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from quiver.errors import BadRequest, Misconfigured, QuiverError
from quiver.manifest import Manifest
from quiver_client import DataLoader, Dataset, index
from tests.indexing.support import read_back, write_tar, write_tree
from tests.indexing.test_parquet import write


def table(keys: Any, first: int = 0) -> pa.Table:
    count = len(keys)
    return pa.table(
        {
            "__key__": pa.array(keys),
            "jpg": pa.array([b"image %d" % at for at in range(first, first + count)]),
            "txt": pa.array([f"text {at}" for at in range(first, first + count)]),
            "cls": pa.array(range(first, first + count), pa.int64()),
        }
    )


def names(path: Path) -> list[str]:
    return [field.name for field in Manifest.open(path).header.fields]


@pytest.mark.parametrize(
    ("chosen", "wanted"),
    [
        ({"fields": ["jpg"]}, ["jpg"]),
        ({"fields": ["cls", "jpg"]}, ["jpg", "cls"]),
        ({"exclude": ["txt"]}, ["jpg", "cls"]),
        ({"fields": ["jpg", "txt"], "exclude": ["__key__"]}, ["jpg", "txt"]),
    ],
)
def test_the_fields_of_parquet_can_be_chosen(tmp_path: Path, chosen: Any, wanted: list[str]) -> None:
    path = write(tmp_path / "t.parquet", table(["a", "b"]))
    index(path, tmp_path / "m.quiver", **chosen)
    assert names(tmp_path / "m.quiver") == wanted


def test_the_fields_of_tars_can_be_chosen(tmp_path: Path) -> None:
    members = [(f"{at}.{end}", b"%d %s" % (at, end.encode())) for at in range(3) for end in ("jpg", "txt", "json")]
    write_tar(tmp_path / "t.tar", members)
    index(tmp_path / "t.tar", tmp_path / "m.quiver", fields=["jpg", "json"])
    assert names(tmp_path / "m.quiver") == ["jpg", "json"]
    index(tmp_path / "t.tar", tmp_path / "m.quiver", exclude=["jpg"])
    assert [set(sample) for sample in read_back(tmp_path / "m.quiver").values()] == [{"json", "txt"}] * 3


def test_labels_of_image_folders_can_be_excluded(tmp_path: Path) -> None:
    write_tree(tmp_path / "d", {"a/1.png": b"1", "b/2.png": b"2"})
    index(tmp_path / "d", tmp_path / "m.quiver", exclude=["label"])
    assert names(tmp_path / "m.quiver") == ["image"]


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({"fields": ["jgp"]}, "no field 'jgp'"),
        ({"exclude": ["nothing"]}, "no field 'nothing'"),
        ({"fields": ["jpg"], "exclude": ["jpg"]}, "both"),
        ({"fields": []}, "at least one"),
        ({"fields": ["cls"]}, "nothing to cache"),
    ],
)
def test_an_impossible_choice_is_refused(tmp_path: Path, chosen: Any, says: str) -> None:
    path = write(tmp_path / "t.parquet", table(["a", "b"]))
    with pytest.raises(QuiverError, match=says):
        index(path, tmp_path / "m.quiver", **chosen)
    assert not (tmp_path / "m.quiver").exists()


def test_a_key_column_of_parquet_names_the_samples(tmp_path: Path) -> None:
    for number, keys in enumerate((["x/1", "x/2"], ["y"])):
        write(tmp_path / "d" / f"{number}.parquet", table(keys, 2 * number))
    report = index(tmp_path / "d", tmp_path / "m.quiver")
    assert list(read_back(tmp_path / "m.quiver")) == ["x/1", "x/2", "y"]
    assert report.warnings == ()
    index(tmp_path / "d", tmp_path / "m.quiver", exclude=["__key__"])
    assert list(read_back(tmp_path / "m.quiver")) == [
        "0.parquet/000000000",
        "0.parquet/000000001",
        "1.parquet/000000000",
    ]


def test_keys_that_two_files_share_are_prefixed_by_the_files_names(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / "d" / f"{number}.parquet", table(["a"], number))
    index(tmp_path / "d", tmp_path / "m.quiver")
    assert list(read_back(tmp_path / "m.quiver")) == ["0.parquet/a", "1.parquet/a"]


@pytest.mark.parametrize(
    ("keys", "says"), [(["a", "b", "a"], "'a' more than once"), (["a", None, "b"], "row 1 has no")]
)
def test_invalid_keys_are_refused_and_the_error_says_what_to_do(tmp_path: Path, keys: Any, says: str) -> None:
    path = write(tmp_path / "t.parquet", table(keys))
    with pytest.raises(BadRequest, match=rf"{says}.*--exclude __key__"):
        index(path, tmp_path / "m.quiver")
    assert not (tmp_path / "m.quiver").exists()
    index(path, tmp_path / "m.quiver", exclude=["__key__"])


def test_a_file_that_is_not_a_manifest_is_never_overwritten(tmp_path: Path) -> None:
    write_tar(tmp_path / "t.tar", [("1.txt", b"one"), ("2.txt", b"two")])
    before = (tmp_path / "t.tar").read_bytes()
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "fifo")
    for name in ("t.tar", "empty", "fifo"):
        with pytest.raises(Misconfigured, match=name):
            index(tmp_path / "t.tar", tmp_path / name, force=True)
    assert (tmp_path / "t.tar").read_bytes() == before
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)


def test_a_manifest_is_overwritten_only_on_request_and_a_link_to_one_stays(tmp_path: Path) -> None:
    write_tree(tmp_path / "d", {"1": b"one"})
    index(tmp_path / "d", tmp_path / "m.quiver", force=False)
    first = (tmp_path / "m.quiver").read_bytes()
    (tmp_path / "link.quiver").symlink_to("m.quiver")
    write_tree(tmp_path / "d", {"2": b"two"})
    with pytest.raises(Misconfigured, match="--force"):
        index(tmp_path / "d", tmp_path / "m.quiver", force=False)
    assert (tmp_path / "m.quiver").read_bytes() == first
    index(tmp_path / "d", tmp_path / "link.quiver")
    assert (tmp_path / "link.quiver").is_symlink()
    assert len(Manifest.open(tmp_path / "m.quiver")) == 2


def test_several_local_files_are_one_source(tmp_path: Path) -> None:
    for number in range(3):
        write_tar(tmp_path / f"train-{number}.tar", [(f"{number}.txt", b"%d" % number)])
    files = [tmp_path / f"train-{number}.tar" for number in (0, 2)]
    index(files, tmp_path / "m.quiver")
    assert list(read_back(tmp_path / "m.quiver")) == ["0", "2"]
    for wrong in ([tmp_path, files[0]], [tmp_path / "absent.tar", files[0]], ["s3://b/1.tar", files[0]], []):
        with pytest.raises(QuiverError):
            index(wrong, tmp_path / "wrong.quiver")


@pytest.mark.parametrize(("count", "size"), [(400, 30_000), (2000, 10_000)])
def test_a_small_dataset_has_some_hundred_shards_unless_told_otherwise(tmp_path: Path, count: int, size: int) -> None:
    write_tree(tmp_path / "d", {f"{at:04d}": at.to_bytes(4, "little") * (size // 4) for at in range(count)})
    assert index(tmp_path / "d", tmp_path / "m.quiver").shards >= 200
    assert index(tmp_path / "d", tmp_path / "m.quiver", shard_bytes="32MiB").shards == 1


def test_a_base_decides_the_shard_size(tmp_path: Path) -> None:
    write_tree(tmp_path / "d", {f"{at:04d}": at.to_bytes(4, "little") * 5000 for at in range(100)})
    old = index(tmp_path / "d", tmp_path / "old.quiver", shard_bytes="256KiB")
    new = index(tmp_path / "d", tmp_path / "new.quiver", base=tmp_path / "old.quiver")
    assert (new.shard_bytes, new.reused_shards) == (256 << 10, old.shards)


def test_a_shard_has_space_for_a_row_group_as_far_as_32_mib_allow(tmp_path: Path) -> None:
    rows = pa.array([at.to_bytes(4, "little") * 25_000 for at in range(64)])
    path = write(tmp_path / "t.parquet", pa.table({"data": rows}), row_group_size=16)
    report = index(path, tmp_path / "m.quiver")
    assert report.shards == 4, "one per row group of 1.6 MB, which each shard of another size would read again"


@pytest.mark.parametrize(
    ("paths", "named"),
    [
        (["train/a/1.png", "val/a/2.png"], ["train", "val"]),
        (["train-000.tar", "train-001.tar", "test-000.tar"], ["test", "train"]),
        (["train-00000-of-00002.parquet", "validation-00000-of-00001.parquet"], ["train", "validation"]),
        (["Train/1.png", "Training/2.png"], None),
        (["a/1.png", "b/2.png"], None),
        (["train-0.bin", "test-0.bin"], None),
    ],
)
def test_indexing_warns_of_train_and_test_in_one_source(
    tmp_path: Path, paths: list[str], named: list[str] | None
) -> None:
    for number, path in enumerate(paths):
        if path.endswith(".tar"):
            write_tar(tmp_path / "d" / path, [(f"{number}.txt", b"%d" % number)])
        elif path.endswith(".parquet"):
            write(tmp_path / "d" / path, pa.table({"text": [f"text {number}"]}))
        else:
            write_tree(tmp_path / "d", {path: b"%d" % number})
    report = index(tmp_path / "d", tmp_path / "m.quiver")
    found = [notice for notice in report.warnings if "train and test" in notice.what]
    assert [sorted(notice.names) for notice in found] == ([named] if named else [])
    for notice in found:
        assert f"{tmp_path}/d/{named[0] if named else ''}" in notice.what


def test_a_missing_number_is_named_by_field_and_sample(tmp_path: Path) -> None:
    labels = pa.array([1, 2, None, 4], pa.int64())
    path = write(tmp_path / "t.parquet", pa.table({"data": [b"1", b"2", b"3", b"4"], "label": labels}))
    index(path, tmp_path / "m.quiver")
    dataset = Dataset(tmp_path / "m.quiver", cache=f"file://{tmp_path}/cache")
    assert dataset[2]["label"] is None
    with (
        contextlib.closing(DataLoader(dataset, batch_size=4)) as loader,
        pytest.raises(ValueError, match=r"field 'label' of sample 2 \('000000002'\)"),
    ):
        next(iter(loader))


def test_small_samples_of_tars_share_shards(tmp_path: Path) -> None:
    for number in range(4):
        members = [(f"{number}-{at:03d}.bin", bytes([number]) + at.to_bytes(4, "little") * 1250) for at in range(200)]
        write_tar(tmp_path / "d" / f"{number}.tar", members)
    assert 100 <= index(tmp_path / "d", tmp_path / "m.quiver").shards <= 500
