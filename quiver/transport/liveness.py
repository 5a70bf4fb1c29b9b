"""How long a client waits for a daemon, and how it tells a slow daemon from a dead one.

A daemon may be silent for seconds because it waits for a fill. A daemon that is suspended, or cut off by the network,
looks the same on the waiting connection. So after a moment of silence the client sends a health check on another
connection (``GET /healthz``). If the daemon does not answer it either, the client reads elsewhere after half a second
instead of waiting for the full timeout.

A ``Vigil`` ends a wait in three cases: silence; a failed health check; and slowness, when the transfer lags behind
the minimum rate by more time than the daemon may be silent. An ``Attempt`` that it is given adds what the request
itself demands: when it is late, and when another daemon has overtaken it.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from quiver.errors import Misconfigured
from quiver.health import HEDGE_SECONDS_MIN
from quiver.transport.attempt import Attempt
from quiver.transport.sockets import NotReady, receive_some, send_some
from quiver.transport.tls import Credentials, open_socket

SLOWEST_BYTES_PER_SECOND: Final = 256 << 10  # reading elsewhere is faster


class Patience(NamedTuple):
    """How long one side of a connection waits for the other, in seconds. The defaults suit a person's command."""

    connect_seconds: float = 2.0
    silence_seconds: float = 10.0  # without a single byte; the request's own wait for fills is added
    suspect_seconds: float = 1.0  # of silence, after which a health check is sent
    alive_seconds: float = 1.0  # for the daemon to answer the health check
    handshake_seconds: float = 5.0  # of TLS, on a new connection
    slowest_bytes_per_second: int = 0  # 0: ``SLOWEST_BYTES_PER_SECOND``


PATIENT: Final = Patience()
# For the path of a batch. A daemon in the rack answers a health check in a millisecond, a busy one in tens. A check
# sent too early costs next to nothing; one that fails wrongly costs a few reads from the origin.
IN_RACK: Final = Patience(
    connect_seconds=0.5, silence_seconds=5.0, suspect_seconds=0.15, alive_seconds=0.35, handshake_seconds=1.0
)


class PeerGone(TimeoutError):
    """The daemon answers nothing, not even a health check."""


class Vigil:
    """The watch of one exchange with a daemon: decides how long to wait for the next byte, and when to give up.

    Wait ``wait_seconds``; then call ``sent`` or ``heard`` if bytes were sent or received, and ``check`` if none were.
    """

    def __init__(
        self,
        patience: Patience,
        is_alive: Callable[[socket.socket], bool],
        extra_seconds: float = 0.0,
        attempt: Attempt | None = None,
    ) -> None:
        """``is_alive`` does the health check; bytes on the socket that it is given end the check early.

        ``extra_seconds``: how much later the first byte of the answer may arrive, because the daemon waits for fills.
        """
        self._attempt = attempt
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
        """How long to wait for a byte when an exchange begins: the same for every exchange."""
        usual = min(self._patience.suspect_seconds, self._patience.silence_seconds)
        return usual if self._attempt is None else min(usual, HEDGE_SECONDS_MIN)

    def wait_seconds(self) -> float:
        due_at = min(self._check_at, self._silent_until, self._due_at)
        if self._attempt is not None:
            due_at = min(due_at, self._attempt.due_at)
        return max(due_at - time.monotonic(), 0.001)

    def asked(self) -> None:
        """Record that the whole request was sent: the time for the answer begins."""
        self._begin(time.monotonic())

    def sent(self, count: int) -> None:
        """Record that so many bytes of the request were sent."""
        self._moved(count, time.monotonic())

    def heard(self, count: int) -> None:
        """Record that so many bytes of the answer were received."""
        now = time.monotonic()
        if not self._is_answering:
            self._is_answering, self._extra_seconds = True, 0.0
            self._begin(now)
        self._moved(count, now)
        if self._attempt is not None:
            self._attempt.heard(count, now)

    def check_rate(self) -> None:
        """Raise ``TimeoutError`` below the minimum rate, and past the limit of the attempt."""
        now = time.monotonic()
        if self._attempt is not None and now >= self._attempt.due_at:
            self._attempt.check(now)
        if now >= self._due_at:
            raise TimeoutError("answers too slowly" if self._is_answering else "takes the request too slowly")

    def check(self, sock: socket.socket) -> None:
        """Return if waiting is worthwhile. Raises ``PeerGone`` after a failed health check, else ``TimeoutError``."""
        now = time.monotonic()
        if now >= self._silent_until:
            raise TimeoutError("answers nothing any more")
        self.check_rate()
        if now >= self._check_at:
            if not self._is_alive(sock):
                raise PeerGone("answers nothing, not even a health check")
            self._interval_seconds *= 2  # many readers may wait for the same fill, and each of them checks
            self._check_at = time.monotonic() + self._interval_seconds

    def _begin(self, now: float) -> None:
        self._due_at = now + self._patience.silence_seconds + self._extra_seconds
        self._moved(0, now)

    def _moved(self, count: int, now: float) -> None:
        self._due_at += count / (self._patience.slowest_bytes_per_second or SLOWEST_BYTES_PER_SECOND)
        self._silent_until = now + self._patience.silence_seconds + self._extra_seconds
        self._interval_seconds = self._patience.suspect_seconds
        self._check_at = now + self._interval_seconds


def is_alive(url: str, seconds: float, meanwhile: socket.socket | None = None, tls: Credentials | None = None) -> bool:
    """Return whether the daemon answers a health check within ``seconds``, or bytes arrive on ``meanwhile``.

    ``tls``: for an ``https`` URL; by default the credentials of the environment.
    """
    parts = urlsplit(url)
    deadline = time.monotonic() + seconds
    request = f"GET /healthz HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode()
    try:
        with open_socket(url, seconds, seconds, tls) as probe:
            probe.settimeout(max(deadline - time.monotonic(), 0.001))
            send_some(probe, [memoryview(request)])
            probe.setblocking(False)
            return _answers(probe, meanwhile, deadline)
    except (OSError, Misconfigured):
        return False


def _answers(probe: socket.socket, meanwhile: socket.socket | None, deadline: float) -> bool:
    """Return whether bytes arrive on the probe, or on ``meanwhile``, by the deadline."""
    poll = select.poll()
    poll.register(probe, select.POLLIN)
    if meanwhile is not None:
        poll.register(meanwhile, select.POLLIN)
    while ready := poll.poll(max(deadline - time.monotonic(), 0.0) * 1000):
        if meanwhile is not None and any(fd == meanwhile.fileno() for fd, _ in ready):
            return True
        try:
            receive_some(probe, memoryview(bytearray(1)))
        except NotReady:  # TLS records without application data, such as a session ticket
            continue
        except ConnectionError:
            pass  # a reset is an answer too: its host is alive
        return True
    return False
