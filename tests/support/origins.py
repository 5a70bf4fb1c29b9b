"""An HTTP origin that does as it is told: throttle, fail, hang, drip, cut off. Real sockets, real byte ranges."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class Way:
    """How one request is answered. The default: rightly, at once."""

    status: int = 0  # answer with it, instead of the object
    headers: dict[str, str] = field(default_factory=dict)
    hangs_at: int | None = None  # after so many bytes of the body; -1: before the head
    resets_at: int | None = None  # likewise
    bytes_per_second: int = 0


OK = Way()
HANG = Way(hangs_at=-1)
HANG_IN_BODY = Way(hangs_at=100)
DRIP = Way(bytes_per_second=1024)
RESET = Way(resets_at=-1)
RESET_IN_BODY = Way(resets_at=100)


def throttle(retry_after: str = "", status: int = 429) -> Way:
    return Way(status, {"Retry-After": retry_after} if retry_after else {})


class Asked(NamedTuple):
    """One request that came."""

    at: float  # monotonic
    name: str
    way: Way


Script = Callable[[str], Way]


class ScriptedOrigin:
    """``script(name)`` says how to answer a request for an object; it may be replaced at any time."""

    def __init__(self, folder: Path, script: Script = lambda name: OK) -> None:
        self.folder = folder
        self.script = script
        self.url = ""
        self.asked: list[Asked] = []
        self.held = threading.Semaphore(0)  # released when a request begins to hang
        self.gone = threading.Event()  # who hangs or drips ends with it

    def all(self, way: Way) -> None:
        """Answer everything this way from now on."""
        self.script = lambda name: way

    def first(self, count: int, way: Way) -> None:
        """Answer so many requests this way, and the others rightly."""
        left = threading.Semaphore(count)
        self.script = lambda name: way if left.acquire(blocking=False) else OK

    def ways(self, way: Way) -> list[Asked]:
        return [asked for asked in self.asked if asked.way == way]


@contextlib.contextmanager
def scripted_origin(folder: Path, script: Script = lambda name: OK) -> Iterator[ScriptedOrigin]:
    origin = ScriptedOrigin(folder, script)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            self.close_connection = True  # unless it is answered to the end
            with contextlib.suppress(OSError):
                _answer(origin, self)
                self.close_connection = False

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # clients that go away are what this is about

    server = Server(("127.0.0.1", 0), Handler)
    origin.url = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield origin
    finally:
        origin.gone.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _answer(origin: ScriptedOrigin, request: BaseHTTPRequestHandler) -> None:
    name = unquote(urlsplit(request.path).path).lstrip("/")
    way = origin.script(name)
    origin.asked.append(Asked(time.monotonic(), name, way))
    path = origin.folder / name
    status = way.status or (0 if path.is_file() else 404)
    data = path.read_bytes() if not status else b""
    asked = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
    start, end = (int(asked[1]), min(int(asked[2]) + 1, len(data))) if asked and not status else (0, len(data))
    _disturb(origin, request, way, -1)
    request.send_response(status or (206 if asked else 200))
    if asked and not status:
        request.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
    request.send_header("Content-Length", str(end - start))
    for each, value in {"ETag": f'"{len(data)}"', "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT"}.items():
        request.send_header(each, value)
    for each, value in way.headers.items():
        request.send_header(each, value)
    request.end_headers()
    if request.command == "GET":
        _send(origin, request, way, data[start:end])


def _send(origin: ScriptedOrigin, request: BaseHTTPRequestHandler, way: Way, body: bytes) -> None:
    at = 0
    limits = [limit for limit in (way.hangs_at, way.resets_at) if limit is not None]
    step = max(way.bytes_per_second // 20, 1) if way.bytes_per_second else len(body)
    step = min([step, *limits]) if limits else step
    while at < len(body):
        request.wfile.write(body[at : at + step])
        request.wfile.flush()
        at += step
        _disturb(origin, request, way, at)
        if way.bytes_per_second and origin.gone.wait(0.05):
            raise ConnectionAbortedError


def _disturb(origin: ScriptedOrigin, request: BaseHTTPRequestHandler, way: Way, at: int) -> None:
    if way.hangs_at == at:
        origin.held.release()
        origin.gone.wait(300)
        raise ConnectionAbortedError
    if way.resets_at == at:
        # Closed with this, it is reset and not ended.
        request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.connection.close()
        raise ConnectionAbortedError
