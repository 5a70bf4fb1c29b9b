"""What hostile clients and overload cost honest readers of one daemon, and how much memory they make it take.

Three questions, each with its answer from one run:

* honest p99: reads at a steady pace, alone and beside slow heads, slow uploads and idle sockets, in turn. A read that
  comes late counts from when it was due.
* goodput: the most that readers get who ask one after another, and what they get within a deadline when reads are due
  twice as often. A reader that is refused waits as ``Retry-After`` says; a read that finds no free reader is lost.
* memory: the daemon's peak while it is sent each of a list of hostile inputs, beside its bound (docs/protocol.md).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import statistics
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.hostile_clients import allow_files, hostile
from bench.servers import Server, quiver_rack
from bench.stream_load import HEAD, connect
from quiver.digest import Digest
from quiver.peer import PeerClient
from quiver.shard import encode_table, name_of
from quiver.wire import RANGE, ReadRequest

MIB: Final = 1 << 20
SHARDS, SAMPLES, SAMPLE_BYTES = 8, 64, 128 << 10
RANGES, RANGE_BYTES = 32, 16 << 10  # of a read: 512 KiB
DEADLINE_SECONDS: Final = 5.0  # as long as a reader waits on the path of a batch
READERS_AT_PEAK: Final = 16  # four saturate two cores
READERS_MAX: Final = 512  # when reads are due, whether or not the last one was answered


@dataclass(frozen=True)
class Scale:
    """How large a run is."""

    heads: int = 1000
    uploads: int = 1000
    idle: int = 5000
    rounds: int = 5
    seconds: float = 6.0
    pace: float = 150.0  # honest reads per second


QUICK: Final = Scale(40, 40, 100, 2, 1.0, 50.0)


@contextlib.contextmanager
def daemon_with_shards(folder: Path) -> Iterator[tuple[str, Server, list[Digest]]]:
    """Run a daemon that holds a few shards."""
    rng = np.random.default_rng(0)
    with quiver_rack(folder, folder, 4 << 30, count=1) as (urls, servers):
        peer = PeerClient(urls[0])
        digests = []
        for _ in range(SHARDS):
            samples = [rng.bytes(SAMPLE_BYTES) for _ in range(SAMPLES)]
            rows = np.array([list(Digest.of(sample)) for sample in samples], np.uint8)
            table = encode_table(rows, np.full(SAMPLES, SAMPLE_BYTES, np.uint64))
            digests.append(name_of(table))
            peer.put_shard(digests[-1], b"".join(samples) + table)
        peer.close()
        yield urls[0], servers[0], digests


def a_read(digests: list[Digest], seed: int) -> bytes:
    """Return the body of a read of random ranges."""
    rng = np.random.default_rng(seed)
    ranges = np.zeros(RANGES, RANGE)
    ranges["shard"] = rng.integers(0, len(digests), RANGES)
    ranges["offset"] = rng.integers(0, SAMPLES * SAMPLE_BYTES - RANGE_BYTES, RANGES)
    ranges["length"] = RANGE_BYTES
    return ReadRequest(None, tuple(digests), ranges).encode()


# -- honest p99 -------------------------------------------------------------------------------------------------------


def latencies(url: str, digests: list[Digest], pace: float, seconds: float) -> list[float]:
    """Read at a steady pace on one stream; return how long each read took from when it was due."""
    [sock] = connect(url, 1)
    sock.setblocking(True)
    frames = [struct.pack("<I", len(body)) + body for body in (a_read(digests, seed) for seed in range(16))]
    buffer, took, number = bytearray(RANGES * RANGE_BYTES + 4096), [], 0
    began = time.monotonic()
    with contextlib.closing(sock):
        while (due := began + number / pace) < began + seconds:
            time.sleep(max(due - time.monotonic(), 0.0))
            sock.sendall(frames[number % len(frames)])
            left = HEAD.size + RANGES * (RANGE_BYTES + 1)
            while left:
                count = sock.recv_into(buffer, min(left, len(buffer)))
                if not count:
                    raise RuntimeError("the daemon closed an honest stream")
                left -= count
            took.append(time.monotonic() - due)
            number += 1
    return took


def honest_p99(url: str, pid: int, digests: list[Digest], scale: Scale) -> dict[str, Any]:
    """Measure alone and abused in turn."""
    rounds: list[dict[str, float]] = []
    again = dripped = 0
    latencies(url, digests, scale.pace, scale.seconds / 3)  # everything is mapped and compiled
    for number in range(scale.rounds):
        told: dict[str, float] = {}
        for condition in ("alone", "abused") if number % 2 else ("abused", "alone"):
            before, since = _cpu_seconds(pid), time.monotonic()
            if condition == "alone":
                took = latencies(url, digests, scale.pace, scale.seconds)
            else:
                with hostile(url, scale.heads, scale.uploads, scale.idle) as sent:
                    took = latencies(url, digests, scale.pace, scale.seconds)
                again, dripped = again + sent[0], dripped + sent[1]
            told[f"{condition}_cpu"] = (_cpu_seconds(pid) - before) / (time.monotonic() - since)
            told[f"{condition}_p99_ms"] = float(np.quantile(took, 0.99)) * 1000
            told[f"{condition}_p50_ms"] = float(np.quantile(took, 0.5)) * 1000
        rounds.append(told)
    median = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    return {
        **median,
        "ratio_of_p99": statistics.median(each["abused_p99_ms"] / each["alone_p99_ms"] for each in rounds),
        "rounds": rounds,
        "closed_and_connected_again": again,
        "bytes_of_slow_clients": dripped,
    }


# -- goodput ----------------------------------------------------------------------------------------------------------


class _Reader:
    """A stream with at most one read under way."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.left = -1  # bytes of the answer that are to come; -1: its head is not complete
        self.head = b""
        self.due = 0.0
        self.refused_until = 0.0

    def ask(self, frame: bytes, due: float) -> None:
        self.left, self.head, self.due = -1, b"", due
        self.sock.sendall(frame)

    def take(self, buffer: bytearray) -> str:
        """Receive once; return ``done``, ``refused``, or nothing yet."""
        if self.left < 0:
            self.head += self.sock.recv(HEAD.size - len(self.head))
            if len(self.head) < HEAD.size:
                return ""
            _, kind, size = HEAD.unpack(self.head)
            if kind:
                told = json.loads(self.sock.recv(size, socket.MSG_WAITALL))
                self.refused_until = time.monotonic() + told["retry_after_seconds"]
                return "refused"
            self.left = size
            return ""
        count = self.sock.recv_into(buffer, min(self.left, len(buffer)), socket.MSG_TRUNC)
        if not count:
            raise RuntimeError("the daemon closed a stream")
        self.left -= count
        return "" if self.left else "done"


