"""The manifests that this daemon has: opened, checked, and fetched from peers when a client names one."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Executor
from typing import Final

from quiver.digest import Digest
from quiver.errors import BadRequest, Corrupt, DiskFailed, Misconfigured, NotFound, QuiverError
from quiver.expiring import Expiring
from quiver.manifest import Manifest
from quiver.store import Kind
from quiver.store.inventory import file_of
from quiver_cacheserver.bounds import open_manifest
from quiver_cacheserver.budget import Budgets, Cost, Resource
from quiver_cacheserver.opened import OpenManifests
from quiver_cacheserver.rack.peers import RackPeers
from quiver_cacheserver.residency.rooms import Rooms

log = logging.getLogger(__name__)

MANIFEST_BYTES_MAX: Final = 4 << 30
MISSING_MAX: Final = 4096  # more than all addresses together may look up within that time
ASK_AGAIN_SECONDS: Final = 2.0  # between two lookups of a manifest that no peer had


class Manifests:
    """Opened manifests by digest. ``get`` belongs to the event loop, the rest is safe from threads."""

    def __init__(
        self, rooms: Rooms, opened: OpenManifests, executor: Executor, peers: RackPeers, budgets: Budgets
    ) -> None:
        self.opened = opened
        self._rooms = rooms
        self._store = rooms.store
        self._executor = executor
        self._peers = peers
        self._budgets = budgets
        self._missing: Expiring[Digest, None] = Expiring(MISSING_MAX)
        self._fetching: dict[Digest, asyncio.Future[Manifest | None]] = {}

    def if_open(self, digest: Digest | None) -> Manifest | None:
        """Return the manifest if it is open."""
        return self.opened.get(digest)

    async def get(self, digest: Digest, client: str) -> Manifest | None:
        """Return the manifest, from disk or from a peer; ``None`` if none has it.

        Also ``None`` if ``client`` caused too many lookups: then the client has to upload it.
        """
        manifest = self.if_open(digest)
        if manifest is not None:
            return manifest
        if digest in self._missing:
            return None
        future = self._fetching.get(digest)
        if future is None:
            if not self._budgets.hold(client, Resource.LOOKUPS):
                return None
            if not self._budgets.spend(client, Cost.LOOKUPS, 1, time.monotonic()):
                self._budgets.release(client, Resource.LOOKUPS)
                return None
            loop = asyncio.get_running_loop()
            future = self._fetching[digest] = loop.run_in_executor(self._executor, self._find, digest)
            future.add_done_callback(lambda done: self._found(digest, done, client))
        return await asyncio.shield(future)

    def forget_missing(self, digest: Digest) -> None:
        """Forget that the manifest was missing: a client has just uploaded it."""
        self._missing.pop(digest)

    def _found(self, digest: Digest, done: asyncio.Future[Manifest | None], client: str) -> None:
        self._budgets.release(client, Resource.LOOKUPS)
        self._fetching.pop(digest, None)
        manifest = None if done.cancelled() or done.exception() else done.result()
        if manifest is None:
            self._missing.set(digest, None, ASK_AGAIN_SECONDS)
        else:
            self.opened.add(digest, manifest)

    def _find(self, digest: Digest) -> Manifest | None:
        try:
            return self._from_disk(digest)
        except NotFound:
            pass
        for peer in self._peers.manifest_holders(digest):
            try:
                data = peer.manifest(digest, min(MANIFEST_BYTES_MAX, self._store.capacity_bytes))
                with self._rooms.reserve(Kind.MANIFEST, digest, len(data)) as writing:
                    writing.write(data)
                    writing.commit()
                return self._from_disk(digest)
            except NotFound:
                continue
            except QuiverError as error:
                self._peers.failed(peer, error)
        return None

    def _from_disk(self, digest: Digest) -> Manifest:
        self._store.open_file(Kind.MANIFEST, digest)  # raises NotFound, and counts as a use
        try:
            return open_manifest(file_of(self._store.root, Kind.MANIFEST, digest), digest)
        except (BadRequest, Corrupt) as error:
            log.warning("manifest put aside: %s", error)
            self._store.quarantine(Kind.MANIFEST, digest)
            raise NotFound("the manifest on disk was wrong") from error
        except (DiskFailed, Misconfigured) as error:  # a newer format perhaps, or no descriptor is left
            log.warning("a manifest cannot be opened now: %s", error)
            raise NotFound("the manifest on disk cannot be opened") from error
