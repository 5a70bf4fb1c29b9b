"""``.npy`` files as samples: arrays if all of a field have one type and shape, and plain bytes otherwise."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.lib.format
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.manifest import Manifest
from quiver.manifest.schema import ARRAY_DTYPES
from quiver_client.indexing import index
from quiver_client.indexing.npy import HEADER_BYTES_MAX, Array, parse
from tests.indexing.support import read_back, shard_names, write_tar, write_tree


def npy(array: Any, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    numpy.lib.format.write_array(file, np.asarray(array), version=version)
    return file.getvalue()


def tensors(count: int, *shape: int, dtype: str = "<f4") -> list[bytes]:
    random = np.random.default_rng(count)
    return [npy(random.integers(0, 100, shape).astype(dtype)) for _ in range(count)]


def indexed(source: Path, **options: Any) -> Manifest:
    target = source.parent / f"{source.name}.quiver"
    index(source, target, **options)
    return Manifest.open(target)


def said(manifest: Manifest, name: str = "data") -> tuple[str, tuple[int, ...] | None, int]:
    [field] = [field for field in manifest.header.fields if field.name == name]
    assert field.type == "bytes"
    return field.dtype, field.shape, field.skip


OPAQUE = ("", None, 0)


def test_files_of_one_header_are_arrays_and_come_back_whole(tmp_path: Path) -> None:
    files = {f"{i % 3}/{i}.NPY" if i % 2 else f"{i}.npy": data for i, data in enumerate(tensors(600, 3, 4))}
    manifest = indexed(write_tree(tmp_path / "d", files))
    assert said(manifest) == ("<f4", (3, 4), 128)
    assert {key: sample["data"] for key, sample in read_back(manifest.path).items()} == files
    [row] = {int(length) for length in manifest.tables.lengths[:, 0]}
    assert row == 128 + 48
    first = np.frombuffer(files[manifest.key(0)], "<f4", offset=128).reshape(3, 4)
    assert (first == np.load(io.BytesIO(files[manifest.key(0)]))).all()


ODD: dict[str, bytes] = {
    "another shape": npy(np.zeros((4, 3), "<f4")),
    "another size": npy(np.zeros((3, 5), "<f4")),
    "another type": npy(np.zeros((3, 4), "<i4")),
    "another version": npy(np.zeros((3, 4), "<f4"), (2, 0)),
    "another order": npy(np.zeros((3, 4), "<f4", order="F")),
    "a byte too much": npy(np.zeros((3, 4), "<f4")) + b"\0",
    "a byte too few": npy(np.zeros((3, 4), "<f4"))[:-1],
    "nothing": b"",
    "as many bytes": bytes(128 + 48),
    "half a header": npy(np.zeros((3, 4), "<f4"))[:60],
}


@pytest.mark.parametrize("odd", ODD.values(), ids=list(ODD))
@pytest.mark.parametrize("place", ["0", "300", "9"])
def test_one_different_file_at_any_place_makes_all_plain_bytes(tmp_path: Path, odd: bytes, place: str) -> None:
    files = {f"{i}.npy": data for i, data in enumerate(tensors(20, 3, 4))}
    files |= {f"{place}.npy": odd}
    manifest = indexed(write_tree(tmp_path / "d", files))
    assert said(manifest) == OPAQUE
    assert manifest.header.format == 1
    assert {key: sample["data"] for key, sample in read_back(manifest.path).items()} == files


def test_one_different_file_counts_also_if_another_thread_reads_it(tmp_path: Path) -> None:
    files = {f"{i:04}.npy": data for i, data in enumerate(tensors(700, 2))}  # tasks are of 256
    assert said(indexed(write_tree(tmp_path / "good", files))) == ("<f4", (2,), 128)
    for place in ("0000", "0300", "0699"):
        files_and_odd = files | {f"{place}.npy": npy(np.zeros(3, "<f4"))}
        assert said(indexed(write_tree(tmp_path / place, files_and_odd))) == OPAQUE


def test_files_of_another_name_are_plain_bytes_whatever_they_hold(tmp_path: Path) -> None:
    same = tensors(3, 2)
    assert said(indexed(write_tree(tmp_path / "bin", {f"{i}.bin": data for i, data in enumerate(same)}))) == OPAQUE
    mixed = {"0.npy": same[0], "1.npy": same[1], "README": same[2]}
    assert said(indexed(write_tree(tmp_path / "mixed", mixed))) == OPAQUE


def test_the_header_of_a_file_of_several_pieces_is_in_its_first_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quiver_client.indexing.reading.PIECE_BYTES", 1000)
    files = {f"{i}.npy": data for i, data in enumerate(tensors(3, 2000))}
    assert said(indexed(write_tree(tmp_path / "d", files))) == ("<f4", (2000,), 128)


@pytest.mark.parametrize("dtype", ARRAY_DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (0, 5), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)], ids=str)
def test_a_header_is_understood_as_numpy_wrote_it(dtype: str, shape: tuple[int, ...], version: tuple[int, int]) -> None:
    array = np.zeros(shape, dtype)
    data = npy(array, version)
    assert parse(data, len(data)) == Array(dtype, shape, len(data) - array.nbytes)
    assert parse(data, len(data) + 1) is None


def headed(text: bytes, version: bytes = b"\1\0", length: int | None = None) -> bytes:
    size = len(text) if length is None else length
    return b"\x93NUMPY" + version + size.to_bytes(2 if version == b"\1\0" else 4, "little") + text


GOOD = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }\n"


def test_the_header_that_the_invalid_ones_derive_from_is_valid() -> None:
    for header in (headed(GOOD), headed(GOOD, b"\2\0"), headed(GOOD.replace(b"'", b'"').replace(b", }", b"}"))):
        assert parse(header, len(header) + 8) == Array("<f4", (2,), len(header))


WRONG = [
    headed(GOOD.replace(b"<f4", b"|O")),
    headed(GOOD.replace(b"<f4", b">f4")),
    headed(GOOD.replace(b"<f4", b"<c8")),
    headed(GOOD.replace(b"'<f4'", b"[('a', '<f4')]")),
    headed(GOOD.replace(b"'<f4'", b"('<f4', (1,))")),
    headed(GOOD.replace(b"'<f4'", b"4")),
    headed(GOOD.replace(b"False", b"True")),
    headed(GOOD.replace(b"False", b"0")),
    headed(GOOD.replace(b"(2,)", b"2")),
    headed(GOOD.replace(b"(2,)", b"(2L,)")),
    headed(GOOD.replace(b"(2,)", b"(True, 2)")),
    headed(GOOD.replace(b"(2,)", b"(-2, -1)")),
    headed(GOOD.replace(b"(2,)", b"(0, " + b"9" * 30 + b")")),
    headed(GOOD.replace(b"(2,)", b"(" + b"1, " * 33 + b"2)")),
    headed(GOOD.replace(b"(2,)", b"(" * 500 + b")" * 500)),
    headed(GOOD.replace(b"(2,)", b"9" * 3000)),
    headed(GOOD.replace(b"(2,)", b"__import__('os').abort()")),
    headed(GOOD.replace(b"(2,)", b"(2,)\n")),
    headed(GOOD.replace(b"}", b"'more': 1}")),
    headed(GOOD.replace(b"'shape': (2,), ", b"")),
    headed(b"{(): 1, {}: 2}"),
    headed(b"()"),
    headed(b""),
    headed(b"\xff" * 50),
    headed(GOOD, b"\4\0"),
    headed(GOOD, b"\1\1"),
    headed(GOOD, length=0),
    headed(GOOD, b"\2\0", length=2**31),
    headed(GOOD[:-1] + b" " * HEADER_BYTES_MAX + b"\n"),
    b"\x93NUMPY",
    b"\x93NUMPY\1\0\1",
]


@pytest.mark.parametrize("header", WRONG, ids=map(str, range(len(WRONG))))
def test_a_file_with_an_invalid_header_is_not_an_array(header: bytes) -> None:
    for values_bytes in (0, 4, 8, 16):
        assert parse(header, len(header) + values_bytes) is None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 127), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_file_whose_header_has_wrong_bytes_is_an_array_only_if_numpy_reads_it(flips: list[tuple[int, int]]) -> None:
    data = bytearray(npy(np.arange(12, dtype="<i2").reshape(3, 4)))
    for at, value in flips:
        data[at] = value
    found = parse(bytes(data), len(data))
    if found is not None:
        array = np.load(io.BytesIO(data))
        assert (array.dtype.str, array.shape) == (found.dtype, found.shape)
        assert array.tobytes() == bytes(data[found.skip :])


# -- in tars ----------------------------------------------------------------------------------------------------------


def members(depth: list[bytes], **others: bytes) -> list[tuple[str, bytes]]:
    found = []
    for i, data in enumerate(depth):
        found += [(f"{i:04}.depth.npy", data), (f"{i:04}.npy", npy(np.int64(i)))]
        found += [(f"{i:04}.{name}", content) for name, content in others.items()]
    return found


def test_members_of_one_header_are_arrays(tmp_path: Path) -> None:
    for number in range(3):
        write_tar(tmp_path / "d" / f"{number}.tar", members(tensors(30, 5, 2, dtype="<u2"), jpg=npy(1)))
    manifest = indexed(tmp_path / "d")
    assert said(manifest, "depth.npy") == ("<u2", (5, 2), 128)
    assert said(manifest, "npy") == ("<i8", (), 128)
    assert said(manifest, "jpg") == OPAQUE
    assert len(read_back(manifest.path)) == 90


def test_tars_with_one_header_each_are_plain_bytes_if_the_headers_differ(tmp_path: Path) -> None:
    for number in range(3):
        write_tar(tmp_path / "d" / f"{number}.tar", members(tensors(5, 2 + number // 2)))
    manifest = indexed(tmp_path / "d")
    assert said(manifest, "depth.npy") == OPAQUE
    assert said(manifest, "npy") == ("<i8", (), 128)


@pytest.mark.parametrize("odd", [b"", npy(np.zeros((2, 5), "<u2")), b"no array"], ids=["empty", "turned", "other"])
@pytest.mark.parametrize("at", [0, 29])
@pytest.mark.parametrize("tar", [0, 2])
def test_one_different_member_of_one_tar_makes_that_field_plain_bytes(
    tmp_path: Path, odd: bytes, at: int, tar: int
) -> None:
    for number in range(3):
        depth = tensors(30, 5, 2, dtype="<u2")
        if number == tar:
            depth[at] = odd
        write_tar(tmp_path / "d" / f"{number}.tar", members(depth))
    manifest = indexed(tmp_path / "d")
    assert said(manifest, "depth.npy") == OPAQUE
    assert said(manifest, "npy") == ("<i8", (), 128)


def test_samples_without_the_array_or_with_interleaved_members_do_not_matter(tmp_path: Path) -> None:
    first, second, third = tensors(3, 4)
    torn = [
        ("0.npy", first),
        ("1.npy", second),
        ("0.txt", b"zero"),
        ("1.txt", b"one"),
        ("2.txt", b""),
        ("3.npy", third),
    ]
    manifest = indexed(write_tar(tmp_path / "t.tar", torn))
    assert said(manifest, "npy") == ("<f4", (4,), 128)
    assert [sample["npy"] for sample in read_back(manifest.path).values()] == [first, second, None, third]


def test_the_header_of_a_member_larger_than_the_window_is_read_at_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quiver_client.indexing.webdataset.PIECE_BYTES", 8192)
    manifest = indexed(write_tar(tmp_path / "t.tar", members(tensors(4, 5000))))
    assert said(manifest, "depth.npy") == ("<f4", (5000,), 128)
    assert len(read_back(manifest.path)) == 4


# -- with a base ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_is_odd", [False, True])
def test_shards_come_from_the_base_and_the_kind_of_the_field_does_not(tmp_path: Path, first_is_odd: bool) -> None:
    good = {f"{i}.npy": data for i, data in enumerate(tensors(200, 40))}
    odd = good | {"odd.npy": npy(np.zeros(3, "<f4"))}
    before, after = (odd, good) if first_is_odd else (good, odd)
    old = indexed(write_tree(tmp_path / "old", before), shard_bytes="4KiB")
    new = indexed(write_tree(tmp_path / "new", after), shard_bytes="4KiB", base=old.path)
    facts = ("<f4", (40,), 128)
    assert (said(old), said(new)) == ((OPAQUE, facts) if first_is_odd else (facts, OPAQUE))
    assert len(set(shard_names(old.path)) - set(shard_names(new.path))) <= first_is_odd
    assert {key: sample["data"] for key, sample in read_back(new.path).items()} == after
