"""Servers in place of an origin or a daemon: one counts what is read, one sends whatever bytes a test chooses."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.http_server import Request, http_server, object_name, send_head, send_status


class CountingOrigin:
    """An HTTP origin with byte ranges. It counts requests by path, and bytes; a test may fail or pause it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self.requests: Counter[str] = Counter()
        self.bytes_sent = 0
        self.status: int | None = None  # if set, answer every request with it
        self.lock = threading.Lock()
        self.latency_seconds = 0.0  # before each answer
        self.open = threading.Event()  # cleared: requests wait until it is set
        self.open.set()

    def reset(self) -> None:
        with self.lock:
            self.requests.clear()
            self.bytes_sent = 0


@contextlib.contextmanager
def counting_origin(folder: Path) -> Iterator[CountingOrigin]:
    origin = CountingOrigin(folder)
    with http_server(lambda request: _answer(origin, request)) as url:
        origin.url = f"{url}/"
        try:
            yield origin
        finally:
            origin.open.set()


def _answer(origin: CountingOrigin, request: Request) -> None:
    origin.open.wait(60)
    time.sleep(origin.latency_seconds)
    name = object_name(request)
    path = origin.folder / name
    if origin.status is not None or not path.is_file():
        send_status(request, origin.status or 404)
        return
    body = send_head(request, path.read_bytes())
    if request.command == "GET":
        with origin.lock:
            origin.requests[name] += 1
            origin.bytes_sent += len(body)
        request.wfile.write(body)


Answer = Callable[[socket.socket, bytes], None]
"""Gets the connection and a request (head and body), and sends any bytes, or none."""


class HostileServer:
    """A server that parses requests correctly and answers each by a function of the test, on the raw socket."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[bytes] = []
        self.gone = threading.Event()  # set at the end: answers that hang or send slowly wait for it
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._connections: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> HostileServer:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self.gone.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self.gone.is_set():
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while request := _request(connection):
                self.requests.append(request)
                self.answer(connection, request)


def _request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = connection.recv(1 << 16)
        if not chunk:
            return b""
        data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
    while length and len(body) < int(length[1]):
        chunk = connection.recv(1 << 16)
        if not chunk:
            return b""
        body += chunk
    return head + b"\r\n\r\n" + body


def ok(body: bytes, *headers: str, length: int | None = None, status: str = "200 OK") -> bytes:
    """Return a complete answer, head and body."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
