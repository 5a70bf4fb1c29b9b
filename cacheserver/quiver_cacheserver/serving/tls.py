"""TLS of connections that were accepted: the handshake in the poller, and HTTP behind it on the event loop.

A handshake is a channel of the poller like any other: a half-open one is a descriptor with a deadline, and a worker
computes without the event loop. What it leaves is an ``ssl.SSLSocket``, on which ``TlsTransport`` carries HTTP. asyncio
has TLS of its own, which keeps the keys inside its transport. Here they belong to the socket, and the socket changes
hands: a stream takes it over for good, and an answer's payload is sent on it by a worker, which then gives it back.

Invariant: a socket has one owner, since OpenSSL is not safe from threads. While a transport lends it, the transport
neither reads nor writes nor closes it; to end the connection it shuts the plain socket down, and closes it once it
has it back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import ssl
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any, Final

import msgspec

from quiver.transport.sockets import NotReady, receive_some, send_some
from quiver.transport.tls import NOBODY, Identity, identity_of, label
from quiver.wire import ErrorBody
from quiver_cacheserver.serving.poller import ENDED, READABLE, WRITABLE, Channel

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 64 << 10
TURN_BYTES: Final = 1 << 20  # received by one connection in a row; then the event loop has other things to do
BUFFER_BYTES: Final = 64 << 10  # of what is not sent yet, above which the protocol is to pause
IGNORED_BYTES_MAX: Final = 64 << 10  # of a request in plain text: unread bytes would reset the answer to it
_READS: Final = (select.POLLIN, READABLE)


class Handshake(Channel):
    """A connection until its handshake is done. ``sock`` is then the caller's, otherwise it is closed.

    ``identity``: whom the client's certificate names. ``failure``: why it failed, ``None`` if the client left.
    """

    __slots__ = ("_loop", "_told", "_until", "failure", "identity", "is_done", "sock")

    sock: ssl.SSLSocket

    def __init__(self, sock: ssl.SSLSocket, client: str, deadline: float, told: Callable[[Handshake], None]) -> None:
        """``sock`` is non-blocking. ``told`` is called on the event loop, once, whatever the end."""
        super().__init__(sock, client, deadline)
        self.identity: Identity = NOBODY
        self.failure: ssl.SSLError | None = None
        self.is_done = False
        self._until = deadline
        self._told = told
        self._loop = asyncio.get_running_loop()

    def serve(self) -> int:
        self.deadline = self._until
        try:
            self.sock.do_handshake()
        except ssl.SSLWantReadError:
            return READABLE
        except ssl.SSLWantWriteError:
            return WRITABLE
        except ssl.SSLError as error:
            if not self.late and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
                self.failure = error
                self._refuse(error)
            return ENDED
        except OSError:
            return ENDED
        self.identity = identity_of(self.sock.getpeercert())
        self.is_done = not self.late
        self.deadline = inf
        return ENDED

    def close(self) -> None:
        if not self.is_done:
            super().close()

    def ended(self) -> None:
        self._loop.call_soon_threadsafe(self._told, self)

    def _refuse(self, error: ssl.SSLError) -> None:
        """Let the client learn why: OpenSSL has sent an alert; a client that speaks HTTP gets an answer that it reads.

        The plain socket is used here, below TLS. What the client has sent is read first, since closing a socket with
        unread bytes resets the connection, and the client may lose what was sent to it.
        """
        plain = socket.socket
        with contextlib.suppress(OSError):
            for _ in range(IGNORED_BYTES_MAX // PIECE_BYTES):
                if len(plain.recv(self.sock, PIECE_BYTES)) < PIECE_BYTES:
                    break
        with contextlib.suppress(OSError):
            if label(error) == "plain":
                plain.send(self.sock, _SPEAKS_TLS)
            plain.shutdown(self.sock, socket.SHUT_WR)


def _speaks_tls() -> bytes:
    body = msgspec.json.encode(
        ErrorBody("misconfigured", "this port speaks TLS, and the request is plain HTTP: write https:// in its URL")
    )
    head = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


_SPEAKS_TLS: Final = _speaks_tls()


class TlsTransport(asyncio.Transport):
    """An asyncio transport on a socket whose handshake is done. Belongs to the event loop."""

    def __init__(self, sock: ssl.SSLSocket, protocol: asyncio.Protocol) -> None:
        super().__init__({"socket": sock, "sslcontext": sock.context, "ssl_object": sock, "peername": _peer(sock)})
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._protocol = protocol
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._high_bytes, self._low_bytes = BUFFER_BYTES, BUFFER_BYTES // 4
        self._protocol_paused = False  # from writing
        self._paused = False  # from reading
        self._closing = False
        self._gone = False  # the socket is not ours any more
        self._lent = False
        self._wants_write = False  # a read waits until the socket takes something
        self._piece = memoryview(bytearray(PIECE_BYTES))
        protocol.connection_made(self)
        self._resume()

    # -- asyncio's interface ------------------------------------------------------------------------------------------

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return not (self._paused or self._closing)

    def pause_reading(self) -> None:
        self._paused = True
        if not (self._gone or self._lent):
            self._loop.remove_reader(self._sock.fileno())

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._resume()

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low_bytes, self._high_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_bytes = BUFFER_BYTES if high is None else high
        self._low_bytes = self._high_bytes // 4 if low is None else low
        self._tell_protocol()

    def write(self, data: Any) -> None:
        if self._closing or self._gone:
            return
        piece = memoryview(bytes(data))
        if not piece:
            return
        waited = bool(self._unsent)
        self._unsent.append(piece)
        self._unsent_bytes += len(piece)
        if not waited:
            self._flush()
        self._tell_protocol()

    def close(self) -> None:
        """Close the connection once what was written is sent."""
        if self._closing:
            return
        self._closing = True
        if self._gone or self._lent:
            return
        self._loop.remove_reader(self._sock.fileno())
        if not self._unsent:
            self._end(None)

    def abort(self) -> None:
        """Close the connection now."""
        self._closing = True
        if self._lent:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # its user meets the end
        else:
            self._end(None)

    # -- the socket changes hands -------------------------------------------------------------------------------------

    def detach(self) -> ssl.SSLSocket:
        """Give the socket away for good; to the protocol the connection ends. Raises ``ConnectionResetError``."""
        if self._gone or self._closing or self._unsent:
            raise ConnectionResetError("the reader is gone")
        self._end(None, close=False)
        return self._sock

    def lend(self) -> ssl.SSLSocket:
        """Give the socket away until ``take_back``. Raises ``ConnectionResetError``."""
        if self._gone or self._closing or self._lent or self._unsent:
            raise ConnectionResetError("the reader is gone")
        self._loop.remove_reader(self._sock.fileno())
        self._lent = True
        return self._sock

    def take_back(self) -> None:
        self._lent = False
        if self._closing:
            self._end(None)
        else:
            self._resume()
            self._flush()

    # -- reading and writing ------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Read what is here, and what comes."""
        if self.is_reading() and not (self._gone or self._lent):
            self._loop.add_reader(self._sock.fileno(), self._read)
            if self._sock.pending():
                self._loop.call_soon(self._read)  # no event tells of what was received already

    def _read(self) -> None:
        taken = 0
        self._wants_write = False
        while self.is_reading() and not (self._gone or self._lent):
            if taken >= TURN_BYTES:
                self._loop.call_soon(self._read)
                return
            try:
                count = receive_some(self._sock, self._piece)
            except NotReady as wait:
                if wait.events not in _READS:
                    self._wants_write = True
                    self._loop.add_writer(self._sock.fileno(), self._writable)
                break
            except OSError as error:
                self._end(error)
                return
            if not count:
                self._protocol.eof_received()
                self.close()
                return
            taken += count
            self._protocol.data_received(bytes(self._piece[:count]))
        if self._unsent:
            self._flush()  # a write may have waited for a read

    def _writable(self) -> None:
        self._flush()
        if self._wants_write:
            self._read()

    def _flush(self) -> None:
        if self._gone or self._lent:
            return
        wanted = 0
        while self._unsent:
            try:
                self._sent(send_some(self._sock, list(self._unsent)))
            except NotReady as wait:
                wanted = wait.events
                break
            except OSError as error:
                self._end(error)
                return
        if self._unsent and wanted not in _READS:
            self._loop.add_writer(self._sock.fileno(), self._writable)
        else:
            self._loop.remove_writer(self._sock.fileno())
        self._tell_protocol()
        if self._closing and not self._unsent:
            self._end(None)

    def _sent(self, count: int) -> None:
        self._unsent_bytes -= count
        while count:
            first = self._unsent.popleft()
            if count < len(first):
                self._unsent.appendleft(first[count:])
                return
            count -= len(first)

    def _tell_protocol(self) -> None:
        if not self._protocol_paused and self._unsent_bytes > self._high_bytes:
            self._protocol_paused = True
            self._protocol.pause_writing()
        elif self._protocol_paused and self._unsent_bytes <= self._low_bytes:
            self._protocol_paused = False
            self._protocol.resume_writing()

    def _end(self, error: Exception | None, *, close: bool = True) -> None:
        if self._gone:
            return
        self._gone = self._closing = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._unsent.clear()
        self._unsent_bytes = 0
        if close:
            self._sock.close()
        self._loop.call_soon(self._protocol.connection_lost, error)


def _peer(sock: socket.socket) -> Any:
    try:
        return sock.getpeername()
    except OSError:
        return None