def goodput(url: str, digests: list[Digest], readers: int, seconds: float, rate: float = 0.0) -> dict[str, float]:
    """Return reads per second that were answered in time.

    ``rate``: reads that are due per second, spread evenly; 0: each reader asks as soon as it has its answer.
    """
    streams = {sock.fileno(): _Reader(sock) for sock in connect(url, readers)}
    frames = [struct.pack("<I", len(body)) + body for body in (a_read(digests, seed) for seed in range(16))]
    poller, buffer, free = select.epoll(), bytearray(MIB), list(streams.values())
    counts = {"done": 0, "refused": 0, "late": 0, "lost": 0}
    for fd, reader in streams.items():
        reader.sock.setblocking(True)
        poller.register(fd, select.EPOLLIN)
    total = 0  # answers, with those before the measured time
    began, warm, due = time.monotonic(), min(1.0, seconds / 4), 0
    ends, started = began + warm + seconds, 0.0
    while (now := time.monotonic()) < ends:
        if not started and now - began >= warm:
            started = now
            counts = dict.fromkeys(counts, 0)
        wanted = int((now - began) * rate) - due if rate else len(free)
        for _ in range(wanted):
            due += 1
            ready = next((at for at, reader in enumerate(free[:4]) if reader.refused_until <= now), None)
            if ready is None:
                counts["lost"] += 1
            else:
                free.pop(ready).ask(frames[due % len(frames)], now)
        for fd, _ in poller.poll(0.002 if rate else 0.1, 64):
            reader = streams[fd]
            outcome = reader.take(buffer)
            if outcome:
                total += outcome == "done"
                late = outcome == "done" and time.monotonic() - reader.due > DEADLINE_SECONDS
                counts["late" if late else outcome] += 1
                free.append(reader)
    for reader in streams.values():
        reader.sock.close()
    return {name: count / (ends - started) for name, count in counts.items()} | {"all": float(total)}


