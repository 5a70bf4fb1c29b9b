"""Idle connections: used again by the process that opened them, and closed by whoever has no use for them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from quiver.transport.idle import WINDOW_SECONDS, Idle


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
    assert [idle.take() for _ in ends] == [None] * 3
    for mine, _ in ends:
        idle.keep(mine)
    assert [idle.take() for _ in range(4)] == [ends[2][0], ends[1][0], ends[0][0], None]
    assert not any(is_closed(other) for _, other in ends)


def test_what_is_more_than_enough_is_closed(ends: list[tuple[socket.socket, socket.socket]]) -> None:
    idle: Idle[socket.socket] = Idle(2)
    for _ in ends:
        idle.take()
    for mine, _ in ends:
        idle.keep(mine)
    assert [is_closed(other) for _, other in ends] == [True, False, False], "the one that was used last is kept"
    idle.close()


def test_as_many_are_kept_as_were_used_at_once(ends: list[tuple[socket.socket, socket.socket]]) -> None:
    idle: Idle[socket.socket] = Idle()
    for mine, _ in ends:
        idle.keep(idle.take() or mine)  # one after the other
    assert idle.kept == [ends[0][0]]
    two = [idle.take(), idle.take() or ends[1][0]]
    for one in two:
        assert one is not None
        idle.keep(one)
    assert idle.kept == two
    idle.close()


def use_all_at_once(idle: Idle[socket.socket], ends: list[tuple[socket.socket, socket.socket]]) -> None:
    for _ in ends:
        idle.take()
    for mine, _ in ends:
        idle.keep(mine)


def test_surplus_is_closed_once_the_peak_of_use_is_long_ago(ends: list[tuple[socket.socket, socket.socket]]) -> None:
    now = 0.0
    idle: Idle[socket.socket] = Idle(clock=lambda: now)
    use_all_at_once(idle, ends)
    counts = []
    for _ in range(4):
        one = idle.take()
        assert one is ends[2][0], "the others grow old"
        idle.keep(one)
        counts.append(len(idle.kept))
        now += WINDOW_SECONDS
    assert counts == [3, 3, 1, 1]
    assert [is_closed(other) for _, other in ends] == [True, True, False]
    idle.close()


def test_a_peak_before_a_long_pause_does_not_count(ends: list[tuple[socket.socket, socket.socket]]) -> None:
    now = 0.0
    idle: Idle[socket.socket] = Idle(clock=lambda: now)
    use_all_at_once(idle, ends)
    now = 10 * WINDOW_SECONDS
    one = idle.take()
    assert one is not None
    idle.keep(one)
    assert idle.kept == [one]
    idle.close()


def test_a_use_that_ends_without_a_connection_is_counted_as_ended(
    ends: list[tuple[socket.socket, socket.socket]],
) -> None:
    idle: Idle[socket.socket] = Idle()
    for _ in range(3):
        idle.take()
        idle.drop(None)
    for mine, _ in ends[:2]:
        idle.take()
        idle.keep(mine)
    assert len(idle.kept) == 1
    idle.take()
    idle.drop(ends[1][0])
    assert is_closed(ends[1][1])
    assert repr(idle) == "Idle(0 kept, 0 used)"


def test_what_is_in_use_while_all_is_closed_is_closed_when_it_comes_back(
    ends: list[tuple[socket.socket, socket.socket]],
) -> None:
    idle: Idle[socket.socket] = Idle()
    idle.take()
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
    idle.take()
    idle.keep(ends[0][0])
    idle.clear()
    idle.take()
    idle.keep(ends[1][0])
    assert [is_closed(other) for _, other in ends[:2]] == [True, False]
    idle.close()


def test_a_child_closes_its_end_of_its_parents_connections_and_keeps_its_own(
    ends: list[tuple[socket.socket, socket.socket]],
) -> None:
    idle: Idle[socket.socket] = Idle()
    idle.take()
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
