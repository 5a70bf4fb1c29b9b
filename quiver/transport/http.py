"""HTTP requests to one daemon, one by one: bounded in time and size, and its errors by what they mean.

``http.client`` waits for as long as a byte comes now and then, and says nothing of what an answer may be. Here every
answer has a deadline, also while bytes trickle in, and no redirect, content encoding or surprise in length is followed.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import socket
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Final, cast
from urllib.parse import urlsplit

import msgspec
import numpy as np
import numpy.typing as npt

from quiver.errors import BadRequest, Corrupt, Forbidden, Misconfigured, NotFound, OverCapacity, Unavailable
from quiver.transport.idle import (
    Idle,
    no_answer,
    unreachable,
)
from quiver.transport.liveness import SLOWEST_BYTES_PER_SECOND, Patience, Vigil
from quiver.wire import ErrorBody

ERROR_BYTES_MAX: Final = 1 << 16
PIECE_BYTES: Final = 1 << 20  # of a file that is sent
_RAISED: Final = {kind.code: kind for kind in (BadRequest, Forbidden, NotFound, Misconfigured)}


class Answer:
    """A good answer of which the head is here, and ``size_bytes`` of body are announced."""

    def __init__(self, response: _Response, size_bytes: int, deadline: float, name: str) -> None:
        self.size_bytes = size_bytes
        self._response = response
        self._deadline = deadline
        self._name = name

    def receive(self, size_bytes: int, *, by_rate: bool = False) -> npt.NDArray[np.uint8]:
        """Return the next so many bytes; ``by_rate`` for those that may take as long as the slowest peer needs."""
        data = np.empty(size_bytes, np.uint8)
        seconds = size_bytes / SLOWEST_BYTES_PER_SECOND if by_rate else 0.0
        _receive(self._response, data.data, self._deadline + seconds, self._name)
        return data


class Exchange:
    """Requests to one daemon, over connections that are kept. Blocking; safe from threads.

    Raises ``Unavailable`` when it does not answer, ``Corrupt`` when it answers nonsense, and what it says went wrong.
    """

    def __init__(self, url: str, name: str, patience: Patience) -> None:
        self._url = url
        self._name = name
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._patience = patience
        self._idle: Idle[http.client.HTTPConnection] = Idle()

    def close(self) -> None:
        self._idle.close()

    @contextlib.contextmanager
    def asked(
        self, method: str, path: str, body: object = None, content_type: str = "", wait_seconds: float = 0.0
    ) -> Iterator[Answer]:
        """Send a request; yield the answer, whose body is received before the end of the context or never."""
        headers = {"Content-Type": content_type} if content_type else {}
        size = 0
        if isinstance(body, (bytes, bytearray, memoryview)):
            size = memoryview(body).nbytes
        elif body is not None:
            size = os.fstat(body.fileno()).st_size  # type: ignore[attr-defined]
        if body is not None:
            headers["Content-Length"] = str(size)
        vigil = Vigil(self._url, self._patience, wait_seconds)
        limit_seconds = self._patience.silence_seconds + wait_seconds + size / SLOWEST_BYTES_PER_SECOND
        # A file cannot be sent twice, so it goes over a connection that cannot have been closed for idleness.
        kept = None if hasattr(body, "read") else self._idle.take()
        connection = kept or self._connect()
        try:
            try:
                response = _exchange(connection, (method, path), body, headers, vigil, limit_seconds)
            except (ConnectionError, http.client.BadStatusLine):
                if kept is None:
                    raise
                connection.close()  # the daemon closed an idle connection just then: not its fault, ask once more
                connection = self._connect()
                response = _exchange(connection, (method, path), body, headers, vigil, limit_seconds)
            with response:  # it may own the socket: a connection that is to be closed is handed over to it
                deadline = time.monotonic() + self._patience.silence_seconds
                yield Answer(response, self._checked(response, method, deadline), deadline, self._name)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise no_answer(self._url, error) from error
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            self._idle.keep(connection)

    def _connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._patience.connect_seconds)
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise unreachable(self._url, error) from error
        return connection

    def _checked(self, response: _Response, method: str, deadline: float) -> int:
        """Return the length of a good answer's body; raise what a bad one means."""
        length = response.length if response.length is not None else -1
        if response.getheader("Content-Encoding", "identity") != "identity":
            raise Corrupt("an encoded answer", self._name)
        if response.status in (200, 201, 204):
            if length < 0 and method != "HEAD":
                raise Corrupt("an answer of unknown length", self._name)
            return max(length, 0)
        if 300 <= response.status < 400:
            raise Corrupt(f"a redirect ({response.status})", self._name)
        body = bytearray(max(min(length, ERROR_BYTES_MAX), 0))
        _receive(response, memoryview(body), deadline, self._name)
        self._raise(response, bytes(body))
        raise AssertionError("unreachable")

    def _raise(self, response: http.client.HTTPResponse, body: bytes) -> None:
        try:
            told = msgspec.json.decode(body, type=ErrorBody)
        except (msgspec.DecodeError, msgspec.ValidationError):
            told = ErrorBody("", response.reason)
        if told.error == Corrupt.code:
            raise Corrupt(told.message, self._name)
        if told.error == OverCapacity.code:
            raise OverCapacity(f"{self._url}: {told.message}", _seconds(response.getheader("Retry-After")))
        if response.status == NotFound.status:
            raise NotFound(f"{self._url}: {told.message}")
        kind = _RAISED.get(told.error)
        raise (
            kind(f"{self._url}: {told.message}")
            if kind
            else Unavailable(self._url, f"answers {response.status} {told.message}")
        )


