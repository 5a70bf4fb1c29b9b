"""Adds up what the daemons of a rack answered. Pure.

Bytes that are held are summed, since each daemon holds its own; a consumer reports to every daemon, so its rate counts
once. A stock loader reports to none: each daemon says what it takes that job to read from the whole rack, and the mean
of them counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from quiver.identity import told_apart
from quiver.overview import AllocationView, DatasetsView, DatasetView, JobsView, JobView, RankView

Key = tuple[str, str, str, str, bool]


@dataclass(frozen=True, slots=True)
class Job:
    """A job on one dataset, in the whole rack. Rates are sums over its ranks; ``waited`` is the mean.

    ``ranks``: of a stock loader, its processes.
    """

    job: str
    group: str
    tenant: str
    dataset: str
    dataset_id: str
    ranks: int
    rate: float
    throughput: float
    waited: float
    attained_bytes: float
    left_bytes: float
    ordered: bool
    stock: bool

    @property
    def shown(self) -> str:
        return self.job or "(unnamed)"


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset in the whole rack. ``pinned_at``: how many daemons keep it; ``read`` by tier."""

    id: str
    name: str
    samples: int
    size_bytes: int
    repeated_bytes: int
    resident_bytes: int
    saved_bytes: int
    pinned_at: int
    readers: tuple[str, ...]
    reader_count: int
    tenants: tuple[str, ...]
    read: dict[str, int] = field(default_factory=dict)

    @property
    def resident_share(self) -> float:
        """At most 1: with replicas a rack holds some of it several times."""
        return min(self.resident_bytes / self.size_bytes, 1.0) if self.size_bytes else 0.0


def merged_jobs(views: Iterable[JobsView], datasets: Sequence[Dataset] = ()) -> list[Job]:
    """Return the jobs of the rack, the fastest first. ``datasets``: whose names they are shown with."""
    names = {it.id: it.name for it in datasets}
    told: dict[Key, list[JobView]] = {}
    for view in views:
        for job in view.jobs:
            told.setdefault((job.tenant, job.group, job.job, job.dataset_id, job.stock), []).append(job)
    jobs = [_job(its, names.get(its[0].dataset_id, its[0].dataset)) for its in told.values()]
    return sorted(jobs, key=lambda it: (-it.rate, -it.throughput, it.tenant, it.job, it.dataset))


def _job(told: Sequence[JobView], dataset: str) -> Job:
    by_id: dict[str, list[RankView]] = {}
    for job in told:
        for rank in job.ranks:
            by_id.setdefault(rank.id, []).append(rank)
    first = told[0]
    ranks = [_mean(its) if first.stock else max(its, key=_progress) for its in by_id.values()]
    return Job(
        job=first.job,
        group=first.group,
        tenant=first.tenant,
        dataset=dataset,
        dataset_id=first.dataset_id,
        ranks=max(job.processes for job in told) if first.stock else len(ranks),
        rate=sum(rank.rate for rank in ranks),
        throughput=sum(rank.throughput for rank in ranks),
        waited=fmean(rank.waited for rank in ranks) if ranks else 0.0,
        attained_bytes=sum(rank.attained_bytes for rank in ranks),
        left_bytes=sum(rank.left_bytes for rank in ranks),
        ordered=any(job.ordered for job in told),
        stock=first.stock,
    )


def _progress(rank: RankView) -> tuple[float, float, float]:
    """Order the reports of one rank: the latest has read most."""
    return rank.attained_bytes, -rank.left_bytes, rank.throughput


def _mean(ranks: Sequence[RankView]) -> RankView:
    return RankView(
        ranks[0].id,
        rate=fmean(rank.rate for rank in ranks),
        throughput=fmean(rank.throughput for rank in ranks),
        attained_bytes=fmean(rank.attained_bytes for rank in ranks),
    )


def merged_datasets(views: Iterable[DatasetsView]) -> list[Dataset]:
    """Return the datasets of the rack, those with most bytes held first, each by a name of its own."""
    told: dict[str, list[DatasetView]] = {}
    for view in views:
        for dataset in view.datasets:
            told.setdefault(dataset.id, []).append(dataset)
    names = told_apart({identifier: _name(its) for identifier, its in told.items()})
    datasets = [
        Dataset(
            id=identifier,
            name=names[identifier],
            samples=max(it.samples for it in its),
            size_bytes=max(it.size_bytes for it in its),
            repeated_bytes=max(it.repeated_bytes for it in its),
            resident_bytes=sum(it.resident_bytes for it in its),
            saved_bytes=sum(it.saved_bytes for it in its),
            pinned_at=sum(it.pinned for it in its),
            readers=tuple(sorted({name for it in its for name in it.readers})),
            reader_count=max(it.reader_count for it in its),
            tenants=tuple(sorted({name for it in its for name in it.tenants})),
            read={tier: sum(getattr(it.read, tier) for it in its) for tier in ("host", "rack", "origin")},
        )
        for identifier, its in told.items()
    ]
    return sorted(datasets, key=lambda it: (-it.resident_bytes, -it.size_bytes, it.name))


def _name(its: Sequence[DatasetView]) -> str:
    """Return what most daemons call a dataset; one that does not know it calls it nothing much."""
    known = [it.name for it in its if it.size_bytes] or [it.name for it in its]
    (name, _), *_ = sorted(Counter(known).items(), key=lambda item: (-item[1], item[0]))
    return name


def best_allocation(views: Iterable[AllocationView]) -> AllocationView | None:
    """Return the allocation of the daemon that knows most readers, the newest of those; ``None`` if none allocates.

    All solve the same problem, that of the whole rack, from the reports that they hear.
    """
    solved = [view for view in views if view.policy and view.datasets]
    return max(solved, key=lambda it: (sum(len(each.readers) for each in it.datasets), -it.age_seconds), default=None)
