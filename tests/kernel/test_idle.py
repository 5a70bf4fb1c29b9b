"""Idle connections: used again by the process that opened them, and closed by whoever has no use for them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from quiver.transport.idle import Idle


@pytest.fixture
def ends() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Three connections, of each this end and the other."""
    made = [socket.socketpair() for _ in range(3)]
    yield made
    for pair in made:
        for end in pair:
            end.close()


def is_closed(other: socket.socket) -> bool:
    """Whether nobody has the end opposite any more."""
    other.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        return other.recv(1) == b""
    return False


def test_the_connection_that_was_used_last_is_used_again(ends: list[tuple[socket.socket, socket.socket]]) -> None:
    idle: Idle[socket.socket] = Idle()
    assert idle.take() is None
    for mine, _ in ends:
        idle.keep(mine)
    assert [idle.take() for _ in range(4)] == [ends[2][0], ends[1][0], ends[0][0], None]
    assert not any(is_closed(other) for _, other in ends)


def test_what_is_more_than_enough_is_closed(ends: list[tuple[socket.socket, socket.socket]]) -> None:
    idle: Idle[socket.socket] = Idle(2)
    for mine, _ in ends:
        idle.keep(mine)
    assert [is_closed(other) for _, other in ends] == [False, False, True]
    idle.close()


def test_what_is_in_use_while_all_is_closed_is_closed_when_it_comes_back(
    ends: list[tuple[socket.socket, socket.socket]],
) -> None:
    idle: Idle[socket.socket] = Idle()
    idle.keep(ends[0][0])
    idle.close()
    assert is_closed(ends[0][1])
    idle.keep(ends[1][0])
    assert is_closed(ends[1][1])
    assert idle.take() is None


def test_what_is_cleared_is_closed_and_what_comes_after_is_kept(
    ends: list[tuple[socket.socket, socket.socket]],
) -> None:
    idle: Idle[socket.socket] = Idle()
    idle.keep(ends[0][0])
    idle.clear()
    idle.keep(ends[1][0])
    assert [is_closed(other) for _, other in ends[:2]] == [True, False]
    idle.close()


def test_a_child_closes_its_end_of_its_parents_connections_and_keeps_its_own(
    ends: list[tuple[socket.socket, socket.socket]],
) -> None:
    idle: Idle[socket.socket] = Idle()
    idle.keep(ends[0][0])
    child = os.fork()
    if not child:
        code = 1
        try:
            nothing = idle.take()
            idle.keep(ends[1][0])
            code = 0 if nothing is None and ends[0][0].fileno() == -1 and idle.take() is ends[1][0] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not is_closed(ends[0][1])
    assert idle.take() is ends[0][0]
