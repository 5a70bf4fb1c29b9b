"""The manifest: what was written is read back, and a file that lies is refused by name, whatever it says."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quiver.digest import Digest
from quiver.errors import BadRequest, DiskFailed, Misconfigured, NotFound, QuiverError
from quiver.manifest import ABSENT, FORMAT_VERSION, Field, Header, Manifest, ManifestParts, write_manifest
from quiver.manifest.schema import METADATA_KEY
from quiver.manifest.tables import Tables
from quiver.shard import table_bytes
from tests.support import golden
from tests.support.data import rewritten

in_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)


def parts_of(seed: int, width: int = 2, samples: int = 30, blobs: int = 20) -> ManifestParts:
    """Return the parts of a manifest of random content: consistent, and of bytes that lie nowhere."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 500, (blobs, width)).astype(np.uint64)
    lengths[rng.random((blobs, width)) < 0.1] = ABSENT
    present = np.where(lengths == np.uint64(ABSENT), np.uint64(0), lengths)
    cuts = np.sort(rng.choice(np.arange(1, blobs), 4, replace=False))
    fields = (*(Field(f"field{i}", "bytes") for i in range(width)), Field("label", "int32"))
    return ManifestParts(
        header=Header(1, "mixed", 1 << 20, "files", "file:///data/", fields),
        keys=pa.array([f"key {i:03}" for i in rng.permutation(samples)], pa.large_utf8()),
        blob_of=rng.integers(0, blobs, samples).astype(np.uint32),
        scalars={"label": pa.array(rng.integers(0, 9, samples), pa.int32())},
        digests=rng.integers(0, 256, (blobs, 32), np.uint8),
        xxh3=rng.integers(0, 2**63, (blobs, width)).astype(np.uint64),
        lengths=lengths,
        objects_of=rng.integers(0, 3, blobs).astype(np.uint32),
        origins=np.cumsum(present.reshape(-1), dtype=np.uint64).reshape(blobs, width) - present,
        firsts=np.concatenate([[0], cuts, [blobs]]).astype(np.int64),
        object_paths=pa.array(["a.bin", "b/c.bin", "d ü.bin"], pa.large_utf8()),
        object_sizes=np.array([10**6] * 3, np.uint64),
        object_etags=pa.array(["", '"x"', ""], pa.large_utf8()),
        object_mtimes=np.array([1, 2, 3], np.int64),
    )


@in_folder
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_a_manifest_survives_its_file(tmp_path: Path, seed: int, width: int) -> None:
    parts = parts_of(seed, width)
    write_manifest(tmp_path / "m.quiver", parts)
    manifest = Manifest.open(tmp_path / "m.quiver")
    tables = manifest.tables
    assert manifest.header == parts.header
    assert tables.keys.equals(parts.keys)
    assert (tables.blob_of == parts.blob_of).all()
    assert (tables.digests == parts.digests).all()
    assert (tables.lengths == parts.lengths).all()
    assert (tables.xxh3 == parts.xxh3).all()
    assert (tables.origins == parts.origins).all()
    assert manifest.scalars("label", np.arange(30)) == parts.scalars["label"].to_pylist()
    assert [manifest.object(i).path for i in range(3)] == parts.object_paths.to_pylist()
    assert sum(len(manifest.shard_blobs(shard)) for shard in range(manifest.shard_count)) == 20
    present = np.where(parts.lengths == np.uint64(ABSENT), np.uint64(0), parts.lengths)
    assert manifest.total_bytes == int(present.sum())
    for shard in range(manifest.shard_count):
        rows = manifest.shard_blobs(shard)
        assert tables.shard_sizes[shard] == present[rows.start : rows.stop].sum() + table_bytes(len(rows))
    write_manifest(tmp_path / "again.quiver", parts)
    assert (tmp_path / "again.quiver").read_bytes() == (tmp_path / "m.quiver").read_bytes()


def test_the_committed_manifest_still_reads_the_same() -> None:
    expected = json.loads(golden.EXPECTED.read_text())
    assert len(expected["shards"]) >= 5
    for path, digest in ((golden.CHECKED, expected["digest"]), (golden.MANIFEST, OLD_DIGEST)):
        manifest = Manifest.open(path)
        assert golden.described(manifest) == expected | {"digest": digest}
        assert manifest.scalars("label", np.arange(40)) == [i % 2 for i in range(40)]
        assert manifest.tables.blob_of[38] == manifest.tables.blob_of[0], "equal samples are stored once"
        assert manifest.has_checksums == (path == golden.CHECKED)


