"""Which shards could not be filled, why, and when each is retried: kept in one place for readers and prefetches.

A failure of the disk or of the origin, or a lack of room, concerns all shards, so no other shard is tried for a while.
If the origin does not answer, a batch tries only a few of its shards, and the origin tier reads the rest: all samples
at once, under one deadline.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from quiver import forks
from quiver.backoff import Backoff
from quiver.errors import DiskFailed, NotFound, OverCapacity, QuiverError, Unavailable

SHARD_SECONDS: Final = (5.0, 60.0)  # before a shard is retried: first, and at most
DISK_SECONDS: Final = 5.0
ROOM_SECONDS: Final = 5.0  # looking for room takes a scan of the folder
ORIGIN_SECONDS: Final = (0.25, 4.0)  # an attempt costs one request
ORIGIN_JITTER: Final = 0.75


class _Failure(NamedTuple):
    error: QuiverError
    retry: Backoff


class FillFailures:
    """The failures of one process's fills. Safe from threads. It has at most one entry per shard of the dataset."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._shards: dict[int, _Failure] = {}
        self._disk = Backoff(DISK_SECONDS, DISK_SECONDS)
        self._room = Backoff(ROOM_SECONDS, ROOM_SECONDS)
        self._origin = Backoff(*ORIGIN_SECONDS, jitter=ORIGIN_JITTER)
        self._last: QuiverError = NotFound("nothing has failed")

    def add(self, shard: int, error: QuiverError) -> None:
        """Remember why a shard could not be filled, or not whole."""
        with self._lock:
            self._last = error
            before = self._shards.get(shard)
            retry = before.retry if before is not None else Backoff(*SHARD_SECONDS)
            self._shards[shard] = _Failure(error, retry)
            match error:
                case OverCapacity():
                    self._room.fail()
                case DiskFailed() | NotFound():  # NotFound of our own files: the folder was removed
                    self._disk.fail()
                case Unavailable():
                    if not self._origin.is_waiting:  # reads that fail together are one failure
                        self._origin.fail()
                    retry.pause(SHARD_SECONDS[0])
                case _:
                    retry.fail()

    def skip(self, shard: int) -> None:
        """Remember that a shard was not tried, for the reason of the last failure."""
        with self._lock:
            self._shards.setdefault(shard, _Failure(self._last, Backoff(*SHARD_SECONDS)))

    def succeeded(self, shard: int) -> None:
        """Record that a shard was filled: the disk takes files and the origin answers."""
        with self._lock:
            self._shards.pop(shard, None)
            self._disk.succeed()
            if self._origin.failures:
                self._origin.succeed()
                for number, failure in list(self._shards.items()):
                    if isinstance(failure.error, Unavailable):
                        del self._shards[number]

    def found_room(self) -> None:
        """Record that a prefetch found room: a reader may look for room as well."""
        with self._lock:
            self._room.succeed()

    def begin_mending(self, shard: int, loss: QuiverError) -> bool:
        """Return whether to try to mend a partial shard now, which counts as a failure until it has succeeded."""
        with self._lock:
            failure = self._shards.setdefault(shard, _Failure(loss, Backoff(*SHARD_SECONDS)))
            if failure.retry.is_waiting:
                return False
            failure.retry.fail()
            return True

    @property
    def is_origin_failing(self) -> bool:
        """Whether the origin did not answer the last read."""
        return self._origin.failures > 0

    def reason(self, shard: int) -> QuiverError | None:
        """Return why the last attempt to fill a shard failed, ``None`` if it succeeded."""
        failure = self._shards.get(shard)
        return failure.error if failure is not None else None

    def is_waiting(self, shard: int) -> bool:
        """Whether it is too early to retry this shard."""
        failure = self._shards.get(shard)
        return failure is not None and failure.retry.is_waiting

    def is_waiting_for_all(self, *, for_room: bool) -> bool:
        """Whether it is too early to try any shard; with ``for_room`` also if no room was found a moment ago."""
        return self._disk.is_waiting or self._origin.is_waiting or (for_room and self._room.is_waiting)

    def waiting(self) -> list[int]:
        """Return the shards that are not retried yet."""
        return [shard for shard, failure in list(self._shards.items()) if failure.retry.is_waiting]
