"""The manifests that this daemon has: opened, checked, and fetched from peers when a client names one.

A client names one in its sharing domain. One that only other domains hold is looked for as one that nobody has.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Executor
from typing import Final

from quiver.digest import Digest
from quiver.domain import SINGLE, Domain
from quiver.errors import BadRequest, Corrupt, DiskFailed, Misconfigured, NotFound, QuiverError
from quiver.expiring import Expiring
from quiver.manifest import Manifest
from quiver.peer import PeerClient
from quiver.store import Kind, OpenFile
from quiver.store.inventory import file_of
from quiver_cacheserver.bounds import open_manifest
from quiver_cacheserver.budget import Budgets, Cost, Resource
from quiver_cacheserver.dataset_names import DatasetNames
from quiver_cacheserver.names import name_in
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
        self,
        rooms: Rooms,
        opened: OpenManifests,
        executor: Executor,
        peers: RackPeers,
        budgets: Budgets,
        names: DatasetNames,
    ) -> None:
        self.opened = opened
        self._names = names
        self._rooms = rooms
        self._store = rooms.store
        self._executor = executor
        self._peers = peers
        self._budgets = budgets
        # By name: domains do not meet here.
        self._missing: Expiring[Digest, None] = Expiring(MISSING_MAX)
        self._fetching: dict[Digest, asyncio.Future[Manifest | None]] = {}

    def if_open(self, digest: Digest | None, domain: Domain = SINGLE) -> Manifest | None:
        """Return the manifest if it is open."""
        return self.opened.get(name_in(domain, digest)) if digest is not None else None

    async def get(self, digest: Digest, client: str, domain: Domain = SINGLE) -> Manifest | None:
        """Return the manifest, from disk or from a peer; ``None`` if none has it.

        Also ``None`` if ``client`` caused too many lookups: then the client has to upload it.
        """
        manifest, name = self.if_open(digest, domain), name_in(domain, digest)
        if manifest is not None:
            return manifest
        if name in self._missing:
            return None
        future = self._fetching.get(name)
        if future is None:
            if not self._budgets.hold(client, Resource.LOOKUPS):
                return None
            if not self._budgets.spend(client, Cost.LOOKUPS, 1, time.monotonic()):
                self._budgets.release(client, Resource.LOOKUPS)
                return None
            loop = asyncio.get_running_loop()
            future = self._fetching[name] = loop.run_in_executor(self._executor, self._find, digest, domain)
            future.add_done_callback(lambda done: self._found(digest, domain, done, client))
        return await asyncio.shield(future)

    def uploaded(self, digest: Digest, client: str, domain: Domain = SINGLE) -> None:
        """Record that a client uploaded the manifest: it is no longer missing."""
        self._missing.pop(name_in(domain, digest))
        is_shared = len(self._store.inventory.domains_of(Kind.MANIFEST, digest)) > 1
        self._rooms.holders.filled(digest, "" if is_shared else client)

    def open_file(self, digest: Digest, domain: Domain = SINGLE) -> OpenFile:
        """In a thread: return a manifest's file. Raises ``NotFound`` if the domain does not hold it."""
        if not self._store.inventory.has(Kind.MANIFEST, digest, domain):
            raise NotFound("the manifest is not here")
        return self._store.open_file(Kind.MANIFEST, digest)

    def _found(self, digest: Digest, domain: Domain, done: asyncio.Future[Manifest | None], client: str) -> None:
        name = name_in(domain, digest)
        self._budgets.release(client, Resource.LOOKUPS)
        self._fetching.pop(name, None)
        manifest = None if done.cancelled() or done.exception() else done.result()
        if manifest is None:
            self._missing.set(name, None, ASK_AGAIN_SECONDS)
        else:
            self.opened.add(name, manifest)
            self._names.heard(digest, domain, own=manifest.header.name)

    def _find(self, digest: Digest, domain: Domain) -> Manifest | None:
        try:
            return self._from_disk(digest, domain)
        except NotFound:
            pass
        for peer in self._peers.manifest_holders(digest, domain):
            try:
                return self._fetched(peer, digest, domain)
            except NotFound:
                continue
            except QuiverError as error:
                self._peers.failed(peer, error)
        return None

    def take_over(self, digest: Digest, giver: PeerClient, domain: Domain = SINGLE) -> None:
        """In a thread: fetch a manifest that a draining daemon hands over. Raises why that failed."""
        self._fetched(giver, digest, domain)
        self.uploaded(digest, "", domain)

    def _fetched(self, peer: PeerClient, digest: Digest, domain: Domain) -> Manifest:
        data = peer.manifest(digest, min(MANIFEST_BYTES_MAX, self._store.capacity_bytes))
        with self._rooms.reserve(Kind.MANIFEST, digest, len(data), domain=domain) as writing:
            writing.write(data)
            writing.commit()
        return self._from_disk(digest, domain)

    def _from_disk(self, digest: Digest, domain: Domain) -> Manifest:
        self.open_file(digest, domain)  # raises NotFound, and counts as a use
        try:
            return open_manifest(file_of(self._store.root, Kind.MANIFEST, digest), digest)
        except (BadRequest, Corrupt) as error:
            log.warning("manifest put aside: %s", error)
            self._store.quarantine(Kind.MANIFEST, digest)
            raise NotFound("the manifest on disk was wrong") from error
        except (DiskFailed, Misconfigured) as error:  # a newer format perhaps, or no descriptor is left
            log.warning("a manifest cannot be opened now: %s", error)
            raise NotFound("the manifest on disk cannot be opened") from error
