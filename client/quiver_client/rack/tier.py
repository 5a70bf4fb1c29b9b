"""The rack tier: one request per peer and batch, answered into one buffer per peer.

Which peer has what is decided by the ring, which is a hint: a peer that is down, slow or wrong is passed over for the
next one, and what no peer delivers is left to the origin tier. Nothing in a ring can do more than cost time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from quiver import forks
from quiver.digest import Digest
from quiver.errors import BrokenOff, Corrupt, DiskFailed, NotFound, OverCapacity, QuiverError, Unavailable
from quiver.fill import OriginShards
from quiver.manifest import Manifest
from quiver.origin import SampleOrigin
from quiver.peer import PeerClient
from quiver.plan import Ints
from quiver.source import first_verified
from quiver.wire import FORGO, RANGE, RANGES_MAX, RECHECK, RangeStatus, ReadRequest
from quiver_client import process_exit
from quiver_client.batch import Batch, Positions
from quiver_client.buffers import Buffer
from quiver_client.rack.members import Members
from quiver_client.stats import Stats
from quiver_client.thread_pool import ThreadPool

FILL_SECONDS_MAX: Final = 60.0  # of one shard, without anything of it arriving; then the origin is read directly
WAIT_MS: Final = 2000
PAUSE_SECONDS: Final = 0.02
PAUSE_SECONDS_MAX: Final = 0.5
RETRY_SECONDS_MAX: Final = 1.0
REQUESTS_AT_ONCE: Final = 16
READ_BYTES_MAX: Final = 256 << 20  # of one request, so that a huge batch is several


@dataclass(slots=True)
class _Round:
    """What one fetch knows: who was tried for which shard, and which shards are left to the origin."""

    batch: Batch
    tried: dict[int, set[str]] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)  # shards whose owner was known to be silent, and not asked
    waited_for: dict[int, str] = field(
        default_factory=dict
    )  # who keeps saying of a shard that it is filling it, or busy
    delivered: dict[str, float] = field(default_factory=dict)  # when a daemon delivered something last
    told: set[tuple[str, int]] = field(default_factory=set)  # who was given the manifest for which shard
    began: float = field(default_factory=time.monotonic)  # without the time that uploads took this process
    progress: dict[int, float] = field(default_factory=dict)  # when something of a shard arrived last
    retry_at: float = 0.0  # a daemon that is overloaded said not to ask before
    silent_origin: bool = False  # it did not answer this process
    moved: bool = False  # in this turn something arrived or somebody was passed over

    def pending(self) -> Positions:
        awaited = self.batch.not_received()
        if not self.given_up:
            return awaited
        given_up = np.fromiter(self.given_up, np.int64, len(self.given_up))
        return awaited[~np.isin(self.batch.plan.shards[awaited], given_up)]


class RackTier:
    """Samples from the daemons of a rack. One per process and dataset; its threads belong to the process."""

    name = "rack"

    def __init__(self, manifest: Manifest, members: Members, origin: Callable[[], SampleOrigin], stats: Stats) -> None:
        self._manifest = manifest
        self._members = members
        self._origin = origin
        self._stats = stats
        self._pool = ThreadPool(REQUESTS_AT_ONCE, "quiver-rack")
        self._suspects: set[int] = set()  # shards of which wrong bytes came
        self._refused: dict[int, tuple[int, str]] = {}  # shards that a daemon could not fill, and which
        self._failures: dict[int, QuiverError] = {}  # and those that this process could not
        self._rechecked: dict[int, str] = {}  # and who answered for them since
        self._closing = forks.event()
        process_exit.call_at_exit(self._closing.set, process_exit.Phase.LOOPS)
        self._lock = forks.lock()

    def fetch(self, batch: Batch) -> None:
        self._look_around()
        if self._refused or self._failures:
            for shard in (self._refused.keys() | self._failures.keys()) & set(np.unique(batch.plan.shards).tolist()):
                self._refused.pop(shard, None)
                self._failures.pop(shard, None)
        state = _Round(batch)
        pause = PAUSE_SECONDS
        while len(positions := state.pending()):
            begun, state.moved = time.monotonic(), False
            if late := self._late(state, positions, begun):
                self._stats.warn("fill", f"{len(late)} shards did not come in {FILL_SECONDS_MAX:.0f} s")
                state.given_up.update(late)
                continue
            jobs = self._jobs(state, positions)
            if len(jobs) == 1:
                self._ask(state, *jobs[0])
            else:
                for _ in self._pool.map(lambda job: self._ask(state, *job), jobs):
                    pass
            # A daemon waits while it fills, so rounds are slow. One that answers at once must not be asked in a frenzy.
            if not state.moved:
                pause = min(pause * 2, PAUSE_SECONDS_MAX)
                if self._closing.wait(max(begun + pause, state.retry_at) - time.monotonic()):
                    return
            else:
                pause = PAUSE_SECONDS

    def _late(self, state: _Round, positions: Positions, now: float) -> set[int]:
        """Return the shards that were waited for as long as one is. Who delivers nothing else is not asked again."""
        if now - state.began <= FILL_SECONDS_MAX:
            return set()
        shards = np.unique(state.batch.plan.shards[positions]).tolist()
        late = {shard for shard in shards if now - max(state.progress.get(shard, 0.0), state.began) > FILL_SECONDS_MAX}
        for url in {state.waited_for[shard] for shard in late if shard in state.waited_for}:
            if now - state.delivered.get(url, state.began) > FILL_SECONDS_MAX:
                self._members.mark_unresponsive(url)  # not to be waited for as long again by the next batch
        return late

    def blame(self, batch: Batch, bad: Positions) -> None:
        """Have the daemons verify these shards before they answer for them again. Who did and is wrong is left."""
        shards = np.unique(batch.plan.shards[bad]).tolist()
        with self._lock:
            liars = {self._rechecked.pop(shard, "") for shard in shards} - {""}
            self._suspects.update(shards)
        for url in liars:
            self._members.mark_unresponsive(url)

    def why(self, shard: int) -> QuiverError | None:
        """See ``Cache``. Asks the daemon: for who has time."""
        status, url = self._refused.get(shard, (0, ""))
        if shard in self._failures or not status:
            return self._failures.get(shard)
        if status == RangeStatus.NO_ROOM:
            return OverCapacity(f"{url} has no room for it", 0.0)
        try:
            disk = self._members.peer(url).status().disk
        except QuiverError as error:
            return error
        why = "the origin does not answer it, or lost samples: its log says which"
        return DiskFailed(f"{url}: {disk}") if disk != "ok" else NotFound(f"{url} could not fill it; {why}")

    def close(self) -> None:
        self._closing.set()
        self._pool.shutdown(cancel_futures=True)
        self._members.close()

    def _look_around(self) -> None:
        """Keep what is known of the rack fresh. Threads do it, since a dead daemon must not hold up a batch."""
        if self._members.is_stale:
            if self._members.knows_ring:
                self._pool.submit(self._members.refresh)
            else:
                self._members.refresh()
        for url in self._members.returning():
            self._pool.submit(self._members.probe, url)

    # -- who is asked for what ----------------------------------------------------------------------------------------

    def _jobs(self, state: _Round, positions: Positions) -> list[tuple[PeerClient, Positions]]:
        """Group positions by the best peer not yet tried for their shard, cut into requests of bounded size."""
        plan = state.batch.plan
        shards, which = plan.by_shard(positions)
        peers, urls = self._choose(state, shards)
        of_samples = peers[which]
        jobs = []
        for peer in sorted(set(peers[peers >= 0].tolist())):
            run = positions[of_samples == peer]
            jobs += [(self._members.peer(urls[peer]), part) for part in _parts(run, plan.sizes[run])]
        return jobs

    def _choose(self, state: _Round, shards: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], tuple[str, ...]]:
        """Return for each of these distinct shards the peer to ask, as a position in the URLs; -1: it is given up."""
        rows, urls = self._members.choices(shards)
        down = np.asarray([self._members.is_unresponsive(url) for url in urls], bool)
        usable = (rows >= 0) & ~down[rows]
        passed_over = ~usable[:, 0]
        for at in np.flatnonzero(np.isin(shards, list(state.tried))).tolist() if state.tried else ():
            tried = state.tried[int(shards[at])]
            usable[at] &= [urls[peer] not in tried for peer in rows[at].tolist()]
            passed_over[at] = False  # which was counted when it was
        for shard in shards[passed_over].tolist():
            if shard not in state.silent:
                state.silent.add(shard)
                self._stats.add("fallbacks")
        peers = np.where(usable.any(axis=1), np.take_along_axis(rows, usable.argmax(axis=1)[:, None], 1)[:, 0], -1)
        state.given_up.update(shards[peers < 0].tolist())
        return peers, urls

    # -- one request --------------------------------------------------------------------------------------------------

    def _ask(self, state: _Round, peer: PeerClient, positions: Positions) -> None:
        plan = state.batch.plan
        shards, numbers = plan.by_shard(positions)
        ranges = np.zeros(len(positions), RANGE)
        ranges["shard"], ranges["offset"], ranges["length"] = numbers, plan.offsets[positions], plan.sizes[positions]
        suspects = self._suspects.intersection(shards.tolist()) if self._suspects else set()
        names = tuple(self._manifest.shard_digest(shard) for shard in shards.tolist())
        request = ReadRequest(self._manifest.digest, names, ranges, WAIT_MS, RECHECK if suspects else 0)
        try:
            statuses, data = peer.read(request)
        except OverCapacity as error:  # busy, not broken: a runner-up would have to bring in what this one has
            state.retry_at = time.monotonic() + min(error.retry_after_seconds, RETRY_SECONDS_MAX)
            state.waited_for.update(dict.fromkeys(shards.tolist(), peer.url))
            self._stats.add("overloads")
            return
        except QuiverError as error:
            self._passed_over(state, peer, shards, error)
            return
        with self._lock:
            self._suspects -= suspects
            self._rechecked.update(dict.fromkeys(suspects, peer.url))
        self._members.answered(peer.url)
        self._take(state.batch, positions, statuses, data)
        present = statuses == RangeStatus.PRESENT
        if present.any():
            now, state.moved = time.monotonic(), True
            state.delivered[peer.url] = now
            state.progress.update(dict.fromkeys(shards[np.unique(numbers[present])].tolist(), now))
        absent = statuses != RangeStatus.PRESENT
        for shard, status in dict(
            zip(shards[numbers[absent]].tolist(), statuses[absent].tolist(), strict=True)
        ).items():
            self._absent(state, peer, shard, status)

    def _take(
        self, batch: Batch, positions: Positions, statuses: npt.NDArray[np.uint8], data: npt.NDArray[np.uint8]
    ) -> None:
        present = positions[statuses == RangeStatus.PRESENT]
        self._stats.add("misses_rack", len(positions) - len(present))
        sizes = batch.plan.sizes[present]
        batch.put(present, Buffer.of(data), np.cumsum(sizes) - sizes)

    def _absent(self, state: _Round, peer: PeerClient, shard: int, status: int) -> None:
        """Do what the status of a missing shard asks for. ``FILLING``: nothing, it is asked for again."""
        if status in (RangeStatus.UPLOAD, RangeStatus.FAILED):
            self._members.ask_why(peer)
        if status in (RangeStatus.NO_ROOM, RangeStatus.FAILED):
            state.given_up.add(shard)
            self._refused[shard] = status, peer.url
            state.moved = True
        elif status == RangeStatus.FILLING:
            state.waited_for[shard] = peer.url
        elif status == RangeStatus.UPLOAD:
            self._upload(state, peer, shard)
        elif status == RangeStatus.NO_MANIFEST and (peer.url, shard) not in state.told:
            state.told.add((peer.url, shard))
            try:
                self._members.put_manifest(peer, self._manifest)
            except QuiverError as error:
                self._passed_over(state, peer, np.asarray([shard]), error)
        else:
            self._passed_over(state, peer, np.asarray([shard]), Corrupt(f"status {status} for a range", peer.name))

    def _upload(self, state: _Round, peer: PeerClient, shard: int) -> None:
        """Read a shard that the daemon may not read, put it there for everybody, and take one's own part of it."""
        begun = time.monotonic()
        try:
            self._read_and_put(state, peer, shard)
        finally:
            state.began += time.monotonic() - begun  # in which the other shards could not come

    def _read_and_put(self, state: _Round, peer: PeerClient, shard: int) -> None:
        digest = self._manifest.shard_digest(shard)
        size_bytes = int(self._manifest.tables.shard_sizes[shard])
        try:
            if state.silent_origin:  # one deadline is enough: the origin tier asks for all samples at once
                raise Unavailable(self._manifest.header.base, "does not answer")
            source = OriginShards(self._manifest, self._origin())
            data, _ = first_verified([source], digest, size_bytes)
        except QuiverError as error:
            self._failures[shard] = error
            state.silent_origin |= isinstance(error, Unavailable)
            state.given_up.add(shard)  # the origin tier will meet the same and say which sample it is
            state.moved = True
            self._forgo(peer, digest)
            return
        state.batch.put_mapped(state.batch.not_received(), {shard: Buffer.of(data.data)})
        state.progress[shard], state.moved = time.monotonic(), True
        try:
            peer.put_shard(digest, data.data)
            self._stats.add("uploads")
        except QuiverError as error:
            self._stats.warn("upload", f"a shard was read but not shared: {error}")
            self._forgo(peer, digest)

    def _forgo(self, peer: PeerClient, digest: Digest) -> None:
        """Give an upload up: who waits for it need not wait it out."""
        with contextlib.suppress(QuiverError):
            peer.read(ReadRequest(self._manifest.digest, (digest,), np.zeros(0, RANGE), 0, FORGO))

    def _passed_over(self, state: _Round, peer: PeerClient, shards: npt.NDArray[np.int64], error: QuiverError) -> None:
        for shard in shards.tolist():
            state.tried.setdefault(shard, set()).add(peer.url)
        state.moved = True
        self._stats.add("fallbacks", len(shards))
        if isinstance(error, Corrupt):
            self._stats.add("corruptions")
        if isinstance(error, Unavailable) and not (isinstance(error, BrokenOff) and self._members.lives(peer.url)):
            self._members.mark_unresponsive(peer.url)
        self._stats.warn(f"peer {peer.url}", f"passing over a daemon: {error}")


def _parts(positions: Positions, sizes: Ints) -> list[Positions]:
    """Cut what is asked of one peer into requests of bounded size."""
    ends = np.cumsum(sizes)
    if len(positions) <= RANGES_MAX and ends[-1] <= READ_BYTES_MAX:
        return [positions]
    cuts = np.searchsorted(ends, np.arange(READ_BYTES_MAX, int(ends[-1]), READ_BYTES_MAX), "right")
    at_most = np.arange(RANGES_MAX, len(positions), RANGES_MAX)
    parts = np.split(positions, np.unique(np.concatenate([cuts, at_most])))
    return [part for part in parts if len(part)]
