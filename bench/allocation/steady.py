"""One run of a case whose jobs read for as long as they are let: what is measured over a window after a warm-up.

Nothing is inferred: samples and idle seconds come from the ranks' own lines, bytes from the origin's counters, what is
resident from the daemons' folders. Predictions are computed apart and only stand beside them.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Final

import numpy as np

from bench.allocation.cases import Case
from bench.allocation.fleet import fleet, policy_flags
from bench.allocation.jobs import Rank, started
from bench.allocation.sources import Indexed, Origin, overhead_of
from bench.measure import TICKS_A_SECOND, process_stat

POLL_SECONDS: Final = 0.5
HELD_SECONDS: Final = 2.0  # between two looks at what is resident
Line = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """One job over the window: of all its ranks together, and the mean share of time that its accelerators idled."""

    bytes_per_second: float
    samples_per_second: float
    idle: float


@dataclass(frozen=True)
class Run:
    """One run of a case under a policy.

    ``origin``: bytes of samples per second, by dataset. ``cache``: the mean share of each dataset that was resident.
    ``series``: by job and by dataset, over the whole run, for the plots.
    """

    case: str
    policy: str
    jobs: dict[str, Measured]
    origin: dict[str, float]
    cache: dict[str, float]
    load_average: float  # before it began
    machine_busy: float  # share of all cores, over the window
    cores: dict[str, float]  # that the daemons, the ranks and the origin kept busy
    told: list[Any]  # what each daemon answered to /v1/allocation at the end
    series: dict[str, dict[str, list[float]]]

    @property
    def total(self) -> float:
        return sum(it.bytes_per_second for it in self.jobs.values())


def run(case: Case, policy: str, indexed: dict[str, Indexed], origin: Origin, scratch: Path) -> Run:
    """Run a case once, from empty daemons."""
    load = os.getloadavg()[0]
    origin.limit(case.origin_rate * overhead_of(indexed))
    with (
        tempfile.TemporaryDirectory(dir=scratch) as folder,
        fleet(Path(folder), origin, indexed, case.capacity_bytes, *policy_flags(policy)) as daemons,
    ):
        ranks = [
            Rank(job, rank, str(indexed[job.source].manifest), daemons.cache, Path(folder) / f"{job.name}-{rank}.log")
            for job in case.jobs
            for rank in range(job.ranks)
        ]
        with started(ranks) as running:
            began = time.monotonic()
            window = began + case.warm, began + case.warm + case.window
            pids = {"ranks": [it.pid for it in running], "daemons": [it.pid for it in daemons.servers]}
            pids["origin"] = [origin.pid]
            sent, held, busy, used = list[Line](), list[Line](), [_busy_seconds()], [_cpu_of(pids)]
            while time.monotonic() < window[1]:
                now = time.monotonic()
                sent.append({"t": now} | origin.sent())
                if not held or now - held[-1]["t"] >= HELD_SECONDS or window[1] - now <= POLL_SECONDS:
                    held.append({"t": now} | daemons.resident_of(indexed))
                if now <= window[0]:
                    busy, used = [_busy_seconds()], [_cpu_of(pids)]
                time.sleep(min(POLL_SECONDS, max(window[1] - time.monotonic(), 0.0)))
            sent.append({"t": time.monotonic()} | origin.sent())
            busy.append(_busy_seconds())
            used.append(_cpu_of(pids))
            told = daemons.allocations()
        lines = {job.name: [it.lines() for it in running if it.rank.job == job] for job in case.jobs}
    jobs = {
        name: measured(its, window, case.source(_source(case, name)).sample_bytes, epochs=True)
        for name, its in lines.items()
    }
    return Run(
        case=case.name,
        policy=policy,
        jobs=jobs,
        origin={name: _slope(sent, it.file, window) / it.overhead for name, it in indexed.items()},
        cache={name: mean([it[name] for it in held if it["t"] >= window[0]] or [0.0]) for name in indexed},
        load_average=load,
        machine_busy=(busy[-1] - busy[0]) / case.window / (os.cpu_count() or 1),
        cores={name: (used[1][name] - used[0][name]) / case.window for name in pids},
        told=told,
        series=_series(case, lines, held, began, window[1]),
    )


def measured(
    ranks: Sequence[Sequence[Line]], window: tuple[float, float], sample_bytes: int, *, epochs: bool = False
) -> Measured:
    """Return what the lines of a job's ranks say about a window; ``epochs``: about the whole epochs in it."""
    samples, idle = 0.0, list[float]()
    for lines in ranks:
        began, ended = whole_epochs(lines, window) if epochs else window
        samples += _slope(lines, "samples", (began, ended))
        idle.append(1 - min(_busy(lines, (began, ended)) / (ended - began), 1.0))
    return Measured(samples * sample_bytes, samples, mean(idle))


def whole_epochs(lines: Sequence[Line], window: tuple[float, float]) -> tuple[float, float]:
    """Return from when to when a rank read whole epochs within a window; all of the window if it read none.

    A job reads what is cached at the start of an epoch, as fast as it can, and then waits for the origin. A part of an
    epoch would make it too fast or too slow, by up to a tenth in a window of two and a half.
    """
    ends = [line["t"] for line in lines if "epoch" in line and window[0] <= line["t"] <= window[1]]
    return (ends[0], ends[-1]) if len(ends) > 1 else window


def _busy(lines: Sequence[Line], window: tuple[float, float]) -> float:
    """Return the seconds of the window in which a rank's accelerator worked; waiting at its end is idling."""
    told = [line for line in lines if "idle" in line]
    times = [line["t"] for line in told]
    busy = [line["t"] - told[0]["t"] - line["idle"] for line in told]
    first, last = np.interp(window, times, busy).tolist()
    return last - first


def _slope(lines: Sequence[Line], name: str, window: tuple[float, float]) -> float:
    """Return the increase per second of a running count over the window."""
    told = [line for line in lines if "t" in line and ("samples" in line or name != "samples")]
    first, last = np.interp(window, [it["t"] for it in told], [it.get(name, 0) for it in told]).tolist()
    return (last - first) / (window[1] - window[0])


def _source(case: Case, job: str) -> str:
    return next(it.source for it in case.jobs if it.name == job)


def _series(
    case: Case, lines: dict[str, list[list[Line]]], held: Sequence[Line], began: float, ended: float
) -> dict[str, dict[str, list[float]]]:
    edges = np.arange(began, ended, HELD_SECONDS)
    rates = {}
    for name, ranks in lines.items():
        told = [[line for line in each if "samples" in line] for each in ranks]
        read = sum(np.interp(edges, [it["t"] for it in each], [it["samples"] for it in each]) for each in told)
        rates[name] = np.round(np.diff(read) / HELD_SECONDS, 2).tolist()
    shares = {it.name: np.interp(edges, [x["t"] for x in held], [x[it.name] for x in held]) for it in case.sources}
    return {
        "seconds": {"at": (edges[1:] - began).tolist()},
        "samples_per_second": rates,
        "resident": {name: np.round(each[1:], 4).tolist() for name, each in shares.items()},
    }


def _cpu_of(pids: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Return the CPU seconds that groups of processes have spent."""
    stats = {name: [process_stat(pid) for pid in its] for name, its in pids.items()}
    return {
        name: sum(int(each[11]) + int(each[12]) for each in its if each) / TICKS_A_SECOND for name, its in stats.items()
    }


def _busy_seconds() -> float:
    """Return the CPU seconds that this machine has spent since it started, waiting left out."""
    with Path("/proc/stat").open() as file:
        user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq) / TICKS_A_SECOND
