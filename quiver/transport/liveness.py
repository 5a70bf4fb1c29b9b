"""Telling a daemon that takes its time from one that is gone, while its answer is waited for.

A daemon may be silent for seconds with good reason: it waits for a fill. One that is stopped, or cut off by the
network, looks the same on the connection that waits for it. So after a moment of silence the daemon is asked on a
connection of its own whether it is alive (``GET /healthz``). If it does not answer that either, nothing is to be
expected of it soon, and the reader goes elsewhere after half a second instead of after its whole patience.
"""

from __future__ import annotations

import select
import socket
import time
from typing import Final, NamedTuple
from urllib.parse import urlsplit

SLOWEST_BYTES_PER_SECOND: Final = 256 << 10  # a peer that drips is given up: elsewhere is faster


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
    """One wait for one daemon: says how long to wait for the next byte, and when to give up.

    Wait ``wait_seconds``; then call ``taken`` or ``heard`` if a byte went or came, and ``check`` if none did.
    """

    def __init__(self, url: str, patience: Patience, extra_seconds: float = 0.0) -> None:
        """``extra_seconds``: how much later the first byte of the answer may come, since the daemon waits for fills."""
        self._url = url
        self._patience = patience
        self._extra_seconds = extra_seconds
        self.taken()

    def taken(self) -> None:
        """Begin to count anew: the daemon took something of the request."""
        now = time.monotonic()
        self._interval_seconds = self._patience.suspect_seconds
        self._ask_at = now + self._interval_seconds
        self._silent_until = now + self._patience.silence_seconds + self._extra_seconds

    def heard(self) -> None:
        """Begin to count anew: something of the answer came."""
        self._extra_seconds = 0.0
        self.taken()

    def wait_seconds(self) -> float:
        return max(min(self._ask_at, self._silent_until) - time.monotonic(), 0.001)

    def check(self, sock: socket.socket) -> None:
        """Return if it is worth waiting on. Raises ``Gone``, and ``TimeoutError`` when patience has run out."""
        now = time.monotonic()
        if now >= self._silent_until:
            raise TimeoutError("answers nothing any more")
        if now >= self._ask_at:
            if not is_alive(self._url, self._patience.alive_seconds, sock):
                raise Gone("answers nothing, not even a health check")
            self._interval_seconds *= 2  # it is busy: many readers may wait for the same fill, and all of them ask
            self._ask_at = time.monotonic() + self._interval_seconds


def is_alive(url: str, seconds: float, meanwhile: socket.socket | None = None) -> bool:
    """Return whether the daemon answers a health check within ``seconds``, or ``meanwhile`` has something to read."""
    parts = urlsplit(url)
    deadline = time.monotonic() + seconds
    request = f"GET /healthz HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode()
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 80), seconds) as probe:
            probe.sendall(request)
            poll = select.poll()
            poll.register(probe, select.POLLIN)
            if meanwhile is not None:
                poll.register(meanwhile, select.POLLIN)
            return bool(poll.poll(max(deadline - time.monotonic(), 0.0) * 1000))
    except OSError:
        return False
