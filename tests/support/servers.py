"""Servers that tests put in a daemon's or an origin's place: one that counts what is read, one that says anything."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class CountingOrigin:
    """An HTTP origin with byte ranges. Counts requests and bytes by path; can be told to answer otherwise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self.requests: Counter[str] = Counter()
        self.bytes_sent = 0
        self.status: int | None = None  # answer everything with this
        self.lock = threading.Lock()
        self.open = threading.Event()  # cleared: requests wait until it is set
        self.open.set()

    def reset(self) -> None:
        with self.lock:
            self.requests.clear()
            self.bytes_sent = 0


@contextlib.contextmanager
def counting_origin(folder: Path) -> Iterator[CountingOrigin]:
    origin = CountingOrigin(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            origin.open.wait(60)
            name = unquote(urlsplit(self.path).path).lstrip("/")
            path = origin.folder / name
            if origin.status is not None or not path.is_file():
                self.send_response(origin.status or 404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            data = path.read_bytes()
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            start, end = (int(asked[1]), min(int(asked[2]) + 1, len(data))) if asked else (0, len(data))
            body = data[start:end]
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{len(data)}"')
            self.send_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
            self.end_headers()
            if self.command == "GET":
                with origin.lock:
                    origin.requests[name] += 1
                    origin.bytes_sent += len(body)
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    origin.url = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield origin
    finally:
        origin.open.set()
        server.shutdown()
        thread.join()
        server.server_close()


Answer = Callable[[socket.socket, bytes], None]
"""Gets the connection and a request (head and body) and does to it what it likes."""


class HostileServer:
    """A server that reads requests properly and answers as it is told."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[bytes] = []
        self.gone = threading.Event()  # set at the end: who drips or hangs waits on it
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
    """Return a whole answer."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
