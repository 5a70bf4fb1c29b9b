"""Clients of the other daemons of the rack: which peers may hold a shard, which should, and which are unresponsive.

The ring is a hint of where to look first. A peer that does not answer, or is much slower than the others, is not asked
until a probe in the background succeeds (``quiver.health``): a grey peer costs one fill a second, not each.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from quiver.digest import Digest
from quiver.domain import SINGLE, Domain
from quiver.errors import OverCapacity, QuiverError
from quiver.health import Health
from quiver.peer import PeerClient
from quiver.ring import Member
from quiver.transport.liveness import IN_RACK, is_alive
from quiver.transport.tls import Credentials
from quiver_cacheserver.rack.registry import Registry

log = logging.getLogger(__name__)

RUNNERS_UP: Final = 2  # after a join the previous owner is the runner-up
DRAINING_ASKED_MAX: Final = 4
MANIFEST_ASKED_MAX: Final = 4  # the first owners, where clients put it: a forged digest must not cost the whole rack
# A peer either has a shard resident or says at once that it has not, and sends it at the speed of the rack. A reader
# waits here meanwhile, and may have spent its own patience on an unresponsive owner already: together they stay below a
# second. The origin is as fast as the minimum rate.
PATIENCE: Final = IN_RACK._replace(
    silence_seconds=0.6,
    suspect_seconds=0.1,
    alive_seconds=0.25,
    handshake_seconds=0.5,
    slowest_bytes_per_second=8 << 20,
)


class RackPeers:
    """Clients of the other members. Safe from threads; its generators send no requests themselves."""

    def __init__(
        self, registry: Registry, name: str, url: str, tls: Credentials | None = None, *, asks: bool = True
    ) -> None:
        """``tls``: speak TLS with the other members, who must be those that the ring names, and ignore those without.

        ``asks``: ``False`` if the others would refuse this daemon; then there is nobody to ask.
        """
        self._registry = registry
        self._name, self._url = name, url
        self._tls = tls
        self.asks = asks
        self._peers: dict[tuple[str, str], PeerClient] = {}  # by URL, and by the node that its certificate must name
        self._health = Health()
        self._prober = ThreadPoolExecutor(1, thread_name_prefix="quiver-probe")
        self._lock = threading.Lock()

    def holders(self, digest: Digest, domain: Domain = SINGLE) -> Iterator[PeerClient]:
        """Yield the peers that may hold a shard: its owners and runners-up, and draining members.

        They are asked on behalf of ``domain``, and answer what it holds there.
        """
        ring = self._registry.ring
        ranked = ring.rank(np.frombuffer(digest, np.uint8)[None], ring.replicas + RUNNERS_UP)[0]
        likely = [ring.members[int(i)] for i in ranked if i >= 0]
        likely += [member for member in ring.members if member.state == "draining"][:DRAINING_ASKED_MAX]
        return self._clients(likely, domain)

    def replicas(self, digest: Digest, domain: Domain = SINGLE) -> Iterator[PeerClient]:
        """Yield the other peers that should hold a shard if the rack keeps several copies."""
        ring = self._registry.ring
        return self._clients(ring.owners(digest) if ring.replicas > 1 else (), domain)

    def manifest_holders(self, digest: Digest, domain: Domain = SINGLE) -> Iterator[PeerClient]:
        """Yield the peers that may have a manifest, the most likely first."""
        ring = self._registry.ring
        return self._clients(ring.owners(digest, len(ring.members))[:MANIFEST_ASKED_MAX], domain)

    def member(self, name: str, domain: Domain = SINGLE) -> PeerClient | None:
        """Return the other member of this node id; ``None`` if the ring has none, or it does not answer now."""
        named = [member for member in self._registry.ring.members if member.id == name]
        return next(self._clients(named, domain), None)

    def failed(self, peer: PeerClient, error: QuiverError) -> None:
        """Do not ask a peer for a while: it did not answer, or answered wrongly. A busy peer is asked again."""
        if isinstance(error, OverCapacity):
            return
        with self._lock:
            self._health.failed(peer.url, time.monotonic())
        log.info("peer passed over: %s", error)

    def delivered(self, peer: PeerClient, size_bytes: int, seconds: float) -> None:
        """Record that a peer delivered a shard, and how long that took."""
        now = time.monotonic()
        with self._lock:
            self._health.recovered(peer.url, now)
            self._health.answered(peer.url, seconds, size_bytes, now)

    def close(self) -> None:
        self._prober.shutdown(wait=False, cancel_futures=True)
        with self._lock:  # a fill that is under way may add one
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()

    def _clients(self, members: Iterable[Member], domain: Domain) -> Iterator[PeerClient]:
        for member in members if self.asks else ():
            url = member.url
            if member.id == self._name or url == self._url or url.startswith("https:") != (self._tls is not None):
                continue
            key = url, member.certified_id
            with self._lock:
                if self._health.is_avoided(url):
                    self._probe()
                    continue
                if key not in self._peers:
                    self._close_departed()
                    self._peers[key] = PeerClient(url, patience=PATIENCE, tls=self._tls, node=member.certified_id)
                peer = self._peers[key]
            yield peer.acting_for(domain)

    def _close_departed(self) -> None:
        """Close the clients of peers that left the ring, under the lock. A request that is under way ends first."""
        here = {(member.url, member.certified_id) for member in self._registry.ring.members}
        for key in [key for key in self._peers if key not in here]:
            self._peers.pop(key).close()

    def _probe(self) -> None:
        """Begin to probe the peers of the ring whose pause has ended, under the lock."""
        self._health.retain(member.url for member in self._registry.ring.members)
        for url in self._health.begin_probes(time.monotonic()):
            with contextlib.suppress(RuntimeError):  # this daemon ends
                self._prober.submit(self._probed, url)

    def _probed(self, url: str) -> None:
        good = is_alive(url, PATIENCE.alive_seconds, tls=self._tls)
        with self._lock:
            self._health.probed(url, good=good, now=time.monotonic())
