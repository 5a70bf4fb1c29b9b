"""Reads on connections of their own (``GET /v1/stream``): the answers that HTTP gives, whoever hangs up or stalls."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.digest import Digest
from quiver.errors import DiskFailed, OverCapacity, Unavailable
from quiver.peer import U8, PeerClient
from quiver.store import Kind, OpenFile, Store
from quiver.store.inventory import file_of
from quiver.transport.stream import FRAME, PATH, PROTOCOL, RANGES, REFUSAL, SIZE
from quiver.wire import FORGO, RANGE, READ_REQUEST_BYTES_MAX, RECHECK, RangeStatus, ReadRequest
from quiver_cacheserver.budget import Resource
from quiver_cacheserver.serving import sender, streams
from tests.support.daemon import Daemon
from tests.support.data import Files, make_shard, rebased
from tests.support.etcd import free_ports
from tests.support.inside import in_process, url_of
from tests.support.servers import counting_origin
from tests.support.waiting import until

MIB = 1 << 20
BIG, BIG_DATA = make_shard([np.random.default_rng(3).bytes(8 * MIB) for _ in range(4)])  # more than sockets hold
SMALL, SMALL_DATA = make_shard([b"small" * 100])

Row = tuple[int, int, int]  # shard, offset, length


def asking(shards: Sequence[Digest], rows: Sequence[Row], *more: Any, manifest: Digest | None = None) -> ReadRequest:
    ranges = np.zeros(len(rows), RANGE)
    for at, (shard, offset, length) in enumerate(rows):
        ranges[at] = (shard, 0, offset, length)
    return ReadRequest(manifest, tuple(shards), ranges, *more)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon alone that has two shards. Not to be killed by a test."""
    with Daemon(tmp_path_factory.mktemp("streams") / "data") as running:
        with client(running.url) as peer:
            peer.put_shard(BIG, BIG_DATA)
            peer.put_shard(SMALL, SMALL_DATA)
        yield running


@contextlib.contextmanager
def client(url: str, *, by_http: bool = False) -> Iterator[PeerClient]:
    with contextlib.closing(PeerClient(url)) as peer:
        if by_http:
            peer._streams.no_stream.pause(inf)
        yield peer


def read_by_stream(peer: PeerClient, request: ReadRequest) -> tuple[U8, U8]:
    answer = peer.read(request)
    assert peer._streams.idle.kept, "it was read by HTTP"
    return answer


