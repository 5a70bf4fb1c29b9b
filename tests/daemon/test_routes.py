"""The routes of a real daemon, as somebody without manners asks them (DESIGN.md §9)."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

from quiver.digest import Digest
from quiver.peer import PeerClient
from quiver.wire import RANGE, RANGES_MAX, READ_TYPE, RangeStatus, ReadRequest
from quiver_cacheserver.config import UPLOAD_BYTES_MAX
from tests.kernel.test_values import HOSTILE
from tests.support.daemon import Daemon
from tests.support.data import Files, make_shard, rewritten, shard_bytes_of
from tests.support.waiting import until

MIB = 1 << 20


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon alone, with no origin, of 8 MiB."""
    with Daemon(tmp_path_factory.mktemp("routes") / "data", capacity="8MiB") as running:
        yield running


def error_of(body: bytes) -> str:
    told = json.loads(body)
    assert set(told) == {"error", "message"}
    assert told["message"]
    return str(told["error"])


def read(
    daemon: Daemon,
    shards: list[Digest],
    rows: list[tuple[int, int, int]],
    manifest: Digest | None = None,
    wait: int = 0,
) -> tuple[list[RangeStatus], bytes]:
    ranges = np.zeros(len(rows), RANGE)
    for at, (shard, offset, length) in enumerate(rows):
        ranges[at] = (shard, 0, offset, length)
    request = ReadRequest(manifest, tuple(shards), ranges, wait).encode()
    status, body, headers = daemon.ask("POST", "/v1/read", request)
    assert status == 200, body
    assert headers["content-type"] == READ_TYPE
    statuses = [RangeStatus(number) for number in body[: len(rows)]]
    return statuses, body[len(rows) :]


def test_health_status_and_ring_tell_what_the_design_says(daemon: Daemon) -> None:
    assert daemon.ask("GET", "/healthz")[0] == 200
    assert daemon.ask("GET", "/readyz")[0] == 200
    status = daemon.status()
    assert {"id", "url", "rack", "state", "resident_bytes", "capacity_bytes", "origin_read_bytes"} <= set(status)
    assert status["state"] == "up"
    assert status["capacity_bytes"] == 8 * MIB
    ring = daemon.json("/v1/ring")
    assert [member["url"] for member in ring["members"]] == [daemon.url]


def test_metrics_have_the_names_that_people_rely_on(daemon: Daemon) -> None:
    _, body, headers = daemon.ask("GET", "/metrics")
    assert headers["content-type"].startswith("text/plain")
    for name in ("origin_read_bytes_total", "served_bytes_total", "resident_bytes", "capacity_bytes", "ring_members"):
        assert re.search(rf"^quiver_{name} [0-9.e+]+$", body.decode(), re.MULTILINE), name
    for name in ("fills_total", "corruptions_total"):
        assert re.search(rf"^quiver_{name}{{.*}} 0.0$", body.decode(), re.MULTILINE), f"{name} must begin at zero"


@pytest.mark.fault("S2")
@pytest.mark.parametrize("kind", ["shards", "manifests"])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=list(HOSTILE))
def test_a_hostile_digest_is_a_bad_request_and_touches_nothing(daemon: Daemon, kind: str, text: str) -> None:
    before = sorted(daemon.data_dir.rglob("*"))
    path = f"/v1/{kind}/{quote(text, safe='', errors='surrogatepass')}"
    for method in ("GET", "PUT", "HEAD"):
        status, body, _ = daemon.ask(method, path, b"x" if method == "PUT" else None)
        assert status == (400 if text else 404), (method, path)
        if method != "HEAD":
            assert error_of(body) in ("bad_request", "http")
    assert sorted(daemon.data_dir.rglob("*")) == before


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/shards", 404),
        ("GET", "/v1/shards/", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/read", 405),
        ("DELETE", f"/v1/shards/{'0' * 64}", 405),
        ("POST", "/v1/ring", 405),
        ("GET", f"/v1/shards/{'0' * 64}", 404),
        ("GET", f"/v1/manifests/{'0' * 64}", 404),
        ("GET", "/v1/shards/../../../etc/passwd", 404),
    ],
)
def test_what_is_not_there_is_answered_in_json(daemon: Daemon, method: str, path: str, status: int) -> None:
    got, body, _ = daemon.ask(method, path)
    assert got == status
    error_of(body)


