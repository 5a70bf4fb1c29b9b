"""The host tier without a daemon: a folder that all processes of the machine share, its shards mapped read-only.

Files are immutable and only ever unlinked, so processes need no agreement to read. To fill, they take a lock by the
shard's name first, so that one of them reads the origin and the others wait for it; the lock saves work and nothing
else, since what is written is verified and appears under its name complete or not at all.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from quiver.errors import (
    Changed,
    Corrupt,
    DiskFailed,
    Forbidden,
    Misconfigured,
    NotFound,
    OverCapacity,
    QuiverError,
    Unavailable,
)
from quiver.fill import OriginShards
from quiver.manifest import Manifest
from quiver.need import Origin
from quiver.origin import SampleOrigin
from quiver.sizes import format_size
from quiver.source import first_verified
from quiver.store import Kind, Store
from quiver.store.inventory import file_of
from quiver_client import process_exit
from quiver_client.delivery import Delivery, Positions
from quiver_client.gather import Buffer
from quiver_client.pool import DaemonPool
from quiver_client.stats import Stats
from quiver_client.tiers.board import Board
from quiver_client.tiers.maps import TIDY_SECONDS, Maps

FILLS_AT_ONCE: Final = 4  # each holds a shard in memory
LOCK_SECONDS_MAX: Final = 60.0  # who holds the lock may be suspended: then somebody else reads the shard as well
LOCK_POLL_SECONDS: Final = 0.02
FAILED_SECONDS: Final = 5.0
FULL_SECONDS: Final = 5.0  # having found no room, do not look again sooner
SMOOTHING: Final = 0.2  # of what fills say of the origin


class Brought(enum.Enum):
    """What became of bringing a shard in."""

    HERE = enum.auto()
    NO_ROOM = enum.auto()
    FAILED = enum.auto()


class Pace:
    """What fills say of the origin, as moving averages. Safe from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._known = Origin()

    @contextlib.contextmanager
    def reading(self, size_bytes: int) -> Iterator[None]:
        """Measure a read, one of several perhaps. One that fails says nothing."""
        with self._lock:
            self._under_way += 1
        begun, most = time.monotonic(), 0
        try:
            yield
            most = self._under_way
        finally:
            with self._lock:
                self._under_way -= 1
                if most:
                    self._learn(max(time.monotonic() - begun, 1e-6), size_bytes * most)

    def origin(self, report_seconds: float) -> Origin:
        return self._known._replace(report_seconds=report_seconds)

    def _learn(self, seconds: float, size_bytes: int) -> None:
        rate, before = size_bytes / seconds, self._known
        share = SMOOTHING if before.rate else 1.0
        self._known = Origin(
            before.rate + share * (rate - before.rate), before.fill_seconds + share * (seconds - before.fill_seconds)
        )


class _File(NamedTuple):
    """Which file a map is of: a shard that made way and was brought in again is another one by the same name."""

    path: str
    inode: int  # 0: it was not there

    @classmethod
    def at(cls, path: str) -> _File:
        try:
            return cls(path, os.lstat(path).st_ino)
        except OSError:
            return cls(path, 0)

    def is_there(self) -> bool:
        return self.inode != 0 and self == _File.at(self.path)


