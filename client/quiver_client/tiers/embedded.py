"""The host tier without a daemon: a folder that all processes of the machine share, its shards mapped read-only.

Files are immutable and only ever unlinked, so processes need no agreement to read. To fill, they take a lock by the
shard's name first, so that one of them reads the origin and the others wait for it; the lock saves work and nothing
else, since what is written is verified and appears under its name complete or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from quiver.errors import Changed, Corrupt, DiskFailed, Forbidden, Misconfigured, NotFound, OverCapacity, Unavailable
from quiver.fill import OriginShards
from quiver.manifest import Manifest
from quiver.origin import SampleOrigin
from quiver.sizes import format_size
from quiver.source import first_verified
from quiver.store import Kind, Store
from quiver_client.delivery import Delivery, Positions
from quiver_client.stats import Stats

MAPS_MAX: Final = 4096  # the kernel allows a process 65,530 of them; they hold no descriptors
FILLS_AT_ONCE: Final = 4  # each holds a shard in memory
LOCK_SECONDS_MAX: Final = 60.0  # who holds the lock may be suspended: then somebody else reads the shard as well
LOCK_POLL_SECONDS: Final = 0.02
FAILED_SECONDS: Final = 5.0
FULL_SECONDS: Final = 5.0  # having found no room, do not look again sooner


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
        self._manifest = manifest
        self._store = store
        self._origin = origin
        self._stats = stats
        self._maps: OrderedDict[int, memoryview] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(FILLS_AT_ONCE, thread_name_prefix="quiver-fill")
        self._full_until = 0.0
        self._failed: dict[int, float] = {}  # shard -> when to try again
        self._locks = store.root / "fills"
        with contextlib.suppress(OSError):  # a folder that cannot be written is still read; who fills says why not
            self._locks.mkdir(exist_ok=True)
        store.needed = lambda digest: True if digest in manifest.shard_numbers else None

    def fetch(self, delivery: Delivery) -> None:
        plan, missing = delivery.plan, delivery.missing()
        shards = np.unique(plan.shards[missing]).tolist()
        maps = {shard: self._resident(shard) for shard in shards}
        absent = [shard for shard, view in maps.items() if view is None]
        self._stats.add("misses_host", len(absent))
        if len(absent) == 1:
            maps[absent[0]] = self._filled(absent[0])
        elif absent:
            maps.update(zip(absent, self._pool.map(self._filled, absent), strict=True))
        offsets, sizes, at_shards = plan.offsets.tolist(), plan.sizes.tolist(), plan.shards.tolist()
        for at in missing.tolist():
            view = maps[at_shards[at]]
            if view is not None:
                delivery.views[at] = view[offsets[at] : offsets[at] + sizes[at]]

    def blame(self, delivery: Delivery, bad: Positions) -> None:
        """Verify the shards as a whole: one that is wrong is quarantined and will be filled again."""
        for shard in np.unique(delivery.plan.shards[bad]).tolist():
            with self._lock:
                self._maps.pop(shard, None)
            with contextlib.suppress(Corrupt, NotFound, DiskFailed, OverCapacity):
                self._store.check(self._manifest.shard_digest(shard))

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        with self._lock:
            self._maps.clear()
        self._store.close()

    def _resident(self, shard: int) -> memoryview | None:
        with self._lock:
            view = self._maps.get(shard)
            if view is not None:
                self._maps.move_to_end(shard)
        digest = self._manifest.shard_digest(shard)
        if view is not None:
            self._store.inventory.touched(Kind.SHARD, digest)
            return view
        try:
            view = self._store.map_file(Kind.SHARD, digest)
        except NotFound:
            return None
        except (DiskFailed, OverCapacity) as error:
            self._stats.warn("disk", f"{error}; reading from the origin meanwhile")
            return None
        if len(view) != self._manifest.tables.shard_sizes[shard]:
            self._stats.add("corruptions")
            self._store.quarantine(Kind.SHARD, digest)
            return None
        with self._lock:
            self._maps[shard] = view
            while len(self._maps) > MAPS_MAX:
                self._maps.popitem(last=False)
        return view

    def _filled(self, shard: int) -> memoryview | None:
        """Return the shard, brought in; ``None`` if that cannot be, and then the origin tier will say why."""
        if time.monotonic() < max(self._full_until, self._failed.get(shard, 0.0)):
            return None
        digest = self._manifest.shard_digest(shard)
        size_bytes = int(self._manifest.tables.shard_sizes[shard])
        try:
            with _fill_lock(self._locks / digest.hex()):
                view = self._resident(shard)
                if view is not None:
                    return view
                with self._store.reserve(Kind.SHARD, digest, size_bytes) as writing:
                    source = OriginShards(self._manifest, self._origin())
                    data, _ = first_verified([source], digest, size_bytes)
                    writing.write(data.data)
                    writing.commit()
            self._stats.add("fills")
            return self._resident(shard)
        except OverCapacity:
            self._full_until = time.monotonic() + FULL_SECONDS
        except DiskFailed as error:
            self._full_until = time.monotonic() + FULL_SECONDS
            self._stats.warn("disk", f"{error}; reading from the origin meanwhile")
        except (Changed, Unavailable, Forbidden, Corrupt):
            # The samples of the shard that are still there can be read one by one, and are, for a while.
            self._failed[shard] = time.monotonic() + FAILED_SECONDS
        except NotFound as error:  # of a shard that its own manifest names: the folder was taken away
            self._stats.warn("disk", f"{error}; reading from the origin meanwhile")
        return None


@contextlib.contextmanager
def _fill_lock(path: Path) -> Iterator[None]:
    """Hold the lock of one fill, or go on without it after a while: it saves work and is not needed to be right."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise DiskFailed(f"cannot write to {path.parent}: {error.strerror}") from error
    try:
        deadline = time.monotonic() + LOCK_SECONDS_MAX
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(LOCK_POLL_SECONDS)  # flock has no timeout, and its holder may be suspended
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        fcntl.flock(fd, fcntl.LOCK_UN)  # not by closing alone: a child that was forked meanwhile has a copy
        os.close(fd)
