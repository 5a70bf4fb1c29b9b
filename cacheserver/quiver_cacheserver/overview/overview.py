"""The answers to operators, and what they have done: the overview joined to the node. Belongs to the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, TypeVar

from quiver.allocation import DatasetDemand
from quiver.digest import Digest
from quiver.domain import Domain
from quiver.errors import BadRequest, NotFound
from quiver.manifest import Manifest
from quiver.overview import (
    ENTRIES_MAX,
    READERS_SHOWN_MAX,
    AllocationView,
    DatasetRequest,
    DatasetsView,
    DatasetView,
    EvictAnswer,
    JobsView,
    PinAnswer,
    ProbeRequest,
    ProbeView,
    RankView,
    TierBytes,
)
from quiver.sizes import format_size
from quiver_cacheserver.access.caller import Caller
from quiver_cacheserver.names import consumer_in, name_in
from quiver_cacheserver.node import Node
from quiver_cacheserver.overview import removal, shares
from quiver_cacheserver.overview.ids import dataset_id, rank_id
from quiver_cacheserver.overview.jobs import Reading, by_dataset, jobs_of
from quiver_cacheserver.overview.known import Key, Known, KnownDatasets, Look
from quiver_cacheserver.overview.series import Level, Named
from quiver_cacheserver.pins import pin_of
from quiver_cacheserver.usage import Label

log = logging.getLogger(__name__)

T = TypeVar("T")

PINS_SECONDS: Final = 5.0  # between two looks for the shards of pinned datasets that were not known
SUPERVISED_SECONDS: Final = 5.0  # the pause after a look that failed unexpectedly


class Overview:
    """What operators ask of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._known = KnownDatasets(node.store, self._reported, self._named)

    # -- who reads ----------------------------------------------------------------------------------------------------

    def jobs(self, caller: Caller) -> JobsView:
        """Return the jobs that read from this daemon."""
        jobs, left_out = jobs_of(self._readings(caller.sees), ENTRIES_MAX)
        return JobsView(self._node.name, jobs, left_out)

    def _readings(self, sees: Domain | None) -> list[Reading]:
        node, found = self._node, list[Reading]()
        for consumer in node.needs.consumers.values():
            dataset = node.datasets[consumer.dataset]
            domain, manifest = dataset.domain, dataset.manifest.digest
            if sees not in (None, domain):
                continue
            report, measured = consumer.report, consumer.report.measured
            if report.hold:  # nobody reads yet: what was warmed is kept for a job that has not begun
                continue
            rank = RankView(
                rank_id(consumer_in(domain, consumer.name)),
                rate=report.rate,
                throughput=measured.throughput,
                waited=measured.waited,
                attained_bytes=measured.attained_bytes,
                left_bytes=float(consumer.left.sum()),
            )
            name = node.dataset_names.shown(manifest, domain)
            found.append(Reading(report.identity, dataset_id(manifest, domain), name, rank, report.ordered))
        for seen in node.readers.seen(time.monotonic()):
            if sees in (None, seen.domain):
                name = node.dataset_names.shown(seen.manifest, seen.domain)
                rank = RankView(
                    rank_id(seen.name.encode()), throughput=seen.throughput, attained_bytes=seen.attained_bytes
                )
                identifier = dataset_id(seen.manifest, seen.domain)
                found.append(Reading(seen.identity, identifier, name, rank, True, True, seen.processes))
        return found

    def probe(self, asked: ProbeRequest, caller: Caller) -> ProbeView:
        """Ask a job for probes, or return what is known of those that it made."""
        node = self._node
        reports = [
            consumer.report
            for consumer in node.needs.consumers.values()
            if consumer.report.identity.job == asked.job
            and caller.sees in (None, node.datasets[consumer.dataset].domain)
        ]
        series = max((report.measured.probe_series for report in reports), default=0)
        if asked.begin and reports:
            node.reports.probes.ask(asked.job, caller.sees, series)
        its = [report for report in reports if report.measured.probe_series == series] if series else []
        return ProbeView(
            node.name,
            asked.job,
            len({report.consumer for report in reports}),
            series,
            hits=sum(report.measured.probed_hits for report in its),
            misses=sum(report.measured.probed_misses for report in its),
            rate=sum(report.rate for report in its),
            throughput=sum(report.measured.throughput for report in its),
        )

    # -- what there is ------------------------------------------------------------------------------------------------

    async def datasets(self, caller: Caller) -> DatasetsView:
        """Return the datasets that this daemon knows, the largest first."""
        node, look = self._node, await self._known.look()
        jobs, _ = jobs_of(self._readings(caller.sees), ENTRIES_MAX)
        of, used = by_dataset(jobs), node.usage.by_dataset()
        views = []
        for known in look.datasets.values():
            if caller.sees not in (None, known.domain):
                continue
            identifier = dataset_id(known.manifest, known.domain)
            readers = of.get(identifier, [])
            views.append(
                DatasetView(
                    id=identifier,
                    name=node.dataset_names.shown(known.manifest, known.domain),
                    samples=known.facts.samples,
                    size_bytes=known.facts.size_bytes,
                    repeated_bytes=known.facts.repeated_bytes,
                    resident_bytes=known.held.resident_bytes,
                    saved_bytes=known.held.saved_bytes,
                    pinned=identifier in node.pins,
                    readers=sorted({job.job for job in readers})[:READERS_SHOWN_MAX],
                    reader_count=len(readers),
                    tenants=sorted({job.tenant for job in readers} - {""})[:READERS_SHOWN_MAX],
                    read=TierBytes(**used.get((known.domain, known.manifest), {})),
                )
            )
        known_ids = {it.id for it in views}
        views += [
            DatasetView(id=identifier, name=pin.name, pinned=True)
            for identifier, pin in node.pins.items()
            if identifier not in known_ids and not node.pins.is_known(identifier) and pin.is_seen_from(caller.sees)
        ]
        views.sort(key=lambda it: (-it.resident_bytes, -it.size_bytes, it.name))
        left_out = look.left_out + max(len(views) - ENTRIES_MAX, 0)
        capacity = node.store.capacity_bytes
        return DatasetsView(node.name, views[:ENTRIES_MAX], capacity, node.pins.limit_bytes, left_out)

    async def collector(self, caller: Caller) -> Named:
        """Return what Prometheus is told by name."""
        node, look = self._node, await self._known.look()
        readings: dict[str, dict[str, list[RankView]]] = {}  # by dataset and tenant
        for it in self._readings(caller.sees):
            ranks = readings.setdefault(it.dataset_id, {}).setdefault(it.identity.tenant, [])
            if not it.stock:  # how long a stock loader waits, nobody sees
                ranks.append(it.rank)
        levels = []
        for known in look.datasets.values():
            if caller.sees not in (None, known.domain):
                continue
            name, held = node.dataset_names.shown(known.manifest, known.domain), known.held
            tenants = readings.get(dataset_id(known.manifest, known.domain), {"": []})
            for tenant, ranks in tenants.items():
                waited = sum(rank.waited for rank in ranks)
                level = Level(name, tenant, known.facts.size_bytes, held.resident_bytes, held.saved_bytes)
                levels.append(level._replace(ranks=len(ranks), waited=waited))

        def naming(label: Label) -> tuple[str, str | None]:
            """A read that names no tenant is that of the one tenant whose jobs report on the dataset."""
            tenants = readings.get(dataset_id(label.manifest, label.domain), {})
            tenant = label.tenant or (None if not tenants else "" if len(tenants) > 1 else next(iter(tenants)))
            return node.dataset_names.shown(label.manifest, label.domain), tenant

        return Named(levels, node.usage.series(naming, caller.sees))

    def allocation(self, caller: Caller) -> AllocationView:
        """Return the last allocation of this daemon's slice of the rack."""
        node, solved = self._node, self._node.allocator.current
        if solved.policy is None or not solved.made_at:
            return AllocationView(node.name)
        keys = self._keys(solved.names)

        def shown(it: DatasetDemand) -> shares.Shown | None:
            key = keys.get(it.name)
            if key is None:
                return shares.Shown("", it.name) if caller.sees is None else None
            if caller.sees not in (None, key[0]):
                return None
            return shares.Shown(dataset_id(key[1], key[0]), node.dataset_names.shown(key[1], key[0]))

        age = max(time.monotonic() - solved.made_at, 0.0)
        return shares.view(
            node.name, solved.problem, solved.allocation, shown, age_seconds=age, entries_max=ENTRIES_MAX
        )

    # -- what is done -------------------------------------------------------------------------------------------------

    async def pin(self, request: DatasetRequest, caller: Caller) -> PinAnswer:
        """Pin a dataset. Raises ``BadRequest`` if it is too large, ``DiskFailed`` if that cannot be remembered."""
        node = self._node
        known = self._find(await self._known.look(anew=True), request.id, caller)
        if known is None and not request.size_bytes:
            raise NotFound(f"no dataset with the id {request.id} is known here")
        size = known.facts.size_bytes if known is not None else request.size_bytes
        name = node.dataset_names.shown(known.manifest, known.domain) if known is not None else request.name
        pin = pin_of(name or request.name, int(size * self._own_share()), caller.tenant, caller.sees)
        quota = node.allocator.settings.quotas.get(caller.tenant) if caller.tenant else None
        await self._in_thread(partial(node.pins.add, request.id, pin, quota))
        if known is not None:
            node.pins.know(request.id, known.domain, known.manifest, known.facts.shards)
        return PinAnswer(node.name, known is not None, known.held.resident_bytes if known is not None else 0)

    async def unpin(self, request: DatasetRequest, caller: Caller) -> PinAnswer:
        """Unpin a dataset. Raises ``NotFound`` if it is not pinned here."""
        known = self._find(await self._known.look(anew=True), request.id, caller)
        if not await self._in_thread(partial(self._node.pins.remove, request.id, caller.sees)):
            raise NotFound(f"no dataset with the id {request.id} is pinned here")
        return PinAnswer(self._node.name, known is not None, known.held.resident_bytes if known is not None else 0)

    async def evict(self, request: DatasetRequest, caller: Caller) -> EvictAnswer:
        """Evict a dataset. Raises ``NotFound`` for an unknown one, ``BadRequest`` for a pinned one."""
        node, look = self._node, await self._known.look(anew=True)
        known = self._find(look, request.id, caller)
        if known is None:
            raise NotFound(f"no dataset with the id {request.id} is known here")
        if request.id in node.pins:
            raise BadRequest("the dataset is pinned; unpin it first")
        used, reported = node.manifests.opened.recently_used(), self._reported()
        others = [
            it.facts
            for key, it in look.datasets.items()
            if it.domain == known.domain
            and it.manifest != known.manifest
            and (it.manifest in used or key in reported or dataset_id(it.manifest, it.domain) in node.pins)
        ]

        def remove() -> tuple[int, int]:
            return removal.evict(node.store, known.facts, removal.shared_with(known.facts, others), known.domain)

        try:
            evicted, kept = await self._in_thread(remove)
        finally:
            self._known.expire()
        log.info(
            "%s evicted of %s on request", format_size(evicted), node.dataset_names.shown(known.manifest, known.domain)
        )
        return EvictAnswer(node.name, evicted, kept)

    async def watch_pins(self) -> None:
        """Learn the shards of pinned datasets as those become known, until cancelled: after a start, above all."""
        while True:
            try:
                await self._learn_pins()
            except Exception:  # a supervisor: a bug costs a look, and not the daemon
                log.exception("looking for pinned datasets failed")
                await asyncio.sleep(SUPERVISED_SECONDS)
            await asyncio.sleep(PINS_SECONDS)

    async def _learn_pins(self) -> None:
        pins = self._node.pins
        if all(map(pins.is_known, pins.ids)):
            return
        for known in (await self._known.look()).datasets.values():
            identifier = dataset_id(known.manifest, known.domain)
            pins.know(identifier, known.domain, known.manifest, known.facts.shards)

    # -- of the node --------------------------------------------------------------------------------------------------

    def _reported(self) -> Mapping[Key, Manifest]:
        return {(it.domain, it.manifest.digest): it.manifest for it in self._node.datasets.values()}

    def _named(self, manifest: Digest, domain: Domain, name: str) -> None:
        self._node.dataset_names.heard(manifest, domain, own=name)

    def _keys(self, names: Mapping[Digest, str]) -> dict[str, Key]:
        """Return the datasets of a problem, by the name that they have there. ``names``: as ``Solved`` has them."""
        keys: dict[Digest, Key] = {name_in(*key): key for key in self._known.last.datasets}
        keys |= {name: (it.domain, it.manifest.digest) for name, it in self._node.datasets.items()}
        return {shown: keys[name] for name, shown in names.items() if name in keys}

    def _find(self, look: Look, identifier: str, caller: Caller) -> Known | None:
        """Return the dataset with this id, if the caller may see it."""
        return next(
            (
                it
                for it in look.datasets.values()
                if dataset_id(it.manifest, it.domain) == identifier and caller.sees in (None, it.domain)
            ),
            None,
        )

    def _own_share(self) -> float:
        """Return the part of a dataset that this daemon owns, of all copies together."""
        ring = self._node.registry.ring
        weights = {ring.members[at].id: ring.members[at].weight for at in ring.owning}
        own = weights.get(self._node.registry.own.id, 0.0)
        # One that drains owns nothing; what it has may be pinned.
        weight = own / sum(weights.values()) if own else 1.0
        return min(weight * max(min(ring.replicas, len(ring.owning)), 1), 1.0)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._node.disk_threads, work)
