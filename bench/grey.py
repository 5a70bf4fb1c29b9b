"""Grey failures: how long a batch takes while one daemon of a rack is dead, stopped, silent or slow.

A rack of three daemons, all shards resident; the second is behind a proxy that misbehaves on demand (``grey_proxy``). A
reader takes batches of 64 random samples; after some seconds the fault begins, and ends later (a killed daemon stays
dead). Every fault has a rack of its own, so that none profits from what an earlier one moved.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from bench.data import Data
from bench.servers import LOOPBACK, Server, free_ports

BATCH: Final = 64
DAEMONS: Final = 3
CALM_SECONDS: Final = 4.0  # before the fault
SETTLE_SECONDS: Final = 3.0  # after which a fault is to be noticed no more
SLOWER: Final = 10  # times, of a slow daemon
FAULTS: Final = {
    "killed": "kill",
    "stopped (SIGSTOP)": "stop",
    "dripping 1 KiB/s": "drip 1024",
    "accepting and silent": "silent",
    "answering health checks only": "mute",
    "resetting midway": "reset 1000000",
    f"{SLOWER} times slower": "slow",
    "none": "pass",
}


@dataclass
class History:
    """What a reader saw: for each batch when it began, in seconds since the fault, and how long it took."""

    at: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    before: dict[str, int] = field(default_factory=dict)  # the counters when the fault began
    during: dict[str, int] = field(default_factory=dict)  # and when it ended
    fired: int = 0

    def between(self, begin: float, end: float) -> list[float]:
        return [took for at, took in zip(self.at, self.seconds, strict=True) if begin <= at < end]

    def since(self, name: str) -> int:
        """Return how much of something was counted during the fault."""
        return self.during[name] - self.before[name]


class Rack:
    """Three daemons; the second is reached through a proxy."""

    def __init__(self, servers: list[Server], urls: list[str], proxy: subprocess.Popen[str]) -> None:
        self.servers, self.urls, self._proxy = servers, urls, proxy

    def behave(self, how: str) -> int:
        assert self._proxy.stdin is not None
        assert self._proxy.stdout is not None
        self._proxy.stdin.write(how + "\n")
        self._proxy.stdin.flush()
        return int(self._proxy.stdout.readline())

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.servers[1].pid, number)


@contextlib.contextmanager
def grey_rack(folder: Path, data: Data, *flags: str) -> Iterator[Rack]:
    """Run the rack, filled."""
    from bench.load import bring_in

    folder.mkdir(parents=True)
    *ports, hidden = free_ports(DAEMONS + 1)
    urls = [f"http://{LOOPBACK}:{port}" for port in ports]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUIVER_")}
    with contextlib.ExitStack() as ending:
        command = [sys.executable, "-m", "bench.grey_proxy", str(ports[1]), str(hidden)]
        proxy = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ending.callback(proxy.wait)
        ending.callback(proxy.kill)
        assert proxy.stdout is not None
        proxy.stdout.readline()
        servers = []
        for at, port in enumerate(ports):
            node = folder / f"node{at}"
            node.mkdir()
            command = [sys.executable, "-m", "quiver_cacheserver.cli", "--data-dir", str(node / "data")]
            command += ["--listen", f"{LOOPBACK}:{hidden if at == 1 else port}", "--advertise", urls[at]]
            command += ["--capacity", str(4 * data.total_bytes + (256 << 20)), "--peers", ",".join(urls)]
            command += ["--origin", str(data.files()), "--drain-seconds", "0", *flags]
            servers.append(ending.enter_context(Server(command, node / "log", environment=environment)))
        for at, server in enumerate(servers):
            server.wait_for_port(hidden if at == 1 else ports[at])
        bring_in(urls[0], str(data.manifest()))
        yield Rack(servers, urls, proxy)


def read(rack: Rack, data: Data, fault: str, fault_seconds: float, after_seconds: float = 5.0) -> History:
    """Read batches before, during and after a fault: ``kill``, ``stop``, ``slow``, or a behaviour of the proxy."""
    from quiver_client import Dataset

    history = History()
    dataset = Dataset(str(data.manifest()), cache=rack.urls[0], fields=["data"])
    began_at = math.inf
    ended = False
    try:
        begin_at = time.monotonic() + CALM_SECONDS
        for numbers in _batches(data.count):
            now = time.monotonic()
            if math.isinf(began_at) and now >= begin_at:
                history.before = dict(dataset.stats())
                _begin(rack, fault, data, history)
                began_at = time.monotonic()
                history.at = [at - began_at for at in history.at]
            if not ended and now >= began_at + fault_seconds:
                history.fired = _finish(rack, fault)
                history.during = dict(dataset.stats())
                ended = True
            if now >= began_at + fault_seconds + after_seconds:
                break
            taken = time.monotonic()
            samples = dataset.__getitems__(numbers)
            history.seconds.append(time.monotonic() - taken)
            history.at.append(taken - (0.0 if math.isinf(began_at) else began_at))
            assert len(samples) == len(numbers)
    finally:
        if fault == "stop":
            rack.signal(signal.SIGCONT)
        dataset.close()
    return history


def _begin(rack: Rack, fault: str, data: Data, history: History) -> None:
    if fault == "kill":
        rack.signal(signal.SIGKILL)
    elif fault == "stop":
        rack.signal(signal.SIGSTOP)
    elif fault == "slow":  # half of it before the first byte, half by the rate
        seconds = SLOWER / 2 * float(np.median(history.seconds))
        rate = BATCH * data.sample_bytes / DAEMONS / seconds
        rack.behave(f"slow {rate} {seconds}")
    else:
        rack.behave(fault)


def _finish(rack: Rack, fault: str) -> int:
    """End a fault; return how often it fired."""
    if fault == "stop":
        rack.signal(signal.SIGCONT)
    return 1 if fault in ("kill", "stop") else rack.behave("pass")


def _batches(count: int) -> Iterator[list[int]]:
    rng = np.random.default_rng(5)
    while True:
        order = rng.permutation(count).tolist()
        for at in range(0, count - BATCH + 1, BATCH):
            yield order[at : at + BATCH]


def summary(history: History, fault_seconds: float) -> dict[str, float]:
    """Return the figures of one round; latencies in ms."""
    calm, during = history.between(-math.inf, 0), history.between(0, fault_seconds)
    settled = history.between(min(SETTLE_SECONDS, fault_seconds / 2), fault_seconds) or during
    read_bytes = sum(history.since(f"bytes_{tier}") for tier in ("host", "rack", "origin"))
    return {
        "healthy_p50": 1e3 * float(np.percentile(calm, 50)),
        "healthy_p99": 1e3 * float(np.percentile(calm, 99)),
        "longest": 1e3 * max(during),
        "over_100_ms": sum(took > 0.1 for took in during),
        "settled_p50": 1e3 * float(np.percentile(settled, 50)),
        "settled_p99": 1e3 * float(np.percentile(settled, 99)),
        "longest_after": 1e3 * max(history.between(fault_seconds, math.inf), default=0.0),
        "batches": len(during),
        "hedges": history.since("hedges"),
        "extra_share": history.since("bytes_hedged") / max(read_bytes, 1),
        "origin_bytes": history.since("bytes_origin"),
        "fired": history.fired,
    }