@contextlib.contextmanager
def connected(address: tuple[str, int], receive_bytes: int = 0) -> Iterator[socket.socket]:
    """A raw stream that has been upgraded."""
    with socket.socket() as sock:
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(20)
        sock.connect(address)
        sock.sendall(f"GET {PATH} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: {PROTOCOL}\r\n\r\n".encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += sock.recv(1)
        assert head.startswith(b"HTTP/1.1 101 "), head
        yield sock


def ask(sock: socket.socket, request: ReadRequest) -> None:
    body = request.encode()
    sock.sendall(SIZE.pack(len(body)) + body)


def head_of(sock: socket.socket) -> tuple[int, int]:
    """Return the kind and the size of the next answer."""
    magic, kind, size = FRAME.unpack(sock.recv(FRAME.size, socket.MSG_WAITALL))
    assert magic == b"QRA1"
    return kind, size


def rest_of(sock: socket.socket, most: int) -> bytes:
    """Return what comes until there are so many bytes, or no more."""
    data = bytearray()
    with contextlib.suppress(ConnectionError):
        while len(data) < most and (more := sock.recv(min(MIB, most - len(data)))):
            data += more
    return bytes(data)


WHOLE = asking([BIG], [(0, 0, len(BIG_DATA))])
LITTLE = asking([SMALL], [(0, 0, 500)])


def is_well(daemon: Daemon) -> None:
    with client(daemon.url) as peer:
        assert read_by_stream(peer, LITTLE)[1].tobytes() == SMALL_DATA[:500]


# -- the same as by HTTP ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def filled(lone: Daemon, files: Files) -> list[Digest]:
    """The shards of ``files``, resident at ``lone``, and one that nobody knows."""
    manifest = files.opened()
    shards = [manifest.shard_digest(number) for number in range(manifest.shard_count)]
    with client(lone.url) as peer:
        peer.put_manifest(manifest.digest, files.manifest.read_bytes())
        rows = [(number, 0, 0) for number in range(len(shards))]
        until(lambda: not read_by_stream(peer, asking(shards, rows, 20_000, manifest=manifest.digest))[0].any())
    return [*shards, Digest.of(b"nobody's")]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_read_by_stream_is_the_read_by_http(lone: Daemon, files: Files, filled: list[Digest], data: Any) -> None:
    manifest = data.draw(st.sampled_from([None, files.opened().digest, Digest.of(b"no manifest")]))
    flags = data.draw(st.sampled_from([0, 0, 0, RECHECK, FORGO, RECHECK | FORGO]))
    shards = data.draw(st.lists(st.sampled_from(filled), min_size=1, max_size=len(filled), unique=True))
    length = st.one_of(st.integers(0, 40), st.integers(0, 300_000))
    row = st.tuples(st.integers(0, len(shards) - 1), st.integers(0, 300_000), length)
    rows: list[Row] = []
    for shard, offset, size in data.draw(st.lists(row, max_size=30)):
        cuts = data.draw(st.integers(1, 3))  # back to back
        rows += [(shard, offset + i * size, size) for i in range(cuts)]
    rows = data.draw(st.permutations(rows)) if data.draw(st.booleans()) else rows
    rows *= data.draw(st.sampled_from([1, 1, 1, 40]))  # more than one call of the kernel's takes
    if spare := [shard for shard in filled if shard not in shards]:
        shards += data.draw(st.lists(st.sampled_from(spare), max_size=3, unique=True))  # named, and no range is of them
    request = asking(shards, rows, 20_000, flags, manifest=manifest)
    with client(lone.url) as peer, client(lone.url, by_http=True) as plain:
        statuses, got = read_by_stream(peer, request)
        expected, content = plain.read(request)
    assert statuses.tolist() == expected.tolist()
    assert got.tobytes() == content.tobytes()


def test_an_answer_is_the_bytes_of_the_shards_in_the_order_of_the_request(daemon: Daemon) -> None:
    rng = np.random.default_rng(7)
    shards = [(BIG, BIG_DATA), (SMALL, SMALL_DATA)]
    rows = [(int(rng.integers(2)), int(rng.integers(700)), int(rng.integers(300))) for _ in range(5_000)]
    rows += [(0, len(BIG_DATA) - 5, 5), (0, len(BIG_DATA), 0), (0, len(BIG_DATA) - 5, 6), (0, 2**63, 2), (1, 0, 0)]
    rows += [(at, 0, 0) for at in (0, 1) * 2_000]  # as many as two calls take, and nothing in them
    rows += [(0, 9, 99)]
    inside = [offset + length <= len(shards[shard][1]) for shard, offset, length in rows]
    with client(daemon.url) as peer:
        statuses, got = read_by_stream(peer, asking([BIG, SMALL], rows))
    assert statuses.tolist() == [RangeStatus.PRESENT if good else RangeStatus.BAD_RANGE for good in inside]
    parts = [shards[at][1][start : start + size] for (at, start, size), good in zip(rows, inside, strict=True) if good]
    assert got.tobytes() == b"".join(parts)


def test_nothing_asked_for_is_nothing_answered(daemon: Daemon) -> None:
    with client(daemon.url) as peer:
        for _ in range(2):
            statuses, got = read_by_stream(peer, asking([], []))
            assert (len(statuses), len(got)) == (0, 0)


def test_what_is_missing_is_brought_in_while_the_reader_waits(files: Files, tmp_path: Path) -> None:
    manifest = files.opened()
    shards = [manifest.shard_digest(number) for number in range(manifest.shard_count)]
    request = asking(shards, [(at, 10, 90) for at in range(len(shards))], 20_000, manifest=manifest.digest)
    with Daemon(tmp_path / "data", origins=[files.folder]) as empty, client(empty.url) as peer:
        assert set(read_by_stream(peer, request)[0].tolist()) == {RangeStatus.NO_MANIFEST}
        peer.put_manifest(manifest.digest, files.manifest.read_bytes())
        statuses, got = read_by_stream(peer, request)
        assert not statuses.any()
        assert empty.status()["fills"] == len(shards)
        assert got.tobytes() == b"".join(bytes(peer.load(digest, 2 * MIB))[10:100] for digest in shards)


def test_bytes_that_were_served_are_counted_alike(daemon: Daemon) -> None:
    grown = []
    for by_http in (False, True):
        before = daemon.metric("quiver_served_bytes_total")
        with client(daemon.url, by_http=by_http) as peer:
            peer.read(asking([SMALL, BIG], [(0, 0, 500), (1, 0, 4_000), (0, 0, 99_999)]))
        until(lambda: daemon.metric("quiver_reads_in_flight") == 0)
        grown.append(daemon.metric("quiver_served_bytes_total") - before)
    assert grown == [4_500, 4_500]


# -- readers who stall, go, or talk nonsense --------------------------------------------------------------------------


def open_in(daemon: Daemon, what: str) -> int:
    assert daemon.process is not None
    return sum(1 for _ in Path(f"/proc/{daemon.process.pid}/{what}").iterdir())


def test_a_reader_who_stops_midway_holds_nobody_up_and_may_go_on(daemon: Daemon) -> None:
    with connected(daemon.address, 4096) as slow, client(daemon.url) as peer, client(daemon.url, by_http=True) as plain:
        ask(slow, WHOLE)
        assert head_of(slow) == (RANGES, 1 + len(BIG_DATA))
        for other in (peer, plain):
            began = time.monotonic()
            for _ in range(20):
                assert other.read(LITTLE)[1].tobytes() == SMALL_DATA[:500]
            assert time.monotonic() - began < 5
        assert rest_of(slow, 1 + len(BIG_DATA)) == b"\0" + BIG_DATA


def test_a_reader_who_goes_midway_leaves_no_descriptor_and_no_thread(daemon: Daemon) -> None:
    with client(daemon.url) as peer:
        peer.read(asking([BIG, SMALL], [(0, 0, 1), (1, 0, 1)]))  # the daemon keeps what it opened
    files, threads = open_in(daemon, "fd"), open_in(daemon, "task")
    for how in ("midway", "at once", "before asking", "in a request") * 5:
        with connected(daemon.address, 4096) as sock:
            if how == "in a request":
                sock.sendall(SIZE.pack(100) + b"QRD1")
            elif how != "before asking":
                ask(sock, WHOLE)
            if how == "midway":
                head_of(sock)
    until(lambda: open_in(daemon, "fd") <= files, what="descriptors are closed")
    until(lambda: daemon.metric("quiver_reads_in_flight") == 0)
    assert open_in(daemon, "task") <= threads + 8, "threads serve one stream after the other"
    is_well(daemon)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (SIZE.pack(100) + bytes(100), "QRD1"),
        (SIZE.pack(0), "not 0"),
        (SIZE.pack(READ_REQUEST_BYTES_MAX + 1), "are the most"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "are the most"),
        (SIZE.pack(76) + asking([], [(0, 0, 1)]).encode(), "does not list"),
        (SIZE.pack(53) + asking([], []).encode() + b"x", "counts"),
    ],
    ids=["zeros", "nothing", "oversized", "HTTP", "no such shard", "surplus"],
)
@pytest.mark.fault("S4")
def test_a_bad_request_is_refused_and_ends_the_stream(daemon: Daemon, sent: bytes, says: str) -> None:
    with connected(daemon.address) as sock:
        sock.sendall(sent)
        kind, size = head_of(sock)
        assert kind == REFUSAL
        told = rest_of(sock, size)
        assert b'"bad_request"' in told
        assert says.encode() in told
        assert rest_of(sock, 1) == b""
    is_well(daemon)


