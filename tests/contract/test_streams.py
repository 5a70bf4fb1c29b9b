"""A client that asks for a stream, and servers that do not know how or do it wrong: bounded time, and no wrong byte."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from quiver.digest import Digest
from quiver.errors import BadRequest, Corrupt, OverCapacity, QuiverError, Unavailable
from quiver.peer import U8, PeerClient
from quiver.transport.connection import Connection, Endpoint
from quiver.transport.liveness import Patience
from quiver.transport.stream import (
    FRAME,
    HANDSHAKE_SECONDS,
    MAGIC,
    PROTOCOL,
    RANGES,
    REFUSAL,
    read_on,
    refusal_frame,
)
from quiver.wire import RANGE, ReadRequest
from tests.support.servers import HostileServer, ok

PATIENCE = Patience(silence_seconds=0.4)
LONG_SECONDS = 20.0  # more than a handshake, a silence and a slow machine take together; without a limit, a minute
DATA = bytes(range(200)) * 50
SWITCHED = f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {PROTOCOL}\r\n\r\n".encode()
GOOD = FRAME.pack(MAGIC, RANGES, 2 + len(DATA)) + bytes(2) + DATA

Act = Callable[[socket.socket], None]


def request() -> ReadRequest:
    ranges = np.zeros(2, RANGE)
    ranges["length"] = (4_000, len(DATA) - 4_000)
    return ReadRequest(None, (Digest.of(b"a shard"),), ranges)


def check(answer: tuple[U8, U8]) -> None:
    statuses, data = answer
    assert statuses.tolist() == [0, 0]
    assert data.tobytes() == DATA


def gone(connection: socket.socket, seconds: float) -> bool:
    """Whether the client closes within this time."""
    connection.settimeout(seconds)
    try:
        return not connection.recv(1)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@contextlib.contextmanager
def served(upgrade: Act) -> Iterator[tuple[PeerClient, HostileServer]]:
    """A server that does this to whoever wants a stream, and answers reads by HTTP properly."""

    def answer(connection: socket.socket, asked: bytes) -> None:
        if asked.startswith(b"GET /v1/stream "):
            upgrade(connection)
        else:
            connection.sendall(ok(bytes(2) + DATA))

    with (
        HostileServer(answer) as server,
        contextlib.closing(PeerClient(server.url, patience=PATIENCE)) as peer,
    ):
        yield peer, server


def said(data: bytes) -> Act:
    return lambda connection: connection.sendall(data)


def last_words(data: bytes) -> Act:
    def send(connection: socket.socket) -> None:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_RDWR)

    return send


def dripped(data: bytes) -> Act:
    def drip(connection: socket.socket) -> None:
        for byte in data:
            connection.sendall(bytes([byte]))
            if gone(connection, 0.05):
                return

    return drip


def silent(connection: socket.socket) -> None:
    gone(connection, 60)


NOT_UPGRADED: dict[str, Act] = {
    "no such route": said(ok(b'{"error": "http", "message": "Not Found"}', status="404 Not Found")),
    "an answer": said(ok(b"hello")),
    "over capacity": said(ok(b'{"error": "over_capacity", "message": "no"}', status="503 Busy")),
    "a redirect": said(ok(b"", "Location: http://127.0.0.1:9/v1/stream", status="307 Temporary Redirect")),
    "switched, and talks on": said(SWITCHED + b"surplus"),
    "switched, and answers what nobody asked": said(SWITCHED + GOOD),
    "switched to something else": said(SWITCHED.replace(PROTOCOL.encode(), b"websocket")),
    "switched to nothing": said(b"HTTP/1.1 101 Switching Protocols\r\n\r\n"),
    "no HTTP": last_words(b"220 mail.example.org ESMTP\r\n"),
    "half a head": last_words(SWITCHED[:-2]),
    "endless head": last_words(b"HTTP/1.1 101 Switching Protocols\r\n" + b"A: b\r\n" * 10_000),
    "drips its head": dripped(SWITCHED.replace(b"\r\n\r\n", b"\r\nA: " + b"b" * 1_000 + b"\r\n\r\n")),
    "says nothing": silent,
    "closes": last_words(b""),
}


@pytest.mark.parametrize("upgrade", NOT_UPGRADED.values(), ids=list(NOT_UPGRADED))
def test_who_does_not_upgrade_is_asked_by_http_and_for_a_stream_no_more(upgrade: Act) -> None:
    with served(upgrade) as (peer, server):
        began = time.monotonic()
        for _ in range(3):
            check(peer.read(request()))
        assert time.monotonic() - began < 3 * HANDSHAKE_SECONDS
        assert [asked.split()[0] for asked in server.requests] == [b"GET", b"POST", b"POST", b"POST"]


def test_a_stream_is_wanted_again_after_a_while() -> None:
    with served(said(ok(b"", status="404 Not Found"))) as (peer, server):
        check(peer.read(request()))
        peer._streams.no_stream.pause(0)
        check(peer.read(request()))
        assert [asked.split()[0] for asked in server.requests] == [b"GET", b"POST", b"GET", b"POST"]


def asked_on(connection: socket.socket) -> bytes:
    """Return the next request on a stream; nothing at its end."""
    size = connection.recv(4, socket.MSG_WAITALL)
    return connection.recv(struct.unpack("<I", size)[0], socket.MSG_WAITALL) if len(size) == 4 else b""


def switched(*answers: bytes | Act) -> Act:
    """Upgrade, and give these answers to requests, one each; the last one also to those that follow."""

    def serve(connection: socket.socket) -> None:
        connection.sendall(SWITCHED)
        at = 0
        while asked_on(connection):
            answer = answers[min(at, len(answers) - 1)]
            at += 1
            if isinstance(answer, bytes):
                connection.sendall(answer)
            else:
                answer(connection)

    return serve


def frame(kind: int, size: int, body: bytes = b"", magic: bytes = MAGIC) -> bytes:
    return FRAME.pack(magic, kind, size) + body


WRONG: dict[str, tuple[bytes | Act, type[QuiverError]]] = {
    "wrong magic": (b"HTTP/1.1 200 OK\r\n" + bytes(100), Corrupt),
    "unknown kind": (frame(2, 2, bytes(2)), Corrupt),
    "fewer bytes than ranges": (frame(RANGES, 1, bytes(1)), Corrupt),
    "a byte less than asked for": (frame(RANGES, 1 + len(DATA), bytes(2) + DATA[1:]), Corrupt),
    "a byte more than asked for": (frame(RANGES, 3 + len(DATA), bytes(2) + DATA + b"x"), Corrupt),
    "an absurd size": (frame(RANGES, 1 << 63, bytes(2) + DATA), Corrupt),
    "bytes of what is not present": (frame(RANGES, 2 + len(DATA), bytes([1, 1]) + DATA), Corrupt),
    "ends in its head": (last_words(GOOD[:9]), Unavailable),
    "ends in its statuses": (last_words(GOOD[:17]), Unavailable),
    "ends midway": (last_words(GOOD[:5_000]), Unavailable),
    "falls silent midway": (GOOD[:5_000], Unavailable),
    "says nothing": (silent, Unavailable),
    "drips": (dripped(GOOD), Unavailable),
    "a refusal of junk": (frame(REFUSAL, 7, b"\xffnonsen"), Corrupt),
    "a refusal of the wrong types": (frame(REFUSAL, 13, b'{"error": []}'), Corrupt),
    "a refusal without end": (frame(REFUSAL, 1 << 40, b"{" * 10_000), Corrupt),
    "a refusal that ends early": (last_words(frame(REFUSAL, 90, b"{")), Unavailable),
    "a refusal of a code that nobody knows": (refusal_frame(Unavailable("it", "sulks")), Unavailable),
    "a bad request": (refusal_frame(BadRequest("no")), BadRequest),
}


@pytest.mark.fault("N1")
@pytest.mark.parametrize(("answer", "kind"), WRONG.values(), ids=list(WRONG))
def test_a_wrong_answer_is_an_error_in_time_and_ends_the_stream(answer: bytes | Act, kind: type[QuiverError]) -> None:
    with served(switched(answer)) as (peer, server):
        began = time.monotonic()
        with pytest.raises(kind) as caught:
            peer.read(request())
        assert time.monotonic() - began < LONG_SECONDS
        assert server.url in str(caught.value)
        assert not peer._streams.idle.kept
        assert not [asked for asked in server.requests if asked.startswith(b"POST")], "HTTP is for who cannot upgrade"


@pytest.mark.fault("N1")
@pytest.mark.parametrize(("answer", "kind"), WRONG.values(), ids=list(WRONG))
def test_what_went_wrong_on_a_stream_is_not_met_by_the_next_read(answer: bytes | Act, kind: type[QuiverError]) -> None:
    streams = iter([switched(GOOD, answer), switched(GOOD)])
    with served(lambda connection: next(streams)(connection)) as (peer, _):  # noqa: PLW0108
        check(peer.read(request()))
        with contextlib.suppress(QuiverError):
            check(peer.read(request()))
        check(peer.read(request()))


def test_a_peer_that_drips_a_large_answer_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes well within the silence that is allowed."""
    monkeypatch.setattr("quiver.transport.liveness.SLOWEST_BYTES_PER_SECOND", 1 << 20)

    def drip(connection: socket.socket) -> None:
        connection.sendall(GOOD[:18])
        dripped(DATA)(connection)

    with served(switched(drip)) as (peer, _):
        began = time.monotonic()
        with pytest.raises(Unavailable, match=r"slowly|any more"):
            peer.read(request())
        assert time.monotonic() - began < LONG_SECONDS


