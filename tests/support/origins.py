"""An HTTP origin that a test scripts: it throttles, fails, hangs, sends slowly or resets. Real sockets, real ranges."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.support.http_server import Request, http_server, object_name, send_head, send_status


@dataclass(frozen=True)
class Way:
    """How one request is answered. The default: correctly and at once."""

    status: int = 0  # if not 0, answer with it instead of the object
    headers: dict[str, str] = field(default_factory=dict)  # sent with ``status``
    hangs_at: int | None = None  # after this many bytes of the body; -1: before the head
    resets_at: int | None = None  # the same, for a reset of the connection
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
    """A request that was received."""

    at: float  # monotonic
    name: str
    way: Way


Script = Callable[[str], Way]


class ScriptedOrigin:
    """``script(name)`` returns how to answer a request for an object; a test may replace it at any time."""

    def __init__(self, folder: Path, script: Script = lambda name: OK) -> None:
        self.folder = folder
        self.script = script
        self.url = ""
        self.asked: list[Asked] = []
        self.held = threading.Semaphore(0)  # released when a request begins to hang
        self.gone = threading.Event()  # set at the end: threads that hang or send slowly wait for it

    def all(self, way: Way) -> None:
        """Answer every request this way from now on."""
        self.script = lambda name: way

    def first(self, count: int, way: Way) -> None:
        """Answer this many requests this way, and the others correctly."""
        left = threading.Semaphore(count)
        self.script = lambda name: way if left.acquire(blocking=False) else OK

    def ways(self, way: Way) -> list[Asked]:
        return [asked for asked in self.asked if asked.way == way]


@contextlib.contextmanager
def scripted_origin(folder: Path, script: Script = lambda name: OK) -> Iterator[ScriptedOrigin]:
    origin = ScriptedOrigin(folder, script)
    with http_server(lambda request: _answer(origin, request)) as url:
        origin.url = f"{url}/"
        try:
            yield origin
        finally:
            origin.gone.set()


def _answer(origin: ScriptedOrigin, request: Request) -> None:
    name = object_name(request)
    way = origin.script(name)
    origin.asked.append(Asked(time.monotonic(), name, way))
    path = origin.folder / name
    status = way.status or (0 if path.is_file() else 404)
    _disturb(origin, request, way, -1)
    if status:
        send_status(request, status, way.headers)
    else:
        _send(origin, request, way, send_head(request, path.read_bytes()))


def _send(origin: ScriptedOrigin, request: Request, way: Way, body: bytes) -> None:
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


def _disturb(origin: ScriptedOrigin, request: Request, way: Way, at: int) -> None:
    if way.hangs_at == at:
        origin.held.release()
        origin.gone.wait(300)
        raise ConnectionAbortedError
    if way.resets_at == at:
        # With a linger time of 0, closing sends RST in place of FIN.
        request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.connection.close()
        raise ConnectionAbortedError
