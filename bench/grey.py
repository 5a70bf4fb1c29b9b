"""Grey failures: how long a batch takes while one daemon of a rack is dead, stopped, silent or slow.

A rack of three daemons, all shards resident; the second is behind a proxy that misbehaves on demand (``grey_proxy``). A
reader takes batches of 64 random samples; after a second the fault begins, and ends later (a killed daemon stays dead).
Every row runs in a rack of its own, so that no row profits from what an earlier one moved.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.data import Data
from bench.servers import LOOPBACK, Server, free_ports

BATCH: Final = 64
DAEMONS: Final = 3
CALM_SECONDS: Final = 3.0  # before the fault
_START_SECONDS: Final = 30.0


@dataclass
class History:
    """What a reader saw: for each batch when it began, in seconds since the fault, and how long it took."""

    at: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    stats: dict[str, int] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)  # the counters when the fault began
    fired: int = 0

    def between(self, begin: float, end: float) -> list[float]:
        return [took for at, took in zip(self.at, self.seconds, strict=True) if begin <= at < end]

    def since(self, name: str) -> int:
        return self.stats.get(name, 0) - self.before.get(name, 0)


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


def read(
    rack: Rack, data: Data, fault: str, fault_seconds: float, after_seconds: float, *, workers: int = 0
) -> History:
    """Read batches before, during and after a fault: ``kill``, ``stop``, or a behaviour of the proxy."""
    from quiver_client import Dataset

    history = History()
    dataset = Dataset(str(data.manifest()), cache=rack.urls[0], fields=["data"])
    try:
        begin = time.monotonic() + CALM_SECONDS
        end = begin + fault_seconds
        state = "calm"
        for numbers in _batches(data.count):
            now = time.monotonic()
            if state == "calm" and now >= begin:
                history.before = dict(dataset.stats())
                _begin(rack, fault)
                begin = now
                state = "fault"
            if state == "fault" and now >= end:
                history.fired = _finish(rack, fault)
                state = "after"
            if now >= end + after_seconds:
                break
            taken = time.monotonic()
            samples = dataset.__getitems__(numbers)
            history.at.append(taken - begin)
            history.seconds.append(time.monotonic() - taken)
            assert len(samples) == len(numbers)
        history.stats = dict(dataset.stats())
    finally:
        if fault == "stop":
            rack.signal(signal.SIGCONT)
        dataset.close()
    return history


def _begin(rack: Rack, fault: str) -> None:
    if fault == "kill":
        rack.signal(signal.SIGKILL)
    elif fault == "stop":
        rack.signal(signal.SIGSTOP)
    else:
        rack.behave(fault)


def _finish(rack: Rack, fault: str) -> int:
    if fault == "kill":
        return 1
    if fault == "stop":
        rack.signal(signal.SIGCONT)
        return 1
    return rack.behave("pass")


def _batches(count: int) -> Iterator[list[int]]:
    rng = np.random.default_rng(5)
    while True:
        order = rng.permutation(count).tolist()
        for at in range(0, count - BATCH + 1, BATCH):
            yield order[at : at + BATCH]


def summary(history: History, fault_seconds: float) -> dict[str, Any]:
    calm = history.between(-60, 0)
    during = history.between(0, fault_seconds)
    settled = history.between(min(5.0, fault_seconds / 2), fault_seconds) or during

    def ms(value: float) -> float:
        return round(value * 1000, 1)

    return {
        "healthy p50/p99 ms": [ms(float(np.percentile(calm, q))) for q in (50, 99)],
        "longest ms": ms(max(during)),
        "over 1 s": sum(took > 1 for took in during),
        "over 0.1 s": sum(took > 0.1 for took in during),
        "p50/p99 ms": [ms(float(np.percentile(during, q))) for q in (50, 99)],
        "settled p50/p99 ms": [ms(float(np.percentile(settled, q))) for q in (50, 99)],
        "batches": len(during),
        "after: longest ms": ms(max(history.between(fault_seconds, 1e9), default=0.0)),
        **{name: history.since(name) for name in history.stats if history.since(name)},
        "fired": history.fired,
    }


FAULTS: Final = {
    "none": "pass", "kill": "kill", "stop": "stop", "drip": "drip 1024", "slow": "slow 40e6 0.03",
    "silent": "silent", "mute": "mute", "reset": "reset 1000000",
}  # fmt: skip


if __name__ == "__main__":
    import tempfile

    from bench.data import make_data

    with tempfile.TemporaryDirectory(prefix="quiver-grey-") as scratch:
        data = make_data(Path(scratch) / "data", "blobs", int(os.environ.get("SAMPLES", "2560")), 110_000)
        for name in sys.argv[2:] or FAULTS:
            with grey_rack(Path(scratch) / f"rack-{name}", data) as rack:
                seconds = float(sys.argv[1])
                history = read(rack, data, FAULTS[name], seconds, 5.0)
                print(name, json.dumps(summary(history, seconds)), flush=True)
