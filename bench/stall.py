"""Small hot reads, timed, while another process scans shards that are cold, warm, or not at all."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

SCAN_BATCH: Final = 64
HOT_SHARD: Final = 0
HOT_SAMPLES: Final = 16
PAUSE_SECONDS: Final = 0.002  # between two hot reads: to see the wait, not to make it


def latencies(cache: str, manifest: str, seconds: float, scan: str, files: list[Path]) -> dict[str, float]:
    """Return p50 and p99 in ms of reading one hot sample. ``scan``: "none", "warm", or "cold", which drops ``files``
    from the page cache before every pass."""
    context = multiprocessing.get_context("spawn")
    ended, began = context.Event(), context.Event()
    scanner = context.Process(target=_scan, args=(cache, manifest, scan == "cold", files, began, ended))
    if scan != "none":
        scanner.start()
        began.wait(60)
    try:
        return _hot(cache, manifest, seconds)
    finally:
        ended.set()
        if scan != "none":
            scanner.join(60)
            if scanner.is_alive():
                scanner.kill()
                scanner.join()


def drop(files: list[Path]) -> None:
    """Ask the kernel to forget these files' pages."""
    for path in files:
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:  # made way meanwhile
            continue
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def hot_rows(manifest: Any) -> list[int]:
    """Return samples of one shard, which the scan leaves alone."""
    tables = manifest.tables
    shards = np.searchsorted(tables.firsts, tables.blob_of, side="right") - 1
    return np.flatnonzero(shards == HOT_SHARD)[:HOT_SAMPLES].tolist()  # type: ignore[no-any-return]


def _hot(cache: str, manifest: str, seconds: float) -> dict[str, float]:
    from quiver_client import Dataset

    dataset = Dataset(manifest, cache)
    rows = hot_rows(dataset.manifest)
    for row in rows:
        dataset[row]
    taken, at, deadline = [], 0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        begun = time.perf_counter()
        dataset[rows[at % len(rows)]]
        taken.append(1000 * (time.perf_counter() - begun))
        at += 1
        time.sleep(PAUSE_SECONDS)
    dataset.close()
    p50, p99 = np.quantile(taken, [0.5, 0.99]).tolist()
    return {"p50_ms": p50, "p99_ms": p99, "max_ms": max(taken), "reads": len(taken)}


def _scan(cache: str, manifest: str, cold: bool, files: list[Path], began: Any, ended: Any) -> None:
    from quiver_client import Dataset

    dataset = Dataset(manifest, cache, verify="off")
    tables = dataset.manifest.tables
    shards = np.searchsorted(tables.firsts, tables.blob_of, side="right") - 1
    rows = np.argsort(shards, kind="stable")
    rows = rows[shards[rows] != HOT_SHARD]
    while not ended.is_set():
        if cold:
            drop(files)
        for at in range(0, len(rows), SCAN_BATCH):
            dataset.__getitems__(rows[at : at + SCAN_BATCH])
            began.set()
            if ended.is_set():
                break
    dataset.close()
