"""How soon a daemon that is gone is told from one that takes its time: real sockets, a real daemon under SIGSTOP."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from quiver.digest import Digest
from quiver.errors import Unavailable
from quiver.peer import PeerClient
from quiver.transport.liveness import IN_RACK, Patience, is_alive
from quiver.wire import RANGE, ReadRequest
from tests.support.daemon import Daemon
from tests.support.data import Files
from tests.support.servers import HostileServer, ok

SOON_SECONDS = 4.5  # what takes half a second, on a machine that does much else; without the check it is 5 and more
UPLOAD = bytes(16 << 20)  # more than the sockets between the two take


def request(manifest: Digest | None, digest: Digest) -> ReadRequest:
    ranges = np.zeros(1, RANGE)
    ranges["length"] = 1
    return ReadRequest(manifest, (digest,), ranges, wait_ms=2000)


VERBS: dict[str, Callable[[PeerClient], object]] = {
    "read": lambda peer: peer.read(request(None, Digest.of(b""))),
    "ring": lambda peer: peer.ring(),
    "has": lambda peer: peer.has_shard(Digest.of(b"")),
    "put": lambda peer: peer.put_shard(Digest.of(b""), UPLOAD),
}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path / "d") as daemon:
        yield daemon
        daemon.signal(signal.SIGCONT)


@pytest.mark.fault("M1", "N2")
@pytest.mark.parametrize("known", [True, False], ids=["with a connection", "without one"])
@pytest.mark.parametrize("verb", VERBS.values(), ids=list(VERBS))
def test_a_stopped_daemon_is_given_up_soon(daemon: Daemon, verb: Callable[[PeerClient], object], known: bool) -> None:
    with contextlib.closing(PeerClient(daemon.url, patience=IN_RACK)) as peer:
        if known:
            peer.read(request(None, Digest.of(b"")))
            peer.ring()
        daemon.signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(Unavailable, match="not even a health check"):
            verb(peer)
        assert time.monotonic() - began < SOON_SECONDS


def test_a_daemon_that_takes_its_time_and_is_alive_is_waited_for(files: Files) -> None:
    checks = []

    def answer(connection: socket.socket, asked: bytes) -> None:
        if asked.startswith(b"GET /healthz"):
            checks.append(asked)
            connection.sendall(ok(b"ok\n"))
        elif asked.startswith(b"GET /v1/stream"):
            connection.sendall(ok(b"", status="404 Not Found"))
        else:
            server.gone.wait(1.5)  # a fill
            connection.sendall(ok(b"\0" + b"!"))

    with HostileServer(answer) as server, contextlib.closing(PeerClient(server.url, patience=IN_RACK)) as peer:
        statuses, data = peer.read(request(None, Digest.of(b"")))
    assert statuses.tolist() == [0]
    assert data.tobytes() == b"!"
    assert 1 <= len(checks) <= 4, "seldom enough for a rack of readers that wait for one fill"


def test_a_daemon_that_is_alive_and_never_answers_is_given_up_when_patience_ends() -> None:
    def answer(connection: socket.socket, asked: bytes) -> None:
        if asked.startswith(b"GET /healthz"):
            connection.sendall(ok(b"ok\n"))

    patience = Patience(silence_seconds=0.5, suspect_seconds=0.1)
    with (
        HostileServer(answer) as server,
        contextlib.closing(PeerClient(server.url, patience=patience)) as peer,
        pytest.raises(Unavailable, match="answers nothing any more"),
    ):
        peer.ring()


def test_who_listens_and_says_nothing_is_not_alive() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert not is_alive(url, 0.1)
    assert not is_alive(url, 0.1)
