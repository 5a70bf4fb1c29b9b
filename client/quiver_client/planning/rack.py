"""One rack under one policy, from the first job to the last, on a fake clock.

The simulation moves from event to event: a job starts or ends, an epoch ends in which something was cached, a job
passes into another queue of least attained service. At each, the policy's own code (``quiver.allocation.allocate``)
is asked with what is resident; between two, everybody reads at a constant rate. A byte that is fetched counts as
cached from the next epoch on, since nobody needs it again in this one; an epoch is that of the reader that is
furthest ahead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from quiver.allocation import Allocation, DatasetDemand, Policy, Problem, Reader, allocate
from quiver.allocation.attained import FACTOR, FIRST_SECONDS, QUEUES_MAX
from quiver_client.planning.fleet import DatasetPlan, Job, Rack

_TICK: Final = 1e-12  # of the time since the plan began
_DONE: Final = 1e-9  # of a job's work, or of a dataset: rounding
_EVENTS_PER_JOB_MAX: Final = 1000  # a bound, should rounding ever keep the clock from moving


@dataclass(slots=True)
class Run:
    """A job while it runs, and what became of it. ``ended`` is infinite if it never does: its origin gives
    nothing.
    """

    job: Job
    read_bytes: float = 0.0
    origin_bytes: float = 0.0
    waited_seconds: float = 0.0
    ended: float = math.inf
    rate: float = 0.0
    origin_rate: float = 0.0
    epoch_end: float = 0.0  # in bytes read

    @property
    def left(self) -> float:
        return self.job.work_bytes - self.read_bytes


@dataclass(slots=True)
class Held:
    """What the cache holds of a dataset. ``useful``: of that, what was there when the epoch began."""

    dataset: DatasetPlan
    resident: float = 0.0
    useful: float = 0.0
    share: float = 0.0
    filling: float = 0.0  # bytes per second
    runs: list[Run] = field(default_factory=list)


class RackSimulation:
    """``simulate`` runs it. State changes only in ``_advance`` and in what the events do."""

    def __init__(
        self, rack: Rack, datasets: Mapping[str, DatasetPlan], weights: Mapping[str, float], quotas: Mapping[str, float]
    ) -> None:
        self._rack = rack
        self._datasets = datasets
        self._weights = weights
        self._quotas = quotas
        self._held: dict[str, Held] = {}
        self._running: list[Run] = []
        self._now = 0.0

    def simulate(self, jobs: Sequence[Job], policy: Policy) -> list[Run]:
        """Return what became of the jobs, which are in the order of their start."""
        runs = [Run(job) for job in jobs]
        waiting = runs[::-1]
        for _ in range(_EVENTS_PER_JOB_MAX * (len(runs) + 1)):
            if not self._running and waiting:
                self._now = max(self._now, waiting[-1].job.start)
            while waiting and waiting[-1].job.start <= self._now:
                self._start(waiting.pop())
            if not self._running:
                break
            self._decide(policy)
            until = min(self._next_event(policy), waiting[-1].job.start if waiting else math.inf)
            if math.isinf(until):
                break  # the others never get on
            self._advance(until)
        return runs

    def _start(self, run: Run) -> None:
        held = self._held.setdefault(run.job.dataset, Held(self._datasets[run.job.dataset]))
        if not held.runs:
            held.useful = held.resident
        run.epoch_end = held.dataset.size_bytes
        held.runs.append(run)
        self._running.append(run)

    def _decide(self, policy: Policy) -> None:
        """Ask the policy, and set everybody's rate until the next event."""
        allocation = allocate(self._problem(), policy)
        for name, held in list(self._held.items()):
            share = allocation.shares[name]
            held.share = share.cache_bytes
            held.resident = min(held.resident, held.share)
            held.useful = min(held.useful, held.resident)
            if held.runs:
                self._set_rates(held, allocation, share.origin_rate)
            elif held.resident <= held.dataset.size_bytes * _DONE:
                del self._held[name]

    def _problem(self) -> Problem:
        return Problem(
            capacity_bytes=self._rack.capacity_bytes,
            datasets=tuple(
                DatasetDemand(
                    name=name,
                    size_bytes=held.dataset.size_bytes,
                    origin=held.dataset.origin,
                    readers=readers(held.runs),
                    resident_bytes=held.useful,
                )
                for name, held in self._held.items()
            ),
            origin_rates=self._rack.origin_rates,
            weights=self._weights,
            quotas=self._quotas,
        )

    def _set_rates(self, held: Held, allocation: Allocation, bandwidth: float) -> None:
        missing = max(1 - held.useful / held.dataset.size_bytes, 0.0)
        for run in held.runs:
            run.rate = min(run.job.rate, allocation.predicted[held.dataset.name, _reader(run.job)])
        misses = missing * _demand(held.runs)
        part = min(1.0, bandwidth / misses) if misses > 0 else 1.0
        sharing = sum(run.rate for run in held.runs if not run.job.ordered)
        fastest = max((run.rate for run in held.runs if not run.job.ordered), default=0.0)
        for run in held.runs:
            own = run.rate if run.job.ordered else run.rate * fastest / sharing if sharing else 0.0
            run.origin_rate = own * part * missing
            run.rate *= part
        # Ordered readers fetch some shards twice; of the cache's growth that is left out.
        held.filling = missing * _demand(held.runs) if held.resident < held.share * (1 - _DONE) else 0.0

    def _next_event(self, policy: Policy) -> float:
        """Return when the rates change next; infinite if they never do."""
        times = []
        for run in self._running:
            if run.rate > 0:
                times.append(run.left / run.rate)
                held = self._held[run.job.dataset]
                if held.useful < held.resident * (1 - _DONE) or held.filling > 0:
                    times.append((run.epoch_end - run.read_bytes) / run.rate)
                if policy == Policy.LAS:
                    times.append(_until_next_queue(run) / run.rate)
        # The clock has to move, however late it is and however little is left.
        return self._now + max(min(times), self._now * _TICK) if times else math.inf

    def _advance(self, until: float) -> None:
        seconds = until - self._now
        for held in self._held.values():
            held.resident = min(held.resident + held.filling * seconds, max(held.share, held.resident))
            if not held.runs:
                held.filling = 0.0
        for run in self._running:
            run.read_bytes += run.rate * seconds
            run.origin_bytes += run.origin_rate * seconds
            run.waited_seconds += (1 - run.rate / run.job.rate) * seconds
            held = self._held[run.job.dataset]
            size = held.dataset.size_bytes
            if run.read_bytes >= run.epoch_end - size * _DONE:
                run.epoch_end = (math.floor(run.read_bytes / size + 2 * _DONE) + 1) * size
                held.useful = held.resident
        self._now = until
        for run in [run for run in self._running if run.left <= run.job.work_bytes * _DONE]:
            run.ended = until
            self._running.remove(run)
            held = self._held[run.job.dataset]
            held.runs.remove(run)
            if not held.runs:
                held.filling = 0.0


