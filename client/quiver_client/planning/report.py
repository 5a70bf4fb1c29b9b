"""What a plan predicts, per policy: for each job and in all."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quiver.allocation import Policy
from quiver_client.planning.fleet import Fleet
from quiver_client.planning.placement import place
from quiver_client.planning.rack import RackSimulation, Run


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of all jobs under a policy. ``racks``: which rack ran each, in the order of ``runs``."""

    policy: Policy
    runs: tuple[Run, ...]
    racks: tuple[str, ...]

    def totals(self) -> dict[str, Any]:
        """Return sums over the jobs that end. Bytes, seconds, and parts of 1."""
        ended = [run for run in self.runs if math.isfinite(run.ended)]
        seconds = sum(run.ended - run.job.start for run in ended)
        read = sum(run.read_bytes for run in ended)
        return {
            "jobs": len(self.runs),
            "never_end": len(self.runs) - len(ended),
            "end_seconds": max((run.ended for run in ended), default=0.0),
            "read_bytes": read,
            "origin_bytes": sum(run.origin_bytes for run in self.runs),
            "throughput": read / seconds if seconds else 0.0,
            "full_speed": sum(run.job.work_bytes for run in ended) / _at_full_speed(ended) if ended else 0.0,
            "waiting": sum(run.waited_seconds for run in ended) / seconds if seconds else 0.0,
            "waiting_worst": max((_waiting(run) for run in ended), default=0.0),
        }

    def jobs(self) -> list[dict[str, Any]]:
        """Return a table of the jobs; ``ended`` is None for one that never ends."""
        return [
            {
                "name": run.job.name,
                "rack": rack,
                "dataset": run.job.dataset,
                "tenant": run.job.tenant,
                "start_seconds": run.job.start,
                "end_seconds": run.ended if math.isfinite(run.ended) else None,
                "throughput": run.read_bytes / (run.ended - run.job.start) if run.ended > run.job.start else 0.0,
                "full_speed": run.job.rate,
                "waiting": _waiting(run),
                "origin_bytes": run.origin_bytes,
            }
            for run, rack in zip(self.runs, self.racks, strict=True)
        ]


def simulate(fleet: Fleet, policy: Policy, progress: Callable[[], None] = lambda: None) -> Outcome:
    """Run all racks, one after the other; ``progress`` is called after each."""
    runs: list[Run] = []
    racks: list[str] = []
    placed = place(fleet)
    for rack in fleet.racks:
        jobs = placed[rack.name]
        found = RackSimulation(rack, fleet.datasets, fleet.weights, fleet.quotas).simulate(jobs, policy)
        runs += found
        racks += [rack.name] * len(found)
        progress()
    return Outcome(policy, tuple(runs), tuple(racks))


def _waiting(run: Run) -> float:
    if math.isinf(run.ended):
        return 1.0
    seconds = run.ended - run.job.start
    return run.waited_seconds / seconds if seconds > 0 else 0.0


def _at_full_speed(runs: list[Run]) -> float:
    return sum(run.job.work_bytes / run.job.rate for run in runs)
