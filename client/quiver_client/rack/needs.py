"""The needs of a consumer, reported to every daemon of a rack, and their answers, merged.

No report waits long for a daemon that is slow or gone: its last answer counts for ``STALE_SECONDS``, then it expires.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final

import numpy as np
import numpy.typing as npt

from quiver.errors import Forbidden, QuiverError, Unauthenticated, Unavailable
from quiver.expiring import Expiring
from quiver.manifest import Manifest
from quiver.peer import PeerClient
from quiver.residency import ConsumerReport
from quiver.residency.messages import NeedsReport, NeedsStatus
from quiver.ring import Ring
from quiver_client.rack.members import Members
from quiver_client.rack.uploads import ShardUploads
from quiver_client.stats import Stats
from quiver_client.thread_pool import ThreadPool

REPORTS_AT_ONCE: Final = 8
UPLOADS_AT_ONCE: Final = 2  # each holds a shard in memory
ANSWER_SECONDS: Final = 0.25  # that a report waits for answers; later ones count in the next report
LEAVE_SECONDS: Final = 0.75
STALE_SECONDS: Final = 5.0
FORBIDDEN_SECONDS: Final = 60.0  # between reports to a daemon that refuses them to this token
RESEND_SECONDS: Final = 3.0  # between two lists of uses that are sent to a daemon, which may have no room for them

U8 = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]


class RackNeeds:
    """``NeedsChannel`` with the daemons of a rack. Used by one thread."""

    def __init__(
        self,
        manifest: Manifest,
        members: Members,
        uploads: ShardUploads,
        stats: Stats,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manifest = manifest
        self._members = members
        self._uploads = uploads
        self._stats = stats
        self._pool = ThreadPool(REPORTS_AT_ONCE, "quiver-tell")
        self._uploaders = ThreadPool(UPLOADS_AT_ONCE, "quiver-upload")
        self._ring: Ring | None = None
        self._refreshing: Future[Ring | None] | None = None
        self._telling: dict[str, Future[None]] = {}  # by URL, the report in flight
        self._seen: Expiring[str, U8] = Expiring(clock=clock)  # by URL, the last answer
        self._forbidden: Expiring[str, None] = Expiring(clock=clock)  # daemons that accept no reports from this token
        self._sent: Expiring[str, None] = Expiring(clock=clock)  # daemons that were sent a list of uses a moment ago
        self._told: Expiring[str, None] = Expiring(clock=clock)  # daemons that may hold a lease of this consumer
        self._uploading: set[int] = set()
        self._probe_wanted: Expiring[str, None] = Expiring(clock=clock)  # daemons that ask for probes
        self.orphaned: Mask | None = None
        self._owned: tuple[Ring, npt.NDArray[np.int32]] | None = None  # the first owner of each shard, by this ring

    def report(self, report: ConsumerReport, *, leaving: bool = False) -> U8:
        """Report to all daemons that respond; return what the rack holds, as of the last answers."""
        told = NeedsReport(self._manifest.digest, report, leaving)
        if leaving:
            self._leave(told)
            return np.zeros(self._manifest.shard_count, np.uint8)
        ring = self._refreshed()
        urls = [member.url for member in ring.members] if ring is not None else []
        for url in urls:
            before = self._telling.get(url)
            if (before is None or before.done()) and not self._is_deaf(url):
                self._telling[url] = self._pool.submit(self._tell, url, told)
        wait(list(self._telling.values()), ANSWER_SECONDS)
        self._telling = {url: telling for url, telling in self._telling.items() if url in urls}
        self.orphaned = self._orphaned(ring) if ring is not None else None
        seen = np.zeros(self._manifest.shard_count, np.uint8)
        for url, answer in self._seen.items():
            if url not in urls or self._members.is_unresponsive(url):
                self._seen.pop(url)
            else:
                np.maximum(seen, answer, out=seen)
        return seen

    @property
    def probe_wanted(self) -> bool:
        """Whether a daemon asks for a series of probes, in its last answer."""
        return len(self._probe_wanted) > 0 and any(True for _ in self._probe_wanted)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._uploaders.shutdown(wait=False, cancel_futures=True)

    def _refreshed(self) -> Ring | None:
        """Return the ring, refreshed in the background; the last one while no daemon answers."""
        refreshing = self._refreshing
        if refreshing is None or refreshing.done():
            if refreshing is not None:
                self._ring = refreshing.result()
            refreshing = self._refreshing = self._pool.submit(self._members.refresh)
            wait([refreshing], ANSWER_SECONDS)
        if refreshing.done():
            self._ring = refreshing.result()
        return self._ring

    def _leave(self, told: NeedsReport) -> None:
        """Withdraw the needs from all daemons that may have received them, concurrently. Elsewhere the lease expires.

        A daemon that did not answer the last report in time may only be busy: it is told too.
        """
        before = {url: telling for url, telling in self._telling.items() if not telling.cancel()}

        def doubts(url: str) -> tuple[bool, bool]:
            return self._members.is_unresponsive(url), url in before and not before[url].done()

        urls = sorted(self._told, key=doubts)  # those last that may block a thread each
        wait([self._pool.submit(self._tell_last, url, told, before.get(url)) for url in urls], LEAVE_SECONDS)

    def _tell_last(self, url: str, told: NeedsReport, before: Future[None] | None) -> None:
        if before is not None:
            wait([before], LEAVE_SECONDS)  # an earlier report that arrives later would undo this one
        self._tell(url, told)

    def _orphaned(self, ring: Ring) -> Mask | None:
        """Return the shards whose owner does not respond, or takes no reports: a daemon fetches only its own shards."""
        down = [at for at, member in enumerate(ring.members) if self._is_deaf(member.url)]
        if not down:
            return None
        if self._owned is None or self._owned[0] is not ring:
            self._owned = ring, ring.rank(self._manifest.tables.shard_digests, 1)[:, 0]
        orphaned: Mask = np.isin(self._owned[1], down)
        return orphaned

    def _is_deaf(self, url: str) -> bool:
        """Whether a daemon does not respond, or accepts no reports from this token."""
        return url in self._forbidden or self._members.is_unresponsive(url)

    def _tell(self, url: str, told: NeedsReport) -> None:
        peer, brief = self._members.peer(url), told.without_uses()
        self._told.set(url, None, told.report.lease_seconds)
        try:
            answer = peer.needs(brief)
            if answer.status is NeedsStatus.NO_MANIFEST and not told.leaving:
                self._members.put_manifest(peer, self._manifest)
                answer = peer.needs(brief)
            if answer.order_wanted and told.report.uses is not None and url not in self._sent:
                self._sent.set(url, None, RESEND_SECONDS)
                answer = peer.needs(told)
        except QuiverError as error:
            if isinstance(error, (Unavailable, Unauthenticated)):
                self._members.mark_unresponsive(url)
            elif isinstance(error, Forbidden):  # a token that may only read: this job reads as if nobody listened
                self._forbidden.set(url, None, FORBIDDEN_SECONDS)
            self._stats.warn(f"needs {url}", f"could not report to a daemon what this job needs: {error}")
            return
        self._members.answered(url)
        if answer.status is NeedsStatus.TAKEN and len(answer.seen) == self._manifest.shard_count:
            self._seen.set(url, answer.seen, STALE_SECONDS)
            if answer.probe_wanted:
                self._probe_wanted.set(url, None, STALE_SECONDS)
            else:
                self._probe_wanted.pop(url)
            for shard in answer.uploads:
                self._begin_upload(peer, shard)

    def _begin_upload(self, peer: PeerClient, shard: int) -> None:
        if shard not in self._uploading:
            self._uploading.add(shard)
            with contextlib.suppress(RuntimeError):  # the pool is closed
                self._uploaders.submit(self._upload, peer, shard)

    def _upload(self, peer: PeerClient, shard: int) -> None:
        try:
            self._uploads.upload(peer, shard)
        except QuiverError as error:
            self._stats.warn("upload", f"a shard was not uploaded: {error}")
        finally:
            self._uploading.discard(shard)
