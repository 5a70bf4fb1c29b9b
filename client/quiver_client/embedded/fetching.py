"""The needs of a consumer, told to the processes that share its embedded cache; and shards fetched for it ahead.

There is no daemon that decides for all. Each process tells its own needs by a lease file (``leases``), hears those of
the others (``board``), and fetches for its own hunger alone, as the needs of all say: what most need first, at the cost
of what nobody needs. Two that want the same shard are kept apart by the lock of the fill.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from quiver.digest import Digest
from quiver.manifest import Manifest
from quiver.need import Report
from quiver.reporting import NeedsReport
from quiver.residency import IDLE_SECONDS, StoredFile
from quiver.store import Kind, Store
from quiver.store.inventory import file_of, scan
from quiver_client.embedded.lease_files import LeaseFile, leases_in
from quiver_client.embedded.tier import FILLS_AT_ONCE, Brought, EmbeddedTier

BRINGING_MAX: Final = FILLS_AT_ONCE - 1  # a read that misses never waits for all of them
LISTEN_SECONDS: Final = 0.1
LOOK_SECONDS: Final = 0.2
LOOK_SHARE: Final = 0.05  # of one core, for looking at a folder that is large
NO_ROOM_SECONDS: Final = 0.25
RETRY_SECONDS: Final = 5.0  # of a shard that failed; twice as much each time
RETRY_SECONDS_MAX: Final = 60.0
PAUSE_SECONDS: Final = 0.25  # after a failure, before anything is tried; twice as much each time in a row
PAUSE_SECONDS_MAX: Final = 8.0
AWAY_SECONDS_MAX: Final = 4.0  # between two looks whether the origin answers again, which cost one request
INTERVAL_SECONDS_MAX: Final = 2.0


@dataclass(frozen=True, slots=True)
class _Bringing:
    """A shard on its way, and what was given up for it."""

    future: Future[Brought]
    victim: Digest | None


class FolderNeeds:
    """``NeedsChannel`` with the other processes that share a folder. Used by one thread."""

    def __init__(self, manifest: Manifest, tier: EmbeddedTier) -> None:
        self._manifest = manifest
        self._tier = tier
        self._board = tier.board
        self._room = _Room(tier.store)
        self._lease: LeaseFile | None = None
        self._pid = os.getpid()
        self._bringing: dict[Digest, _Bringing] = {}
        self._failed: dict[Digest, tuple[int, float]] = {}  # how many times, and when to try again
        self._failures = 0  # in a row
        self._paused_until = 0.0
        self._reported = time.monotonic()
        self._interval = 0.5
        # This process brings in what it needs, unless it may not write to the folder: then nobody does it for it.
        self.orphaned: npt.NDArray[np.bool_] | None = None
        if not tier.store.writable:
            self.orphaned = np.ones(manifest.shard_count, bool)

    def report(self, report: Report, *, leaving: bool = False) -> npt.NDArray[np.uint8]:
        """Tell the others what this consumer needs, and begin what it needs to have brought in."""
        now = time.monotonic()
        self._interval += (min(now - self._reported, INTERVAL_SECONDS_MAX) - self._interval) / 4
        self._reported = now
        self._collect(now)
        self._tell(report, leaving)
        self._look(now)
        self._board.listen(LISTEN_SECONDS)
        seen = self._board.tell(report)
        if leaving:
            self._board.leave(report.consumer)
        else:
            self._fetch(report.consumer, now)
        return seen

    def close(self) -> None:
        """Take the needs back. What is on its way arrives all the same."""
        if self._pid != os.getpid():  # a child that was forked: the lease is its parent's
            return
        for it in self._bringing.values():
            it.future.cancel()
        self._forget_lease()

    # -- telling ------------------------------------------------------------------------------------------------------

    def _tell(self, report: Report, leaving: bool) -> None:
        if leaving or (self._lease is not None and self._lease.consumer != report.consumer):
            self._forget_lease()
        if leaving or not self._tier.store.writable:
            return
        if self._lease is None:
            self._lease = LeaseFile(leases_in(self._tier.store.root), report.consumer)
        try:
            self._lease.write(self._manifest.path.absolute(), NeedsReport(self._manifest.digest, report))
        except OSError as error:
            self._warn(error)

    def _forget_lease(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            try:
                lease.remove()
            except OSError as error:
                self._warn(error)
            self._board.leave(lease.consumer)

    def _warn(self, error: OSError) -> None:
        folder = leases_in(self._tier.store.root)
        why = error.strerror or error
        self._tier.stats.warn("needs", f"cannot write to {folder}: {why}; the cache is shared less well meanwhile")

    # -- fetching -----------------------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        try:
            looked = self._room.look(now)
        except OSError as error:
            self._warn(error)
            return
        if looked:
            self._board.holds(self._room.names())

    def _collect(self, now: float) -> None:
        """Learn what became of what was to be brought in."""
        for digest, it in list(self._bringing.items()):
            if not it.future.done():
                continue
            del self._bringing[digest]
            self._room.changed()
            if it.victim is not None:
                self._board.decided(it.victim, file_of(self._tier.store.root, Kind.SHARD, it.victim).exists())
            outcome = Brought.FAILED if it.future.cancelled() else it.future.result()
            if outcome is Brought.HERE:
                self._board.arrived(digest)
                self._failed.pop(digest, None)
                self._failures = 0
            elif outcome is Brought.NO_ROOM:
                self._paused_until = now + NO_ROOM_SECONDS
            elif outcome is Brought.AWAY:
                most = min(PAUSE_SECONDS * 2 ** min(self._failures, 8), AWAY_SECONDS_MAX)
                self._paused_until = now + random.uniform(most / 4, most)  # noqa: S311
                self._failures += 1
            else:
                times = self._failed.get(digest, (0, 0.0))[0]
                self._failed[digest] = times + 1, now + min(RETRY_SECONDS * 2**times, RETRY_SECONDS_MAX)
                self._paused_until = now + min(PAUSE_SECONDS * 2 ** min(self._failures, 8), PAUSE_SECONDS_MAX)
                self._failures += 1

    def _fetch(self, consumer: bytes, now: float) -> None:
        at_most = BRINGING_MAX - len(self._bringing)
        if at_most <= 0 or now < self._paused_until or not self._tier.store.writable:
            return
        free_bytes = self._room.free_bytes + self._board.idle_bytes(self._room.idle)
        coming = {*self._bringing, *self._tier.locks.under_way()}
        coming.update(digest for digest, (_, until) in self._failed.items() if now < until)
        origin = self._tier.pace.origin(self._interval)
        for fetch in self._board.fetches(consumer, coming, free_bytes, origin, at_most):
            shard = self._manifest.shard_numbers[fetch.digest]
            self._room.promised(int(self._manifest.tables.shard_sizes[shard]))
            self._bringing[fetch.digest] = _Bringing(self._tier.bring(shard), fetch.victim)


class _Room:
    """What lies in the folder, and how much more could: as of the last look."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._held: list[StoredFile] = []
        self.idle: list[
            StoredFile
        ] = []  # read by nobody for so long that it makes way, unless somebody tells that he needs it
        self._occupied = 0
        self._promised = 0  # since the last look
        self._next = 0.0
        self._soonest = 0.0

    def look(self, now: float) -> bool:
        """Look at the folder unless that was just done. Raises ``OSError``; then what was known is what is known."""
        if now < self._next:
            return False
        begun = time.monotonic()
        self._next = begun + LOOK_SECONDS
        root = self._store.root
        # What is being written first: put in place meanwhile, it is counted twice and never missed.
        writing = 0
        with os.scandir(root / "tmp") as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    writing += entry.stat(follow_symlinks=False).st_size
        inventory = self._store.inventory
        self._held = [*inventory.held(Kind.SHARD), *inventory.held(Kind.PARTIAL)]
        manifests = sum(info.st_size for _, info in scan(root, Kind.MANIFEST))
        self._occupied = writing + manifests + sum(held.size_bytes for held in self._held)
        idle_since = self._store.inventory.now() - IDLE_SECONDS
        self.idle = [held for held in self._held if held.used <= idle_since]
        self._promised = 0
        ended = time.monotonic()
        self._soonest = ended + (ended - begun) / LOOK_SHARE
        self._next = max(ended + LOOK_SECONDS, self._soonest)
        return True

    def changed(self) -> None:
        """Look again soon: something arrived, and something else may have made way."""
        self._next = self._soonest

    def promised(self, size_bytes: int) -> None:
        """Count what is going to be written."""
        self._promised += size_bytes

    def names(self) -> set[Digest]:
        return {held.digest for held in self._held}

    @property
    def free_bytes(self) -> int:
        """Bytes that can be written without dropping anything."""
        return self._store.capacity_bytes - self._occupied - self._promised
