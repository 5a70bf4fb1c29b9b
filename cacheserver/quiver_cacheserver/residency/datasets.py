"""The datasets that consumers report on: loaded from their manifests in threads, and forgotten once no consumer does.

The store's events, which pass through the event loop in order, keep the record of what is held up to date.

Datasets and shards are known by name (``names``): each belongs to one sharing domain, and what is held is what that
domain holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from quiver.digest import Digest
from quiver.domain import SINGLE, Domain
from quiver.manifest import Manifest
from quiver.residency import IDLE_SECONDS, Needs, Recipe
from quiver.residency.needs import Grown, named
from quiver.ring import Ring
from quiver.store import Kind, MemoryInventory, Store
from quiver_cacheserver.bounds import FILL_BYTES_MAX
from quiver_cacheserver.names import key_of, name_in
from quiver_cacheserver.rack.registry import Registry

DATASETS_MAX: Final = 256
IDLE_BYTES_MAX: Final = 1 << 30  # of manifests in memory whose datasets nobody reports on
DATASET_BYTES_MAX: Final = 2 << 30  # of all datasets' manifests; a larger one alone

Mask = npt.NDArray[np.bool_]
GetManifest = Callable[[Digest, str, Domain], Awaitable[Manifest | None]]  # the client on whose behalf


@dataclass(slots=True, eq=False)
class ReportedDataset:
    manifest: Manifest
    ring: Ring  # the ring by which ``Needs`` knows this daemon's shards
    used: float  # when a consumer last reported on it
    domain: Domain = SINGLE

    def digest_of(self, shard: Digest) -> Digest:
        """Return the digest of a shard, by name."""
        return name_in(self.domain, shard)

    def number_of(self, shard: Digest) -> int:
        """Return the number of a shard, by name, in the manifest."""
        return self.manifest.shard_numbers[self.digest_of(shard)]


class _Learned(NamedTuple):
    """What a thread computes about a dataset: which shards are held, which are this daemon's, and ``grown``."""

    held: Mask
    mine: Mask
    grown: Grown


