"""Ranges of objects of a plain HTTP server, received in place by an event loop over kept connections.

Filling a shard of separate files takes one request per sample. Made by ``http.client`` in a thread, each takes several
times the CPU time of its bytes (110 kB: 260 µs): a hop to the thread and back, the standard library's parser of e-mail
headers, and threads that take the GIL from each other. Here one thread, the loop's, does it all.

Invariant: only the body of a 206 that announces exactly the requested bytes is written to the caller's memory, none of
it after the caller was cancelled or the request has failed; and a connection is reused only after an answer was
received to its last byte, and nothing beyond. Answers of another form, which HTTP allows (chunked, interim, HTTP/1.0),
raise ``OtherForm``: ``web`` receives them by ``http.client``.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import Callable
from typing import Final, NamedTuple, cast

from quiver.errors import QuiverError

SCRATCH_BYTES: Final = 4096  # a head, and with it the beginning of the body, which is copied
HEAD_BYTES_MAX: Final = 1 << 16
PROGRESS_BYTES: Final = 1 << 18  # received since progress was reported
_END: Final = b"\r\n\r\n"
_STATUS: Final = re.compile(r"[2-5][0-9]{2}(?: |$)")  # not interim ones, which another answer follows


class OtherForm(Exception):
    """The answer has a form that is not received here."""


class BrokenAnswer(ConnectionError):
    """The connection was lost before the answer was complete."""


class Head(NamedTuple):
    """Status and headers of an answer; the names of headers are in lower case."""

    status: int
    headers: dict[str, str]


class Target(NamedTuple):
    """Where to connect to. ``server_name`` is that of the certificate."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    server_name: str


Judge = Callable[[Head], int]
"""Return how many bytes of the requested range the answer has, or raise what it means."""