def test_a_peer_that_takes_a_request_by_the_byte_is_given_up_in_time() -> None:
    many = ReadRequest(None, (Digest.of(b"a shard"),), np.zeros(65_536, RANGE))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        mine = socket.create_connection(listener.getsockname())
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        other, _ = listener.accept()

    def sip() -> None:
        with other, contextlib.suppress(OSError):
            while not over.wait(0.02):
                other.recv(2048)

    over = threading.Event()
    sipping = threading.Thread(target=sip)
    sipping.start()
    stream = Connection(mine)
    try:
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="takes the request too slowly"):
            read_on(Endpoint("http://127.0.0.1:9", PATIENCE), many, stream)
        assert time.monotonic() - began < LONG_SECONDS
    finally:
        over.set()
        stream.close()
        sipping.join()


@pytest.mark.parametrize(("told", "waits"), [(1.5, 1.5), (-3.0, 0.0), (1e9, 60.0)])
def test_a_busy_peer_keeps_its_stream_and_cannot_make_a_reader_wait_for_ever(told: float, waits: float) -> None:
    with served(switched(refusal_frame(OverCapacity("busy", told)), GOOD)) as (peer, server):
        with pytest.raises(OverCapacity) as caught:
            peer.read(request())
        assert caught.value.retry_after_seconds == waits
        check(peer.read(request()))
        assert len(server.requests) == 1


def test_a_stream_that_was_closed_for_idleness_is_no_fault() -> None:
    with served(switched(last_words(GOOD))) as (peer, server):
        for _ in range(3):
            check(peer.read(request()))
        assert len(server.requests) == 3


def test_a_peer_that_only_ever_hangs_up_is_unavailable_and_asked_twice_at_most() -> None:
    with served(switched(GOOD, last_words(b""))) as (peer, server):
        check(peer.read(request()))
        streams = iter([switched(last_words(b""))])
        server.answer = lambda connection, _: next(streams)(connection)
        with pytest.raises(Unavailable, match=r"does not answer .* running"):
            peer.read(request())
        assert len(server.requests) == 2


def test_a_client_that_was_closed_keeps_no_stream() -> None:
    with served(switched(GOOD)) as (peer, _):
        check(peer.read(request()))
        assert len(peer._streams.idle.kept) == 1
        peer.close()
        assert not peer._streams.idle.kept
        check(peer.read(request()))
        assert not peer._streams.idle.kept
