"""What can be known of a rack before a job runs in it: asked of its daemons, at most a few requests of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from quiver.allocation import Policy, Problem
from quiver.errors import Forbidden, QuiverError, Unavailable
from quiver.location import origin_of
from quiver.manifest import Manifest
from quiver.overview import AllocationView, dataset_id
from quiver.peer import PeerClient
from quiver_client.migration.placing import Job, Rack
from quiver_client.migration.residency import held_by_rack
from quiver_client.operating.explaining import problem_of
from quiver_client.operating.rack import ask_all, ring_of
from quiver_client.rack.members import Members
from quiver_client.stats import Stats

RACKS_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A job to place: its manifest, what to call it, and f* in bytes per second, 0 for unknown."""

    name: str
    manifest: Manifest
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What was found: the racks, and by URL why others could not be asked. ``notes``: what is not known of a rack."""

    racks: tuple[Rack, ...]
    away: Mapping[str, QuiverError]
    notes: tuple[str, ...] = ()


def jobs_of(wanted: Sequence[Wanted]) -> list[Job]:
    """Return the jobs to place: those of one dataset together, at the speed of the fastest."""
    by_dataset: dict[str, list[Wanted]] = {}
    for it in wanted:
        by_dataset.setdefault(dataset_id(it.manifest.digest), []).append(it)
    return [_job(identifier, its) for identifier, its in by_dataset.items()]


def _job(identifier: str, its: Sequence[Wanted]) -> Job:
    sizes = its[0].manifest.tables.shard_sizes
    return Job(
        name=", ".join(dict.fromkeys(it.name for it in its)),
        dataset=identifier,
        size_bytes=float(sizes.sum()),
        largest_bytes=float(sizes.max()),
        origin=origin_of(its[0].manifest.header.base),
        rate=max(it.rate for it in its) if all(it.rate for it in its) else 0.0,  # one of unknown speed may be fastest
        count=len(its),
    )


def look(urls: Sequence[str], wanted: Sequence[Wanted], origin_rate: float = 0.0) -> Seen:
    """Ask the rack of each of these daemons. ``origin_rate``: bytes per second of every origin, where that is given."""
    notes: list[str] = []

    def one(url: str) -> Rack | QuiverError:
        try:
            return _rack(url, wanted, origin_rate, notes)
        except QuiverError as error:
            return error

    with ThreadPoolExecutor(RACKS_AT_ONCE) as pool:
        found = list(pool.map(one, urls))
    racks = _distinct([it for it in found if isinstance(it, Rack)])
    away = {url: it for url, it in zip(urls, found, strict=True) if isinstance(it, QuiverError)}
    known = [rack.origin_rate for rack in racks if rack.origin_rate > 0]
    if racks and len(known) < len(racks):
        how = "the lowest that is known of the others" if known else "the same for all"
        notes.append(
            f"{', '.join(it.name for it in racks if not it.origin_rate)}: how fast the origin is was not measured yet;"
            f" {how} is assumed (--origin-rate says it)"
        )
    return Seen(tuple(racks), away, tuple(notes))


def _distinct(racks: Sequence[Rack]) -> list[Rack]:
    """Return each rack once, whichever of its daemons were named. Racks of one name are told apart by their URLs."""
    by_members = {rack.members: rack for rack in reversed(racks)}
    once = [rack for rack in racks if by_members[rack.members] is rack]
    names = [rack.name for rack in once]
    return [rack if names.count(rack.name) == 1 else replace(rack, name=f"{rack.name} ({rack.url})") for rack in once]


def _rack(url: str, wanted: Sequence[Wanted], origin_rate: float, notes: list[str]) -> Rack:
    ring = ring_of([url])
    if not ring.members:
        raise Unavailable(url, "its ring has no members")
    told = ask_all((ring.rack, ring.members), PeerClient.status)
    notes += [f"{ring.rack}: {member} does not answer: {why}" for member, why in told.problems.items()]
    capacity = float(sum(status.capacity_bytes for status in told.values))
    view = _allocation(ring.rack, [it for it in ring.members if it.id in told.answers], notes)
    rack = Rack(
        name=ring.rack,
        url=url,
        capacity_bytes=capacity,
        free_bytes=max(capacity - sum(status.resident_bytes for status in told.values), 0.0),
        largest_bytes=float(min(status.capacity_bytes for status in told.values)),
        resident={dataset_id(it.manifest.digest): _resident_bytes(url, it.manifest) for it in wanted},
        origin_rate=origin_rate,
        members=frozenset(member.url for member in ring.members),
    )
    if view is None:
        return rack
    problem = _problem(view, wanted, capacity)
    if origin_rate:
        problem = replace(problem, origin_rates=dict.fromkeys(problem.origin_rates, origin_rate))
    rate = origin_rate or min((it for it in problem.origin_rates.values() if 0 < it < math.inf), default=0.0)
    return replace(rack, problem=problem, policy=Policy(view.policy), origin_rate=rate)


def _allocation(name: str, members: Sequence[object], notes: list[str]) -> AllocationView | None:
    """Return what a rack allocates to whom; ``None`` if its daemons do not know or do not say."""
    try:
        views = ask_all((name, members), PeerClient.allocation).values  # type: ignore[arg-type]
    except QuiverError as error:
        why = "may not be asked with this token" if isinstance(error, Forbidden) else "is not known"
        notes.append(f"{name}: who reads there {why}, so only what is free now counts as room")
        return None
    known = [view for view in views if view.policy in list(Policy)]
    if not known:
        notes.append(f"{name}: its daemons allocate nothing, so only what is free now counts as room")
        return None
    return max(known, key=lambda view: (len(view.datasets), -view.age_seconds))


def _problem(view: AllocationView, wanted: Sequence[Wanted], capacity: float) -> Problem:
    """Return what the rack solved last, with the wanted datasets by the ids that they have here."""
    problem = problem_of(view)
    mine = {(it.manifest.header.name, float(it.manifest.tables.shard_sizes.sum())): it for it in wanted}
    taken, renamed = {it.name for it in problem.datasets}, {}
    for share in view.datasets:  # in another sharing domain than this one its id is another
        it = mine.get((share.name, share.size_bytes))
        here = dataset_id(it.manifest.digest) if it is not None else ""
        if share.name and here and here not in taken:  # else it is another dataset of that name and size
            renamed[share.id or share.name] = here
            taken.add(here)
    datasets = tuple(replace(it, name=renamed.get(it.name, it.name)) for it in problem.datasets)
    return replace(problem, datasets=datasets, capacity_bytes=problem.capacity_bytes or capacity)


def _resident_bytes(url: str, manifest: Manifest) -> float:
    """Return how much of a dataset a rack holds."""
    members = Members(manifest, (url,), Stats())
    try:
        members.refresh(opening=True)
        held = held_by_rack(members, np.arange(manifest.shard_count))
    finally:
        members.close()
    return float(manifest.tables.shard_sizes[held].sum())
