"""How long a client waits for a daemon, and how it tells a slow daemon from one that is gone.

A daemon may be silent for seconds with good reason: it waits for a fill. One that is stopped, or cut off by the
network, looks the same on the connection that waits for it. So after a moment of silence the client asks it on another
connection whether it is alive (``GET /healthz``). If it does not answer that either, the client reads elsewhere after
half a second instead of after its whole patience.

A ``Vigil`` ends a wait in three cases: silence, a failed health check, and slowness, when the daemon is further behind
``SLOWEST_BYTES_PER_SECOND`` than it may be silent.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Callable
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from quiver.transport.sockets import NotReady, connect, receive_some, send_some

SLOWEST_BYTES_PER_SECOND: Final = 256 << 10  # reading elsewhere is faster


class Patience(NamedTuple):
    """How long one side of a connection waits for the other, in seconds. The defaults suit a person's command."""

    connect_seconds: float = 2.0
    silence_seconds: float = 10.0  # without a single byte; what a request may wait for fills comes on top
    suspect_seconds: float = 1.0  # of silence, after which a daemon is asked whether it is alive
    alive_seconds: float = 1.0  # for it to say so


PATIENT: Final = Patience()
# For the path of a batch. A daemon in the rack answers a health check in a millisecond, a busy one in tens. A check
# that is made too early costs next to nothing, one that fails wrongly costs a few reads of the origin.
IN_RACK: Final = Patience(connect_seconds=0.5, silence_seconds=5.0, suspect_seconds=0.15, alive_seconds=0.35)


class Gone(TimeoutError):
    """The daemon answers nothing, not even that it is alive."""


class Vigil:
    """The wait of one exchange with a daemon: says how long to wait for the next byte, and when to give up.

    Wait ``wait_seconds``; then call ``sent`` or ``heard`` if bytes went or came, and ``check`` if none did.
    """

    def __init__(
        self, patience: Patience, is_alive: Callable[[socket.socket], bool], extra_seconds: float = 0.0
    ) -> None:
        """``is_alive`` does the health check, ended early by bytes on the socket that it is given.

        ``extra_seconds``: how much later the first byte of the answer may come, since the daemon waits for fills.
        """
        self._patience = patience
        self._is_alive = is_alive
        self._extra_seconds = extra_seconds
        self._is_answering = False
        now = time.monotonic()
        self._due_at = self._silent_until = self._check_at = now
        self._interval_seconds = patience.suspect_seconds
        self._begin(now)

    @property
    def first_wait_seconds(self) -> float:
        """How long to wait for a byte when an exchange begins: the same for each."""
        return min(self._patience.suspect_seconds, self._patience.silence_seconds)

    def wait_seconds(self) -> float:
        return max(min(self._check_at, self._silent_until, self._due_at) - time.monotonic(), 0.001)

    def asked(self) -> None:
        """The whole request is sent: the answer has the usual time."""
        self._begin(time.monotonic())

    def sent(self, count: int) -> None:
        """The daemon took so many bytes of the request."""
        self._moved(count, time.monotonic())

    def heard(self, count: int) -> None:
        """So many bytes of the answer came."""
        now = time.monotonic()
        if not self._is_answering:
            self._is_answering, self._extra_seconds = True, 0.0
            self._begin(now)
        self._moved(count, now)

    def check_rate(self) -> None:
        """Raise ``TimeoutError`` if the daemon sends or takes less than the slowest that is waited for."""
        if time.monotonic() >= self._due_at:
            raise TimeoutError("answers too slowly" if self._is_answering else "takes the request too slowly")

    def check(self, sock: socket.socket) -> None:
        """Return if waiting on is worth it. Raises ``Gone`` after a failed health check, else ``TimeoutError``."""
        now = time.monotonic()
        if now >= self._silent_until:
            raise TimeoutError("answers nothing any more")
        self.check_rate()
        if now >= self._check_at:
            if not self._is_alive(sock):
                raise Gone("answers nothing, not even a health check")
            self._interval_seconds *= 2  # it is busy: many readers may wait for the same fill, and all of them check
            self._check_at = time.monotonic() + self._interval_seconds

    def _begin(self, now: float) -> None:
        self._due_at = now + self._patience.silence_seconds + self._extra_seconds
        self._moved(0, now)

    def _moved(self, count: int, now: float) -> None:
        self._due_at += count / SLOWEST_BYTES_PER_SECOND
        self._silent_until = now + self._patience.silence_seconds + self._extra_seconds
        self._interval_seconds = self._patience.suspect_seconds
        self._check_at = now + self._interval_seconds


def is_alive(
    url: str, seconds: float, meanwhile: socket.socket | None = None, tls: ssl.SSLContext | None = None
) -> bool:
    """Return whether the daemon answers a health check within ``seconds``, or ``meanwhile`` has something to read."""
    parts = urlsplit(url)
    deadline = time.monotonic() + seconds
    request = f"GET /healthz HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode()
    try:
        with connect(parts.hostname or "", parts.port or 80, seconds, tls) as probe:
            probe.settimeout(max(deadline - time.monotonic(), 0.001))
            send_some(probe, [memoryview(request)])
            probe.setblocking(False)
            return _answers(probe, meanwhile, deadline)
    except OSError:
        return False


def _answers(probe: socket.socket, meanwhile: socket.socket | None, deadline: float) -> bool:
    """Return whether bytes come on the probe, or on ``meanwhile``, by the deadline."""
    poll = select.poll()
    poll.register(probe, select.POLLIN)
    if meanwhile is not None:
        poll.register(meanwhile, select.POLLIN)
    while ready := poll.poll(max(deadline - time.monotonic(), 0.0) * 1000):
        if meanwhile is not None and any(fd == meanwhile.fileno() for fd, _ in ready):
            return True
        try:
            receive_some(probe, memoryview(bytearray(1)))
        except NotReady:  # TLS records that carry none of the answer, such as a session ticket
            continue
        except ConnectionError:
            pass  # somebody is there to reset the connection
        return True
    return False
