"""Times small hot reads while another process scans shards that are warm, cold, or cold and not verified yet.

Cold means: not in memory, and read from disk during the scan. The kernel drops no page that a process has mapped, and
a daemon keeps the files mapped that it has served. So each measurement has its own daemon, started on a folder that is
already filled and that no process has mapped; a cold shard is scanned once, and the measurement lasts for that one
pass. ``mincore`` counts page by page what was not in memory; the daemon counts what was read.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import mmap
import multiprocessing
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

import numpy as np

from bench.servers import CannotRun, Server, quiver_rack
from quiver.manifest import Manifest
from quiver.peer import PeerClient

Scan = Literal["none", "warm", "cold", "unverified"]
SCANS: Final[tuple[Scan, ...]] = get_args(Scan)
ONCE: Final = ("cold", "unverified")  # after one pass nothing is cold any more
SCAN_BATCH: Final = 64
HOT_SHARD: Final = 0
HOT_SAMPLES: Final = 16
PAUSE_SECONDS: Final = 0.002  # between two hot reads, so that they observe the delay and do not cause it
START_SECONDS_MAX: Final = 60.0
PASS_SECONDS_MAX: Final = 300.0
STRAY_SHARE_MAX: Final = (
    0.05  # share of the scanned bytes that may be in memory although cold, or not in memory although warm
)
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class Signals(NamedTuple):
    """Events between the scanner and the reader of hot samples."""

    ready: Any  # the scanner is ready
    go: Any  # the reader is ready too
    ended: Any  # the scan has ended, or shall end


class Shelf:
    """The filled folder of one daemon, which is started again for each measurement.

    There is one daemon, so that all reads of the scan compete with the hot reads.
    """

    def __init__(self, folder: Path, origin: Path, manifest: Path, capacity_bytes: int) -> None:
        self._folder, self._origin, self._capacity_bytes = folder, origin, capacity_bytes
        self.manifest = manifest
        opened = Manifest.open(manifest)
        self._digests = [opened.shard_digest(number) for number in range(len(opened.tables.shard_sizes))]
        self._starts = 0

    @contextlib.contextmanager
    def daemon(self) -> Iterator[tuple[str, Server]]:
        self._starts += 1
        folder = self._folder / f"start{self._starts}"
        data = ("--data-dir", str(self._folder / "data"))  # given twice: the last one applies
        with quiver_rack(folder, self._origin, self._capacity_bytes, *data, count=1) as ((url,), (server,)):
            yield url, server

    def measure(self, scan: Scan, seconds: float) -> dict[str, float]:
        """Return the latencies of hot reads and of the daemon's loop during a scan, in ms. Raises ``CannotRun``."""
        with self.daemon() as (url, server):
            daemon = PeerClient(url)
            # A daemon verifies a shard before its first use: it then reads the file without mapping it.
            verified = self._digests if scan != "unverified" else [self._digests[HOT_SHARD]]
            if not all(map(daemon.has_shard, verified)):
                raise CannotRun("the daemon lacks a shard that was filled")
            daemon.close()
            files = self._scanned()
            if scan in ONCE:
                drop(files)
            size_bytes = sum(path.stat().st_size for path in files)
            absent = sum(map(absent_bytes, files))
            stray = size_bytes - absent if scan in ONCE else absent
            if stray > STRAY_SHARE_MAX * size_bytes:
                kept = "does not drop from memory; --scratch on a disk" if scan in ONCE else "drops; fewer --samples"
                raise CannotRun(f"of {size_bytes / 1e6:.0f} MB there are {stray / 1e6:.0f} that the kernel {kept}?")
            before = read_from_disk(server)
            told = latencies(url, str(self.manifest), seconds, scan)
            read = read_from_disk(server) - before
            return told | {"scanned_bytes": size_bytes, "absent_bytes": absent, "disk_bytes": read}

    def _scanned(self) -> list[Path]:
        hot = self._digests[HOT_SHARD].hex()
        files = (self._folder / "data" / "shards").rglob("*")
        return [path for path in files if path.is_file() and path.name != hot]


def latencies(cache: str, manifest: str, seconds: float, scan: Scan) -> dict[str, float]:
    """Return p50, p99 and maximum, in ms, of reading one hot sample and of an answer of the daemon's event loop."""
    context = multiprocessing.get_context("spawn")
    signals = Signals(context.Event(), context.Event(), context.Event())
    if scan == "none":
        return _hot(cache, manifest, seconds, signals)
    told: Any = context.SimpleQueue()
    scanner = context.Process(target=_scan, args=(cache, manifest, scan in ONCE, signals, told))
    scanner.start()
    try:
        if not signals.ready.wait(START_SECONDS_MAX):
            raise CannotRun("the scanning process does not start")
        taken = _hot(cache, manifest, PASS_SECONDS_MAX if scan in ONCE else seconds, signals)
        signals.ended.set()
        scanner.join(START_SECONDS_MAX)
        if scanner.exitcode != 0:
            raise CannotRun("the one who scans failed")
        return taken | told.get()
    finally:
        if scanner.is_alive():
            scanner.kill()
        scanner.join()


