"""Sources on the network: S3 (moto's server) and HTTP servers, with and without byte ranges and index pages."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quiver.errors import BadRequest, Forbidden, Misconfigured, NotFound, Unavailable
from quiver.manifest import Manifest
from quiver_client.indexing import index
from quiver_client.indexing.errors import SourceChanged
from tests.indexing.conftest import Bucket, NoPages, Plain, Ranges, Serve
from tests.indexing.support import read_back, shard_names, warned, write_tar, write_tree

ODD = ["a b.png", "50%.png", "h#x?y.png", "%41.png", "ü+~[1]{2}.png", "deep/er/z.png"]
TAR = [(f"{i:03d}.{extension}", b"%d" % i * 50) for i in range(20) for extension in ("jpg", "txt")]


def test_a_prefix_of_a_bucket_is_a_folder(tmp_path: Path, bucket: Bucket) -> None:
    files = {f"{folder}/{name}": os.urandom(50) for folder in ("cat", "dog") for name in ODD}
    for name, data in files.items():
        bucket.put(f"my data/{name}", data)
    bucket.put("my data/cat/", b"")  # a web console makes such an object for a folder
    bucket.put("my data/old.quiver", b"-")
    bucket.put("my datab/other.png", b"-")
    report = index(f"s3://{bucket.name}/my data", tmp_path / "m.quiver")
    assert {key: sample["image"] for key, sample in read_back(tmp_path / "m.quiver").items()} == files
    assert Manifest.open(tmp_path / "m.quiver").header.base == f"s3://{bucket.name}/my%20data/"
    assert warned(report) == {"left out, Quiver manifests": ["old.quiver"]}
    index(f"s3://{bucket.name}/my data/", tmp_path / "n.quiver")
    assert (tmp_path / "n.quiver").read_bytes() == (tmp_path / "m.quiver").read_bytes()
    index(write_tree(tmp_path / "d", files), tmp_path / "local.quiver")
    assert shard_names(tmp_path / "local.quiver") == shard_names(tmp_path / "m.quiver")


def test_objects_are_recorded_with_their_etag(tmp_path: Path, bucket: Bucket) -> None:
    bucket.put("x.bin", b"1")
    index(f"s3://{bucket.name}", tmp_path / "m.quiver")
    found = Manifest.open(tmp_path / "m.quiver").object(0)
    assert (found.path, found.size) == ("x.bin", 1)
    assert found.etag.strip('"') == "c4ca4238a0b923820dcc509a6f75849b"
    assert found.mtime_ns > 0


def test_tars_and_parquet_files_of_a_bucket_are_read(tmp_path: Path, bucket: Bucket) -> None:
    data = write_tar(tmp_path / "t.tar", TAR).read_bytes()
    for i in range(3):
        bucket.put(f"w/t-{i:03d}.tar", data)
    index(f"s3://{bucket.name}/w/t-{{000..001}}.tar", tmp_path / "m.quiver")
    assert list(read_back(tmp_path / "m.quiver"))[19:21] == ["t-000.tar/019", "t-001.tar/000"]
    index(f"s3://{bucket.name}/w/t-002.tar", tmp_path / "m.quiver")
    assert read_back(tmp_path / "m.quiver")["003"] == {"jpg": b"3" * 50, "txt": b"3" * 50}
    with pytest.raises(NotFound, match=r"w/t-003.tar"):
        index(f"s3://{bucket.name}/w/t-{{000..003}}.tar", tmp_path / "m.quiver")
    pq.write_table(pa.table({"b": [b"1", b"22"]}), tmp_path / "t.parquet")
    bucket.put("p/t.parquet", (tmp_path / "t.parquet").read_bytes())
    index(f"s3://{bucket.name}/p/", tmp_path / "m.quiver")
    assert list(read_back(tmp_path / "m.quiver").values()) == [{"b": b"1"}, {"b": b"22"}]


def test_large_objects_are_streamed_in_pieces(tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(200_000)
    bucket.put("x", data)
    monkeypatch.setattr("quiver_client.indexing.reading.PIECE_BYTES", 10_000)
    index(f"s3://{bucket.name}/x", tmp_path / "m.quiver")
    assert read_back(tmp_path / "m.quiver") == {"x": {"data": data}}


@pytest.mark.parametrize("change", ["replace", "resize"])
def test_an_object_that_changes_while_being_indexed_is_named(tmp_path: Path, bucket: Bucket, change: str) -> None:
    bucket.put("d/x.bin", b"1")

    class Meddler:
        def start(self, total_bytes: int) -> None:
            bucket.put("d/x.bin", b"2" if change == "replace" else b"333")

        def advance(self, read_bytes: int) -> None:
            pass

    with pytest.raises(SourceChanged, match=r"d/x.bin changed while it was being indexed"):
        index(f"s3://{bucket.name}/d", tmp_path / "m.quiver", progress=Meddler())
    assert not list(tmp_path.iterdir())


def test_a_missing_bucket_or_object_is_named(tmp_path: Path, bucket: Bucket) -> None:
    with pytest.raises(NotFound, match=r"s3://.*/nothing holds no objects"):
        index(f"s3://{bucket.name}/nothing", tmp_path / "m.quiver")
    with pytest.raises(NotFound, match=r"no-such-bucket.* does not exist"):
        index("s3://no-such-bucket/x/", tmp_path / "m.quiver")
    with pytest.raises(BadRequest, match="names no bucket"):
        index("s3:///x", tmp_path / "m.quiver")


def test_an_index_page_is_crawled_but_never_above_the_folder(tmp_path: Path, serve: Serve) -> None:
    files = {f"{folder}/{name}": os.urandom(50) for folder in ("cat", "dog") for name in ODD}
    root = write_tree(tmp_path / "d" / "my set", files)
    write_tree(tmp_path / "d", {"outside.png": b"-"})
    url = serve(tmp_path / "d")
    report = index(f"{url}/my%20set", tmp_path / "m.quiver")
    assert {key: sample["image"] for key, sample in read_back(tmp_path / "m.quiver").items()} == files
    assert report.warnings == ()
    assert Manifest.open(tmp_path / "m.quiver").header.base == f"{url}/my%20set/"
    index(f"{url}/my set/", tmp_path / "n.quiver")
    assert (tmp_path / "n.quiver").read_bytes() == (tmp_path / "m.quiver").read_bytes()
    index(root, tmp_path / "local.quiver")
    assert shard_names(tmp_path / "local.quiver") == shard_names(tmp_path / "m.quiver")


@pytest.mark.parametrize(
    "page",
    [  # as nginx, Apache and a page with whole addresses write them
        '<a href="../">../</a><a href="a.bin">a.bin</a><a href="s/">s/</a>',
        '<a href="?C=N;O=D">Name</a><a href="/">Parent</a><a href="/d/a.bin">a</a><a href="/d/s/">s</a>',
        '<a href="{url}/d/a.bin">a</a><a href="s/">s</a><a href="http://elsewhere.example/x">x</a>'
        '<a href="#top">top</a><a href="../outside.bin">o</a><a href="/d/../outside.bin">o</a><a>no</a>',
    ],
)
def test_index_pages_of_several_servers_are_understood(tmp_path: Path, serve: Serve, page: str) -> None:
    write_tree(tmp_path / "w", {"d/a.bin": b"1", "d/s/b.bin": b"2", "outside.bin": b"-"})
    url = serve(tmp_path / "w")
    (tmp_path / "w" / "d" / "index.html").write_text(page.replace("{url}", url))
    index(f"{url}/d/", tmp_path / "m.quiver")
    assert {key: sample["data"] for key, sample in read_back(tmp_path / "m.quiver").items()} == {
        "a.bin": b"1",
        "s/b.bin": b"2",
    }


def test_objects_named_one_by_one_need_no_index_page(tmp_path: Path, serve: Serve) -> None:
    for i in range(3):
        write_tar(tmp_path / "w" / "d" / f"t {i:03d}.tar", TAR)
    url = serve(tmp_path / "w", NoPages)
    index(f"{url}/d/t%20{{000..002}}.tar", tmp_path / "m.quiver")
    assert list(read_back(tmp_path / "m.quiver"))[20] == "t 001.tar/000"
    index(f"{url}/d/t%20001.tar", tmp_path / "m.quiver")
    assert read_back(tmp_path / "m.quiver")["003"]["jpg"] == b"3" * 50
    with pytest.raises(Forbidden, match="status 403"):
        index(f"{url}/d/", tmp_path / "m.quiver")


def test_a_server_without_byte_ranges_serves_whole_files_but_no_tars(tmp_path: Path, serve: Serve) -> None:
    write_tree(tmp_path / "w", {"d/a.bin": b"1", "d/b.bin": b"2"})
    write_tar(tmp_path / "w" / "t.tar", TAR)
    url = serve(tmp_path / "w", Plain)
    index(f"{url}/d/", tmp_path / "m.quiver")
    assert read_back(tmp_path / "m.quiver") == {"a.bin": {"data": b"1"}, "b.bin": {"data": b"2"}}
    with pytest.raises(BadRequest, match=r"t.tar: the server does not answer byte ranges"):
        index(f"{url}/t.tar", tmp_path / "m.quiver")


def test_requested_paths_have_no_doubled_slashes(tmp_path: Path, serve: Serve) -> None:
    asked: list[str] = []

    class Strict(Ranges):
        def send_response(self, code: int, message: str | None = None) -> None:
            asked.append(self.path)
            super().send_response(code, message)

    url = serve(write_tree(tmp_path / "w", {"d/e/x.bin": b"1", "y.bin": b"2"}), Strict)
    index(f"{url}/d/e/x.bin", tmp_path / "m.quiver")
    index(f"{url}/", tmp_path / "n.quiver")
    assert read_back(tmp_path / "n.quiver") == {"d/e/x.bin": {"data": b"1"}, "y.bin": {"data": b"2"}}
    assert {"/d/e/x.bin", "/y.bin"} <= set(asked)
    assert not [path for path in asked if "//" in path]


def test_a_missing_file_or_server_is_named(tmp_path: Path, serve: Serve) -> None:
    url = serve(write_tree(tmp_path / "w", {"x.bin": b"1"}))
    with pytest.raises(NotFound, match=r"there is no http.*/missing.tar"):
        index(f"{url}/missing.tar", tmp_path / "m.quiver")
    with pytest.raises(Misconfigured, match="no '\\?' or '#' part"):
        index(f"{url}/x.bin?token=1", tmp_path / "m.quiver")
    with pytest.raises(Unavailable, match="does not answer"):
        index("http://127.0.0.1:9/x", tmp_path / "m.quiver")


def test_names_that_a_server_could_misread_are_skipped_and_named(tmp_path: Path, serve: Serve) -> None:
    odd = ["a\nb.png", "a\\b.png", "a%2fb.png", "x\x01.png"]
    url = serve(write_tree(tmp_path / "w", dict.fromkeys([*odd, *ODD], b"1")))
    report = index(f"{url}/", tmp_path / "m.quiver")
    assert set(read_back(tmp_path / "m.quiver")) == set(ODD)
    named = warned(report)["left out, names that cannot be asked for unmistakably"]
    assert sorted(named) == ["a%2fb.png", "a\\b.png", "a\\nb.png", "x\\x01.png"]
    with pytest.raises(BadRequest, match="control character"):
        index(f"{url}/a%0ab.png", tmp_path / "n.quiver")


@pytest.mark.parametrize("key", ["d/a//b.png", "d/x\x01.png", "d/x\ty"])
def test_a_key_that_cannot_be_requested_is_named(tmp_path: Path, bucket: Bucket, key: str) -> None:
    bucket.put("d/ok.png", b"1")
    bucket.put(key, b"2")
    with pytest.raises(BadRequest, match="rename the object") as caught:
        index(f"s3://{bucket.name}/d/", tmp_path / "m.quiver")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        *(
            "http://user:hush@127.0.0.1:9/x/",
            "https://user:hush@127.0.0.1:9/t-{000..009}.tar",
            "s3://key:hush@bucket/x",
        ),
        *("http://user:hu/sh@127.0.0.1:9/x", "https://hush@127.0.0.1:9/"),
    ],
)
def test_credentials_in_a_source_are_refused_and_not_repeated(tmp_path: Path, source: str) -> None:
    with pytest.raises(BadRequest, match="user or a password") as caught:
        index(source, tmp_path / "m.quiver")
    assert "hush" not in str(caught.value)
    assert "hu/sh" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_redirect_is_refused_and_the_error_names_its_target(tmp_path: Path, serve: Serve) -> None:
    class Elsewhere(Ranges):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", "https://else.example/x.tar?signature=hush")
            self.send_header("Content-Length", "0")
            self.end_headers()

    url = serve(write_tree(tmp_path / "w", {"x.tar": b"1"}), Elsewhere)
    for source in (f"{url}/x.tar", f"{url}/d/", f"{url}/x-{{0..1}}.tar"):
        with pytest.raises(Forbidden, match=r"redirects to https://else\.example, which is not followed") as caught:
            index(source, tmp_path / "m.quiver")
        assert "hush" not in str(caught.value)
