"""What a case should come to: by the allocation that ships, by an equal split, and by brute force.

The model is SiloD's (Zhao et al., EuroSys 2023): the jobs of a dataset that substitute need max(rate) · (1 - c/d) of
the origin together, each that reads in a fixed order rate · (1 - c/d).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from bench.allocation.cases import Case, Job
from quiver.allocation import DatasetDemand, Policy, Problem, Reader

STEPS: Final = 40  # of the cache, which brute force divides between datasets
ORIGIN: Final = "origin"


@dataclass(frozen=True)
class Expected:
    """Bytes per second by job, and what makes them so. ``cache``: share of each dataset that is resident."""

    rates: Mapping[str, float]
    cache: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.rates.values())


def problem_of(case: Case) -> Problem:
    """Return what a policy would be told of this case if every estimate were exact."""
    datasets = []
    for source in case.sources:
        grouped: dict[str, list[Job]] = {}
        for job in case.jobs:
            if job.source == source.name:
                grouped.setdefault(job.group or job.name, []).append(job)
        readers = tuple(
            Reader(name=name, rate=max(map(case.need, jobs)), tenant=jobs[0].tenant, ordered=jobs[0].ordered)
            for name, jobs in grouped.items()
        )
        datasets.append(DatasetDemand(name=source.name, size_bytes=source.size_bytes, origin=ORIGIN, readers=readers))
    return Problem(
        capacity_bytes=case.capacity_bytes,
        datasets=tuple(datasets),
        origin_rates={ORIGIN: case.origin_rate} if case.origin_rate else {},
        weights={job.tenant: job.weight for job in case.jobs if job.tenant},
    )


def predicted(case: Case, policy: str) -> Expected | None:
    """Return what ``quiver.allocation.allocate`` predicts; ``None`` without a policy, or where there are none yet."""
    import quiver.allocation

    allocate: Any = getattr(quiver.allocation, "allocate", None)
    if policy not in set(Policy) or allocate is None:
        return None
    told = allocate(problem_of(case), Policy(policy))
    by_reader = {reader: rate for (_, reader), rate in told.predicted.items()}
    rates = {job.name: min(case.need(job), by_reader[job.group or job.name]) for job in case.jobs}
    cache = {it.name: min(told.shares[it.name].cache_bytes / it.size_bytes, 1.0) for it in case.sources}
    return Expected(rates, cache)


def equal_split(case: Case) -> Expected:
    """Return what each job would reach if cache and bandwidth were split equally between groups.

    Groups that substitute on one dataset put their parts together: they share one stream.
    """
    counted = {job.group or job.name for job in case.jobs}
    each, bandwidth = case.capacity_bytes / len(counted), case.origin_rate / len(counted)
    cache, rates = dict[str, float](), dict[str, float]()
    for source in case.sources:
        its = [job for job in case.jobs if job.source == source.name]
        cache[source.name] = min(each * len({job.group or job.name for job in its}) / source.size_bytes, 1.0)
        miss = 1 - cache[source.name]
        together = bandwidth * len({job.group or job.name for job in its if not job.ordered})
        for job in its:
            limit = (bandwidth if job.ordered else together) / miss if miss > 0 and bandwidth else case.need(job)
            rates[job.name] = min(case.need(job), limit)
    return Expected(rates, cache)


def optimum(case: Case, objective: str = "throughput") -> Expected:
    """Return the best by trying every split of the cache in fortieths, with the bandwidth divided best for each.

    ``objective``: ``throughput``, bytes of all jobs together; ``max-min``, the least share of its rate that a job
    reaches, nobody below an equal split.
    """
    floor = equal_split(case)
    best, best_value = floor, -math.inf
    for cache in _splits(case):
        if objective == "throughput":
            found = _most(case, cache)
            value = found.total
        else:
            share = _evenly(case, cache, floor)
            found, value = _at(case, cache, share, floor), share
        if value > best_value:
            best, best_value = found, value
    return best


def _splits(case: Case) -> Iterator[dict[str, float]]:
    unit = case.capacity_bytes / STEPS
    for parts in itertools.product(range(STEPS + 1), repeat=len(case.sources) - 1):
        rest = STEPS - sum(parts)
        if rest >= 0:
            sized = zip(case.sources, (*parts, rest), strict=True)
            yield {source.name: min(part * unit / source.size_bytes, 1.0) for source, part in sized}


def _most(case: Case, cache: Mapping[str, float]) -> Expected:
    """Return the most bytes per second with this cache: bandwidth goes where a byte of it feeds most."""
    pieces = list[tuple[float, float, float, tuple[Job, ...]]]()  # cost per byte fed, miss share, rate, jobs fed
    for source in case.sources:
        miss = 1 - cache[source.name]
        its = [job for job in case.jobs if job.source == source.name]
        pieces += [(miss, miss, case.need(job), (job,)) for job in its if job.ordered]
        sharing, below = sorted((job for job in its if not job.ordered), key=case.need), 0.0
        for at, job in enumerate(sharing):
            pieces.append((miss / (len(sharing) - at), miss, case.need(job) - below, tuple(sharing[at:])))
            below = case.need(job)
    rates, left = {job.name: 0.0 for job in case.jobs}, case.origin_rate or math.inf
    for _, miss, rate, jobs in sorted(pieces, key=lambda piece: piece[0]):
        fed = min(rate, left / miss) if miss > 0 else rate
        left -= fed * miss
        for job in jobs:
            rates[job.name] += fed
    return Expected(rates, cache)


def _at(case: Case, cache: Mapping[str, float], share: float, floor: Expected) -> Expected:
    """Return what each job reaches if every one gets this share of its rate: who shares a stream, reads as it flows."""
    rates = {it.name: max(share * case.need(it), floor.rates[it.name]) for it in case.jobs}
    flows = {
        source.name: max((rates[it.name] for it in case.jobs if it.source == source.name and not it.ordered), default=0)
        for source in case.sources
    }
    shared = {it.name: min(case.need(it), flows[it.source]) for it in case.jobs if not it.ordered}
    return Expected(rates | shared, cache)


def _evenly(case: Case, cache: Mapping[str, float], floor: Expected) -> float:
    """Return the share of its rate that every job can reach with this cache; negative if not even the floor."""
    if not case.origin_rate:
        return 1.0

    def demand(share: float) -> float:
        total = 0.0
        for source in case.sources:
            its = [job for job in case.jobs if job.source == source.name]
            rates = {job: max(share * case.need(job), floor.rates[job.name]) for job in its}
            shared = max((rate for job, rate in rates.items() if not job.ordered), default=0.0)
            ordered = sum(rate for job, rate in rates.items() if job.ordered)
            total += (shared + ordered) * (1 - cache[source.name])
        return total

    low, high = 0.0, 1.0
    if demand(0.0) > case.origin_rate * (1 + 1e-9):
        return -1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if demand(middle) <= case.origin_rate else (low, middle)
    return low if low < 1 - 1e-9 else 1.0