def _hot(cache: str, manifest: str, seconds: float, signals: Signals) -> dict[str, float]:
    """Read hot samples for ``seconds``, or until the scan has ended; after each, probe the daemon's event loop."""
    from quiver_client import Dataset

    dataset = Dataset(manifest, cache)
    rows = hot_rows(dataset.manifest)
    where = urlsplit(cache)
    loop = http.client.HTTPConnection(str(where.hostname), where.port or 0)
    for row in rows:
        dataset[row]
    reads: list[float] = []
    answers: list[float] = []
    signals.go.set()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not signals.ended.is_set():
        begun = time.perf_counter()
        dataset[rows[len(reads) % len(rows)]]
        read = time.perf_counter()
        loop.request("GET", "/healthz")
        loop.getresponse().read()
        answers.append(1000 * (time.perf_counter() - read))
        reads.append(1000 * (read - begun))
        time.sleep(PAUSE_SECONDS)
    loop.close()
    dataset.close()
    return {"reads": len(reads)} | _quantiles("", reads) | _quantiles("loop_", answers)


def _quantiles(name: str, taken: list[float]) -> dict[str, float]:
    p50, p99 = np.quantile(taken, [0.5, 0.99]).tolist()
    return {f"{name}p50_ms": p50, f"{name}p99_ms": p99, f"{name}max_ms": max(taken)}


def _scan(cache: str, manifest: str, once: bool, signals: Signals, told: Any) -> None:
    """Read all shards but the hot one, shard by shard: once, or repeatedly until stopped."""
    from quiver_client import Dataset

    try:
        dataset = Dataset(manifest, cache, verify="off")
        rows = _cold_rows(dataset.manifest)
        dataset[hot_rows(dataset.manifest)[0]]  # connects before the measurement
        lengths = dataset.manifest.tables.lengths[:, 0]
        signals.ready.set()
        signals.go.wait(START_SECONDS_MAX)
        scanned, begun, over = 0, time.monotonic(), False
        while not over:
            for at in range(0, len(rows), SCAN_BATCH):
                batch = rows[at : at + SCAN_BATCH]
                dataset.__getitems__(batch)
                scanned += int(lengths[batch].sum())
                if over := signals.ended.is_set():
                    break
            over = over or once
        told.put({"scan_bytes_a_second": scanned / (time.monotonic() - begun)})
        dataset.close()
    finally:
        signals.ended.set()


def hot_rows(manifest: Any) -> list[int]:
    """Return samples of one shard, which the scan does not read."""
    return np.flatnonzero(_shards(manifest) == HOT_SHARD)[:HOT_SAMPLES].tolist()  # type: ignore[no-any-return]


def _cold_rows(manifest: Any) -> Any:
    shards = _shards(manifest)
    rows = np.argsort(shards, kind="stable")
    return rows[shards[rows] != HOT_SHARD]


def _shards(manifest: Any) -> Any:
    tables = manifest.tables
    return np.searchsorted(tables.firsts, tables.blob_of, side="right") - 1


def drop(files: list[Path]) -> None:
    """Ask the kernel to drop these files' pages. It keeps pages that are mapped, or not on disk yet."""
    for path in files:
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def absent_bytes(path: Path) -> int:
    """Return how many bytes of a file are not in memory, without reading any of them."""
    size_bytes = path.stat().st_size
    if not size_bytes:
        return 0
    pages = np.zeros(-(-size_bytes // mmap.PAGESIZE), np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        failed = _LIBC.mincore(
            ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size_bytes), ctypes.c_void_p(pages.ctypes.data)
        )
        del view
    if failed:
        raise CannotRun(f"cannot determine which pages of {path} are in memory: {os.strerror(ctypes.get_errno())}")
    missing = pages & 1 == 0
    beyond = len(pages) * mmap.PAGESIZE - size_bytes  # the part of the last page past the end
    return int(missing.sum()) * mmap.PAGESIZE - (beyond if missing[-1] else 0)


def read_from_disk(server: Server) -> int:
    """Return how many bytes were read from disk for a process, by its reads or by its page faults."""
    found = re.search(r"^read_bytes: (\d+)", Path(f"/proc/{server.pid}/io").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0