class RangeConnections:
    """The connections to one server. Belongs to one event loop; ``close`` may be called from any thread."""

    def __init__(self, target: Target, kept_max: int, connect_seconds: float, request_seconds: float) -> None:
        self._target = target
        self._kept_max = kept_max
        self._connect_seconds = connect_seconds
        self._request_seconds = request_seconds
        self._idle: list[_Connection] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def receive(self, request: bytes, judge: Judge, out: memoryview, arrived: Callable[[int], None]) -> int:
        """Send a GET for a range, receive its body into ``out``, and return its size.

        ``arrived`` is called with how many more bytes were received. Raises what ``judge`` raises, ``OSError``,
        ``TimeoutError`` and ``OtherForm``.
        """
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._exchange(connection, request, judge, out, arrived)
            except BrokenAnswer:
                if connection.answered:
                    raise
                # The server most likely closed it while it was idle: retry on another.
        return await self._exchange(await self._connect(), request, judge, out, arrived)

    def close(self) -> None:
        """Close the idle connections. Those in use are closed after their answer."""
        self._closed = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its connections with it
                self._loop.call_soon_threadsafe(self._abort_idle)

    async def _exchange(
        self, connection: _Connection, request: bytes, judge: Judge, out: memoryview, arrived: Callable[[int], None]
    ) -> int:
        timer = asyncio.get_running_loop().call_later(self._request_seconds, connection.expire, self._request_seconds)
        try:
            count = await connection.receive(request, judge, out, arrived)
        finally:
            timer.cancel()
            connection.release()
        if connection.reusable and not self._closed and len(self._idle) < self._kept_max:
            self._idle.append(connection)
        else:
            connection.abort()
        return count

    async def _connect(self) -> _Connection:
        self._loop = loop = asyncio.get_running_loop()
        target = self._target
        async with asyncio.timeout(self._connect_seconds):
            _, connection = await loop.create_connection(
                lambda: _Connection(self._lost),
                target.host,
                target.port,
                ssl=target.tls,
                server_hostname=target.server_name if target.tls is not None else None,
            )
        return connection

    def _lost(self, connection: _Connection) -> None:
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def _abort_idle(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.abort()


class _Connection(asyncio.BufferedProtocol):
    """One connection, on which one request at a time is answered."""

    def __init__(self, lost: Callable[[_Connection], None]) -> None:
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._scratch = bytearray(SCRATCH_BYTES)
        self._filled = 0  # bytes of the scratch
        self._judge: Judge | None = None
        self._arrived: Callable[[int], None] | None = None
        self._out: memoryview | None = None
        self._answer: asyncio.Future[int] | None = None
        self._body: memoryview | None = None  # what is left to receive, once the head was judged
        self._size = 0
        self._keeps = False  # the server keeps the connection after this answer
        self._unreported = 0
        self.answered = False  # something of the answer was received
        self.reusable = False

    async def receive(self, request: bytes, judge: Judge, out: memoryview, arrived: Callable[[int], None]) -> int:
        assert self._transport is not None
        self._filled, self.answered, self.reusable = 0, False, False
        if self._transport.is_closing():
            raise BrokenAnswer("it closed the connection")
        self._judge, self._out, self._arrived = judge, out, arrived
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def release(self) -> None:
        """Forget the request; abort the connection if its answer was not received to the end."""
        finished = self.reusable
        self._judge = self._out = self._arrived = self._answer = self._body = None
        if not finished:
            self.abort()

    def abort(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def expire(self, seconds: float) -> None:
        self._fail(TimeoutError(f"no whole answer in {seconds:.0f} s"))

    # -- called by the transport --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # not a subclass, where the loop is uvloop's

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(BrokenAnswer(str(exc) if exc is not None else "its answer ended early"))
        self._lost(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._body if self._body is not None else memoryview(self._scratch)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._body is not None:
            self._took(nbytes)
            return
        self._filled += nbytes
        self.answered = True
        if self._answer is None or self._answer.done():  # nobody asked for it
            self.abort()
            return
        end = self._scratch.find(_END, 0, self._filled)
        if end >= 0:
            self._begin(end)
        elif self._filled == len(self._scratch):
            if self._filled >= HEAD_BYTES_MAX:
                self._fail(BrokenAnswer(f"the head of its answer has more than {HEAD_BYTES_MAX} bytes"))
            else:
                self._scratch = self._scratch + bytearray(len(self._scratch))  # a new one: views of the old may live

    # -- the answer ---------------------------------------------------------------------------------------------------

    def _begin(self, end: int) -> None:
        """Judge the head, which ends at ``end`` of the scratch, and begin with the body."""
        assert self._judge is not None
        assert self._out is not None
        try:
            head, keeps = _parsed(bytes(self._scratch[:end]))
            size = self._judge(head)
            if head.headers.get("content-length") != str(size):
                raise OtherForm
        except (QuiverError, OtherForm) as error:
            self._fail(error)
            return
        start = end + len(_END)
        early = self._filled - start
        if early > size:
            self._fail(BrokenAnswer("it sends more than it announced"))
            return
        self._size, self._keeps, self._unreported = size, keeps, 0
        self._body = self._out[:size]
        self._body[:early] = memoryview(self._scratch)[start : self._filled]
        self._took(early)

    def _took(self, count: int) -> None:
        assert self._body is not None
        assert self._arrived is not None
        self._body = self._body[count:]
        self._unreported += count
        done = not len(self._body)
        if done or self._unreported >= PROGRESS_BYTES:
            self._arrived(self._unreported)
            self._unreported = 0
        if done:
            self._body = None
            self._filled = 0
            if self._answer is not None and not self._answer.done():
                self.reusable = self._keeps
                self._answer.set_result(self._size)

    def _fail(self, error: Exception) -> None:
        self._body = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.abort()


def _parsed(head: bytes) -> tuple[Head, bool]:
    """Return the head of an answer, and whether the server keeps the connection. Raises ``OtherForm``."""
    status, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = status.partition(" ")
    if version != "HTTP/1.1" or not _STATUS.match(rest):
        raise OtherForm
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or name.strip() != name or (name in ("transfer-encoding", "content-length") and name in headers):
            raise OtherForm  # continued from the line before, or ambiguous
        headers[name] = value.strip()
    if "transfer-encoding" in headers:
        raise OtherForm
    return Head(int(rest[:3]), headers), headers.get("connection", "").lower() != "close"
