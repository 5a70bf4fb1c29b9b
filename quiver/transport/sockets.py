"""Giving bytes to a socket and taking them from one: the one place that knows whether TLS lies in between.

Whatever sends or receives goes through ``send_some`` and ``receive_some``, which behave the same for a plain socket and
for an ``ssl.SSLSocket``. Only a plain socket can be given many buffers in one call without copying them, and only the
kernel can wait for all of a buffer by itself (``kernel_waits``); an ``SSLSocket`` does not block and is polled. What is
sent on a plain one is read by the kernel: a mapped page that cannot be read is an error of ``send_vector``, no signal.
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

TLS_PIECE_BYTES: Final = 256 << 10  # joined before they are encrypted: small buffers would be a TLS record each
VECTOR_MAX: Final = 1024  # buffers of one call: the kernel's IOV_MAX


class NotReady(BlockingIOError):
    """The socket takes, or has, nothing now. ``events``: what to poll it for, which under TLS may be either."""

    def __init__(self, events: int) -> None:
        super().__init__("the socket is not ready")
        self.events = events


def connect(host: str, port: int, seconds: float, tls: ssl.SSLContext | None = None) -> socket.socket:
    """Return a connection without Nagle's delay; with ``tls``, the handshake done. Raises ``OSError``."""
    sock = socket.create_connection((host, port), seconds)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock if tls is None else tls.wrap_socket(sock, server_hostname=host)
    except BaseException:
        sock.close()
        raise


def kernel_waits(sock: socket.socket) -> bool:
    """Whether to have blocking calls wait as long as ``set_wait`` says, which saves calls for streams of bytes.

    Not under TLS, where a write may have to read, nor for messages, whose waits end to the millisecond by ``poll``.
    """
    return sock.type == socket.SOCK_STREAM and not isinstance(sock, ssl.SSLSocket)


def set_wait(sock: socket.socket, seconds: float) -> None:
    """Have the kernel end a blocking call after so long without progress: ``NotReady``, or what came until then."""
    microseconds = max(int(seconds * 1e6), 1000)
    wait = struct.pack("ll", *divmod(microseconds, 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)


def is_ready(sock: socket.socket, events: int, seconds: float) -> bool:
    """Wait for one of these events of ``poll``; return whether it came in time."""
    poller = select.poll()
    poller.register(sock, events)
    return bool(poller.poll(max(seconds, 0.0) * 1000))


def send_some(sock: socket.socket, buffers: Sequence[memoryview]) -> int:
    """Give the socket as much of the buffers, in order, as it takes; return how many bytes that was.

    Raises ``NotReady`` if it takes nothing now, ``OSError`` if it failed. Under TLS, send the same bytes again after
    ``NotReady``, as OpenSSL demands.
    """
    if not isinstance(sock, ssl.SSLSocket):
        try:
            return sock.sendmsg(buffers)
        except BlockingIOError:
            raise NotReady(select.POLLOUT) from None
    try:
        return sock.send(_first_bytes(buffers))
    except ssl.SSLWantReadError:
        raise NotReady(select.POLLIN) from None
    except (ssl.SSLWantWriteError, BlockingIOError):
        raise NotReady(select.POLLOUT) from None
    except ssl.SSLEOFError as error:
        raise ConnectionResetError("the other end closed the connection") from error


def is_plain(sock: socket.socket) -> bool:
    """Whether the kernel itself takes what is sent, so that ``send_vector`` may be used."""
    return not isinstance(sock, ssl.SSLSocket)


def unread_bytes(sock: socket.socket) -> int:
    """Return how many bytes were received and are held in this process, where no poll sees them: under TLS alone."""
    return sock.pending() if isinstance(sock, ssl.SSLSocket) else 0


def send_vector(sock: socket.socket, vector: npt.NDArray[np.uint64], first: int = 0) -> int:
    """Give a plain socket buffers by address; return how many bytes it took.

    ``vector``: ``(n, 2)`` address and length in bytes, of which those from ``first`` on are sent; at most
    ``VECTOR_MAX`` of them. No Python object per buffer, and the GIL is free meanwhile. The caller keeps the memory
    mapped. Raises ``NotReady``; ``OSError`` if the socket failed, and with ``EFAULT`` for a page that cannot be read.
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
    """Receive into the buffer; return how many bytes came, 0 at the end of the stream.

    ``whole``: a blocking plain socket may wait for all of it, which saves calls. Raises ``NotReady`` if nothing is here
    now, ``OSError`` if the socket failed.
    """
    try:
        if isinstance(sock, ssl.SSLSocket):
            return sock.recv_into(buffer)
        return sock.recv_into(buffer, 0, socket.MSG_WAITALL if whole else 0)
    except ssl.SSLWantWriteError:
        raise NotReady(select.POLLOUT) from None
    except (ssl.SSLWantReadError, BlockingIOError):
        raise NotReady(select.POLLIN) from None


def _first_bytes(buffers: Sequence[memoryview]) -> memoryview | bytes:
    """Return the first buffer, or several small ones joined: up to ``TLS_PIECE_BYTES`` in any case."""
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