def test_the_committed_manifest_is_still_written_the_same(tmp_path: Path) -> None:
    golden.write(tmp_path / "checked.quiver")
    assert (tmp_path / "checked.quiver").read_bytes() == golden.CHECKED.read_bytes()


OLD_DIGEST = "898462234447cf850f961e34881a1bb1422c192aad864a345aebe1f98bc9a693"
ARRAYS = golden.FOLDER / "arrays.quiver"  # of format 2, for ever to be read; of parts_of_arithmetic, without checksums


def parts_of_arithmetic() -> ManifestParts:
    """Return the parts of a small manifest with arrays in which nothing is left to chance."""
    fields = (
        Field("mask", "bytes", dtype="|b1", shape=(2, 3), skip=128),
        Field("text", "bytes"),
        Field("tokens", "bytes", dtype="<u2"),
    )
    lengths = np.array([[ABSENT if i == 2 else 134, 5 * i, 2 * i] for i in range(6)], np.uint64)
    present = np.where(lengths == np.uint64(ABSENT), np.uint64(0), lengths)
    return ManifestParts(
        header=Header(2, "sequential", 4096, "webdataset", "https://example.org/arrays/", fields),
        keys=pa.array([f"sample-{i}" for i in range(6)], pa.large_utf8()),
        blob_of=np.arange(6, dtype=np.uint32),
        scalars={},
        digests=(np.arange(6 * 32, dtype=np.uint8) * 37).reshape(6, 32),
        xxh3=np.arange(18, dtype=np.uint64).reshape(6, 3),
        lengths=lengths,
        objects_of=np.zeros(6, np.uint32),
        origins=np.cumsum(present.reshape(-1), dtype=np.uint64).reshape(6, 3) - present,
        firsts=np.array([0, 4, 6], np.int64),
        object_paths=pa.array(["all.tar"], pa.large_utf8()),
        object_sizes=np.array([10**4], np.uint64),
        object_etags=pa.array([""], pa.large_utf8()),
        object_mtimes=np.array([7], np.int64),
    )


# -- arrays -----------------------------------------------------------------------------------------------------------

TENSOR = {"dtype": "<i2", "shape": [3, 2], "skip": 8}


