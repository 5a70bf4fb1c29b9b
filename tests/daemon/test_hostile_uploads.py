"""What is uploaded or named to do harm: refused with an answer that says why, and nothing of it is kept or read."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from quiver.digest import Digest
from quiver.errors import NotAllowed
from quiver.manifest import Manifest, write_manifest
from quiver.wire import MSGPACK_TYPE, RANGE, FillRequest, ReadRequest, RecheckRequest
from quiver_cacheserver.origins.allowed import Origins
from tests.daemon.test_routes import error_of
from tests.kernel.test_manifest import COLUMNS, WRONG, parts_of, with_column
from tests.support import golden
from tests.support.daemon import Daemon
from tests.support.data import Files, make_shard, rewritten
from tests.support.waiting import until

GROWTH_BYTES_MAX = 96 << 20  # a manifest of a few kilobytes, whatever it claims to contain


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    where = tmp_path_factory.mktemp("hostile")
    (where / "outside").write_bytes(b"outside")
    with Daemon(where / "data", capacity="64MiB") as running:
        yield running


def resident_memory(daemon: Daemon) -> int:
    assert daemon.process is not None
    assert daemon.process.pid is not None
    return int(psutil.Process(daemon.process.pid).memory_info().rss)


def kept(daemon: Daemon) -> dict[str, bytes]:
    """Return all files beside and below the data folder, with what they contain."""
    top = daemon.data_dir.parent
    return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}


# -- S1 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.fault("S1")
def test_a_wrong_upload_under_the_name_of_a_resident_shard_leaves_it_as_it_was(daemon: Daemon) -> None:
    digest, data = make_shard([b"sample" * 1000])
    assert daemon.ask("PUT", f"/v1/shards/{digest}", data)[0] == 201
    before, counted = kept(daemon), daemon.metric("quiver_corruptions_total")
    wrong = [b"X" + data[1:], data[:-1], data + b"x", make_shard([b"other"])[1], bytes(len(data))]
    for body in wrong:
        status, answer, _ = daemon.ask("PUT", f"/v1/shards/{digest}", body)
        assert (status, error_of(answer)) == (422, "corrupt")
    assert kept(daemon) == before
    assert daemon.ask("GET", f"/v1/shards/{digest}")[:2] == (200, data)
    assert daemon.metric("quiver_corruptions_total") == counted + len(wrong), "each was met, and counted"


# -- S2 ----------------------------------------------------------------------------------------------------------------

GOOD = "0" * 64
TARGETS = [
    *("../outside", "../../outside", "..%2f..%2foutside", "%2e%2e/%2e%2e/outside", "%252e%252e%252foutside"),
    *("....//outside", "..\\outside", "/etc/passwd", "%2fetc%2fpasswd", f"{GOOD}/../../../outside", f"{GOOD}%00"),
    *(f"{GOOD[:-1]}%00", f"{GOOD}%0a", f"{GOOD[:-1]}%0d", GOOD[:-1], f"{GOOD}0", "A" * 64, "%d9%a3" * 64, f"%30{GOOD}"),
    *(f"{GOOD}?x", f"{GOOD};x", f" {GOOD}", f"{GOOD}%20", "%c0%ae%c0%ae%c0%afoutside", "x" * 4000),
]


def raw(daemon: Daemon, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
    """Send a request line as it is; return the status, and all that came."""
    with socket.create_connection(daemon.address, timeout=30) as connection:
        head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
    return int(answer.split(b" ", 2)[1]), answer


@pytest.mark.fault("S2")
@pytest.mark.parametrize("kind", ["shards", "manifests"])
def test_no_text_in_the_place_of_a_digest_reaches_a_file(daemon: Daemon, kind: str) -> None:
    before = kept(daemon)
    assert "outside" in before
    for target in TARGETS:
        for method in ("GET", "PUT", "HEAD"):
            status, answer = raw(daemon, method, f"/v1/{kind}/{target}", b"harm" if method == "PUT" else b"")
            # 404: no such route, or after ``?`` a right digest that nobody has; 422: a right digest of other bytes.
            assert status in ((400, 404, 405, 422) if "?" in target else (400, 404, 405)), (method, target)
            assert b"root:" not in answer
            assert b"\r\n\r\noutside" not in answer
    assert kept(daemon) == before
    assert daemon.ask("GET", "/healthz")[0] == 200


@pytest.mark.fault("S2")
@pytest.mark.parametrize("size", [1, 31, 33, 63])
def test_digests_of_a_wrong_length_are_refused_in_every_message(daemon: Daemon, size: int) -> None:
    before, told = kept(daemon), {"Content-Type": MSGPACK_TYPE}
    read = ReadRequest(None, (Digest(bytes(32)),), np.zeros(0, RANGE)).encode()
    for path, body in (
        ("/v1/fill", FillRequest(Digest(bytes(32)), (Digest(bytes(32)),), 0).encode()),
        ("/v1/recheck", RecheckRequest((Digest(bytes(32)),)).encode()),
    ):
        cut = body.replace(b"\xc4\x20" + bytes(32), bytes([0xC4, size]) + bytes(size))
        assert cut != body
        status, answer, _ = daemon.ask("POST", path, cut, told)
        assert (status, error_of(answer)) == (400, "bad_request"), path
    status, answer, _ = daemon.ask("POST", "/v1/read", read[: len(read) - 32] + bytes(size))
    assert (status, error_of(answer)) == (400, "bad_request")
    assert kept(daemon) == before


# -- S6 ----------------------------------------------------------------------------------------------------------------

METADATA = [
    *(
        "http://169.254.169.254/latest/meta-data/",
        "http://[fd00:ec2::254]/latest/",
        "http://metadata.google.internal/x/",
    ),
    *("http://2852039166/latest/", "http://0xa9fea9fe/latest/", "http://127.0.0.1:2375/containers/", "http://[::1]/x/"),
    *("https://169.254.169.254/", "s3://other-bucket/x/", "file:///proc/self/", "file:///etc/", "gs://other/x/"),
]


@pytest.mark.fault("S6")
def test_no_address_but_those_allowed_is_even_connected_to(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: tried.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: tried.append(args))
    origins = Origins([str(files.folder), "http://127.0.0.1:9/allowed", "s3://bucket/allowed"], lambda read_bytes: None)
    try:
        for number, base in enumerate(METADATA):
            manifest = rewritten(
                files.manifest, tmp_path / f"{number}", lambda header, base=base: header.update(base=base)
            )
            with pytest.raises(NotAllowed, match="may not read that origin"):
                origins.of(Manifest.open(manifest))
    finally:
        origins.close()
    assert tried == []


# -- S7 ----------------------------------------------------------------------------------------------------------------


def hostile_manifests(where: Path) -> Iterator[tuple[str, bytes]]:
    for name, change in WRONG.items():
        write_manifest(where / "wrong", change(parts_of(1)))
        yield name, (where / "wrong").read_bytes()
    for name, (table, column, lie) in COLUMNS.items():
        yield name, with_column(golden.MANIFEST, where / "column", table, column, lie).read_bytes()
    whole = golden.MANIFEST.read_bytes()
    for part in (1, 3, 7):
        yield f"cut at {part}/8", whole[: len(whole) * part // 8]
    yield "not to its end", whole[:-1]
    yield "something behind", whole + b"\0"
    yield "twice", whole * 2
    header: dict[str, Callable[[dict[str, Any]], None]] = {
        "a base in the daemon's folder": lambda it: it.update(base="file:///a/../../etc/"),
        "no field": lambda it: it.update(fields=[]),
        "a newer format": lambda it: it.update(format=99),
    }
    for name, change_header in header.items():
        yield name, rewritten(golden.MANIFEST, where / "header", change_header).read_bytes()


@pytest.mark.fault("S7")
def test_a_hostile_manifest_is_refused_in_words_and_costs_no_memory(daemon: Daemon, tmp_path: Path) -> None:
    shutil.copy(golden.MANIFEST, tmp_path / "good")
    good = (tmp_path / "good").read_bytes()
    assert daemon.ask("PUT", f"/v1/manifests/{Digest.of(good)}", good)[0] == 201, "what is right is taken"
    before, memory, count = kept(daemon), resident_memory(daemon), 0
    for name, content in hostile_manifests(tmp_path):
        count += 1
        digest = Digest.of(content)
        status, answer, _ = daemon.ask("PUT", f"/v1/manifests/{digest}", content)
        assert status == 400, (name, answer)
        told = json.loads(answer)
        assert told["error"] in ("bad_request", "misconfigured"), name
        assert 10 < len(told["message"]) <= 4096, name
        assert str(daemon.data_dir) not in told["message"]
        assert digest.hex() not in told["message"]
        assert daemon.ask("GET", f"/v1/manifests/{digest}")[0] == 404
    assert count > 25
    until(lambda: not list((daemon.data_dir / "tmp").iterdir()))
    assert kept(daemon) == before
    assert resident_memory(daemon) - memory < GROWTH_BYTES_MAX
    assert "Traceback" not in daemon.log
