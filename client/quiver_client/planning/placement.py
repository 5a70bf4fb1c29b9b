"""Which rack runs which job, where the plan does not say.

``spread``: to the rack that has least to do, counting the bytes per second of the jobs that would still run there if
none waited. ``together``: as ``spread`` for a dataset's first job; the others of that dataset follow it. Without GPUs
in the model, no job waits for a place to run.
"""

from __future__ import annotations

import heapq

from quiver_client.planning.fleet import Fleet, Job


def place(fleet: Fleet) -> dict[str, list[Job]]:
    """Return the jobs of each rack in the order of their start. Deterministic."""
    racks = [rack.name for rack in fleet.racks]
    busy = dict.fromkeys(racks, 0.0)
    least = [(0.0, index) for index in range(len(racks))]
    index_of = {name: index for index, name in enumerate(racks)}
    ends: list[tuple[float, str, float]] = []
    home: dict[str, str] = {}
    placed: dict[str, list[Job]] = {name: [] for name in racks}
    for job in sorted(fleet.jobs, key=lambda job: (job.start, job.name)):
        while ends and ends[0][0] <= job.start:
            _, rack, rate = heapq.heappop(ends)
            busy[rack] = max(busy[rack] - rate, 0.0)
            heapq.heappush(least, (busy[rack], index_of[rack]))
        rack = job.rack or (home.get(job.dataset, "") if fleet.placement == "together" else "")
        if not rack:
            while least[0][0] != busy[racks[least[0][1]]]:  # an entry that is out of date
                heapq.heappop(least)
            rack = racks[least[0][1]]
        home.setdefault(job.dataset, rack)
        placed[rack].append(job)
        busy[rack] += job.rate
        heapq.heappush(least, (busy[rack], index_of[rack]))
        heapq.heappush(ends, (job.start + job.work_bytes / job.rate, rack, job.rate))
    return placed
