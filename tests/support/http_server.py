"""The HTTP server under the origins and web servers of tests: a function answers each request, on a real socket."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from urllib.parse import unquote, urlsplit

Request = BaseHTTPRequestHandler
Answer = Callable[[Request], None]
"""Answers a GET or HEAD request. It may raise ``OSError`` to close the connection without finishing the answer."""

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@contextlib.contextmanager
def http_server(answer: Answer) -> Iterator[str]:
    """Serve ``answer``, one thread per connection, and yield the URL (``http://host:port``, no slash)."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            self.close_connection = True  # unless the answer is sent completely
            with contextlib.suppress(OSError):
                answer(self)
                self.close_connection = False

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # tests disconnect on purpose

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def object_name(request: Request) -> str:
    """Return the path of a request without its leading slash and without percent-encoding."""
    return unquote(urlsplit(request.path).path).lstrip("/")


def send_status(request: Request, status: int, headers: Mapping[str, str] = NO_HEADERS) -> None:
    """Send a status and no body."""
    request.send_response(status)
    for name, value in {"Content-Length": "0", **headers}.items():
        request.send_header(name, value)
    request.end_headers()


def send_head(request: Request, data: bytes) -> bytes:
    """Send the head of an answer with the requested range of an object; return the body, which the caller sends.

    The body is empty if the method is HEAD.
    """
    asked = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
    start, end = (int(asked[1]), min(int(asked[2]) + 1, len(data))) if asked else (0, len(data))
    request.send_response(206 if asked else 200)
    if asked:
        request.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
    request.send_header("Content-Length", str(end - start))
    request.send_header("ETag", f'"{len(data)}"')
    request.send_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
    request.end_headers()
    return data[start:end] if request.command == "GET" else b""