def parts_of_arrays() -> ManifestParts:
    """Return the parts of a manifest of one tensor a sample, here and there absent, and tokens of any number."""
    parts = parts_of(4)
    lengths = parts.lengths.copy()
    lengths[:, 0] = np.where(np.arange(20) % 7 == 3, ABSENT, 20)
    lengths[:, 1] = np.where(lengths[:, 1] == ABSENT, ABSENT, lengths[:, 1] // 4 * 4)
    tensor = Field("field0", "bytes", dtype="<i2", shape=(3, 2), skip=8)
    fields = (tensor, Field("field1", "bytes", dtype="<i4"), *parts.header.fields[2:])
    return replace(parts, header=msgspec.structs.replace(parts.header, fields=fields), lengths=lengths)


def test_what_makes_a_field_an_array_survives_its_file(tmp_path: Path) -> None:
    parts = parts_of_arrays()
    write_manifest(tmp_path / "m.quiver", parts)
    header = Manifest.open(tmp_path / "m.quiver").header
    assert (header.format, header.fields) == (2, parts.header.fields)
    assert [(field.is_array, field.array_bytes if field.is_array else 0) for field in header.fields] == [
        (True, 20),
        (True, None),
        (False, 0),
    ]


def test_a_manifest_without_arrays_is_written_for_readers_that_know_none(tmp_path: Path) -> None:
    parts = parts_of(4)
    write_manifest(tmp_path / "old.quiver", parts)
    newest = msgspec.structs.replace(parts.header, format=FORMAT_VERSION)
    write_manifest(tmp_path / "new.quiver", replace(parts, header=newest))
    assert (tmp_path / "new.quiver").read_bytes() == (tmp_path / "old.quiver").read_bytes()
    raw = pa.ipc.open_file(str(tmp_path / "new.quiver")).schema.metadata[METADATA_KEY]
    assert msgspec.json.decode(raw)["fields"][0] == {"name": "field0", "type": "bytes", "classes": [], "column": ""}


def test_a_reader_takes_the_second_format_without_arrays_too(tmp_path: Path) -> None:
    rewritten(golden.MANIFEST, tmp_path / "m.quiver", header_with(format=2))
    assert Manifest.open(tmp_path / "m.quiver").header.format == 2


def test_the_committed_manifest_of_arrays_still_reads_and_writes_the_same(tmp_path: Path) -> None:
    whole = ARRAYS.read_bytes()
    assert str(Digest.of(whole)) == "dbd00c884ec32551e919a9adbb120ce9ac8190cf59ebeb79c91772f2c3beccad"
    write_manifest(tmp_path / "m.quiver", parts_of_arithmetic())
    written = Manifest.open(tmp_path / "m.quiver")
    assert str(written.digest) == "8eec60d64b1a9f99a3663cf53308cf69f6635ab5e2add2a41c38bdb90ac21e9b"
    assert same(written, Manifest.open(ARRAYS))
    header = Manifest.open(ARRAYS).header
    assert [(field.name, field.dtype, field.shape, field.skip) for field in header.fields] == [
        ("mask", "|b1", (2, 3), 128),
        ("text", "", None, 0),
        ("tokens", "<u2", None, 0),
    ]


def field0_with(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["fields"][0].update(changes)


@pytest.mark.fault("S7")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "|O"}, "dtype"),
        ({"dtype": "O"}, "dtype"),
        ({"dtype": ">i2"}, "dtype"),
        ({"dtype": "=i2"}, "dtype"),
        ({"dtype": "<c8"}, "dtype"),
        ({"dtype": "<M8[s]"}, "dtype"),
        ({"dtype": "|V2"}, "dtype"),
        ({"dtype": "int16"}, "dtype"),
        ({"dtype": "<i2, <i2"}, "dtype"),
        ({"dtype": None}, "header"),
        ({"dtype": "", "skip": 0}, "no dtype"),
        ({"dtype": "", "shape": None}, "no dtype"),
        ({"type": "int16"}, "cannot be an array"),
        ({"shape": [-3, -2]}, "shape"),
        ({"shape": [3, 2**62]}, "shape"),
        ({"shape": [2**40, 2**40]}, "shape"),
        ({"shape": [0, 2**40, 2**40]}, "shape"),
        ({"shape": [1] * 33}, "shape"),
        ({"shape": [True, 6]}, "header"),
        ({"shape": "6"}, "header"),
        ({"shape": [2.5]}, "header"),
        ({"shape": [3, 3]}, "array of 26 bytes"),
        ({"shape": []}, "array of 10 bytes"),
        ({"shape": None}, "skips"),
        ({"shape": None, "skip": 0, "dtype": "<f8"}, "whole values of 8 bytes"),
        ({"skip": -1}, "skips"),
        ({"skip": 2**40}, "skips"),
        ({"skip": 0}, "array of 12 bytes"),
        ({"pickle": True}, "header"),
    ],
    ids=str,
)
def test_an_array_that_no_indexer_writes_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    write_manifest(tmp_path / "good.quiver", parts_of_arrays())
    raw = pa.ipc.open_file(str(tmp_path / "good.quiver")).schema.metadata[METADATA_KEY]
    assert TENSOR.items() <= msgspec.json.decode(raw)["fields"][0].items()
    error = refused(rewritten(tmp_path / "good.quiver", tmp_path / "m.quiver", field0_with(**changes)))
    assert isinstance(error, BadRequest)
    assert says in str(error)


@pytest.mark.fault("S7")
@pytest.mark.parametrize("place", [b'"skip":8', b'"shape":[3,2]'])
def test_a_number_of_more_digits_than_python_writes_is_refused(tmp_path: Path, place: bytes) -> None:
    write_manifest(tmp_path / "good.quiver", parts_of_arrays())
    batch = pa.ipc.open_file(str(tmp_path / "good.quiver")).get_batch(0)
    raw = batch.schema.metadata[METADATA_KEY]
    assert raw.count(place) == 1
    wrong = place.replace(b"8", b"8" * 5000).replace(b"3", b"3" * 5000)
    schema = batch.schema.with_metadata({METADATA_KEY: raw.replace(place, wrong)})
    with pa.ipc.new_file(str(tmp_path / "m.quiver"), schema) as writer:
        writer.write_batch(batch.replace_schema_metadata(schema.metadata))
    assert isinstance(refused(tmp_path / "m.quiver"), BadRequest)