def test_a_shard_that_was_put_can_be_had_headed_and_read(daemon: Daemon) -> None:
    digest, data = make_shard([b"first", b"second sample"])
    assert daemon.ask("HEAD", f"/v1/shards/{digest}")[0] == 404
    assert daemon.ask("PUT", f"/v1/shards/{digest}", data)[0] == 201
    status, body, headers = daemon.ask("GET", f"/v1/shards/{digest}")
    assert (status, body) == (200, data)
    assert headers["content-length"] == str(len(data))
    status, body, headers = daemon.ask("HEAD", f"/v1/shards/{digest}")
    assert (status, body, headers["content-length"]) == (200, b"", str(len(data)))
    statuses, got = read(daemon, [digest], [(0, 5, 6), (0, 0, 5)])
    assert statuses == [RangeStatus.PRESENT] * 2
    assert got == b"secondfirst"
    assert daemon.ask("PUT", f"/v1/shards/{digest}", data)[0] == 201, "again is no error"


@pytest.mark.fault("S1")
@pytest.mark.parametrize("how", ["flipped", "short", "long", "garbage", "another", "one byte"])
def test_an_upload_that_does_not_match_its_name_is_refused_and_nothing_is_kept(daemon: Daemon, how: str) -> None:
    digest, data = make_shard([f"sample for {how}".encode() * 50])
    wrong = {
        "flipped": b"X" + data[1:],
        "short": data[:-1],
        "long": data + b"x",
        "garbage": bytes(range(256)) * 30,
        "another": make_shard([b"another"])[1],
        "one byte": b"x",
    }[how]
    before, files, corruptions = daemon.status(), daemon.files(), daemon.metric("quiver_corruptions_total")
    status, body, _ = daemon.ask("PUT", f"/v1/shards/{digest}", wrong)
    assert (status, error_of(body)) == (422, "corrupt")
    assert daemon.ask("GET", f"/v1/shards/{digest}")[0] == 404
    after = daemon.status()
    assert after["resident_bytes"] == before["resident_bytes"]
    assert daemon.files() == files
    assert not list((daemon.data_dir / "tmp").iterdir())
    assert daemon.metric("quiver_corruptions_total") == corruptions + 1


@pytest.mark.fault("S1")
def test_an_upload_that_stops_midway_leaves_nothing(daemon: Daemon) -> None:
    digest, data = make_shard([b"z" * 300_000])
    before = daemon.status()["resident_bytes"]
    with socket.create_connection(daemon.address) as connection:
        head = f"PUT /v1/shards/{digest} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data[:100_000])
    until(lambda: not list((daemon.data_dir / "tmp").iterdir()))
    until(lambda: daemon.status()["resident_bytes"] == before)
    assert daemon.ask("GET", f"/v1/shards/{digest}")[0] == 404


@pytest.mark.parametrize("length", ["0", str(UPLOAD_BYTES_MAX + 1), "chunked", "none"])
def test_an_upload_of_no_or_unknown_or_absurd_length_is_refused(daemon: Daemon, length: str) -> None:
    connection = http.client.HTTPConnection(*daemon.address, timeout=20)
    try:
        connection.putrequest("PUT", f"/v1/shards/{'0' * 64}")
        if length == "chunked":
            connection.putheader("Transfer-Encoding", "chunked")
        elif length != "none":
            connection.putheader("Content-Length", length)
        connection.endheaders()
        if length == "chunked":
            connection.send(b"3\r\nabc\r\n0\r\n\r\n")
        answer = connection.getresponse()
        assert answer.status == 400
        assert "Content-Length" in answer.read().decode()
    finally:
        connection.close()


