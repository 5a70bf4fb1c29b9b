"""The daemon without HTTP: what it holds, and where it gets what it does not hold. It composes all parts.

A shard is looked for on the daemon's disk (verified once after a restart), then at the peers that may have it (the
ring's owners and draining members), then at the origin, if the operator allows this origin.

What is asked about a shard or manifest is asked in one sharing domain. There, what only other domains hold is absent:
it is filled and uploaded like any other, and then shared without a second copy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, Literal

from quiver.digest import Digest
from quiver.domain import SINGLE, Domain
from quiver.errors import NotAllowed, NotFound, QuiverError
from quiver.lookup import as_rows
from quiver.manifest import Manifest
from quiver.overview import dataset_id
from quiver.residency import Decision, Needs, Recipe
from quiver.shard_memory import ShardMemory
from quiver.store import Kind, MemoryInventory, OpenFile, Store
from quiver.transport.tls import Credentials
from quiver.wire import NodeStatus, RangeStatus
from quiver_cacheserver.access.caller import tenant_of
from quiver_cacheserver.access.control import Access
from quiver_cacheserver.allocation import Allocator, Facts
from quiver_cacheserver.allocation.gathering import Heard
from quiver_cacheserver.bounds import FILL_THREADS
from quiver_cacheserver.budget import Budgets
from quiver_cacheserver.counters import Counters
from quiver_cacheserver.dataset_names import DatasetNames
from quiver_cacheserver.disk_health import DiskHealth
from quiver_cacheserver.draining.drain import Drain
from quiver_cacheserver.draining.giver import Giver
from quiver_cacheserver.draining.receiver import Receiver
from quiver_cacheserver.manifests import Manifests
from quiver_cacheserver.names import name_in
from quiver_cacheserver.opened import OpenManifests
from quiver_cacheserver.origins.allowed import Origins
from quiver_cacheserver.pins import Pins
from quiver_cacheserver.rack.peers import RackPeers
from quiver_cacheserver.rack.registry import Registry
from quiver_cacheserver.residency.datasets import Datasets
from quiver_cacheserver.residency.decider import Decider
from quiver_cacheserver.residency.filler import Admission, Filler
from quiver_cacheserver.residency.fills import Fills
from quiver_cacheserver.residency.readers import OwnShare, Readers
from quiver_cacheserver.residency.reports import Reports
from quiver_cacheserver.residency.rooms import Rooms
from quiver_cacheserver.residency.uploads import Uploads
from quiver_cacheserver.slices import Slices
from quiver_cacheserver.sources import Sources
from quiver_cacheserver.usage import Label, Tier, Usage
from quiver_cacheserver.verification import Verification

DISK_THREADS: Final = 8
SEEN_HEADROOM: Final = 1.25  # a reader that reports nothing may be faster than it was seen: one that is held back grows
LOOK_THREADS: Final = 2  # for fetching manifests from peers: a silent peer must not occupy the disk's threads


class Node:
    """One daemon. Made by ``serve.build``; its coroutines belong to one event loop."""

    def __init__(
        self,
        version: str,
        store: Store[MemoryInventory],
        registry: Registry,
        origins: Iterable[str],
        *,
        access: Access | None = None,
        tls: Credentials | None = None,
    ) -> None:
        """``access``: by default every caller may do everything. ``tls``: to speak with clients and other daemons."""
        name, url = registry.own.id, registry.own.url
        self.name, self.url, self.version = name, url, version
        self.store = store
        self.inventory = store.inventory
        self.registry = registry
        self.tls = tls
        self.access = access or Access()
        self._started = time.monotonic()
        self.counters = Counters()
        self.budgets = Budgets()
        self.slices = Slices()
        self.disk_threads = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="quiver-disk")
        self.fill_threads = ThreadPoolExecutor(FILL_THREADS, thread_name_prefix="quiver-fill")
        self._look_threads = ThreadPoolExecutor(LOOK_THREADS, thread_name_prefix="quiver-look")

        self._needs = Needs()
        opened = OpenManifests()
        self.disk = DiskHealth(store, self.disk_threads)
        self.verification = Verification(store, self.disk_threads, self.counters, self.budgets)
        self.pins = Pins(store)
        self.usage = Usage()
        self.rooms = Rooms(store, self._needs, opened, self.budgets, self.counters, self.pins)
        self.holders = self.rooms.holders
        # Where callers need tokens, only a certificate shows that one is a daemon.
        self.peers = RackPeers(registry, name, url, tls, asks=tls is not None or not self.access.requires_tokens)
        self.origins = Origins(origins, partial(self.counters.add, "origin_read_bytes"))
        self.dataset_names = DatasetNames()
        self.manifests = Manifests(self.rooms, opened, self._look_threads, self.peers, self.budgets, self.dataset_names)
        self.readers = Readers(self._needs, self.dataset_names, OwnShare(registry, opened, name))
        self._seen: dict[Digest, Domain] = {}  # the datasets of readers that report nothing, by name
        self.allocator = Allocator(
            self._needs,
            self._facts,
            self.rooms.shards_bytes_max,
            lambda: (registry.ring, name),
            self._unreported,
        )
        uploads = Uploads(self._needs.commitments)
        self.fills = Fills(self.fill_threads, self._needs.commitments, uploads, self._count_failure, self.allocator)
        self.shard_memory = ShardMemory(FILL_THREADS)
        sources = Sources(self.peers, self.origins, self.counters, self.shard_memory)
        self.filler = Filler(sources, self.rooms, self.verification, self.disk, self.admitted)
        datasets = self._datasets = Datasets(self._needs, store, self.manifests.get, registry, name)
        self.decider = Decider(self._needs, datasets, self.fills, self.rooms, self.filler, self.allocator)
        self.reports = Reports(self._needs, datasets, self.decider, self.budgets, self.dataset_names)
        self.receiver = Receiver(self._needs, self.rooms, self.peers, self.filler, self.manifests, self.fills)
        giver = Giver(registry, name, self.peers, self.rooms, self._needs, self.counters)
        self.drain = Drain(name, registry, giver, lambda: bool(self._needs.commitments.promised()))

    @property
    def state(self) -> Literal["up", "draining"]:
        return self.drain.state

    @property
    def shard_count(self) -> int:
        return self.inventory.count(Kind.SHARD)

    @property
    def needs(self) -> Needs:
        """What the consumers need. Belongs to the event loop."""
        return self._needs

    @property
    def datasets(self) -> Datasets:
        """The datasets that consumers report on. Belongs to the event loop."""
        return self._datasets

    @property
    def consumers(self) -> int:
        """How many consumers' needs are known."""
        return len(self._needs)

    async def follow_needs(self) -> None:
        """Fetch what consumers need, until cancelled; nothing while this daemon drains."""
        await self.decider.run(lambda: self.state == "up")

    def _unreported(self, now: float) -> list[Heard]:
        """Return the readers that report nothing, as an allocation is told them; of datasets whose manifest is open."""
        seen = self.readers.seen(now)
        self._seen = {it.dataset: it.domain for it in seen}
        return [
            Heard(
                it.dataset,
                f"seen {it.name}",
                it.rate * SEEN_HEADROOM,
                it.identity.job,
                it.identity.group,
                it.identity.tenant,
                True,
                it.attained_bytes,
            )
            for it in seen
        ]

    def _facts(self, name: Digest) -> Facts | None:
        """Return what an allocation is told of a dataset that is read; ``None`` if its manifest is not known here."""
        if name in self._datasets:
            domain, manifest = self._datasets[name].domain, self._datasets[name].manifest
        else:
            domain, opened = self._seen.get(name, SINGLE), self.manifests.opened.peek(name)
            if opened is None:
                return None
            manifest = opened
        return Facts(
            self.dataset_names.shown(manifest.digest, domain),
            float(manifest.tables.shard_sizes.sum()),
            manifest.header.base,
            dataset_id(manifest.digest, domain) in self.pins,
        )

    def close(self) -> None:
        self._datasets.close()
        self.fills.close()
        self.receiver.close()
        self.origins.close()  # before the threads: fills that wait for an origin end with it
        self.fill_threads.shutdown(cancel_futures=True)
        self._look_threads.shutdown(cancel_futures=True)
        self.disk_threads.shutdown(cancel_futures=True)
        self.peers.close()
        self.store.close()

    def status(self) -> NodeStatus:
        inventory, counters = self.inventory, self.counters
        return NodeStatus(
            id=self.name,
            url=self.url,
            rack=self.registry.ring.rack,
            version=self.version,
            state=self.state,
            resident_bytes=inventory.resident_bytes(),  # without the lock, which a slow disk may hold
            capacity_bytes=self.store.capacity_bytes,
            shards=inventory.count(Kind.SHARD),
            manifests=inventory.count(Kind.MANIFEST),
            origin_read_bytes=counters.origin_read_bytes,
            served_bytes=counters.served_bytes,
            fills=sum(counters.fills.values()),
            corruptions=sum(counters.corruptions.values()),
            ring_members=len(self.registry.ring.members),
            ring_age_seconds=self.registry.age_seconds,
            uptime_seconds=time.monotonic() - self._started,
            disk=self.disk.state,
            ring_problem=self.registry.problem,
            origins=self.origins.states,
        )

    # -- shards -------------------------------------------------------------------------------------------------------

    def held(self, digest: Digest, domain: Domain = SINGLE) -> bool:
        """Whether a domain holds the shard here, verified or not."""
        return self.verification.is_held(digest, domain)

    def resident(self, digest: Digest, domain: Domain = SINGLE) -> bool:
        """Whether a domain holds the shard here, and it is verified."""
        return self.verification.is_resident(digest, domain)

    def at_hand(self, digest: Digest, domain: Domain = SINGLE) -> bool:
        """Whether the shard is here and verified. For one that is here unverified, begin the verification."""
        if self._is_pending(digest, domain):
            self.verification.begin(digest)
        return self.resident(digest, domain)

    def _is_pending(self, digest: Digest, domain: Domain) -> bool:
        """Whether a domain holds the shard here, and it has to be verified before it is served."""
        return self.verification.is_pending(digest) and self.held(digest, domain)

    async def listed(self, wanted: Sequence[Digest], manifest: Manifest | None) -> Set[Digest]:
        """Return which of these shards the manifest has."""
        if manifest is None:
            return frozenset()
        found: set[Digest] = set()
        numbers = manifest.shard_numbers
        await self.slices.walk(wanted, lambda some: found.update(numbers.among(some)))
        return found

    async def fill_missing(
        self,
        wanted: Sequence[Digest],
        manifest: Manifest | None,
        wait_seconds: float,
        client: str = "",
        domain: Domain = SINGLE,
    ) -> Set[Digest]:
        """Fill shards, waiting for them no longer than ``wait_seconds``; return which the manifest has.

        Fills that take longer continue.
        """
        deadline = time.monotonic() + wait_seconds
        listed = await self.listed(wanted, manifest)
        checks: set[asyncio.Future[bool]] = set()
        waiting: set[asyncio.Future[object]] = set()

        def check(some: Sequence[Digest]) -> None:
            checks.update(self.verification.begin(digest) for digest in some if self._is_pending(digest, domain))

        def begin(some: Sequence[Digest]) -> None:
            for digest in some:
                if manifest is not None and digest in listed and not self.held(digest, domain):
                    begun = self._start_fill(digest, manifest, client, domain)
                    if isinstance(begun, asyncio.Future):
                        waiting.add(begun)

        # What is here and only has to be verified must not queue behind fills, which may hang on an origin.
        await self.slices.walk(wanted, check)
        if checks:
            await asyncio.wait(checks, timeout=wait_seconds)
        await self.slices.walk(wanted, begin)
        if waiting:
            await asyncio.wait(waiting, timeout=max(deadline - time.monotonic(), 0.0))
        return listed

    def _start_fill(
        self, digest: Digest, manifest: Manifest, client: str, domain: Domain
    ) -> asyncio.Future[object] | RangeStatus:
        size_bytes = float(manifest.tables.shard_sizes[manifest.shard_numbers[digest]])
        decision = Decision(name_in(domain, digest), name_in(domain, manifest.digest), size_bytes)
        if self._is_passed_by(decision.recipe, size_bytes):
            return RangeStatus.NO_ROOM
        return self.fills.start(decision, partial(self.filler.fill, digest, manifest, client, domain), client)

    def forgo(self, digests: Iterable[Digest], manifest: Digest, client: str, domain: Domain = SINGLE) -> None:
        """Record that the client chosen to upload these shards cannot."""
        for digest in digests:
            self.fills.forgo(Recipe(name_in(domain, digest), name_in(domain, manifest)), client)

    def suspect(self, digests: Iterable[Digest], client: str = "", domain: Domain = SINGLE) -> None:
        """A reader in this domain got wrong bytes of these shards: ``Verification.suspect``."""
        self.verification.suspect((digest for digest in digests if self.held(digest, domain)), client)

    def read_by(self, client: str, digests: Iterable[Digest], domain: Domain = SINGLE) -> None:
        """Record that a client reads these shards, or a manifest: ``Holders.read``."""
        has = self.inventory.has
        self.holders.read(
            (it for it in digests if has(Kind.SHARD, it, domain) or has(Kind.MANIFEST, it, domain)), client
        )

    def count_read(
        self, manifest: Digest | None, domain: Domain, tenant: str, size_bytes: int, tier: Tier = "rack"
    ) -> None:
        """Count bytes of a dataset that a reader gets: of one that the domain does not hold, under no name."""
        if size_bytes:
            is_known = manifest is not None and self.inventory.has(Kind.MANIFEST, manifest, domain)
            self.usage.add(Label(domain, manifest, tenant) if manifest and is_known else None, tier, size_bytes)

    def absence(
        self, digest: Digest, listed: Set[Digest], manifest: Digest | None, domain: Domain = SINGLE
    ) -> RangeStatus:
        """Return the status of a shard that is not here.

        ``listed``: those of the reader's shards that the manifest has. ``UPLOAD``: a client has to upload it, and none
        is chosen yet (``choose_uploader``).
        """
        if self.resident(digest, domain):  # since a moment ago
            return RangeStatus.FILLING
        if self._is_pending(digest, domain):  # being verified, or on a disk that cannot be read
            return RangeStatus.FILLING if self.verification.is_running(digest) else RangeStatus.FAILED
        if manifest is None or digest not in listed:
            return RangeStatus.NO_MANIFEST
        recipe = Recipe(name_in(domain, digest), name_in(domain, manifest))
        if self._is_passed_by(recipe, float(self._needs.sizes_of(as_rows([recipe.shard]))[0])):
            return RangeStatus.NO_ROOM
        return self.fills.status(recipe)

    def _is_passed_by(self, recipe: Recipe, size_bytes: float) -> bool:
        """Whether readers read an absent shard's samples past this daemon.

        If all uses to come of a dataset are known, the policy fetches what is worth its room. Filling a whole shard for
        each reader that misses a sample of it would read the dataset as many times as a shard has samples.
        """
        if not self._needs.is_planned(recipe.dataset) or self.fills.is_coming(recipe):
            return False
        return self.rooms.free_bytes() < size_bytes

    def choose_uploader(self, digest: Digest, manifest: Digest, client: str, domain: Domain = SINGLE) -> bool:
        """Choose a client to upload a shard that the daemon cannot read; return whether it was chosen."""
        recipe = Recipe(name_in(domain, digest), name_in(domain, manifest))
        size_bytes = float(self._needs.sizes_of(as_rows([recipe.shard]))[0])
        decision = self._needs.commitments.get(recipe) or Decision(*recipe, size_bytes)
        return self.fills.choose_uploader(decision, client)

    async def open_shard(self, digest: Digest, domain: Domain = SINGLE) -> OpenFile:
        """Return a verified resident shard's file. Raises ``NotFound``; it fills nothing."""
        loop = asyncio.get_running_loop()
        if self._is_pending(digest, domain):
            await asyncio.shield(self.verification.begin(digest))
        if not self.resident(digest, domain):
            raise NotFound("the shard is not resident")
        return await loop.run_in_executor(self.disk_threads, self.store.open_file, Kind.SHARD, digest)

    def uploaded(self, digest: Digest, admission: Admission, size_bytes: int) -> None:
        """Record that a client uploaded a shard, which was verified and written."""
        self.fills.arrived(name_in(admission.domain, digest))
        self.admitted(digest, admission)
        self.counters.uploaded_bytes += size_bytes

    def admitted(self, digest: Digest, admission: Admission) -> None:
        """Record that a shard was verified and written."""
        if admission.is_new:
            self.verification.written(digest)
        is_shared = len(self.inventory.domains_of(Kind.SHARD, digest)) > 1
        self.holders.filled(digest, "" if is_shared else admission.client)
        self.counters.count("fills", admission.source)
        if admission.source == "origin" and admission.manifest is not None:
            label = Label(admission.domain, admission.manifest, tenant_of(admission.client))
            self.usage.add(label, "origin", self.inventory.size(Kind.SHARD, digest))
        self.disk.wrote()
        if admission.source != "peer" and self.registry.ring.replicas > 1:
            self.fill_threads.submit(self._replicate, digest, admission.domain)

    def _replicate(self, digest: Digest, domain: Domain) -> None:
        """In a thread: give a shard that came from outside the rack to the others that should hold it."""
        for peer in self.peers.replicas(digest, domain):
            try:
                if not peer.has_shard(digest):
                    file = self.store.open_file(Kind.SHARD, digest)
                    peer.put_shard(digest, self.store.load(digest, file.size_bytes))
            except NotFound:
                return  # evicted already
            except QuiverError as error:
                self.peers.failed(peer, error)

    def _count_failure(self, error: QuiverError) -> None:
        if not isinstance(error, NotAllowed):  # a client reads it instead, as it should
            self.counters.count("failures", error.code)