def test_an_array_in_the_first_format_or_in_a_parquet_file_with_a_header_is_refused(tmp_path: Path) -> None:
    write_manifest(tmp_path / "good.quiver", parts_of_arrays())
    rewritten(tmp_path / "good.quiver", tmp_path / "m.quiver", header_with(format=1))
    assert "format 1 cannot be an array" in str(refused(tmp_path / "m.quiver"))
    rewritten(tmp_path / "good.quiver", tmp_path / "m.quiver", header_with(source="parquet"))
    assert "skips" in str(refused(tmp_path / "m.quiver"))


def test_one_sample_of_another_length_is_refused_wherever_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quiver.manifest.checks.BLOCK_ROWS", 8)  # so that the rows are looked at in three blocks
    parts = parts_of_arrays()
    for row in range(20):
        write_manifest(tmp_path / "m.quiver", with_array(parts, "lengths", (row, 0), 19))
        assert f"row {row} has 19 bytes of field 'field0'" in str(refused(tmp_path / "m.quiver"))
        write_manifest(tmp_path / "m.quiver", with_array(parts, "lengths", (row, 1), 5))
        assert f"row {row} has 5 bytes of field 'field1'" in str(refused(tmp_path / "m.quiver"))


# -- files that are no good -------------------------------------------------------------------------------------------


def same(one: Manifest, other: Manifest) -> bool:
    """Whether they say the same, whatever their files are."""
    ours, theirs = one.tables, other.tables
    columns = [
        (getattr(ours, each.name), getattr(theirs, each.name)) for each in fields(Tables) if each.name != "scalars"
    ]
    return (
        one.header == other.header
        and ours.scalars.keys() == theirs.scalars.keys()
        and all(ours.scalars[name].equals(theirs.scalars[name]) for name in ours.scalars)
        and all(a.equals(b) if isinstance(a, pa.Array) else np.array_equal(a, b) for a, b in columns)
    )


def refused(path: Path) -> QuiverError:
    with pytest.raises((BadRequest, Misconfigured, NotFound)) as caught:
        Manifest.open(path)
    assert str(path) in str(caught.value)
    return caught.value


def test_a_missing_manifest_says_how_to_make_one(tmp_path: Path) -> None:
    assert "quiver index" in str(refused(tmp_path / "none.quiver"))


@pytest.mark.fault("S7")
@pytest.mark.parametrize(
    "content", [b"", b"x", b"ARROW1\0\0", b"\0" * 5000, b"ARROW1\0\0" + b"\xff" * 5000 + b"ARROW1"]
)
def test_a_file_that_is_no_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.quiver").write_bytes(content)
    refused(tmp_path / "m.quiver")


def test_a_folder_and_a_fifo_are_no_manifest(tmp_path: Path) -> None:
    refused(tmp_path)
    fifo = tmp_path / "fifo.quiver"
    os.mkfifo(fifo)
    done = threading.Event()

    def look() -> None:
        refused(fifo)
        done.set()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    assert done.wait(5), "opening a fifo must not wait for a writer"


def test_an_arrow_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    table = pa.table({"samples": [1, 2]})
    with pa.ipc.new_file(str(tmp_path / "m.quiver"), table.schema) as writer:
        writer.write_table(table)
    assert "not a manifest" in str(refused(tmp_path / "m.quiver"))


@pytest.mark.fault("S7")
@in_folder
@given(st.data())
def test_a_manifest_cut_short_anywhere_is_refused(tmp_path: Path, draw: st.DataObject) -> None:
    whole = golden.MANIFEST.read_bytes()
    path = tmp_path / "cut.quiver"
    path.write_bytes(whole[: draw.draw(st.integers(0, len(whole) - 1))])
    refused(path)


@pytest.mark.fault("S7")
@settings(in_folder, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=3), st.booleans())
def test_a_manifest_with_wrong_bytes_is_refused_or_consistent(
    tmp_path: Path, flips: list[tuple[int, int]], ends: bool
) -> None:
    """Most flips land in digests and keys, which nothing in the file contradicts: then all is still in range."""
    wrong = bytearray(golden.MANIFEST.read_bytes())
    for at, mask in flips:  # half of the runs aim at the metadata, which is at both ends
        span = min(3000, len(wrong)) if ends else len(wrong)
        wrong[-1 - at % span if at % 2 else at % span] ^= mask
    path = tmp_path / "wrong.quiver"
    path.write_bytes(wrong)
    try:
        manifest = Manifest.open(path)
    except (BadRequest, Misconfigured, NotFound) as error:
        if str(path) not in str(error):
            raise
        return
    tables = manifest.tables
    assert int(tables.blob_of.max()) < len(tables.offsets)
    for index in range(len(manifest)):
        assert isinstance(manifest.key(index), str)
    for name in tables.scalars:
        manifest.scalars(name, np.arange(len(manifest)))
    for number in range(len(tables.object_paths)):
        assert manifest.object(number).size >= 0


