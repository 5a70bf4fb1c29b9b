"""Folders of files and of images."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quiver.errors import BadRequest, Misconfigured, NotFound, QuiverError
from quiver.manifest import Manifest
from quiver_client.indexing import index
from quiver_client.indexing.errors import SourceChanged
from tests.indexing.support import read_back, shard_names, warned, write_tree

ODD = {"50%.bin": b"1", "a b/#x?y.bin": b"22", "ü/é;&+.bin": b"333", "a.b/c": b"", "a/b": b"4", "%41": b"5"}


class Seen:
    def __init__(self) -> None:
        self.total_bytes = self.read_bytes = 0

    def start(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes

    def advance(self, read_bytes: int) -> None:
        self.read_bytes += read_bytes


def test_every_file_of_a_folder_is_a_sample_whatever_its_name(tmp_path: Path) -> None:
    source = write_tree(tmp_path / "50% of ü #1", ODD)
    seen = Seen()
    report = index(source, tmp_path / "m.quiver", progress=seen)
    assert read_back(tmp_path / "m.quiver") == {name: {"data": data} for name, data in ODD.items()}
    assert (report.samples, report.format, report.layout, report.warnings) == (6, "files", "mixed", ())
    assert seen.total_bytes == seen.read_bytes == report.bytes == sum(map(len, ODD.values()))


def test_keys_are_in_byte_order_of_the_path(tmp_path: Path) -> None:
    index(write_tree(tmp_path / "d", ODD), tmp_path / "m.quiver")
    manifest = Manifest.open(tmp_path / "m.quiver")
    keys = [manifest.key(at) for at in range(len(manifest))]
    assert keys == sorted(ODD, key=str.encode)


@pytest.mark.parametrize("spelling", ["{}", "{}/", "file://{}"])
def test_a_source_is_the_same_however_it_is_spelled(tmp_path: Path, spelling: str) -> None:
    source = write_tree(tmp_path / "d", {"x": b"1", "y/z": b"2"})
    index(spelling.format(source), tmp_path / "m.quiver")
    index(source, tmp_path / "n.quiver")
    assert (tmp_path / "m.quiver").read_bytes() == (tmp_path / "n.quiver").read_bytes()


def test_a_second_run_gives_the_same_bytes_even_with_the_manifest_inside_the_source(tmp_path: Path) -> None:
    source = write_tree(tmp_path / "d", {f"{i % 7}/{i}": os.urandom(i) for i in range(600)})
    index(source, source / "m.quiver", shard_bytes="16KiB")
    first = (source / "m.quiver").read_bytes()
    report = index(source, source / "m.quiver", shard_bytes="16KiB")
    assert (source / "m.quiver").read_bytes() == first
    assert report.samples == 600


def test_links_are_followed_without_cycles_and_broken_ones_are_named(tmp_path: Path) -> None:
    write_tree(tmp_path / "elsewhere", {"z": b"3"})
    source = write_tree(tmp_path / "d", {"x": b"1", "sub/y": b"2"})
    (source / "file").symlink_to(source / "x")
    (source / "folder").symlink_to(tmp_path / "elsewhere")
    (source / "sub" / "up").symlink_to(source)
    (source / "nowhere").symlink_to("missing")
    (source / "itself").symlink_to("itself")
    os.mkfifo(source / "pipe")
    report = index(source, tmp_path / "m.quiver")
    assert {key: sample["data"] for key, sample in read_back(tmp_path / "m.quiver").items()} == {
        "x": b"1",
        "file": b"1",
        "folder/z": b"3",
        "sub/y": b"2",
    }
    assert warned(report) == {
        "left out, symbolic links to nothing": ["itself", "nowhere"],
        "left out, neither a file nor a folder": ["pipe"],
        "left out, symbolic links to a folder above themselves": ["sub/up"],
    }


def test_a_single_file_and_a_pattern_are_sources(tmp_path: Path) -> None:
    source = write_tree(tmp_path / "d", {f"part-{i:03d}/x y": bytes([i]) for i in range(12)})
    index(f"{source}/part-003/x y", tmp_path / "m.quiver")
    assert read_back(tmp_path / "m.quiver") == {"x y": {"data": b"\3"}}
    index(f"{source}/part-{{008..010}}/x y", tmp_path / "n.quiver")
    assert list(read_back(tmp_path / "n.quiver")) == ["part-008/x y", "part-009/x y", "part-010/x y"]
    with pytest.raises(NotFound, match="part-012/x y, which the source's pattern names"):
        index(f"{source}/part-{{010..012}}/x y", tmp_path / "o.quiver")


def test_files_larger_than_a_piece_are_hashed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(100_000)
    source = write_tree(tmp_path / "d", {"large": data, "small": b"x"})
    index(source, tmp_path / "whole.quiver")
    monkeypatch.setattr("quiver_client.indexing.reading.PIECE_BYTES", 4096)
    index(source, tmp_path / "pieces.quiver")
    assert (tmp_path / "whole.quiver").read_bytes() == (tmp_path / "pieces.quiver").read_bytes()


def test_class_folders_give_labels_and_class_names(tmp_path: Path) -> None:
    source = write_tree(
        tmp_path / "d",
        {"cat-x/1.png": b"1", "cat/2.JPG": b"2", "cat/deep/er/3.webp": b"3", "dog/4.jpeg": b"4", "dog/notes.txt": b"-"},
    )
    write_tree(source, {"README": b"-"})
    report = index(source, tmp_path / "m.quiver")
    assert report.format == "imagefolder"
    assert {key: sample["label"] for key, sample in read_back(tmp_path / "m.quiver").items()} == {
        "cat-x/1.png": 1,
        "cat/2.JPG": 0,
        "cat/deep/er/3.webp": 0,
        "dog/4.jpeg": 2,
    }
    image, label = Manifest.open(tmp_path / "m.quiver").header.fields
    assert (image.name, image.type, label.name, label.type) == ("image", "bytes", "label", "int64")
    assert label.classes == ("cat", "cat-x", "dog")
    assert warned(report) == {"left out, not images by their names": ["README", "dog/notes.txt"]}


def test_images_outside_class_folders_are_never_dropped_silently(tmp_path: Path) -> None:
    source = write_tree(tmp_path / "d", {"cat/1.png": b"1", "2.png": b"2"})
    report = index(source, tmp_path / "m.quiver")
    assert (report.format, report.samples) == ("files", 2)
    assert [names for what, names in warned(report).items() if "--format imagefolder" in what] == [["2.png"]]
    report = index(source, tmp_path / "m.quiver", format="imagefolder")
    assert warned(report) == {"left out, images outside any class folder": ["2.png"]}
    with pytest.raises(BadRequest, match=r"no folders of images.*--format files"):
        index(write_tree(tmp_path / "e", {"1.png": b"1"}), tmp_path / "m.quiver", format="imagefolder")


def test_equal_samples_are_stored_once(tmp_path: Path) -> None:
    source = write_tree(tmp_path / "d", {"a/1": b"same", "b/2": b"same", "c": b"other", "d": b"", "e": b""})
    report = index(source, tmp_path / "m.quiver")
    assert (report.samples, report.distinct, report.bytes) == (5, 3, 9)
    assert read_back(tmp_path / "m.quiver")["b/2"] == {"data": b"same"}
    assert list(Manifest.open(tmp_path / "m.quiver").tables.object_of).count(1) == 0  # the first one is read


@pytest.mark.parametrize(
    ("make", "wrong", "says"),
    [
        (lambda d: {"source": d / "missing"}, NotFound, "there is no .*missing; check"),
        (lambda d: {"source": (d / "empty").mkdir() or d / "empty"}, NotFound, "empty holds no objects"),
        (lambda d: {"source": "ftp://host/x"}, Misconfigured, "scheme 'ftp' is unknown"),
        (lambda d: {"output": d}, Misconfigured, "is a folder; name a file"),
        (lambda d: {"output": d / "no" / "m.quiver"}, NotFound, "there is no folder .*no; make it first"),
        (lambda d: {"output": "s3://b/m.quiver"}, Misconfigured, "must be a local file"),
        (lambda d: {"base": d / "old.quiver"}, NotFound, "no manifest at .*old.quiver"),
        (lambda d: {"shard_bytes": "1KiB"}, Misconfigured, "a shard size of 1KiB is outside 4 KiB to 1 GiB"),
        (lambda d: {"format": "zip"}, Misconfigured, "unknown format 'zip'"),
        (lambda d: {"layout": "random"}, Misconfigured, "unknown layout 'random'"),
        (lambda d: {"format": "webdataset"}, BadRequest, "no file that ends in .tar"),
        (lambda d: {"format": "parquet"}, BadRequest, "no file that ends in .parquet"),
    ],
)
def test_a_failure_of_indexing_is_explained_and_leaves_no_file(
    tmp_path: Path, make: object, wrong: type[QuiverError], says: str
) -> None:
    source = write_tree(tmp_path / "d", {"x": b"1"})
    asked = {"source": source, "output": tmp_path / "m.quiver", **make(tmp_path)}  # type: ignore[operator]
    with pytest.raises(wrong, match=says):
        index(**asked)
    assert not list(tmp_path.glob("*quiver*"))


def test_a_name_that_is_not_utf8_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / os.fsdecode(b"caf\xe9.jpg")).write_bytes(b"1")
    with pytest.raises(BadRequest, match=r"caf\\xe9.jpg is not UTF-8"):
        index(tmp_path / "d", tmp_path / "m.quiver")


@pytest.mark.parametrize("change", ["vanish", "grow", "shrink", "touch"])
def test_a_file_that_changes_while_being_indexed_is_named(tmp_path: Path, change: str) -> None:
    source = write_tree(tmp_path / "d", {"a": b"1234", "b": b"5678"})

    class Meddler(Seen):
        def start(self, total_bytes: int) -> None:  # after listing and before reading
            path = source / "b"
            if change == "vanish":
                path.unlink()
            elif change == "touch":
                os.utime(path, ns=(1, 1))
            else:
                path.write_bytes(b"longer than before" if change == "grow" else b"5")

    says = {"vanish": "vanished", "shrink": "became shorter"}.get(change, "changed")
    with pytest.raises(SourceChanged, match=f"d/b {says} while it was being indexed"):
        index(source, tmp_path / "m.quiver", progress=Meddler())
    assert not list(tmp_path.glob("*quiver*"))


AS_NOBODY = """
import os, sys
from quiver_client.indexing import index
from quiver.errors import QuiverError
os.setuid(65534)
try:
    index(sys.argv[1], sys.argv[2])
