"""One daemon as seen by another machine: a blocking HTTP client of few verbs, and a ``ShardSource``.

Blocking and without threads of its own, so that it can be used from a thread of a daemon and in a training process that
forks: connections belong to the process that opened them. Whatever a peer answers is bounded by what was asked, and no
redirect, content encoding or surprise in length is followed.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

import msgspec
import numpy as np
import numpy.typing as npt

from quiver.digest import Bytes, Digest
from quiver.errors import (
    BadRequest,
    Corrupt,
    Forbidden,
    Misconfigured,
    NotFound,
    OverCapacity,
    QuiverError,
    Unavailable,
)
from quiver.reporting import ANSWER_BYTES_MAX, NEEDS_TYPE, NeedsAnswer, NeedsReport, NeedsStatus
from quiver.ring import check_url
from quiver.stream import ReadStream
from quiver.wire import (
    JSON_BYTES_MAX,
    READ_TYPE,
    SHARD_TYPE,
    ErrorBody,
    NodeStatus,
    RangeStatus,
    ReadRequest,
    RingView,
    decode_json,
)

CONNECT_SECONDS: Final = 2.0
SILENCE_SECONDS: Final = 10.0  # without a single byte; a daemon answers a batch within its wait and then some
SLOWEST_BYTES_PER_SECOND: Final = 256 << 10  # a peer that drips is given up: elsewhere is faster
IDLE_CONNECTIONS_MAX: Final = 8
NO_STREAM_SECONDS: Final = 60.0  # a daemon that took no upgrade is asked by HTTP meanwhile
U8 = npt.NDArray[np.uint8]
_RAISED: Final = {kind.code: kind for kind in (BadRequest, Forbidden, NotFound, Misconfigured)}


class PeerClient:
    """The verbs of one daemon. Raises ``Unavailable`` when it does not answer, ``Corrupt`` when it answers nonsense."""

    def __init__(self, url: str, *, silence_seconds: float = SILENCE_SECONDS) -> None:
        self.url = check_url(url)
        self.name = f"peer {self.url}"
        parts = urlsplit(self.url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._silence_seconds = silence_seconds
        self._idle: list[http.client.HTTPConnection] = []
        self._streams: list[ReadStream] = []
        self._no_stream_until = 0.0
        self._closed = False
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def __repr__(self) -> str:
        return f"PeerClient({self.url!r})"

    def close(self) -> None:
        with self._lock:
            idle: list[http.client.HTTPConnection | ReadStream] = [*self._idle, *self._streams]
            self._idle, self._streams, self._closed = [], [], True
        for connection in idle:
            connection.close()

    # -- verbs --------------------------------------------------------------------------------------------------------

    def ring(self) -> RingView:
        view: RingView = decode_json(self._json("GET", "/v1/ring"), RingView, f"the ring that {self.url} answered")
        return view

    def status(self) -> NodeStatus:
        status: NodeStatus = decode_json(self._json("GET", "/v1/status"), NodeStatus, f"the status of {self.url}")
        return status

    def read(self, request: ReadRequest) -> tuple[U8, U8]:
        """Ask for ranges. Return a ``RangeStatus`` per range ``(n,)`` and the bytes of those present, back to back."""
        stream, fresh = self._stream()
        if stream is None:
            return self._read_by_http(request)
        try:
            return self._read_by(stream, request)
        except ConnectionError as error:
            if fresh:
                raise self._no_answer(error) from error
        # The daemon closed an idle connection just then: not its fault, ask once more.
        stream = self._new_stream()
        if stream is None:
            return self._read_by_http(request)
        try:
            return self._read_by(stream, request)
        except ConnectionError as error:
            raise self._no_answer(error) from error

    def _read_by(self, stream: ReadStream, request: ReadRequest) -> tuple[U8, U8]:
        """Read, and keep the stream if it can be used again. Lets ``ConnectionError`` through."""
        good = False
        try:
            answer = stream.read(request, SLOWEST_BYTES_PER_SECOND)
            good = True
        except OverCapacity:
            good = True
            raise
        except ConnectionError:
            raise
        except OSError as error:
            raise self._no_answer(error) from error
        finally:
            if good:
                self._keep(stream)
            else:
                stream.close()
        return answer

    def _read_by_http(self, request: ReadRequest) -> tuple[U8, U8]:
        wait = request.wait_ms / 1000
        with self._asked("POST", "/v1/read", request.encode(), READ_TYPE, wait) as (response, length, deadline):
            count = len(request.ranges)
            if length < count:
                raise Corrupt(f"an answer of {length} bytes to {count} ranges", self.name)
            statuses = np.empty(count, np.uint8)
            _receive(response, statuses.data, deadline, self.name)
            present = int(request.ranges["length"][statuses == RangeStatus.PRESENT].sum())
            if length != count + present:
                raise Corrupt(f"an answer of {length} bytes where {count + present} belong", self.name)
            data = np.empty(present, np.uint8)
            _receive(response, data.data, deadline + present / SLOWEST_BYTES_PER_SECOND, self.name)
            return statuses, data

    def needs(self, report: NeedsReport) -> NeedsAnswer:
        """Tell what a consumer needs; return what the peer holds of it. Raises ``NotFound`` where nobody listens."""
        with self._asked("POST", "/v1/needs", report.encode(), NEEDS_TYPE) as (response, length, deadline):
            if length > ANSWER_BYTES_MAX:
                raise Corrupt(f"an answer of {length} bytes to a report of needs", self.name)
            data = np.empty(length, np.uint8).data
            _receive(response, data, deadline, self.name)
        try:
            answer = NeedsAnswer.decode(data)
        except BadRequest as error:
            raise Corrupt(str(error), self.name) from error
        wanted = len(report.report.left) if answer.status is NeedsStatus.TAKEN and not report.leaving else 0
        if len(answer.seen) != wanted:
            raise Corrupt(f"an answer about {len(answer.seen)} shards where {wanted} belong", self.name)
        return answer

    def load(self, digest: Digest, size_bytes: int) -> Bytes:
        """Return a shard that the peer has at hand; it is not made to fill it. ``ShardSource``."""
        return self._file(f"/v1/shards/{digest}", size_bytes)

    def fault(self, digest: Digest, error: Corrupt) -> QuiverError:
        return error

    def has_shard(self, digest: Digest) -> bool:
        return self._has(f"/v1/shards/{digest}")

    def has_manifest(self, digest: Digest) -> bool:
        return self._has(f"/v1/manifests/{digest}")

    def manifest(self, digest: Digest, size_bytes_max: int) -> Bytes:
        """Return a manifest's file, compared with its name."""
        data = self._file(f"/v1/manifests/{digest}", size_bytes_max)
        if Digest.of(data) != digest:
            raise Corrupt("manifest does not hash to its name", self.name)
        return data

    def put_shard(self, digest: Digest, data: Bytes) -> None:
        with self._asked("PUT", f"/v1/shards/{digest}", data, SHARD_TYPE):
            pass

    def put_manifest(self, digest: Digest, path: Path) -> None:
        with path.open("rb") as file, self._asked("PUT", f"/v1/manifests/{digest}", file, SHARD_TYPE):
            pass

    # -- one request --------------------------------------------------------------------------------------------------

    def _file(self, path: str, size_bytes_max: int) -> Bytes:
        with self._asked("GET", path) as (response, length, deadline):
            if length > size_bytes_max:
                raise Corrupt(f"a file of {length} bytes where at most {size_bytes_max} were expected", self.name)
            data = np.empty(length, np.uint8).data
            _receive(response, data, deadline + length / SLOWEST_BYTES_PER_SECOND, self.name)
            return data

    def _has(self, path: str) -> bool:
        try:
            with self._asked("HEAD", path):
                return True
        except NotFound:
            return False

    def _json(self, method: str, path: str) -> Bytes:
        with self._asked(method, path) as (response, length, deadline):
            if length > JSON_BYTES_MAX:
                raise Corrupt(f"{path}: {length} bytes of JSON", self.name)
            data = memoryview(bytearray(length))
            _receive(response, data, deadline, self.name)
            return data

    @contextlib.contextmanager
    def _asked(
        self, method: str, path: str, body: object = None, content_type: str = "", wait_seconds: float = 0.0
    ) -> Iterator[tuple[_Response, int, float]]:
        """Send a request; yield the answer's head, its length in bytes, and when patience ends (monotonic seconds)."""
        headers = {"Content-Type": content_type} if content_type else {}
        size = 0
        if isinstance(body, (bytes, bytearray, memoryview)):
            size = memoryview(body).nbytes
        elif body is not None:
            size = os.fstat(body.fileno()).st_size  # type: ignore[attr-defined]
        if body is not None:
            headers["Content-Length"] = str(size)
        patience = self._silence_seconds + wait_seconds + size / SLOWEST_BYTES_PER_SECOND
        # A file cannot be sent twice, so it goes over a connection that cannot have been closed for idleness.
        connection, fresh = (self._connect(), True) if hasattr(body, "read") else self._connection()
        try:
            try:
                response = _exchange(connection, method, path, body, headers, patience)
            except (ConnectionError, http.client.BadStatusLine):
                if fresh:
                    raise
                connection.close()  # the daemon closed an idle connection just then: not its fault, ask once more
                connection = self._connect()
                response = _exchange(connection, method, path, body, headers, patience)
            with response:  # it may own the socket: a connection that is to be closed is handed over to it
                deadline = time.monotonic() + self._silence_seconds
                length = self._checked(response, method, deadline)
                yield response, length, deadline
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._no_answer(error) from error
        except BaseException:
            connection.close()
            raise
        self._give_back(connection, response)

    def _no_answer(self, error: Exception) -> Unavailable:
        why = str(error) or type(error).__name__
        return Unavailable(self.url, f"does not answer ({why}); is the daemon running there?")

    def _checked(self, response: _Response, method: str, deadline: float) -> int:
        """Return the length of a good answer's body; raise what a bad one means."""
        length = response.length if response.length is not None else -1
        if response.getheader("Content-Encoding", "identity") != "identity":
            raise Corrupt("an encoded answer", self.name)
        if response.status in (200, 201, 204):
            if length < 0 and method != "HEAD":
                raise Corrupt("an answer of unknown length", self.name)
            return max(length, 0)
        if 300 <= response.status < 400:
            raise Corrupt(f"a redirect ({response.status})", self.name)
        body = bytearray(max(min(length, 1 << 16), 0))
        _receive(response, memoryview(body), deadline, self.name)
        self._raise(response, bytes(body))
        raise AssertionError("unreachable")

    def _raise(self, response: http.client.HTTPResponse, body: bytes) -> None:
        try:
            told = msgspec.json.decode(body, type=ErrorBody)
        except (msgspec.DecodeError, msgspec.ValidationError):
            told = ErrorBody("", response.reason)
        if told.error == Corrupt.code:
            raise Corrupt(told.message, self.name)
        if told.error == OverCapacity.code:
            raise OverCapacity(f"{self.url}: {told.message}", _seconds(response.getheader("Retry-After")))
        if response.status == NotFound.status:
            raise NotFound(f"{self.url}: {told.message}")
        kind = _RAISED.get(told.error)
        raise (
            kind(f"{self.url}: {told.message}")
            if kind
            else Unavailable(self.url, f"answers {response.status} {told.message}")
        )

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            self._own()
            if self._idle:
                return self._idle.pop(), False
        return self._connect(), True

    def _own(self) -> None:
        """After a fork: the parent's connections are the parent's."""
        if self._owner != os.getpid():
            for stream in self._streams:
                stream.close()  # this process's end of it: a thread of the daemon's waits until nobody has one
            self._idle, self._streams, self._owner = [], [], os.getpid()

    def _stream(self) -> tuple[ReadStream | None, bool]:
        """Return a connection for reads and whether it is a new one; ``None`` if reads go by HTTP for now."""
        with self._lock:
            self._own()
            if self._streams:
                return self._streams.pop(), False
            if time.monotonic() < self._no_stream_until:
                return None, True
        return self._new_stream(), True

    def _new_stream(self) -> ReadStream | None:
        try:
            sock = socket.create_connection((self._host, self._port), CONNECT_SECONDS)
        except OSError as error:
            raise self._unreachable(error) from error
        stream = None
        with contextlib.suppress(OSError):
            stream = ReadStream.upgraded(sock, urlsplit(self.url).netloc, self.name, self._silence_seconds)
        if stream is None:
            self._no_stream_until = time.monotonic() + NO_STREAM_SECONDS
        return stream

    def _keep(self, stream: ReadStream) -> None:
        with self._lock:
            if self._owner == os.getpid() and not self._closed and len(self._streams) < IDLE_CONNECTIONS_MAX:
                self._streams.append(stream)
                return
        stream.close()

    def _unreachable(self, error: OSError) -> Unavailable:
        why = error.strerror or str(error)
        return Unavailable(self.url, f"cannot be reached ({why}); is the daemon running there?")

    def _connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_SECONDS, blocksize=1 << 20)
        connection.response_class = _Response
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise self._unreachable(error) from error
        return connection

    def _give_back(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        with self._lock:
            if not response.will_close and len(self._idle) < IDLE_CONNECTIONS_MAX:
                self._idle.append(connection)
                return
        connection.close()


class _PatientSocket(io.RawIOBase):
    """The reading end of a socket with a deadline for everything: a timeout alone never ends while bytes trickle in."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._silence_seconds = sock.gettimeout() or SILENCE_SECONDS
        self._file = sock.makefile("rb", buffering=0)  # counts as a user of the socket, as http.client expects
        self.deadline = time.monotonic() + self._silence_seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("answers too slowly")
        self._socket.settimeout(min(left, self._silence_seconds))
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response that is read through a ``_PatientSocket``, its head as well."""

    def __init__(self, sock: socket.socket, *args: Any, **named: Any) -> None:
        super().__init__(sock, *args, **named)
        self.fp.close()
        self.socket = _PatientSocket(sock)
        self.fp = io.BufferedReader(self.socket)


def _exchange(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: object,
    headers: dict[str, str],
    patience_seconds: float,
) -> _Response:
    """Send a request and return the head of the answer, which must be here within ``patience_seconds``."""
    connection.sock.settimeout(patience_seconds)
    try:
        connection.request(method, path, body=body, headers=headers)  # type: ignore[arg-type]
    except ConnectionError:
        # A daemon that refuses an upload answers before it has read it all: its answer says more than the reset.
        if body is None:
            raise
        with contextlib.suppress(OSError, http.client.HTTPException):
            return cast(_Response, connection.getresponse())
        raise
    return cast(_Response, connection.getresponse())


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
