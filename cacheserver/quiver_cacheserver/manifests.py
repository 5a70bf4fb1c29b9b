"""The manifests that this daemon knows: opened, checked, and fetched from neighbours when somebody names one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Executor
from typing import Final

import numpy as np
import numpy.typing as npt

from quiver.digest import Digest
from quiver.errors import BadRequest, Corrupt, DiskFailed, Misconfigured, NotFound, QuiverError
from quiver.manifest import Manifest
from quiver.residency import IDLE_SECONDS, StoredFile
from quiver.store import Kind, Store
from quiver.store.inventory import file_of
from quiver_cacheserver.bounds import open_manifest
from quiver_cacheserver.budget import Budgets, Cost, Resource
from quiver_cacheserver.neighbours import Neighbours

log = logging.getLogger(__name__)

U8 = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

OPEN_MAX: Final = 256
OPEN_BYTES_MAX: Final = 1 << 30  # of manifests in memory at once, four of 1.3 million samples; a larger one alone
MANIFEST_BYTES_MAX: Final = 4 << 30
MISSING_MAX: Final = 4096  # more than all addresses together may have looked for within that time
ASK_AGAIN_SECONDS: Final = 2.0  # a manifest that nobody had is not looked for more often than this


class Manifests:
    """Opened manifests by digest. ``get`` belongs to the event loop, the rest is safe from threads."""

    def __init__(self, store: Store, executor: Executor, neighbours: Neighbours, budgets: Budgets) -> None:
        self._store = store
        self._executor = executor
        self._neighbours = neighbours
        self._budgets = budgets
        self._open: OrderedDict[Digest, Manifest] = OrderedDict()
        self._used: dict[Digest, float] = {}
        self._missing: OrderedDict[Digest, float] = OrderedDict()
        self._fetching: dict[Digest, asyncio.Future[Manifest | None]] = {}

    def known(self, digest: Digest | None) -> Manifest | None:
        """Return the manifest if it is open."""
        manifest = self._open.get(digest) if digest is not None else None
        if manifest is not None and digest is not None:
            self._used[digest] = time.monotonic()
            self._open.move_to_end(digest)
        return manifest

    async def get(self, digest: Digest, client: str) -> Manifest | None:
        """Return the manifest, from disk or from a neighbour; ``None`` if nobody has it.

        Also if ``client`` had too many looked for: to be told to put it here costs it more than it costs others.
        """
        manifest = self.known(digest)
        if manifest is not None:
            return manifest
        now = time.monotonic()
        if now - self._missing.get(digest, -ASK_AGAIN_SECONDS) < ASK_AGAIN_SECONDS:
            return None
        future = self._fetching.get(digest)
        if future is None:
            if not self._budgets.hold(client, Resource.LOOKUPS):
                return None
            if not self._budgets.spend(client, Cost.LOOKUPS, 1, now):
                self._budgets.release(client, Resource.LOOKUPS)
                return None
            loop = asyncio.get_running_loop()
            future = self._fetching[digest] = loop.run_in_executor(self._executor, self._find, digest)
            future.add_done_callback(lambda done: self._found(digest, done, client))
        return await asyncio.shield(future)

    def forget_missing(self, digest: Digest) -> None:
        """Look for the manifest again: somebody has just put it."""
        self._missing.pop(digest, None)

    def in_use_of(self, shards: U8) -> Mask:
        """Return which of these ``(n, 32)`` are shards of datasets that were read of late."""
        used = np.zeros(len(shards), bool)
        for _, manifest in self._recent():
            used |= manifest.shard_numbers.rows_of(shards) >= 0
        return used

    def used_of(self, manifests: Iterable[StoredFile]) -> Mask:
        """Return which of these manifests are of datasets that were read of late."""
        recent = {digest for digest, _ in self._recent()}
        return np.asarray([item.digest in recent for item in manifests], bool)

    def _recent(self) -> list[tuple[Digest, Manifest]]:
        since = time.monotonic() - IDLE_SECONDS
        return [(digest, it) for digest, it in list(self._open.items()) if self._used.get(digest, 0.0) > since]

    def _found(self, digest: Digest, done: asyncio.Future[Manifest | None], client: str) -> None:
        self._budgets.release(client, Resource.LOOKUPS)
        self._fetching.pop(digest, None)
        manifest = None if done.cancelled() or done.exception() else done.result()
        if manifest is None:
            self._missing[digest] = time.monotonic()
            self._missing.move_to_end(digest)
            while len(self._missing) > MISSING_MAX:
                self._missing.popitem(last=False)
            return
        self._open[digest] = manifest
        self._used[digest] = time.monotonic()
        while len(self._open) > 1 and (len(self._open) > OPEN_MAX or self._open_bytes() > OPEN_BYTES_MAX):
            old, _ = self._open.popitem(last=False)
            self._used.pop(old, None)

    def bytes_of(self, manifest: Manifest) -> int:
        """Return what an open manifest takes of memory: its file, and the table that finds shards."""
        return len(manifest.content) + 12 * manifest.shard_count

    def _open_bytes(self) -> int:
        return sum(map(self.bytes_of, self._open.values()))

    def _find(self, digest: Digest) -> Manifest | None:
        try:
            return self._from_disk(digest)
        except NotFound:
            pass
        for peer in self._neighbours.manifest_holders(digest):
            try:
                data = peer.manifest(digest, min(MANIFEST_BYTES_MAX, self._store.capacity_bytes))
                self._store.put(Kind.MANIFEST, digest, data)
                return self._from_disk(digest)
            except NotFound:
                continue
            except QuiverError as error:
                self._neighbours.failed(peer, error)
        return None

    def _from_disk(self, digest: Digest) -> Manifest:
        self._store.open_file(Kind.MANIFEST, digest)  # raises NotFound, and counts as a use
        try:
            return open_manifest(file_of(self._store.root, Kind.MANIFEST, digest), digest)
        except (BadRequest, Corrupt) as error:
            log.warning("manifest put aside: %s", error)
            self._store.quarantine(Kind.MANIFEST, digest)
            raise NotFound("the manifest on disk was wrong") from error
        except (DiskFailed, Misconfigured) as error:  # of a newer format, perhaps, or there are no descriptors left
            log.warning("a manifest cannot be opened now: %s", error)
            raise NotFound("the manifest on disk cannot be opened") from error
