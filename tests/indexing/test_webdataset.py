"""WebDataset tars written by several tools, valid and damaged."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from quiver.errors import BadRequest
from quiver.manifest import Manifest
from quiver_client.indexing import index
from tests.indexing.support import read_back, warned, write_tar, write_tree

LONG = "deep/" * 30 + "x" * 90


def samples(count: int, size: int = 300) -> list[tuple[str, bytes]]:
    members = []
    for i in range(count):
        members += [(f"dir/{i:04d}.jpg", os.urandom(size)), (f"dir/{i:04d}.cls", b"%d" % (i % 10))]
        members.append((f"dir/{i:04d}.Seg.PNG", os.urandom(size // 2)))
    return members


def expected(members: list[tuple[str, bytes]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, data in members:
        folder, _, base = name.rpartition("/")
        stem, _, extension = base.partition(".")
        value = int(data) if extension == "cls" else data
        found.setdefault(f"{folder}/{stem}" if folder else stem, {})[extension.lower()] = value
    return found


@pytest.mark.parametrize("style", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_of_one_name_are_a_sample_in_every_style_of_header(tmp_path: Path, style: int) -> None:
    members = samples(30)
    if style != tarfile.USTAR_FORMAT:
        members += [(f"{LONG}/ü.jpg", b"long"), (f"{LONG}/ü.cls", b" -7\n"), (f"{LONG}/ü.seg.png", b"")]
    else:
        members += [(f"{'d' * 100}/{'x' * 60}.{e}", b"1") for e in ("jpg", "cls", "seg.png")]
    write_tar(tmp_path / "t.tar", members, format=style)
    report = index(tmp_path / "t.tar", tmp_path / "m.quiver", shard_bytes="4KiB")
    assert read_back(tmp_path / "m.quiver") == expected(members)
    assert (report.format, report.layout, report.warnings) == ("webdataset", "sequential", ())
    fields = Manifest.open(tmp_path / "m.quiver").header.fields
    assert [(field.name, field.type) for field in fields] == [("cls", "int64"), ("jpg", "bytes"), ("seg.png", "bytes")]


@pytest.mark.skipif(not shutil.which("tar"), reason="needs GNU tar")
@pytest.mark.parametrize("style", ["gnu", "ustar", "posix", "v7"])
def test_tars_of_gnu_tar_are_read_with_folders_and_leading_dots(tmp_path: Path, style: str) -> None:
    files = {"a/1.jpg": b"1" * 1000, "a/1.txt": b"one", "a/2.jpg": b"2", "a/2.txt": b""}
    write_tree(tmp_path / "d", files)
    subprocess.run(["tar", f"--format={style}", "--sort=name", "-cf", "../t.tar", "."], cwd=tmp_path / "d", check=True)
    report = index(tmp_path / "t.tar", tmp_path / "m.quiver")
    assert read_back(tmp_path / "m.quiver") == expected(list(files.items()))
    assert report.warnings == ()


def test_tars_of_webdatasets_writer_are_read(tmp_path: Path) -> None:
    import webdataset

    with webdataset.TarWriter(str(tmp_path / "t-000.tar"), encoder=False) as writer:
        for i in range(5):
            writer.write({"__key__": f"s{i}", "jpg": b"%d" % i, "cls": b"%d" % i, "json": b"{}"})
    index(tmp_path / "t-000.tar", tmp_path / "m.quiver")
    assert read_back(tmp_path / "m.quiver") == {f"s{i}": {"jpg": b"%d" % i, "cls": i, "json": b"{}"} for i in range(5)}


def test_keys_of_several_tars_begin_with_the_tar_and_other_files_are_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "d" / "train" / "0.tar", [("x.jpg", b"1")])
    write_tar(tmp_path / "d" / "train" / "1.tar", [("x.jpg", b"2")])
    write_tree(tmp_path / "d", {"README.md": b"hello"})
    report = index(tmp_path / "d", tmp_path / "m.quiver")
    assert list(read_back(tmp_path / "m.quiver")) == ["train/0.tar/x", "train/1.tar/x"]
    assert warned(report) == {"left out, names do not end in .tar": ["README.md"]}


def test_samples_that_lack_a_member_are_kept_and_named(tmp_path: Path) -> None:
    members = [("a.jpg", b"1"), ("a.cls", b"1"), ("b.cls", b"2"), ("c.jpg", b"3"), ("c.txt", b"see")]
    write_tar(tmp_path / "t.tar", members)
    report = index(tmp_path / "t.tar", tmp_path / "m.quiver")
    assert read_back(tmp_path / "m.quiver") == {
        "a": {"jpg": b"1", "txt": None, "cls": 1},
        "b": {"jpg": None, "txt": None, "cls": 2},
        "c": {"jpg": b"3", "txt": b"see", "cls": None},
    }
    assert warned(report) == {
        "samples without a member .jpg": ["b"],
        "samples without a member .txt": ["a", "b"],
        "samples without a member .cls": ["c"],
    }


def test_interleaved_members_are_joined_and_named(tmp_path: Path) -> None:
    members = samples(40, 2000)
    sorted_by_extension = sorted(members, key=lambda member: member[0].partition(".")[2])
    write_tar(tmp_path / "straight.tar", members)
    write_tar(tmp_path / "torn.tar", sorted_by_extension)
    index(tmp_path / "straight.tar", tmp_path / "straight.quiver")
    report = index(tmp_path / "torn.tar", tmp_path / "torn.quiver")
    assert read_back(tmp_path / "torn.quiver") == expected(members)
    [names] = [names for what, names in warned(report).items() if "interleaved" in what]
    assert sorted(names) == sorted(expected(members))
    digests = [
        set(map(bytes, Manifest.open(tmp_path / name).tables.digests)) for name in ("straight.quiver", "torn.quiver")
    ]
    assert digests[0] == digests[1]


def test_a_class_far_from_its_image_is_joined_without_reading_again(tmp_path: Path) -> None:
    members = [("a.jpg", b"1"), ("b.jpg", b"2"), ("a.cls", b"5"), ("b.cls", b"6")]
    write_tar(tmp_path / "t.tar", members)
    report = index(tmp_path / "t.tar", tmp_path / "m.quiver")
    assert read_back(tmp_path / "m.quiver") == expected(members)
    assert warned(report) == {"samples whose members are interleaved with those of others": ["a", "b"]}


@pytest.mark.parametrize("window_bytes", [2048, 10_000, 1 << 20])
def test_samples_may_be_larger_than_the_window_that_is_read(
    tmp_path: Path, window_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [("a.jpg", os.urandom(50_000)), ("a.png", b"x"), ("b.png", b"y"), ("b.jpg", os.urandom(9_999))]
    members += [("c.jpg", os.urandom(3)), ("c.png", os.urandom(20_000)), *samples(20, 900)]
    write_tar(tmp_path / "t.tar", members)
    index(tmp_path / "t.tar", tmp_path / "whole.quiver")
    monkeypatch.setattr("quiver_client.indexing.webdataset.PIECE_BYTES", window_bytes)
    index(tmp_path / "t.tar", tmp_path / "m.quiver")
    assert (tmp_path / "m.quiver").read_bytes() == (tmp_path / "whole.quiver").read_bytes()
    read_back(tmp_path / "m.quiver")


def test_links_sparse_files_and_names_without_extension_are_skipped_and_named(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for name, kind, data in (
            ("a.jpg", tarfile.REGTYPE, b"1"),
            ("b.jpg", tarfile.SYMTYPE, b""),
            ("c.jpg", tarfile.LNKTYPE, b""),
            ("folder.d", tarfile.DIRTYPE, b""),
            ("README", tarfile.REGTYPE, b"text"),
            (".hidden.jpg", tarfile.REGTYPE, b"text"),
            ("z.jpg", tarfile.REGTYPE, b"9"),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = kind, len(data), "a.jpg"
            tar.addfile(info, io.BytesIO(data))
    report = index(tmp_path / "t.tar", tmp_path / "m.quiver")
    assert list(read_back(tmp_path / "m.quiver")) == ["a", "z"]
    assert warned(report) == {
        "members left out, symbolic link": ["t.tar: b.jpg"],
        "members left out, hard link": ["t.tar: c.jpg"],
        "members left out, names without an extension": ["t.tar: README", "t.tar: .hidden.jpg"],
    }


@pytest.mark.skipif(not shutil.which("tar"), reason="needs GNU tar")
@pytest.mark.parametrize("style", ["gnu", "posix"])
def test_sparse_members_are_skipped_and_named(tmp_path: Path, style: str) -> None:
    write_tree(tmp_path / "d", {"a.jpg": b"1", "z.jpg": b"2"})
    with (tmp_path / "d" / "b.jpg").open("wb") as file:
        for at in range(0, 12 << 20, 1 << 20):  # more holes than fit one header
            file.seek(at)
            file.write(b"data")
    command = ["tar", "--sparse", f"--format={style}", "-cf", "../t.tar", "a.jpg", "b.jpg", "z.jpg"]
    subprocess.run(command, cwd=tmp_path / "d", check=True)
    report = index(tmp_path / "t.tar", tmp_path / "m.quiver")
    left_out = warned(report).get("members left out, sparse file", [])
    if not left_out and (tmp_path / "t.tar").stat().st_size > 11 << 20:
        pytest.skip("this file system has no holes")
    assert left_out == ["t.tar: b.jpg"]
    assert list(read_back(tmp_path / "m.quiver")) == ["a", "z"]


def test_a_duplicate_member_is_an_error(tmp_path: Path) -> None:
    for members in (
        [("a.jpg", b"1"), ("a.JPG", b"2")],
        [("a.jpg", b"1"), ("b.jpg", b"2"), ("a.jpg", b"3")],
        [("a.jpg", b"1"), ("a.cls", b"2"), ("b.jpg", b"2"), ("a.cls", b"3")],
    ):
        write_tar(tmp_path / "t.tar", members)
        with pytest.raises(BadRequest, match=r"t.tar holds the member a.(jpg|cls) twice"):
            index(tmp_path / "t.tar", tmp_path / "m.quiver")


@pytest.mark.parametrize("text", [b"cat", b"", b"1.5", b"9" * 30, b"1" * 100])
def test_a_class_that_is_not_an_integer_is_an_error_that_names_the_sample(tmp_path: Path, text: bytes) -> None:
    write_tar(tmp_path / "t.tar", [("a.jpg", b"1"), ("a.cls", b"1"), ("b.jpg", b"2"), ("b.cls", text)])
    with pytest.raises(BadRequest, match=r"t.tar: b.cls holds .* no integer"):
        index(tmp_path / "t.tar", tmp_path / "m.quiver")


def test_a_broken_tar_is_an_error_that_names_the_tar_and_the_offset(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "t.tar", samples(3, 1000)).read_bytes()
    broken = {
        "at byte 0 of 9: |is cut short|ends in": b"not a tar",
        "wrong checksum": whole[:2560] + b"\xff" + whole[2561:],
        "at byte 0 .* is cut short: member 'dir/0000.jpg' needs 1000": whole[:700],
        "at byte 1536 of 1700 it ends in the middle of a header": whole[:1700],
    }
    for says, data in broken.items():
        (tmp_path / "t.tar").write_bytes(data)
        with pytest.raises(BadRequest, match=f"t.tar .*({says})"):
            index(tmp_path / "t.tar", tmp_path / "m.quiver")
    assert not list(tmp_path.glob("*quiver*"))


def test_a_tar_cut_between_two_members_is_named(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "t.tar", [("a.jpg", b"1"), ("b.jpg", b"2")]).read_bytes()
    (tmp_path / "t.tar").write_bytes(whole[:1024])
    report = index(tmp_path / "t.tar", tmp_path / "m.quiver")
    assert warned(report) == {"tars without an end mark, perhaps cut short between two members": ["t.tar"]}


def test_a_compressed_tar_is_refused_with_advice(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "d" / "0.tar", samples(3)).read_bytes()
    (tmp_path / "d" / "1.tar.gz").write_bytes(gzip.compress(whole))
    with pytest.raises(BadRequest, match=r"1.tar.gz is compressed.*decompress"):
        index(tmp_path / "d", tmp_path / "m.quiver")
    (tmp_path / "d" / "1.tar.gz").rename(tmp_path / "d" / "1.tar")
    with pytest.raises(BadRequest, match=r"1.tar is compressed \(gzip\).*decompress"):
        index(tmp_path / "d", tmp_path / "m.quiver")


def test_tars_without_samples_or_without_bytes_are_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "t.tar", [])
    with pytest.raises(BadRequest, match="holds no samples"):
        index(tmp_path / "t.tar", tmp_path / "m.quiver")
    write_tar(tmp_path / "t.tar", [("a.cls", b"1")])
    with pytest.raises(BadRequest, match=r"holds bytes beside .cls"):
        index(tmp_path / "t.tar", tmp_path / "m.quiver")
    write_tar(tmp_path / "t.tar", [(f"a.{i}.jpg", b"1") for i in range(300)])
    with pytest.raises(BadRequest, match="more than 256 different extensions"):
        index(tmp_path / "t.tar", tmp_path / "m.quiver")


def test_samples_keep_their_names_unless_two_tars_use_the_same(tmp_path: Path) -> None:
    for tar in range(2):
        members = [(f"{tar}{number:03d}.txt", b"%d" % number) for number in range(3)]
        write_tar(tmp_path / "apart" / f"t{tar}.tar", members)
        write_tar(tmp_path / "alike" / f"t{tar}.tar", [(name[1:], data) for name, data in members])
    index(tmp_path / "apart", tmp_path / "apart.quiver")
    assert list(read_back(tmp_path / "apart.quiver")) == ["0000", "0001", "0002", "1000", "1001", "1002"]
    index(tmp_path / "alike", tmp_path / "alike.quiver")
    assert list(read_back(tmp_path / "alike.quiver")) == [
        f"t{tar}.tar/00{number}" for tar in (0, 1) for number in range(3)
    ]


def test_bytes_after_the_end_of_a_tar_are_reported(tmp_path: Path) -> None:
    first, second = write_tar(tmp_path / "a.tar", samples(3)), write_tar(tmp_path / "b.tar", samples(2))
    joined = tmp_path / "joined" / "ab.tar"
    joined.parent.mkdir()
    joined.write_bytes(first.read_bytes() + second.read_bytes())
    report = index(joined.parent, tmp_path / "m.quiver")
    (what,) = [notice.what for notice in report.warnings if "ab.tar" in notice.names]
    assert "after their end mark" in what
