"""The measurement of one round: the same consumer for all, the waits, and the CPU of a process and its children.

It knows neither Quiver nor any peer, so that the same code measures every contender.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from bench.accelerator import Accelerator

Buffer = Any  # bytes, a memoryview of bytes, or an array of uint8
Batch = Sequence[Buffer]  # one buffer per sample, or several samples back to back in one
LARGE_BYTES: Final = 1 << 18
TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Round:
    """The result of one pass over the data. ``cpu_seconds`` counts the reader and all of its children, servers too."""

    seconds: float
    samples: int
    bytes: int
    cpu_seconds: float
    wait_p50_ms: float
    wait_p99_ms: float
    utilisation: float  # of the emulated accelerator: the share of the time that it was busy; 0 without one

    @property
    def bytes_a_second(self) -> float:
        return self.bytes / self.seconds

    def encode(self) -> dict[str, Any]:
        return asdict(self)


class Consumer:
    """Copies each byte of each batch into one preallocated tensor: the least that a training loop does.

    A small buffer is copied by a slice assignment, whose overhead is 0.1 µs; a large one by numpy, which releases the
    GIL.
    """

    def __init__(self, batch_bytes_max: int) -> None:
        import torch  # imported here, so that the command line starts without it

        self.tensor = torch.zeros(batch_bytes_max, dtype=torch.uint8)
        self._array = self.tensor.numpy()
        self._view = memoryview(self._array)

    def take(self, batch: Batch) -> int:
        """Copy the batch; return its bytes."""
        at = 0
        for buffer in batch:
            size = len(buffer)
            if size >= LARGE_BYTES:
                np.copyto(self._array[at : at + size], np.frombuffer(buffer, np.uint8))
            else:
                self._view[at : at + size] = buffer
            at += size
        return at


def measure(
    batches: Callable[[], Iterable[Batch]], samples: int, consumer: Consumer, accelerator: Accelerator
) -> Round:
    """Run one pass."""
    waits, total = [], 0
    cpu_before, begun = cpu_seconds(), time.perf_counter()
    coming = iter(batches())
    while True:
        asked = time.perf_counter()
        batch = next(coming, None)
        if batch is None:
            break
        waits.append(time.perf_counter() - asked)
        total += consumer.take(batch)
        del batch
        accelerator.step()
    seconds = time.perf_counter() - begun
    p50, p99 = (1000 * np.quantile(waits or [0.0], [0.5, 0.99])).tolist()
    busy = accelerator.busy_seconds_and_reset()
    return Round(seconds, samples, total, cpu_since(cpu_before), p50, p99, busy / seconds)


def digests_of(batches: Iterable[Batch], sample_bytes: int | None) -> tuple[str, str]:
    """Return a digest of the delivered samples that ignores their order, and one that does not.

    ``sample_bytes``: the size of each sample if all are equal; then one buffer may contain several.
    """
    total, ordered = 0, xxhash.xxh3_64()
    for batch in batches:
        for buffer in batch:
            whole = memoryview(buffer).cast("B")
            for at in range(0, len(whole), sample_bytes or len(whole)):
                digest = xxhash.xxh3_64_intdigest(whole[at : at + (sample_bytes or len(whole))])
                total = (total + digest) % 2**64
                ordered.update(digest.to_bytes(8, "little"))
    return f"{total:016x}", ordered.hexdigest()


def children_of(pid: int) -> list[int]:
    """Return all descendants of a process."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (fields := process_stat(int(entry.name))):
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        todo += (born := parents.get(todo.pop(), []))
        found += born
    return found


def cpu_seconds() -> dict[int, float]:
    """Return user and system seconds of this process (under 0), of its ended children (1), and of each child alive."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = {0: time.process_time(), 1: ended.ru_utime + ended.ru_stime}
    for pid in children_of(os.getpid()):
        if fields := process_stat(pid):
            used[pid] = (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND
    return used


def cpu_since(before: dict[int, float]) -> float:
    now = cpu_seconds()
    ended = sum(seconds for pid, seconds in before.items() if pid not in now)  # counted under 1 from then on
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in now.items()) - ended


def process_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
