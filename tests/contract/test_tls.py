"""The same verbs and streams through TLS, against a real TLS server: the same bytes, deadlines and errors."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quiver.digest import Digest
from quiver.errors import Corrupt, QuiverError, Unavailable
from quiver.peer import PeerClient
from quiver.transport.connection import Endpoint
from quiver.transport.liveness import Patience, is_alive
from quiver.transport.stream import FRAME, MAGIC, PROTOCOL, RANGES, open_stream
from quiver.transport.tls import Credentials
from quiver.wire import RANGE, FillRequest, RangeStatus, ReadRequest, ShardStatuses
from tests.support.daemon import Daemon
from tests.support.data import make_shard
from tests.support.servers import HostileServer, ok
from tests.support.tls import Contexts, Pki, make_contexts, tls_front

PATIENCE = Patience(silence_seconds=0.6, suspect_seconds=0.1, alive_seconds=0.3)
LONG_SECONDS = 5.0  # more than any of these takes, on a slow machine
NAME, SHARD = make_shard([os.urandom(1_000_000) for _ in range(9)])
SWITCHED = f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {PROTOCOL}\r\n\r\n".encode()


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    return make_contexts(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def url(contexts: Contexts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon behind TLS."""
    with Daemon(tmp_path_factory.mktemp("daemon") / "data") as daemon, tls_front(daemon.url, contexts.server) as front:
        yield front


def asking(*ranges: tuple[int, int]) -> ReadRequest:
    made = np.zeros(len(ranges), RANGE)
    for at, (offset, length) in enumerate(ranges):
        made[at] = (0, 0, offset, length)
    return ReadRequest(None, (NAME,), made)


def test_every_verb_and_the_stream_of_reads_work_through_tls(url: str, contexts: Contexts) -> None:
    with contextlib.closing(PeerClient(url, tls=contexts.client)) as peer:
        assert peer.ring().rack
        assert peer.status().shards == 0
        assert not peer.has_shard(NAME)
        with pytest.raises(Corrupt):
            peer.put_shard(NAME, SHARD[:-1] + b"x")
        peer.put_shard(NAME, SHARD)
        assert peer.has_shard(NAME)
        assert bytes(peer.load(NAME, len(SHARD))) == SHARD
        request = asking((0, 3), (5, 4_000_000), (4_000_000, 4_999_000), (7, 0))
        for _ in range(3):
            statuses, data = peer.read(request)
            assert not statuses.any()
            assert data.tobytes() == SHARD[:3] + SHARD[5:4_000_005] + SHARD[4_000_000:8_999_000]
        (stream,) = peer._streams.idle.kept
        assert isinstance(stream._socket, ssl.SSLSocket), "and not by HTTP"
        statuses, data = peer._read_by_http(request)
        assert not statuses.any()
        assert data.tobytes()[3:] == SHARD[5:4_000_005] + SHARD[4_000_000:8_999_000]


def test_a_server_of_another_authority_is_not_spoken_to(url: str, tmp_path: Path) -> None:
    with (
        contextlib.closing(PeerClient(url, tls=Credentials(Pki(tmp_path).anonymous()))) as peer,
        pytest.raises(Unavailable, match="certificate verify failed"),
    ):
        peer.ring()


def test_a_client_without_tls_is_told_apart_in_time(url: str) -> None:
    with contextlib.closing(PeerClient(url.replace("https:", "http:"), PATIENCE)) as peer:
        began = time.monotonic()
        for ask in (peer.ring, lambda: peer.read(asking((0, 1)))):
            with pytest.raises(QuiverError):
                ask()
        assert time.monotonic() - began < LONG_SECONDS


def test_whether_a_daemon_lives_is_asked_through_tls(url: str, contexts: Contexts) -> None:
    assert is_alive(url, 5.0, tls=contexts.client)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = f"https://127.0.0.1:{listener.getsockname()[1]}"
        assert not is_alive(silent, 0.2, tls=contexts.client)


