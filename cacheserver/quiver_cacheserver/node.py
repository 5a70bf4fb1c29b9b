"""The daemon without HTTP: what it holds, how it gets what it does not hold, and from whom.

The way of a missing shard: first here (verified once after a restart), then the neighbours that may have it (owners of
the ring and those that drain), then the origin, if the operator allows this origin.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from typing import Final

from quiver.digest import Digest
from quiver.errors import Corrupt, DiskFailed, NotAllowed, NotFound, QuiverError
from quiver.fill import OriginShards
from quiver.manifest import Manifest
from quiver.peer import PeerClient
from quiver.source import ShardSource, first_verified
from quiver.store import Kind, MemoryInventory, OpenFile, Store
from quiver.wire import OK, NodeStatus, RangeStatus
from quiver_cacheserver.bounds import FillMemory
from quiver_cacheserver.budget import HELD_MAX, Budgets, Cost, Resource
from quiver_cacheserver.counters import Counters
from quiver_cacheserver.evicting import Evicting
from quiver_cacheserver.fills import FILL_THREADS, Fills, Recipe
from quiver_cacheserver.manifests import Manifests
from quiver_cacheserver.neighbours import Neighbours
from quiver_cacheserver.origins import Origins
from quiver_cacheserver.registry import Registry
from quiver_cacheserver.residency import Residency
from quiver_cacheserver.turns import Places, Slices

log = logging.getLogger(__name__)

DISK_THREADS: Final = 8
SEND_THREADS: Final = HELD_MAX[Resource.SENDS]  # each serves one reader, who may be waiting for a cold disk
LOOK_THREADS: Final = 2  # that ask neighbours for manifests: not the disk's, which a silent neighbour must not occupy
RECHECK_SECONDS: Final = 10.0  # what a reader may make a daemon read again from disk is bounded
SUSPECTED_MAX: Final = 65536
DISK_SECONDS: Final = 2.0  # between two tries of a disk that takes no files


class Node:
    """One daemon. Made by ``serve.build``; its coroutines belong to one event loop."""

    def __init__(
        self, name: str, url: str, version: str, store: Store, registry: Registry, origins: Iterable[str]
    ) -> None:
        self.name, self.url, self.version = name, url, version
        self.store = store
        self.registry = registry
        self.counters = Counters()
        self.budgets = Budgets()
        self.reading = Places(self.budgets, Resource.READS)
        self.sending = Places(self.budgets, Resource.SENDS)
        self.state: str = "up"
        self.disk = OK
        self._refused_bytes = 0
        self.slices = Slices()
        self.disk_threads = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="quiver-disk")
        self.send_threads = ThreadPoolExecutor(SEND_THREADS, thread_name_prefix="quiver-send")
        self.fill_threads = ThreadPoolExecutor(FILL_THREADS, thread_name_prefix="quiver-fill")
        self.neighbours = Neighbours(registry, name, url)
        self.fills = Fills(self.fill_threads, self._count_failure)
        self._look_threads = ThreadPoolExecutor(LOOK_THREADS, thread_name_prefix="quiver-look")
        self.manifests = Manifests(store, self._look_threads, self.neighbours, self.budgets)
        self.origins = Origins(origins, self._count_origin)
        self._unverified = {held.digest for held in store.inventory.held(Kind.SHARD)}
        self._verifying: dict[Digest, asyncio.Future[bool]] = {}
        self._suspected: OrderedDict[Digest, float] = OrderedDict()
        self._started = time.monotonic()
        self.residency = Residency(self)
        self.memory = FillMemory()
        evicting = Evicting(self)
        self.holders = evicting.holders
        store.choose = evicting.choose

    @property
    def shard_count(self) -> int:
        inventory = self.store.inventory
        assert isinstance(inventory, MemoryInventory)
        return inventory.count(Kind.SHARD)

    def close(self) -> None:
        self.residency.close()
        self.fills.close()
        self.origins.close()  # before the threads: fills that wait for an origin end with it
        self.fill_threads.shutdown(cancel_futures=True)
        self._look_threads.shutdown(cancel_futures=True)
        self.disk_threads.shutdown(cancel_futures=True)
        self.send_threads.shutdown(cancel_futures=True)
        self.neighbours.close()
        self.store.close()

    def status(self) -> NodeStatus:
        inventory = self.store.inventory
        assert isinstance(inventory, MemoryInventory)
        counters = self.counters
        return NodeStatus(
            id=self.name,
            url=self.url,
            rack=self.registry.ring.rack,
            version=self.version,
            state="draining" if self.state == "draining" else "up",
            resident_bytes=inventory.resident_bytes(),  # without the lock, under which a disk may be slow
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
            disk=self.disk,
            ring_problem=self.registry.problem,
            origins=self.origins.states,
        )

    # -- shards -------------------------------------------------------------------------------------------------------

    def resident(self, digest: Digest) -> bool:
        """Whether the shard is here and was verified since the daemon started."""
        inventory = self.store.inventory
        assert isinstance(inventory, MemoryInventory)
        return digest not in self._unverified and inventory.has(Kind.SHARD, digest)

    def held(self, digest: Digest) -> bool:
        """Whether the shard is here, verified or not."""
        inventory = self.store.inventory
        assert isinstance(inventory, MemoryInventory)
        return inventory.has(Kind.SHARD, digest)

    def at_hand(self, digest: Digest) -> bool:
        """Whether the shard is here and verified; one that is here and not verified will be, soon."""
        if digest in self._unverified:
            self._verified(digest)
        return self.resident(digest)

    async def listed(self, wanted: Sequence[Digest], manifest: Manifest | None) -> Set[Digest]:
        """Return which of these shards the manifest has."""
        if manifest is None:
            return frozenset()
        found: set[Digest] = set()
        numbers = manifest.shard_numbers
        await self.slices.walk(wanted, lambda some: found.update(numbers.among(some)))
        return found

    async def bring(
        self, wanted: Sequence[Digest], manifest: Manifest | None, wait_seconds: float, client: str = ""
    ) -> Set[Digest]:
        """Fill shards, waiting for them no longer than ``wait_seconds``; return which the manifest has.

        Whatever is late goes on.
        """
        deadline = time.monotonic() + wait_seconds
        listed = await self.listed(wanted, manifest)
        checks: set[asyncio.Future[bool]] = set()
        waiting: set[asyncio.Future[object]] = set()

        def check(some: Sequence[Digest]) -> None:
            checks.update(self._verified(digest) for digest in some if digest in self._unverified)

        def begin(some: Sequence[Digest]) -> None:
            for digest in some:
                if (
                    manifest is not None
                    and digest in listed
                    and not (digest in self._unverified or self.resident(digest))
                ):
                    recipe = Recipe(digest, manifest.digest)
                    begun = self.fills.start(recipe, partial(self.fill, digest, manifest, client), client)
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

    def forgo(self, digests: Iterable[Digest], manifest: Digest, client: str) -> None:
        """The client that was to put these shards here cannot."""
        for digest in digests:
            self.fills.forgo(Recipe(digest, manifest), client)

    def _verified(self, digest: Digest) -> asyncio.Future[bool]:
        """Return the verification of a shard on disk that is under way, or begin it."""
        future = self._verifying.get(digest)
        if future is None:
            loop = asyncio.get_running_loop()
            future = self._verifying[digest] = loop.run_in_executor(self.disk_threads, self._verify, digest)
            future.add_done_callback(lambda done: self._checked(digest, done))
        return future

    def _checked(self, digest: Digest, done: asyncio.Future[bool]) -> None:
        self._verifying.pop(digest, None)
        error = None if done.cancelled() else done.exception()
        if error is not None:
            log.warning("a shard could not be verified: %s", error)

    def absence(
        self, digest: Digest, listed: Set[Digest], manifest: Digest | None, client: str = "", *, choose: bool
    ) -> RangeStatus:
        """Return what to tell a reader of a shard that is not here. ``choose``: it may be chosen to upload it.

        ``listed``: the shards that the manifest has, of those that the reader named.
        """
        if self.resident(digest):  # since a moment ago
            return RangeStatus.FILLING
        if digest in self._unverified:  # being verified, or on a disk that cannot be read
            return RangeStatus.FILLING if digest in self._verifying else RangeStatus.FAILED
        if manifest is None or digest not in listed:
            return RangeStatus.NO_MANIFEST
        return self.fills.outcome(Recipe(digest, manifest), client, choose=choose)

    async def open_shard(self, digest: Digest) -> OpenFile:
        """Return a verified resident shard's file. Raises ``NotFound``; it brings nothing in."""
        loop = asyncio.get_running_loop()
        if digest in self._unverified:
            await asyncio.shield(self._verified(digest))
        if not self.resident(digest):
            raise NotFound("the shard is not resident")
        return await loop.run_in_executor(self.disk_threads, self.store.open_file, Kind.SHARD, digest)

    def suspect(self, digests: Iterable[Digest], client: str = "") -> None:
        """A reader got wrong bytes: verify these shards again before they are served, but not over and over.

        What a client says is believed as far as its budget goes; ``""``: what this daemon found itself.
        """
        inventory = self.store.inventory
        assert isinstance(inventory, MemoryInventory)
        now = time.monotonic()
        for digest in digests:
            if inventory.has(Kind.SHARD, digest) and now - self._suspected.get(digest, -inf) >= RECHECK_SECONDS:
                size_bytes = inventory.size(Kind.SHARD, digest)
                if client and not self.budgets.spend(client, Cost.RECHECK_BYTES, size_bytes, now):
                    return  # served as they are, to a reader who checks what it gets
                self._suspected[digest] = now
                self._suspected.move_to_end(digest)
                self._unverified.add(digest)
        while len(self._suspected) > SUSPECTED_MAX:
            self._suspected.popitem(last=False)

    def admitted(self, digest: Digest, source: str, client: str = "") -> None:
        """A shard was written by way of ``source`` on behalf of ``client``, and verified."""
        self._unverified.discard(digest)
        self.holders.brought(digest, client)
        self.counters.count("fills", source)
        self.disk = OK
        if source != "peer" and self.registry.ring.replicas > 1:
            self.fill_threads.submit(self._replicate, digest)

    def fill(self, digest: Digest, manifest: Manifest | None, client: str = "") -> str:
        """In a thread: make the shard resident and verified; return where it was, or raise why it is not here.

        ``client``: on whose behalf, ``""`` for what consumers at several addresses need.
        """
        if self._verify(digest):
            return "disk"
        number = manifest.shard_numbers.get(digest) if manifest is not None else None
        if manifest is None or number is None:
            raise NotFound("the shard is not resident and no manifest says where its samples lie")
        size_bytes = int(manifest.tables.shard_sizes[number])
        try:
            with self.memory.taken(size_bytes):
                # Room is made last: nothing is evicted for what nobody has. What would find none is not read either.
                if self.disk != OK:
                    raise DiskFailed(self.disk)
                self.store.check_room(Kind.SHARD, size_bytes, client)
                shard, source = first_verified(self._sources(digest, manifest), digest, size_bytes, self._blame)
                with self.store.reserve(Kind.SHARD, digest, size_bytes, client=client) as writing:
                    writing.write(shard.data)
                    writing.commit()
        except DiskFailed as error:
            self.disk_failed(error, size_bytes)
            raise
        except QuiverError as error:
            self.origins.failed(manifest, error)
            raise
        if isinstance(source, PeerClient):
            self.neighbours.delivered(source)
        where = "peer" if isinstance(source, PeerClient) else "origin"
        self.admitted(digest, where, client)
        return where

    # -- what does not work -------------------------------------------------------------------------------------------

    def disk_failed(self, error: DiskFailed, size_bytes: int) -> None:
        """The disk refused to take a file. It is tried again from time to time, whether or not anybody writes."""
        if self.disk == OK:
            log.warning("nothing can be cached: %s", error)
        self.disk, self._refused_bytes = str(error), size_bytes

    async def watch_disk(self) -> None:
        """Try a disk that refused a file until it would take it. Nobody else may ever write: readers go elsewhere."""
        while True:
            await asyncio.sleep(DISK_SECONDS)
            if self.disk != OK:
                with contextlib.suppress(DiskFailed):
                    loop = asyncio.get_running_loop()
                    await loop.run_in_executor(self.disk_threads, self.store.rehearse, self._refused_bytes)
                    self.disk = OK
                    log.info("the disk takes files again")

    def _verify(self, digest: Digest) -> bool:
        """Return whether the shard is resident and right; what is wrong is quarantined."""
        try:
            if digest in self._unverified:
                self.store.check(digest)
                self._unverified.discard(digest)
            elif self.resident(digest):  # and not merely on disk: what could not be put aside is not read again
                self.store.open_file(Kind.SHARD, digest)
            else:
                return False
        except NotFound:
            self._unverified.discard(digest)
            return False
        except Corrupt as error:
            self._unverified.discard(digest)
            self.counters.count("corruptions", "disk")
            log.warning("quarantined: %s", error)
            return False
        return True

    # -- where shards come from ---------------------------------------------------------------------------------------

    def _sources(self, digest: Digest, manifest: Manifest) -> Iterator[ShardSource]:
        yield from self.neighbours.holders(digest)
        yield OriginShards(manifest, self.origins.of(manifest))

    def _replicate(self, digest: Digest) -> None:
        """In a thread: give a shard that came from outside the rack to the others that should hold it."""
        for peer in self.neighbours.replicas(digest):
            try:
                if not peer.has_shard(digest):
                    file = self.store.open_file(Kind.SHARD, digest)
                    peer.put_shard(digest, self.store.load(digest, file.size_bytes))
            except NotFound:
                return  # evicted already
            except QuiverError as error:
                self.neighbours.failed(peer, error)

    def _count_origin(self, read_bytes: int) -> None:
        self.counters.add("origin_read_bytes", read_bytes)

    def _count_failure(self, error: QuiverError) -> None:
        if not isinstance(error, NotAllowed):  # a client reads it instead, as it should
            self.counters.count("failures", error.code)

    def _blame(self, source: ShardSource, error: QuiverError) -> None:
        if isinstance(error, Corrupt):
            self.counters.count("corruptions", "peer" if isinstance(source, PeerClient) else "origin")
        if isinstance(source, PeerClient):
            self.neighbours.failed(source, error)