def overload(url: str, pid: int, digests: list[Digest], scale: Scale) -> dict[str, Any]:
    """Measure the most that readers get, and what is left of it when twice as much is due, in turn.

    Also per CPU second of the daemon, which another program on the machine changes less.
    """
    rounds = []
    for _ in range(scale.rounds):
        told: dict[str, float] = {}
        for name in ("peak", "twice"):
            rate, readers = (2 * told["peak"], READERS_MAX) if name == "twice" else (0.0, READERS_AT_PEAK)
            before = _cpu_seconds(pid)
            counts = goodput(url, digests, readers, scale.seconds / 2, rate)
            told[name] = counts["done"]
            told[f"{name}_per_cpu_second"] = counts["all"] / (_cpu_seconds(pid) - before)
            told.update({f"{name}_{what}": counts[what] for what in ("late", "lost", "refused")})
        rounds.append(told)
    return {
        "ratio": statistics.median(each["twice"] / each["peak"] for each in rounds),
        "ratio_per_cpu_second": statistics.median(
            each["twice_per_cpu_second"] / each["peak_per_cpu_second"] for each in rounds
        ),
        "rounds": rounds,
    }


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- all --------------------------------------------------------------------------------------------------------------


def measured(folder: Path, scale: Scale) -> dict[str, Any]:
    """Answer all three questions."""
    from bench.hostile_inputs import peaks

    allow_files()
    with daemon_with_shards(folder) as (url, server, digests):
        told = {
            "honest_p99": honest_p99(url, server.pid, digests, scale),
            "goodput": overload(url, server.pid, digests, scale),
            "memory": peaks(url, server.pid, digests, scale),
        }
        if "Traceback" in server.log:
            raise RuntimeError(server.log[-2000:])
    return told


def lines(told: dict[str, Any], scale: Scale) -> Iterator[str]:
    """Yield what docs/reliability.md says."""
    p99, good = told["honest_p99"], told["goodput"]
    yield (
        f"{scale.heads:,} slow heads, {scale.uploads:,} slow uploads and {scale.idle:,} idle sockets: honest p99"
        f" {p99['abused_p99_ms']:.1f} ms, alone {p99['alone_p99_ms']:.1f} ms: {p99['ratio_of_p99']:.2f} times"
    )
    yield (
        f"  p50 {p99['abused_p50_ms']:.1f} and {p99['alone_p50_ms']:.1f} ms; the daemon takes"
        f" {p99['abused_cpu']:.2f} and {p99['alone_cpu']:.2f} of a processor;"
        f" the slow clients sent {p99['bytes_of_slow_clients']:,} bytes,"
        f" {p99['closed_and_connected_again']:,} connected again"
    )
    yield (
        f"twice the load that saturates: goodput {good['ratio']:.0%} of the peak,"
        f" {good['ratio_per_cpu_second']:.0%} per CPU second of the daemon"
    )
    for name, (peak, bound) in told["memory"].items():
        yield f"memory, {name}: +{peak / MIB:.0f} MiB of {bound / MIB:,.0f} MiB"
