"""Makes one shard resident: verified, from disk, a peer or the origin. Room is made last."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from quiver.digest import Digest
from quiver.domain import SINGLE, Domain
from quiver.errors import DiskFailed, NotFound, QuiverError
from quiver.manifest import Manifest
from quiver.peer import PeerClient
from quiver.source import ShardSource, first_verified
from quiver.store import Kind
from quiver_cacheserver.bounds import FillMemory
from quiver_cacheserver.disk_health import DiskHealth
from quiver_cacheserver.residency.rooms import Rooms
from quiver_cacheserver.sources import Sources
from quiver_cacheserver.verification import Verification


class Admission(NamedTuple):
    """How a shard came in: from which source (``origin``, ``peer``, ``upload``), for which client, in which domain.

    ``manifest``: by which it was filled. ``is_new``: its file was written. If not, the file was there, other sharing
    domains held it, and it is shared now.
    """

    source: str
    client: str = ""
    domain: Domain = SINGLE
    is_new: bool = True
    manifest: Digest | None = None


class Filler:
    """Fills shards. Blocking: called in threads."""

    def __init__(
        self,
        sources: Sources,
        rooms: Rooms,
        verification: Verification,
        disk: DiskHealth,
        admitted: Callable[[Digest, Admission], None],
    ) -> None:
        """``admitted`` is called for each shard that was written."""
        self._sources = sources
        self._rooms = rooms
        self._verification = verification
        self._disk = disk
        self._admitted = admitted
        self._memory = FillMemory()

    def fill(self, digest: Digest, manifest: Manifest | None, client: str = "", domain: Domain = SINGLE) -> str:
        """Make the shard resident and verified; return where it was, or raise why that failed.

        ``client``: the address on whose behalf, ``""`` if consumers at several addresses need it. ``domain``: in which
        sharing domain; that another one holds the shard spares nothing.
        """
        if self._verification.is_held(digest, domain) and self._verification.verify(digest):
            return "disk"
        number = manifest.shard_numbers.get(digest) if manifest is not None else None
        if manifest is None or number is None:
            raise NotFound("the shard is not resident and no manifest says where its samples lie")
        size_bytes = int(manifest.tables.shard_sizes[number])
        try:
            with self._memory.taken(size_bytes):
                # Room is made last: nothing is evicted for a shard that no source has. Check first that there can be
                # room, to avoid a useless read.
                self._disk.check()
                self._rooms.check(Kind.SHARD, digest, size_bytes, client, domain)
                source, is_new = self._move(digest, manifest, client, domain)
        except DiskFailed as error:
            self._disk.failed(error, size_bytes)
            raise
        except QuiverError as error:
            self._sources.failed(manifest, error)
            raise
        where = self._sources.gave(source, size_bytes)
        self._admitted(digest, Admission(where, client, domain, is_new, manifest.digest))
        return where

    def take_over(self, digest: Digest, size_bytes: int, giver: PeerClient, client: str, domain: Domain) -> bool:
        """Make a shard resident that a draining daemon hands over, from it alone; return whether it delivered it.

        Raises why it did not, and ``OverCapacity``: the caller has decided what to evict (``Rooms``).
        """
        if self._verification.is_held(digest, domain) and self._verification.verify(digest):
            return False
        source = self._sources.peer(giver)
        try:
            with self._memory.taken(size_bytes):
                self._disk.check()
                self._rooms.check(Kind.SHARD, digest, size_bytes, client, domain)
                is_new = self._write(digest, size_bytes, [source], client, domain)[1]
        except DiskFailed as error:
            self._disk.failed(error, size_bytes)
            raise
        where = self._sources.gave(source, size_bytes)
        self._admitted(digest, Admission(where, client, domain, is_new))
        return True

    def _move(self, digest: Digest, manifest: Manifest, client: str, domain: Domain) -> tuple[ShardSource, bool]:
        """Read the shard from the first source that has it, and write it; return that source, and ``is_new``."""
        size_bytes = int(manifest.tables.shard_sizes[manifest.shard_numbers[digest]])
        return self._write(digest, size_bytes, self._sources.of(digest, manifest, domain), client, domain)

    def _write(
        self, digest: Digest, size_bytes: int, sources: Iterable[ShardSource], client: str, domain: Domain
    ) -> tuple[ShardSource, bool]:
        shard, source = first_verified(sources, digest, size_bytes, self._sources.blame)
        with self._rooms.reserve(Kind.SHARD, digest, size_bytes, client, domain) as writing:
            writing.write(shard.data)
            return source, writing.commit(shares=self._verification.is_resident(digest))