@pytest.mark.fault("S3")
def test_half_a_request_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(streams, "BODY_SECONDS_MAX", 0.2)
    with in_process(tmp_path) as address, connected(address) as sock:
        sock.sendall(SIZE.pack(1_000) + bytes(999))
        assert rest_of(sock, 1) == b""


@pytest.mark.fault("S3")
def test_an_idle_stream_is_closed_after_a_while(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(streams, "IDLE_SECONDS", 0.2)
    with in_process(tmp_path) as address, connected(address) as sock:
        assert rest_of(sock, 1) == b""


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Connection": "Upgrade", "Upgrade": "websocket"},
        {"Upgrade": "h2c"},
        {"Upgrade": PROTOCOL},
        {"Connection": "keep-alive, upgrades", "Upgrade": PROTOCOL},
    ],
)
@pytest.mark.fault("S5")
def test_only_an_upgrade_to_this_protocol_is_taken(daemon: Daemon, headers: dict[str, str]) -> None:
    status, body, _ = daemon.ask("GET", PATH, headers=headers)
    assert status == 400
    assert b'"bad_request"' in body
    assert PROTOCOL.encode() in body
    assert daemon.ask("POST", PATH, b"", {"Upgrade": PROTOCOL})[0] == 405


@pytest.mark.parametrize(
    ("version", "more", "status"),
    [
        ("1.1", "", 101),
        ("1.1", "Connection: keep-alive\r\n", 101),
        ("1.1", "Content-Length: 0\r\n", 101),
        ("1.0", "", 400),
        ("1.1", "Content-Length: 30\r\n", 400),
        ("1.1", "Transfer-Encoding: chunked\r\n", 400),
    ],
)
@pytest.mark.fault("S5")
def test_an_upgrade_is_http_1_1_and_has_no_body(daemon: Daemon, version: str, more: str, status: int) -> None:
    """A body would be taken for the stream's first request."""
    with socket.create_connection(daemon.address, 20) as sock:
        head = f"GET {PATH} HTTP/{version}\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: {PROTOCOL}\r\n{more}\r\n"
        sock.sendall(head.encode())
        assert rest_of(sock, 12).endswith(b" %d" % status)


