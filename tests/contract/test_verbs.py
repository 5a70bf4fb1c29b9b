"""The verbs about whole shards, and what all carriers share: requests as documented, retries, errors, connections."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from quiver.digest import Digest
from quiver.errors import (
    BadRequest,
    BrokenOff,
    Corrupt,
    DiskFailed,
    Forbidden,
    Misconfigured,
    NotFound,
    OverCapacity,
    QuiverError,
    Unavailable,
    answer_of,
)
from quiver.peer import PeerClient
from quiver.transport.liveness import Patience
from quiver.transport.stream import (
    FRAME,
    MAGIC,
    NO_STREAM_SECONDS,
    NO_STREAM_SECONDS_MAX,
    PROTOCOL,
    RANGES,
    refusal_frame,
)
from quiver.wire import (
    RANGE,
    ErrorBody,
    FillRequest,
    ForgoRequest,
    RangeStatus,
    ReadRequest,
    RecheckRequest,
    ShardStatuses,
)
from tests.support.servers import HostileServer, ok

PATIENCE = Patience(silence_seconds=0.4)
MANIFEST, ONE, TWO = (Digest.of(name) for name in (b"manifest", b"one", b"two"))
SWITCHED = f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {PROTOCOL}\r\n\r\n".encode()
FILL = FillRequest(MANIFEST, (ONE, TWO), 1500)

Answer = Callable[[socket.socket, bytes], None]


@contextlib.contextmanager
def served(answer: bytes | Answer) -> Iterator[tuple[PeerClient, HostileServer]]:
    """A server that answers every request with this."""

    def say(connection: socket.socket, _: bytes) -> None:
        assert isinstance(answer, bytes)
        connection.sendall(answer)

    with (
        HostileServer(say if isinstance(answer, bytes) else answer) as server,
        contextlib.closing(PeerClient(server.url, PATIENCE)) as peer,
    ):
        yield peer, server


def read_request() -> ReadRequest:
    ranges = np.zeros(1, RANGE)
    ranges["length"] = 3
    return ReadRequest(None, (ONE,), ranges)


# -- whole shards -----------------------------------------------------------------------------------------------------


def test_a_fill_returns_a_status_per_shard() -> None:
    with served(ok(ShardStatuses(bytes([RangeStatus.PRESENT, RangeStatus.UPLOAD])).encode())) as (peer, server):
        assert peer.fill(FILL).tolist() == [RangeStatus.PRESENT, RangeStatus.UPLOAD]
        head, _, body = server.requests[0].partition(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/fill HTTP/1.1\r\n")
        assert b"Content-Type: application/msgpack" in head
        told = msgspec.msgpack.decode(body)
        assert told == {"shards": ONE + TWO, "manifest": bytes(MANIFEST), "wait_ms": 1500}


def test_forgoing_and_rechecking_are_requests_of_their_own() -> None:
    with served(b"HTTP/1.1 204 No Content\r\n\r\n") as (peer, server):
        peer.forgo(ForgoRequest(MANIFEST, (TWO,)))
        peer.recheck(RecheckRequest((ONE, TWO)))
        forgo, recheck = (request.partition(b"\r\n\r\n") for request in server.requests)
    assert forgo[0].startswith(b"POST /v1/forgo HTTP/1.1\r\n")
    assert msgspec.msgpack.decode(forgo[2]) == {"shards": bytes(TWO), "manifest": bytes(MANIFEST)}
    assert recheck[0].startswith(b"POST /v1/recheck HTTP/1.1\r\n")
    assert msgspec.msgpack.decode(recheck[2]) == {"shards": ONE + TWO}


WRONG_STATUSES = {
    "of one shard": ShardStatuses(b"\0").encode(),
    "of three": ShardStatuses(b"\0\0\0").encode(),
    "of a range": ShardStatuses(bytes([0, RangeStatus.BAD_RANGE])).encode(),
    "unknown": ShardStatuses(b"\0\xff").encode(),
    "of text": msgspec.msgpack.encode({"statuses": "ab"}),
    "nothing": b"",
    "garbage": b"\xc1" * 9,
    "with more behind it": ShardStatuses(b"\0\0").encode() + b"x",
    "more than was asked for": ShardStatuses(bytes(10_000)).encode(),
}


@pytest.mark.parametrize("body", WRONG_STATUSES.values(), ids=list(WRONG_STATUSES))
def test_wrong_statuses_are_an_error(body: bytes) -> None:
    with served(ok(body)) as (peer, server), pytest.raises(Corrupt, match=server.url):
        peer.fill(FILL)


def test_a_daemon_that_waits_for_a_fill_is_waited_for() -> None:
    def late(connection: socket.socket, request: bytes) -> None:
        if request.startswith(b"GET /healthz"):
            connection.sendall(ok(b"ok\n"))
        elif not server.gone.wait(0.8):  # twice the silence that is allowed without a fill
            connection.sendall(ok(ShardStatuses(b"\0\0").encode()))

    with served(late) as (peer, server):
        assert not peer.fill(FILL).any()


# -- errors -----------------------------------------------------------------------------------------------------------

REFUSALS = [
    BadRequest("no"),
    Misconfigured("no"),
    NotFound("no"),
    Corrupt("no", "an upload"),
    Forbidden("no"),
    OverCapacity("no", 3.0),
    DiskFailed("no"),
    Unavailable("an origin", "no"),
]


@pytest.mark.parametrize("error", REFUSALS, ids=[type(error).__name__ for error in REFUSALS])
def test_a_refusal_means_the_same_by_stream_and_by_http(error: QuiverError) -> None:
    told = answer_of(error)
    headers = [f"{name}: {value}" for name, value in told.headers.items()]
    by_http = ok(msgspec.json.encode(ErrorBody(told.code, told.message)), *headers, status=f"{told.status} No")

    def by_stream(connection: socket.socket, request: bytes) -> None:
        connection.sendall(SWITCHED)
        connection.recv(1 << 16)
        connection.sendall(refusal_frame(error))

    got: list[QuiverError] = []
    for answer in (by_http, by_stream):
        with served(answer) as (peer, server):
            with pytest.raises(QuiverError) as caught:
                peer.read(read_request())
            got.append(caught.value)
            assert server.url in str(caught.value)
    assert type(got[0]) is type(got[1])
    assert got[0].retry_after_seconds == got[1].retry_after_seconds
    assert "no" in str(got[0])


def test_an_answer_that_ends_early_is_called_that_by_http_and_by_stream() -> None:
    def by_http(connection: socket.socket, _: bytes) -> None:
        connection.sendall(ok(b"half", length=8))
        connection.shutdown(socket.SHUT_RDWR)

    def by_stream(connection: socket.socket, _: bytes) -> None:
        connection.sendall(SWITCHED)
        connection.recv(1 << 16)
        connection.sendall(FRAME.pack(MAGIC, RANGES, 4) + b"\0x")
        connection.shutdown(socket.SHUT_RDWR)

    with served(by_http) as (peer, _), pytest.raises(BrokenOff, match="ends 4 bytes early"):
        peer.load(ONE, 100)
    with served(by_stream) as (peer, _), pytest.raises(BrokenOff, match="ends 2 bytes early"):
        peer.read(read_request())


# -- connections ------------------------------------------------------------------------------------------------------


def last_words(answer: bytes) -> Answer:
    def say(connection: socket.socket, _: bytes) -> None:
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_RDWR)

    return say


@pytest.mark.parametrize(
    "verb", [lambda peer: peer.fill(FILL), lambda peer: peer.put_shard(ONE, bytes(100_000))], ids=["fill", "put"]
)
def test_a_request_on_a_connection_that_was_closed_while_idle_is_sent_once_more(
    verb: Callable[[PeerClient], object],
) -> None:
    with served(last_words(ok(ShardStatuses(b"\0\0").encode()))) as (peer, server):
        for _ in range(3):
            verb(peer)
        assert 3 <= len(server.requests) <= 5, "some may still have been read by who had hung up"


def test_a_request_is_sent_once_more_and_not_a_third_time() -> None:
    with served(ok(ShardStatuses(b"\0\0").encode())) as (peer, server):
        peer.fill(FILL)
        server.answer = last_words(b"")
        with pytest.raises(Unavailable, match="does not answer"):
            peer.fill(FILL)
        assert len(server.requests) == 3


def test_a_request_on_a_new_connection_is_sent_once() -> None:
    with served(last_words(b"")) as (peer, server):
        with pytest.raises(Unavailable):
            peer.fill(FILL)
        assert len(server.requests) == 1


def test_a_daemon_that_closes_its_connections_gets_new_ones() -> None:
    with served(ok(ShardStatuses(b"\0\0").encode(), "Connection: close")) as (peer, _):
        peer.fill(FILL)
        assert not peer._http.dialogue.idle.kept


@pytest.mark.fault("N1")
def test_what_comes_behind_an_answer_costs_the_connection() -> None:
    with served(ok(ShardStatuses(b"\0\0").encode()) + b"surplus") as (peer, _):
        peer.fill(FILL)
        assert not peer._http.dialogue.idle.kept


@pytest.mark.parametrize(
    ("told", "least", "most"),
    [("3", 2.0, 3.0), ("1e9", 59.0, NO_STREAM_SECONDS_MAX), ("junk", 4.0, 5.0), ("0", 4.0, 5.0), ("nan", 4.0, 5.0)],
)
def test_a_daemon_without_a_stream_to_spare_is_asked_again_when_it_says(told: str, least: float, most: float) -> None:
    def busy(connection: socket.socket, request: bytes) -> None:
        if request.startswith(b"GET /v1/stream"):
            body = b'{"error": "over_capacity", "message": "no"}'
            connection.sendall(ok(body, f"Retry-After: {told}", status="503 Busy"))
        else:
            connection.sendall(ok(b"\0abc"))

    with served(busy) as (peer, server):
        for _ in range(2):
            assert peer.read(read_request())[1].tobytes() == b"abc"
        assert [request.split()[0] for request in server.requests] == [b"GET", b"POST", b"POST"]
        assert least <= peer._streams.no_stream.left_seconds <= most


def test_a_daemon_that_knows_no_streams_is_asked_for_one_ever_more_rarely() -> None:
    def old(connection: socket.socket, request: bytes) -> None:
        known = request.startswith(b"POST")
        connection.sendall(ok(b"\0abc") if known else ok(b"", status="404 Not Found"))

    with served(old) as (peer, _):
        waits = []
        for _ in range(6):
            peer.read(read_request())
            waits.append(round(peer._streams.no_stream.left_seconds))
            peer._streams.no_stream.pause(0)
        assert waits == sorted(waits)
        assert waits[-1] == pytest.approx(NO_STREAM_SECONDS_MAX, abs=1)


def test_threads_that_are_given_no_stream_at_once_count_as_one_failure() -> None:
    threads = 6
    together = threading.Barrier(threads)

    def old(connection: socket.socket, request: bytes) -> None:
        if request.startswith(b"GET /v1/stream"):
            together.wait(20)
            connection.sendall(ok(b"", status="404 Not Found"))
        else:
            connection.sendall(ok(b"\0abc"))

    with served(old) as (peer, _), ThreadPoolExecutor(threads) as pool:
        for answer in [pool.submit(peer.read, read_request()) for _ in range(threads)]:
            assert answer.result()[1].tobytes() == b"abc"
        assert peer._streams.no_stream.left_seconds <= NO_STREAM_SECONDS
