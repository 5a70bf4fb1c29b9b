"""Mutated HTTP and stream frames against a real daemon over TCP, with the oracle against desynchronisation.

What the daemon's own parsers make of bytes the other targets try by the hundred thousand; this one tries the whole:
aiohttp's parser, connections, upgrades and streams. A finding is a request that is answered out of turn, a failure of
the daemon, a daemon that ends, hangs or grows, or that holds something when all connections are closed.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import tempfile
import time
from pathlib import Path
from typing import Final

from quiver.wire import ReadRequest
from tests.fuzz.kernel_targets import _ranges
from tests.fuzz.mutate import Mutator
from tests.fuzz.run import LEAK_BYTES, Outcome
from tests.support.daemon import FreshDaemon
from tests.support.hostile_http import CANARY, END, MESSAGES, PROBE, SHARDS, UPGRADE, complaint
from tests.support.waiting import until

NAME: Final = "network"
MESSAGE_BYTES_MAX: Final = 16 << 10
_READ: Final = ReadRequest(None, (PROBE,), _ranges((0, 0, 10))).encode()
_FRAMES: Final = UPGRADE + END + (struct.pack("<I", len(_READ)) + _READ) * 2


def run(seed: int, seconds: float) -> Outcome:
    """Try mutated messages for so long."""
    outcome = Outcome(NAME)
    began = time.monotonic()
    corpus = [*(message[:MESSAGE_BYTES_MAX] for message in MESSAGES.values()), *[_FRAMES] * 10]
    mutator = Mutator(corpus, seed, MESSAGE_BYTES_MAX)
    with tempfile.TemporaryDirectory(prefix="quiver-fuzz-") as folder, FreshDaemon(Path(folder) / "data") as daemon:
        for digest, data in SHARDS.items():
            daemon.ask("PUT", f"/v1/shards/{digest}", data)
        before = _memory(daemon)
        while time.monotonic() - began < seconds and not outcome.findings:
            message = mutator.next()
            outcome.messages += 1
            try:
                why = complaint(daemon.address, message) if _is_one_request(message) else _only_sent(daemon, message)
            except TimeoutError:
                why = "hang: no answer, and no end"
            except OSError as error:
                why = f"death: the daemon does not answer: {error}"
            if why:
                outcome.findings.append((why, message.hex()))
        with contextlib.suppress(OSError):
            outcome.findings += _left_behind(daemon, before)
        outcome.peak_bytes = max(_memory(daemon, "VmHWM") - before, 0)
    outcome.seconds = time.monotonic() - began
    return outcome


def _is_one_request(message: bytes) -> bool:
    """Whether the oracle can count: a mutation may have made two honest requests of one, or a HEAD, or a stream."""
    return (
        message.count(b"HTTP/1") == 1
        and str(CANARY).encode() not in message
        and b"quiver-read" not in message
        and not re.search(rb"(?i)head|connect|upgrade", message)
        and re.match(rb"[A-Z]+ ", message) is not None
        and b"\r\n\r\n" in message
        and not message.partition(b"\r\n\r\n")[2]
    )


def _only_sent(daemon: FreshDaemon, message: bytes) -> str:
    """Send bytes, and take what comes until the connection ends: only the daemon's health counts."""
    with socket.create_connection(daemon.address, timeout=20) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(message)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
    return ""


def _left_behind(daemon: FreshDaemon, before: int) -> list[tuple[str, str]]:
    found = []
    try:
        until(lambda: daemon.metric("quiver_under_way") == 1)  # the connection that asks
    except AssertionError:
        found.append(("leak: something is under way when nobody is connected", ""))
    if _memory(daemon) - before > LEAK_BYTES:
        found.append((f"leak: the daemon grew by {(_memory(daemon) - before) >> 20} MiB", ""))
    if re.search("ERROR|Traceback", daemon.log):
        found.append((f"crash: {daemon.log[-2000:]}", ""))
    return found


def _memory(daemon: FreshDaemon, name: str = "VmRSS") -> int:
    assert daemon.process is not None
    lines = Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
