"""One connection, whatever is spoken on it: whole requests and answers, and waits that end."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quiver.errors import BrokenOff, OverCapacity, QuiverError, Unavailable
from quiver.transport.connection import Connection, Dialogue, Ended
from quiver.transport.liveness import Patience, PeerGone, Vigil
from tests.support.tls import make_contexts

QUICK = Patience(silence_seconds=0.3, suspect_seconds=0.05, alive_seconds=0.1)
LARGE = os.urandom(5_000_000)  # more than a socket takes at once
LONG_SECONDS = 5.0

Pair = tuple[Connection, socket.socket]


def alive(_: socket.socket) -> bool:
    return True


@pytest.fixture(params=["plain", "tls"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """A connection, and the daemon's end of it, which blocks."""
    mine, other = socket.socketpair()
    if request.param == "tls":
        contexts = make_contexts(tmp_path)
        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(contexts.server.wrap_socket, other, server_side=True)
            mine = contexts.client.client().wrap_socket(mine, server_hostname="127.0.0.1")
            other = accepted.result(10)
    connection = Connection(mine)
    yield connection, other
    connection.close()
    other.close()


def begun(
    connection: Connection, patience: Patience = QUICK, is_alive: Callable[[socket.socket], bool] = alive
) -> None:
    connection.begin(Vigil(patience, is_alive))


def test_a_large_request_and_a_large_answer_arrive_whole(pair: Pair) -> None:
    connection, other = pair

    def echo() -> None:
        data = b""
        while len(data) < 10 + len(LARGE):
            data += other.recv(1 << 20)
        other.sendall(data)

    thread = threading.Thread(target=echo)
    thread.start()
    begun(connection, Patience(silence_seconds=LONG_SECONDS))
    connection.send(b"0123", b"", memoryview(b"456789"), LARGE)
    head, behind = connection.receive_until(b"3456", 100)
    assert head == b"0123456"
    assert (b"789" + LARGE).startswith(behind)
    rest = bytearray(3 + len(LARGE) - len(behind))
    connection.receive(memoryview(rest))
    assert behind + rest == b"789" + LARGE
    assert not connection.is_finished
    connection.finish()
    assert connection.is_finished
    thread.join()


def test_silence_ends_a_wait_and_a_daemon_that_lives_is_asked_for_it_ever_more_rarely(pair: Pair) -> None:
    asked: list[float] = []

    def is_alive(_: socket.socket) -> bool:
        asked.append(time.monotonic())
        return True

    begun(pair[0], is_alive=is_alive)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="answers nothing any more"):
        pair[0].receive(memoryview(bytearray(1)))
    assert 0.3 <= time.monotonic() - began < LONG_SECONDS
    assert 1 <= len(asked) <= 3


def test_a_failed_health_check_ends_a_wait_early(pair: Pair) -> None:
    patience = QUICK._replace(silence_seconds=60.0)
    begun(pair[0], patience, lambda _: False)
    began = time.monotonic()
    with pytest.raises(PeerGone):
        pair[0].receive(memoryview(bytearray(1)))
    assert time.monotonic() - began < LONG_SECONDS


def test_who_takes_nothing_of_a_request_is_not_waited_for_long(pair: Pair) -> None:
    begun(pair[0])
    with pytest.raises(TimeoutError):
        pair[0].send(LARGE)


def test_a_trickle_ends_a_wait(pair: Pair) -> None:
    over = threading.Event()

    def drip() -> None:
        while not over.wait(0.02):
            other.sendall(b"x")

    connection, other = pair
    thread = threading.Thread(target=drip)
    thread.start()
    try:
        begun(connection)
        with pytest.raises(TimeoutError, match="too slowly"):
            connection.receive(memoryview(bytearray(10_000)))
    finally:
        over.set()
        thread.join()


def test_a_head_without_an_end_is_refused(pair: Pair) -> None:
    begun(pair[0])
    pair[1].sendall(b"x" * 3000)
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        pair[0].receive_until(b"\r\n\r\n", 1000)


