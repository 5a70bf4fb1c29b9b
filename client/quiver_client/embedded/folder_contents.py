"""What the shared folder holds, and how much more fits: as of the last scan and this process's changes since.

Processes that share a folder change it without telling each other, so each scans it repeatedly, as often as a small
share of one core allows. The result of a scan is a hint: the store counts again whenever it reserves.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from quiver.digest import Digest
from quiver.lookup import as_rows
from quiver.residency import Shelf, StoredFile
from quiver.store import Evict, FolderInventory, Kind, Store
from quiver.store.inventory import scan

SCAN_SECONDS: Final = 0.2  # between two scans, unless something changed
SCAN_SHARE: Final = 0.05  # of one core, for scanning a folder that is large

U8 = npt.NDArray[np.uint8]


class Scan(NamedTuple):
    """One scan of the folder: shards and partial shards by digest, and the bytes of everything else."""

    files: dict[Digest, StoredFile]
    other_bytes: int
    began: float  # on the monotonic clock, as ``ended``
    ended: float


class FolderContents:
    """The shards in a folder, partial ones too. All methods but ``scan`` are called under a lock."""

    def __init__(self, store: Store[FolderInventory]) -> None:
        self._store = store
        self._files: dict[Digest, StoredFile] = {}
        self._file_bytes = 0
        self._other_bytes = 0
        self._changes: list[tuple[float, Digest, StoredFile | None]] = []  # by this process, since the last scan began
        self._scanned = 0.0
        self._next_scan = self._earliest_scan = 0.0
        # The shelf without the last changes; the row of an evicted file stays, and is masked.
        self._rows: dict[Digest, int] = {}
        self._digests = as_rows([])
        self._sizes: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._used: npt.NDArray[np.float64] = np.zeros(0)
        self._exists: npt.NDArray[np.bool_] = np.zeros(0, bool)

    @property
    def files(self) -> dict[Digest, StoredFile]:
        """All shards by digest. The caller must not change it."""
        return self._files

    @property
    def occupied_bytes(self) -> int:
        """Bytes of all that is held and of all that other processes have reserved."""
        return self._file_bytes + self._other_bytes

    def begin_scan(self, now: float, *, at_once: bool = False) -> bool:
        """Return whether to scan the folder now; then no other thread does for a while. ``at_once``: always scan."""
        if now < self._next_scan and not at_once:
            return False
        self._next_scan = now + SCAN_SECONDS
        return True

    def scan(self) -> Scan:
        """Scan the folder. Raises ``OSError``. May be called by any thread, without the lock."""
        began, root = time.monotonic(), self._store.root
        # Reservations first: one that becomes a file meanwhile is counted twice and never missed. Those of this process
        # are counted where they were decided.
        own, reserved_bytes = f"{os.getpid()}.", 0
        with os.scandir(root / "tmp") as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if not entry.name.startswith(own):
                        reserved_bytes += entry.stat(follow_symlinks=False).st_size
        files: dict[Digest, StoredFile] = {}
        for kind in (Kind.PARTIAL, Kind.SHARD):
            for file in self._store.inventory.held(kind):
                files[file.digest] = _together(file, files.get(file.digest))
        manifest_bytes = sum(info.st_size for _, info in scan(root, Kind.MANIFEST))
        return Scan(files, reserved_bytes + manifest_bytes, began, time.monotonic())

    def replace(self, found: Scan) -> None:
        """Accept the result of a scan, with this process's changes since it began. An older scan is ignored."""
        if found.began < self._scanned:
            return
        self._scanned = found.began
        self._files, self._other_bytes = found.files, found.other_bytes
        self._changes = [change for change in self._changes if change[0] >= found.began]
        for _, digest, file in self._changes:
            self._files.pop(digest, None)
            if file is not None:
                self._files[digest] = file
        self._file_bytes = sum(file.size_bytes for file in self._files.values())
        self._earliest_scan = found.ended + (found.ended - found.began) / SCAN_SHARE
        self._next_scan = max(found.ended + SCAN_SECONDS, self._earliest_scan)
        self._rebuild()

    def added(self, digest: Digest, size_bytes: int) -> None:
        """Record that this process put a shard into the folder."""
        file = StoredFile(digest, size_bytes, self._store.inventory.now())
        self._change(digest, file)
        self._rows[digest] = len(self._sizes)
        self._digests = np.concatenate([self._digests, as_rows([digest])])
        self._sizes = np.append(self._sizes, size_bytes)
        self._used = np.append(self._used, file.used)
        self._exists = np.append(self._exists, True)

    def removed(self, digest: Digest) -> None:
        """Record that this process evicted a shard, or found it gone."""
        if digest in self._files:
            self._change(digest, None)

    def scan_soon(self) -> None:
        """Scan again as soon as that is allowed: the last scan proved wrong."""
        self._next_scan = self._earliest_scan

    def paths_of(self, digests: Iterable[Digest]) -> Evict:
        """Return the files of shards, by kind, in the form in which the store takes what to evict."""
        return [(kind, digest) for digest in digests for kind in (Kind.SHARD, Kind.PARTIAL) if self._size(kind, digest)]

    def exists(self, digest: Digest) -> bool:
        """Return whether a shard is in the folder now, whole or partial: looks at the disk."""
        return any(self._size(kind, digest) for kind in (Kind.SHARD, Kind.PARTIAL))

    def shelf(self, needed_of: Callable[[U8], npt.NDArray[np.int8]]) -> Shelf:
        """Return what is held, for the policy. ``needed_of``: as ``Needs.needed_of``."""
        exists = self._exists
        digests, count = self._digests[exists], int(np.count_nonzero(exists))
        return Shelf(
            digests,
            self._sizes[exists],
            self._store.inventory.now() - self._used[exists],
            needed_of(digests),
            np.zeros(count, bool),
            np.zeros(count, np.int64),
        )

    def _size(self, kind: Kind, digest: Digest) -> int:
        return self._store.inventory.size(kind, digest)

    def _change(self, digest: Digest, file: StoredFile | None) -> None:
        before = self._files.pop(digest, None)
        if before is not None:
            self._file_bytes -= before.size_bytes
            self._exists[self._rows.pop(digest)] = False
        if file is not None:
            self._file_bytes += file.size_bytes
            self._files[digest] = file
        self._changes.append((time.monotonic(), digest, file))

    def _rebuild(self) -> None:
        files, count = self._files.values(), len(self._files)
        self._rows = {digest: row for row, digest in enumerate(self._files)}
        self._digests = as_rows(self._files)
        self._sizes = np.fromiter((file.size_bytes for file in files), np.int64, count)
        self._used = np.fromiter((file.used for file in files), np.float64, count)
        self._exists = np.ones(count, bool)


def _together(file: StoredFile, other: StoredFile | None) -> StoredFile:
    """Return a shard that is stored both whole and partial as one, since both are evicted together."""
    if other is None:
        return file
    return StoredFile(file.digest, file.size_bytes + other.size_bytes, max(file.used, other.used))
