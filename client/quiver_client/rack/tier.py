"""The rack tier: one request per daemon and batch, each answered into one buffer.

The ring says which daemon owns which shard, and is a hint: if a daemon is down, slow or wrong, the next one is asked,
and what no daemon delivers is left to the origin tier. Invariant: a wrong ring or a faulty daemon costs time and
nothing else. Every wait here is bounded, by ``FILL_SECONDS_MAX`` per shard.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from quiver import forks
from quiver.backoff import Backoff
from quiver.digest import Bytes
from quiver.errors import (
    BrokenOff,
    Corrupt,
    DiskFailed,
    Forbidden,
    Misconfigured,
    NotFound,
    OverCapacity,
    QuiverError,
    Unauthenticated,
    Unavailable,
)
from quiver.manifest import Manifest
from quiver.peer import PeerClient
from quiver.plan import Ints
from quiver.transport.attempt import Attempt
from quiver.wire import RANGES_MAX, RECHECK, FillRequest, RangeStatus, ReadRequest, RecheckRequest
from quiver_client import process_exit
from quiver_client.batch import Batch, Positions
from quiver_client.buffers import Buffer
from quiver_client.rack.hedging import Hedges
from quiver_client.rack.members import Members
from quiver_client.rack.peer_read import PeerRead
from quiver_client.rack.uploads import ShardUploads
from quiver_client.stats import Stats
from quiver_client.thread_pool import ThreadPool

FILL_SECONDS_MAX: Final = 60.0  # for one shard of which nothing arrives; then the origin is read directly
WAIT_MS: Final = 2000  # that a daemon waits for a fill before it answers that it is still filling
PAUSE_SECONDS: Final = 0.04  # between two rounds in which nothing arrived
PAUSE_SECONDS_MAX: Final = 0.5
RETRY_SECONDS_MAX: Final = 1.0
REQUESTS_AT_ONCE: Final = 16
READ_BYTES_MAX: Final = 256 << 20  # per request; a huge batch is split


@dataclass(slots=True)
class _Fetch:
    """The state of one ``fetch``. Its threads write to it without a lock: each statement is one step of the GIL."""

    batch: Batch
    tried: dict[int, set[str]] = field(default_factory=dict)  # shard -> daemons that were passed over for it
    refused: dict[int, QuiverError] = field(default_factory=dict)  # shard -> what a daemon has against this process
    left_to_origin: set[int] = field(default_factory=set)  # shards
    fallbacks: set[int] = field(default_factory=set)  # shards whose owner was unresponsive, and was not asked
    waiting_on: dict[int, str] = field(default_factory=dict)  # shard -> the daemon that fills it, or is busy
    delivered_at: dict[str, float] = field(default_factory=dict)  # by daemon, when it last delivered something
    manifest_put: set[tuple[str, int]] = field(default_factory=set)  # daemon, and shard that it lacked it for
    began: float = field(default_factory=time.monotonic)  # later by the time that this process spent on uploads
    progress_at: dict[int, float] = field(default_factory=dict)  # by shard, when some of it last arrived
    retry_at: float = 0.0  # a daemon without capacity said not to retry before
    origin_silent: bool = False  # it did not answer this process
    moved: bool = False  # in this round something arrived, or a daemon was passed over

    def pending(self) -> Positions:
        """Return the positions that daemons may still deliver."""
        pending = self.batch.not_received()
        if not self.left_to_origin:
            return pending
        left = np.fromiter(self.left_to_origin, np.int64, len(self.left_to_origin))
        return pending[~np.isin(self.batch.plan.shards[pending], left)]

    def received(self, peer: PeerClient, shards: Ints) -> None:
        """Record that some samples of these shards arrived from a daemon."""
        now, self.moved = time.monotonic(), True
        self.delivered_at[peer.url] = now
        self.progress_at.update(dict.fromkeys(shards.tolist(), now))

    def leave_to_origin(self, shard: int) -> None:
        self.left_to_origin.add(shard)
        self.moved = True


class RackTier:
    """Samples from the daemons of a rack. One per process and dataset; its threads belong to the process."""

    name = "rack"

    def __init__(
        self, manifest: Manifest, members: Members, uploads: ShardUploads, hedges: Hedges, stats: Stats
    ) -> None:
        self._manifest = manifest
        self._members = members
        self._uploads = uploads
        self._hedges = hedges
        self._stats = stats
        self._pool = ThreadPool(REQUESTS_AT_ONCE, "quiver-rack")
        self._suspects: set[int] = set()  # shards with wrong bytes, for the next daemon that answers to verify
        self._rechecked: dict[int, str] = {}  # shard -> the daemon that verified it and answered since
        self._refused: dict[int, tuple[int, str]] = {}  # shard -> status and URL of the daemon that did not fill it
        self._failures: dict[int, QuiverError] = {}  # shard -> why this process could not upload it, or was refused it
        self._fill_refusal: QuiverError | None = None  # why this process may not have shards filled
        self._closing = forks.event()
        process_exit.call_at_exit(self._closing.set, process_exit.Phase.LOOPS)
        self._lock = forks.lock()

    def fetch(self, batch: Batch) -> None:
        self._refresh_members()
        if self._refused or self._failures:
            for shard in (self._refused.keys() | self._failures.keys()) & set(batch.plan.shards.tolist()):
                self._refused.pop(shard, None)
                self._failures.pop(shard, None)
        state = _Fetch(batch)
        backoff = Backoff(PAUSE_SECONDS, PAUSE_SECONDS_MAX)
        while len(positions := state.pending()):
            begun, state.moved = time.monotonic(), False
            if late := self._late(state, positions, begun):
                self._stats.warn("fill", f"{len(late)} shards were not filled in {FILL_SECONDS_MAX:.0f} s")
                state.left_to_origin.update(late)
                continue
            self._ask_all(state, self._parts(state, positions))
            if state.moved:
                backoff.succeed()
                continue
            # A daemon waits while it fills, so rounds are slow. The pause avoids a busy loop if it answers at once.
            if self._closing.wait(max(begun + backoff.fail(), state.retry_at) - time.monotonic()):
                return

    def blame(self, batch: Batch, bad: Positions) -> None:
        """Have the daemons verify these shards before they answer again; avoid one that did and was wrong again."""
        shards = np.unique(batch.plan.shards[bad]).tolist()
        with self._lock:
            wrong_again = {self._rechecked.pop(shard, "") for shard in shards} - {""}
            self._suspects.update(shards)
        for url in wrong_again:
            self._members.mark_unresponsive(url)

    def why(self, shard: int) -> QuiverError | None:
        """See ``Cache``. Sends a request to the daemon: do not call it on the batch path."""
        status, url = self._refused.get(shard, (0, ""))
        if shard in self._failures or not status:
            return self._failures.get(shard)
        if status == RangeStatus.NO_ROOM:
            if self._fill_refusal is not None:  # a reader that may not fill is answered as if there were no room
                return self._fill_refusal
            return OverCapacity(f"{url} has no room for it", 0.0)
        try:
            disk = self._members.peer(url).status().disk
        except (Unauthenticated, Forbidden):  # the status is for operators
            disk = "ok"
        except QuiverError as error:
            return error
        why = "the origin does not answer it, or lost samples: its log says which"
        return DiskFailed(f"{url}: {disk}") if disk != "ok" else NotFound(f"{url} could not fill it; {why}")

    def close(self) -> None:
        self._closing.set()
        self._hedges.close()
        self._pool.shutdown(cancel_futures=True)
        self._members.close()

    def _refresh_members(self) -> None:
        """Refresh the ring and probe avoided daemons, in threads: a dead daemon must not hold up a batch."""
        if self._members.is_stale:
            if self._members.knows_ring:
                self._pool.submit(self._members.refresh)
            else:
                self._members.refresh()
        for url in self._members.begin_probes():
            self._pool.submit(self._members.probe, url)

    def _late(self, state: _Fetch, positions: Positions, now: float) -> set[int]:
        """Return the shards whose wait has timed out; avoid the daemons that delivered nothing meanwhile."""
        if now - state.began <= FILL_SECONDS_MAX:
            return set()
        shards = np.unique(state.batch.plan.shards[positions]).tolist()
        late = {shard for shard in shards if now - max(state.progress_at.get(shard, 0), state.began) > FILL_SECONDS_MAX}
        for url in {state.waiting_on[shard] for shard in late if shard in state.waiting_on}:
            if now - state.delivered_at.get(url, state.began) > FILL_SECONDS_MAX:
                self._members.mark_unresponsive(url)  # so that the next batch does not wait as long for it
        return late

    # -- choosing daemons ---------------------------------------------------------------------------------------------

    def _parts(self, state: _Fetch, positions: Positions) -> list[PeerRead]:
        """Group positions by the best daemon not yet tried for their shard, split into requests of bounded size."""
        plan = state.batch.plan
        shards, which = plan.by_shard(positions)
        peers, urls = self._choose(state, shards)
        peer_of = peers[which]
        numbers = np.empty(len(shards), np.int64)  # of each shard among its daemon's
        parts = []
        for at in sorted(set(peers[peers >= 0].tolist())):
            owned = np.flatnonzero(peers == at)
            numbers[owned] = np.arange(len(owned))
            run = np.flatnonzero(peer_of == at)
            peer, its_shards = self._members.peer(urls[at]), shards[owned]
            part = PeerRead.of(state.batch, peer, positions[run], its_shards, numbers[which[run]])
            parts += part.pieces(shards, which[run], _cut(np.arange(len(run)), part.sizes))
        return parts

    def _choose(self, state: _Fetch, shards: Ints) -> tuple[npt.NDArray[np.int32], tuple[str, ...]]:
        """Return for each of these distinct shards the daemon to ask, as a position in the URLs; -1: the origin."""
        rows, urls = self._members.choices(shards)
        # While the origin does not answer either, all daemons are asked: a slow one is better than none.
        down = np.asarray([not state.batch.is_retry and self._members.is_avoided(url) for url in urls], bool)
        if not (state.tried or down.any() or (rows[:, 0] < 0).any()):
            return rows[:, 0], urls
        usable = (rows >= 0) & ~down[rows]
        passed_over = ~usable[:, 0]
        for at in np.flatnonzero(np.isin(shards, list(state.tried))).tolist() if state.tried else ():
            tried = state.tried[int(shards[at])]
            usable[at] &= [urls[peer] not in tried for peer in rows[at].tolist()]
            passed_over[at] = False  # it was counted when that daemon failed
        for shard in shards[passed_over].tolist():
            if shard not in state.fallbacks:
                state.fallbacks.add(shard)
                self._stats.add("fallbacks")
        peers = np.where(usable.any(axis=1), np.take_along_axis(rows, usable.argmax(axis=1)[:, None], 1)[:, 0], -1)
        lost = shards[peers < 0].tolist()
        state.left_to_origin.update(lost)
        self._failures.update((shard, state.refused[shard]) for shard in lost if shard in state.refused)
        return peers, urls

    def _others(self, state: _Fetch, late: PeerClient, shards: Ints) -> list[list[str]]:
        """Return for each shard the daemons to ask in place of one that is late, best first."""
        rows, urls = self._members.choices(shards)
        usable = [url != late.url and not self._members.is_avoided(url) for url in urls]
        tried = [state.tried.get(shard, set()) for shard in shards.tolist()]
        return [
            [urls[at] for at in row if at >= 0 and usable[at] and urls[at] not in seen]
            for row, seen in zip(rows.tolist(), tried, strict=True)
        ]

    # -- requests -----------------------------------------------------------------------------------------------------

    def _ask_all(self, state: _Fetch, parts: list[PeerRead]) -> None:
        """Send all requests at once, the last by this thread."""
        if not parts:
            return
        others = [self._pool.submit(self._ask, state, part) for part in parts[:-1]]
        self._ask(state, parts[-1])
        for other in others:
            other.result()

    def _ask(self, state: _Fetch, part: PeerRead) -> None:
        peer, shards = part.peer, part.shards
        displaced = not (state.fallbacks | state.tried.keys()).isdisjoint(shards.tolist())
        race = self._hedges.race(state.batch, part, partial(self._others, state, peer), displaced=displaced)
        suspects = self._suspects.intersection(shards.tolist()) if self._suspects else set()
        try:
            flags = self._recheck(peer, suspects) if suspects else 0
            statuses, data = self._request(part, flags, race.attempt)
        except QuiverError as error:
            if race.end():
                self._failed(state, part, error)
            return
        if not race.end():  # the hedge delivered the samples
            return
        if suspects:
            with self._lock:
                self._suspects -= suspects
                self._rechecked.update(dict.fromkeys(suspects, peer.url))
        self._members.answered(peer.url)
        absent = np.flatnonzero(statuses != RangeStatus.PRESENT)
        if not len(absent):
            part.put(state.batch, data)
            state.received(peer, shards)
            self._members.health.answered(peer.url, shards, race.seconds, len(data))
            return
        self._stats.add("misses_rack", len(absent))
        present = statuses == RangeStatus.PRESENT
        if present.any():
            part.put(state.batch, data, present)
            state.received(peer, shards[np.unique(part.which[present])])
        missing = shards[part.which[absent]].tolist()
        for shard, status in dict(zip(missing, statuses[absent].tolist(), strict=True)).items():
            self._absent(state, peer, shard, status)

    def _recheck(self, peer: PeerClient, shards: set[int]) -> int:
        """Have a daemon verify shards; return the flag of a read that says the same to one without the verb."""
        try:
            peer.recheck(RecheckRequest(tuple(self._manifest.shard_digest(shard) for shard in shards)))
        except NotFound:
            return RECHECK
        return 0

    def _failed(self, state: _Fetch, part: PeerRead, error: QuiverError) -> None:
        """Act on a request that failed."""
        if not isinstance(error, OverCapacity):
            self._pass_over(state, part.peer, part.shards, error)
            return
        # The daemon is overloaded, not broken: a runner-up would have to fill what this one holds.
        state.retry_at = time.monotonic() + min(error.retry_after_seconds, RETRY_SECONDS_MAX)
        state.waiting_on.update(dict.fromkeys(part.shards.tolist(), part.peer.url))
        self._stats.add("overloads")

    def _request(
        self, part: PeerRead, flags: int, attempt: Attempt
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Return a ``RangeStatus`` per position, and the bytes of those present, back to back."""
        names = self._members.digests(part.shards)
        ranges = part.ranges()
        if not ranges["length"].any():  # shards are to be filled, and nothing of them is wanted
            # Without the verb, or with a token that may only read: a read of nothing fills what it may.
            with contextlib.suppress(NotFound):
                try:
                    statuses = part.peer.fill(FillRequest(self._manifest.digest, names, WAIT_MS))
                except Forbidden as error:
                    self._fill_refusal = error
                else:
                    self._fill_refusal = None
                    return statuses[part.which], np.empty(0, np.uint8)
        return part.peer.read(ReadRequest(self._manifest.digest, names, ranges, WAIT_MS, flags), attempt)

    def _absent(self, state: _Fetch, peer: PeerClient, shard: int, status: int) -> None:
        """Act on the status of a shard that is absent. ``FILLING`` needs no action: the next round requests it."""
        self._members.health.absent(peer.url, shard)
        if status in (RangeStatus.UPLOAD, RangeStatus.FAILED):
            self._members.warn_of_faults(peer)
        if status in (RangeStatus.NO_ROOM, RangeStatus.FAILED):
            self._refused[shard] = status, peer.url
            state.leave_to_origin(shard)
        elif status == RangeStatus.FILLING:
            state.waiting_on[shard] = peer.url
        elif status == RangeStatus.UPLOAD:
            self._upload(state, peer, shard)
        elif status == RangeStatus.NO_MANIFEST and (peer.url, shard) not in state.manifest_put:
            state.manifest_put.add((peer.url, shard))
            try:
                self._members.put_manifest(peer, self._manifest)
            except QuiverError as error:
                self._pass_over(state, peer, np.asarray([shard]), error)
        else:
            self._pass_over(state, peer, np.asarray([shard]), Corrupt(f"status {status} for a range", peer.name))

    def _upload(self, state: _Fetch, peer: PeerClient, shard: int) -> None:
        """Upload a shard that the daemon may not read itself, and take this batch's samples from it."""

        def received(data: Bytes) -> None:
            state.batch.put_mapped(state.batch.not_received(), {shard: Buffer.of(data)})
            state.progress_at[shard], state.moved = time.monotonic(), True

        begun = time.monotonic()
        try:
            if state.origin_silent:  # one deadline is enough: the origin tier reads all samples at once
                self._uploads.forgo(peer, shard)
                raise Unavailable(self._manifest.header.base, "does not answer")
            self._uploads.upload(peer, shard, received)
        except QuiverError as error:
            self._failures[shard] = error
            state.origin_silent |= isinstance(error, Unavailable)
            state.leave_to_origin(shard)  # the origin tier will fail likewise, and name the sample
        finally:
            state.began += time.monotonic() - begun  # in which no other shard could arrive

    def _pass_over(self, state: _Fetch, peer: PeerClient, shards: Ints, error: QuiverError) -> None:
        """Ask the next daemon for these shards."""
        for shard in shards.tolist():
            state.tried.setdefault(shard, set()).add(peer.url)
        state.moved = True
        self._stats.add("fallbacks", len(shards))
        if isinstance(error, Corrupt):
            self._stats.add("corruptions")
        refused = isinstance(error, (Unauthenticated, Forbidden, Misconfigured))  # until the token is replaced
        if refused:
            state.refused.update(dict.fromkeys(shards.tolist(), error))
        silent = isinstance(error, Unavailable) and not (isinstance(error, BrokenOff) and self._members.lives(peer.url))
        if refused or silent:
            self._members.mark_unresponsive(peer.url)
        self._stats.warn(f"peer {peer.url}", f"passing over a daemon: {error}")


def _cut(positions: Positions, sizes: Ints) -> list[Positions]:
    """Split what one daemon is asked for into requests of bounded size."""
    ends = np.cumsum(sizes)
    if len(positions) <= RANGES_MAX and ends[-1] <= READ_BYTES_MAX:
        return [positions]
    cuts = np.searchsorted(ends, np.arange(READ_BYTES_MAX, int(ends[-1]), READ_BYTES_MAX), "right")
    at_most = np.arange(RANGES_MAX, len(positions), RANGES_MAX)
    parts = np.split(positions, np.unique(np.concatenate([cuts, at_most])))
    return [part for part in parts if len(part)]
