"""Clients that hold connections and give nothing: thousands of them in one process that takes little CPU.

    python -m bench.hostile_clients URL HEADS UPLOADS IDLE      until its input ends

*heads* send a byte of a head per second, *uploads* announce a shard and send a byte per second, *idle* ones send one
request, or none, and then nothing. Each that the daemon closes connects again. They come from several addresses of
loopback, since what one address may hold is bounded.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

SOURCES: Final = 8
SLICES: Final = 50  # of a second: in each, a part of the slow clients send their byte
AGAIN_MAX: Final = 10  # connections that are made again in a slice: those that the daemon closed come back at once
HEAD: Final = b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: "
PUT: Final = b"PUT /v1/shards/%s HTTP/1.1\r\nHost: x\r\nContent-Length: 8388608\r\n\r\n" % (b"a" * 64)
ASK: Final = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


class Clients:
    """All hostile clients of a process."""

    def __init__(self, address: tuple[str, int], heads: int, uploads: int, idle: int) -> None:
        self._address = address
        kinds = [HEAD] * heads + [PUT] * uploads + [ASK if at % 2 else b"" for at in range(idle)]
        self._first = kinds
        self._slow = heads + uploads
        self._socks: list[socket.socket | None] = [None] * len(kinds)
        self._numbers: dict[int, int] = {}
        self._poller = select.epoll()
        self.again = 0
        self.sent = 0  # bytes of slow clients

    def connect(self, number: int) -> None:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # no TIME_WAIT: ports are few
        sock.bind((f"127.0.1.{number % SOURCES + 1}", 0))
        with contextlib.suppress(OSError):
            sock.connect(self._address)
            sock.setblocking(False)
            sock.send(self._first[number])
        self._socks[number] = sock
        self._numbers[sock.fileno()] = number
        self._poller.register(sock.fileno(), select.EPOLLIN)

    def drip(self, part: int) -> None:
        """Have a part of the slow clients send a byte."""
        for sock in self._socks[part : self._slow : SLICES]:
            if sock is not None:
                with contextlib.suppress(OSError):
                    self.sent += sock.send(b"a")

    def notice(self, seconds: float) -> None:
        """Take what the daemon sends; connect those again that it closed."""
        deadline, made = time.monotonic() + seconds, 0
        while (left := deadline - time.monotonic()) > 0:
            for fd, _ in self._poller.poll(left, 256):
                number = self._numbers[fd]
                sock = self._socks[number]
                assert sock is not None
                with contextlib.suppress(ConnectionError):
                    if sock.recv(1 << 14):
                        continue
                if made >= AGAIN_MAX:
                    time.sleep(0.001)
                    continue
                made += 1
                self.again += 1
                self._poller.unregister(fd)
                del self._numbers[fd]
                sock.close()
                self.connect(number)

    def run(self) -> None:
        for number in range(len(self._socks)):
            self.connect(number)
            if number % 200 == 0:
                self.notice(0.01)
        print("ready", flush=True)
        part = 0
        while not select.select([sys.stdin], [], [], 0)[0]:
            self.drip(part)
            self.notice(1 / SLICES)
            part = (part + 1) % SLICES
        print(self.again, self.sent, flush=True)


def allow_files() -> None:
    """Allow this process, and those that it starts, as many open files as the system lets it."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextlib.contextmanager
def hostile(url: str, heads: int, uploads: int, idle: int) -> Iterator[list[int]]:
    """Run the clients in a process of their own.

    Once the block has ended, the list has how many connected again, and how many bytes the slow ones sent.
    """
    command = [sys.executable, "-m", "bench.hostile_clients", url, *map(str, (heads, uploads, idle))]
    told: list[int] = []
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.stdout.readline().strip() != "ready":
                raise RuntimeError("the hostile clients did not connect")
            yield told
            process.stdin.close()
            told.extend(map(int, process.stdout.readline().split()))
        finally:
            process.kill()


def main() -> None:
    allow_files()
    os.nice(10)  # on a rack they are other machines: they must not take the daemon's processor
    parts = urlsplit(sys.argv[1])
    try:
        Clients((parts.hostname or "", parts.port or 0), *map(int, sys.argv[2:])).run()
    except OSError as error:
        sys.exit(f"too few open files or ports here: {error}" if error.errno == errno.EMFILE else str(error))


if __name__ == "__main__":
    main()