def header_with(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header.update(changes)


@pytest.mark.fault("S7")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": FORMAT_VERSION + 1}, "newer"),
        ({"format": FORMAT_VERSION + 1, "fields": [], "extra": 1}, "newer"),
        ({"format": 4, "name": "a\nb"}, "name"),
        ({"format": 4, "name": "x" * 129}, "name"),
        ({"format": 4, "name": "\u202egpj.tac"}, "name"),
        ({"format": 4, "name": " a"}, "name"),
        ({"format": 4, "name": 7}, "header"),
        ({"format": 3, "name": "a"}, "format 3"),
        ({"format": 0}, "not read any more"),
        ({"format": "1"}, "header"),
        ({"format": None}, "header"),
        ({"extra": 1}, "header"),
        ({"layout": "random"}, "header"),
        ({"source": "zip"}, "header"),
        ({"shard_bytes": -1}, "shard_bytes"),
        ({"shard_bytes": 0}, "shard_bytes"),
        ({"base": "data"}, "not a URL"),
        ({"base": "file:///data/../etc/"}, "steps out"),
        ({"base": "file:///data/%2e%2e/etc/"}, "quoted dots"),
        ({"fields": []}, "bytes"),
        ({"fields": [{"name": "label", "type": "int64"}]}, "bytes"),
        ({"fields": [{"name": "a", "type": "bytes"}, {"name": "a", "type": "bytes"}]}, "distinct"),
        ({"fields": [{"name": "__key__", "type": "bytes"}]}, "distinct"),
        ({"fields": [{"name": "", "type": "bytes"}]}, "distinct"),
        ({"fields": [{"name": f"f{i}", "type": "bytes"} for i in range(300)]}, "at most"),
        ({"fields": [{"name": "a", "type": "bytes"}, {"name": "b", "type": "dictionary"}]}, "scalar"),
        ({"fields": [{"name": "a", "type": "bytes"}]}, "columns"),
        (
            {
                "fields": [
                    {"name": "image", "type": "bytes"},
                    {"name": "mask", "type": "bytes"},
                    {"name": "label", "type": "int8"},
                ]
            },
            "columns",
        ),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_a_header_that_no_indexer_writes_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    error = refused(rewritten(golden.MANIFEST, tmp_path / "m.quiver", header_with(**changes)))
    assert says in str(error)
    assert isinstance(error, Misconfigured) == (says == "newer")


@pytest.mark.fault("S7")
@pytest.mark.parametrize("raw", [b"", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"format": 1e999}'])
def test_a_header_that_is_not_a_json_object_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "m.quiver"
    batch = pa.ipc.open_file(str(golden.MANIFEST)).get_batch(0)
    schema = batch.schema.with_metadata({METADATA_KEY: raw})
    with pa.ipc.new_file(str(path), schema) as writer:
        writer.write_batch(batch.replace_schema_metadata(schema.metadata))
    refused(path)


def with_array(parts: ManifestParts, name: str, at: Any, value: int) -> ManifestParts:
    array = getattr(parts, name).copy()
    array[at] = value
    return replace(parts, **{name: array})


WRONG: dict[str, Callable[[ManifestParts], ManifestParts]] = {
    "a sample of no blob": lambda p: with_array(p, "blob_of", 3, 20),
    "a blob far away": lambda p: with_array(p, "blob_of", 3, 2**32 - 1),
    "an object that is not listed": lambda p: with_array(p, "objects_of", 0, 3),
    "past the end of its object": lambda p: with_array(p, "object_sizes", slice(None), 10),
    "an origin that wraps around": lambda p: with_array(p, "origins", (0, 0), 2**64 - 10),
    "a key twice": lambda p: replace(p, keys=pa.array(["same"] * 30, pa.large_utf8())),
    "one shard twice": lambda p: replace(
        p,
        digests=np.tile(p.digests[:5], (4, 1)),
        lengths=np.full((20, 2), 7, np.uint64),
        origins=np.zeros((20, 2), np.uint64),
        firsts=np.array([0, 5, 10, 15, 20]),
    ),
}


@pytest.mark.fault("S7")
@pytest.mark.parametrize("change", WRONG.values(), ids=list(WRONG))
def test_tables_that_do_not_add_up_are_refused(
    tmp_path: Path, change: Callable[[ManifestParts], ManifestParts]
) -> None:
    write_manifest(tmp_path / "m.quiver", change(parts_of(1)))
    assert isinstance(refused(tmp_path / "m.quiver"), BadRequest)


@pytest.mark.fault("S7")
@pytest.mark.parametrize("length", [1, 70, 1 << 20])
def test_an_error_repeats_little_of_a_key_that_is_there_twice(tmp_path: Path, length: int) -> None:
    keys = pa.array(["\1" * length] * 30, pa.large_utf8())
    write_manifest(tmp_path / "m.quiver", replace(parts_of(1), keys=keys))
    message = str(refused(tmp_path / "m.quiver"))
    assert "more than once" in message
    assert len(message) < 1000


@pytest.mark.fault("S7")
@pytest.mark.parametrize(
    "fields",
    [
        [{"name": "x" * 100_000, "type": "bytes"}] * 2,
        [{"name": "image", "type": "bytes"}, {"name": "\1" * 100_000, "type": "y" * 100_000}],
        [{"name": "image" * 20_000, "type": "bytes", "dtype": "|O8"}],
        [{"name": "image", "type": "bytes", "z" * 100_000: 1}],
    ],
    ids=["twice", "no scalar", "no dtype", "no such member"],
)
def test_an_error_repeats_little_of_a_header(tmp_path: Path, fields: list[dict[str, Any]]) -> None:
    message = str(refused(rewritten(golden.MANIFEST, tmp_path / "m.quiver", header_with(fields=fields))))
    assert len(message) < 2000


COLUMNS: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "overlapping samples": ("blobs", "offset", lambda a: np.maximum(a, 1) - 1),
    "a gap": ("blobs", "offset", lambda a: a + (np.arange(len(a)) == 5).astype(np.uint64)),
    "an offset far away": ("blobs", "offset", lambda a: np.where(np.arange(len(a)) == 5, np.uint64(2**63), a)),
    "a length that wraps around": (
        "blobs",
        "length",
        lambda a: np.where(np.arange(len(a)) == 4, np.uint64(2**64 - 9), a),
    ),
    "all lengths huge": ("blobs", "length", lambda a: np.full_like(a, 2**63)),
    "shards that step back": ("shards", "first", lambda a: a[::-1].copy()),
    "shards that begin late": ("shards", "first", lambda a: a + 1),
    "an empty shard": ("shards", "first", lambda a: np.where(np.arange(len(a)) == 2, a[1], a)),
    "a shard past the end": (
        "shards",
        "first",
        lambda a: np.where(np.arange(len(a)) == len(a) - 1, np.uint32(2**31), a),
    ),
    "a shard too large": ("shards", "size", lambda a: a + 1),
    "a shard too small": ("shards", "size", lambda a: a - 1),
    "a shard of nothing": ("shards", "size", lambda a: a * 0),
}


def with_column(source: Path, target: Path, table: str, column: str, change: Callable[[Any], Any]) -> Path:
    """Write the manifest with a column changed in place, bypassing the writer, which would not do it."""
    batch = pa.ipc.open_file(pa.BufferReader(source.read_bytes())).get_batch(0)
    child = batch.column(table).values.field(column)
    child = child.values if pa.types.is_fixed_size_list(child.type) else child
    before = child.to_numpy()
    after = np.ascontiguousarray(change(before)).astype(before.dtype)
    raw = bytearray(source.read_bytes())
    at = bytes(raw).find(before.tobytes())
    assert at > 0
    assert bytes(raw).count(before.tobytes()) == 1
    raw[at : at + after.nbytes] = after.tobytes()
    target.write_bytes(raw)
    return target


@pytest.mark.fault("S7")
@pytest.mark.parametrize(("table", "column", "change"), COLUMNS.values(), ids=list(COLUMNS))
def test_columns_that_lie_are_refused(tmp_path: Path, table: str, column: str, change: Callable[[Any], Any]) -> None:
    error = refused(with_column(golden.MANIFEST, tmp_path / "m.quiver", table, column, change))
    assert isinstance(error, BadRequest)


@pytest.mark.fault("S7")
def test_string_offsets_that_lie_are_refused(tmp_path: Path) -> None:
    whole = golden.MANIFEST.read_bytes()
    offsets = (np.arange(41, dtype=np.int64) * 9).tobytes()  # of forty keys of nine bytes
    assert whole.count(offsets) == 1
    for wrong in (-1, 10**12, 2**62):
        raw = bytearray(whole)
        at = whole.find(offsets)
        raw[at + 8 * 20 : at + 8 * 21] = wrong.to_bytes(8, "little", signed=True)
        (tmp_path / "m.quiver").write_bytes(raw)
        refused(tmp_path / "m.quiver")


@pytest.mark.fault("S7")
def test_keys_that_are_no_text_are_refused(tmp_path: Path) -> None:
    whole = golden.MANIFEST.read_bytes()
    assert whole.count(b"sample-17") == 1
    (tmp_path / "m.quiver").write_bytes(whole.replace(b"sample-17", b"samp\xff\xfe-17"))
    refused(tmp_path / "m.quiver")


@pytest.mark.fault("S7")
@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.fault("S12")
def test_a_compressed_manifest_is_refused_before_it_is_unpacked(tmp_path: Path, codec: str) -> None:
    """A few kilobytes can unpack to any size: what is mapped is what is read."""
    batch = pa.ipc.open_file(str(golden.MANIFEST)).get_batch(0)
    path = tmp_path / "m.quiver"
    with pa.ipc.new_file(str(path), batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_batch(batch)
    assert "compressed" in str(refused(path))


def test_a_manifest_in_two_batches_is_refused(tmp_path: Path) -> None:
    batch = pa.ipc.open_file(str(golden.MANIFEST)).get_batch(0)
    with pa.ipc.new_file(str(tmp_path / "m.quiver"), batch.schema) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch)
    refused(tmp_path / "m.quiver")


def test_an_empty_dataset_makes_no_manifest(tmp_path: Path) -> None:
    parts = replace(parts_of(1), keys=pa.array([], pa.large_utf8()), blob_of=np.zeros(0, np.uint32))
    with pytest.raises(BadRequest):
        write_manifest(tmp_path / "m.quiver", parts)
    assert not list(tmp_path.iterdir())


def test_a_manifest_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DiskFailed, match="nowhere"):
        write_manifest(tmp_path / "nowhere" / "m.quiver", parts_of(1))
    (tmp_path / "taken.quiver").mkdir()
    (tmp_path / "taken.quiver" / "file").touch()
    with pytest.raises(DiskFailed):
        write_manifest(tmp_path / "taken.quiver", parts_of(1))
    assert [path.name for path in tmp_path.iterdir()] == ["taken.quiver"]


