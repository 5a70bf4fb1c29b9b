"""Where a daemon gets a missing shard from: peers that may have it, then the origin, if the operator allows it."""

from __future__ import annotations

import time
from collections.abc import Iterator

from quiver.digest import Bytes, Digest
from quiver.domain import SINGLE, Domain
from quiver.errors import Corrupt, QuiverError
from quiver.fill import OriginShards
from quiver.manifest import Manifest
from quiver.peer import PeerClient
from quiver.shard_memory import ShardMemory
from quiver.source import ShardSource
from quiver_cacheserver.counters import Counters
from quiver_cacheserver.names import name_in
from quiver_cacheserver.origins.allowed import Origins
from quiver_cacheserver.rack.peers import RackPeers


class _TimedPeer:
    """A peer as the source of one shard; ``seconds``: how long it took."""

    def __init__(self, peer: PeerClient) -> None:
        self.peer = peer
        self.name = peer.name
        self.seconds = 0.0

    def load(self, digest: Digest, size_bytes: int) -> Bytes:
        begun = time.monotonic()
        data = self.peer.load(digest, size_bytes)
        self.seconds = time.monotonic() - begun
        return data

    def fault(self, digest: Digest, error: Corrupt) -> QuiverError:
        return self.peer.fault(digest, error)


class Sources:
    """Peers and origins, and the record of their failures. Safe from threads."""

    def __init__(self, peers: RackPeers, origins: Origins, counters: Counters, memory: ShardMemory) -> None:
        self._peers = peers
        self._origins = origins
        self._counters = counters
        self._memory = memory

    def of(self, shard: Digest, manifest: Manifest, domain: Domain = SINGLE) -> Iterator[ShardSource]:
        """Yield the sources that may have a shard for a domain, the cheapest first."""
        yield from map(_TimedPeer, self._peers.holders(shard, domain))
        yield OriginShards(manifest, self._origins.of(manifest, name_in(domain, manifest.digest)), self._memory.take)

    def peer(self, peer: PeerClient) -> ShardSource:
        """Return a peer as a source."""
        return _TimedPeer(peer)

    def blame(self, source: ShardSource, error: QuiverError) -> None:
        """Record that a source failed, or sent wrong bytes."""
        is_peer = isinstance(source, _TimedPeer)
        if isinstance(error, Corrupt):
            self._counters.count("corruptions", "peer" if is_peer else "origin")
        if isinstance(source, _TimedPeer):
            self._peers.failed(source.peer, error)

    def gave(self, source: ShardSource, size_bytes: int) -> str:
        """Record that a source delivered a shard; return its kind: ``peer`` or ``origin``."""
        if not isinstance(source, _TimedPeer):
            return "origin"
        self._peers.delivered(source.peer, size_bytes, source.seconds)
        return "peer"

    def failed(self, manifest: Manifest, error: QuiverError) -> None:
        """Record that no source had a shard of this manifest."""
        self._origins.failed(manifest, error)