def test_a_daemon_that_leaves_a_handshake_unanswered_is_named_in_words(contexts: Contexts) -> None:
    patience = Patience(handshake_seconds=0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = f"https://127.0.0.1:{listener.getsockname()[1]}"
        says = r"cannot be reached \(no answer to the TLS handshake\)"
        with (
            contextlib.closing(PeerClient(silent, patience, tls=contexts.client)) as peer,
            pytest.raises(Unavailable, match=says),
        ):
            peer.ring()


def silent(connection: socket.socket, request: bytes) -> None:
    connection.settimeout(10)
    with contextlib.suppress(OSError):
        connection.recv(1)


@contextlib.contextmanager
def hostile(contexts: Contexts, answer: bytes | None, drip: bytes = b"") -> Iterator[tuple[PeerClient, HostileServer]]:
    """A server behind TLS that upgrades, answers all requests on a stream with this, and the rest by the byte."""

    def act(connection: socket.socket, request: bytes) -> None:
        if request.startswith(b"GET /healthz") and answer is not None:
            connection.sendall(ok(b"ok\n"))
        if not request.startswith(b"GET /v1/stream"):
            return silent(connection, request)
        connection.sendall(SWITCHED)
        while size := connection.recv(4, socket.MSG_WAITALL):
            connection.recv(struct.unpack("<I", size)[0], socket.MSG_WAITALL)
            if answer is None:
                return silent(connection, request)
            connection.sendall(answer)
            for at in range(len(drip)):
                connection.sendall(drip[at : at + 1])
                if server.gone.wait(0.02):
                    return None
        return None

    with (
        HostileServer(act) as server,
        tls_front(server.url, contexts.server) as front,
        contextlib.closing(PeerClient(front, PATIENCE, tls=contexts.client)) as peer,
    ):
        yield peer, server


def test_a_daemon_that_is_gone_is_given_up_soon_through_tls(contexts: Contexts) -> None:
    with hostile(contexts, None) as (peer, _):
        began = time.monotonic()
        with pytest.raises(Unavailable, match="not even a health check"):
            peer.read(asking((0, 1)))
        assert time.monotonic() - began < LONG_SECONDS


def test_a_daemon_that_drips_is_given_up_through_tls(contexts: Contexts) -> None:
    with hostile(contexts, FRAME.pack(MAGIC, RANGES, 1 + 5_000) + b"\0", bytes(5_000)) as (peer, _):
        began = time.monotonic()
        with pytest.raises(Unavailable, match="too slowly"):
            peer.read(asking((0, 5_000)))
        assert time.monotonic() - began < LONG_SECONDS


def test_wrong_bytes_through_tls_are_refused(contexts: Contexts) -> None:
    with hostile(contexts, b"HTTP/1.1 200 OK\r\n" + bytes(20)) as (peer, _), pytest.raises(Corrupt, match="magic"):
        peer.read(asking((0, 1)))


def test_a_large_request_goes_through_tls_whole(url: str, contexts: Contexts) -> None:
    """Many TLS records, of which some are taken only after the socket was full."""
    request = ReadRequest(None, (Digest(b"n" * 32),), np.zeros(65_536, RANGE))
    endpoint = Endpoint(url, Patience(), contexts.client)
    open_stream(endpoint).close()
    with contextlib.closing(PeerClient(url, tls=contexts.client)) as peer:
        statuses, data = peer.read(request)
    assert len(statuses) == 65_536
    assert set(statuses.tolist()) <= {RangeStatus.NO_MANIFEST, RangeStatus.PRESENT}
    assert not len(data)


def test_a_fill_goes_through_tls(contexts: Contexts, tmp_path: Path) -> None:
    def act(connection: socket.socket, request: bytes) -> None:
        connection.sendall(ok(ShardStatuses(b"\0\1").encode()))

    with (
        HostileServer(act) as server,
        tls_front(server.url, contexts.server) as front,
        contextlib.closing(PeerClient(front, PATIENCE, tls=contexts.client)) as peer,
    ):
        assert peer.fill(FillRequest(NAME, (NAME, Digest(b"o" * 32)))).tolist() == [0, 1]
