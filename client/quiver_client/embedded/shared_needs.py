"""What all processes that share a folder need, as this process knows it: from their lease files and its own reports.

Every process that may fill the folder reads the lease files. So no process, not even a plain reader or a loader's
worker, evicts a shard that another process has reported to need.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from quiver import forks
from quiver.digest import Digest
from quiver.errors import QuiverError
from quiver.expiring import Expiring
from quiver.lookup import as_rows
from quiver.manifest import Manifest
from quiver.residency import ConsumerReport, Needs
from quiver_client import process_exit
from quiver_client.embedded.lease_files import ForeignLease, LeaseFolder, leases_in

OPENING_MAX: Final = 4
UNREADABLE_SECONDS: Final = 30.0  # before a manifest that could not be opened is tried again
UNREADABLE_MAX: Final = 1024
MANIFEST_BYTES_MAX: Final = 4 << 30  # as for a daemon: the file is read into memory, and another process named it

U8 = npt.NDArray[np.uint8]


class SharedNeeds:
    """The needs of all consumers of a folder. Safe from threads: the folder's lock is never taken under its own."""

    def __init__(self, manifest: Manifest, root: Path) -> None:
        self._manifest = manifest
        self._leases = LeaseFolder(leases_in(root))
        self._lock = forks.lock()
        self._needs = Needs(os.getpid())
        self._own: set[str] = set()  # names of the lease files of this process
        self._held: set[Digest] = set()
        self._shard_counts: dict[Digest, int] = {}
        self._listened = -np.inf
        self._waiting: dict[bytes, ForeignLease] = {}  # by consumer, for their manifest to be opened
        self._opening: set[Digest] = set()
        self._unreadable: Expiring[Digest, None] = Expiring(UNREADABLE_MAX)

    @contextlib.contextmanager
    def locked(self) -> Iterator[Needs]:
        """Hold the lock, to decide by the needs."""
        with self._lock:
            yield self._needs

    def needed_of(self, shards: U8) -> npt.NDArray[np.int8]:
        """Return for shards ``(n, 32)``: 1 if a consumer needs it, 0 if none does, -1 if none reported on its dataset.

        While no consumer reports on this process's own dataset, all of it counts as needed: it is read without reports.
        """
        needed = self._needs.needed_of(shards)
        own = self._manifest.shard_numbers.rows_of(shards) >= 0
        needed[(needed < 0) & own] = 1
        return needed

    def listen(self, older_than_seconds: float) -> None:
        """Read the lease files of other processes, unless they were read within so many seconds."""
        if time.monotonic() - self._listened < older_than_seconds:
            return
        with self._lock:
            now = time.monotonic()
            if now - self._listened < older_than_seconds:
                return
            self._listened = now
            new, ended = self._leases.changes(now, self._own)
            for consumer in ended:
                self._waiting.pop(consumer, None)
                self._needs.leave(consumer)
            for lease in new:
                self._take(lease)
            self._needs.expire(now)
            self._forget_unused()

    # -- what this process adds ---------------------------------------------------------------------------------------

    def report(self, report: ConsumerReport) -> U8:
        """Take the report of a consumer of this process; return what ``NeedsChannel.report`` does."""
        with self._lock:
            self._own.add(report.consumer.hex())
            self._add(self._manifest)
            if not self._needs.report(self._manifest.digest, report, time.monotonic()):
                return self._held_mask(self._manifest).astype(np.uint8)  # too many consumers: others are not counted
            return self._needs.seen_by(report.consumer)

    def leave(self, consumer: bytes) -> None:
        """Forget a consumer of this process."""
        with self._lock:
            self._own.discard(consumer.hex())
            self._needs.leave(consumer)
            self._forget_unused()

    def set_held(self, held: Set[Digest]) -> None:
        """Accept what a scan found in the folder. Called under the lock (``locked``), as are the next two."""
        for digest in held - self._held:
            self._needs.arrived(digest)
        for digest in self._held - held:
            self._needs.gone(digest)
        self._held = set(held)

    def arrived(self, digest: Digest) -> None:
        self._held.add(digest)
        self._needs.arrived(digest)

    def gone(self, digest: Digest) -> None:
        self._held.discard(digest)
        self._needs.gone(digest)

    # -- the datasets of others ---------------------------------------------------------------------------------------

    def _take(self, lease: ForeignLease) -> None:
        dataset, consumer = lease.report.manifest, lease.report.report.consumer
        self._needs.leave(consumer)
        self._waiting.pop(consumer, None)
        if dataset == self._manifest.digest:
            self._add(self._manifest)
        if self._needs.has_dataset(dataset):
            self._enter(lease)
            return
        self._waiting[consumer] = lease
        if dataset in self._opening or len(self._opening) >= OPENING_MAX or dataset in self._unreadable:
            return
        self._opening.add(dataset)
        # In a thread of its own: the manifest's file system may hang, and a reader may be waiting for a decision.
        process_exit.start(self._open, "quiver-open", lease.manifest, dataset)

    def _enter(self, lease: ForeignLease) -> None:
        """Enter a lease, unless it is about another number of shards than its manifest has."""
        if len(lease.report.report.left) == self._shard_counts[lease.report.manifest]:
            self._needs.report(lease.report.manifest, lease.report.report, lease.written)

    def _open(self, path: Path, dataset: Digest) -> None:
        manifest = None
        with contextlib.suppress(QuiverError, OSError):  # not readable for this user, or replaced by another file
            manifest = Manifest.open(path, dataset, size_bytes_max=MANIFEST_BYTES_MAX)
        with self._lock:
            self._opening.discard(dataset)
            if manifest is None:
                self._unreadable.set(dataset, None, UNREADABLE_SECONDS)
                return
            self._add(manifest)
            for consumer, lease in list(self._waiting.items()):
                if lease.report.manifest == dataset:
                    del self._waiting[consumer]
                    self._enter(lease)

    def _add(self, manifest: Manifest) -> None:
        if self._needs.has_dataset(manifest.digest):
            return
        shards = manifest.tables.shard_digests
        sizes = manifest.tables.shard_sizes.astype(np.float64)
        self._shard_counts[manifest.digest] = len(shards)
        mine = np.ones(len(shards), bool)  # each process fetches for itself
        tables = manifest.tables
        samples = np.diff(tables.firsts.astype(np.int64), append=len(tables.digests))
        self._needs.add_dataset(manifest.digest, shards, sizes, self._held_mask(manifest), mine, samples=samples)

    def _held_mask(self, manifest: Manifest) -> npt.NDArray[np.bool_]:
        rows = manifest.shard_numbers.rows_of(as_rows(self._held))
        held = np.zeros(manifest.shard_count, bool)
        held[rows[rows >= 0]] = True
        return held

    def _forget_unused(self) -> None:
        self._needs.forget_unused()
        self._shard_counts = {
            name: count for name, count in self._shard_counts.items() if self._needs.has_dataset(name)
        }
