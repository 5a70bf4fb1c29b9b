"""Which rack should run which job: what each would read and wait for in each rack, and the least of it in all. Pure.

A job can make up for a slow origin with cache, and for a small cache with bandwidth: racks are interchangeable
resources on which it has different costs. The cost of a job in a rack is the time of its first ``epochs``, as the
allocation of that rack predicts with this job in it, the time that the jobs running there lose, and, with less weight,
the bytes that it reads from the origin, as the time that those take. What its misses occupy of the origin delays
whoever is placed there as well: jobs are matched with positions in the racks (``quiver.matching.place``, after AlloX),
so the second job in a rack costs more than the first.

Jobs that read one dataset share its reads in a rack, so they are placed together, as one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from quiver.allocation import Allocation, DatasetDemand, Policy, Problem, Reader, allocate
from quiver.matching import place

EPOCHS: Final = 10  # a training run has tens of them: what does not fit is read again in each
ORIGIN_WEIGHT: Final = 0.1  # of a second of the origin's time: it costs even where the job does not wait for it
ASSUMED_RATE: Final = 1e9  # bytes per second of an origin of which no rack knows the rate: one value for all
NEW: Final = "\0new"  # the reader that is placed, in a problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job to place, or several that read one dataset. ``rate``: f* in bytes per second, 0 for unknown."""

    name: str
    dataset: str  # the id of its dataset
    size_bytes: float
    largest_bytes: float  # of its shards
    origin: str = ""
    rate: float = 0.0
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rack:
    """A rack as it is now. ``resident``: bytes by the id of a dataset. ``origin_rate``: bytes per second, or 0.

    ``problem``: what is allocated there, with the jobs that run; ``None`` where that is not known: then
    ``free_bytes`` is all the room that a new job is promised.
    """

    name: str
    url: str
    capacity_bytes: float
    free_bytes: float
    largest_bytes: float = math.inf  # the capacity of its smallest daemon
    resident: Mapping[str, float] = field(default_factory=dict)
    origin_rate: float = 0.0
    members: frozenset[str] = frozenset()
    policy: Policy = Policy.MAX_MIN
    problem: Problem | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A job in a rack. Rates in bytes per second, infinite for a job that nothing is known to limit.

    ``missing_bytes``: read from the origin in the first epoch; ``later_bytes``: in each later one. ``slowed``: by how
    much the jobs that run there are slowed down, summed. ``occupied_seconds``: of the origin, by all ``epochs``.
    """

    resident_bytes: float
    cache_bytes: float
    missing_bytes: float
    later_bytes: float
    rate: float
    first_epoch_seconds: float
    seconds: float
    occupied_seconds: float
    slowed: float
    is_possible: bool = True

    def origin_bytes(self, epochs: int) -> float:
        return self.missing_bytes + (epochs - 1) * self.later_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a job goes, and why. ``after``: how many jobs to start before it there. ``predictions``: by rack."""

    job: Job
    rack: int
    after: int
    predictions: tuple[Prediction, ...]
    reason: str

    @property
    def prediction(self) -> Prediction:
        return self.predictions[self.rack]


def place_jobs(jobs: Sequence[Job], racks: Sequence[Rack], epochs: int = EPOCHS) -> list[Placement]:
    """Return where each job goes. Raises ``ValueError`` for a job that fits no rack."""
    racks = with_known_rates(racks)
    predictions = [tuple(predict(job, rack, epochs) for rack in racks) for job in jobs]
    for job, its in zip(jobs, predictions, strict=True):
        if not any(it.is_possible for it in its):
            raise ValueError(f"{job.name}: one of its shards is larger than a daemon's capacity in every rack")
    costs = np.asarray([[_cost(it) for it in its] for its in predictions]).reshape(len(jobs), len(racks))
    occupied = np.asarray([[it.occupied_seconds for it in its] for its in predictions]).reshape(costs.shape)
    places = place(costs, occupied)
    together = [sum(other.machine == at.machine for other in places) for at in places]
    return [
        Placement(
            job=job,
            rack=at.machine,
            after=at.after,
            predictions=its,
            reason=_reason(at.machine, its, racks, together=count),
        )
        for job, its, at, count in zip(jobs, predictions, places, together, strict=True)
    ]


def with_known_rates(racks: Sequence[Rack]) -> list[Rack]:
    """Return the racks, those whose origin's rate is not known with the lowest that is known of another."""
    known = [rack.origin_rate for rack in racks if rack.origin_rate > 0]
    rate = min(known, default=ASSUMED_RATE)
    return [rack if rack.origin_rate > 0 else replace(rack, origin_rate=rate) for rack in racks]


