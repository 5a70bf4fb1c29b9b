"""Why a job is as fast as it is, and what more or less cache would change: numbers and words. Pure.

The answer to "what if" is not estimated: the same allocation is solved again with another capacity, by the function
that the daemons run (``quiver.allocation.allocate``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from quiver.allocation import Allocation, DatasetDemand, Policy, Problem, Reader, allocate
from quiver.overview import AllocationView, ReaderView, ShareView
from quiver.sizes import format_decimal, format_rate
from quiver_client.operating.merging import Dataset, Job

TB: Final = 1e12
SMALL: Final = 4  # a rack that has less than so many TB is asked about a quarter of what it has
NOTICED: Final = 0.01  # a smaller change is none
DIFFERS: Final = 0.1  # of a prediction, above which another one is told apart from it
FULL_SPEED: Final = 0.99  # of f*, above which a job does not wait


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The rate of a reader, and what is cached of its dataset, with another capacity."""

    change_bytes: float
    cache_bytes: float
    predicted: float
    ratio: float  # to what the same solution gives it with the capacity that there is


@dataclass(frozen=True, slots=True)
class Explained:
    """What is known of a reader of a dataset. Rates in bytes per second, 0 for unknown; ``None`` for no limit.

    ``best``: f*. ``bandwidth``: b, what its dataset may read from the origin. ``cached_share``: c, what is resident of
    it; ``given_share``: what its allocation gives it. ``anew``: what it would read if that was solved again now.
    """

    reader: str
    tenant: str
    dataset: str
    best: float
    bandwidth: float | None
    cached_share: float
    given_share: float
    predicted: float
    measured: float
    waited: float
    reason: str
    anew: float = 0.0
    what_if: tuple[WhatIf, ...] = ()
    stock: bool = False  # its reads alone are seen: f* is taken from them, and how long it waits is not known

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def problem_of(view: AllocationView) -> Problem:
    """Return the problem that a daemon solved. Datasets are called by their ids, or names where they have none."""
    return Problem(
        capacity_bytes=view.capacity_bytes,
        datasets=tuple(
            DatasetDemand(
                name=_key(share),
                size_bytes=share.size_bytes,
                origin=share.origin,
                readers=tuple(
                    Reader(
                        name=_told(share, reader),
                        rate=math.inf if reader.rate is None else reader.rate,
                        tenant=reader.tenant,
                        ordered=reader.ordered,
                        attained_bytes=reader.attained_bytes,
                    )
                    for reader in share.readers
                ),
                pinned=share.pinned,
                resident_bytes=share.resident_bytes,
            )
            for share in view.datasets
        ),
        origin_rates=view.origin_rates,
        weights=view.weights,
        quotas=view.quotas,
    )


def solved_again(view: AllocationView) -> list[tuple[float, Allocation]]:
    """Return the allocations with the capacity that there is, with more and with less, each with the change.

    None for a policy that this version does not know. The first one may differ from the allocation that holds, which
    changes only for a clear gain: so changes are told in relation to the first.
    """
    try:
        policy = Policy(view.policy)
    except ValueError:
        return []
    problem, change = problem_of(view), change_for(view.capacity_bytes)
    return [
        (by, allocate(replace(problem, capacity_bytes=problem.capacity_bytes + by), policy))
        for by in ((0.0, change, -change) if change else ())
    ]


def change_for(capacity_bytes: float) -> float:
    """Return the change of capacity to ask about: 1 TB, or a quarter of a rack with less than 4 TB."""
    return TB if capacity_bytes >= SMALL * TB else capacity_bytes / 4


def explain_job(its: Sequence[Job], datasets: Sequence[Dataset], view: AllocationView | None) -> list[Explained]:
    """Return what is known of a job on each of its datasets."""
    solved = solved_again(view) if view is not None else []
    by_id = {it.id: it for it in datasets}
    explained = []
    for job in its:
        share = _share(view, job.dataset_id)
        reader = _reader(share, job)
        explained.append(_explained(job, reader, share, by_id.get(job.dataset_id), solved))
    return explained


def explain_dataset(dataset: Dataset, jobs: Sequence[Job], view: AllocationView | None) -> list[Explained]:
    """Return what is known of each reader of a dataset."""
    return explain_job([it for it in jobs if it.dataset_id == dataset.id], [dataset], view)