class Datasets:
    """The datasets whose shards ``Needs`` counts. Belongs to the event loop. ``changed`` is set on every change."""

    def __init__(
        self, needs: Needs, store: Store[MemoryInventory], get_manifest: GetManifest, registry: Registry, name: str
    ) -> None:
        self.changed = asyncio.Event()
        self._needs = needs
        self._store = store
        self._get_manifest = get_manifest
        self._registry = registry
        self._name = name  # this daemon's, in the ring
        self._datasets: dict[Digest, ReportedDataset] = {}
        self._learning = asyncio.Lock()
        self._heard_meanwhile: list[tuple[Digest, bool]] = []  # events since the current ``_learn`` began
        self._unsubscribe: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._datasets)

    def __contains__(self, name: Digest) -> bool:
        return name in self._datasets

    def __getitem__(self, name: Digest) -> ReportedDataset:
        return self._datasets[name]

    def items(self) -> list[tuple[Digest, ReportedDataset]]:
        return list(self._datasets.items())

    def values(self) -> list[ReportedDataset]:
        return list(self._datasets.values())

    def close(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()

    async def manifest(self, digest: Digest, client: str, domain: Domain = SINGLE) -> Manifest | None:
        """Return a dataset's manifest; ``None`` if no daemon has it."""
        dataset = self._datasets.get(name_in(domain, digest))
        return dataset.manifest if dataset is not None else await self._get_manifest(digest, client, domain)

    async def learn(self, manifest: Manifest, domain: Domain = SINGLE) -> ReportedDataset | None:
        """Return the dataset, loaded from its manifest if necessary; ``None`` if memory for manifests is used up."""
        name = name_in(domain, manifest.digest)
        if name in self._datasets:
            return self._datasets[name]
        async with self._learning:  # one at a time, as each sorts the shards of all
            if name in self._datasets:
                return self._datasets[name]
            if not self._fits(manifest):
                return None
            return await self._learn(name, manifest, domain)

    def has_elsewhere(self, recipe: Recipe) -> bool:
        """Whether a shard also belongs to another dataset, whose manifest may locate it better."""
        domain = self._datasets[recipe.dataset].domain
        return any(
            dataset.digest_of(recipe.shard) in dataset.manifest.shard_numbers
            for name, dataset in self._datasets.items()
            if name != recipe.dataset and dataset.domain == domain
        )

    async def follow_ring(self) -> None:
        """Tell ``Needs`` which shards this daemon fetches, if the ring changed."""
        ring = self._registry.ring
        loop = asyncio.get_running_loop()
        for name, dataset in list(self._datasets.items()):
            if dataset.ring is not ring:
                mine = await loop.run_in_executor(None, self._mine, dataset.manifest, ring)
                if self._datasets.get(name) is dataset:
                    dataset.ring = ring
                    self._needs.set_mine(name, mine)

    def forget_idle(self, now: float) -> None:
        """Forget datasets that no consumer reports on any more, after a while.

        An unneeded shard of a known dataset may be evicted at once. Of an unknown dataset the idle time decides: a
        dataset forgotten immediately would count as in use, since it was read a moment ago.
        """
        reported = {lease.dataset for lease in self._needs.leases}
        idle = [dataset for name, dataset in self._datasets.items() if name not in reported]
        for name in reported:
            self._datasets[name].used = now
        if idle and (
            now - max(dataset.used for dataset in idle) >= IDLE_SECONDS
            or len(self._datasets) > DATASETS_MAX
            or _bytes_of(idle) > IDLE_BYTES_MAX
        ):
            self._forget_unused()

    def _forget_unused(self) -> None:
        self._needs.forget_unused()
        self._datasets = {name: it for name, it in self._datasets.items() if self._needs.has_dataset(name)}

    def _fits(self, manifest: Manifest) -> bool:
        """Whether one more manifest fits; if necessary, forget those that no consumer reports on."""
        most = DATASET_BYTES_MAX - len(manifest.content)
        if _bytes_of(self._datasets.values()) > most:
            self._forget_unused()
        return not self._datasets or _bytes_of(self._datasets.values()) <= most

    async def _learn(self, name: Digest, manifest: Manifest, domain: Domain) -> ReportedDataset:
        ring = self._registry.ring
        self.listen()
        heard = self._heard_meanwhile = []  # begins before the scan of what is held, so it misses no event
        learned = await asyncio.get_running_loop().run_in_executor(None, self._look_into, manifest, ring, domain)
        tables = manifest.tables
        sizes = tables.shard_sizes.astype(np.float64)
        shards = named(tables.shard_digests, key_of(domain))
        samples = np.diff(tables.firsts.astype(np.int64), append=len(tables.digests))
        self._needs.add_dataset(name, shards, sizes, learned.held, learned.mine, learned.grown, samples=samples)
        self._datasets[name] = ReportedDataset(manifest, ring, time.monotonic(), domain)
        for digest, held in heard:  # applying an event twice does no harm
            self._mark(digest, held)
        return self._datasets[name]

    def _look_into(self, manifest: Manifest, ring: Ring, domain: Domain) -> _Learned:
        """In a thread, since many shards take a while."""
        held = np.zeros(manifest.shard_count, bool)
        rows = manifest.shard_numbers.rows_of(self._store.inventory.digests(Kind.SHARD, domain))
        held[rows[rows >= 0]] = True
        key = key_of(domain)
        grown = self._needs.grown(named(manifest.tables.shard_digests, key), key)
        return _Learned(held, self._mine(manifest, ring), grown)

    def _mine(self, manifest: Manifest, ring: Ring) -> Mask:
        """In a thread: return the shards whose first owner is this daemon, without those too large for it."""
        own = next((at for at, member in enumerate(ring.members) if member.id == self._name), -2)
        largest = min(self._store.capacity_bytes, FILL_BYTES_MAX)
        tables = manifest.tables
        first: Mask = (ring.rank(tables.shard_digests, 1)[:, 0] == own) & (tables.shard_sizes <= largest)
        return first

    def listen(self) -> None:
        """Subscribe to the store's events."""
        if self._unsubscribe is not None:
            return
        loop = asyncio.get_running_loop()

        def hear(digest: Digest, held: bool) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it every listener
                loop.call_soon_threadsafe(self._heard, digest, held)

        self._unsubscribe = self._store.inventory.subscribe(hear)

    def _heard(self, digest: Digest, held: bool) -> None:
        if self._learning.locked():
            self._heard_meanwhile.append((digest, held))
        self._mark(digest, held)
        self.changed.set()

    def _mark(self, digest: Digest, held: bool) -> None:
        """Record in which domains a file is held now."""
        for domain in {dataset.domain for dataset in self._datasets.values()}:
            here = held and self._store.inventory.has(Kind.SHARD, digest, domain)
            (self._needs.arrived if here else self._needs.gone)(name_in(domain, digest))


def _bytes_of(datasets: Iterable[ReportedDataset]) -> int:
    return sum(len(dataset.manifest.content) for dataset in datasets)
