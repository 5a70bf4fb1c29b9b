"""Malformed and ambiguous HTTP against a real daemon: it answers or closes, and never loses count of the requests."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator

import pytest

from tests.support.daemon import Daemon
from tests.support.hostile_http import (
    ASK,
    CANARY_DATA,
    END,
    HIDDEN,
    LENGTH,
    MESSAGES,
    OK,
    PROBE_DATA,
    SHARDS,
    UPGRADE,
    H,
    all_answers,
    complaint,
)
from tests.support.waiting import until

CLOSED = {  # what a parser that tries to help answers wrongly: these end in an error, and the end of the connection
    name
    for name in MESSAGES
    if name.startswith(("CL", "TE", "a tab before", "a vertical", "a quoted chunked", "a header", "a folded", "a NUL"))
} | {"a line without a colon", "lines that end in LF", "two hosts", "no host", "an upgrade with a body", "TLS"}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("hostile") / "data") as daemon:
        for digest, data in SHARDS.items():
            assert daemon.ask("PUT", f"/v1/shards/{digest}", data)[0] == 201
        yield daemon
        until(lambda: daemon.metric("quiver_under_way") == 1)  # the connection that asks
        assert "Traceback" not in daemon.log
        assert "ERROR" not in daemon.log


@pytest.mark.fault("S5")
@pytest.mark.parametrize("name", MESSAGES)
def test_no_message_makes_a_daemon_lose_count_of_the_requests_on_a_connection(daemon: Daemon, name: str) -> None:
    assert not complaint(daemon.address, MESSAGES[name])


@pytest.mark.fault("S5")
@pytest.mark.parametrize("name", sorted(CLOSED))
def test_an_ambiguous_message_is_answered_400_and_ends_the_connection(daemon: Daemon, name: str) -> None:
    answers, left = all_answers(daemon.address, MESSAGES[name] + ASK)
    assert [answer.status for answer in answers] == [400]
    assert not left


@pytest.mark.fault("S5")
def test_the_oracle_sees_a_request_that_is_answered_out_of_turn(daemon: Daemon) -> None:
    """What a daemon would do that takes a body for a request is sent here as requests."""
    assert "hidden" in complaint(daemon.address, OK + END + HIDDEN)
    assert "more answers" in complaint(daemon.address, (OK + END) * 2)


@pytest.mark.fault("S5")
def test_pipelined_requests_are_answered_each_once_and_in_order(daemon: Daemon) -> None:
    answers, left = all_answers(daemon.address, (ASK + HIDDEN + OK + END) * 40, 120)
    assert [answer.body for answer in answers] == [PROBE_DATA, CANARY_DATA, b"ok\n"] * 40
    assert not left


@pytest.mark.fault("S5")
@pytest.mark.parametrize("pieces", [1, 3, 17])
def test_the_pieces_in_which_messages_arrive_change_nothing(daemon: Daemon, pieces: int) -> None:
    """A body that looks like a request, cut anywhere, remains a body."""
    rng = random.Random(pieces)
    message = b"POST /v1/recheck HTTP/1.1\r\n" + H + LENGTH + END + HIDDEN + ASK
    for _ in range(20):
        cuts = sorted(rng.sample(range(1, len(message)), pieces))
        with socket.create_connection(daemon.address, timeout=20) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for begin, end in zip([0, *cuts], [*cuts, len(message)], strict=True):
                sock.sendall(message[begin:end])
            received = b""
            while not received.endswith(PROBE_DATA):
                more = sock.recv(1 << 16)
                assert more, received
                received += more
        assert received.count(b"HTTP/1.1 ") == 2
        assert received.startswith(b"HTTP/1.1 400 ")


@pytest.mark.fault("S5")
def test_what_follows_an_upgrade_that_was_refused_is_never_answered_late(daemon: Daemon) -> None:
    """The parser drops it, so the connection must end: the next answer would be taken for that of the dropped one."""
    for path in (b"/healthz", b"/v1/stream", b"/nothing"):
        message = b"GET " + path + b" HTTP/1.1\r\n" + H + b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + END
        with socket.create_connection(daemon.address, timeout=20) as sock:
            sock.sendall(message + HIDDEN)
            received = b""
            while more := sock.recv(1 << 16):
                received += more
        assert received.count(b"Content-Length: ") == 1, "one answer"
        assert CANARY_DATA not in received


@pytest.mark.fault("S5")
def test_http_behind_an_upgrade_is_no_frame_and_ends_the_stream(daemon: Daemon) -> None:
    with socket.create_connection(daemon.address, timeout=20) as sock:
        sock.sendall(UPGRADE + END)
        received = b""
        while b"\r\n\r\n" not in received:
            received += sock.recv(1 << 16)
        assert received.startswith(b"HTTP/1.1 101 ")
        sock.sendall(HIDDEN)
        received = received.partition(b"\r\n\r\n")[2]
        while more := sock.recv(1 << 16):
            received += more
    assert received.startswith(b"QRA1\x01")
    assert CANARY_DATA not in received


@pytest.mark.fault("S5", "S12")
def test_clients_that_leave_before_an_interim_answer_write_nothing_into_the_log(daemon: Daemon) -> None:
    message = b"POST /v1/read HTTP/1.1\r\n" + H + LENGTH + b"Expect: 100-continue\r\n" + END
    for _ in range(100):
        with socket.create_connection(daemon.address, timeout=20) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.sendall(message)
    until(lambda: daemon.metric("quiver_under_way") == 1)
    assert "Traceback" not in daemon.log
