"""Lists of numbers in Parquet files: tokens and tensors are bytes whose type and shape the manifest knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.errors import BadRequest, Changed
from quiver.manifest import Field, Manifest
from quiver.origin import open_origin
from quiver.origin.arrays import array_type, as_bytes
from quiver.origin.parquet import column_of
from quiver_client import DataLoader, Dataset
from quiver_client.cli.info import _lines, describe
from quiver_client.indexing import index
from tests.indexing.support import read_back, shard_names, warned
from tests.indexing.test_properties import FEW, folder

DTYPES = ("|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8")


def number_type(dtype: str) -> pa.DataType:
    return pa.from_numpy_dtype(np.dtype(dtype))


def values_of(dtype: str, *shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return random numbers from 0 to 99; for booleans, random booleans."""
    raw = np.random.default_rng(seed).integers(0, 100, shape)
    return (raw % 2 if dtype == "|b1" else raw).astype(dtype)


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


def indexed(source: Path, **options: Any) -> Manifest:
    target = source.parent / f"{source.name}.quiver"
    report = index(source, target, shard_bytes="4KiB", **options)
    assert report.warnings == ()
    return Manifest.open(target)


def said(manifest: Manifest, name: str) -> tuple[str, tuple[int, ...] | None, int]:
    [field] = [field for field in manifest.header.fields if field.name == name]
    assert field.type == "bytes"
    return field.dtype, field.shape, field.skip


def lists(rows: np.ndarray[Any, Any], dtype: str, kind: str) -> Any:
    """Return equal rows of numbers in one of the types that a Parquet file may use for them."""
    flat, size = pa.array(rows.reshape(-1)), rows.shape[1]
    if kind == "fixed":
        return pa.FixedSizeListArray.from_arrays(flat, size)
    if kind == "tensor":
        tensor = pa.fixed_shape_tensor(number_type(dtype), (size,))
        return pa.ExtensionArray.from_storage(tensor, pa.FixedSizeListArray.from_arrays(flat, size))
    ends = np.arange(len(rows) + 1) * size
    if kind == "large":
        return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), flat)
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), flat)


KINDS = ("list", "large", "fixed", "tensor")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["list", "fixed"])
def test_lists_of_every_number_come_back_from_a_fill_as_the_bytes_of_their_values(
    tmp_path: Path, dtype: str, kind: str
) -> None:
    rows = values_of(dtype, 50, 7)
    write(tmp_path / "t.parquet", {"tokens": lists(rows, dtype, kind)}, row_group_size=13)
    manifest = indexed(tmp_path / "t.parquet")
    assert said(manifest, "tokens") == (dtype, (7,), 0)
    assert [sample["tokens"] for sample in read_back(manifest.path).values()] == [row.tobytes() for row in rows]


def test_nested_lists_and_tensors_of_fixed_size_have_a_shape_of_several_dimensions(tmp_path: Path) -> None:
    rows = values_of("<f4", 20, 2, 3, 4)
    nested = pa.array(rows.reshape(-1))
    for size in (4, 3, 2):
        nested = pa.FixedSizeListArray.from_arrays(nested, size)
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(rows)
    write(tmp_path / "t.parquet", {"nested": nested, "tensor": tensor}, row_group_size=6)
    manifest = indexed(tmp_path / "t.parquet")
    assert said(manifest, "nested") == said(manifest, "tensor") == ("<f4", (2, 3, 4), 0)
    wanted = [{"nested": row.tobytes(), "tensor": row.tobytes()} for row in rows]
    assert list(read_back(manifest.path).values()) == wanted


def test_a_column_that_is_not_an_array_in_c_order_is_skipped_and_named(tmp_path: Path) -> None:
    turned = pa.fixed_shape_tensor(pa.int8(), (2, 3), permutation=[1, 0])
    plain = pa.fixed_shape_tensor(pa.int8(), (2, 3), permutation=[0, 1])
    storage = pa.FixedSizeListArray.from_arrays(pa.array(range(12), pa.int8()), 6)
    columns = {
        "turned": pa.ExtensionArray.from_storage(turned, storage),
        "plain": pa.ExtensionArray.from_storage(plain, storage),
        "lists of words": pa.array([[["a"]], [["b"]]]),
        "words": pa.array([["a"], ["b"]]),
        "days": pa.array([[1], [2]], pa.list_(pa.date32())),
    }
    report = index(write(tmp_path / "t.parquet", columns), tmp_path / "m.quiver")
    [names] = warned(report).values()
    assert [name.partition(":")[0] for name in names] == ["turned", "lists of words", "words", "days"]
    assert list(read_back(tmp_path / "m.quiver").values()) == [
        {"plain": bytes(range(6))},
        {"plain": bytes(range(6, 12))},
    ]


