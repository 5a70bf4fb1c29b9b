"""What making batches costs, and what reading them does, by tier: measured where it happens, in threads and workers.

Each thread of this process adds what a batch cost it. A worker process adds to its own row of a small shared memory, so
that no measurement travels with a batch; each row has one writer, and readers only ever see whole numbers.

How many batches can be made at once: each thread or worker makes one at a time, and all of them together have the
processors of this process. So a batch takes at least its making over the number of makers, and at least its seconds of
processor time over the number of processors. The latter include what reading costs where nothing has to be waited for:
receiving, hashing, copying. So no loop, however fast, is said to read faster than it could be served.
"""

from __future__ import annotations

import mmap
import os
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from quiver import forks
from quiver_client.read_clock import TIERS, BatchCost

HISTORY_BATCHES: Final = 64  # over which costs are averaged
FAST_SHARE: Final = 0.25  # the fastest reads, by which hits are known
FAST_OF: Final = 32  # of so many,
FAST_EACH: Final = 8  # looked for every so many batches
_BEFORE_TIERS: Final = 10
COLUMNS: Final = _BEFORE_TIERS + 2 * len(TIERS)

Floats = npt.NDArray[np.float64]


class Costs(NamedTuple):
    """Sums over batches. ``fast_seconds``: of reading a batch from the cache, as of now; 0 until known."""

    batches: float = 0.0
    making_seconds: float = 0.0
    cpu_seconds: float = 0.0
    read_seconds: float = 0.0
    probes_ended: float = 0.0  # of all probes, those that failed among them,
    probes_failed: float = 0.0
    probes_spent: float = 0.0  # and the seconds of their reads
    probes: float = 0.0  # those that count: all but the first of each writer, which connects to the origin
    probe_seconds: float = 0.0
    fast_seconds: float = 0.0  # see above
    tier_seconds: tuple[float, ...] = (0.0,) * len(TIERS)
    tier_bytes: tuple[float, ...] = (0.0,) * len(TIERS)

    @classmethod
    def of(cls, row: Floats) -> Costs:
        """Return what a row of sums says."""
        values = row.tolist()
        tiers = _BEFORE_TIERS + len(TIERS)
        sums = dict(zip(cls._fields, values[:_BEFORE_TIERS], strict=False))
        return cls(**sums, tier_seconds=tuple(values[_BEFORE_TIERS:tiers]), tier_bytes=tuple(values[tiers:]))


class Row:
    """Sums of one writer; not safe from threads. The first batch opens connections and loads libraries: its making is
    not counted."""

    def __init__(self, row: Floats) -> None:
        self._row = row
        self._is_warm = self._is_probe_warm = False
        self._reads: list[float] = []  # seconds of the last batches' reads

    def add(self, cost: BatchCost) -> None:
        """Add what a batch cost."""
        row = self._row
        if self._is_warm:
            row[0] += 1
            row[1] += cost.making_seconds
            row[2] += cost.cpu_seconds
        self._is_warm = True
        row[_BEFORE_TIERS:] += (*cost.tier_seconds, *cost.tier_bytes)
        row[3] += cost.read_seconds
        if cost.is_probe:
            self._probed(cost)
        elif cost.read_bytes:
            self._learn_fast(cost.read_seconds)

    def _learn_fast(self, seconds: float) -> None:
        reads = self._reads
        reads.append(seconds)
        if len(reads) <= FAST_EACH or len(reads) % FAST_EACH == 0:
            del reads[:-FAST_OF]
            fastest = sorted(reads)[: max(int(FAST_SHARE * len(reads)), 1)]
            self._row[9] = sum(fastest) / len(fastest)

    def _probed(self, cost: BatchCost) -> None:
        row = self._row
        row[6] += cost.read_seconds
        if cost.is_answered and self._is_probe_warm:
            row[8] += cost.read_seconds
            row[7] += 1
        self._is_probe_warm |= cost.is_answered
        row[5] += not cost.is_answered
        row[4] += 1


class WorkerRows:
    """A row for each worker, in memory that forked and spawned workers share with the process that made it."""

    def __init__(self, workers: int) -> None:
        """Raises ``OSError`` if there is no memory for it."""
        self.workers = workers
        self._fd = os.memfd_create("quiver-costs", os.MFD_CLOEXEC)  # ``__del__`` closes it, whatever fails from here on
        os.ftruncate(self._fd, self._size)
        self._map()

    @property
    def _size(self) -> int:
        return self.workers * COLUMNS * 8

    def _map(self) -> None:
        memory = mmap.mmap(self._fd, self._size)
        self.rows: Floats = np.frombuffer(memory, np.float64).reshape(self.workers, COLUMNS)
        self._own: Row | None = None
        self._pid = os.getpid()

    def add(self, cost: BatchCost) -> None:
        """Add what a batch cost this worker."""
        if self._own is None or self._pid != os.getpid():
            info = get_worker_info()
            self._own, self._pid = Row(self.rows[info.id if info is not None else 0]), os.getpid()
        self._own.add(cost)

    def __getstate__(self) -> dict[str, Any]:
        passed = DupFd(self._fd) if get_spawning_popen() is not None else None
        return {"workers": self.workers, "passed": passed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.workers = state["workers"]
        passed = state["passed"]
        if passed is None:  # a copy that no process shares
            self.__init__(self.workers)  # type: ignore[misc]
            return
        self._fd = passed.detach()
        self._map()

    def __del__(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)


class Making:
    """The costs of one loader's batches. Safe from threads."""

    def __init__(self, workers: int, threads: int, processors: int | None = None) -> None:
        """``workers``: processes that make batches; 0: ``threads`` of this process do."""
        self._lock = forks.lock()
        self._own: Floats = np.zeros((1, COLUMNS))
        self._row = Row(self._own[0])
        self.rows = _rows_for(workers)
        self.makers = workers or threads
        self._processors = min(self.makers, processors or len(os.sched_getaffinity(0)))
        self.here_seconds = 0.0  # spent on making batches by the loop's own thread
        self._seen = np.zeros(3)  # batches and seconds that the averages know
        self._recent = np.zeros(3)

    def add(self, cost: BatchCost) -> None:
        """A thread of this process read and made a batch."""
        with self._lock:
            self._row.add(cost)

    @property
    def costs(self) -> Costs:
        """All costs so far."""
        with self._lock:
            tables = [self._own] if self.rows is None else [self._own, self.rows.rows]
            rows = np.concatenate(tables)
        total = rows.sum(axis=0)
        fast = rows[:, 9][rows[:, 9] > 0]
        total[9] = fast.mean() if len(fast) else 0.0
        return Costs.of(total)

    @property
    def seconds(self) -> float:
        """What making takes per batch, on all makers together, lately; 0 until known. Used by one thread."""
        total = self._own[0, :3] if self.rows is None else self._own[0, :3] + self.rows.rows[:, :3].sum(axis=0)
        new = total - self._seen
        if new[0] >= 1:
            keep = max(1.0 - new[0] / HISTORY_BATCHES, 0.0)
            self._recent = self._recent * keep + new
            self._seen = total.copy()
        batches, clock, cpu = self._recent.tolist()
        return max(clock / self.makers, cpu / self._processors) / batches if batches else 0.0


def _rows_for(workers: int) -> WorkerRows | None:
    """Return memory for the costs of workers; ``None`` where there are none, or the system has none to give: then
    what they make is not measured."""
    if not workers or not hasattr(os, "memfd_create"):
        return None
    try:
        return WorkerRows(workers)
    except OSError:
        return None