def _explained(
    job: Job,
    reader: ReaderView | None,
    share: ShareView | None,
    dataset: Dataset | None,
    solved: Sequence[tuple[float, Allocation]],
) -> Explained:
    size = share.size_bytes if share is not None else float(dataset.size_bytes if dataset is not None else 0)
    what_if: tuple[WhatIf, ...] = ()
    anew = 0.0
    if reader is not None and share is not None:
        key = _key(share)
        told = [
            (by, it.shares[key].cache_bytes, it.predicted.get((key, _told(share, reader)), 0.0)) for by, it in solved
        ]
        anew = told[0][2] if told else 0.0
        what_if = tuple(WhatIf(*it, it[2] / anew) for it in told[1:] if anew > 0)
    return Explained(
        reader=job.shown,
        tenant=job.tenant,
        dataset=dataset.name if dataset is not None else job.dataset,
        best=job.rate or (reader.rate or 0.0 if reader is not None else 0.0),
        bandwidth=share.origin_rate if share is not None else None,
        cached_share=dataset.resident_share if dataset is not None else 0.0,
        given_share=min(share.cache_bytes / size, 1.0) if share is not None and size else 0.0,
        predicted=reader.predicted if reader is not None else 0.0,
        measured=job.throughput,
        waited=job.waited,
        reason=share.reason if share is not None else "",
        anew=anew,
        what_if=what_if,
        stock=job.stock,
    )


def in_words(it: Explained, *, allocates: bool = True) -> list[str]:
    """Return what is known of a reader as sentences, a line each."""
    of = f" of tenant {it.tenant}" if it.tenant else ""
    lines = [f"{it.reader}{of} reads {it.dataset}."]
    if it.stock:
        lines.append("It is a stock loader: how long it waits is not seen.")
    if not it.best:
        lines.append("How fast it would read without waiting (f*) is not known yet.")
    elif it.stock:
        lines.append(f"Without waiting it is taken to read {format_rate(it.best)} (f*), by what it was seen to read.")
    else:
        lines.append(f"Without waiting it would read {format_rate(it.best)} (f*).")
    measured = f"It reads {format_rate(it.measured)}" if it.measured else "What it reads was not measured yet"
    is_seen = (it.measured or it.waited) and not it.stock
    waits = f", and {'' if it.measured else 'it '}waits {it.waited:.0%} of its time" if is_seen else ""
    lines.append(f"{measured}{waits}.")
    lines.append(f"{it.cached_share:.0%} of the dataset is in the cache (c).")
    if not allocates:
        lines.append(
            "No allocation holds for it: the daemons allocate nothing, or nothing yet. Who needs a shard most gets it."
        )
        return lines
    limit = "has no known limit" if it.bandwidth is None else f"gives it {format_rate(it.bandwidth)}"
    lines.append(f"It is given {it.given_share:.0%} of the dataset as cache; its origin {limit} (b).")
    if it.reason:
        lines.append(f"Why: {it.reason.rstrip('.')}.")
    if it.predicted:
        lines.append(f"With that it is predicted to read {format_rate(it.predicted)}{_compared(it)}.")
        if _differs_anew(it):
            lines.append(
                f"If the cache was divided anew now, that would be {format_rate(it.anew)}: a division is replaced"
                " only by one that is clearly better."
            )
    lines += [_change(it, each) for each in it.what_if if it.predicted]
    return lines


def _compared(it: Explained) -> str:
    if not it.measured:
        return ""
    ratio = it.predicted / it.measured
    return ", as it does" if abs(ratio - 1) <= DIFFERS else f", {ratio:.2f} times what it reads now"


def _change(it: Explained, other: WhatIf) -> str:
    what = f"{format_decimal(abs(other.change_bytes))} {'more' if other.change_bytes > 0 else 'less'} cache in the rack"
    ratio = other.ratio - 1
    if abs(ratio) <= NOTICED:
        full = other.change_bytes > 0 and it.best and other.predicted >= FULL_SPEED * it.best
        why = ": it reads as fast as its loop can" if full else ""
        return f"{what} would not change that{why}."
    compared = "that" if _differs_anew(it) else "it"  # what more cache would change is solved anew
    how = "faster" if ratio > 0 else "slower"
    return f"{what} would make {compared} {abs(ratio):.0%} {how}: {format_rate(other.predicted)}."


def _differs_anew(it: Explained) -> bool:
    """Whether another division of the cache would be made now than the one that holds."""
    return bool(it.anew and it.predicted) and abs(it.anew / it.predicted - 1) > DIFFERS


def _share(view: AllocationView | None, dataset_id: str) -> ShareView | None:
    return next((it for it in view.datasets if it.id == dataset_id), None) if view is not None else None


def _reader(share: ShareView | None, job: Job) -> ReaderView | None:
    """Return the reader that a job counts in: its group, if it has one, which shares one allocation."""
    readers = share.readers if share is not None else []
    for name in filter(None, (job.group, job.job)):
        for reader in readers:
            if reader.name == name and reader.tenant == job.tenant:
                return reader
    unnamed = [it for it in readers if it.name.startswith("unnamed") and it.tenant == job.tenant]
    return unnamed[0] if not job.job and len(unnamed) == 1 else None


def _key(share: ShareView) -> str:
    return share.id or share.name


def _told(share: ShareView, reader: ReaderView) -> str:
    """Return a name that no other reader of the dataset has: jobs of several tenants may be called the same."""
    is_only = sum(it.name == reader.name for it in share.readers) == 1
    return reader.name if is_only else f"{reader.name}\0{reader.tenant}\0{reader.ordered}"
