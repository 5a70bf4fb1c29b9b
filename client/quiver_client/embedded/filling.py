"""How a missing shard gets into the folder: read from the origin by one process, in place of what a decision names.

One recipe for a reader's miss and for a prefetch: hold the shard's fill lock, check whether another process has filled
it, evict and reserve, read the origin, write, map. If the origin lost some samples of a shard, the shard is stored
without them, as a *partial* shard, and mended once the origin has them again.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Final

from quiver import forks
from quiver.errors import (
    Changed,
    Corrupt,
    DiskFailed,
    Forbidden,
    NotFound,
    OverCapacity,
    QuiverError,
    Unavailable,
)
from quiver.manifest import Manifest
from quiver.residency import Decision
from quiver.store import FolderInventory, Kind, Store, Writing, reserve_with_room
from quiver_client import process_exit
from quiver_client.buffers import Buffer
from quiver_client.embedded.deciding import FolderDecider
from quiver_client.embedded.fill_failures import FillFailures
from quiver_client.embedded.fill_locks import FillLocks
from quiver_client.embedded.mapped_shards import MappedShards
from quiver_client.embedded.origin_reads import OriginReads
from quiver_client.stats import Stats
from quiver_client.thread_pool import ThreadPool

FILLS_MAX: Final = 4  # at once; each holds a shard in memory


class Outcome(enum.Enum):
    """The result of prefetching a shard."""

    ARRIVED = enum.auto()
    NO_ROOM = enum.auto()
    UNAVAILABLE = enum.auto()  # the origin does not answer, which says nothing about the shard
    FAILED = enum.auto()


class FolderFiller:
    """The fills of one process into one folder, of one dataset. Safe from threads."""

    def __init__(
        self,
        manifest: Manifest,
        store: Store[FolderInventory],
        origin: OriginReads,
        mapped: MappedShards,
        decider: FolderDecider,
        stats: Stats,
    ) -> None:
        self.failures = FillFailures()
        self._manifest = manifest
        self._store = store
        self._origin = origin
        self._mapped = mapped
        self._decider = decider
        self._stats = stats
        self._pool = ThreadPool(FILLS_MAX, "quiver-fill")
        self._closing = forks.event()
        process_exit.call_at_exit(self._closing.set, process_exit.Phase.LOOPS)
        self.locks = FillLocks(store.root, self._closing)
        self._warned_read_only = False

    def fill_missing(self, shards: list[int]) -> dict[int, Buffer]:
        """Fill shards that a reader misses, and map them; return those that are mapped.

        For the others ``failures`` has the reason, and the origin tier reads their samples.
        """
        if len(shards) == 1:
            found = [self._fill_for_reader(shards[0])]
        else:
            found = list(self._pool.map(self._fill_for_reader, shards))
        return {shard: buffer for shard, buffer in zip(shards, found, strict=True) if buffer is not None}

    def fetch_ahead(self, decision: Decision) -> Future[Outcome]:
        """Begin to carry out a decision, in the background. The decision is ended whether or not the fetch succeeds."""
        try:
            return self._pool.submit(self._fetch_ahead, decision)
        except RuntimeError:  # closed meanwhile
            self._decider.end(decision, arrived=False)
            refused: Future[Outcome] = Future()
            refused.set_result(Outcome.FAILED)
            return refused

    def mend(self, shard: int) -> Buffer | None:
        """Make a partial shard whole, and map it. Raises ``Changed`` if its samples are still lost."""
        digest = self._manifest.shard_digest(shard)
        decision = self._decider.for_reader(shard)
        arrived = False
        try:
            with self.locks.held(digest):
                data = self._origin.mended(digest, self._store.map_file(Kind.PARTIAL, digest))
                with self._reserved(Kind.SHARD, decision) as writing:
                    writing.write(data)
                    writing.commit()
                arrived = True
            self._store.drop(Kind.PARTIAL, digest)
        finally:
            self._decider.end(decision, arrived=arrived)
        self.failures.succeeded(shard)
        return self._mapped.map(shard)

    def close(self) -> None:
        """Begin no more fills. Running fills are not waited for: each writes a whole shard or nothing."""
        self._closing.set()
        self._pool.shutdown(cancel_futures=True)

    def _fill_for_reader(self, shard: int) -> Buffer | None:
        if not self._store.writable:
            self._warn_read_only()
            return None
        if self.failures.is_waiting_for_all(for_room=True) or self.failures.is_waiting(shard):
            self.failures.skip(shard)
            return None
        if self._decider.passes_by(shard):
            return None
        try:
            return self._fill(shard, None)
        except (DiskFailed, NotFound) as error:  # NotFound of our own files: the folder was removed
            self._stats.warn("disk", f"{error}; meanwhile shards that are not cached are read from the origin")
            failure: QuiverError = error
        except (OverCapacity, Changed, Unavailable, Forbidden, Corrupt) as error:
            failure = error  # the other samples can be read one by one, and are, for a while
        self.failures.add(shard, failure)
        return None

    def _warn_read_only(self) -> None:
        if not self._warned_read_only:
            self._warned_read_only = True
            what = "is read-only for this user: missing shards are read from the origin and not cached"
            self._stats.warn("read only", f"{self._store.root} {what}")

    def _fetch_ahead(self, decision: Decision) -> Outcome:
        shard = self._manifest.shard_numbers[decision.shard]
        outcome = Outcome.FAILED
        try:
            outcome = self._carry_out(shard, decision)
        finally:
            self._decider.end(decision, arrived=outcome is Outcome.ARRIVED)
        return outcome

    def _carry_out(self, shard: int, decision: Decision) -> Outcome:
        if self.failures.is_waiting_for_all(for_room=False) or self.failures.is_waiting(shard):
            return Outcome.UNAVAILABLE  # another fill failed since this was decided
        self._mapped.drop(shard)  # the map may be of a file that was evicted
        try:
            found = self._fill(shard, decision)
        except OverCapacity:
            return Outcome.NO_ROOM
        except QuiverError as error:
            if self._closing.is_set():
                return Outcome.FAILED
            self.failures.add(shard, error)
            if isinstance(error, Unavailable):
                self._origin.say_unavailable(error)
                return Outcome.UNAVAILABLE
            self._stats.warn("fetch", f"a shard could not be fetched ahead: {error}")
            return Outcome.FAILED
        except RuntimeError:  # the interpreter exits: no more threads can be started to read the origin
            return Outcome.FAILED
        if found is None:
            return Outcome.NO_ROOM
        self.failures.found_room()
        return Outcome.ARRIVED

    def _fill(self, shard: int, decision: Decision | None) -> Buffer | None:
        """Fill and map a shard, unless another process filled it; ``None`` if it was evicted at once."""
        with self.locks.held(self._manifest.shard_digest(shard)):
            found = self._mapped.get(shard) or self._mapped.map(shard)
            if found is not None:
                return found
            if decision is not None:
                self._read_and_write(shard, decision)
            else:
                decision, arrived = self._decider.for_reader(shard), False
                try:
                    self._read_and_write(shard, decision)
                    arrived = True
                finally:
                    self._decider.end(decision, arrived=arrived)
        self._stats.add("fills")
        return self._mapped.map(shard)

    def _read_and_write(self, shard: int, decision: Decision) -> None:
        size_bytes = int(self._manifest.tables.shard_sizes[shard])
        try:
            with self._reserved(Kind.SHARD, decision) as writing:
                writing.write(self._origin.shard(decision.shard, size_bytes))
                writing.commit()
        except Changed as error:  # else the shard's other samples would be read one by one forever
            with self._reserved(Kind.PARTIAL, decision) as writing:
                writing.write(self._origin.partial(decision.shard, size_bytes))
                writing.commit()
            self.failures.succeeded(shard)
            self.failures.add(shard, error)
            self._stats.warn("lost", f"{error} The rest of its shard is cached.")
        else:
            self.failures.succeeded(shard)

    @contextlib.contextmanager
    def _reserved(self, kind: Kind, decision: Decision) -> Iterator[Writing]:
        """Reserve room in place of what the decision evicts; decide again if another process took it meanwhile."""
        size_bytes = int(decision.size_bytes)
        with contextlib.ExitStack() as stack:
            try:
                evict = self._decider.paths_of(decision.evict)
                writing = stack.enter_context(self._store.reserve(kind, decision.shard, size_bytes, evict))
            except OverCapacity:
                again = reserve_with_room(
                    self._store,
                    kind,
                    decision.shard,
                    size_bytes,
                    lambda lacking_bytes: self._decider.instead(decision, lacking_bytes),
                )
                writing = stack.enter_context(again)
            self._decider.reserved(decision)
            yield writing
