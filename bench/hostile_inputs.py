"""Inputs that would make a daemon take memory, and the bounds that docs/protocol.md gives for each (Memory)."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import numpy as np

from bench.hostile_clients import SOURCES, hostile
from bench.stream_load import UPGRADE
from quiver.digest import Digest
from quiver.wire import RANGE, RANGES_MAX, READ_REQUEST_BYTES_MAX, ReadRequest
from quiver_cacheserver.budget import HELD_MAX, Resource

if TYPE_CHECKING:
    from bench.abuse import Scale

KIB: Final = 1 << 10
MIB: Final = 1 << 20
CONNECTION_BYTES: Final = 32 * KIB
UNREAD_BYTES: Final = 384 * KIB  # of a body that its route does not read, per connection
UPLOAD_BYTES: Final = 6 * MIB
PARSED: Final = 4  # times a body's size, while its request waits
SLACK_BYTES: Final = 24 * MIB  # an interpreter's heap moves by a few
Address = tuple[str, int]


def _post(path: str, size: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode()


def _sent(address: Address, count: int, data: bytes, first: bytes = b"") -> None:
    """Send the same on many connections, and hold them all until the last one has it."""
    with contextlib.ExitStack() as stack:
        for number in range(count):
            sock = stack.enter_context(socket.socket())
            sock.settimeout(5.0)
            sock.bind((f"127.0.2.{number % SOURCES + 1}", 0))
            with contextlib.suppress(OSError):
                sock.connect(address)
                if first:
                    sock.sendall(first)
                    sock.recv(1 << 12)
                sock.settimeout(0.5)
                sock.sendall(data)


def _answered(address: Address, data: bytes) -> None:
    """Send a request by stream, and take its answer."""
    with socket.create_connection(address, 20.0) as sock:
        sock.sendall(UPGRADE)
        sock.recv(1 << 12)
        sock.sendall(struct.pack("<I", len(data)) + data)
        left = RANGES_MAX * 501
        while left > 0 and (more := len(sock.recv(MIB))):
            left -= more


def peaks(url: str, pid: int, digests: list[Digest], scale: Scale) -> dict[str, tuple[int, int]]:
    """Return for each input by how much the daemon's peak grew, and the bound."""
    parts = urlsplit(url)
    address = (parts.hostname or "", parts.port or 0)
    line = b"X: " + b"a" * 8000 + b"\r\n"
    head = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
    frame = struct.pack("<I", READ_REQUEST_BYTES_MAX) + b"QRD1" + bytes(READ_REQUEST_BYTES_MAX - 10)
    overlapping = np.zeros(RANGES_MAX, RANGE)
    overlapping["length"] = 500
    overlaps = ReadRequest(None, tuple(digests[:1]), overlapping).encode()
    deep = b"\x91" * 100_000
    many, uploads = scale.heads, HELD_MAX[Resource.UPLOADS]
    bodies = HELD_MAX[Resource.BODY_BYTES]
    connections = many * CONNECTION_BYTES
    inputs: dict[str, tuple[Callable[[], object], int]] = {
        f"{many:,} heads of 1 MiB": (lambda: _sent(address, many, head + line * 120), connections),
        f"{many:,} times four requests of 240 KiB each ahead": (
            lambda: _sent(address, many, _post("/v1/fill", 4) + b"junk" + (head + line * 30 + b"\r\n") * 4),
            connections + bodies,
        ),
        f"{many:,} times 1 MiB behind a malformed request": (
            lambda: _sent(address, many, b"\0" * MIB), connections,
        ),
        f"{many:,} bodies where none is read": (
            lambda: _sent(address, many, head + b"Content-Length: 9000000\r\n\r\n" + bytes(MIB)),
            connections + many * UNREAD_BYTES,
        ),
        f"{many:,} uploads that stop": (
            lambda: _sent(address, many, f"PUT /v1/shards/{digests[0]} HTTP/1.1\r\nHost: x\r\n".encode()
                          + b"Content-Length: 9000000\r\n\r\n" + bytes(3 * MIB)),
            connections + uploads * UPLOAD_BYTES + many * UNREAD_BYTES,
        ),
        "200 streams with all but the end of the largest request": (
            lambda: _sent(address, 200, frame, UPGRADE), bodies + 200 * CONNECTION_BYTES,
        ),
        "65,536 overlapping ranges": (lambda: _answered(address, overlaps), PARSED * len(overlaps)),
        "10⁶ ranges announced": (lambda: _sent(address, 20, _post("/v1/read", 24 * 10**6) + bytes(MIB)), 0),
        "100 MiB of JSON": (lambda: _sent(address, 20, _post("/v1/needs", 100 * MIB) + b"[1," * MIB), 0),
        "nested 10⁵ deep": (lambda: _sent(address, 20, _post("/v1/needs", len(deep)) + deep), 0),
    }  # fmt: skip
    found = {}
    for name, (attack, bound) in inputs.items():
        found[name] = (_growth(pid, attack), bound + SLACK_BYTES)

    def sockets() -> None:
        with hostile(url, scale.heads, scale.uploads, scale.idle):
            pass

    total = scale.heads + scale.uploads + scale.idle
    name = f"{total:,} slow and idle sockets"
    bound = total * CONNECTION_BYTES + uploads * UPLOAD_BYTES + SLACK_BYTES
    found[name] = (_growth(pid, sockets), bound)
    return found


def _growth(pid: int, attack: Callable[[], object]) -> int:
    before = _memory(pid, "VmRSS")
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    attack()
    return max(_memory(pid, "VmHWM") - before, 0)


def _memory(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
