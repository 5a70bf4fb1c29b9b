"""A scripted origin: HTTP objects with ranges, plain or as S3 answers, whose faults are set by object and moment.

It logs each request and the bytes that it sent, so that a test can count the origin reads of each shard: a shard
was read once if each of its bytes was sent once.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from quiver.manifest import Manifest
from tests.support.http_server import Request, http_server, object_name

BUCKET: Final = "chaos"


@dataclass(frozen=True)
class Fault:
    """How requests are answered wrongly. ``chance`` is drawn for each request, from the seed."""

    name: str
    status: int = 0  # instead of the object
    headers: dict[str, str] = field(default_factory=dict)
    bytes_per_second: int = 0
    truncated_at: int | None = None  # the connection ends after so many bytes of the body
    reset_at: int | None = None
    hangs_at: int | None = None
    offset: int = 0  # another range is sent than was asked for
    says_offset: bool = False  # and Content-Range says so
    changed: bool = False  # other bytes of the same length, and another ETag
    chance: float = 1.0


def throttle(retry_after: str = "1", status: int = 429, **more: Any) -> Fault:
    return Fault(f"{status}", status, {"Retry-After": retry_after} if retry_after else {}, **more)


SLOW: Final = Fault("slow", bytes_per_second=32 << 10)
TRUNCATED: Final = Fault("truncated", truncated_at=100)
RESET: Final = Fault("reset", reset_at=100)
HANGS: Final = Fault("hangs", hangs_at=100)
CHANGED: Final = Fault("changed", changed=True)
GONE: Final = Fault("gone", 404)
WRONG_RANGE: Final = Fault("wrong range", offset=7)
SAID_WRONG_RANGE: Final = Fault("said wrong range", offset=7, says_offset=True)
WHOLE: Final = Fault("whole object", offset=-1)  # a server that ignores Range: 200 and everything


@dataclass
class Asked:
    """A request, and what was sent for it so far."""

    at: float  # monotonic
    object: str
    fault: str
    start: int = 0
    sent_bytes: int = 0  # counted before they are sent, so that a reader that has them finds them counted


Rule = Callable[[str, int], Fault | None]
"""Object name and the number of the request → how to answer wrongly, or ``None``."""


class ChaosOrigin:
    """One origin. ``rule`` decides on faults and may be replaced at any time."""

    def __init__(self, folder: Path, seed: int, *, s3: bool) -> None:
        self.folder = folder
        self.endpoint = ""
        self.s3 = s3
        self.rule: Rule = lambda name, number: None
        self.asked: list[Asked] = []
        self.fired: Counter[str] = Counter()
        self.now = 0  # requests being answered
        self.most_at_once = 0
        self.gone = threading.Event()
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._chance = np.random.default_rng(seed)

    @property
    def base(self) -> str:
        """The base URL for a manifest."""
        return f"s3://{BUCKET}/" if self.s3 else f"{self.endpoint}/"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to read it."""
        return (
            {
                "AWS_ENDPOINT_URL": self.endpoint,
                "AWS_ACCESS_KEY_ID": "AKIDCHAOS",
                "AWS_SECRET_ACCESS_KEY": "chaos-secret-of-s3",
                "AWS_REGION": "us-east-1",
                "AWS_ALLOW_HTTP": "true",
            }
            if self.s3
            else {}
        )

    # -- faults -------------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        self.rule = lambda name, number: None

    def all(self, fault: Fault) -> None:
        self.rule = lambda name, number: fault

    def first(self, count: int, fault: Fault) -> None:
        """Answer so many of the next requests wrongly."""
        left = threading.Semaphore(count)
        self.rule = lambda name, number: fault if left.acquire(blocking=False) else None

    def of(self, objects: set[str], fault: Fault) -> None:
        self.rule = lambda name, number: fault if name in objects else None

    # -- what was read ------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        with self._lock:
            self.asked.clear()

    def sent_bytes(self) -> int:
        return sum(asked.sent_bytes for asked in list(self.asked))

    def reads_per_shard(self, manifest: Manifest) -> dict[int, float]:
        """Return for each shard how many times its bytes were sent. Of a dataset with one sample per object."""
        sent: defaultdict[str, int] = defaultdict(int)
        for asked in list(self.asked):
            sent[asked.object] += asked.sent_bytes
        found = {}
        keys = {int(blob): manifest.key(row) for row, blob in enumerate(manifest.tables.blob_of.tolist())}
        for shard in range(manifest.shard_count):
            objects = [keys[int(blob)] for blob in manifest.shard_blobs(shard)]
            size = sum((self.folder / name).stat().st_size for name in objects)
            found[shard] = sum(sent[name] for name in objects) / size
        return found

    # -- answering ----------------------------------------------------------------------------------------------------

    def answer(self, request: Request) -> None:
        name = object_name(request)
        if self.s3:
            name = name.removeprefix(f"{BUCKET}/")
        if name and "list-type" in (urlsplit(request.path).query or ""):
            name = ""
        with self._lock:
            self.now += 1
            self.most_at_once = max(self.most_at_once, self.now)
            fault = self.rule(name, len(self.asked)) if name else None
            if fault is not None and fault.chance < 1 and self._chance.random() >= fault.chance:
                fault = None
            if fault is not None:
                self.fired[fault.name] += 1
            asked = Asked(time.monotonic(), name, fault.name if fault else "")
            self.asked.append(asked)
        try:
            data = self._read(name)
            if fault is not None and fault.status:
                self._refuse(request, fault.status, fault.headers)
            elif data is None:
                self._list(request) if self.s3 and not name else self._refuse(request, 404, {})
            else:
                self._send(request, data, fault or Fault("none"), asked)
        finally:
            with self._lock:
                self.now -= 1

    def _read(self, name: str) -> bytes | None:
        if name not in self._objects:
            path = self.folder / name
            if not name or not path.is_file():
                return None
            self._objects[name] = path.read_bytes()
        return self._objects[name]

    def _refuse(self, request: Request, status: int, headers: dict[str, str]) -> None:
        code = {404: "NoSuchKey", 503: "SlowDown", 429: "TooManyRequests"}.get(status, "InternalError")
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        body = body if self.s3 and request.command == "GET" else b""
        request.send_response(status)
        for field_name, value in {"Content-Length": str(len(body)), **headers}.items():
            request.send_header(field_name, value)
        request.end_headers()
        request.wfile.write(body)

    def _list(self, request: Request) -> None:
        body = (
            f"<?xml version='1.0'?><ListBucketResult><Name>{BUCKET}</Name><Prefix></Prefix><KeyCount>0</KeyCount>"
            "<MaxKeys>1</MaxKeys><IsTruncated>false</IsTruncated></ListBucketResult>"
        ).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/xml")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body if request.command == "GET" else b"")

    def _send(self, request: Request, data: bytes, fault: Fault, asked: Asked) -> None:
        if fault.changed:
            data = bytes(len(data))
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        ranged = found is not None and fault.offset != -1
        start, end = (int(found[1]), min(int(found[2]) + 1, len(data))) if found and ranged else (0, len(data))
        body = data[start:end]
        asked.start = start
        said = start
        if fault.offset > 0:  # rotated, so that the length stays right
            body = data[start + fault.offset : end + fault.offset] + data[: max(end + fault.offset - len(data), 0)]
            body = (body + bytes(end - start))[: end - start]
            said += fault.offset if fault.says_offset else 0
        request.send_response(206 if ranged else 200)
        if ranged:
            request.send_header("Content-Range", f"bytes {said}-{said + end - start - 1}/{len(data)}")
        request.send_header("Content-Length", str(len(body)))
        request.send_header("ETag", f'"{"changed" if fault.changed else len(data)}"')
        request.send_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
        request.send_header("Accept-Ranges", "bytes")
        request.end_headers()
        if request.command == "GET":
            self._body(request, body, fault, asked)

    def _body(self, request: Request, body: bytes, fault: Fault, asked: Asked) -> None:
        stops = [at for at in (fault.truncated_at, fault.reset_at, fault.hangs_at) if at is not None]
        step = max(fault.bytes_per_second // 20, 1) if fault.bytes_per_second else len(body)
        step = min([step or 1, *stops])
        for at in range(0, len(body), step):
            if at in (fault.truncated_at, fault.reset_at, fault.hangs_at):
                self._stop(request, fault, at)
            asked.sent_bytes += len(body[at : at + step])
            request.wfile.write(body[at : at + step])
            request.wfile.flush()
            if fault.bytes_per_second and self.gone.wait(0.05):
                raise ConnectionAbortedError

    def _stop(self, request: Request, fault: Fault, at: int) -> None:
        if fault.hangs_at == at:
            self.gone.wait(300)
        elif fault.reset_at == at:  # with a linger time of 0, closing sends RST in place of FIN
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.connection.close()
        raise ConnectionAbortedError


@contextlib.contextmanager
def chaos_origin(folder: Path, seed: int = 0, *, s3: bool = False) -> Iterator[ChaosOrigin]:
    origin = ChaosOrigin(folder, seed, s3=s3)
    with http_server(origin.answer) as url:
        origin.endpoint = url
        try:
            yield origin
        finally:
            origin.gone.set()
