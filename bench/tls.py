"""What TLS and verification cost: the same reads of one daemon, plain and through TLS, verified in each way.

    python -m bench tls

One process reads batches of a dataset that a daemon holds: one round of each way, then the next round. Printed
are medians over the rounds: throughput, and the CPU of reader and daemon per gigabyte, which other work on the machine
disturbs less. Handshakes are counted one after the other, each on a new connection with a request for ``/healthz``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.data import Data, make_data
from bench.servers import Server, quiver_rack

WAYS: Final = (
    ("plain", "off"),
    ("plain", "fast"),
    ("plain", "auto"),
    ("plain", "full"),
    ("TLS", "off"),
    ("TLS", "auto"),
    ("TLS", "full"),
)
SIZES: Final = ((110_000, 256, 96 << 20), (4_096, 1_024, 32 << 20))  # of samples, batches, the dataset
REPEATS_MAX: Final = 6
PASSED_OVER_SECONDS: Final = 6.0
CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Reading:
    """The median of one way of reading."""

    sample_bytes: int
    carrier: str
    verify: str
    gigabytes_per_second: float
    reader_cpu_seconds_per_gigabyte: float
    daemon_cpu_seconds_per_gigabyte: float


@dataclass(frozen=True)
class Handshakes:
    """New connections, each with one small request."""

    carrier: str
    milliseconds: float
    reader_cpu_milliseconds: float
    daemon_cpu_milliseconds: float


def measure(folder: Path, *, rounds: int, seconds: float, quick: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Return what the command prints, as JSON would have it."""
    readings: list[Reading] = []
    handshakes: list[Handshakes] = []
    for sample_bytes, batch_size, total_bytes in SIZES:
        count = (8 << 20 if quick else total_bytes) // sample_bytes
        data = make_data(folder / str(sample_bytes), "blobs", count, sample_bytes)
        with _daemons(folder / f"rack{sample_bytes}", data) as daemons:
            readings += _readings(data, sample_bytes, min(batch_size, count), daemons, rounds, seconds)
            if not handshakes:
                handshakes = [_handshakes(carrier, *daemons[carrier], 20 if quick else 500) for carrier in daemons]
    return {"readings": [asdict(it) for it in readings], "handshakes": [asdict(it) for it in handshakes]}


def show(measured: dict[str, list[dict[str, Any]]], console: Console) -> None:
    table = Table("sample", "carrier", "verify", "GB/s", "÷ plain fast", "reader CPU s/GB", "daemon CPU s/GB")
    base: dict[int, float] = {}
    for it in measured["readings"]:
        if (it["carrier"], it["verify"]) == ("plain", "fast"):
            base[it["sample_bytes"]] = it["gigabytes_per_second"]
    for it in measured["readings"]:
        cpu = it["reader_cpu_seconds_per_gigabyte"], it["daemon_cpu_seconds_per_gigabyte"]
        rate = it["gigabytes_per_second"]
        row = [str(it["sample_bytes"]), it["carrier"], it["verify"], f"{rate:.2f}"]
        table.add_row(*row, f"{rate / base[it['sample_bytes']]:.2f}", *(f"{value:.2f}" for value in cpu))
    console.print(table)
    table = Table("new connection", "ms", "reader CPU ms", "daemon CPU ms")
    for it in measured["handshakes"]:
        names = ("milliseconds", "reader_cpu_milliseconds", "daemon_cpu_milliseconds")
        table.add_row(it["carrier"], *(f"{it[name]:.2f}" for name in names))
    console.print(table)


