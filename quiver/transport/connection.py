"""One connection to a daemon: every byte of every transport goes through here, under the same deadlines.

The read stream, the HTTP verbs and the Unix socket differ in their messages. This module defines what they share: how
long a connection waits, what its failures mean, and when a request is retried.

- A wait ends after silence, below the minimum rate, or when a health check fails (``liveness``).
- A daemon may close an idle connection at any moment, also while the next request is being sent. So a request that
  finds an idle connection closed is retried once, on a new one (``Dialogue.run``).
- A connection is reused only if its last answer was received completely (``Connection.finish``).
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from quiver import forks
from quiver.errors import BrokenOff, QuiverError, Unavailable
from quiver.token_source import NO_TOKEN, TokenSource, warn_of_plain_text
from quiver.transport.attempt import Attempt
from quiver.transport.idle import Idle
from quiver.transport.liveness import Patience, Vigil, is_alive
from quiver.transport.sockets import NotReady, is_ready, kernel_waits, receive_some, send_some, set_wait
from quiver.transport.tls import Credentials, TlsError, explained, label, open_socket

U8 = npt.NDArray[np.uint8]
T = TypeVar("T")
HEAD_PIECE_BYTES: Final = 8 << 10


class Ended(ConnectionResetError):
    """The other side closed the connection before the end of an answer."""


class Watch(Protocol):
    """Decides when to stop waiting: ``liveness.Vigil``, or a plain ``Deadline``."""

    @property
    def first_wait_seconds(self) -> float: ...
    def wait_seconds(self) -> float: ...
    def asked(self) -> None: ...
    def sent(self, count: int) -> None: ...
    def heard(self, count: int) -> None: ...
    def check_rate(self) -> None: ...
    def check(self, sock: socket.socket) -> None: ...


class Message(NamedTuple):
    """A datagram and its ancillary data: see ``socket.recvmsg``."""

    data: bytes
    ancillary: list[tuple[int, int, bytes]]
    flags: int


class Connection:
    """A connected socket. Blocking; belongs to one thread at a time and to the process that opened it.

    An exchange is ``begin``, ``send``, ``receive`` until the answer is complete, then ``finish``. A wait that times out
    raises ``TimeoutError`` (``Gone`` after a failed health check), the end of the connection ``ConnectionError``.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.is_finished = True  # the last answer was received completely: the connection may be reused
        self.is_answering = False  # a part of this exchange's answer arrived
        self._socket = sock
        self._watch: Watch
        self._attempt: Attempt | None = None
        self._kernel_waits = kernel_waits(sock)
        self._set_wait_seconds = 0.0
        sock.setblocking(self._kernel_waits)
        forks.close_in_child(self)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def shut(self) -> None:
        """End all waits on it, from another thread: its reads and writes fail from now on."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def begin(self, watch: Watch, attempt: Attempt | None = None) -> None:
        """Begin an exchange. ``watch`` ends its waits, and ``attempt``, if it is cancelled, the connection.

        Raises ``TimeoutError`` if the attempt is cancelled already.
        """
        self.is_finished = self.is_answering = False
        self._watch = watch
        self._set_wait(watch.first_wait_seconds)
        if attempt is not None:
            attempt.bind(self)
            self._attempt = attempt

    def finish(self) -> None:
        """Record that the answer was received completely, with nothing after it."""
        self.is_finished = True

    def end(self) -> None:
        """End an exchange: from now on nobody else shuts the connection down, which may become another thread's."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None and attempt.release():
            self.is_finished = False  # it was shut down after the last byte

    def send(self, *buffers: bytes | memoryview) -> None:
        """Send a whole request."""
        left = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        while left:
            try:
                count = send_some(self._socket, left)
            except NotReady as error:
                self._wait(error.events)
                continue
            self._watch.sent(count)
            left = _behind(left, count)
            if left:
                self._watch.check_rate()
        self._watch.asked()

    def receive(self, out: memoryview) -> None:
        """Fill ``out``, in as few system calls as possible."""
        while out:
            count = self._receive(out, whole=True)
            out = out[count:]
            if out:
                self._watch.check_rate()

    def receive_some(self, out: memoryview) -> int:
        """Receive what has arrived, at least one byte; return how many bytes that was."""
        self._watch.check_rate()
        return self._receive(out, whole=False)

    def receive_until(self, mark: bytes, size_bytes_max: int) -> tuple[bytes, bytes]:
        """Return the bytes up to and including the first ``mark``, and the bytes received after it.

        Raises ``ValueError`` if there is no mark within ``size_bytes_max``.
        """
        data, piece = b"", memoryview(bytearray(HEAD_PIECE_BYTES))
        while (at := data.find(mark)) < 0:
            if len(data) >= size_bytes_max:
                raise ValueError(f"more than {size_bytes_max} bytes without an end")
            data += piece[: self.receive_some(piece)]
        end = at + len(mark)
        return data[:end], data[end:]

    def send_message(self, message: bytes) -> None:
        """Send a datagram, whole or not at all."""
        while True:
            try:
                self._watch.sent(send_some(self._socket, [memoryview(message)]))
            except NotReady as error:
                self._wait(error.events)
            else:
                return self._watch.asked()

    def receive_message(self, size_bytes_max: int, ancillary_bytes_max: int) -> Message:
        """Return a datagram, empty at the end. The caller closes the descriptors that come with it."""
        while True:
            try:
                got = self._socket.recvmsg(size_bytes_max, ancillary_bytes_max, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                self._wait(select.POLLIN)
                continue
            self.is_answering = bool(got[0])
            return Message(*got[:3])

    def _receive(self, out: memoryview, *, whole: bool) -> int:
        while True:
            try:
                count = receive_some(self._socket, out, whole=whole)
            except NotReady as error:
                self._wait(error.events)
                continue
            if not count:
                raise Ended(f"the answer ends {len(out)} bytes early")
            self.is_answering = True
            self._watch.heard(count)
            return count

    def _wait(self, events: int) -> None:
        """Return when the call is worth repeating: at once if the kernel has waited already."""
        if not self._kernel_waits and is_ready(self._socket, events, self._watch.wait_seconds()):
            return
        self._watch.check(self._socket)
        self._set_wait(self._watch.wait_seconds())

    def _set_wait(self, seconds: float) -> None:
        if self._kernel_waits and seconds != self._set_wait_seconds:
            set_wait(self._socket, seconds)
            self._set_wait_seconds = seconds


def _behind(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return what remains of the buffers after the first ``count`` bytes."""
    for at, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[at + 1 :]]
        count -= len(buffer)
    return []


# -- the other side ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A daemon's address: how to connect to it, how long to wait for it, and which error each failure is.

    ``tls``: for an ``https`` URL; by default the credentials of the environment. ``node``: which node's certificate it
    must have; if empty, that of any node that is valid for its host. ``token``: what to send it, to show who asks.
    ``introduction``: what this process says of itself with its reads (``quiver.introduction``), as a header's value.
    ``attempt``: that all exchanges are part of.
    """

    url: str
    patience: Patience
    tls: Credentials | None = None
    node: str = ""
    token: TokenSource = NO_TOKEN
    introduction: str = ""
    attempt: Attempt | None = None

    @property
    def name(self) -> str:
        """The daemon as the source of bytes."""
        return f"peer {self.url}"

    @property
    def host(self) -> str:
        """The value of the header ``Host``."""
        return urlsplit(self.url).netloc

    @property
    def is_authenticated(self) -> bool:
        """Whether what comes from it was sent by a daemon with a certificate of the authority."""
        return urlsplit(self.url).scheme == "https"

    def authorization(self, token: str) -> str:
        """Return the header that carries a token, ``""`` for none."""
        if not token:
            return ""
        if not self.is_authenticated:
            warn_of_plain_text(urlsplit(self.url).hostname or "")
        return f"Authorization: Bearer {token}\r\n"

    def connect(self) -> Connection:
        """Raises ``Unavailable``, and ``Misconfigured`` without an authority for an ``https`` URL."""
        if self.attempt is not None and self.attempt.is_cancelled:
            raise Unavailable(self.url, "was overtaken by another daemon")
        patience = self.patience
        try:
            sock = open_socket(self.url, patience.connect_seconds, patience.handshake_seconds, self.tls, self.node)
        except TlsError as error:
            raise Unavailable(self.url, str(error), lasting=True) from error
        except OSError as error:
            why = f"cannot be reached ({error.strerror or error}); is the daemon running there?"
            raise Unavailable(self.url, why) from error
        return Connection(sock)

    def begin(self, connection: Connection, extra_seconds: float = 0.0) -> None:
        """Begin an exchange. ``extra_seconds``: see ``Vigil``."""
        connection.begin(Vigil(self.patience, self._is_alive, extra_seconds, self.attempt), self.attempt)

    def failure(self, error: OSError, *, is_answering: bool) -> QuiverError:
        """Return the error for an exchange that failed."""
        if isinstance(
            error, ssl.SSLError
        ):  # in TLS 1.3 a server refuses a certificate after the handshake, by an alert
            return Unavailable(self.url, explained(error), lasting=label(error) == "rejected")
        if is_answering and isinstance(error, ConnectionError):
            return BrokenOff(self.url, f"{error}; the daemon died, or the shard on its disk is damaged")
        why = f"does not answer ({str(error) or type(error).__name__}); is the daemon running there?"
        return Unavailable(self.url, why)

    def _is_alive(self, meanwhile: socket.socket) -> bool:
        return is_alive(self.url, self.patience.alive_seconds, meanwhile, self.tls)


class _Failure(Protocol):
    def __call__(self, error: OSError, *, is_answering: bool) -> QuiverError: ...


class Dialogue:
    """Requests to one daemon, on connections that are kept while idle. Safe from threads.

    The one place that retries a request on a new connection, and that turns ``OSError`` into Quiver's errors.
    """

    def __init__(self, failure: _Failure, kept_max: int | None = None) -> None:
        """``failure`` turns an ``OSError`` into an error; ``kept_max`` limits the idle connections further."""
        self.idle: Idle[Connection] = Idle(kept_max) if kept_max is not None else Idle()
        self._failure = failure

    def close(self) -> None:
        self.idle.close()

    def run(self, opened: Callable[[], Connection], exchange: Callable[[Connection], T]) -> T:
        """Return what ``exchange`` returns, given an idle connection or a new one from ``opened``.

        If the idle connection turns out to be closed, ``exchange`` runs again with a new one, so it must be safe to
        repeat. The connection is kept if the exchange has ``finish``-ed it, even if it raised afterwards.
        """
        connection = self.idle.take()
        if connection is not None:
            try:
                return self._run_on(connection, exchange)
            except ConnectionError:
                self.idle.clear()  # all of them have been idle for longer than this one
            self.idle.begin_use()
        try:
            connection = opened()
        except BaseException:
            self.idle.drop(None)
            raise
        try:
            return self._run_on(connection, exchange)
        except ConnectionError as error:
            raise self._failure(error, is_answering=connection.is_answering) from error

    def _run_on(self, connection: Connection, exchange: Callable[[Connection], T]) -> T:
        """Run the exchange; keep the connection or close it. Lets ``ConnectionError`` through."""
        try:
            return exchange(connection)
        except ConnectionError:
            connection.is_finished = False
            raise
        except OSError as error:
            connection.is_finished = False
            raise self._failure(error, is_answering=connection.is_answering) from error
        finally:
            connection.end()
            if connection.is_finished:
                self.idle.keep(connection)
            else:
                self.idle.drop(connection)
