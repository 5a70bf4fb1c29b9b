"""Clients that hold what others need: heads without an end, requests sent ahead, answers that are not taken."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from quiver.digest import Digest
from quiver.wire import RANGE, RangeStatus, ReadRequest
from quiver_cacheserver.budget import Cost, RefillRate, Resource
from quiver_cacheserver.node import Node
from quiver_cacheserver.serving.heads import HEAD_BYTES_MAX
from tests.daemon.test_hostile_sizes import Watched
from tests.daemon.test_limits import (
    BIG,
    BIG_DATA,
    GREEDY,
    HONEST,
    SMALL,
    SMALL_DATA,
    UPGRADE,
    answer_of,
    asked,
    connected,
    is_closed,
    metric,
    over_capacity,
    read_of,
    refused,
    request,
    under_way,
)
from tests.support.data import make_shard
from tests.support.inside import in_process
from tests.support.waiting import until

MIB = 1 << 20
HEALTHY = request("GET", "/healthz")
LONG_LINE = b"X: " + b"a" * 8000 + b"\r\n"


def closed_for_heads(address: tuple[str, int]) -> float:
    return metric(address, 'quiver_connections_closed_total{why="head"}')


# -- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.fault("S3", "S12")
@pytest.mark.parametrize("earlier", [b"", HEALTHY], ids=["new", "kept"])
def test_a_head_that_grows_without_an_end_is_cut_off(tmp_path: Path, earlier: bytes) -> None:
    with in_process(tmp_path) as address, connected(address) as sock:
        if earlier:
            sock.sendall(earlier)
            assert answer_of(sock)[0] == 200
        sock.sendall(b"GET /healthz HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(3):
                sock.sendall(LONG_LINE)
        assert is_closed(sock)
        assert closed_for_heads(address) == 1


@pytest.mark.fault("S12")
def test_a_whole_head_that_is_too_large_is_not_answered(tmp_path: Path) -> None:
    with in_process(tmp_path) as address:
        with connected(address) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(HEALTHY.removesuffix(b"\r\n") + LONG_LINE * 3 + b"\r\n")
            assert is_closed(sock)
        assert asked(address, HEALTHY.removesuffix(b"\r\n") + LONG_LINE + b"\r\n")[0] == 200
        assert closed_for_heads(address) == 1


@pytest.mark.fault("S12")
def test_requests_that_are_sent_ahead_count_as_bodies_until_they_are_answered(tmp_path: Path) -> None:
    """The first read waits, and behind it wait more requests than this daemon keeps for one address."""
    waits = read_of(SMALL, 1, 20_000, Digest.of(b"a manifest that nobody has"))
    found = threading.Event()
    ahead = request("GET", "/healthz").removesuffix(b"\r\n") + LONG_LINE + b"\r\n"

    def wait_for_it(node: object) -> None:
        node.peers.manifest_holders = lambda digest, domain: filter(None, [not found.wait(20)])  # type: ignore[attr-defined]

    with in_process(tmp_path, held_max={Resource.BODY_BYTES: 100_000}, made=wait_for_it) as address:
        try:
            with connected(address) as sock, connected(address) as other:
                sock.sendall(waits)
                until(lambda: under_way(address, Resource.WAITING) == 1)
                sock.sendall(ahead * 4)
                until(lambda: under_way(address, Resource.BODY_BYTES) > 4 * 8000)
                assert asked(address, HEALTHY)[0] == 200
                other.sendall(waits)
                with contextlib.suppress(ConnectionError):
                    for _ in range(8):
                        other.sendall(ahead)
                assert is_closed(other)
                assert asked(address, read_of(BIG, 1), HONEST)[0] == 200
                found.set()
                received = b""
                while received.count(b"ok\n") < 4:
                    received += sock.recv(MIB)
                assert received.count(b"HTTP/1.1 200 OK") == 5
                until(lambda: under_way(address, Resource.BODY_BYTES) == 0)
        finally:
            found.set()


@pytest.mark.fault("S12")
def test_nothing_that_follows_a_malformed_request_is_kept(tmp_path: Path) -> None:
    """aiohttp answers each piece that follows, one after the other, and keeps them until then."""
    waits = read_of(BIG, len(BIG_DATA))
    with (
        in_process(tmp_path, {BIG: BIG_DATA}, send_bytes=4096) as address,
        connected(address, receive_bytes=4096) as sock,
    ):
        sock.sendall(waits)
        until(lambda: under_way(address, Resource.READS) == 1)
        sock.settimeout(1.0)
        sent = 0
        with contextlib.suppress(TimeoutError):
            for _ in range(64):
                sock.sendall(b"\0 malformed" * 10_000)
                sent += 1
        assert sent == 64, "it is read, and forgotten"
        assert under_way(address, Resource.BODY_BYTES) < 500_000


@pytest.mark.fault("S3", "S12")
def test_heads_of_a_megabyte_on_hundreds_of_connections_take_no_memory(tmp_path: Path) -> None:
    piece = b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + LONG_LINE * 60
    with Watched(tmp_path / "data") as daemon, contextlib.ExitStack() as stack:
        assert daemon.ask("GET", "/healthz")[0] == 200
        with daemon.flat():
            for at in range(200):
                sock = stack.enter_context(connected(daemon.address, f"127.0.0.{at % 4 + 2}"))
                with contextlib.suppress(ConnectionError):
                    sock.sendall(piece)
            assert daemon.ask("GET", "/healthz")[0] == 200
        assert daemon.metric("quiver_connections_closed_total") >= 200


def test_an_upload_is_no_head_in_whatever_pieces_it_arrives(tmp_path: Path) -> None:
    head, body = request("PUT", f"/v1/shards/{BIG}", b"", len(BIG_DATA)), BIG_DATA
    assert len(body) > 100 * HEAD_BYTES_MAX
    with in_process(tmp_path) as address:
        end = len(head)
        for cuts in ([end], [10, end - 1], [end + HEAD_BYTES_MAX + 1], [end + 3, end + 4]):
            with connected(address) as sock:
                whole = head + body
                for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
                    sock.sendall(whole[begin:end])
                assert answer_of(sock)[0] == 201
                sock.sendall(HEALTHY)
                assert answer_of(sock)[0] == 200
        assert closed_for_heads(address) == 0
        assert under_way(address, Resource.BODY_BYTES) == 0


# -- the files of answers ---------------------------------------------------------------------------------------------

SHARDS = dict(make_shard([np.random.default_rng(seed).bytes(3 * MIB)]) for seed in range(6))


def read_all(shards: dict[Digest, bytes]) -> bytes:
    ranges = np.zeros(len(shards), RANGE)
    ranges["shard"] = np.arange(len(shards))
    ranges["length"] = 3 * MIB
    return ReadRequest(None, tuple(shards), ranges).encode()


@pytest.mark.fault("S12", "C6")
@pytest.mark.parametrize("by_http", [False, True], ids=["stream", "HTTP"])
def test_files_of_answers_that_are_not_taken_are_bounded_for_each_address(tmp_path: Path, by_http: bool) -> None:
    body = read_all(SHARDS)

    def read(sock: socket.socket) -> None:
        if by_http:
            sock.sendall(request("POST", "/v1/read", body))
            return
        sock.sendall(UPGRADE)
        while not sock.recv(1 << 10).endswith(b"\r\n\r\n"):
            pass
        sock.sendall(len(body).to_bytes(4, "little") + body)

    with in_process(
        tmp_path, {**SHARDS, SMALL: SMALL_DATA}, send_bytes=4096, held_max={Resource.OPEN_FILES: 9}
    ) as address:
        with connected(address, receive_bytes=4096) as slow, connected(address, receive_bytes=4096) as other:
            read(slow)
            until(lambda: under_way(address, Resource.OPEN_FILES) == 6)
            read(other)
            if by_http:
                assert over_capacity(answer_of(other))
            else:
                assert other.recv(8, socket.MSG_WAITALL) == b"QRA1\x01\0\0\0", "refused; the stream stays"
            assert refused(address, Resource.OPEN_FILES) == 1
            assert asked(address, read_of(SMALL, 500), HONEST)[2] == b"\0" + SMALL_DATA[:500]
            until(lambda: under_way(address, Resource.OPEN_FILES) == 6)
            assert asked(address, read_of(SMALL, 500), GREEDY)[2] == b"\0" + SMALL_DATA[:500], "few files are at hand"
        until(lambda: under_way(address, Resource.OPEN_FILES) == 0)
        until(lambda: under_way(address, Resource.READS) == 0)


def test_a_shard_that_is_named_and_not_read_from_is_no_open_file(tmp_path: Path) -> None:
    ranges = np.zeros(1, RANGE)
    ranges["length"] = 10
    body = ReadRequest(None, (SMALL, *SHARDS), ranges).encode()
    with in_process(tmp_path, {SMALL: SMALL_DATA}, held_max={Resource.OPEN_FILES: 2}) as address:
        status, _, answer = asked(address, request("POST", "/v1/read", body))
        assert (status, answer) == (200, bytes([RangeStatus.PRESENT]) + SMALL_DATA[:10])


# -- work -------------------------------------------------------------------------------------------------------------


@pytest.mark.fault("S1", "S12")
def test_an_address_that_has_junk_hashed_over_and_over_is_refused_before_its_next_byte(tmp_path: Path) -> None:
    junk = request("PUT", f"/v1/shards/{BIG}", bytes(4 * MIB) + BIG_DATA[4 * MIB :])

    def charge_dearly(node: Node) -> None:
        node.budgets.rates[Cost.WORK_SECONDS] = RefillRate(1e-6, 1e-4)

    with in_process(tmp_path, {SMALL: SMALL_DATA}, made=charge_dearly) as address:
        assert asked(address, junk)[0] == 422
        for _ in range(3):
            answer = asked(address, junk[:300])
            assert over_capacity(answer), "the head alone is enough"
        assert refused(address, Cost.WORK_SECONDS) == 0, "what is looked at is not charged"
        assert asked(address, read_of(SMALL, 500))[2] == b"\0" + SMALL_DATA[:500], "reads go on"
        assert asked(address, request("PUT", f"/v1/shards/{BIG}", BIG_DATA), HONEST)[0] == 201
        assert metric(address, "quiver_resident_bytes") == len(SMALL_DATA) + len(BIG_DATA)


# -- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.fault("S3", "E7")
def test_a_daemon_ends_soon_after_its_drain_whatever_its_clients_do(tmp_path: Path) -> None:
    """It took 13 s with readers by HTTP that take nothing, however short its drain was."""
    with Watched(tmp_path / "data", "--drain-seconds", "0.2") as daemon, contextlib.ExitStack() as stack:
        assert daemon.ask("PUT", f"/v1/shards/{BIG}", BIG_DATA)[0] == 201
        for data in (
            read_of(BIG, len(BIG_DATA)),
            request("GET", f"/v1/shards/{BIG}"),
            request("PUT", f"/v1/shards/{SMALL}", b"x", len(SMALL_DATA)),
            b"GET /healthz HTTP/1.1\r\nX: ",
        ):
            stack.enter_context(connected(daemon.address, receive_bytes=4096)).sendall(data)
        until(lambda: daemon.metric("quiver_reads_in_flight") == 1)
        until(lambda: daemon.metric("quiver_under_way") > 3)
        began = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - began < 8
        assert "Traceback" not in daemon.log