def predict(job: Job, rack: Rack, epochs: int) -> Prediction:
    """Return what a job would read and wait for in a rack whose origin's rate is known."""
    resident = min(rack.resident.get(job.dataset, 0.0), job.size_bytes)
    before, after, origin_rate = _allocations(job, rack, resident)
    share = after.shares[job.dataset]
    cache = min(share.cache_bytes, job.size_bytes)
    missing, later = job.size_bytes - resident, max(job.size_bytes - cache, 0.0)
    bandwidth = min(share.origin_rate, origin_rate)
    rate = job.rate or math.inf
    first = max(job.size_bytes / rate, _seconds(missing, bandwidth))
    each = max(job.size_bytes / rate, _seconds(later, bandwidth))
    slowed = _slowed(before, after)
    return Prediction(
        resident_bytes=resident,
        cache_bytes=cache,
        missing_bytes=missing,
        later_bytes=later,
        rate=job.size_bytes / each if each > 0 else math.inf,
        first_epoch_seconds=first,
        seconds=first + (epochs - 1) * each,
        occupied_seconds=_seconds(missing + (epochs - 1) * later, origin_rate),
        slowed=slowed,
        is_possible=job.largest_bytes <= rack.largest_bytes,
    )


def _allocations(job: Job, rack: Rack, resident: float) -> tuple[Allocation | None, Allocation, float]:
    """Return the rack's allocation without and with the job, and the bandwidth that its dataset's origin has."""
    problem = rack.problem
    if problem is None:  # who else reads there is not known, so only what nobody has is free
        problem = Problem(capacity_bytes=min(rack.free_bytes + resident, rack.capacity_bytes), datasets=())
    there = next((it for it in problem.datasets if it.name == job.dataset), None)
    origin = there.origin if there is not None else job.origin
    rate = problem.origin_rates.get(origin, rack.origin_rate)
    problem = replace(problem, origin_rates={**problem.origin_rates, origin: rate})
    reader = Reader(name=NEW, rate=job.rate or math.inf)
    if there is None:
        demand = DatasetDemand(
            name=job.dataset, size_bytes=job.size_bytes, origin=origin, readers=(reader,), resident_bytes=resident
        )
        others = problem.datasets
    else:
        demand = replace(there, readers=(*there.readers, reader))
        others = tuple(it for it in problem.datasets if it is not there)
    before = allocate(problem, rack.policy) if problem.datasets else None
    return before, allocate(replace(problem, datasets=(*others, demand)), rack.policy), rate


def _slowed(before: Allocation | None, after: Allocation) -> float:
    """Return the sum of the shares of its throughput that each job that runs loses."""
    lost = 0.0
    for reader, rate in before.predicted.items() if before is not None else ():
        if 0 < rate < math.inf:
            lost += max(1 - after.predicted.get(reader, rate) / rate, 0.0)
    return lost


def _cost(it: Prediction) -> float:
    """Return the seconds that a job takes and that others lose meanwhile, and a little for the origin's time."""
    if not it.is_possible:
        return math.inf
    return it.seconds * (1 + it.slowed) + ORIGIN_WEIGHT * it.occupied_seconds


def _seconds(count: float, rate: float) -> float:
    return count / rate if count > 0 and rate > 0 else 0.0 if count <= 0 else math.inf


def _reason(chosen: int, its: Sequence[Prediction], racks: Sequence[Rack], *, together: int) -> str:
    """Return in words what decided."""
    mine = its[chosen]
    size = mine.resident_bytes + mine.missing_bytes
    words = [f"{mine.resident_bytes / size:.0%} of it is there" if mine.resident_bytes else "nothing of it is there"]
    words.append("all of it fits" if mine.later_bytes <= 0 else f"{mine.cache_bytes / size:.0%} of it fits")
    if mine.slowed >= 0.01:
        words.append(f"slows the jobs there by {mine.slowed:.0%}")
    if together > 1:
        words.append(f"with {together - 1} of the others")
    others = [(it, other) for at, (it, other) in enumerate(zip(its, racks, strict=True)) if at != chosen]
    possible = [(it, other) for it, other in others if it.is_possible]
    if not possible:
        return "; ".join([*words, "no other rack can hold it" if others else "the only rack"])
    best, other = min(possible, key=lambda pair: _cost(pair[0]))
    ratio = best.seconds / mine.seconds if mine.seconds > 0 else math.inf if best.seconds > 0 else 1.0
    if 0.99 < ratio < 1.01 and best.occupied_seconds > 1.01 * mine.occupied_seconds:
        words.append(f"in {other.name} it would be as fast and read more from the origin")
    elif ratio >= 1.01:
        words.append(f"{other.name} would take {_times(ratio)} as long")
    elif ratio > 0.99:
        words.append(f"as good as {other.name}")
    else:
        words.append(f"{other.name} alone would be faster, and is better used by others")
    return "; ".join(words)


def _times(ratio: float) -> str:
    return f"{ratio:.1f} times" if ratio < 100 else "more than 100 times"
