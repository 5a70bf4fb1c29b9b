"""Who reads what, from the last report of each consumer. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from quiver.identity import Identity
from quiver.overview import JobView, RankView


class Reading(NamedTuple):
    """A rank, or a reader that reports nothing, and the dataset that it reads: its id and shown name."""

    identity: Identity
    dataset_id: str
    dataset: str
    rank: RankView
    ordered: bool = False
    stock: bool = False
    processes: int = 0


def jobs_of(readings: Iterable[Reading], entries_max: int) -> tuple[list[JobView], int]:
    """Return the jobs, each dataset of a job by itself, the fastest first; and how many more there are.

    Ranks without a job's name are one entry per dataset and tenant.
    """
    ranks: dict[tuple[Identity, str, str, bool], list[Reading]] = {}
    for it in readings:
        ranks.setdefault((it.identity, it.dataset_id, it.dataset, it.stock), []).append(it)
    jobs = [
        JobView(
            job=who.job,
            group=who.group,
            tenant=who.tenant,
            dataset=dataset,
            dataset_id=identifier,
            ranks=sorted((it.rank for it in its), key=lambda rank: rank.id),
            ordered=any(it.ordered for it in its),
            stock=stock,
            processes=sum(it.processes for it in its),
        )
        for (who, identifier, dataset, stock), its in ranks.items()
    ]
    jobs.sort(key=lambda job: (-sum(rank.rate for rank in job.ranks), job.tenant, job.job, job.dataset))
    return jobs[:entries_max], max(len(jobs) - entries_max, 0)


def by_dataset(jobs: Iterable[JobView]) -> dict[str, list[JobView]]:
    """Return the jobs by the id of their dataset."""
    found: dict[str, list[JobView]] = {}
    for job in jobs:
        found.setdefault(job.dataset_id, []).append(job)
    return found
