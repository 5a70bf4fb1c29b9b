"""Hedged reads: a request that is late is sent once more, to others, and the first verified answer wins.

A daemon may be alive and useless: stopped, stuck, dripping, or many times slower than the others. Its requests are late
(``quiver.health`` says when), and then, in a thread of a small pool,

1. the runners-up are asked for what they have, without having it filled;
2. the daemon is asked, by a request of its own, whether it has the shards: one that is filling them is no failure. Only
   if it has them and still does not deliver, or does not answer this either, the rest is read from the origin.

A daemon that fills shards in place of one that is avoided is not asked: the first batches after a failure would wait
for these fills, so the origin is read as well.

Samples that a hedge delivers are verified before it wins; the connection of the loser is closed. Invariants: one hedge
per request, ``HEDGES_AT_ONCE`` per process, and what they transfer in vain is at most what the budget allows. Bytes of
the origin all count, since no fault may multiply origin reads. A request that is not late costs no thread and no lock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from quiver import forks
from quiver.errors import QuiverError, Unavailable
from quiver.peer import PeerClient
from quiver.plan import Ints
from quiver.transport.attempt import Attempt
from quiver.transport.liveness import IN_RACK
from quiver.wire import RangeStatus, ReadRequest
from quiver_client.batch import Batch, Positions, Verify
from quiver_client.rack.members import Members
from quiver_client.rack.peer_read import PeerRead
from quiver_client.stats import Stats
from quiver_client.thread_pool import ThreadPool

HEDGES_AT_ONCE: Final = 4
RUNNERS_UP_MAX: Final = 4  # daemons that one hedge asks, one after the other
RUNNER_UP_SECONDS: Final = 0.25  # for each to begin its answer: it has the bytes, or says at once that it has not
ASK_SECONDS: Final = IN_RACK.alive_seconds  # for the late daemon to say whether it has the shards
ORIGIN_SECONDS: Final = 0.6  # that a daemon which says that it has the shards is waited for: it may be overloaded
FILLED_SECONDS: Final = 0.2  # of it after it said so, if it may have filled them just now: its answer is on the way

Origin = Callable[[Batch], None]
"""Reads the samples of a batch that are not verified yet from the origin."""


class Hedges:
    """The hedges of one process for one dataset. Safe from threads."""

    def __init__(self, members: Members, origin: Origin | None, verify: Verify, stats: Stats) -> None:
        """``origin``: ``None`` if it is never to be read for a hedge."""
        self._members = members
        self._origin = origin
        self._verify = verify
        self._stats = stats
        self.deadlines = members.health.deadlines
        self._pool = ThreadPool(HEDGES_AT_ONCE, "quiver-hedge")
        self._running = 0
        self._lock = forks.lock()

    def race(
        self, batch: Batch, late: PeerRead, may_ask: Callable[[Ints], list[list[str]]], *, displaced: bool
    ) -> Race:
        """Begin a request. ``may_ask`` returns for each of its shards the other daemons to ask, best first.

        ``displaced``: another daemon should have been asked for some of the shards, and was passed over.
        """
        return Race(self, batch, late, may_ask, displaced)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- called by races ----------------------------------------------------------------------------------------------

    def begin(self, race: Race) -> bool:
        """Begin a hedge in a thread, if there is one and the budget allows it; return whether it did."""
        with self._lock:
            if self._running >= HEDGES_AT_ONCE or not self._members.health.take(race.size_bytes):
                return False
            self._running += 1
        try:
            self._pool.submit(self._run, race)
        except RuntimeError:  # the pool is closed
            self._ended(race.size_bytes)
            return False
        self._stats.add("hedges")
        return True

    def _run(self, race: Race) -> None:
        wasted_bytes = 0
        try:
            wasted_bytes = self._hedge(race)
        finally:
            self._stats.add("bytes_hedged", wasted_bytes)
            self._ended(race.size_bytes - wasted_bytes)

    def _ended(self, unused_bytes: int) -> None:
        with self._lock:
            self._running -= 1
        self._members.health.refund(unused_bytes)

    def _hedge(self, race: Race) -> int:
        """Deliver the samples of a late request; return how many bytes of the budget were transferred in vain.

        At most ``race.size_bytes``: what the origin adds is taken from the budget apart.
        """
        scratch = Batch(race.batch.plan.take(race.late.positions), self._verify)
        received_bytes = min(self._ask_runners_up(race, scratch), race.size_bytes)
        missing = scratch.not_verified()
        if not scratch.verified.all() and self._may_read_origin(race):
            self._read_origin(scratch)
        if not scratch.verified.all() or not race.won_by(scratch, partial(self._count_origin, scratch, missing)):
            return received_bytes
        # One that has sent nothing may be filling, which is no failure, or gone, which is found out now.
        if race.attempt.received_bytes or self._holds(race.late):
            self._members.health.overtaken(race.late.peer.url)
        return min(race.attempt.received_bytes, race.size_bytes)

    def _ask_runners_up(self, race: Race, scratch: Batch) -> int:
        """Read from other daemons what they have; return how many bytes arrived."""
        received_bytes = 0
        late = race.late
        ranked = race.may_ask(late.shards)
        for url in _by_count(ranked)[:RUNNERS_UP_MAX]:
            has = np.asarray([url in urls for urls in ranked])
            wanted = scratch.not_verified()
            wanted = wanted[has[late.which[wanted]]]
            if race.is_ended or not len(wanted):
                continue
            usual_seconds = self.deadlines(url, late.shards, race.size_bytes).late
            attempt = Attempt(limit_seconds=RUNNER_UP_SECONDS + usual_seconds)
            race.hedged_by(attempt)
            with contextlib.suppress(QuiverError):  # the batch's own reads find out what is wrong with it
                self._read(self._members.peer(url), late, scratch, wanted, attempt)
            received_bytes += attempt.received_bytes
        return received_bytes

    def _read(self, peer: PeerClient, late: PeerRead, scratch: Batch, wanted: Positions, attempt: Attempt) -> None:
        named, of_named = np.unique(late.which[wanted], return_inverse=True)
        part = PeerRead.of(scratch, peer, wanted, late.shards[named], of_named)
        names = self._members.digests(part.shards)
        statuses, data = peer.read(
            ReadRequest(None, names, part.ranges()), attempt
        )  # without a manifest: fills nothing
        present = statuses == RangeStatus.PRESENT
        if present.any():
            part.put(scratch, data, present)
            scratch.check()

    def _may_read_origin(self, race: Race) -> bool:
        """Whether the daemon is still late, and not because it waits for a fill."""
        late = race.late
        filling = race.displaced and not self._members.health.delivered_all(late.peer.url, late.shards)
        if race.is_ended or not (filling or self._holds(late)):
            return False
        seconds = ORIGIN_SECONDS - race.seconds
        if not self._members.health.delivered_all(late.peer.url, late.shards):
            seconds = max(seconds, FILLED_SECONDS)
        return self._members.is_unresponsive(late.peer.url) or not race.ends_within(seconds)

    def _holds(self, late: PeerRead) -> bool:
        """Ask a daemon that is late whether it has the shards.

        If it does not answer, it is avoided, and ``True`` only if it delivered them before: on a machine that is
        overloaded it may be filling them, and every reader of a cold dataset would read the origin.
        """
        try:
            statuses = late.peer.resident(self._members.digests(late.shards), Attempt(limit_seconds=ASK_SECONDS))
        except Unavailable:
            self._members.mark_unresponsive(late.peer.url)
            return self._members.health.delivered_all(late.peer.url, late.shards)
        except QuiverError:
            return False  # it is alive and does not say
        return not statuses.any()

    def _count_origin(self, scratch: Batch, positions: Positions) -> None:
        """Count samples of the batch as the origin's: the session counts what arrives meanwhile as the rack's."""
        count, size_bytes = len(positions), scratch.bytes_at(positions)
        for name, amount in (("samples_rack", -count), ("bytes_rack", -size_bytes), ("samples_origin", count)):
            self._stats.add(name, amount)

    def _read_origin(self, scratch: Batch) -> None:
        """Read what is missing from the origin. All of it counts as hedged: it is never given back."""
        missing = scratch.not_verified()
        size_bytes = scratch.bytes_at(missing)
        if self._origin is None or not self._members.health.take(size_bytes):
            return
        self._stats.add("bytes_hedged", size_bytes)
        try:
            self._origin(scratch)
        except QuiverError:
            return  # if the origin is needed in the end, the origin tier will say what is wrong with it
        scratch.check()


class Race:
    """One request and its hedge: whichever delivers first ends the race, and the other's connection is closed."""

    def __init__(
        self, hedges: Hedges, batch: Batch, late: PeerRead, may_ask: Callable[[Ints], list[list[str]]], displaced: bool
    ) -> None:
        self.batch, self.late, self.may_ask, self.displaced = batch, late, may_ask, displaced
        self.size_bytes = batch.bytes_at(late.positions)
        self.is_ended = False
        self._hedges = hedges
        self._hedge: Attempt | None = None
        self._over: threading.Event | None = None
        self._lock = threading.Lock()
        self._begun_at = time.monotonic()
        may = hedges.deadlines(late.peer.url, late.shards, self.size_bytes, displaced=displaced)
        on_late = partial(hedges.begin, self)
        self.attempt = Attempt(self.size_bytes, late_seconds=may.late, on_late=on_late, limit_seconds=may.limit)

    @property
    def seconds(self) -> float:
        """How long the request has taken."""
        return time.monotonic() - self._begun_at

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end of the race; return whether it came in time."""
        with self._lock:
            if self.is_ended:
                return True
            self._over = over = threading.Event()
        return over.wait(max(seconds, 0.0))

    def end(self) -> bool:
        """End the race, for the request itself; ``False`` if the hedge delivered the samples before."""
        with self._lock:
            if self.is_ended:
                return False
            self.is_ended = True
        if self._over is not None:
            self._over.set()
        if self._hedge is not None:
            self._hedge.cancel()
        return True

    def won_by(self, scratch: Batch, count: Callable[[], None]) -> bool:
        """End the race for the hedge, whose samples these are; ``False`` if the request was answered before.

        ``count`` is called if it won, before the batch is handed out.
        """
        with self._lock:
            if self.is_ended:
                return False
            self.is_ended = True
            self.batch.adopt(self.late.positions, scratch)
            count()
        self.attempt.cancel()
        return True

    def hedged_by(self, attempt: Attempt) -> None:
        """Name the hedge's present attempt, which the end of the race cancels."""
        with self._lock:
            self._hedge = attempt
            if not self.is_ended:
                return
        attempt.cancel()


def _by_count(ranked: list[list[str]]) -> list[str]:
    """Return the first choices for shards, the one that is it most often first, then the second choices."""
    order: dict[str, tuple[int, int]] = {}
    for urls in ranked:
        for rank, url in enumerate(urls):
            best, count = order.get(url, (rank, 0))
            order[url] = min(best, rank), count - 1
    return sorted(order, key=lambda url: order[url])