class _PatientSocket(io.RawIOBase):
    """The reading end of a socket with a deadline for everything: a timeout alone never ends while bytes trickle in."""

    def __init__(self, sock: socket.socket, vigil: Vigil, deadline: float) -> None:
        self._socket = sock
        self._file = sock.makefile("rb", buffering=0)  # counts as a user of the socket, as http.client expects
        self._vigil = vigil
        self.deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        while True:
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("answers too slowly")
            self._socket.settimeout(min(left, self._vigil.wait_seconds()))
            try:
                count = self._socket.recv_into(buffer)
            except TimeoutError:
                self._vigil.check(self._socket)
                continue
            self._vigil.heard()
            return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response that is read through a ``_PatientSocket``, its head as well."""

    def __init__(self, vigil: Vigil, deadline: float, sock: socket.socket, *args: Any, **named: Any) -> None:
        super().__init__(sock, *args, **named)
        self.fp.close()
        self.socket = _PatientSocket(sock, vigil, deadline)
        self.fp = io.BufferedReader(self.socket)


def _exchange(
    connection: http.client.HTTPConnection,
    verb: tuple[str, str],
    body: object,
    headers: dict[str, str],
    vigil: Vigil,
    limit_seconds: float,
) -> _Response:
    """Send a request (method, path) and return the head of the answer, which must be here within ``limit_seconds``."""
    deadline = time.monotonic() + limit_seconds
    connection.response_class = partial(_Response, vigil, deadline)  # type: ignore[assignment]
    try:
        connection.sock.settimeout(limit_seconds)
        connection.request(*verb, headers=headers)  # the head, which announces the body
        _send(connection.sock, body, deadline, vigil)
    except ConnectionError:
        # A daemon that refuses an upload answers before it has read it all: its answer says more than the reset.
        if body is None:
            raise
        with contextlib.suppress(OSError, http.client.HTTPException):
            return cast(_Response, connection.getresponse())
        raise
    return cast(_Response, connection.getresponse())


def _send(sock: socket.socket, body: Any, deadline: float, vigil: Vigil) -> None:
    """Send a body, bytes or an open file. Who takes nothing is not waited for longer than who answers nothing."""
    pieces = iter(lambda: body.read(PIECE_BYTES), b"") if hasattr(body, "read") else iter([body] if body else ())
    for piece in pieces:
        view = memoryview(piece).cast("B")
        while view:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("takes too slowly what it is sent")
            sock.settimeout(min(left, vigil.wait_seconds()))
            try:
                view = view[sock.send(view) :]
            except TimeoutError:
                vigil.check(sock)
                continue
            vigil.taken()


def _receive(response: _Response, out: memoryview, deadline: float, who: str) -> None:
    """Fill ``out`` from the body, straight from the socket; give up at the deadline even while bytes trickle in."""
    response.socket.deadline = deadline
    while out:
        count = response.fp.readinto1(out)  # a BufferedReader over the socket
        if not count:
            raise Corrupt(f"the answer ends {len(out)} bytes early", who)
        out = out[count:]


def _seconds(text: str | None) -> float:
    try:
        return min(max(float(text or 1.0), 0.0), 60.0)
    except ValueError:
        return 1.0