@contextlib.contextmanager
def asked_slowly(address: tuple[str, int], request: ReadRequest, by_http: bool) -> Iterator[socket.socket]:
    """A connection on which so much was asked, and that takes little at a time."""
    if not by_http:
        with connected(address, 4096) as sock:
            ask(sock, request)
            yield sock
        return
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(20)
        sock.connect(address)
        body = request.encode()
        sock.sendall(b"POST /v1/read HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        yield sock


# -- limits, in a daemon within this process --------------------------------------------------------------------------


def test_more_streams_than_a_daemon_has_threads_for_are_served_by_http(tmp_path: Path) -> None:
    with (
        in_process(tmp_path, {SMALL: SMALL_DATA}, held_max={Resource.STREAMS: 2}) as address,
        client(url_of(address)) as first,
        client(url_of(address)) as second,
        client(url_of(address)) as third,
    ):
        read_by_stream(first, LITTLE)
        read_by_stream(second, LITTLE)
        for _ in range(2):
            assert third.read(LITTLE)[1].tobytes() == SMALL_DATA[:500]
        assert not third._streams.idle.kept
        first.close()
        third._streams.no_stream.succeed()

        def served_again() -> bool:
            third._streams.no_stream.succeed()
            third.read(LITTLE)
            return bool(third._streams.idle.kept)

        until(served_again)


@pytest.mark.fault("S12")
def test_a_daemon_with_too_much_under_way_refuses_and_keeps_the_stream(tmp_path: Path) -> None:
    with (
        in_process(tmp_path, {SMALL: SMALL_DATA, BIG: BIG_DATA}, held_max={Resource.READS: 1}) as address,
        connected(address, 4096) as slow,
        client(url_of(address)) as peer,
    ):
        ask(slow, WHOLE)
        head_of(slow)
        with pytest.raises(OverCapacity, match="under way") as caught:
            peer.read(LITTLE)
        assert caught.value.retry_after_seconds == 1.0
        kept = peer._streams.idle.kept[0]
        assert rest_of(slow, 1 + len(BIG_DATA)) == b"\0" + BIG_DATA

        def served_again() -> bool:
            with contextlib.suppress(OverCapacity):
                return peer.read(LITTLE)[1].tobytes() == SMALL_DATA[:500]
            return False

        until(served_again)
        assert peer._streams.idle.kept == [kept]


@pytest.mark.fault("S4")
def test_a_request_takes_up_what_came_of_it_and_not_what_was_announced(tmp_path: Path) -> None:
    with in_process(tmp_path) as address, connected(address) as sock:
        tracemalloc.start()
        try:
            sock.sendall(SIZE.pack(READ_REQUEST_BYTES_MAX) + b"QRD1")
            sock.shutdown(socket.SHUT_WR)
            assert rest_of(sock, 1) == b""
            assert tracemalloc.get_traced_memory()[1] < READ_REQUEST_BYTES_MAX / 4
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("by_http", [False, True], ids=["stream", "HTTP"])
@pytest.mark.fault("S12")
def test_a_shard_that_is_named_and_not_read_from_is_not_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by_http: bool
) -> None:
    opened: list[Digest] = []
    open_file = Store.open_file

    def noted(self: Store, kind: Kind, digest: Digest) -> OpenFile:
        opened.append(digest)
        return open_file(self, kind, digest)

    monkeypatch.setattr(Store, "open_file", noted)
    request = asking([BIG, SMALL], [(1, 0, 500), (1, 490, 10), (1, len(SMALL_DATA), 1)])
    with (
        in_process(tmp_path, {SMALL: SMALL_DATA, BIG: BIG_DATA}) as address,
        client(url_of(address), by_http=by_http) as peer,
    ):
        statuses, got = peer.read(request)
    assert statuses.tolist() == [RangeStatus.PRESENT, RangeStatus.PRESENT, RangeStatus.BAD_RANGE]
    assert got.tobytes() == SMALL_DATA[:500] + SMALL_DATA[490:500]
    assert opened == [SMALL]