class EmbeddedTier:
    """Shards in a local folder. One per process and dataset."""

    name = "host"

    def __init__(self, manifest: Manifest, store: Store, origin: Callable[[], SampleOrigin], stats: Stats) -> None:
        largest = int(manifest.tables.shard_sizes.max())
        if largest > store.capacity_bytes:
            raise Misconfigured(
                f"{store.root}: a capacity of {format_size(store.capacity_bytes)} is smaller than one shard of"
                f" {manifest.path} ({format_size(largest)}); give it more, or index with a smaller --shard-size"
            )
        self.store = store
        self._manifest = manifest
        self._origin = origin
        self.stats = stats
        self._maps: Maps[_File] = Maps()
        self._pool = DaemonPool(FILLS_AT_ONCE, "quiver-fill")
        self._closing = threading.Event()
        process_exit.call_at_exit(self._closing.set, process_exit.Phase.LOOPS)
        self._tidied = time.monotonic()
        self._full_until = 0.0
        self._broken_until = 0.0  # the disk
        self._failed: dict[int, float] = {}  # shard -> when to try again
        self._locks = store.root / "fills"
        with contextlib.suppress(OSError):  # a folder that cannot be written is still read; who fills says why not
            self._locks.mkdir(exist_ok=True)
        self.board = Board(manifest, store.root)
        self.pace = Pace()
        store.needed = self.board.needed

    def fetch(self, delivery: Delivery) -> None:
        self._tidy()
        plan, missing = delivery.plan, delivery.missing()
        shards = plan.by_shard(missing)[0].tolist()
        here = self._maps.get_all(shards)
        if len(here) < len(shards):
            here.update(self._brought([shard for shard in shards if shard not in here]))
        delivery.put_mapped(missing, here)

    def blame(self, delivery: Delivery, bad: Positions) -> None:
        """Verify the shards as a whole: one that is wrong is quarantined and will be filled again."""
        for shard in np.unique(delivery.plan.shards[bad]).tolist():
            self._maps.drop(shard)
            with contextlib.suppress(Corrupt, NotFound, DiskFailed, OverCapacity):
                self.store.check(self._manifest.shard_digest(shard))

    def bring(self, shard: int) -> Future[Brought]:
        """Begin to bring a shard in, in the background."""
        try:
            return self._pool.submit(self._bring, shard)
        except RuntimeError:  # closed meanwhile
            refused: Future[Brought] = Future()
            refused.set_result(Brought.FAILED)
            return refused

    def filling(self) -> Iterator[Path]:
        """Yield the locks of the fills that are under way in any process, or that died in one."""
        with contextlib.suppress(OSError):
            yield from self._locks.iterdir()

    def close(self) -> None:
        """Let go of all maps. A fill that waits for its origin is not waited for: what comes of it is whole or not."""
        self._closing.set()
        self._pool.shutdown(cancel_futures=True)
        self._attend(drop=False)
        self._maps.clear()
        self.store.close()

    def _brought(self, shards: list[int]) -> dict[int, Buffer]:
        """Map those of the shards that are in the folder, and fill the others; return what is there then."""
        found = {shard: self._mapped(shard) for shard in shards}
        absent = [shard for shard, buffer in found.items() if buffer is None]
        self.stats.add("misses_host", len(absent))
        if len(absent) == 1:
            found[absent[0]] = self._filled(absent[0])
        elif absent:
            found.update(zip(absent, self._pool.map(self._filled, absent), strict=True))
        return {shard: buffer for shard, buffer in found.items() if buffer is not None}

    def _mapped(self, shard: int) -> Buffer | None:
        """Map what the folder has under the shard's name, in place of a map that there may be."""
        digest = self._manifest.shard_digest(shard)
        file = _File.at(str(file_of(self.store.root, Kind.SHARD, digest)))  # first: one that is too old is let go of
        try:
            view = self.store.map_file(Kind.SHARD, digest)
        except NotFound:
            return None
        except (DiskFailed, OverCapacity) as error:
            self.stats.warn("disk", f"{error}; reading from the origin meanwhile")
            return None
        if len(view) != self._manifest.tables.shard_sizes[shard]:
            self.stats.add("corruptions")
            self.store.quarantine(Kind.SHARD, digest)
            return None
        return self._maps.put(shard, view, file)

    def _filled(self, shard: int) -> Buffer | None:
        """Return the shard, brought in; ``None`` if that cannot be, and then the origin tier will say why."""
        if time.monotonic() < max(self._full_until, self._broken_until, self._failed.get(shard, 0.0)):
            return None
        try:
            return self._fill(shard)
        except OverCapacity:
            self._full_until = time.monotonic() + FULL_SECONDS
        except (DiskFailed, NotFound) as error:  # NotFound of one's own shard: the folder was taken away
            self.stats.warn("disk", f"{error}; reading from the origin meanwhile")
        except (Changed, Unavailable, Forbidden, Corrupt):
            pass  # the samples of the shard that are still there can be read one by one, and are, for a while
        return None

    def _bring(self, shard: int) -> Brought:
        if time.monotonic() < max(self._broken_until, self._failed.get(shard, 0.0)):
            return Brought.FAILED
        self._maps.drop(shard)  # mapped once is not there still
        try:
            here = self._fill(shard) is not None
        except OverCapacity:
            return Brought.NO_ROOM
        except QuiverError as error:
            if not self._closing.is_set():
                self.stats.warn("bring", f"a shard could not be brought in ahead: {error}")
            return Brought.FAILED
        except RuntimeError:  # the interpreter ends, and what reads the origin gets no threads any more
            return Brought.FAILED
        self._full_until = 0.0
        return Brought.HERE if here else Brought.NO_ROOM

    def _fill(self, shard: int) -> Buffer | None:
        """Return the shard, read from the origin unless another process did; ``None`` if it made way at once."""
        digest = self._manifest.shard_digest(shard)
        size_bytes = int(self._manifest.tables.shard_sizes[shard])
        try:
            with _fill_lock(self._locks / digest.hex(), self._closing):
                found = self._maps.get(shard) or self._mapped(shard)
                if found is not None:
                    return found
                with self.store.reserve(Kind.SHARD, digest, size_bytes) as writing:
                    source = OriginShards(self._manifest, self._origin())
                    with self.pace.reading(size_bytes):
                        data, _ = first_verified([source], digest, size_bytes)
                    writing.write(data.data)
                    writing.commit()
        except DiskFailed:
            self._broken_until = time.monotonic() + FULL_SECONDS
            raise
        except (Changed, Unavailable, Forbidden, Corrupt):
            self._failed[shard] = time.monotonic() + FAILED_SECONDS
            raise
        self.stats.add("fills")
        return self._mapped(shard)

    def _tidy(self) -> None:
        """Let go of the maps of what made way, now and then: until then its room is not free."""
        now = time.monotonic()
        if now - self._tidied < TIDY_SECONDS:
            return
        self._tidied = now
        self._attend(drop=True)

    def _attend(self, *, drop: bool) -> None:
        """Tell the folder what was used, since what was read long ago makes way first; let go of what is gone."""
        for shard, file, used in self._maps.mapped():
            if used:
                self.store.inventory.touched(Kind.SHARD, self._manifest.shard_digest(shard))
            if drop and not file.is_there():
                self._maps.drop(shard, file)


@contextlib.contextmanager
def _fill_lock(path: Path, closing: threading.Event) -> Iterator[None]:
    """Hold the lock of one fill, or go on without it after a while: it saves work and is not needed to be right.

    Raises ``Unavailable`` if the tier is closed meanwhile, which must not wait for a process that is suspended.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise DiskFailed(f"cannot write to {path.parent}: {error.strerror}") from error
    held = False
    try:
        deadline = time.monotonic() + LOCK_SECONDS_MAX
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
                with contextlib.suppress(OSError):
                    os.utime(fd)  # since when: the file may be what a process left that died long ago
                break
            except BlockingIOError:  # flock has no timeout, and its holder may be suspended
                if closing.wait(LOCK_POLL_SECONDS):
                    raise Unavailable(f"{path.parent}", "the dataset is being closed") from None
        yield
    finally:
        if held:  # else it is somebody's still
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        fcntl.flock(fd, fcntl.LOCK_UN)  # not by closing alone: a child that was forked meanwhile has a copy
        os.close(fd)
