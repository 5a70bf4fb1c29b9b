"""Where a daemon gets a missing shard from: peers that may have it, then the origin, if the operator allows it."""

from __future__ import annotations

from collections.abc import Iterator

from quiver.digest import Digest
from quiver.errors import Corrupt, QuiverError
from quiver.fill import OriginShards
from quiver.manifest import Manifest
from quiver.peer import PeerClient
from quiver.source import ShardSource
from quiver_cacheserver.counters import Counters
from quiver_cacheserver.neighbours import Neighbours
from quiver_cacheserver.origins import Origins


class Sources:
    """Peers and origins, and what is held against them. Safe from threads."""

    def __init__(self, neighbours: Neighbours, origins: Origins, counters: Counters) -> None:
        self._neighbours = neighbours
        self._origins = origins
        self._counters = counters

    def of(self, shard: Digest, manifest: Manifest) -> Iterator[ShardSource]:
        """Yield who may have a shard, the cheapest first."""
        yield from self._neighbours.holders(shard)
        yield OriginShards(manifest, self._origins.of(manifest))

    def blame(self, source: ShardSource, error: QuiverError) -> None:
        """A source failed, or gave wrong bytes."""
        is_peer = isinstance(source, PeerClient)
        if isinstance(error, Corrupt):
            self._counters.count("corruptions", "peer" if is_peer else "origin")
        if isinstance(source, PeerClient):
            self._neighbours.failed(source, error)

    def gave(self, source: ShardSource) -> str:
        """A source gave a shard; return what it is: ``peer`` or ``origin``."""
        if not isinstance(source, PeerClient):
            return "origin"
        self._neighbours.delivered(source)
        return "peer"

    def failed(self, manifest: Manifest, error: QuiverError) -> None:
        """No source of a manifest's shard had it."""
        self._origins.failed(manifest, error)