def test_lists_of_different_lengths_are_arrays_of_variable_length(tmp_path: Path) -> None:
    rows: list[list[int] | None] = [[1, 2, 3], [], None, [4], list(range(1000))]
    write(tmp_path / "t.parquet", {"tokens": pa.array(rows, pa.list_(pa.uint16()))}, row_group_size=2)
    manifest = indexed(tmp_path / "t.parquet")
    assert said(manifest, "tokens") == ("<u2", None, 0)
    assert [sample["tokens"] for sample in read_back(manifest.path).values()] == [
        None if row is None else np.array(row, "<u2").tobytes() for row in rows
    ]


@pytest.mark.parametrize(
    ("rows", "shape"),
    [([[1, 2], None, [3, 4]], (2,)), ([[], [], None], (0,)), ([None, None], None), ([[1, 2], [], [3, 4]], None)],
    ids=str,
)
def test_lists_have_a_shape_if_all_that_are_present_are_equally_long(
    tmp_path: Path, rows: list[list[int] | None], shape: tuple[int, ...] | None
) -> None:
    columns = {"tokens": pa.array(rows, pa.list_(pa.int32())), "n": list(range(len(rows)))}
    manifest = indexed(write(tmp_path / "t.parquet", columns))
    assert said(manifest, "tokens") == ("<i4", shape, 0)
    wanted = [None if row is None else np.array(row, "<i4").tobytes() for row in rows]
    assert [sample["tokens"] for sample in read_back(manifest.path).values()] == wanted


def test_lists_have_a_shape_only_if_all_files_agree_on_it(tmp_path: Path) -> None:
    source = tmp_path / "d"
    write(source / "0.parquet", {"tokens": pa.array([[1, 2], [3, 4]])})
    write(source / "1.parquet", {"tokens": pa.array([[5, 6]])})
    assert said(indexed(source), "tokens") == ("<i8", (2,), 0)
    write(source / "1.parquet", {"tokens": pa.array([[5, 6, 7]])})
    assert said(indexed(source), "tokens") == ("<i8", None, 0)
    write(source / "1.parquet", {"tokens": pa.array([[5, 6]], pa.large_list(pa.int64()))})
    assert said(indexed(source), "tokens") == ("<i8", (2,), 0)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (pa.list_(pa.int32()), r"is list<.*int64> in 0.parquet and here it is list<.*int32>"),
        (pa.list_(pa.int64(), 2), r"here it is fixed_size_list<.*int64>\[2\]"),
        (pa.list_(pa.list_(pa.int64())), r"here it is list<.*list<.*int64>>"),
    ],
    ids=str,
)
def test_files_whose_arrays_differ_in_type_are_refused(tmp_path: Path, kind: Any, says: str) -> None:
    write(tmp_path / "d" / "0.parquet", {"b": [b"1"], "tokens": pa.array([[1, 2]])})
    row: Any = [[[1]]] if pa.types.is_list(kind.value_type) else [[1, 2]]
    write(tmp_path / "d" / "1.parquet", {"b": [b"1"], "tokens": pa.array(row, kind)})
    with pytest.raises(BadRequest, match=rf"1.parquet: column tokens .*{says}"):
        index(tmp_path / "d", tmp_path / "m.quiver")


def test_files_whose_tensors_differ_in_shape_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "d" / "0.parquet", {"t": pa.array([[1, 2]], pa.list_(pa.int8(), 2))})
    write(tmp_path / "d" / "1.parquet", {"t": pa.array([[1, 2, 3]], pa.list_(pa.int8(), 3))})
    with pytest.raises(BadRequest, match=r"1.parquet: column t is .*\[2\] in 0.parquet and here it is .*\[3\]"):
        index(tmp_path / "d", tmp_path / "m.quiver")


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int32()), pa.list_(pa.bool_(), 3), pa.list_(pa.list_(pa.int8()))], ids=str
)
def test_a_row_with_a_null_inside_a_list_is_skipped_and_named(tmp_path: Path, kind: Any) -> None:
    yes, no = (True, False) if kind.value_type == pa.bool_() else (1, 0)
    whole, torn = [no, yes, yes], [no, None, yes]
    if pa.types.is_list(kind.value_type):
        whole, torn = [[1, 2], [3, 4]], [[1, 2], None]
    rows: list[Any] = [whole] * 9
    rows[2], rows[7] = None, torn
    path = write(tmp_path / "t.parquet", {"tokens": pa.array(rows, kind), "n": list(range(9))}, row_group_size=4)
    report = index(path, tmp_path / "m.quiver")
    assert [(notice.count, notice.names) for notice in report.warnings] == [(1, ("t.parquet: row 7, column tokens",))]
    assert "rows left out" in report.warnings[0].what
    found = read_back(tmp_path / "m.quiver")
    assert [sample["n"] for sample in found.values()] == [0, 1, 2, 3, 4, 5, 6, 8]
    assert [name for name, sample in found.items() if sample["tokens"] is None] == ["000000002"]


