"""The host tier without a daemon: a folder that all processes of the machine share, its shards mapped read-only.

Files are immutable and only ever unlinked, so processes need no agreement to read. To fill, they take a lock by the
shard's name first, so that one of them reads the origin and the others wait for it (``fills``). In a folder that this
process may not write to, what is there is read, and nothing is filled.
"""

from __future__ import annotations

import contextlib
import enum
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from quiver import forks
from quiver.digest import Bytes, Digest
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
from quiver.shard import read_table, rotten, verified
from quiver.sizes import format_size
from quiver.source import first_verified
from quiver.store import Kind, Store
from quiver.store.inventory import file_of
from quiver_client import process_exit
from quiver_client.batch import Batch, Positions
from quiver_client.buffers import Buffer
from quiver_client.embedded.fill_locks import FillLocks
from quiver_client.embedded.shared_needs import Board
from quiver_client.origin_patience import OriginPatience
from quiver_client.shard_maps import TIDY_SECONDS, ShardMaps
from quiver_client.stats import Stats
from quiver_client.thread_pool import ThreadPool

FILLS_AT_ONCE: Final = 4  # each holds a shard in memory
FAILED_SECONDS: Final = 5.0
FULL_SECONDS: Final = 5.0  # having found no room, do not look again sooner
SMOOTHING: Final = 0.2  # of what fills say of the origin


class Brought(enum.Enum):
    """What became of bringing a shard in."""

    HERE = enum.auto()
    NO_ROOM = enum.auto()
    AWAY = enum.auto()  # the origin does not answer, which says nothing of the shard
    FAILED = enum.auto()


class Pace:
    """What fills say of the origin, as moving averages. Safe from threads."""

    def __init__(self) -> None:
        self._lock = forks.lock()
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


def check_capacity(manifest: Manifest, root: Path, capacity_bytes: int) -> None:
    """Raise ``Misconfigured`` if a folder of this capacity cannot hold a single shard of the dataset."""
    largest = int(manifest.tables.shard_sizes.max())
    if largest > capacity_bytes:
        raise Misconfigured(
            f"{root}: a capacity of {format_size(capacity_bytes)} is smaller than one shard of {manifest.path}"
            f" ({format_size(largest)}); give it more, or index with a smaller --shard-size"
        )