def test_an_open_manifest_stays_whole_when_its_file_is_replaced(tmp_path: Path) -> None:
    path = Path(shutil.copy(golden.MANIFEST, tmp_path / "m.quiver"))
    manifest = Manifest.open(path)
    write_manifest(path, parts_of(3))
    assert manifest.key(0) == "sample-00"


def test_the_header_is_plain_json_that_others_can_read() -> None:
    schema = pa.ipc.open_file(str(golden.MANIFEST)).schema
    assert msgspec.json.decode(schema.metadata[METADATA_KEY])["format"] == 1


def test_a_name_is_stored_only_if_one_is_given_and_older_readers_are_told_that_it_is_newer(tmp_path: Path) -> None:
    parts = parts_of(4)
    named = replace(parts, header=msgspec.structs.replace(parts.header, name="Bilder 3"))
    write_manifest(tmp_path / "named.quiver", named)
    header = Manifest.open(tmp_path / "named.quiver").header
    assert (header.name, header.format) == ("Bilder 3", 4)
    write_manifest(tmp_path / "plain.quiver", parts)
    raw = pa.ipc.open_file(str(tmp_path / "plain.quiver")).schema.metadata[METADATA_KEY]
    assert "name" not in msgspec.json.decode(raw)
    with pytest.raises(BadRequest, match="name"):
        write_manifest(tmp_path / "bad.quiver", replace(parts, header=msgspec.structs.replace(header, name="a\nb")))
