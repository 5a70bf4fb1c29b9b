"""The needs of a consumer, told to every daemon of a rack; the daemons' answers, put together.

A daemon that is slow or gone holds nobody up: its last answer counts for a while, and then nothing of it does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final

import numpy as np
import numpy.typing as npt

from quiver.errors import QuiverError, Unavailable
from quiver.fill import OriginShards
from quiver.manifest import Manifest
from quiver.origin import SampleOrigin
from quiver.peer import PeerClient
from quiver.residency import Report
from quiver.residency.messages import NeedsAnswer, NeedsReport, NeedsStatus
from quiver.ring import Ring
from quiver.source import first_verified
from quiver.wire import FORGO, RANGE, ReadRequest
from quiver_client.rack.members import Members
from quiver_client.stats import Stats
from quiver_client.thread_pool import ThreadPool

TELLERS: Final = 8
UPLOADERS: Final = 2  # each holds a shard in memory
ANSWER_SECONDS: Final = 0.25
LEAVE_SECONDS: Final = 0.75
STALE_SECONDS: Final = 5.0

U8 = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]


class RackNeeds:
    """``NeedsChannel`` with the daemons of a rack. Used by one thread."""

    def __init__(self, manifest: Manifest, members: Members, origin: Callable[[], SampleOrigin], stats: Stats) -> None:
        self._manifest = manifest
        self._members = members
        self._origin = origin
        self._stats = stats
        self._pool = ThreadPool(TELLERS, "quiver-tell")
        self._uploaders = ThreadPool(UPLOADERS, "quiver-upload")
        self._ring: Ring | None = None
        self._refreshing: Future[Ring | None] | None = None
        self._asked: dict[str, Future[None]] = {}
        self._seen: dict[str, tuple[float, U8]] = {}
        self._uploading: set[int] = set()
        self.orphaned: Mask | None = None
        self._owned: tuple[Ring, npt.NDArray[np.int32]] | None = None  # the first owner of each shard, by this ring

    def report(self, report: Report, *, leaving: bool = False) -> U8:
        """Tell all daemons that answer; return what is held in the rack, as of the last answers."""
        told = NeedsReport(self._manifest.digest, report, leaving)
        if leaving:
            self._leave(told)
            return np.zeros(self._manifest.shard_count, np.uint8)
        ring = self._refreshed()
        urls = [member.url for member in ring.members] if ring is not None else []
        for url in urls:
            before = self._asked.get(url)
            if (before is None or before.done()) and not self._members.is_unresponsive(url):
                self._asked[url] = self._pool.submit(self._tell, url, told)
        wait(list(self._asked.values()), ANSWER_SECONDS)
        self._asked = {url: asked for url, asked in self._asked.items() if url in urls}
        self.orphaned = self._orphaned(ring) if ring is not None else None
        now = time.monotonic()
        seen = np.zeros(self._manifest.shard_count, np.uint8)
        for url, (at, answer) in list(self._seen.items()):
            if url not in urls or now - at > STALE_SECONDS or self._members.is_unresponsive(url):
                self._seen.pop(url, None)
            else:
                np.maximum(seen, answer, out=seen)
        return seen

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._uploaders.shutdown(wait=False, cancel_futures=True)

    def _refreshed(self) -> Ring | None:
        """Return the ring; while no daemon that is asked for it answers, the last one."""
        asked = self._refreshing
        if asked is not None and asked.done():
            self._ring = asked.result()
        if asked is None or asked.done():
            asked = self._refreshing = self._pool.submit(self._members.refresh)
            wait([asked], ANSWER_SECONDS)
        if asked.done():
            self._ring = asked.result()
        return self._ring

    def _leave(self, told: NeedsReport) -> None:
        """Take the needs back from all daemons that were told them, at once. The others' lease ends by itself."""
        ring, before = self._ring, {url: asked for url, asked in self._asked.items() if not asked.cancel()}
        urls = [member.url for member in ring.members if not self._members.is_unresponsive(member.url)] if ring else []
        # Those first that have answered: of the others, each may hold a thread up.
        urls.sort(key=lambda url: url in before and not before[url].done())
        wait([self._pool.submit(self._tell_last, url, told, before.get(url)) for url in urls], LEAVE_SECONDS)

    def _tell_last(self, url: str, told: NeedsReport, before: Future[None] | None) -> None:
        if before is not None:
            wait([before], LEAVE_SECONDS)  # overtaken by what was told before, it would mean nothing
        self._tell(url, told)

    def _orphaned(self, ring: Ring) -> Mask | None:
        """Return whose shards nobody brings in: a daemon fetches what is its own, and this one does not answer."""
        down = [at for at, member in enumerate(ring.members) if self._members.is_unresponsive(member.url)]
        if not down:
            return None
        if self._owned is None or self._owned[0] is not ring:
            self._owned = ring, ring.rank(self._manifest.tables.shard_digests, 1)[:, 0]
        orphaned: Mask = np.isin(self._owned[1], down)
        return orphaned

    def _tell(self, url: str, told: NeedsReport) -> None:
        peer = self._members.peer(url)
        try:
            answer = peer.needs(told)
            if answer.status is NeedsStatus.NO_MANIFEST and not told.leaving:
                self._members.put_manifest(peer, self._manifest)
                answer = peer.needs(told)
        except QuiverError as error:
            if isinstance(error, Unavailable):
                self._members.mark_unresponsive(url)
            self._stats.warn(f"needs {url}", f"a daemon was not told what this job needs: {error}")
            return
        self._members.answered(url)
        if answer.status is NeedsStatus.TAKEN and len(answer.seen) == self._manifest.shard_count:
            self._seen[url] = (time.monotonic(), answer.seen)
            self._upload(peer, answer)

    def _upload(self, peer: PeerClient, answer: NeedsAnswer) -> None:
        for shard in answer.uploads:
            if shard not in self._uploading:
                self._uploading.add(shard)
                with contextlib.suppress(RuntimeError):  # closed meanwhile
                    self._uploaders.submit(self._put, peer, shard)

    def _put(self, peer: PeerClient, shard: int) -> None:
        """Read a shard that the daemon may not read itself, and put it there."""
        digest = self._manifest.shard_digest(shard)
        try:
            source = OriginShards(self._manifest, self._origin())
            data, _ = first_verified([source], digest, int(self._manifest.tables.shard_sizes[shard]))
            peer.put_shard(digest, data.data)
            self._stats.add("uploads")
        except QuiverError as error:
            self._stats.warn("upload", f"a shard was not put into the rack: {error}")
            with contextlib.suppress(QuiverError):  # who waits for it need not wait it out
                peer.read(ReadRequest(self._manifest.digest, (digest,), np.zeros(0, RANGE), 0, FORGO))
        finally:
            self._uploading.discard(shard)
