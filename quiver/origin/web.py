"""Objects of a plain HTTP server, over kept connections: by the standard library's client, ranges by ``web_ranges``.

obstore is not used, since its client always follows redirects. The server chooses where a redirect leads, which may be
a place that a daemon's operator does not allow; so redirects are rejected here, and the error names the place.

The store has the methods of obstore's stores (``get_range``, ``head``, ``get``) and raises our own errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Final, TypeVar
from urllib.parse import quote, urljoin

from quiver.errors import Forbidden, NotFound, QuiverError, Unavailable
from quiver.location import PLAIN, Location, object_path, shown
from quiver.origin.gate import backoff_seconds, parse_retry_after
from quiver.origin.proxies import address_of, proxy_for
from quiver.origin.web_answers import Answer, NoRanges, NotNow, Whole
from quiver.origin.web_ranges import Head, OtherForm, RangeConnections, Target

CONNECT_SECONDS: Final = 5.0
PIECE_BYTES: Final = 1 << 18
CONNECTIONS_MAX: Final = 32  # the most requests that one store has in flight
T = TypeVar("T")
GOOD: Final = frozenset({200, 206})
PASSING: Final = frozenset({408, 425, 429, 500, 502, 503, 504})  # statuses after which a retry may help
DIGITS_MAX: Final = 19  # of a size: Python refuses to parse thousands
_PARTIAL = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(?:\d+|\*)", re.ASCII)


class WebStore:
    """Objects under an ``http(s)://`` URL. Safe from threads.

    Raises ``NotFound``, ``Forbidden`` (of a redirect, too) and ``Unavailable``.
    """

    def __init__(self, location: Location, *, request_seconds: float, attempts: int, attempts_seconds: float) -> None:
        self._location = location
        self._request_seconds = request_seconds
        self._attempts, self._attempts_seconds = attempts, attempts_seconds
        self._lock = threading.Lock()
        self._idle: list[HTTPConnection] = []
        self._threads: ThreadPoolExecutor | None = None  # for asynchronous callers
        self._calls = threading.local()
        self._proxy = proxy_for(location)
        self._tls = ssl.create_default_context() if location.scheme == "https" else None
        host = location.authority.removesuffix(":443" if location.scheme == "https" else ":80")
        self._fields = "".join(f"{name}: {value}\r\n" for name, value in ({"Host": host} | self._headers({})).items())
        self._connections = self._range_connections()

    def __repr__(self) -> str:
        return f"WebStore({self._location.url!r})"

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_connections") and not is_finalizing():
            self.close()

    def get_range(self, path: str, *, start: int, end: int) -> bytearray:
        """Return the bytes from ``start`` up to ``end``, or up to the end of the object."""
        return self._patiently(lambda: self._range(path, start, end))

    def head(self, path: str) -> dict[str, Any]:
        """Return size, ETag and modification time."""
        return self._patiently(lambda: self._described(path))

    def get(self, path: str) -> Whole:
        """Request an object; the caller receives its bytes from the result."""
        return self._patiently(lambda: self._whole(path))

    async def get_range_async(self, path: str, *, start: int, end: int) -> bytearray:
        return await self.aside(lambda: self.get_range(path, start=start, end=end))

    async def receive_range(
        self, path: str, start: int, end: int, out: memoryview, arrived: Callable[[int], None] = lambda count: None
    ) -> int:
        """``get_range`` once, into ``out``; return how many bytes there were. All calls must use the same loop.

        ``arrived`` is called with how many more bytes were received. Nothing is written to ``out`` after the end.
        """
        connections = self._connections
        if connections is not None:
            request = self._range_request(object_path(path, self._location.scheme), start, end)
            with self._failures(path), contextlib.suppress(OtherForm):
                return await connections.receive(request, partial(self._judged, path, start, end), out, arrived)
            connections.close()
            self._connections = None  # what this server sent once it will send again
        data = await self.get_range_async(path, start=start, end=end)
        out[: len(data)] = data
        arrived(len(data))
        return len(data)

    async def head_async(self, path: str) -> dict[str, Any]:
        return await self.aside(lambda: self.head(path))

    async def get_async(self, path: str, *, options: dict[str, Any] | None = None) -> Whole:
        """Do what ``get`` does; ``options`` may have ``range``, the first byte and the end."""
        start, end = (options or {}).get("range", (0, 0))
        return await self.aside(lambda: self._patiently(lambda: self._whole(path, start, end)))

    async def aside(self, work: Callable[[], T]) -> T:
        """Do blocking work in a thread; shut its connection down if the caller is cancelled."""
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(CONNECTIONS_MAX, thread_name_prefix="quiver-web")
        call = _Call()

        def run() -> T:
            self._calls.mine = call
            try:
                return work()
            finally:
                self._calls.mine = None

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, run)
        except asyncio.CancelledError:
            call.cut()
            raise

    def knock(self) -> bool:
        """Return whether the server answers for this folder, with or without an index page. Raises like ``get``."""
        url = self._location.url
        with self._failures(""):
            answer = self._sent("HEAD", self._target(""), self._headers({}))
        self._drop(answer)
        place = urljoin(url, answer.headers.get("Location", ""))
        away = 300 <= answer.status < 400 and not place.startswith(url[: url.index("/", 8) + 1])
        if away or answer.status in (401, 407) or answer.status >= 500:
            raise self._refusal("", answer)
        return True

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        if self._connections is not None:
            self._connections.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def url(self, path: str) -> str:
        return shown(self._location.url + path)

    # -- one request --------------------------------------------------------------------------------------------------

    def _range(self, path: str, start: int, end: int) -> bytearray:
        return self._whole(path, start, end).bytes()

    def _part(self, path: str, status: int, content_range: str, start: int, end: int) -> int:
        """Return how many bytes of the requested range the answer has."""
        part = _PARTIAL.fullmatch(content_range)
        if status != 206 or part is None:
            raise NoRanges(self.url(path), "the server answers no byte ranges", lasting=True)
        if int(part[1]) != start or not start <= int(part[2]) < end:
            raise Unavailable(self.url(path), "the server answers another range than was requested", lasting=True)
        return int(part[2]) + 1 - start

    def _judged(self, path: str, start: int, end: int, head: Head) -> int:
        """Return how many bytes of the requested range an answer has. Raises what a bad one means."""
        headers = head.headers
        if head.status not in GOOD or headers.get("content-encoding", "identity") != "identity":
            raise self._refused(path, head.status, headers.get("location", ""), headers.get("retry-after", ""))
        return self._part(path, head.status, headers.get("content-range", ""), start, end)

    def _range_request(self, path: str, start: int, end: int) -> bytes:
        head = f"GET {self._target(path)} HTTP/1.1\r\n{self._fields}Range: bytes={start}-{end - 1}\r\n\r\n"
        return head.encode("ascii")

    def _described(self, path: str) -> dict[str, Any]:
        answer = self._asked("HEAD", path, {})
        try:
            return self._meta(path, answer)
        finally:
            answer.read()
            self.release(answer)

    def _whole(self, path: str, start: int = 0, end: int = 0) -> Whole:
        """Request an object, or a range of it."""
        answer = self._asked("GET", path, {"Range": f"bytes={start}-{end - 1}"} if end else {})
        try:
            if end:
                content_range = answer.headers.get("Content-Range", "")
                return Whole(self, path, answer, {"size": self._part(path, answer.status, content_range, start, end)})
            return Whole(self, path, answer, self._meta(path, answer))
        except QuiverError:
            self.release(answer)
            raise

    def _meta(self, path: str, answer: Answer) -> dict[str, Any]:
        size = answer.headers.get("Content-Length", "")
        if not (size.isascii() and size.isdecimal() and len(size) < DIGITS_MAX):
            raise Unavailable(self.url(path), "the server does not say how large it is", lasting=True)
        return {
            "path": path,
            "size": int(size),
            "e_tag": answer.headers.get("ETag"),
            "last_modified": _moment(answer.headers.get("Last-Modified", "")),
        }

    def receive(self, path: str, answer: Answer, out: memoryview) -> None:
        """Fill ``out`` from the body. Raises ``Unavailable`` if that takes too long or the body ends before."""
        deadline = time.monotonic() + self._request_seconds
        with self._failures(path):
            at = 0
            while at < len(out):
                count = answer.receive_some(out[at : at + PIECE_BYTES])
                if not count:
                    raise NotNow(self.url(path), "the server's answer ended early")
                at += count
                if time.monotonic() > deadline:
                    raise NotNow(self.url(path), f"no whole answer in {self._request_seconds:.0f} s")

    def _asked(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        """Make a request; return a successful answer, its body not yet received. Raises errors for all others."""
        target = self._target(object_path(path, self._location.scheme))
        with self._failures(path):
            answer = self._sent(method, target, self._headers(headers))
        encoding = answer.headers.get("Content-Encoding", "identity")
        if answer.status in GOOD and encoding == "identity":
            return answer
        self._drop(answer)
        raise self._refusal(path, answer)

    def _target(self, path: str) -> str:
        """Return the target of a request: a path, or a whole URL for a proxy."""
        url = self._location.url + quote(path, safe=PLAIN)
        return url if self._proxy is not None and self._tls is None else url[url.index("/", 8) :]

    def _headers(self, more: dict[str, str]) -> dict[str, str]:
        proxy = self._proxy[1] if self._proxy is not None and self._tls is None else {}
        return {"User-Agent": "quiver", "Accept-Encoding": "identity", **proxy, **more}

    def _sent(self, method: str, target: str, headers: dict[str, str]) -> Answer:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            try:
                return self._answer(connection, method, target, headers)
            except (OSError, HTTPException):
                connection.close()  # the server most likely closed it while it was idle: retry on a new one
        connection = self._connected()
        try:
            return self._answer(connection, method, target, headers)
        except (OSError, HTTPException):
            connection.close()
            raise

    def _answer(self, connection: HTTPConnection, method: str, target: str, headers: dict[str, str]) -> Answer:
        call: _Call | None = getattr(self._calls, "mine", None)
        if call is not None:
            call.is_on(connection)
        connection.request(method, target, headers=headers)
        answer = connection.getresponse()
        assert isinstance(answer, Answer)
        answer.connection = connection
        return answer

    def _range_connections(self) -> RangeConnections | None:
        """Return what receives ranges on an event loop; ``None`` where only ``http.client`` connects."""
        through_tunnel = self._tls is not None and self._proxy is not None
        if through_tunnel or not self._location.authority.isascii():
            return None
        host, port = address_of(self._location)
        near = self._proxy[0] if self._proxy is not None else (host, port)
        target = Target(*near, self._tls, host)
        return RangeConnections(target, CONNECTIONS_MAX, CONNECT_SECONDS, self._request_seconds)

    def _connected(self) -> HTTPConnection:
        host, port = address_of(self._location)
        near = self._proxy[0] if self._proxy is not None else (host, port)
        connection: HTTPConnection
        if self._tls is None:
            connection = HTTPConnection(*near, timeout=CONNECT_SECONDS)
        else:
            connection = HTTPSConnection(*near, timeout=CONNECT_SECONDS, context=self._tls)
            if self._proxy is not None:
                connection.set_tunnel(host, port, self._proxy[1])
        connection.response_class = Answer
        connection.connect()
        connection.sock.settimeout(self._request_seconds)
        return connection

    def release(self, answer: Answer) -> None:
        """Keep the connection for the next request if the answer was read to its end; else close it."""
        if answer.length == 0:
            answer.read()  # a read past the end marks the answer as complete
        if not answer.isclosed() or answer.will_close:
            self._drop(answer)
            return
        with self._lock:
            if len(self._idle) < CONNECTIONS_MAX:
                self._idle.append(answer.connection)
                return
        answer.connection.close()

    def _drop(self, answer: Answer) -> None:
        answer.close()
        answer.connection.close()

    # -- failures -----------------------------------------------------------------------------------------------------

    def _patiently(self, attempt: Callable[[], T]) -> T:
        """Retry failures that may pass: with growing pauses, and not before the server's Retry-After."""
        deadline = time.monotonic() + self._attempts_seconds
        for number in range(self._attempts):
            try:
                return attempt()
            except NotNow as error:
                call: _Call | None = getattr(self._calls, "mine", None)
                if call is not None and call.is_cut:
                    raise
                pause = max(error.retry_after_seconds, backoff_seconds(number + 1))
                if time.monotonic() + pause > deadline:
                    raise
                time.sleep(pause)
        return attempt()

    @contextlib.contextmanager
    def _failures(self, path: str) -> Iterator[None]:
        try:
            yield
        except UnicodeError as error:  # in a host name
            raise Unavailable(
                self.url(path), f"the server's host name cannot be looked up: {error}", lasting=True
            ) from error
        except (OSError, HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise NotNow(self.url(path), f"the server does not answer: {shown(why)}") from error

    def _refusal(self, path: str, answer: Answer) -> QuiverError:
        place, pause = answer.headers.get("Location", ""), answer.headers.get("Retry-After", "")
        return self._refused(path, answer.status, place, pause)

    def _refused(self, path: str, status: int, place: str, pause: str) -> QuiverError:
        url = self.url(path)
        if 300 <= status < 400:
            return redirected(url, place)
        if status in (404, 410):
            return NotFound(f"{url} does not exist")
        if status in (401, 403, 407):
            return Forbidden(f"{url}: the server refuses to answer (status {status})")
        if status < 300:
            return Unavailable(url, "the server compresses what it sends", lasting=True)
        if status not in PASSING:
            return Unavailable(url, f"the server answers with status {status}", lasting=True)
        return NotNow(url, f"the server answers with status {status}", parse_retry_after(pause))


class _Call:
    """Work in a thread for an asynchronous caller, and the connection that it uses, which the caller can cut."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: HTTPConnection | None = None
        self.is_cut = False

    def is_on(self, connection: HTTPConnection) -> None:
        with self._lock:
            self._connection = connection
            if self.is_cut:
                raise ConnectionAbortedError("the caller was cancelled")

    def cut(self) -> None:
        """Shut the connection down, so that the thread's reads and writes fail."""
        with self._lock:
            self.is_cut = True
            if self._connection is not None and self._connection.sock is not None:
                with contextlib.suppress(OSError):
                    self._connection.sock.shutdown(socket.SHUT_RDWR)


def redirected(url: str, place: str) -> Forbidden:
    """Return the error for a redirect. It names only the server: the rest of the URL may be signed, a credential."""
    found = re.match(r"https?://[^/@\s]{1,255}(?=/|$)", place, re.IGNORECASE)
    where = f" to {shown(found[0])}" if found else ""
    return Forbidden(f"{url}: the server redirects{where}, which is not followed; index where the data lies")


def _moment(text: str) -> datetime | None:
    try:
        return parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        return None
