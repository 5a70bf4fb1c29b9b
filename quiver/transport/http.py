"""HTTP requests to one daemon: bounded in time and size, with error answers mapped to Quiver's errors.

``http.client`` is not used: it reads as long as a byte arrives now and then, and accepts no deadline from outside.
There is little to parse: an answer is a head, then as many bytes as ``Content-Length`` says. Redirects, content
encodings, chunked bodies and bodies of another length are rejected.
"""

from __future__ import annotations

import contextlib
import copy
import http.client
import io
import re
import ssl
from dataclasses import dataclass, replace
from email.message import Message
from functools import partial
from typing import Final

import msgspec
import numpy as np

from quiver.digest import Bytes
from quiver.errors import Corrupt, Unauthenticated, error_from
from quiver.malformed import MALFORMED
from quiver.transport.attempt import Attempt
from quiver.transport.connection import U8, Connection, Dialogue, Endpoint
from quiver.wire import ErrorBody

HEAD_BYTES_MAX: Final = 64 << 10
ERROR_BYTES_MAX: Final = 1 << 16
IGNORED_BYTES_MAX: Final = 1 << 16  # of the answer to a verb without a result
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: ([^\r\n]*))?\r?\n")
_NO_BODY: Final = (204, 304)


@dataclass(frozen=True, slots=True)
class Head:
    """The head of an answer."""

    is_http_11: bool
    status: int
    reason: str
    headers: Message

    @classmethod
    def parse(cls, data: bytes) -> Head:
        """Raises ``ValueError`` for malformed HTTP."""
        line = _STATUS_LINE.match(data)
        if line is None:
            raise ValueError("malformed answer: no HTTP/1.1 status line")
        try:
            headers = http.client.parse_headers(io.BytesIO(data[line.end() :]))
        except http.client.HTTPException as error:
            raise ValueError(f"malformed answer: {error}") from error
        return cls(line[1] == b"1", int(line[2]), (line[3] or b"").decode("latin-1"), headers)

    @property
    def size_bytes(self) -> int:
        """The announced size of the body, -1 if there is none. Raises ``ValueError`` for a malformed one."""
        told = {value.strip() for value in self.headers.get_all("Content-Length", [])}
        if "Transfer-Encoding" in self.headers or not told:
            return -1
        text = told.pop()
        if told or not (text.isascii() and text.isdigit() and len(text) < 20):
            raise ValueError("malformed answer: bad Content-Length")
        return int(text)

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection may be used again."""
        return self.is_http_11 and "close" not in tokens(self.headers, "Connection")

    @property
    def retry_after_seconds(self) -> float | None:
        """How long the daemon asks to wait before a retry, if it says so."""
        with contextlib.suppress(ValueError):
            return float(self.headers.get("Retry-After", ""))
        return None


def tokens(headers: Message, name: str) -> list[str]:
    """Return the lower-case tokens of a header that is a list of them."""
    return [token.strip().lower() for value in headers.get_all(name, []) for token in value.split(",")]


def receive_head(connection: Connection) -> tuple[Head, bytes]:
    """Return the head of an answer, and the bytes received after it. Raises ``ValueError`` for malformed HTTP."""
    data, behind = connection.receive_until(b"\r\n\r\n", HEAD_BYTES_MAX)
    return Head.parse(data), behind


class HttpVerbs:
    """Requests to one daemon, over connections that are kept open. Blocking; safe from threads.

    Raises ``Unavailable`` if it does not answer, ``Corrupt`` for a malformed answer, and the error that it answers.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.dialogue = Dialogue(endpoint.failure)
        self._endpoint = endpoint
        self._headers: tuple[str, ...] = ()

    def with_header(self, name: str, value: str) -> HttpVerbs:
        """Return the same, over the same connections, with one more header in every request."""
        other = copy.copy(self)
        other._headers = (*self._headers, f"{name}: {value}")
        return other

    def close(self) -> None:
        self.dialogue.close()

    def within(self, attempt: Attempt) -> HttpVerbs:
        """Return the same verbs on the same connections, as part of an attempt."""
        verbs = copy.copy(self)
        verbs._endpoint = replace(self._endpoint, attempt=attempt)
        return verbs

    def request(
        self,
        method: str,
        path: str,
        body: Bytes = b"",
        content_type: str = "",
        *,
        answer_bytes_max: int = IGNORED_BYTES_MAX,
        wait_seconds: float = 0.0,
    ) -> U8:
        """Return the body of a successful answer. ``wait_seconds``: how long the daemon may wait for fills first."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._endpoint.host}", *self._headers]
        if method in ("PUT", "POST"):
            lines += [f"Content-Type: {content_type}", f"Content-Length: {memoryview(body).nbytes}"]
        head, source = "\r\n".join([*lines, ""]), self._endpoint.token
        sent = source.token()
        try:
            return self._run(method, head, sent, body, answer_bytes_max, wait_seconds)
        except Unauthenticated as error:
            token = source.token(fresh=True)
            if token == sent:
                raise Unauthenticated(f"{self._endpoint.url}: {source.fault()}") from error
            return self._run(method, head, token, body, answer_bytes_max, wait_seconds)

    def _run(self, method: str, head: str, token: str, body: Bytes, answer_bytes_max: int, wait_seconds: float) -> U8:
        whole = f"{head}{self._endpoint.authorization(token)}\r\n".encode()
        exchange = partial(self._exchange, method, whole, body, answer_bytes_max, wait_seconds)
        return self.dialogue.run(self._endpoint.connect, exchange)

    def _exchange(
        self, method: str, head: bytes, body: Bytes, size_bytes_max: int, wait_seconds: float, connection: Connection
    ) -> U8:
        self._endpoint.begin(connection, wait_seconds)
        try:
            answer, behind = self._asked(connection, head, body)
            size_bytes = answer.size_bytes
        except ValueError as error:
            raise Corrupt(str(error), self._endpoint.name) from error
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise Corrupt("an encoded answer", self._endpoint.name)
        if method == "HEAD" or answer.status in _NO_BODY:
            size_bytes = 0
        if answer.status not in (200, 201, 204):
            self._raise(connection, answer, behind, size_bytes)
        if size_bytes < 0:
            raise Corrupt("malformed answer: no Content-Length", self._endpoint.name)
        if size_bytes > size_bytes_max:
            what = f"an answer of {size_bytes} bytes where at most {size_bytes_max} were expected"
            raise Corrupt(what, self._endpoint.name)
        return self._body(connection, answer, behind, size_bytes)

    def _asked(self, connection: Connection, head: bytes, body: Bytes) -> tuple[Head, bytes]:
        """Send a request; return the head of the answer, and the bytes received after it."""
        try:
            connection.send(head, memoryview(body))
        except ConnectionError:
            # A daemon that refuses an upload answers before it has read all of it: prefer its answer to the reset.
            try:
                return receive_head(connection)
            except ssl.SSLError:
                raise  # an alert, which says why it closed the connection
            except (OSError, ValueError):
                pass
            raise
        return receive_head(connection)

    def _body(self, connection: Connection, answer: Head, behind: bytes, size_bytes: int) -> U8:
        """Return a body of this size. ``behind``: its beginning, received together with the head."""
        data = np.empty(size_bytes, np.uint8)
        here = min(len(behind), size_bytes)
        data[:here] = np.frombuffer(behind, np.uint8, here)
        connection.receive(data[here:].data)
        if answer.keeps_alive and len(behind) <= size_bytes:
            connection.finish()
        return data

    def _raise(self, connection: Connection, answer: Head, behind: bytes, size_bytes: int) -> None:
        """Raise the error that an unsuccessful answer stands for."""
        if 300 <= answer.status < 400:
            raise Corrupt(f"a redirect ({answer.status})", self._endpoint.name)
        whole = 0 <= size_bytes <= ERROR_BYTES_MAX
        body = self._body(connection, answer, behind, size_bytes) if whole else b""
        try:
            told = msgspec.json.decode(bytes(body), type=ErrorBody)
        except MALFORMED:
            told = ErrorBody("", answer.reason)
        seconds = answer.retry_after_seconds
        raise error_from(
            told.error,
            told.message,
            self._endpoint.url,
            status=answer.status,
            retry_after_seconds=1.0 if seconds is None else seconds,
        )