@pytest.mark.parametrize("by_http", [False, True], ids=["stream", "HTTP"])
def test_a_shard_that_cannot_be_mapped_midway_cuts_the_answer_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, by_http: bool
) -> None:
    """An error answer behind the first bytes would be taken for the ones that were promised."""
    mapped = OpenFile.mapped

    def fails(self: OpenFile) -> memoryview:
        if self.size_bytes == len(SMALL_DATA):
            raise DiskFailed("cannot map a shard: no memory")
        return mapped(self)

    rows = [(0, 10 * at, 9) for at in range(3_000)] + [(1, 0, 500)]
    request = asking([BIG, SMALL], rows)
    with in_process(tmp_path, {SMALL: SMALL_DATA, BIG: BIG_DATA}) as address:
        monkeypatch.setattr(OpenFile, "mapped", fails)
        if by_http:
            body = request.encode()
            with socket.create_connection(address, 20) as sock:
                sock.sendall(b"POST /v1/read HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                got = rest_of(sock, 100_000)
            got = got.partition(b"\r\n\r\n")[2]
        else:
            with connected(address) as sock:
                ask(sock, request)
                assert head_of(sock) == (RANGES, len(rows) + 27_500)
                got = rest_of(sock, 100_000)
        good = bytes(len(rows)) + b"".join(BIG_DATA[10 * at : 10 * at + 9] for at in range(3_000))
        assert good.startswith(got)
    assert "an answer was cut off: cannot map" in caplog.text


NONE_PRESENT = asking([Digest.of(b"nobody's")], [(0, 0, 1)] * 65_536)  # an answer of statuses alone


@pytest.mark.parametrize("request_", [WHOLE, NONE_PRESENT], ids=["bytes", "statuses"])
@pytest.mark.parametrize("by_http", [False, True], ids=["stream", "HTTP"])
@pytest.mark.fault("S3")
def test_a_reader_who_takes_nothing_for_long_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    by_http: bool,
    request_: ReadRequest,
) -> None:
    monkeypatch.setattr(sender, "SEND_SECONDS_MAX", 0.2)
    with in_process(tmp_path, {BIG: BIG_DATA}, send_bytes=4096) as address, asked_slowly(address, request_, by_http):
        until(lambda: "an answer was cut off: the reader" in caplog.text)


