"""Readers that cost little CPU: one process with many streams to a daemon (docs/protocol.md), some of which read.

A training process spends more on a batch than the daemon that serves it, and 2,000 of them do not fit on a machine of
two cores. Here the process checks each answer's head and statuses and has the kernel discard the bytes (``MSG_TRUNC``),
so that the figures are the daemon's. Tests, and the questions with real readers, check the bytes.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from bench.data import Data

BATCHES: Final = 16  # different requests; each reader begins with a different one
PIECE_BYTES: Final = 1 << 20
CONNECT_SECONDS: Final = 60.0
UPGRADE: Final = b"GET /v1/stream HTTP/1.1\r\nHost: bench\r\nConnection: Upgrade\r\nUpgrade: quiver-read\r\n\r\n"
HEAD: Final = struct.Struct("<4sIQ")


@dataclass(frozen=True)
class Request:
    """An encoded read, and the expected answer."""

    frame: bytes
    ranges: int
    payload_bytes: int


def requests_of(data: Data, batch_size: int, count: int = BATCHES) -> list[Request]:
    """Return reads of the first batches of a dataset's order, for one daemon that holds the whole dataset."""
    from quiver.manifest import Manifest
    from quiver.plan import plan_batch
    from quiver.wire import RANGE, ReadRequest

    manifest = Manifest.open(data.manifest())
    made = []
    for batch in data.batches(min(batch_size, data.count))[:count]:
        plan = plan_batch(manifest, np.asarray(batch))
        shards, which = plan.by_shard(np.arange(len(plan)))
        ranges = np.zeros(len(plan), RANGE)
        ranges["shard"], ranges["offset"], ranges["length"] = which, plan.offsets, plan.sizes
        digests = tuple(manifest.shard_digest(number) for number in shards.tolist())
        body = ReadRequest(manifest.digest, digests, ranges, 20_000).encode()
        made.append(Request(struct.pack("<I", len(body)) + body, len(plan), int(plan.sizes.sum())))
    return made


class Reader:
    """One stream that reads batch after batch."""

    def __init__(self, sock: socket.socket, requests: Sequence[Request], at: int) -> None:
        self.sock = sock
        self.bytes = 0
        self.answers = 0
        self.refused = 0
        self._requests = requests
        self._at = at
        self._head = memoryview(b"")
        self._had = 0
        self._left = 0

    def ask(self) -> None:
        self._at = (self._at + 1) % len(self._requests)
        request = self._requests[self._at]
        self._head = memoryview(bytearray(HEAD.size + request.ranges))
        self._had, self._left = 0, request.payload_bytes
        view = memoryview(request.frame)
        while view:
            try:
                view = view[self.sock.send(view) :]
            except BlockingIOError:
                select.select([], [self.sock], [])

    def take(self, buffer: bytearray) -> None:
        """Receive once, so that all streams are treated alike; at the end of a batch, request the next."""
        if self._had < len(self._head):
            self._had += self._received(self.sock.recv_into(self._head[self._had :]))
            if self._had == len(self._head):
                self._check()
        else:
            count = self._received(self.sock.recv_into(buffer, min(self._left, len(buffer)), socket.MSG_TRUNC))
            self._left -= count
            self.bytes += count
        if self._had == len(self._head) and not self._left:
            self.answers += 1
            self.ask()

    def _check(self) -> None:
        request = self._requests[self._at]
        magic, kind, size = HEAD.unpack_from(self._head)
        if magic != b"QRA1" or kind != 0 or size != request.ranges + request.payload_bytes:
            raise RuntimeError(f"an answer of kind {kind} and {size} bytes: {bytes(self._head)[:300]!r}")
        if any(self._head[HEAD.size :]):
            raise RuntimeError("not all ranges are present")

    def _received(self, count: int) -> int:
        if not count:
            raise RuntimeError("the daemon closed a stream")
        return count


def connect(url: str, count: int) -> list[socket.socket]:
    """Open streams concurrently."""
    address = urlsplit(url).hostname, urlsplit(url).port
    opened = []
    for _ in range(count):
        sock = socket.create_connection(address, CONNECT_SECONDS)
        sock.sendall(UPGRADE)
        opened.append(sock)
    for sock in opened:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += sock.recv(1)
        if not head.startswith(b"HTTP/1.1 101 "):
            raise RuntimeError(f"no stream: {head[:100]!r}")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
    return opened


def run(url: str, requests: Sequence[Request], idle: int, reading: int, seconds: float) -> dict[str, Any]:
    """Read for a while with some streams, while others are idle; return the figures of each reader."""
    opened = connect(url, idle + reading)
    readers = {sock.fileno(): Reader(sock, requests, at) for at, sock in enumerate(opened[:reading])}
    poller = select.epoll()
    for fd in readers:
        poller.register(fd, select.EPOLLIN)
    buffer = bytearray(PIECE_BYTES)

    def read_until(deadline: float) -> float:
        while (now := time.monotonic()) < deadline:
            for fd, _ in poller.poll(1.0):
                readers[fd].take(buffer)
        return now

    for reader in readers.values():
        reader.ask()
    began = read_until(time.monotonic() + min(0.5, seconds / 4))
    before = [(reader.bytes, reader.answers) for reader in readers.values()]
    took = read_until(began + seconds) - began
    told = [reader.bytes - had for reader, (had, _) in zip(readers.values(), before, strict=True)]
    answers = sum(reader.answers - had for reader, (_, had) in zip(readers.values(), before, strict=True))
    for sock in opened:
        sock.close()
    return {
        "bytes_a_second": sum(told) / took,
        "answers_a_second": answers / took,
        "evenness": min(told) / max(told) if max(told) else 0.0,
    }


def put_on_streams(
    url: str, data: Data, batch_size: int, reading: int, seconds: float, idle: int = 0
) -> dict[str, float]:
    """Call ``run`` in a process of its own."""
    command = [sys.executable, "-m", "bench.stream_load", url, str(data.folder), str(batch_size)]
    command += [str(idle), str(reading), str(seconds)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    told: dict[str, float] = json.loads(done.stdout)
    return told


@contextlib.contextmanager
def connected(url: str, count: int) -> Iterator[None]:
    """Keep this many idle streams open."""
    opened = connect(url, count)
    try:
        yield
    finally:
        for sock in opened:
            sock.close()


def main() -> None:
    import resource

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    url, folder, batch_size, idle, reading, seconds = sys.argv[1:]
    data = Data.decode(json.loads((Path(folder) / "data.json").read_text()))
    print(json.dumps(run(url, requests_of(data, int(batch_size)), int(idle), int(reading), float(seconds))))


if __name__ == "__main__":
    main()
