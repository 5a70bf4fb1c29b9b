"""Uploads: shards that this process reads from the origin and puts into a daemon which may not read that origin.

A daemon reads only origins that its operator allows. It asks one client for each other shard, and readers of the shard
wait for that upload; so a client that cannot deliver says so at once (``forgo``), and the daemon has all readers read
the origin for a moment, before it chooses another one.
Invariant: every upload that was begun ends in a verified shard at the daemon or in a ``forgo``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from quiver.digest import Bytes
from quiver.errors import QuiverError
from quiver.fill import OriginShards
from quiver.manifest import Manifest
from quiver.origin import SampleOrigin
from quiver.peer import PeerClient
from quiver.source import first_verified
from quiver.wire import ForgoRequest
from quiver_client.stats import Stats


class ShardUploads:
    """Uploads of one dataset's shards. Safe from threads; each upload holds one shard in memory."""

    def __init__(self, manifest: Manifest, origin: Callable[[], SampleOrigin], stats: Stats) -> None:
        self._manifest = manifest
        self._origin = origin
        self._stats = stats

    def upload(self, peer: PeerClient, shard: int, received: Callable[[Bytes], None] = lambda data: None) -> None:
        """Read a shard from the origin, verify it, and put it into the daemon.

        ``received`` gets the verified shard before it is sent. Raises the error of the origin or of the
        verification; if the daemon does not accept the shard, only a warning is logged.
        """
        digest = self._manifest.shard_digest(shard)
        try:
            source = OriginShards(self._manifest, self._origin())
            data, _ = first_verified([source], digest, int(self._manifest.tables.shard_sizes[shard]))
        except QuiverError:
            self.forgo(peer, shard)
            raise
        received(data.data)
        try:
            peer.put_shard(digest, data.data)
            self._stats.add("uploads")
        except QuiverError as error:
            self._stats.warn("upload", f"a shard was read from the origin but not uploaded: {error}")
            self.forgo(peer, shard)

    def forgo(self, peer: PeerClient, shard: int) -> None:
        """Tell the daemon not to wait for this process to upload the shard."""
        with contextlib.suppress(QuiverError):
            peer.forgo(ForgoRequest(self._manifest.digest, (self._manifest.shard_digest(shard),)))
