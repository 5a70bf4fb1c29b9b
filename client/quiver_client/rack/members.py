"""The rack as this process knows it: the ring, a hint that any daemon sends, and which daemons respond.

A training process never talks to etcd (gRPC does not survive a fork). It asks a daemon for the ring every few seconds;
while none answers, it keeps the last ring.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from quiver import forks
from quiver.digest import Digest
from quiver.errors import (
    Forbidden,
    Misconfigured,
    OverCapacity,
    QuiverError,
    Unauthenticated,
    Unavailable,
)
from quiver.expiring import Expiring
from quiver.introduction import Introduction
from quiver.location import shown
from quiver.manifest import Manifest
from quiver.peer import PeerClient
from quiver.ring import Ring
from quiver.token_source import TokenSource
from quiver.transport.attempt import Attempt
from quiver.transport.liveness import IN_RACK, Patience, is_alive
from quiver.wire import RANGE, ReadRequest, RingView
from quiver_client.rack.health import RackHealth
from quiver_client.stats import Stats

# At open a daemon validates a manifest of megabytes, and answers health checks late if its machine is loaded. No batch
# waits for it.
AT_OPEN: Final = IN_RACK._replace(silence_seconds=30.0, alive_seconds=2.0)
RING_SECONDS: Final = 5.0  # half of the lease's TTL: a dead daemon is off this ring within one and a half TTLs
UNRESPONSIVE_SECONDS: Final = 1.0  # before a daemon that is avoided is probed; doubled each time, up to ten seconds
PROBE_SECONDS: Final = 1.0  # that a read by which a daemon is probed may take
PROBE_BYTES: Final = 256 << 10  # of such a read: enough to tell a slow daemon from others
RUNNERS_UP: Final = 2
FAULTS_SECONDS: Final = 10.0  # between two requests for the faults of one daemon
FAULTS_MAX: Final = 64
ASKED_MAX: Final = 4  # daemons tried in a row for one request: each dead one is a stall, and all in a ring may be dead
RACK_MEMBERS_MAX: Final = 64
UNKNOWN: Final = -2


class Members:
    """The daemons of the rack, and their ring. Safe from threads."""

    def __init__(
        self, manifest: Manifest, seeds: Sequence[str], stats: Stats, introduction: Introduction | None = None
    ) -> None:
        """``introduction``: what this process says of itself with its reads."""
        self._manifest = manifest
        self.introduction = introduction.encode() if introduction is not None else ""
        self._seeds = tuple(seeds)
        self._stats = stats
        self.token = TokenSource.from_environment()
        self._lock = forks.lock()
        self._peers: dict[tuple[str, str], PeerClient] = {}  # by URL, and by the node that its certificate must name
        self._only_tls = any(url.startswith("https:") for url in seeds)  # a ring must not lead to an unprotected daemon
        self._failure: QuiverError | None = None  # why the last daemon that was asked for the ring gave none
        self.health = RackHealth(manifest.shard_count, UNRESPONSIVE_SECONDS)
        self._asked_at = -RING_SECONDS  # when the ring was asked for
        self._asked_for_faults: Expiring[str, None] = Expiring()
        self._faults: set[str] = set()  # those that were logged
        self._putting = forks.lock()
        self._told_by = self._seeds[0]
        self._set_ring(None)

    def close(self) -> None:
        with self._lock:  # a hedge that is under way may add one
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()

    def introduce_as(self, introduction: Introduction) -> None:
        """Introduce this process differently from now on: on new connections."""
        with self._lock:
            self.introduction = introduction.encode()
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.close()  # a read that is under way ends first

    def peer(self, url: str) -> PeerClient:
        node = self._certified.get(url, "")
        with self._lock:
            if (url, node) not in self._peers:
                self._peers[url, node] = self._new_peer(url, IN_RACK)
            return self._peers[url, node]

    def _new_peer(self, url: str, patience: Patience) -> PeerClient:
        return PeerClient(
            url,
            patience=patience,
            node=self._certified.get(url, ""),
            token=self.token,
            introduction=self.introduction,
        )

    def digests(self, shards: npt.NDArray[np.int64]) -> tuple[Digest, ...]:
        """Return the names of shards."""
        return Digest.many(self._manifest.tables.shard_digests[shards].tobytes())

    # -- the ring -----------------------------------------------------------------------------------------------------

    @property
    def is_stale(self) -> bool:
        """Whether it is time to ask for the ring again."""
        return time.monotonic() - self._asked_at >= RING_SECONDS

    def refresh(self, *, opening: bool = False) -> Ring | None:
        """Ask for the ring if it is stale; return it, or ``None`` if no daemon ever answered.

        ``opening``: without a ring the dataset does not open, so wait for a busy daemon, and do not warn that the
        origin is read instead.
        """
        if not self.is_stale:
            return self._ring
        self._asked_at = time.monotonic()
        known = [member.url for member in self._ring.members] if self._ring else []
        to_ask = [url for url in dict.fromkeys([*self._seeds, *known]) if not self.is_unresponsive(url)]
        for url in to_ask[:ASKED_MAX]:
            try:
                ring, ignored = self._ring_from(url, opening=opening).ring()
            except QuiverError as error:
                self._failure = error
                self.mark_unresponsive(url)
                self._stats.warn(f"ring {url}", f"no ring from a daemon: {error}")
                continue
            if self._only_tls:
                secure = [member for member in ring.members if member.url.startswith("https:")]
                ignored += len(ring.members) - len(secure)
                ring = Ring.of(ring.rack, secure, ring.replicas)
            if ignored:
                self._stats.warn(
                    "ring", f"{ignored} malformed members, or without TLS, in the ring from {url} were ignored"
                )
            if ring.members and ring != self._ring:
                self._set_ring(ring)
            self._told_by = url
            break
        if self._ring is None and not opening:
            self._stats.warn("rack", f"no daemon of {', '.join(self._seeds)} answers; reading from the origin instead")
        return self._ring

    def _ring_from(self, url: str, *, opening: bool) -> RingView:
        if not opening:
            return self.peer(url).ring()
        with contextlib.closing(self._new_peer(url, AT_OPEN)) as peer:
            return peer.ring()

    def choices(self, shards: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], tuple[str, ...]]:
        """Return which daemons to ask for each shard: ``(shards, n)`` positions in the URLs, best first, -1 for none.

        The shard's owners come first, then the runners-up.
        """
        ring, ranks, urls = self._view
        if ring is None:
            return np.tile(np.arange(len(urls), dtype=np.int32), (len(shards), 1)), urls
        new = shards[ranks[shards, 0] == UNKNOWN]
        if len(new):
            ranks[new] = ring.rank(self._manifest.tables.shard_digests[new], ranks.shape[1])
        return ranks[shards], urls

    def ranked(self, shards: npt.NDArray[np.int64]) -> list[list[str]]:
        """Return for each shard the URLs to ask, best first, as ``choices`` does."""
        rows, urls = self.choices(shards)
        return [[urls[at] for at in row if at >= 0] for row in rows.tolist()]

    def _set_ring(self, ring: Ring | None) -> None:
        width = (ring.replicas if ring else 1) + RUNNERS_UP
        urls = tuple(member.url for member in ring.members) if ring else self._seeds
        self._certified = {member.url: member.certified_id for member in ring.members} if ring else {}
        self.health.retain((*urls, *self._seeds))
        known = {*self._certified.items(), *((url, self._certified.get(url, "")) for url in self._seeds)}
        with self._lock:
            gone = [key for key in self._peers if key not in known]
            peers = [self._peers.pop(key) for key in gone]
        for peer in peers:
            peer.close()  # a read that is under way ends first
        # Replaced as one value: no thread may see the ranks of one ring with the members of another.
        self._view = ring, np.full((self._manifest.shard_count, width), UNKNOWN, np.int32), urls

    @property
    def knows_ring(self) -> bool:
        """Whether any daemon ever answered with a ring."""
        return self._ring is not None

    @property
    def ring(self) -> Ring | None:
        """The last ring that a daemon answered, ``None`` if none ever did. Asks nobody."""
        return self._ring

    @property
    def _ring(self) -> Ring | None:
        return self._view[0]

    # -- which daemons respond ----------------------------------------------------------------------------------------

    def is_unresponsive(self, url: str) -> bool:
        """Whether a daemon is avoided because it did not answer."""
        return self.health.is_silent(url)

    def is_avoided(self, url: str) -> bool:
        """Whether no samples are to be read from a daemon: it did not answer, or is much slower than the others."""
        return self.health.is_avoided(url)

    def mark_unresponsive(self, url: str) -> None:
        """Avoid a daemon until a probe succeeds."""
        self.health.failed(url)

    def answered(self, url: str) -> None:
        """Forget that a daemon did not respond."""
        self.health.recovered(url)

    def begin_probes(self) -> list[str]:
        """Return the daemons for which to call ``probe``: their pause has ended, and no thread probes them yet."""
        return self.health.begin_probes()

    def lives(self, url: str) -> bool:
        """Whether a daemon answers a health check now."""
        return is_alive(url, IN_RACK.alive_seconds)

    def probe(self, url: str) -> None:
        """Find out whether an avoided daemon is back. Blocks for a moment: do not call it on the batch path."""
        good = False
        try:
            good = self.lives(url) and self._reads_well(url)
        finally:
            self.health.probed(url, good=good)

    def _reads_well(self, url: str) -> bool:
        """Read something that a daemon delivered before, if it did; return whether that takes no longer than usual.

        A daemon may answer health checks and nothing else.
        """
        shard = self.health.delivered_shard(url)
        if shard is None:
            return True
        ranges = np.zeros(1, RANGE)
        ranges["length"] = size_bytes = min(int(self._manifest.tables.shard_sizes[shard]), PROBE_BYTES)
        begun = time.monotonic()
        try:
            request = ReadRequest(None, self.digests(np.asarray([shard])), ranges)  # it fills nothing
            statuses, _ = self.peer(url).read(request, Attempt(limit_seconds=PROBE_SECONDS))
        except OverCapacity:
            return True  # the daemon says itself when to come back
        except QuiverError:
            return False
        self._stats.add("bytes_hedged", size_bytes)
        return bool(statuses[0]) or not self.health.is_slow(time.monotonic() - begun, size_bytes)

    def warn_of_faults(self, peer: PeerClient) -> None:
        """Ask a daemon that does not fill what keeps it from caching, and log a warning for each new fault.

        Without these warnings a rack that caches nothing would look healthy and merely be slow.
        """
        with self._lock:
            if peer.url in self._asked_for_faults:
                return
            self._asked_for_faults.set(peer.url, None, FAULTS_SECONDS)
        try:
            faults = [shown(fault, 400) for fault in peer.status().faults]
        except QuiverError:
            return  # a read from it will log why it does not answer
        with self._lock:
            new = [fault for fault in faults if fault not in self._faults][: FAULTS_MAX - len(self._faults)]
            self._faults.update(new)
        for fault in new:
            self._stats.warn(f"fault {fault}", f"{peer.url} caches nothing of what it cannot read or write: {fault}")

    # -- the manifest -------------------------------------------------------------------------------------------------

    def put_manifest(self, peer: PeerClient, manifest: Manifest) -> None:
        """Send the manifest to a daemon that lacks it."""
        with self._putting:  # one thread of a process sends it, the others wait
            if not peer.has_manifest(manifest.digest):
                peer.put_manifest(manifest.digest, manifest.content)

    def introduce(self, manifest: Manifest) -> None:
        """Send the manifest to an owner of its digest, where the other daemons look for it first.

        Raises ``Unavailable`` if no daemon answers, and the daemon's refusal if it refuses this process its ring: a job
        whose token expires later reads from the origin. If those that answer reject the manifest, reads are slower, and
        a warning is logged.
        """
        ring = self.refresh(opening=True)
        if ring is None:
            said = self._failure
            refused = isinstance(said, Unauthenticated | Forbidden | Misconfigured)
            if said is not None and (refused or (isinstance(said, Unavailable) and said.lasting)):
                raise said  # it is known what is wrong
            raise Unavailable(", ".join(self._seeds), "no daemon answers; is one running there?")
        owners = [member.url for member in ring.owners(manifest.digest, ASKED_MAX)]
        failure: QuiverError | None = None
        for url in dict.fromkeys([*owners, self._told_by]):
            if self.is_unresponsive(url) and url != self._told_by:  # which sent the ring: it is only busy
                continue
            try:
                with contextlib.closing(self._new_peer(url, AT_OPEN)) as peer:
                    self.put_manifest(peer, manifest)
                return
            except QuiverError as error:
                failure = error
                if isinstance(error, Unavailable):
                    self.mark_unresponsive(url)
        if failure is None or isinstance(failure, Unavailable):
            raise failure or Unavailable(", ".join(self._seeds), "the ring has no member that is up")
        self._stats.warn("manifest", f"no daemon took the manifest: {failure}")

    def too_small(self, largest_bytes: int) -> str:
        """Return a node whose capacity is below one shard, "" if there is none. Nodes that do not answer pass."""
        for member in self._ring.members[:RACK_MEMBERS_MAX] if self._ring else ():
            capacity_bytes = member.weight
            if capacity_bytes <= 1:  # a ring given by --peers, not kept in etcd, has no capacities
                if self.is_unresponsive(member.url):
                    continue
                try:
                    capacity_bytes = self.peer(member.url).status().capacity_bytes
                except (Unauthenticated, Forbidden):  # the status is for operators
                    continue
                except QuiverError:
                    self.mark_unresponsive(member.url)
                    continue
            if capacity_bytes < largest_bytes:
                return member.id
        return ""