class EmbeddedTier:
    """Shards in a local folder. One per process and dataset."""

    name = "host"

    def __init__(
        self,
        manifest: Manifest,
        store: Store,
        origin: Callable[[], SampleOrigin],
        stats: Stats,
        patience: OriginPatience | None = None,
    ) -> None:
        self.store = store
        self._manifest = manifest
        self._origin = origin
        self.stats = stats
        self._patience = patience or OriginPatience(manifest.header.base, 0.0)
        self._maps: ShardMaps[_File] = ShardMaps()
        self._pool = ThreadPool(FILLS_AT_ONCE, "quiver-fill")
        self._closing = forks.event()
        process_exit.call_at_exit(self._closing.set, process_exit.Phase.LOOPS)
        self._tidied = time.monotonic()
        self._full_until = 0.0
        self._said_read_only = False
        self._broken_until = 0.0  # the disk
        self._silent_until = 0.0  # the origin
        self._failed: dict[int, float] = {}  # shard -> when to try again
        self._lost: dict[int, Positions] = {}  # of the partial shards that were mapped, the blobs that are not there
        self._failure: QuiverError = NotFound("nobody asked for it")  # the last one
        self._why: dict[int, QuiverError] = {}  # shards that were not filled, or not whole
        self.locks = FillLocks(store.root, self._closing)
        self.board = Board(manifest, store.root)
        self.pace = Pace()
        store.needed = self.board.needed

    def fetch(self, batch: Batch) -> None:
        self._tidy()
        plan, missing = batch.plan, batch.not_verified()
        shards = plan.by_shard(missing)[0].tolist()
        lost_before = dict(self._lost)
        here = self._maps.get_all(shards)
        if len(here) < len(shards):
            here.update(self._brought([shard for shard in shards if shard not in here]))
        batch.put_mapped(self._without_lost(batch, missing, here, lost_before), here)

    def blame(self, batch: Batch, bad: Positions) -> None:
        """Verify the shards as a whole: one that is wrong is quarantined and will be filled again."""
        for shard in np.unique(batch.plan.shards[bad]).tolist():
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

    def why(self, shard: int) -> QuiverError | None:
        return self._why.get(shard)

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
            return self._mapped_partial(shard)
        except (DiskFailed, OverCapacity) as error:
            self.stats.warn("disk", f"{error}; what is not in the cache is asked of the origin meanwhile")
            return None
        if len(view) != self._manifest.tables.shard_sizes[shard]:
            self.stats.add("corruptions")
            self.store.quarantine(Kind.SHARD, digest)
            return None
        self._lost.pop(shard, None)
        return self._maps.put(shard, view, file)

    def _mapped_partial(self, shard: int) -> Buffer | None:
        """Map a shard some of whose samples the origin lost, and learn which: those that do not hash to their name."""
        digest = self._manifest.shard_digest(shard)
        file = _File.at(str(file_of(self.store.root, Kind.PARTIAL, digest)))
        if not file.inode:
            return None
        try:
            view = self.store.map_file(Kind.PARTIAL, digest)
            lost = rotten(read_table(digest, view, self.store.name), view)
        except NotFound:
            return None
        except (Corrupt, DiskFailed, OverCapacity):
            self.store.drop(Kind.PARTIAL, digest)
            return None
        self._lost[shard] = blobs = np.asarray(lost, np.int64) + self._manifest.shard_blobs(shard).start
        url = self._manifest.object_url(int(self._manifest.tables.object_of[blobs[0]]))
        self._why.setdefault(shard, Changed(url, "was lost or changed", self._manifest.keys_of_blobs(blobs)))
        return self._maps.put(shard, view, file)

    def _without_lost(
        self, batch: Batch, missing: Positions, here: dict[int, Buffer], before: dict[int, Positions]
    ) -> Positions:
        """Return those of the positions that are not lost in a partial shard; try to mend such, now and then.

        ``before``: what was lost before ``here`` was looked up. Another thread may map a shard anew meanwhile, and of
        what is in doubt nothing is handed out.
        """
        lost_in = [known[shard] for known in (before, dict(self._lost)) for shard in here if shard in known]
        if not lost_in:
            return missing
        lost = np.isin(batch.plan.blobs[missing], np.concatenate(lost_in))
        mended = []
        for shard in set(batch.plan.shards[missing[lost]].tolist()):
            if time.monotonic() >= self._failed.get(shard, 0.0):
                self._failed[shard] = time.monotonic() + FAILED_SECONDS
                with contextlib.suppress(QuiverError):
                    whole = self._mended(shard)
                    if whole is not None:
                        here[shard] = whole
                        mended.append(shard)
        return missing[~lost | np.isin(batch.plan.shards[missing], mended)]

    def _mended(self, shard: int) -> Buffer | None:
        """Return the shard, whole again, if the origin has again what it had lost. Raises ``Changed`` if not."""
        digest = self._manifest.shard_digest(shard)
        with self.locks.held(digest):
            source = OriginShards(self._manifest, self._origin())
            data = source.mend(digest, self.store.map_file(Kind.PARTIAL, digest))
            self._write(Kind.SHARD, digest, verified(digest, data, source.name).data)
        self.store.drop(Kind.PARTIAL, digest)
        self._why.pop(shard, None)
        return self._mapped(shard)

    def _write(self, kind: Kind, digest: Digest, data: Bytes) -> None:
        with self.store.reserve(kind, digest, len(data)) as writing:
            writing.write(data)
            writing.commit()

    def _filled(self, shard: int) -> Buffer | None:
        """Return the shard, brought in; ``None`` if that cannot be, and then the origin tier will say why."""
        if not self.store.writable:
            self._say_read_only()
            return None
        # Of a batch's shards a few are filled at a time. Once one has met an origin that does not answer, the others
        # are not tried one after the other: the origin tier asks for all samples at once, under one deadline.
        if time.monotonic() < max(
            self._full_until, self._broken_until, self._silent_until, self._failed.get(shard, 0.0)
        ):
            self._why.setdefault(shard, self._failure)
            return None
        try:
            self._why.pop(shard, None)
            return self._fill(shard)
        except OverCapacity as error:
            self._full_until = time.monotonic() + FULL_SECONDS
            failure: QuiverError = error
        except (DiskFailed, NotFound) as error:  # NotFound of one's own shard: the folder was taken away
            self.stats.warn("disk", f"{error}; what is not in the cache is asked of the origin meanwhile")
            failure = error
        except (Changed, Unavailable, Forbidden, Corrupt) as error:
            failure = error  # the samples that are still there can be read one by one, and are, for a while
        self._why[shard] = self._failure = failure
        return None

    def _say_read_only(self) -> None:
        if not self._said_read_only:
            self._said_read_only = True
            what = "may be read only: what is not there is read from the origin and not kept"
            self.stats.warn("read only", f"{self.store.root} {what}")

    def _bring(self, shard: int) -> Brought:
        if not self.store.writable:
            return Brought.NO_ROOM
        if time.monotonic() < max(self._broken_until, self._failed.get(shard, 0.0)):
            return Brought.FAILED
        self._maps.drop(shard)  # mapped once is not there still
        try:
            here = self._fill(shard) is not None
        except OverCapacity:
            return Brought.NO_ROOM
        except Unavailable as error:
            if self._closing.is_set():
                return Brought.FAILED
            self._patience.say(error, "some shards")
            return Brought.AWAY
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
            with self.locks.held(digest):
                found = self._maps.get(shard) or self._mapped(shard)
                if found is not None:
                    return found
                source = OriginShards(self._manifest, self._origin())
                try:
                    with self.store.reserve(Kind.SHARD, digest, size_bytes) as writing:
                        with self.pace.reading(size_bytes):
                            data, _ = first_verified([source], digest, size_bytes)
                        writing.write(data.data)
                        writing.commit()
                except Changed as error:  # the shard's other samples need not be read one by one for ever
                    self._why[shard] = error
                    self._write(Kind.PARTIAL, digest, source.salvage(digest, size_bytes))
                    self._failed[shard] = time.monotonic() + FAILED_SECONDS
                    self.stats.warn("lost", f"{error} The rest of its shard is cached.")
        except DiskFailed:
            self._broken_until = time.monotonic() + FULL_SECONDS
            raise
        except (Changed, Unavailable, Forbidden, Corrupt) as error:
            self._failed[shard] = time.monotonic() + FAILED_SECONDS
            if isinstance(error, Unavailable):
                self._silent_until = time.monotonic() + FAILED_SECONDS
            raise
        self._patience.answered()
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
                kind = Kind.PARTIAL if shard in self._lost else Kind.SHARD
                self.store.inventory.touched(kind, self._manifest.shard_digest(shard))
            if drop and not file.is_there():
                self._maps.drop(shard, file)