def test_the_end_of_the_connection_is_told_from_silence(pair: Pair) -> None:
    begun(pair[0])
    pair[1].sendall(b"abc")
    pair[1].shutdown(socket.SHUT_RDWR)
    with pytest.raises(Ended, match="ends 7 bytes early"):
        pair[0].receive(memoryview(bytearray(10)))
    assert pair[0].is_answering


def test_a_child_closes_its_copy_of_a_connection(pair: Pair) -> None:
    connection, other = pair
    child = os.fork()
    if not child:
        os._exit(0 if connection.fileno() == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    begun(connection)
    other.sendall(b"still open")
    connection.receive(memoryview(bytearray(10)))


# -- the one retry ----------------------------------------------------------------------------------------------------


def failure(error: OSError, *, is_answering: bool) -> QuiverError:
    return BrokenOff("it", str(error)) if is_answering else Unavailable("it", str(error))


@pytest.fixture
def dialogue() -> Iterator[tuple[Dialogue, list[Connection]]]:
    """A dialogue on connections that are noted as they are opened."""
    made: list[Connection] = []
    yield Dialogue(failure), made
    for connection in made:
        connection.close()


def opening(made: list[Connection]) -> Callable[[], Connection]:
    def opened() -> Connection:
        mine, other = socket.socketpair()
        other.close()
        made.append(Connection(mine))
        return made[-1]

    return opened


def good(connection: Connection) -> str:
    connection.begin(Vigil(QUICK, alive))
    connection.finish()
    return "good"


def test_an_exchange_that_ends_on_an_idle_connection_is_run_once_more_on_a_new_one(
    dialogue: tuple[Dialogue, list[Connection]],
) -> None:
    talk, made = dialogue
    assert talk.run(opening(made), good) == "good"
    ran: list[Connection] = []

    def ended_at_first(connection: Connection) -> str:
        ran.append(connection)
        if len(ran) == 1:
            raise ConnectionResetError
        return good(connection)

    assert talk.run(opening(made), ended_at_first) == "good"
    assert ran == made
    assert talk.idle.kept == made[1:]
    assert made[0].fileno() == -1


def test_an_exchange_that_ends_on_a_new_connection_is_an_error(dialogue: tuple[Dialogue, list[Connection]]) -> None:
    talk, made = dialogue

    def ended(connection: Connection) -> str:
        raise ConnectionResetError("gone")

    with pytest.raises(Unavailable, match="gone"):
        talk.run(opening(made), ended)
    assert len(made) == 1
    assert not talk.idle.kept


def test_a_time_out_on_an_idle_connection_is_not_tried_again(dialogue: tuple[Dialogue, list[Connection]]) -> None:
    talk, made = dialogue
    talk.run(opening(made), good)
    ran: list[Connection] = []

    def late(connection: Connection) -> str:
        ran.append(connection)
        raise TimeoutError("late")

    with pytest.raises(Unavailable, match="late"):
        talk.run(opening(made), late)
    assert ran == made
    assert not talk.idle.kept


def test_a_connection_is_kept_after_an_error_that_the_daemon_told_and_closed_after_any_other(
    dialogue: tuple[Dialogue, list[Connection]],
) -> None:
    talk, made = dialogue

    def refused(connection: Connection) -> str:
        good(connection)
        raise OverCapacity("busy", 1.0)

    def interrupted(connection: Connection) -> str:
        connection.begin(Vigil(QUICK, alive))
        raise KeyboardInterrupt

    with pytest.raises(OverCapacity):
        talk.run(opening(made), refused)
    assert talk.idle.kept == made
    with pytest.raises(KeyboardInterrupt):
        talk.run(opening(made), interrupted)
    assert not talk.idle.kept
    assert made[0].fileno() == -1


def test_under_tls_the_end_without_a_goodbye_is_an_end(tmp_path: Path) -> None:
    contexts = make_contexts(tmp_path)
    mine, other = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(contexts.server.wrap_socket, other, server_side=True)
        wrapped = contexts.client.client().wrap_socket(mine, server_hostname="127.0.0.1")
        server: ssl.SSLSocket = accepted.result(10)
    connection = Connection(wrapped)
    begun(connection)
    server.close()
    with pytest.raises(ConnectionError):
        connection.receive(memoryview(bytearray(1)))
    connection.close()