@pytest.mark.fault("S1")
def test_an_upload_that_is_encoded_is_taken_as_it_is_and_refused(daemon: Daemon) -> None:
    digest, data = make_shard([b"compressible" * 1000])
    status, body, _ = daemon.ask("PUT", f"/v1/shards/{digest}", gzip.compress(data), {"Content-Encoding": "gzip"})
    assert (status, error_of(body)) == (422, "corrupt")


def test_more_than_the_capacity_is_a_503_that_says_when_to_come_back(daemon: Daemon) -> None:
    digest, data = make_shard([b"q" * 9 * MIB])
    status, body, headers = daemon.ask("PUT", f"/v1/shards/{digest}", data)
    assert (status, error_of(body)) == (503, "over_capacity")
    assert int(headers["retry-after"]) > 0
    assert daemon.status()["resident_bytes"] <= 8 * MIB


@pytest.mark.fault("S1", "S7")
def test_a_manifest_is_taken_if_it_is_one_and_named_rightly(daemon: Daemon, files: Files, tmp_path: Path) -> None:
    data = files.manifest.read_bytes()
    digest = Digest.of(data)
    assert daemon.ask("PUT", f"/v1/manifests/{digest}", data)[0] == 201
    assert daemon.ask("GET", f"/v1/manifests/{digest}")[1] == data
    for wrong, name, said in (
        (data, Digest.of(b"x"), "corrupt"),
        (data[:-40], Digest.of(data[:-40]), "bad_request"),
        (b"no manifest", Digest.of(b"no manifest"), "bad_request"),
    ):
        status, body, _ = daemon.ask("PUT", f"/v1/manifests/{name}", wrong)
        assert 400 <= status < 500
        assert error_of(body) == said
        assert str(daemon.data_dir) not in body.decode(), "an answer does not tell where the daemon keeps things"
        assert daemon.ask("GET", f"/v1/manifests/{name}")[0] == 404
    newer = rewritten(files.manifest, tmp_path / "newer.quiver", lambda header: header.update(format=99)).read_bytes()
    status, body, _ = daemon.ask("PUT", f"/v1/manifests/{Digest.of(newer)}", newer)
    assert status == 400
    assert "upgrade" in body.decode()
    assert str(daemon.data_dir) not in body.decode()


def test_ranges_are_answered_each_by_its_status(daemon: Daemon) -> None:
    digest, data = make_shard([b"0123456789"])
    daemon.ask("PUT", f"/v1/shards/{digest}", data)
    absent = Digest.of(b"nobody has this")
    size = len(data)
    rows = [
        (0, 0, 10),
        (0, size, 0),
        (0, 0, 0),
        (0, size - 1, 1),
        (0, size - 1, 2),
        (0, size + 1, 0),
        (0, 2**64 - 1, 1),
        (0, 2**63, 2**31),
        (1, 0, 1),
        (0, 2, 3),
        (0, 2, 3),
    ]
    statuses, got = read(daemon, [digest, absent], rows)
    present, bad = RangeStatus.PRESENT, RangeStatus.BAD_RANGE
    assert statuses == [present] * 4 + [bad] * 4 + [RangeStatus.NO_MANIFEST] + [present] * 2
    assert got == b"0123456789" + data[-1:] + b"234" * 2


def test_a_read_of_nothing_is_answered_and_one_that_names_a_shard_twice_refused(daemon: Daemon) -> None:
    digest, data = make_shard([b"0123456789"])
    daemon.ask("PUT", f"/v1/shards/{digest}", data)
    assert read(daemon, [], []) == ([], b"")
    assert read(daemon, [digest], []) == ([], b"")
    status, body, _ = daemon.ask("POST", "/v1/read", ReadRequest(None, (digest, digest), np.zeros(1, RANGE)).encode())
    assert (status, error_of(body)) == (400, "bad_request")


