"""The rack as this process knows it: the ring, asked of any daemon and believed as a hint, and who is silent.

A training process never talks to etcd (gRPC does not survive a fork). It asks a daemon for the ring now and then; while
none answers, the last ring stays.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from quiver import forks
from quiver.errors import BadRequest, Corrupt, NotFound, QuiverError, Unavailable
from quiver.liveness import IN_RACK, is_alive
from quiver.location import shown
from quiver.manifest import Manifest
from quiver.peer import PeerClient
from quiver.ring import Ring
from quiver_client.stats import Stats

RING_SECONDS: Final = 5.0  # half of the lease's time: a dead daemon is off this ring within a lease and a half
SILENT_SECONDS: Final = 5.0
SILENT_SECONDS_MAX: Final = 60.0
PROBE_SECONDS: Final = 1.0  # before the pause of a silent daemon ends, it is asked whether it is back
RUNNERS_UP: Final = 2
WHY_SECONDS: Final = 10.0
FAULTS_MAX: Final = 64
ASKED_MAX: Final = 4  # daemons asked in a row for one thing: each dead one is a stall, and a ring may be all lies
RACK_MEMBERS_MAX: Final = 64
UNKNOWN: Final = -2


class Members:
    """Who is in the rack. Safe from threads."""

    def __init__(self, manifest: Manifest, seeds: Sequence[str], stats: Stats) -> None:
        self._manifest = manifest
        self._seeds = tuple(seeds)
        self._stats = stats
        self._lock = forks.lock()
        self._peers: dict[str, PeerClient] = {}
        self._silent: dict[str, tuple[float, float]] = {}  # url -> until when it is not asked, for how long that was
        self._probing: set[str] = set()
        self._asked = -RING_SECONDS
        self._asked_why: dict[str, float] = {}  # url -> until when not again
        self._faults: set[str] = set()  # that were warned of
        self._putting = forks.lock()
        self._told_by = self._seeds[0]
        self._set_ring(None)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def peer(self, url: str) -> PeerClient:
        with self._lock:
            if url not in self._peers:
                self._peers[url] = PeerClient(url, patience=IN_RACK)
            return self._peers[url]

    # -- the ring -----------------------------------------------------------------------------------------------------

    @property
    def is_stale(self) -> bool:
        """Whether it is time to ask for the ring again."""
        return time.monotonic() - self._asked >= RING_SECONDS

    def refresh(self, *, opening: bool = False) -> Ring | None:
        """Ask for the ring if it was long ago; return the ring, ``None`` while nobody ever answered.

        ``opening``: without a ring the dataset is not opened, so nothing is said of the origin being read instead.
        """
        if not self.is_stale:
            return self._ring
        self._asked = time.monotonic()
        known = [member.url for member in self._ring.members] if self._ring else []
        to_ask = [url for url in dict.fromkeys([*self._seeds, *known]) if not self.is_unresponsive(url)]
        for url in to_ask[:ASKED_MAX]:
            try:
                ring, ignored = self.peer(url).ring().ring()
            except (Unavailable, Corrupt, BadRequest, NotFound) as error:
                self.mark_unresponsive(url)
                self._stats.warn(f"ring {url}", f"no ring from a daemon: {error}")
                continue
            if ignored:
                self._stats.warn("ring", f"{ignored} entries of the ring that {url} answered cannot be daemons")
            if ring.members and ring != self._ring:
                self._set_ring(ring)
            self._told_by = url
            break
        if self._ring is None and not opening:
            self._stats.warn("rack", f"no daemon of {', '.join(self._seeds)} answers; asking the origin instead")
        return self._ring

    def choices(self, shards: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], tuple[str, ...]]:
        """Return whom to ask for each shard: ``(shards, n)`` positions in the URLs, best first, -1 where there is none.

        First its owners, then the runners-up.
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
        # Replaced as one: a thread that reads must not see the one ring's ranks with another ring's members.
        self._view = ring, np.full((self._manifest.shard_count, width), UNKNOWN, np.int32), urls

    @property
    def knows_ring(self) -> bool:
        """Whether any daemon ever answered with a ring."""
        return self._ring is not None

    @property
    def _ring(self) -> Ring | None:
        return self._view[0]

    # -- who is silent ------------------------------------------------------------------------------------------------

    def is_unresponsive(self, url: str) -> bool:
        return time.monotonic() < self._silent.get(url, (0.0, 0.0))[0]

    def mark_unresponsive(self, url: str) -> None:
        """Do not ask this daemon for a while, and for longer each time."""
        if self.is_unresponsive(url):
            return  # several threads met the same silence
        self._pause(url)

    def answered(self, url: str) -> None:
        self._silent.pop(url, None)

    def returning(self) -> list[str]:
        """Return the silent daemons that will soon be asked for samples again: each is to be probed before."""
        soon = time.monotonic() + PROBE_SECONDS
        found = [url for url, (until, _) in list(self._silent.items()) if until < soon and url not in self._probing]
        self._probing.update(found)
        return found

    def lives(self, url: str) -> bool:
        """Whether a daemon answers a health check, just now."""
        return is_alive(url, IN_RACK.alive_seconds)

    def probe(self, url: str) -> None:
        """Find out whether a silent daemon is back. Blocks for a moment: not for the path of a batch."""
        try:
            if self.lives(url):
                self.answered(url)
            elif url in self._silent:
                self._pause(url)
        finally:
            self._probing.discard(url)

    def _pause(self, url: str) -> None:
        _, before = self._silent.get(url, (0.0, SILENT_SECONDS / 2))
        pause = min(before * 2, SILENT_SECONDS_MAX)
        self._silent[url] = (time.monotonic() + pause, pause)

    def ask_why(self, peer: PeerClient) -> None:
        """A daemon does not fill: if it says what keeps it from caching, warn of that, once.

        A rack that caches nothing would look healthy otherwise, and only be slow.
        """
        now = time.monotonic()
        with self._lock:
            if now < self._asked_why.get(peer.url, 0.0):
                return
            self._asked_why[peer.url] = now + WHY_SECONDS
        try:
            faults = [shown(fault, 400) for fault in peer.status().faults]
        except QuiverError:
            return  # and why it does not answer is said elsewhere
        with self._lock:
            new = [fault for fault in faults if fault not in self._faults][: FAULTS_MAX - len(self._faults)]
            self._faults.update(new)
        for fault in new:
            self._stats.warn(f"fault {fault}", f"{peer.url} caches nothing of what it cannot read or write: {fault}")

    # -- the manifest -------------------------------------------------------------------------------------------------

    def put_manifest(self, peer: PeerClient, manifest: Manifest) -> None:
        """Give a daemon the manifest, unless it has it by now."""
        with self._putting:  # threads of one process need not all send it
            if not peer.has_manifest(manifest.digest):
                peer.put_manifest(manifest.digest, manifest.content)

    def introduce(self, manifest: Manifest) -> None:
        """Put the manifest where the daemons will look for it first.

        Raises ``Unavailable`` if no daemon answers. One that answers and cannot take it costs speed, and a warning.
        """
        ring = self.refresh(opening=True)
        if ring is None:
            raise Unavailable(", ".join(self._seeds), "no daemon answers; is one running there?")
        owners = [member.url for member in ring.owners(manifest.digest, ASKED_MAX)]
        failure: QuiverError | None = None
        for url in dict.fromkeys([*owners, self._told_by]):  # whoever told the ring is there, whatever the ring says
            if self.is_unresponsive(url):
                continue
            try:
                self.put_manifest(self.peer(url), manifest)
                return
            except QuiverError as error:
                failure = error
                if isinstance(error, Unavailable):
                    self.mark_unresponsive(url)
        if failure is None or isinstance(failure, Unavailable):
            raise failure or Unavailable(", ".join(self._seeds), "the ring has no member that is up")
        self._stats.warn("manifest", f"no daemon took the manifest: {failure}")

    def too_small(self, largest_bytes: int) -> str:
        """Return the node whose capacity is below one shard, if any. One that does not answer is not judged."""
        for member in self._ring.members[:RACK_MEMBERS_MAX] if self._ring else ():
            capacity_bytes = member.weight
            if capacity_bytes <= 1:  # a ring that was given and not kept in etcd does not know capacities
                if self.is_unresponsive(member.url):
                    continue
                try:
                    capacity_bytes = self.peer(member.url).status().capacity_bytes
                except QuiverError:
                    self.mark_unresponsive(member.url)
                    continue
            if capacity_bytes < largest_bytes:
                return member.id
        return ""
