"""What a consumer of this process needs: reported to the processes that share the folder, and fetched ahead.

One thread reports, a few times per second. Each report is written to a lease file for the other processes; then what
was decided is fetched. When a fetch ends, the next one is decided at once, without waiting for the next report. A
consumer that reads in a fixed order, and reports no more of it than its next shards, is the exception: its next fetch
is decided at the next report. It never waits for a fetch, and late in an epoch it needs few samples of each shard:
fetching whole shards as fast as possible would take time from the reader itself.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from quiver import forks
from quiver.backoff import Backoff
from quiver.manifest import Manifest
from quiver.residency import ConsumerReport, Decision
from quiver.residency.messages import NeedsReport
from quiver_client.embedded.filling import FILLS_MAX, Outcome
from quiver_client.embedded.lease_files import LeaseFile, leases_in
from quiver_client.embedded.tier import EmbeddedTier

FETCHES_MAX: Final = FILLS_MAX - 1  # at once; one fewer than the limit, so that a reader's miss starts without waiting
LISTEN_SECONDS: Final = 0.1
NO_ROOM_SECONDS: Final = 0.25
PAUSE_SECONDS: Final = (0.25, 8.0)  # after a failure, before anything is fetched: first, and at most
USES_MAX: Final = 1 << 16  # entries of a list of uses that is written for other processes
REPORT_SECONDS_MAX: Final = 2.0  # longer pauses between two reports count as this long


class FolderNeeds:
    """``NeedsChannel`` with the other processes that share a folder. ``report`` and ``close`` belong to one thread."""

    def __init__(self, manifest: Manifest, tier: EmbeddedTier) -> None:
        self._manifest = manifest
        self._tier = tier
        self._lease: LeaseFile | None = None
        self._pid = os.getpid()
        self._reported = time.monotonic()
        # The lock guards all that follows: fetches end in threads of their own.
        self._lock = forks.lock()
        self._consumer: bytes | None = None  # the consumer to fetch for
        self._is_ordered = False  # whether it reads in a fixed order of which little is known
        self._fetching: dict[Decision, Future[Outcome]] = {}
        self._pause = Backoff(*PAUSE_SECONDS)
        # This process fetches what it needs, unless it may not write to the folder: then no process fetches it.
        self.probe_wanted = False  # no operator asks through a folder
        self.orphaned: npt.NDArray[np.bool_] | None = None
        if not tier.store.writable:
            self.orphaned = np.ones(manifest.shard_count, bool)

    def report(self, report: ConsumerReport, *, leaving: bool = False) -> npt.NDArray[np.uint8]:
        """Report to other processes what this consumer needs, and begin to fetch what is decided."""
        now = time.monotonic()
        self._tier.origin.reported(min(now - self._reported, REPORT_SECONDS_MAX))
        self._reported = now
        self._tell(report, leaving)
        self._look()
        self._tier.needs.listen(LISTEN_SECONDS)
        seen = self._tier.needs.report(report)
        with self._lock:
            self._consumer = None if leaving else report.consumer
            self._is_ordered = report.ordered and not report.order
        if leaving:
            self._tier.needs.leave(report.consumer)
        else:
            self._fetch()
        return seen

    def close(self) -> None:
        """Withdraw the needs. A fetch that has begun continues."""
        if self._pid != os.getpid():  # a forked child: the lease is its parent's
            return
        with self._lock:
            self._consumer = None
            fetching = list(self._fetching.values())
        for future in fetching:
            future.cancel()
        self._drop_lease()

    # -- reporting ----------------------------------------------------------------------------------------------------

    def _tell(self, report: ConsumerReport, leaving: bool) -> None:
        if leaving or (self._lease is not None and self._lease.consumer != report.consumer):
            self._drop_lease()
        if leaving or not self._tier.store.writable:
            return
        if self._lease is None:
            self._lease = LeaseFile(leases_in(self._tier.store.root), report.consumer)
        told = NeedsReport(self._manifest.digest, report)
        if report.uses is not None and len(report.uses) > USES_MAX:
            told = told.without_uses()
        try:
            self._lease.write(self._manifest.path.absolute(), told)
        except OSError as error:
            self._warn(error)

    def _drop_lease(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            try:
                lease.remove()
            except OSError as error:
                self._warn(error)
            self._tier.needs.leave(lease.consumer)

    def _warn(self, error: OSError) -> None:
        folder = leases_in(self._tier.store.root)
        why = error.strerror or error
        self._tier.stats.warn(
            "needs", f"cannot write to {folder}: {why}; until this is fixed, the cache is shared less well"
        )

    # -- fetching -----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        try:
            self._tier.decider.look()
        except OSError as error:
            self._warn(error)

    def _fetch(self) -> None:
        """Begin what is decided now, up to the limit."""
        tier, failures = self._tier, self._tier.filler.failures
        if not tier.store.writable or failures.is_waiting_for_all(for_room=False):
            return
        begun: list[tuple[Decision, Future[Outcome]]] = []
        with self._lock:
            # After an origin has failed, fetch one shard at a time until it answers.
            fetches_max = (1 if failures.is_origin_failing else FETCHES_MAX) - len(self._fetching)
            if self._consumer is None or fetches_max <= 0 or self._pause.is_waiting:
                return
            decisions = tier.decider.fetches(
                self._consumer,
                fetches_max,
                tier.origin.estimate,
                avoid=failures.waiting(),
                elsewhere=tier.filler.locks.under_way(),
            )
            for decision in decisions:
                self._fetching[decision] = future = tier.filler.fetch_ahead(decision)
                begun.append((decision, future))
        for decision, future in begun:  # without the lock: a future that has ended calls at once
            future.add_done_callback(partial(self._ended, decision))

    def _ended(self, decision: Decision, future: Future[Outcome]) -> None:
        """Begin what is decided after a fetch has ended. Called in the thread of that fetch."""
        with self._lock:
            self._fetching.pop(decision, None)
        try:
            outcome = future.result()
        except CancelledError:
            outcome = Outcome.FAILED
            self._tier.decider.end(decision, arrived=False)
        with self._lock:
            if outcome is Outcome.ARRIVED:
                self._pause.succeed()
            elif outcome is Outcome.NO_ROOM:
                self._pause.pause(NO_ROOM_SECONDS)
            elif outcome is Outcome.FAILED:
                self._pause.fail()
        if outcome is Outcome.ARRIVED and not self._is_ordered:
            self._look()
            self._fetch()
