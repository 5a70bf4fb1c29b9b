"""An attempt at a read, over real sockets: late after a while, given up at its limit, cancelled from another thread."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from quiver.digest import Digest
from quiver.errors import Unavailable
from quiver.peer import PeerClient
from quiver.transport.attempt import Attempt
from quiver.transport.connection import Connection
from quiver.transport.liveness import Patience
from quiver.transport.stream import ranges_frame
from quiver.wire import RANGE, ReadRequest
from tests.support.servers import HostileServer, ok

SIZE = 400_000
PATIENCE = Patience(silence_seconds=30.0)
SOON_SECONDS = 10.0  # what takes milliseconds, on a machine that does much else; without the cancellation it is 30
UPGRADED = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: quiver-read\r\n\r\n"


def a_read() -> ReadRequest:
    ranges = np.zeros(1, RANGE)
    ranges["length"] = SIZE
    return ReadRequest(None, (Digest.of(b""),), ranges)


class Grey:
    """A daemon whose answers a test lets out piece by piece; by HTTP, or on streams."""

    def __init__(self, by: str) -> None:
        self.by = by
        self.hold = threading.Event()  # set: the rest of each answer is sent
        self.asked = threading.Event()
        self.first_bytes = 0  # of the body, that are sent at once
        self.server = HostileServer(self._answer)

    def _answer(self, connection: socket.socket, asked: bytes) -> None:
        if asked.startswith(b"GET /healthz"):
            connection.sendall(ok(b"ok\n"))
        elif asked.startswith(b"GET /v1/stream"):
            if self.by == "HTTP":
                connection.sendall(ok(b"", status="404 Not Found"))
                return
            connection.sendall(UPGRADED)
            while size := connection.recv(4):
                left = int.from_bytes(size, "little")
                while left:
                    left -= len(connection.recv(left))
                self._send(connection, ranges_frame(np.zeros(1, np.uint8), SIZE) + b"x" * SIZE)
        else:
            self._send(connection, ok(b"\0" + b"x" * SIZE))

    def _send(self, connection: socket.socket, answer: bytes) -> None:
        self.asked.set()
        at = len(answer) - SIZE + self.first_bytes if self.first_bytes else 0
        connection.sendall(answer[:at])
        while not self.hold.wait(0.05):
            if self.server.gone.is_set():
                return
        connection.sendall(answer[at:])


@pytest.fixture(params=["HTTP", "a stream"])
def grey(request: pytest.FixtureRequest) -> Iterator[Grey]:
    grey = Grey(request.param)
    with grey.server:
        yield grey


@pytest.fixture
def peer(grey: Grey) -> Iterator[PeerClient]:
    with contextlib.closing(PeerClient(grey.server.url, patience=PATIENCE)) as peer:
        yield peer


def late_once(grey: Grey, calls: list[float], act: Callable[[], None] = lambda: None) -> Callable[[], bool]:
    def on_late() -> bool:
        calls.append(time.monotonic())
        act()
        return True

    return on_late


def test_an_answer_in_time_is_not_late(grey: Grey, peer: PeerClient) -> None:
    grey.hold.set()
    calls: list[float] = []
    attempt = Attempt(SIZE, late_seconds=SOON_SECONDS, on_late=late_once(grey, calls))
    statuses, data = peer.read(a_read(), attempt)
    assert not statuses.any()
    assert len(data) == SIZE
    assert attempt.received_bytes >= SIZE
    assert not calls
    attempt.cancel()  # after the end: nothing is left to be cancelled
    assert len(peer.read(a_read())[1]) == SIZE


def test_a_cancellation_that_comes_too_late_leaves_the_connection_to_the_next_read(
    grey: Grey, peer: PeerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    grey.hold.set()
    attempt, shut = Attempt(SIZE), []
    idle = (peer._http if grey.by == "HTTP" else peer._streams).dialogue.idle
    keep = idle.keep

    def keep_then_cancel(connection: Connection) -> None:
        keep(connection)  # from here on another thread may use it
        attempt.cancel()

    monkeypatch.setattr(idle, "keep", keep_then_cancel)
    monkeypatch.setattr(Connection, "shut", lambda connection: shut.append(connection.fileno()))
    assert len(peer.read(a_read(), attempt)[1]) == SIZE
    assert attempt.is_cancelled
    assert not shut


@pytest.mark.parametrize("first_bytes", [0, 1], ids=["nothing", "a byte"])
def test_who_sends_nothing_or_hardly_anything_is_late_once(grey: Grey, peer: PeerClient, first_bytes: int) -> None:
    grey.first_bytes = first_bytes
    calls: list[float] = []
    begun = time.monotonic()
    attempt = Attempt(SIZE, late_seconds=0.2, on_late=late_once(grey, calls, grey.hold.set))
    _, data = peer.read(a_read(), attempt)
    assert len(data) == SIZE, "it goes on all the same"
    assert len(calls) == 1
    assert calls[0] - begun >= 0.2


def test_who_could_not_act_is_told_again(grey: Grey, peer: PeerClient) -> None:
    calls: list[int] = []

    def on_late() -> bool:
        calls.append(1)
        if len(calls) == 3:
            grey.hold.set()
        return False

    peer.read(a_read(), Attempt(SIZE, late_seconds=0.05, on_late=on_late))
    assert len(calls) >= 3


def test_an_attempt_ends_at_its_limit(grey: Grey, peer: PeerClient) -> None:
    grey.first_bytes = 100
    begun = time.monotonic()
    with pytest.raises(Unavailable, match="more slowly than the other daemons"):
        peer.read(a_read(), Attempt(SIZE, limit_seconds=0.3))
    assert 0.3 <= time.monotonic() - begun < SOON_SECONDS


@pytest.mark.parametrize("known", [True, False], ids=["with a connection", "without one"])
def test_a_cancelled_attempt_ends_at_once_and_is_not_retried(grey: Grey, peer: PeerClient, known: bool) -> None:
    if known:
        grey.hold.set()
        peer.read(a_read())
        grey.hold.clear()
        grey.asked.clear()
    attempt = Attempt(SIZE)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(peer.read, a_read(), attempt)
        assert grey.asked.wait(SOON_SECONDS)
        grey.asked.clear()
        begun = time.monotonic()
        attempt.cancel()
        assert isinstance(reading.exception(SOON_SECONDS), Unavailable)
        assert time.monotonic() - begun < SOON_SECONDS
    assert not grey.asked.wait(0.2), "it is not asked a second time"
    grey.hold.set()
    assert len(peer.read(a_read())[1]) == SIZE, "and can be asked again, on another connection"


def test_an_attempt_that_was_cancelled_before_asks_nobody(grey: Grey, peer: PeerClient) -> None:
    attempt = Attempt(SIZE)
    attempt.cancel()
    with pytest.raises(Unavailable, match="overtaken"):
        peer.read(a_read(), attempt)
    assert not grey.asked.is_set()


def test_an_answer_that_arrives_at_a_good_rate_is_not_late() -> None:
    calls: list[float] = []
    attempt = Attempt(1000, late_seconds=0.1, on_late=lambda: not calls.append(1.0))
    begun = attempt.due_at - 0.1
    attempt.heard(300, begun + 0.05)
    attempt.heard(500, begun + 0.1)  # 800 bytes in 50 ms: 200 more take 12
    attempt.check(begun + 0.1)
    assert not calls
    assert begun + 0.1 < attempt.due_at < begun + 0.2
    attempt.check(begun + 0.3)  # and now none has come for long
    assert calls
