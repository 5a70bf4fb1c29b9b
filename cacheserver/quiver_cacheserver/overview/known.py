"""The datasets that this daemon knows, and what it holds of each: looked at in a thread, at most every few seconds.

Known are the datasets that consumers report on and the manifests on disk. Reading a manifest for the first time takes a
while, so one look reads a few and leaves the rest to the next; what it read is remembered as ``Facts``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from quiver.digest import Digest
from quiver.domain import Domain
from quiver.errors import QuiverError
from quiver.manifest import Manifest
from quiver.store import Kind, MemoryInventory, Store
from quiver.store.inventory import file_of
from quiver_cacheserver.bounds import open_manifest
from quiver_cacheserver.overview.facts import Facts
from quiver_cacheserver.overview.held import Held, look

log = logging.getLogger(__name__)

FRESH_SECONDS: Final = 1.0  # how long a look is good enough; longer where a look takes long
IDLE_SHARE: Final = 9  # for each second of looking, so many seconds without
READING_SECONDS_MAX: Final = 2.0  # of new manifests in one look
KNOWN_MAX: Final = 4096  # datasets; of more, the ones that nobody reports on are left out
SHARDS_MAX: Final = 1 << 22  # of all datasets together: 160 MiB of facts


class Known(NamedTuple):
    """A dataset of a sharing domain, and what is held of it."""

    manifest: Digest
    domain: Domain
    facts: Facts
    held: Held = Held()


Key = tuple[Domain, Digest]


@dataclass(slots=True)
class Look:
    """What one look found. ``left_out``: how many datasets it had no time or memory for."""

    at: float
    seconds: float = 0.0
    datasets: dict[Key, Known] = field(default_factory=dict)
    left_out: int = 0

    def is_fresh(self, now: float) -> bool:
        return now - self.at < max(FRESH_SECONDS, IDLE_SHARE * self.seconds)


class KnownDatasets:
    """``look`` belongs to the event loop, as does ``last``, what it returned last."""

    def __init__(
        self,
        store: Store[MemoryInventory],
        reported: Callable[[], Mapping[Key, Manifest]],
        read: Callable[[Digest, Domain, str], None],
    ) -> None:
        """``reported``: the manifests of the datasets that consumers report on.

        ``read`` is called for each dataset that the last look did not find, with the name in its manifest.
        """
        self._store = store
        self._reported = reported
        self._read = read
        self._facts: dict[Digest, Facts] = {}  # replaced by the thread of one look at a time
        self._unreadable: set[Digest] = set()
        self.last = Look(float("-inf"))
        self._looking = asyncio.Lock()

    async def look(self, *, anew: bool = False) -> Look:
        """Return what is known and held. ``anew``: as of now, not of a moment ago."""
        if not anew and self.last.is_fresh(time.monotonic()):
            return self.last
        async with self._looking:
            if anew or not self.last.is_fresh(time.monotonic()):
                before = self.last.datasets.keys()
                loop = asyncio.get_running_loop()
                self.last = await loop.run_in_executor(None, partial(self._look, dict(self._reported())))
                for domain, manifest in self.last.datasets.keys() - before:
                    self._read(manifest, domain, self._facts[manifest].name)
            return self.last

    def expire(self) -> None:
        """Have the next ``look`` look anew: something was changed."""
        self.last.at = float("-inf")

    def _look(self, reported: Mapping[Key, Manifest]) -> Look:
        """In a thread."""
        began = time.monotonic()
        inventory = self._store.inventory
        keys = dict.fromkeys(reported)
        for manifest in inventory.listing(Kind.MANIFEST).names:
            keys.update(dict.fromkeys((domain, manifest) for domain in inventory.domains_of(Kind.MANIFEST, manifest)))
        self._learn(keys, reported, began)
        by_domain: dict[Domain, dict[Key, Facts]] = {}
        for domain, manifest in list(keys)[:KNOWN_MAX]:
            if manifest in self._facts:
                by_domain.setdefault(domain, {})[domain, manifest] = self._facts[manifest]
        datasets: dict[Key, Known] = {}
        for domain, its in by_domain.items():
            for key, held in look(inventory.digests(Kind.SHARD, domain), its).items():
                datasets[key] = Known(key[1], domain, its[key], held)
        now = time.monotonic()
        return Look(now, now - began, datasets, len(keys) - len(datasets))

    def _learn(self, keys: Mapping[Key, None], reported: Mapping[Key, Manifest], began: float) -> None:
        """Read the facts of new datasets, and forget those of datasets that are gone."""
        facts = {manifest: self._facts[manifest] for _, manifest in keys if manifest in self._facts}
        self._unreadable &= {manifest for _, manifest in keys}
        shards = sum(len(it.sizes) for it in facts.values())
        for domain, manifest in keys:
            if manifest in facts or manifest in self._unreadable:
                continue
            opened = reported.get((domain, manifest))
            if opened is None and time.monotonic() - began > READING_SECONDS_MAX:
                continue
            try:
                opened = opened or open_manifest(file_of(self._store.root, Kind.MANIFEST, manifest), manifest)
            except (QuiverError, OSError) as error:
                self._unreadable.add(manifest)
                log.debug("a manifest cannot be read for the overview: %s", error)
                continue
            shards += opened.shard_count
            if shards > SHARDS_MAX:
                break
            facts[manifest] = Facts.of(opened)
        self._facts = facts
