"""Sending to and receiving from a socket: the one place that knows whether it uses TLS.

All code sends and receives by ``send_some`` and ``receive_some``, which behave the same for a plain socket and for an
``ssl.SSLSocket``. Only a plain socket takes many buffers in one call without copying them, and only there can the
kernel wait until a buffer is full (``kernel_waits``); an ``SSLSocket`` does not block and is polled. What a plain
socket sends is read by the kernel: a mapped page that cannot be read is an error of ``send_vector``, not a signal.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import ssl
import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

TLS_PIECE_BYTES: Final = 256 << 10  # small buffers are joined before encryption: each would be a TLS record
TLS_TURN_BYTES: Final = 1 << 20  # received in one go; then whoever waits looks at the time
VECTOR_MAX: Final = 1024  # buffers of one call: the kernel's IOV_MAX


class NotReady(BlockingIOError):
    """The socket can send, or receive, nothing now. ``events``: what to poll it for; under TLS it may be either."""

    def __init__(self, events: int) -> None:
        super().__init__("the socket is not ready")
        self.events = events


def connect(host: str, port: int, seconds: float) -> socket.socket:
    """Return a connection without Nagle's delay. Raises ``OSError``."""
    sock = socket.create_connection((host, port), seconds)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def kernel_waits(sock: socket.socket) -> bool:
    """Whether blocking calls wait as long as ``set_wait`` says, which saves system calls on byte streams.

    Not under TLS, where a write may have to read, nor for datagrams, whose waits ``poll`` ends to the millisecond.
    """
    return sock.type == socket.SOCK_STREAM and not isinstance(sock, ssl.SSLSocket)


def set_wait(sock: socket.socket, seconds: float) -> None:
    """Have the kernel end a blocking call after so long: with what was transferred, or with ``NotReady`` if nothing."""
    microseconds = max(int(seconds * 1e6), 1000)
    wait = struct.pack("ll", *divmod(microseconds, 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)


def is_ready(sock: socket.socket, events: int, seconds: float) -> bool:
    """Wait for one of these ``poll`` events; return whether it occurred in time."""
    poller = select.poll()
    poller.register(sock, events)
    return bool(poller.poll(max(seconds, 0.0) * 1000))


def send_some(sock: socket.socket, buffers: Sequence[memoryview]) -> int:
    """Send as much of the buffers, in order, as the socket accepts; return how many bytes that was.

    Raises ``NotReady`` if it accepts nothing now, ``OSError`` if it failed. Under TLS, send the same bytes again after
    ``NotReady``, as OpenSSL requires.
    """
    if not isinstance(sock, ssl.SSLSocket):
        try:
            return sock.sendmsg(buffers)
        except BlockingIOError:
            raise NotReady(select.POLLOUT) from None
    left, sent = memoryview(_first_bytes(buffers)), 0
    try:
        while sent < len(left):  # a call takes one record, of 16 KiB
            sent += sock.send(left[sent:])
        return sent
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError) as error:
        if sent:
            return sent
        raise NotReady(select.POLLIN if isinstance(error, ssl.SSLWantReadError) else select.POLLOUT) from None
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
        raise ConnectionResetError("the other end closed the connection") from error


def is_plain(sock: socket.socket) -> bool:
    """Whether the socket uses no TLS, so that ``send_vector`` may be used."""
    return not isinstance(sock, ssl.SSLSocket)


def unread_bytes(sock: socket.socket) -> int:
    """Return how many received bytes TLS holds in this process, where ``poll`` does not see them."""
    return sock.pending() if isinstance(sock, ssl.SSLSocket) else 0


def send_vector(sock: socket.socket, vector: npt.NDArray[np.uint64], first: int = 0) -> int:
    """Send buffers, given by address, on a plain socket; return how many bytes it accepted.

    ``vector``: ``(n, 2)`` address and length in bytes; those from ``first`` on are sent, at most ``VECTOR_MAX``. There
    is no Python object per buffer, and the GIL is released meanwhile. The caller keeps the memory mapped. Raises
    ``NotReady``; ``OSError`` if the socket failed, with ``EFAULT`` for a page that cannot be read.
    """
    address = vector.__array_interface__["data"][0] + first * _ENTRY_BYTES
    message = _Message(None, 0, address, len(vector) - first, None, 0, 0)
    while (count := _sendmsg(sock.fileno(), ctypes.byref(message), _FLAGS)) < 0:
        number = ctypes.get_errno()
        if number == errno.EAGAIN:
            raise NotReady(select.POLLOUT)
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return int(count)


def receive_some(sock: socket.socket, buffer: memoryview, *, whole: bool = False) -> int:
    """Receive into the buffer; return how many bytes arrived, 0 at the end of the stream.

    ``whole``: a blocking plain socket may wait until the buffer is full, which saves calls. Raises ``NotReady`` if
    nothing has arrived, ``OSError`` if the socket failed.
    """
    if isinstance(sock, ssl.SSLSocket):
        return _receive_records(sock, buffer)
    try:
        return sock.recv_into(buffer, 0, socket.MSG_WAITALL if whole else 0)
    except BlockingIOError:
        raise NotReady(select.POLLIN) from None


def _receive_records(sock: ssl.SSLSocket, buffer: memoryview) -> int:
    """Receive what is here, a record of at most 16 KiB with each call, but no more than ``TLS_TURN_BYTES``."""
    received, wanted = 0, min(len(buffer), TLS_TURN_BYTES)
    try:
        while received < wanted:
            count = sock.recv_into(buffer[received:wanted])
            received += count
            if not count:
                break
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError) as error:
        if not received:
            raise NotReady(select.POLLOUT if isinstance(error, ssl.SSLWantWriteError) else select.POLLIN) from None
    return received


def _first_bytes(buffers: Sequence[memoryview]) -> memoryview | bytes:
    """Return the first buffer, or several small ones joined: at most ``TLS_PIECE_BYTES``."""
    first = memoryview(buffers[0]).cast("B")
    if len(buffers) == 1 or len(first) >= TLS_PIECE_BYTES:
        return first[:TLS_PIECE_BYTES]
    joined, size = [], 0
    for buffer in buffers:
        piece = memoryview(buffer).cast("B")[: TLS_PIECE_BYTES - size]
        joined.append(piece)
        size += len(piece)
        if size >= TLS_PIECE_BYTES:
            break
    return b"".join(joined)


class _Message(ctypes.Structure):
    """``struct msghdr``."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("vector", ctypes.c_void_p),
        ("vector_length", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_ENTRY_BYTES: Final = 16  # of the kernel's struct iovec
_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_sendmsg = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, use_errno=True)(
    ("sendmsg", ctypes.CDLL(None, use_errno=True))
)