@pytest.mark.parametrize("by_http", [False, True], ids=["stream", "HTTP"])
@pytest.mark.fault("S3")
def test_a_reader_who_takes_a_little_now_and_then_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, by_http: bool
) -> None:
    """Each of them would have one of the reads that may be under way for as long as he likes."""
    monkeypatch.setattr(sender, "SEND_SECONDS_MAX", 1.0)
    with (
        in_process(tmp_path, {BIG: BIG_DATA}, send_bytes=4096) as address,
        asked_slowly(address, WHOLE, by_http) as sock,
    ):
        taken, began = 0, time.monotonic()

        def is_cut_off() -> bool:
            nonlocal taken
            with contextlib.suppress(ConnectionError):
                taken += len(sock.recv(1_000))
            return "an answer was cut off: the reader" in caplog.text

        until(is_cut_off)
        assert time.monotonic() - began > 0.9
        assert 5_000 < taken < len(BIG_DATA), "it was never waited for long"


@pytest.mark.parametrize("by_http", [False, True], ids=["stream", "HTTP"])
def test_readers_who_hang_up_are_no_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture, by_http: bool) -> None:
    """Their number is theirs to choose, and nothing is wrong here."""
    caplog.set_level(logging.DEBUG)
    with in_process(tmp_path, {BIG: BIG_DATA}) as address:
        with asked_slowly(address, WHOLE, by_http) as sock:
            assert rest_of(sock, 100)
        until(lambda: "an answer was cut off" in caplog.text)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# -- the daemon ends, or its disk does --------------------------------------------------------------------------------


def test_a_daemon_that_is_told_to_end_does_so_with_streams_open(files: Files, tmp_path: Path) -> None:
    with counting_origin(files.folder) as origin:
        remote = rebased(files, origin.url, tmp_path / "remote.quiver")
        manifest = remote.opened()
        with (
            Daemon(tmp_path / "data", "--drain-seconds", "0.5", origins=[origin.url]) as ending,
            client(ending.url) as idle,
            client(ending.url) as waiting,
            ThreadPoolExecutor(1) as threads,
            connected(ending.address, 4096) as slow,
        ):
            idle.put_shard(BIG, BIG_DATA)
            idle.put_manifest(manifest.digest, remote.manifest.read_bytes())
            read_by_stream(idle, asking([BIG], [(0, 0, 9)]))
            ask(slow, WHOLE)
            head_of(slow)
            origin.open.clear()
            asked = asking([manifest.shard_digest(0)], [(0, 0, 9)], 30_000, manifest=manifest.digest)
            answer = threads.submit(waiting.read, asked)
            until(lambda: ending.metric("quiver_reads_in_flight") == 2)
            began = time.monotonic()
            threading.Timer(1.0, origin.open.set).start()  # what is being read from an origin is waited for, as ever
            assert ending.stop() == 0
            assert time.monotonic() - began < 15
            with pytest.raises(Unavailable):
                answer.result(20)
            with pytest.raises(Unavailable, match="cannot be reached"):
                idle.read(LITTLE)
            assert len(rest_of(slow, 1 + len(BIG_DATA))) < len(BIG_DATA)
            assert "Traceback" not in ending.log


