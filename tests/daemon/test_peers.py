"""A daemon's fills beside a peer that is grey: it delays a few of them, briefly, and is then avoided."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quiver.errors import Unavailable
from quiver.peer import PeerClient
from quiver.ring import Member
from quiver.wire import FillRequest
from quiver_cacheserver.bounds import FILL_THREADS
from quiver_cacheserver.rack.peers import RackPeers
from quiver_cacheserver.rack.registry import StaticRegistry
from tests.support.daemon import Daemon
from tests.support.data import Files, make_files, random_files
from tests.support.etcd import free_ports
from tests.support.servers import HostileServer, ok
from tests.support.waiting import until

Answer = Callable[[HostileServer, socket.socket], None]


def mute(server: HostileServer, connection: socket.socket) -> None:
    server.gone.wait(60)


def drip(server: HostileServer, connection: socket.socket) -> None:
    connection.sendall(ok(b"", length=60_000))
    while not server.gone.wait(0.02):
        connection.sendall(b"x")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("small"), random_files(90, seed=4), shard_bytes="32KiB")


@pytest.mark.fault("N2")
@pytest.mark.parametrize("grey", [mute, drip])
def test_a_peer_that_is_stuck_delays_the_first_fills_and_no_others(small: Files, tmp_path: Path, grey: Answer) -> None:
    def answer(connection: socket.socket, asked: bytes) -> None:
        if asked.startswith(b"GET /healthz"):
            connection.sendall(ok(b"ok\n"))
        elif asked.startswith(b"GET /v1/shards"):
            grey(server, connection)
        else:
            connection.sendall(ok(b"", status="404 Not Found"))

    manifest = small.opened()
    [port] = free_ports(1)
    with HostileServer(answer) as server:
        peers = f"http://127.0.0.1:{port},{server.url}"
        with (
            Daemon(tmp_path / "d", "--peers", peers, port=port, origins=[small.folder]) as daemon,
            contextlib.closing(PeerClient(daemon.url)) as client,
        ):
            client.put_manifest(manifest.digest, manifest.content)
            names = tuple(manifest.shard_digest(number) for number in range(manifest.shard_count))
            assert len(names) > 6 * FILL_THREADS
            begun = time.monotonic()
            assert not client.fill(FillRequest(manifest.digest, names, 30_000)).any()
            seconds = time.monotonic() - begun
            asked = sum(request.startswith(b"GET /v1/shards") for request in server.requests)
            rounds = 1 + int(seconds)  # after a pause of half a second it is tried again: it answers health checks
            assert 1 <= asked <= FILL_THREADS * (1 + 2 * rounds)
            assert asked < len(names), "most fills did not wait for it"


@pytest.fixture
def peers() -> Iterator[RackPeers]:
    urls = [f"http://127.0.0.1:{port}" for port in free_ports(2)]
    made = RackPeers(StaticRegistry("r", Member("a", urls[0]), urls), "a", urls[0])
    yield made
    made.close()


def test_a_peer_that_failed_is_asked_again_once_a_probe_in_the_background_succeeds(
    peers: RackPeers, small: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = small.opened().shard_digest(0)
    [peer] = peers.holders(digest)
    peers.failed(peer, Unavailable(peer.url, "does not answer"))
    assert list(peers.holders(digest)) == []
    probed: list[str] = []
    monkeypatch.setattr("quiver_cacheserver.rack.peers.is_alive", lambda url, seconds, tls: not probed.append(url))
    until(lambda: list(peers.holders(digest)) == [peer])
    assert probed == [peer.url]
