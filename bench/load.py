"""The load of training on a rack: processes that read batches through ``quiver_client.DataLoader`` for a while.

It serves ``python -m bench load``, which operators run against their own rack, and the questions about many readers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bench.accelerator import Accelerator
from bench.measure import Consumer

if TYPE_CHECKING:
    from quiver_client.batch import Verify

START_SECONDS_MAX: Final = 120.0
LATE_SECONDS_MAX: Final = 120.0  # past the end: a batch may still be in flight
ERRORS_SHOWN: Final = 5


@dataclass(frozen=True)
class Load:
    """How a rack is read."""

    cache: str
    manifest: str
    readers: int = 4
    seconds: float = 10.0
    batch_size: int = 256
    step_seconds: float = 0.0  # of the emulated accelerator
    verify: Verify = "fast"


@dataclass
class Reader:
    """What one reader measured."""

    bytes: int = 0
    samples: int = 0
    batches: int = 0
    seconds: float = 0.0
    busy_seconds: float = 0.0
    waits_ms: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    stats: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What all readers measured together."""

    bytes_a_second: float
    samples_a_second: float
    evenness: float  # the slowest reader's share ÷ the fastest's
    shares: list[float]
    wait_p50_ms: float
    wait_p99_ms: float
    utilisation: float
    errors: int
    error_texts: list[str]
    stats: dict[str, int]

    def encode(self) -> dict[str, Any]:
        return asdict(self)


def put_on(load: Load) -> Outcome:
    """Run the readers and return what they measured. They start together once all are ready."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(load.readers + 1)
    told: Any = context.Queue()
    processes = [context.Process(target=_read, args=(load, at, start, told)) for at in range(load.readers)]
    try:
        for process in processes:
            process.start()
        readers: list[Reader] = []
        with contextlib.suppress(threading.BrokenBarrierError):  # one ended before the start: none of them will report
            start.wait(START_SECONDS_MAX)
        deadline = time.monotonic() + load.seconds + LATE_SECONDS_MAX
        while len(readers) < load.readers:
            try:
                readers.append(Reader(**told.get(timeout=1.0)))
            except queue.Empty:
                silent = not any(process.is_alive() for process in processes)
                if silent or time.monotonic() > deadline:
                    missing = load.readers - len(readers)
                    readers += [Reader(errors=["a reader ended, or hung, without a report"]) for _ in range(missing)]
    finally:
        for process in processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
            process.join()
    return _outcome(readers)


def synthesised(folder: Path, total_bytes: int, sample_bytes: int) -> Path:
    """Make a dataset of random bytes on this machine; return its manifest. The readers cause the rack to fill it."""
    from bench.data import make_data

    return make_data(folder / "load", "blobs", max(total_bytes // sample_bytes, 1), sample_bytes).manifest()


def bring_in(cache: str, manifest: str) -> None:
    """Read everything once, so that the measurement is of the rack and not of its origin."""
    from quiver_client import Dataset

    dataset = Dataset(manifest, cache, verify="off")
    try:
        for at in range(0, len(dataset), 256):
            dataset.__getitems__(range(at, min(at + 256, len(dataset))))
    finally:
        dataset.close()


def _read(load: Load, number: int, start: Any, told: Any) -> None:
    """Run one reader: open everything, wait for the others, read until the deadline, report."""
    from quiver.errors import QuiverError
    from quiver_client import DataLoader, Dataset

    reader = Reader()
    accelerator = Accelerator(load.step_seconds)
    try:
        dataset = Dataset(load.manifest, load.cache, verify=load.verify, **_views(Dataset))
    except QuiverError as error:
        start.wait(START_SECONDS_MAX)
        told.put(asdict(Reader(errors=[str(error)])))
        return
    field_name = dataset.manifest.header.blobs[0].name
    loader = DataLoader(
        dataset,
        min(load.batch_size, len(dataset)),
        shuffle=True,
        drop_last=True,
        seed=number,
        substitute=False,
        collate_fn=lambda samples: [_buffer(sample[field_name]) for sample in samples],
    )
    largest = int(dataset.manifest.tables.lengths[:, 0].max())
    consumer = Consumer(largest * load.batch_size)
    start.wait(START_SECONDS_MAX)
    begun = time.monotonic()
    while time.monotonic() - begun < load.seconds and len(reader.errors) < ERRORS_SHOWN:
        try:
            _pass(loader, reader, consumer, accelerator, begun + load.seconds)
        except QuiverError as error:
            reader.errors.append(str(error))
    reader.seconds = time.monotonic() - begun
    reader.busy_seconds = accelerator.busy_seconds_and_reset()
    reader.stats = dataset.stats()
    loader.close()
    dataset.close()
    told.put(asdict(reader))


def _pass(loader: Any, reader: Reader, consumer: Consumer, accelerator: Accelerator, deadline: float) -> None:
    asked = time.monotonic()
    for batch in loader:
        now = time.monotonic()
        reader.waits_ms.append(1000 * (now - asked))
        reader.bytes += consumer.take(batch)
        reader.samples += len(batch)
        reader.batches += 1
        accelerator.step()
        asked = time.monotonic()
        if asked > deadline:
            return


def _buffer(value: Any) -> memoryview:
    """Return a field's bytes, whether it is bytes, an array, a tensor or absent."""
    if value is None:
        return memoryview(b"")
    return memoryview(value.numpy() if hasattr(value, "numpy") else value).cast("B")


def _views(dataset: type) -> dict[str, Any]:
    import inspect

    return {"copy": False} if "copy" in inspect.signature(dataset).parameters else {}


def _outcome(readers: list[Reader]) -> Outcome:
    rates = [reader.bytes / reader.seconds if reader.seconds else 0.0 for reader in readers]
    waits = [wait for reader in readers for wait in reader.waits_ms] or [0.0]
    p50, p99 = np.quantile(waits, [0.5, 0.99]).tolist()
    total = sum(rates)
    errors = [text for reader in readers for text in reader.errors]
    stats: dict[str, int] = {}
    for reader in readers:
        for name, count in reader.stats.items():
            stats[name] = stats.get(name, 0) + count
    return Outcome(
        bytes_a_second=total,
        samples_a_second=sum(reader.samples / reader.seconds for reader in readers if reader.seconds),
        evenness=min(rates) / max(rates) if max(rates) else 0.0,
        shares=[rate / total if total else 0.0 for rate in rates],
        wait_p50_ms=p50,
        wait_p99_ms=p99,
        utilisation=median(reader.busy_seconds / reader.seconds if reader.seconds else 0.0 for reader in readers),
        errors=len(errors),
        error_texts=errors[:ERRORS_SHOWN],
        stats=stats,
    )