except QuiverError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that all users can read. Not below ``tmp_path``, which pytest makes private."""
    path = Path(tempfile.mkdtemp(prefix="quiver-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become somebody else")
def test_an_unreadable_file_or_output_folder_is_named(public: Path) -> None:
    source = write_tree(public / "d", {"a": b"1", "secret": b"2"})
    (source / "secret").chmod(0)
    (public / "out").mkdir()
    (public / "out").chmod(0o777)

    def said(source: Path, output: Path) -> str:
        command = [sys.executable, "-c", AS_NOBODY, str(source), str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        return done.stdout + done.stderr[-500:]

    assert f"Forbidden cannot read {source}/secret: permission denied" in said(source, public / "out" / "m.quiver")
    assert f"DiskFailed cannot write in {public}" in said(source, public / "m.quiver")
    source.chmod(0)
    assert f"Forbidden cannot read {source}: permission denied" in said(source, public / "out" / "m.quiver")


def test_a_sequential_layout_of_files_keeps_their_order(tmp_path: Path) -> None:
    source = write_tree(tmp_path / "d", {f"{i:03d}": os.urandom(1000) for i in range(100)})
    report = index(source, tmp_path / "m.quiver", layout="sequential", shard_bytes="8KiB")
    assert list(Manifest.open(tmp_path / "m.quiver").tables.object_of) == list(range(100))
    assert report.shards == len(shard_names(tmp_path / "m.quiver")) > 10