def test_a_null_among_floating_point_values_is_nan(tmp_path: Path) -> None:
    rows = [[1.0, None], [2.0, 3.0], None]
    path = write(tmp_path / "t.parquet", {"x": pa.array(rows, pa.list_(pa.float32()))})
    assert index(path, tmp_path / "m.quiver").warnings == ()
    first, second, third = (sample["x"] for sample in read_back(tmp_path / "m.quiver").values())
    assert np.frombuffer(first, "<f4").tolist() == pytest.approx([1.0, np.nan], nan_ok=True)
    assert np.frombuffer(second, "<f4").tolist() == [2.0, 3.0]
    assert third is None


def test_holes_are_numbered_by_row_of_the_column_and_not_of_the_chunk() -> None:
    chunks = [pa.array([[1], [2], [None]]), pa.array([[4], [None]])]
    values, holes = column_of(pa.table({"x": pa.chunked_array(chunks)}), "x")
    assert holes.tolist() == [2, 4]
    assert values.is_null().to_pylist() == [False, False, True, False, True]


def test_a_tensor_that_is_null_is_absent_and_one_with_a_null_inside_has_a_hole() -> None:
    kind = pa.list_(pa.list_(pa.int8(), 2), 2)
    rows: list[Any] = [[[1, 2], [3, 4]], None, [[5, 6], [7, 8]], [[1, 2], None]]
    values, holes = as_bytes(pa.array(rows, kind).slice(1))
    assert values.to_pylist() == [None, b"\5\6\7\10", None]
    assert holes.tolist() == [2]


@pytest.mark.parametrize("large", [False, True])
def test_lists_of_equal_lists_are_arrays_of_their_shape(tmp_path: Path, large: bool) -> None:
    """Hugging Face writes Array2D and Array3D like this, and other tools tables of numbers."""
    of = pa.large_list if large else pa.list_
    squares = np.arange(5 * 3 * 2 * 4, dtype=np.int32).reshape(5, 3, 2, 4)
    boxes: list[Any] = [[[1.0, 2.0, 3.0, 4.0]], [], [[5.0] * 4, [6.0] * 4], None, [[7.0] * 4]]
    columns = {
        "square": pa.array(squares.tolist(), of(of(of(pa.int32())))),
        "boxes": pa.array(boxes, of(of(pa.float32()))),
    }
    path = write(tmp_path / "t.parquet", columns, row_group_size=2)
    manifest = indexed(path)
    whole, box = manifest.header.fields
    assert (whole.dtype, whole.shape) == ("<i4", (3, 2, 4))
    assert (box.dtype, box.shape) == ("<f4", (-1, 4))
    assert manifest.header.format == 3
    dataset = Dataset(manifest.path, cache=f"file://{tmp_path}/cache")
    samples = [dataset[at] for at in range(5)]
    assert all((sample["square"] == squares[at]).all() for at, sample in enumerate(samples))
    assert [None if sample["boxes"] is None else sample["boxes"].tolist() for sample in samples] == boxes[:1] + [
        [] if row == [] else row for row in boxes[1:]
    ]
    batch = next(iter(DataLoader(dataset, batch_size=5)))
    assert batch["square"].shape == (5, 3, 2, 4)
    assert [None if row is None else row.shape for row in batch["boxes"]] == [(1, 4), (0, 4), (2, 4), None, (1, 4)]


@pytest.mark.parametrize(
    "rows", [[[[1, 2], [3]]], [[[1, 2]], [[1, 2, 3]]], [[[1, 2]]] * 3 + [[[3]]]], ids=["row", "rows", "row groups"]
)
def test_lists_of_unequal_lists_are_refused_by_name_and_can_be_excluded(tmp_path: Path, rows: Any) -> None:
    columns = {"bad": pa.array(rows, pa.list_(pa.list_(pa.int8()))), "good": pa.array([b"x"] * len(rows))}
    path = write(tmp_path / "t.parquet", columns, row_group_size=2)
    with pytest.raises(BadRequest, match=r"column bad is lists of lists .*--exclude bad"):
        index(path, tmp_path / "m.quiver")
    assert not (tmp_path / "m.quiver").exists()
    index(path, tmp_path / "m.quiver", exclude=["bad"])
    assert [field.name for field in Manifest.open(tmp_path / "m.quiver").header.fields] == ["good"]


