"""The other daemons of the rack, as this one asks them: who may hold a shard, who should, and who is silent.

The ring says where to look first and nothing more; who does not answer is left alone for a moment.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from quiver.digest import Digest
from quiver.errors import OverCapacity, QuiverError
from quiver.peer import PeerClient
from quiver.ring import Member
from quiver.transport.liveness import IN_RACK
from quiver_cacheserver.registry import Registry

log = logging.getLogger(__name__)

RUNNERS_UP: Final = 2  # after a join the previous owner is the runner-up
DRAINING_ASKED_MAX: Final = 4
MANIFEST_ASKED_MAX: Final = 4  # its first owners, to which clients put it: a made-up digest must not cost a whole rack
# A neighbour has a shard at hand or says that it has not: one that is alive and says nothing for so long is overloaded,
# and a reader waits here meanwhile. Then it is left alone, and for longer each time.
# A reader who was turned away by a silent owner has spent its own patience on it already, so this one is shorter: both
# together stay below a second.
PATIENCE: Final = IN_RACK._replace(silence_seconds=2.0, suspect_seconds=0.1, alive_seconds=0.25)
PAUSE_SECONDS: Final = 5.0
PAUSE_SECONDS_MAX: Final = 60.0


class Neighbours:
    """Clients of the other members. Safe from threads; its generators ask nobody by themselves."""

    def __init__(self, registry: Registry, name: str, url: str) -> None:
        self._registry = registry
        self._name, self._url = name, url
        self._peers: dict[str, PeerClient] = {}
        self._silent: dict[str, tuple[float, float]] = {}  # url -> until when it is not asked, for how long that was
        self._lock = threading.Lock()

    def holders(self, digest: Digest) -> Iterator[PeerClient]:
        """Yield who may hold a shard: its owners and runners-up, and members on their way out."""
        ring = self._registry.ring
        ranked = ring.rank(np.frombuffer(digest, np.uint8)[None], ring.replicas + RUNNERS_UP)[0]
        likely = [ring.members[int(i)] for i in ranked if i >= 0]
        likely += [member for member in ring.members if member.state == "draining"][:DRAINING_ASKED_MAX]
        return self._clients(likely)

    def replicas(self, digest: Digest) -> Iterator[PeerClient]:
        """Yield who else should hold a shard, where the rack keeps several copies."""
        ring = self._registry.ring
        return self._clients(ring.owners(digest) if ring.replicas > 1 else ())

    def manifest_holders(self, digest: Digest) -> Iterator[PeerClient]:
        """Yield who may have a manifest, the likeliest first."""
        ring = self._registry.ring
        return self._clients(ring.owners(digest, len(ring.members))[:MANIFEST_ASKED_MAX])

    def failed(self, peer: PeerClient, error: QuiverError) -> None:
        """Leave a neighbour alone for a while: it did not answer, or answered wrongly. One that is busy is well."""
        if isinstance(error, OverCapacity):
            return
        until, before = self._silent.get(peer.url, (0.0, PAUSE_SECONDS / 2))
        if time.monotonic() >= until:  # and not another thread that met the same silence
            pause = min(before * 2, PAUSE_SECONDS_MAX)
            self._silent[peer.url] = time.monotonic() + pause, pause
        log.info("neighbour passed over: %s", error)

    def delivered(self, peer: PeerClient) -> None:
        """Forget what was held against a neighbour."""
        self._silent.pop(peer.url, None)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def _clients(self, members: Iterable[Member]) -> Iterator[PeerClient]:
        for member in members:
            url = member.url
            if member.id == self._name or url == self._url or time.monotonic() < self._silent.get(url, (0.0, 0.0))[0]:
                continue
            with self._lock:
                if url not in self._peers:
                    self._peers[url] = PeerClient(url, patience=PATIENCE)
                peer = self._peers[url]
            yield peer