def test_the_largest_read_allowed_is_answered_and_one_more_refused(daemon: Daemon) -> None:
    digest, data = make_shard([b"0123456789"])
    daemon.ask("PUT", f"/v1/shards/{digest}", data)
    statuses, got = read(daemon, [digest], [(0, 4, 1)] * RANGES_MAX)
    assert set(statuses) == {RangeStatus.PRESENT}
    assert got == b"4" * RANGES_MAX
    ranges = np.zeros(RANGES_MAX + 1, RANGE)
    status, body, _ = daemon.ask("POST", "/v1/read", ReadRequest(None, (digest,), ranges).encode())
    assert (status, error_of(body)) == (400, "bad_request")


def test_a_read_of_as_many_shards_as_allowed_that_nobody_has_is_answered_soon(daemon: Daemon) -> None:
    shards = [Digest(number.to_bytes(32, "little")) for number in range(1, RANGES_MAX + 1)]
    statuses, _ = read(daemon, shards, [(number, 0, 1) for number in range(RANGES_MAX)], wait=30_000)
    assert set(statuses) == {RangeStatus.NO_MANIFEST}


@pytest.mark.parametrize("body", [b"", b"QRD1", b"{}", b"x" * 10_000, b"\0" * 52])
def test_a_body_that_is_no_read_request_is_refused(daemon: Daemon, body: bytes) -> None:
    status, answer, _ = daemon.ask("POST", "/v1/read", body)
    assert (status, error_of(answer)) == (400, "bad_request")


def test_a_body_of_a_hundred_mebibytes_is_refused_before_it_is_read(daemon: Daemon) -> None:
    with socket.create_connection(daemon.address, timeout=20) as connection:
        connection.sendall(b"POST /v1/read HTTP/1.1\r\nHost: x\r\nContent-Length: 104857600\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "raw",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/status HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/read HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        b"POST /v1/read HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/read HTTP/1.1\r\nHost: x\r\nContent-Length: +1\r\n\r\nx",
        b"GET /v1/status HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 100_000 + b"\r\n\r\n",
    ],
    ids=["garbage", "version", "both lengths", "two lengths", "negative", "plus", "huge header"],
)
def test_a_malformed_request_is_refused_and_the_connection_closed(daemon: Daemon, raw: bytes) -> None:
    with socket.create_connection(daemon.address, timeout=20) as connection:
        connection.sendall(raw)
        answer = b""
        while chunk := connection.recv(1 << 16):
            answer += chunk
    assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), answer[:200]


def test_a_reader_without_a_manifest_spoils_nothing_for_one_who_has_it(lone: Daemon, files: Files) -> None:
    manifest = files.opened()
    digest, data = shard_bytes_of(manifest, 0)
    if lone.ask("HEAD", f"/v1/shards/{digest}")[0] == 404:
        assert read(lone, [digest], [(0, 0, 1)], wait=1000)[0] == [RangeStatus.NO_MANIFEST]
    with contextlib.closing(PeerClient(lone.url)) as peer:
        peer.put_manifest(manifest.digest, files.manifest.read_bytes())
    statuses, got = read(lone, [digest], [(0, 0, len(data))], manifest.digest, wait=20_000)
    assert statuses == [RangeStatus.PRESENT]
    assert got == data


def test_neither_logs_nor_metrics_nor_status_tell_a_digest(daemon: Daemon, lone: Daemon) -> None:
    for each in (daemon, lone):
        told = each.log + each.ask("GET", "/metrics")[1].decode() + each.ask("GET", "/v1/status")[1].decode()
        told += each.ask("GET", "/v1/ring")[1].decode()
        assert not re.findall(r"[0-9a-f]{64}", told)
        assert "Traceback" not in each.log, each.log[-3000:]
