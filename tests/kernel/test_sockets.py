"""Bytes through a plain socket and through TLS, by the same two functions."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator

import pytest

from quiver.transport.sockets import NotReady, receive_some, send_some


@pytest.fixture
def plain() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    left.setblocking(False)
    right.setblocking(False)
    with left, right:
        yield left, right


def test_many_buffers_go_in_one_call(plain: tuple[socket.socket, socket.socket]) -> None:
    left, right = plain
    parts = [memoryview(os.urandom(size)) for size in (1, 4096, 7)]
    assert send_some(left, parts) == 4104
    room = bytearray(8192)
    assert receive_some(right, memoryview(room)) == 4104
    assert room[:4104] == b"".join(parts)


def test_a_full_socket_and_an_empty_one_say_what_to_poll_for(plain: tuple[socket.socket, socket.socket]) -> None:
    left, right = plain
    with pytest.raises(NotReady) as empty:
        receive_some(right, memoryview(bytearray(1)))
    assert empty.value.events == select.POLLIN
    piece = memoryview(bytes(1 << 16))
    with pytest.raises(NotReady) as full:
        all(send_some(left, [piece]) for _ in range(1000))
    assert full.value.events == select.POLLOUT


def test_the_end_of_the_stream_is_no_bytes(plain: tuple[socket.socket, socket.socket]) -> None:
    left, right = plain
    left.close()
    assert receive_some(right, memoryview(bytearray(1))) == 0