def readers(runs: list[Run]) -> tuple[Reader, ...]:
    """Return who counts: the jobs, and of a group one reader as fast as its fastest."""
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(_reader(run.job), []).append(run)
    return tuple(
        Reader(
            name=name,
            rate=max(run.job.rate for run in members),
            tenant=members[0].job.tenant,
            ordered=members[0].job.ordered,
            attained_bytes=max(run.read_bytes for run in members),
        )
        for name, members in by_name.items()
    )


def _reader(job: Job) -> str:
    """Return the name of a job's reader; trials of a group that substitute have one. No name contains NUL."""
    return f"group {job.tenant}\0{job.group}" if job.group and not job.ordered else f"job {job.name}"


def _demand(runs: list[Run]) -> float:
    sharing = max((run.rate for run in runs if not run.job.ordered), default=0.0)
    return sharing + sum(run.rate for run in runs if run.job.ordered)


def _until_next_queue(run: Run) -> float:
    """Return the bytes until a job of this service passes the next threshold."""
    seconds = run.read_bytes / run.job.rate
    queue = math.floor(math.log(max(seconds / FIRST_SECONDS, 1 / FACTOR), FACTOR) + 1e-9) + 1
    if queue >= QUEUES_MAX - 1:
        return math.inf
    return max(FIRST_SECONDS * FACTOR**queue - seconds, 1e-6) * run.job.rate
