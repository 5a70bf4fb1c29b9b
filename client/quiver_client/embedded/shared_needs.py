"""What is needed of a folder that processes share, as one of them sees it: the leases of all, and what follows.

Every process that may fill the folder has one, so that also a plain reader, or a worker of a loader, drops nothing that
somebody said to need. The process whose loader tells needs adds its own consumer, and what is resident.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Final

import numpy as np

from quiver import forks
from quiver.digest import Digest
from quiver.errors import QuiverError
from quiver.lookup import as_rows
from quiver.manifest import Manifest
from quiver.need import Fetch, Needs, Origin, Report
from quiver.residency import Held
from quiver_client import process_exit
from quiver_client.embedded.lease_files import Lease, LeaseFolder, leases_in

FRESH_SECONDS: Final = 0.5  # how old what the others told may be when room is made
OPENING_MAX: Final = 4
UNKNOWN_SECONDS: Final = 30.0  # a manifest that cannot be opened is not tried again sooner
UNKNOWN_MAX: Final = 1024
MANIFEST_BYTES_MAX: Final = 4 << 30  # as a daemon's: it is read into memory, and somebody else says which file


class Board:
    """Who needs what. Safe from threads: no lock of the folder is ever taken under its own."""

    def __init__(self, manifest: Manifest, root: Path) -> None:
        self._manifest = manifest
        self._leases = LeaseFolder(leases_in(root))
        self._lock = forks.lock()
        self._needs = Needs(os.getpid())
        self._own: set[str] = set()
        self._held: set[Digest] = set()
        self._shard_counts: dict[Digest, int] = {}
        self._listened = -np.inf
        self._waiting: dict[bytes, Lease] = {}  # for their manifest to be opened
        self._opening: set[Digest] = set()
        self._unknown: dict[Digest, float] = {}  # dataset -> when to try again

    def needed(self, digest: Digest) -> bool | None:
        """Whether a shard is needed: ``Store.needed``. Called while the folder is locked.

        Of this process's own dataset all is in use while nobody at all tells needs of it.
        """
        self.listen(FRESH_SECONDS)
        with self._lock:
            need = self._needs.needed(digest)
        return True if need is None and digest in self._manifest.shard_numbers else need

    def listen(self, older_than_seconds: float) -> None:
        """Hear what the others need, unless that was heard just now."""
        if time.monotonic() - self._listened < older_than_seconds:
            return
        with self._lock:
            now = time.monotonic()
            if now - self._listened < older_than_seconds:
                return
            self._listened = now
            heard, ended = self._leases.changes(now, self._own)
            for consumer in ended:
                self._waiting.pop(consumer, None)
                self._needs.leave(consumer)
            for lease in heard:
                self._learn(lease, now)
            self._needs.expire(now)
            self._forget()

    # -- what this process adds ---------------------------------------------------------------------------------------

    def tell(self, report: Report) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Take the report of a consumer of this process; return what it is told: ``NeedsChannel.report``."""
        with self._lock:
            self._own.add(report.consumer.hex())
            self._add(self._manifest)
            self._needs.report(self._manifest.digest, report, time.monotonic())
            return self._needs.seen_by(report.consumer)

    def leave(self, consumer: bytes) -> None:
        """Forget a consumer of this process."""
        with self._lock:
            self._own.discard(consumer.hex())
            self._needs.leave(consumer)
            self._forget()

    def holds(self, held: Set[Digest]) -> None:
        """Learn what is resident, as of a look at the folder."""
        with self._lock:
            for digest in held - self._held:
                self._needs.arrived(digest)
            for digest in self._held - held:
                self._needs.gone(digest)
            self._held = set(held)

    def arrived(self, digest: Digest) -> None:
        with self._lock:
            self._held.add(digest)
            self._needs.arrived(digest)

    def decided(self, victim: Digest, held: bool) -> None:
        """What was to make way has, or did not have to: ``held``. Then it is needed as before."""
        with self._lock:
            self._needs.gone(victim)
            self._held.discard(victim)
            if held:
                self._needs.arrived(victim)
                self._held.add(victim)

    def fetches(
        self, consumer: bytes, coming: Iterable[Digest], free_bytes: float, origin: Origin, at_most: int
    ) -> list[Fetch]:
        """Return what a consumer of this process should bring in now. ``free_bytes``: without dropping anything."""
        with self._lock:
            free_bytes += self._needs.held_bytes()[1]
            return self._needs.fetches(time.monotonic(), coming, free_bytes, origin, at_most, only=consumer)

    def idle_bytes(self, idle: Iterable[Held]) -> int:
        """Return the bytes of those of the idle that nobody's needs are about: these may go."""
        with self._lock:
            return sum(held.size_bytes for held in idle if self._needs.needed(held.digest) is None)

    # -- the datasets of others ---------------------------------------------------------------------------------------

    def _learn(self, heard: Lease, now: float) -> None:
        dataset, consumer = heard.report.manifest, heard.report.report.consumer
        self._needs.leave(consumer)
        self._waiting.pop(consumer, None)
        if not self._needs.knows(dataset) and dataset == self._manifest.digest:
            self._add(self._manifest)
        if self._needs.knows(dataset):
            self._take(heard)
            return
        self._waiting[consumer] = heard
        if dataset in self._opening or len(self._opening) >= OPENING_MAX or now < self._unknown.get(dataset, 0.0):
            return
        self._opening.add(dataset)
        # On its own: where the manifest lies may hang, and whoever makes room holds the lock of the folder meanwhile.
        process_exit.start(self._open, "quiver-open", heard.manifest, dataset)

    def _take(self, heard: Lease) -> None:
        """Enter a lease, if it is about as many shards as its manifest has."""
        if len(heard.report.report.left) == self._shard_counts[heard.report.manifest]:
            self._needs.report(heard.report.manifest, heard.report.report, heard.written)

    def _open(self, path: Path, dataset: Digest) -> None:
        manifest = None
        with contextlib.suppress(QuiverError, OSError):  # not there for us, or something else by now
            manifest = Manifest.open(path, dataset, size_bytes_max=MANIFEST_BYTES_MAX)
        with self._lock:
            self._opening.discard(dataset)
            if manifest is None:
                if len(self._unknown) >= UNKNOWN_MAX:
                    self._unknown.clear()
                self._unknown[dataset] = time.monotonic() + UNKNOWN_SECONDS
                return
            self._add(manifest)
            for consumer, heard in list(self._waiting.items()):
                if heard.report.manifest == dataset:
                    del self._waiting[consumer]
                    self._take(heard)

    def _add(self, manifest: Manifest) -> None:
        if self._needs.knows(manifest.digest):
            return
        shards = manifest.tables.shard_digests
        sizes = manifest.tables.shard_sizes.astype(np.float64)
        rows = manifest.shard_numbers.rows_of(as_rows(self._held))
        held = np.zeros(len(shards), bool)
        held[rows[rows >= 0]] = True
        self._shard_counts[manifest.digest] = len(shards)
        self._needs.add_dataset(manifest.digest, shards, sizes, held, np.ones(len(shards), bool))

    def _forget(self) -> None:
        self._needs.forget()
        self._shard_counts = {name: count for name, count in self._shard_counts.items() if self._needs.knows(name)}
