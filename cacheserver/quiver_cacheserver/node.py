"""The daemon without HTTP: what it holds, and where it gets what it does not hold. It composes all parts.

A shard is looked for on the daemon's disk (verified once after a restart), then at the peers that may have it (the
ring's owners and draining members), then at the origin, if the operator allows this origin.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from quiver.digest import Digest
from quiver.errors import NotAllowed, NotFound, QuiverError
from quiver.lookup import as_rows
from quiver.manifest import Manifest
from quiver.residency import Decision, Needs, Recipe
from quiver.shard_memory import ShardMemory
from quiver.store import Kind, MemoryInventory, OpenFile, Store
from quiver.transport.tls import Credentials
from quiver.wire import NodeStatus, RangeStatus
from quiver_cacheserver.access.control import Access
from quiver_cacheserver.bounds import FILL_THREADS
from quiver_cacheserver.budget import Budgets
from quiver_cacheserver.counters import Counters
from quiver_cacheserver.disk_health import DiskHealth
from quiver_cacheserver.manifests import Manifests
from quiver_cacheserver.opened import OpenManifests
from quiver_cacheserver.origins.allowed import Origins
from quiver_cacheserver.rack.peers import RackPeers
from quiver_cacheserver.rack.registry import Registry
from quiver_cacheserver.residency.datasets import Datasets
from quiver_cacheserver.residency.decider import Decider
from quiver_cacheserver.residency.filler import Filler
from quiver_cacheserver.residency.fills import Fills
from quiver_cacheserver.residency.reports import Reports
from quiver_cacheserver.residency.rooms import Rooms
from quiver_cacheserver.residency.uploads import Uploads
from quiver_cacheserver.slices import Slices
from quiver_cacheserver.sources import Sources
from quiver_cacheserver.verification import Verification

DISK_THREADS: Final = 8
LOOK_THREADS: Final = 2  # for fetching manifests from peers: a silent peer must not occupy the disk's threads


class Node:
    """One daemon. Made by ``serve.build``; its coroutines belong to one event loop."""

    def __init__(
        self,
        name: str,
        url: str,
        version: str,
        store: Store[MemoryInventory],
        registry: Registry,
        origins: Iterable[str],
    ) -> None:
        self.name, self.url, self.version = name, url, version
        self.state: str = "up"
        self.store = store
        self.inventory = store.inventory
        self.registry = registry
        self.tls: Credentials | None = None
        self._started = time.monotonic()
        self.counters = Counters()
        self.budgets = Budgets()
        self.access = Access()
        self.slices = Slices()
        self.disk_threads = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="quiver-disk")
        self.fill_threads = ThreadPoolExecutor(FILL_THREADS, thread_name_prefix="quiver-fill")
        self._look_threads = ThreadPoolExecutor(LOOK_THREADS, thread_name_prefix="quiver-look")

        self._needs = Needs()
        opened = OpenManifests()
        self.disk = DiskHealth(store, self.disk_threads)
        self.verification = Verification(store, self.disk_threads, self.counters, self.budgets)
        self.resident = self.verification.is_resident  # asked for every shard of every read
        self.rooms = Rooms(store, self._needs, opened, self.budgets, self.counters)
        self.holders = self.rooms.holders
        self.peers = RackPeers(registry, name, url)
        self.origins = Origins(origins, partial(self.counters.add, "origin_read_bytes"))
        self.manifests = Manifests(self.rooms, opened, self._look_threads, self.peers, self.budgets)
        uploads = Uploads(self._needs.commitments)
        self.fills = Fills(self.fill_threads, self._needs.commitments, uploads, self._count_failure)
        self.shard_memory = ShardMemory(FILL_THREADS)
        sources = Sources(self.peers, self.origins, self.counters, self.shard_memory)
        self.filler = Filler(sources, self.rooms, self.verification, self.disk, self.admitted)
        datasets = self._datasets = Datasets(self._needs, store, self.manifests.get, registry, name)
        self.decider = Decider(self._needs, datasets, self.fills, self.rooms, self.filler, self.counters)
        self.reports = Reports(self._needs, datasets, self.decider, self.budgets)

    def speak_tls(self, tls: Credentials) -> None:
        """Speak TLS with clients and other daemons. To be called before it serves."""
        self.tls = self.peers.tls = tls

    @property
    def shard_count(self) -> int:
        return self.inventory.count(Kind.SHARD)

    @property
    def consumers(self) -> int:
        """How many consumers' needs are known."""
        return len(self._needs)

    async def follow_needs(self) -> None:
        """Fetch what consumers need, until cancelled; nothing while this daemon drains."""
        await self.decider.run(lambda: self.state == "up")

    def close(self) -> None:
        self._datasets.close()
        self.fills.close()
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
            state="draining" if self.state == "draining" else "up",
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

    def held(self, digest: Digest) -> bool:
        """Whether the shard is here, verified or not."""
        return self.inventory.has(Kind.SHARD, digest)

    def at_hand(self, digest: Digest) -> bool:
        """Whether the shard is here and verified. For one that is here unverified, begin the verification."""
        if self.verification.is_pending(digest):
            self.verification.begin(digest)
        return self.resident(digest)

    async def listed(self, wanted: Sequence[Digest], manifest: Manifest | None) -> Set[Digest]:
        """Return which of these shards the manifest has."""
        if manifest is None:
            return frozenset()
        found: set[Digest] = set()
        numbers = manifest.shard_numbers
        await self.slices.walk(wanted, lambda some: found.update(numbers.among(some)))
        return found

    async def fill_missing(
        self, wanted: Sequence[Digest], manifest: Manifest | None, wait_seconds: float, client: str = ""
    ) -> Set[Digest]:
        """Fill shards, waiting for them no longer than ``wait_seconds``; return which the manifest has.

        Fills that take longer continue.
        """
        deadline = time.monotonic() + wait_seconds
        listed = await self.listed(wanted, manifest)
        checks: set[asyncio.Future[bool]] = set()
        waiting: set[asyncio.Future[object]] = set()

        def check(some: Sequence[Digest]) -> None:
            checks.update(self.verification.begin(digest) for digest in some if self.verification.is_pending(digest))

        def begin(some: Sequence[Digest]) -> None:
            for digest in some:
                if manifest is not None and digest in listed and not self.held(digest):
                    begun = self._start_fill(digest, manifest, client)
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

    def _start_fill(self, digest: Digest, manifest: Manifest, client: str) -> asyncio.Future[object] | RangeStatus:
        size_bytes = float(manifest.tables.shard_sizes[manifest.shard_numbers[digest]])
        decision = Decision(digest, manifest.digest, size_bytes)
        return self.fills.start(decision, partial(self.filler.fill, digest, manifest, client), client)

    def forgo(self, digests: Iterable[Digest], manifest: Digest, client: str) -> None:
        """Record that the client chosen to upload these shards cannot."""
        for digest in digests:
            self.fills.forgo(Recipe(digest, manifest), client)

    def suspect(self, digests: Iterable[Digest], client: str = "") -> None:
        """A reader got wrong bytes of these shards: ``Verification.suspect``."""
        self.verification.suspect(digests, client)

    def absence(self, digest: Digest, listed: Set[Digest], manifest: Digest | None) -> RangeStatus:
        """Return the status of a shard that is not here.

        ``listed``: those of the reader's shards that the manifest has. ``UPLOAD``: a client has to upload it, and none
        is chosen yet (``choose_uploader``).
        """
        if self.resident(digest):  # since a moment ago
            return RangeStatus.FILLING
        if self.verification.is_pending(digest):  # being verified, or on a disk that cannot be read
            return RangeStatus.FILLING if self.verification.is_running(digest) else RangeStatus.FAILED
        if manifest is None or digest not in listed:
            return RangeStatus.NO_MANIFEST
        return self.fills.status(Recipe(digest, manifest))

    def choose_uploader(self, digest: Digest, manifest: Digest, client: str) -> bool:
        """Choose a client to upload a shard that the daemon cannot read; return whether it was chosen."""
        size_bytes = float(self._needs.sizes_of(as_rows([digest]))[0])
        decision = self._needs.commitments.get(Recipe(digest, manifest)) or Decision(digest, manifest, size_bytes)
        return self.fills.choose_uploader(decision, client)

    async def open_shard(self, digest: Digest) -> OpenFile:
        """Return a verified resident shard's file. Raises ``NotFound``; it fills nothing."""
        loop = asyncio.get_running_loop()
        if self.verification.is_pending(digest):
            await asyncio.shield(self.verification.begin(digest))
        if not self.resident(digest):
            raise NotFound("the shard is not resident")
        return await loop.run_in_executor(self.disk_threads, self.store.open_file, Kind.SHARD, digest)

    def admitted(self, digest: Digest, source: str, client: str = "") -> None:
        """Record that a shard from ``source`` was verified and written on behalf of ``client``."""
        self.verification.written(digest)
        self.holders.filled(digest, client)
        self.counters.count("fills", source)
        self.disk.wrote()
        if source != "peer" and self.registry.ring.replicas > 1:
            self.fill_threads.submit(self._replicate, digest)

    def _replicate(self, digest: Digest) -> None:
        """In a thread: give a shard that came from outside the rack to the others that should hold it."""
        for peer in self.peers.replicas(digest):
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