def test_a_daemon_that_was_started_again_is_asked_anew(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with Daemon(tmp_path / "data", port=port) as restarted, client(restarted.url) as peer:
        peer.put_shard(SMALL, SMALL_DATA)
        read_by_stream(peer, LITTLE)
        for end in (restarted.stop, restarted.kill):
            end()
            restarted.start()
            restarted.wait_until_serving()
            old = peer._streams.idle.kept[0]
            assert read_by_stream(peer, asking([SMALL], [(0, 0, 500)], 20_000))[1].tobytes() == SMALL_DATA[:500]
            assert old not in peer._streams.idle.kept


@pytest.mark.parametrize("by_http", [False, True], ids=["stream", "HTTP"])
def test_a_shard_that_becomes_shorter_while_it_is_sent_is_cut_off(tmp_path: Path, by_http: bool) -> None:
    """The pages are gone: in a copy of the daemon's that would be a signal, which nothing survives."""
    with Daemon(tmp_path / "data") as damaged:
        with client(damaged.url) as peer:
            peer.put_shard(BIG, BIG_DATA)
            peer.put_shard(SMALL, SMALL_DATA)
        with contextlib.ExitStack() as stack:
            if by_http:
                slow = stack.enter_context(socket.socket())
                slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                slow.settimeout(20)
                slow.connect(damaged.address)
                body = WHOLE.encode()
                slow.sendall(b"POST /v1/read HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                while rest_of(slow, 1) != b"\0":
                    pass
            else:
                slow = stack.enter_context(connected(damaged.address, 4096))
                ask(slow, WHOLE)
                head_of(slow)
                assert slow.recv(1) == b"\0"
            os.truncate(file_of(damaged.data_dir, Kind.SHARD, BIG), 4096)
            got = rest_of(slow, len(BIG_DATA))
        assert len(got) < len(BIG_DATA)
        assert BIG_DATA.startswith(got)
        until(lambda: re.search(r"WARNING .*an answer was cut off: a shard's file", damaged.log))
        is_well(damaged)
        with client(damaged.url, by_http=by_http) as peer:  # who asks next is not cut off as well
            assert peer.read(asking([BIG], [(0, 0, 9)], 20_000))[0].tolist() == [RangeStatus.NO_MANIFEST]
        assert damaged.metric("quiver_corruptions_total") == 1


def test_a_shard_that_is_dropped_while_it_is_sent_is_sent_to_its_end(tmp_path: Path) -> None:
    other, data = make_shard([bytes(9 * MIB)])
    with (
        Daemon(tmp_path / "data", capacity="40MiB") as full,
        connected(full.address, 4096) as slow,
        client(full.url) as peer,
    ):
        peer.put_shard(BIG, BIG_DATA)
        ask(slow, WHOLE)
        head_of(slow)
        with contextlib.suppress(OverCapacity):  # its room is not free before it is sent
            peer.put_shard(other, data)
        file_of(full.data_dir, Kind.SHARD, BIG).unlink(missing_ok=True)
        assert rest_of(slow, 1 + len(BIG_DATA)) == b"\0" + BIG_DATA


# -- processes and threads of the reader ------------------------------------------------------------------------------


def slices(peer: PeerClient, seed: int, count: int) -> None:
    """Read many ranges, each to be exactly what it is."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        rows = [(0, int(rng.integers(len(BIG_DATA) - 9_000)), int(rng.integers(9_000))) for _ in range(50)]
        statuses, got = peer.read(asking([BIG], rows))
        assert not statuses.any()
        assert got.tobytes() == b"".join(BIG_DATA[start : start + size] for _, start, size in rows)


def test_threads_share_a_client_and_get_their_own_answers(daemon: Daemon) -> None:
    with client(daemon.url) as peer, ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(slices, peer, seed, 40) for seed in range(8)]:
            done.result(60)
        assert 1 <= len(peer._streams.idle.kept) <= 8


def test_a_child_does_not_use_its_parents_stream(daemon: Daemon) -> None:
    context = multiprocessing.get_context("fork")
    with client(daemon.url) as peer:
        slices(peer, 0, 1)
        stream = peer._streams.idle.kept[0]
        barrier = context.Barrier(2)

        def child() -> None:
            barrier.wait(20)
            slices(peer, 1, 100)
            assert peer._streams.idle.kept
            assert stream not in peer._streams.idle.kept
            assert stream._socket.fileno() == -1, "the daemon would not see the parent close it"

        process = context.Process(target=child)
        process.start()
        barrier.wait(20)
        slices(peer, 2, 100)
        process.join(60)
        assert process.exitcode == 0
        assert peer._streams.idle.kept == [stream]
        slices(peer, 3, 5)