@given(
    rows=st.lists(st.none() | st.lists(st.integers(0, 1), max_size=5), max_size=12),
    cuts=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    dtype=st.sampled_from(DTYPES),
    large=st.booleans(),
    chunks=st.integers(0, 3),
)
@FEW
def test_slices_and_chunks_of_lists_are_the_bytes_of_their_rows(
    rows: list[list[int] | None], cuts: tuple[int, int], dtype: str, large: bool, chunks: int
) -> None:
    first, end = min(cuts), max(cuts)
    inner = number_type(dtype)
    typed = [None if row is None else np.array(row, dtype).tolist() for row in rows]
    whole = pa.array([*typed, np.ones(3, dtype).tolist()], pa.large_list(inner) if large else pa.list_(inner))
    part = whole.slice(first, end - first)
    wanted = [None if row is None else np.array(row, dtype).tobytes() for row in [*rows, [1] * 3][first:end]]
    assert as_bytes(part)[0].to_pylist() == wanted
    table = pa.table({"x": pa.chunked_array([part] * chunks, whole.type)})
    assert column_of(table, "x")[0].to_pylist() == wanted * chunks


@given(
    rows=st.lists(st.none() | st.lists(st.booleans(), min_size=3, max_size=3), max_size=12),
    first=st.integers(0, 12),
    packed=st.booleans(),
)
@FEW
def test_slices_of_lists_of_fixed_size_are_the_bytes_of_their_rows(rows: list[Any], first: int, packed: bool) -> None:
    numbers = rows if packed else [None if row is None else list(map(int, row)) for row in rows]
    array = pa.array(numbers, pa.list_(pa.bool_() if packed else pa.uint8(), 3)).slice(first)
    assert as_bytes(array)[0].to_pylist() == [None if row is None else bytes(row) for row in rows[first:]]


def test_values_under_a_null_are_ignored() -> None:
    """In Arrow a null list may have values, and nulls among them: they belong to no sample."""
    values = pa.array([1, None, 3, 4], pa.int8())
    mask = pa.array([False, True, False])
    array = pa.ListArray.from_arrays(pa.array([0, 1, 3, 4], pa.int32()), values, mask=mask)
    assert as_bytes(array)[0].to_pylist() == [b"\1", None, b"\4"]


def test_other_columns_are_not_arrays() -> None:
    for kind in (
        pa.int8(),
        pa.binary(),
        pa.string(),
        pa.struct([("a", pa.list_(pa.int8()))]),
        pa.map_(pa.int8(), pa.int8()),
    ):
        assert array_type(kind) is None
    with pytest.raises(pa.ArrowException):
        as_bytes(pa.array([["a"]]))


@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 60),
    size=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    kinds=st.permutations(KINDS),
    layout=st.sampled_from(["mixed", "sequential"]),
)
@FEW
def test_equal_values_give_equal_shards_whatever_the_type_of_list(
    seed: int, count: int, size: int, dtype: str, kinds: list[str], layout: str
) -> None:
    rows = values_of(dtype, count, size, seed=seed)
    with folder() as root:
        manifests = []
        for kind in kinds[:2]:
            write(root / f"{kind}.parquet", {"tokens": lists(rows, dtype, kind)}, row_group_size=25)
            manifests.append(indexed(root / f"{kind}.parquet", layout=layout))
        one, other = manifests
        assert shard_names(one.path) == shard_names(other.path)
        assert said(one, "tokens") == said(other, "tokens") == (dtype, (size,), 0)


def test_a_base_of_another_type_of_list_keeps_its_shards_and_the_shape_is_that_of_the_new_rows(tmp_path: Path) -> None:
    rows = values_of("<u2", 300, 30)
    old = indexed(write(tmp_path / "old.parquet", {"tokens": lists(rows, "<u2", "fixed")}))
    longer = pa.array([*rows.tolist(), [1, 2, 3]], pa.list_(pa.uint16()))
    new = indexed(write(tmp_path / "new.parquet", {"tokens": longer}), base=old.path)
    assert old.shard_count > 3
    assert set(shard_names(old.path)) < set(shard_names(new.path))
    assert said(old, "tokens") == ("<u2", (30,), 0)
    assert said(new, "tokens") == ("<u2", None, 0)
    assert len(read_back(new.path)) == 301


