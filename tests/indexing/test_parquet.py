"""Parquet files and folders, plain and as Hugging Face writes them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quiver.errors import BadRequest
from quiver.manifest import Manifest
from quiver_client.indexing import index
from tests.indexing.support import read_back, warned, write_tree


def write(path: Path, table: pa.Table, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)
    return path


def images(count: int, first: int = 0) -> pa.Table:
    """A table as ``datasets`` writes it for an image column and a label with class names."""
    image = [{"bytes": os.urandom(100 + i), "path": f"{first + i}.png"} for i in range(count)]
    features = {
        "image": {"_type": "Image"},
        "label": {"names": ["cat", "dog"], "_type": "ClassLabel"},
    }
    schema = pa.schema(
        [("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("label", pa.int64())],
        {"huggingface": json.dumps({"info": {"features": features}})},
    )
    return pa.table({"image": image, "label": [i % 2 for i in range(count)]}, schema=schema)


def test_hugging_face_images_become_bytes_with_labels_and_class_names(tmp_path: Path) -> None:
    table = images(50)
    write(tmp_path / "t.parquet", table, row_group_size=7)
    report = index(tmp_path / "t.parquet", tmp_path / "m.quiver", shard_bytes="4KiB")
    assert read_back(tmp_path / "m.quiver") == {
        f"{i:09d}": {"image": row["image"]["bytes"], "label": row["label"]} for i, row in enumerate(table.to_pylist())
    }
    image, label = Manifest.open(tmp_path / "m.quiver").header.fields
    assert (image.name, image.type, image.column) == ("image", "bytes", "image.bytes")
    assert (label.type, label.classes) == ("int64", ("cat", "dog"))
    assert (report.format, report.layout, report.warnings) == ("parquet", "sequential", ())


def test_every_kind_of_column_is_a_field_or_is_named(tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": pa.array(["ä", "", None], pa.string()),
            "large": pa.array([b"1", None, b"333"], pa.large_binary()),
            "fixed": pa.array([b"aa", b"bb", b"cc"], pa.binary(2)),
            "category": pa.array(["x", "y", "x"]).dictionary_encode(),
            "a.b": pa.array([b"dot", b"", b"."], pa.binary()),
            "flag": pa.array([True, None, False]),
            "small": pa.array([-1, 2, None], pa.int8()),
            "big": pa.array([2**64 - 1, None, 0], pa.uint64()),
            "half": pa.array([0.5, None, 2], pa.float16()),
            "real": pa.array([0.1, None, 2], pa.float64()),
            "when": pa.array([0, 1, 2], pa.timestamp("s")),
            "many": pa.array([[1], [2], [3]], pa.list_(pa.int8())),
            "lists": pa.array([[["a"]], [["b"]], [["c"]]]),
            "__key__": pa.array([1, 2, 3]),
        }
    )
    write(tmp_path / "t.parquet", table)
    report = index(tmp_path / "t.parquet", tmp_path / "m.quiver")
    [names] = warned(report).values()
    assert [name.partition(":")[0] for name in names] == ["when", "lists", "__key__"]
    kept = table.drop_columns(["when", "lists", "__key__"]).to_pylist()
    for row in kept:
        row |= {name: row[name].encode() if row[name] is not None else None for name in ("text", "category")}
        row["many"] = bytes(row["many"])
    assert list(read_back(tmp_path / "m.quiver").values()) == kept


def test_a_folder_of_files_is_one_dataset_with_keys_by_file_and_row(tmp_path: Path) -> None:
    tables = [images(4), images(3, first=4)]
    for i, table in enumerate(tables):
        write(tmp_path / "d" / "train" / f"{i}.parquet", table)
    write_tree(tmp_path / "d", {"README.md": b"hello"})
    report = index(tmp_path / "d", tmp_path / "m.quiver")
    found = read_back(tmp_path / "m.quiver")
    assert list(found)[3:5] == ["train/0.parquet/000000003", "train/1.parquet/000000000"]
    assert [sample["label"] for sample in found.values()] == [0, 1, 0, 1, 0, 1, 0]
    assert warned(report) == {"left out, names do not end in .parquet": ["README.md"]}


def test_nulls_are_absent_and_a_path_without_bytes_is_an_error_that_names_the_row(tmp_path: Path) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows: list[Any] = [{"bytes": b"1", "path": None}, None, {"bytes": None, "path": None}, {"bytes": b"", "path": "x"}]
    write(tmp_path / "t.parquet", pa.table({"image": pa.array(rows, kind)}))
    index(tmp_path / "t.parquet", tmp_path / "m.quiver")
    assert [sample["image"] for sample in read_back(tmp_path / "m.quiver").values()] == [b"1", None, None, b""]
    write(tmp_path / "t.parquet", pa.table({"image": pa.array([*rows, {"bytes": None, "path": "x.png"}], kind)}))
    with pytest.raises(BadRequest, match=r"t.parquet: row 4 has a path in column image \('x.png'\) but no bytes"):
        index(tmp_path / "t.parquet", tmp_path / "m.quiver")


def test_row_groups_larger_than_a_batch_are_read_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "t.parquet", images(300))
    index(tmp_path / "t.parquet", tmp_path / "whole.quiver")
    monkeypatch.setattr("quiver_client.indexing.parquet.BATCH_BYTES", 2000)
    index(tmp_path / "t.parquet", tmp_path / "m.quiver")
    assert (tmp_path / "m.quiver").read_bytes() == (tmp_path / "whole.quiver").read_bytes()


def test_a_failure_of_indexing_is_explained(tmp_path: Path) -> None:
    write(tmp_path / "t.parquet", pa.table({"n": [1, 2]}))
    with pytest.raises(BadRequest, match=r"no column of bytes, text or lists of numbers.*n: int64"):
        index(tmp_path / "t.parquet", tmp_path / "m.quiver")
    whole = write(tmp_path / "t.parquet", images(100)).read_bytes()
    for data in (b"PAR1", b"nothing at all", whole[:-100], whole[:200] + b"\xff" * 5000 + whole[5200:]):
        (tmp_path / "t.parquet").write_bytes(data)
        with pytest.raises(BadRequest, match=r"t.parquet is not a Parquet file, or is damaged"):
            index(tmp_path / "t.parquet", tmp_path / "m.quiver")
    write(tmp_path / "t.parquet", images(0))
    with pytest.raises(BadRequest, match="holds no samples"):
        index(tmp_path / "t.parquet", tmp_path / "m.quiver")


def test_files_with_different_schemas_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "d" / "0.parquet", pa.table({"b": [b"1"], "n": [1]}))
    for other, says in (
        ({"b": [b"1"]}, "1.parquet: column n is int64 in 0.parquet and here it is missing"),
        ({"b": [b"1"], "n": [1.5]}, "1.parquet: column n is int64 in 0.parquet and here it is double"),
        ({"b": [b"1"], "n": [1], "m": [1]}, "1.parquet has columns that 0.parquet does not have: m"),
    ):
        write(tmp_path / "d" / "1.parquet", pa.table(other))
        with pytest.raises(BadRequest, match=says):
            index(tmp_path / "d", tmp_path / "m.quiver")


@pytest.mark.parametrize("group", [10, 25, 45])
def test_shards_are_made_of_whole_row_groups_so_that_each_is_read_once(tmp_path: Path, group: int) -> None:
    rows = [os.urandom(1000) for _ in range(400)]
    pq.write_table(pa.table({"b": rows}), tmp_path / "t.parquet", row_group_size=group)
    index(tmp_path / "t.parquet", tmp_path / "m.quiver", shard_bytes="64KiB")
    manifest = Manifest.open(tmp_path / "m.quiver")
    assert manifest.shard_count > 5
    assert [int(manifest.tables.origins[first, 0]) % group for first in manifest.tables.firsts] == [
        0
    ] * manifest.shard_count


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array([b"1"]), pa.array([b"2"])], names=["b", "b"])
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(BadRequest, match="several columns named 'b'"):
        index(tmp_path / "t.parquet", tmp_path / "m.quiver")