@contextmanager
def _daemons(folder: Path, data: Data) -> Iterator[dict[str, tuple[str, Server]]]:
    """Run a plain daemon and one with TLS, whose client this process becomes."""
    from quiver.transport.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE
    from quiver_client.certificates import Authority

    folder.mkdir()
    authority = Authority.new("a bench's authority", 1)
    pairs = {"node": authority.node("bench", ["127.0.0.1"], 1), "client": authority.client("bench", 1)}
    (folder / "ca.pem").write_bytes(authority.pair.certificate)
    for name, pair in pairs.items():
        (folder / f"{name}.pem").write_bytes(pair.certificate)
        (folder / f"{name}.key").write_bytes(pair.key)
    files = {CA_VARIABLE: "ca.pem", CERT_VARIABLE: "client.pem", KEY_VARIABLE: "client.key"}
    os.environ.update({name: str(folder / file) for name, file in files.items()})
    flags = [f"--tls-{name}={folder / file}" for name, file in
             (("ca", "ca.pem"), ("cert", "node.pem"), ("key", "node.key"))]  # fmt: skip
    capacity = data.total_bytes * 2 + (64 << 20)
    with ExitStack() as stack:
        made = {}
        for carrier, more in (("plain", []), ("TLS", flags)):
            rack = quiver_rack(folder / carrier, data.folder, capacity, *more, count=1)
            urls, servers = stack.enter_context(rack)
            made[carrier] = urls[0], servers[0]
        yield made


def _readings(
    data: Data,
    sample_bytes: int,
    batch_size: int,
    daemons: dict[str, tuple[str, Server]],
    rounds: int,
    seconds: float,
) -> list[Reading]:
    from quiver_client import Dataset

    rng = np.random.default_rng(0)
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        datasets = {}
        for carrier, verify in WAYS:
            made = Dataset(data.manifest(), daemons[carrier][0], verify=verify, copy=False)  # type: ignore[arg-type]
            stack.callback(made.close)
            datasets[carrier, verify] = made
        for dataset in datasets.values():  # the daemon fills everything, and every connection is open
            for at in range(0, len(dataset), batch_size):
                dataset.__getitems__(range(at, min(at + batch_size, len(dataset))))
        for _ in range(rounds):
            for way, dataset in datasets.items():
                batches = [rng.permutation(len(dataset))[:batch_size].tolist() for _ in range(16)]
                found[way].append(_repeated(dataset, batches, daemons[way[0]][1].pid, seconds))
    return [Reading(sample_bytes, *way, *(median(each) for each in zip(*took, strict=True)))
            for way, took in found.items()]  # fmt: skip


def _repeated(dataset: Any, batches: Sequence[list[int]], pid: int, seconds: float) -> tuple[float, float, float]:
    """Return a round's figures. On a busy machine a reader may pass the daemon over for a while: then once more."""
    for _ in range(REPEATS_MAX):
        took = _round(dataset, batches, pid, seconds)
        if took is not None:
            return took
        time.sleep(PASSED_OVER_SECONDS)
    raise RuntimeError(f"not everything came from the daemon: {dataset.stats()}")


def _round(dataset: Any, batches: Sequence[list[int]], pid: int, seconds: float) -> tuple[float, float, float] | None:
    """Return GB per second, and CPU seconds per GB of reader and daemon; None if some came from the origin."""
    before, mine, its = dataset.stats(), time.process_time(), _cpu_seconds(pid)
    began = time.monotonic()
    at = 0
    while time.monotonic() < began + seconds:
        dataset.__getitems__(batches[at % len(batches)])
        at += 1
    took = time.monotonic() - began
    after = dataset.stats()
    if after["bytes_rack"] - before["bytes_rack"] == 0 or after["bytes_origin"] != before["bytes_origin"]:
        return None
    gigabytes = (after["bytes_rack"] - before["bytes_rack"]) / 1e9
    return gigabytes / took, (time.process_time() - mine) / gigabytes, (_cpu_seconds(pid) - its) / gigabytes


def _handshakes(carrier: str, url: str, server: Server, count: int) -> Handshakes:
    from quiver.transport.liveness import is_alive

    took = []
    mine, its = time.process_time(), _cpu_seconds(server.pid)
    for _ in range(count):
        began = time.monotonic()
        if not is_alive(url, 5.0):
            raise RuntimeError("the daemon does not answer")
        took.append(time.monotonic() - began)
    cpu = time.process_time() - mine, _cpu_seconds(server.pid) - its
    return Handshakes(carrier, 1000 * median(took), *(1000 * each / count for each in cpu))


def _cpu_seconds(pid: int) -> float:
    """Return the CPU that a process has used, in user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