def test_a_sample_may_have_arrays_bytes_and_scalars(tmp_path: Path) -> None:
    tokens = values_of("<i4", 3, 2)
    columns = {"image": [b"1", None, b"3"], "tokens": lists(tokens, "<i4", "list"), "label": [1, 2, 3]}
    manifest = indexed(write(tmp_path / "t.parquet", columns))
    image, found, label = manifest.header.fields
    assert (image, label) == (Field("image", "bytes", column="image"), Field("label", "int64"))
    assert found == Field("tokens", "bytes", column="tokens", dtype="<i4", shape=(2,))
    assert list(read_back(manifest.path).values()) == [
        {"image": image, "tokens": row.tobytes(), "label": i + 1}
        for i, (image, row) in enumerate(zip(columns["image"], tokens, strict=True))
    ]


def test_a_page_of_equal_numbers_is_not_read_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million equal numbers are a few bytes in the file; decoding a whole row group of them would fill the memory."""
    rows = [[7] * 1000] * 200
    write(tmp_path / "t.parquet", {"tokens": pa.array(rows, pa.list_(pa.int32()))})
    monkeypatch.setattr("quiver_client.indexing.parquet.BATCH_BYTES", 40_000)
    seen: list[int] = []

    def watched(batch: Any, name: str) -> Any:
        seen.append(batch.num_rows)
        return column_of(batch, name)

    monkeypatch.setattr("quiver_client.indexing.parquet.column_of", watched)
    index(tmp_path / "t.parquet", tmp_path / "m.quiver")
    assert sum(seen) == 200
    assert max(seen) <= 10


@pytest.mark.parametrize(
    "changed",
    [
        pa.array([[1, 2], [3, None]], pa.list_(pa.int32())),
        pa.array([[1, 2], [3]], pa.list_(pa.int32())),
        pa.array([["a"], ["b"]]),
        pa.array([1, 2]),
    ],
    ids=["null", "short", "words", "numbers"],
)
def test_a_column_that_was_replaced_is_reported_as_changed_and_not_as_wrong_bytes(tmp_path: Path, changed: Any) -> None:
    path = write(tmp_path / "t.parquet", {"tokens": pa.array([[1, 2], [3, 4]], pa.list_(pa.int32()))})
    index(path, tmp_path / "m.quiver")
    write(path, {"tokens": changed})
    listed = Manifest.open(tmp_path / "m.quiver")
    now = path.stat()  # the listed size and time, so that the content reveals the change and not the size
    sizes, times = np.array([now.st_size], np.uint64), np.array([now.st_mtime_ns])
    tables = replace(listed.tables, object_sizes=sizes, object_mtimes=times)
    origin = open_origin(Manifest(listed.path, listed.header, tables))
    try:
        with pytest.raises(Changed):
            origin.read([0, 1], memoryview(bytearray(16)))
    finally:
        origin.close()


class Tagged(pa.ExtensionType):  # type: ignore[misc]
    """An extension type of another library, which a process may or may not know."""

    def __init__(self) -> None:
        super().__init__(pa.list_(pa.int32()), "quiver.tests.tagged")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: Any, serialized: bytes) -> Tagged:
        return cls()


def test_a_fill_gives_the_same_bytes_if_an_extension_type_became_known_after_indexing(
    tmp_path: Path,
) -> None:
    column = pa.ExtensionArray.from_storage(Tagged(), pa.array([[1, 2], [3, 4]], pa.list_(pa.int32())))
    manifest = indexed(write(tmp_path / "t.parquet", {"tokens": column}))
    pa.register_extension_type(Tagged())
    try:
        found = read_back(manifest.path)
    finally:
        pa.unregister_extension_type("quiver.tests.tagged")
    assert found["000000001"]["tokens"] == np.array([3, 4], "<i4").tobytes()


def test_info_says_what_the_arrays_are(tmp_path: Path) -> None:
    columns = {
        "tokens": lists(values_of("<i4", 2, 5), "<i4", "list"),
        "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(values_of("<f2", 2, 3, 4)),
        "ragged": pa.array([[True], []]),
        "text": ["a", "b"],
    }
    manifest = indexed(write(tmp_path / "t.parquet", columns))
    assert describe(manifest)["fields"] == [
        {"name": "tokens", "type": "bytes", "dtype": "<i4", "shape": [5]},
        {"name": "tensor", "type": "bytes", "dtype": "<f2", "shape": [3, 4]},
        {"name": "ragged", "type": "bytes", "dtype": "|b1", "shape": None},
        {"name": "text", "type": "bytes"},
    ]
    assert _lines(manifest)[-4:] == [
        "field    tokens: bytes, int32[5]",
        "field    tensor: bytes, float16[3, 4]",
        "field    ragged: bytes, bool[*]",
        "field    text: bytes",
    ]
