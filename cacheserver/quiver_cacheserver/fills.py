"""Bringing missing shards in: one fill per shard at a time, whoever asks, a few at once, and never asked for in vain.

A fill belongs to the daemon and not to the reader who asked first: readers wait for it as long as they care to and it
goes on without them. Success alone is shared; a failure is remembered for a moment, so that a hundred readers of one
broken object do not read it a hundred times.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

from quiver.digest import Digest
from quiver.errors import Forbidden, OverCapacity, QuiverError
from quiver.wire import RangeStatus

log = logging.getLogger(__name__)

PENDING_MAX: Final = 4096  # past it a reader is told to ask again, which costs nothing here
FAILURE_SECONDS: Final = 3.0
UPLOAD_SECONDS: Final = 60.0  # how long one client may take to read a shard and put it here
REMEMBERED_MAX: Final = 65536


class Fills:
    """Single-flight over shards. Everything here runs on the event loop; ``work`` runs in a thread."""

    def __init__(self, executor: Executor, count_failure: Callable[[QuiverError], None]) -> None:
        self._executor = executor
        self._count_failure = count_failure
        self._running: dict[Digest, asyncio.Future[None]] = {}
        self._failed: OrderedDict[Digest, tuple[float, RangeStatus]] = OrderedDict()
        self._uploads: OrderedDict[Digest, float] = OrderedDict()

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def start(self, digest: Digest, work: Callable[[], None]) -> asyncio.Future[None] | RangeStatus:
        """Return the fill that is under way, or why there is none."""
        running = self._running.get(digest)
        if running is not None:
            return running
        status = self._refusal(digest)
        if status is not None:
            return status
        if len(self._running) >= PENDING_MAX:
            return RangeStatus.FILLING
        future: asyncio.Future[None] = asyncio.get_running_loop().run_in_executor(self._executor, work)
        self._running[digest] = future
        future.add_done_callback(lambda done: self._done(digest, done))
        return future

    def outcome(self, digest: Digest) -> RangeStatus:
        """Return what to tell a reader of a shard that is not there after its fill ended, or while it goes on."""
        if digest in self._running:
            return RangeStatus.FILLING
        return self._refusal(digest) or RangeStatus.FILLING

    def arrived(self, digest: Digest) -> None:
        """The shard is here: forget what was remembered against it."""
        self._failed.pop(digest, None)
        self._uploads.pop(digest, None)

    def _refusal(self, digest: Digest) -> RangeStatus | None:
        until, status = self._failed.get(digest, (0.0, RangeStatus.FAILED))
        if time.monotonic() >= until:
            self._failed.pop(digest, None)
            return None
        if status is RangeStatus.UPLOAD:
            return self._grant(digest)
        return status

    def _grant(self, digest: Digest) -> RangeStatus:
        """Choose the first who asks to read the shard and put it here; the others wait for that one, within reason."""
        now = time.monotonic()
        if self._uploads.get(digest, 0.0) > now:
            return RangeStatus.FILLING
        self._uploads[digest] = now + UPLOAD_SECONDS
        while len(self._uploads) > REMEMBERED_MAX:
            self._uploads.popitem(last=False)
        return RangeStatus.UPLOAD

    def _done(self, digest: Digest, done: asyncio.Future[None]) -> None:
        del self._running[digest]
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self.arrived(digest)
            return
        if not isinstance(error, QuiverError):
            log.error("a fill failed unexpectedly", exc_info=error)
            self._remember(digest, RangeStatus.FAILED, FAILURE_SECONDS)
            return
        self._count_failure(error)
        if isinstance(error, Forbidden):
            self._remember(digest, RangeStatus.UPLOAD, UPLOAD_SECONDS * 10)
        elif isinstance(error, OverCapacity):
            self._remember(digest, RangeStatus.NO_ROOM, FAILURE_SECONDS)
        else:
            log.warning("a shard was not filled: %s", error)
            self._remember(digest, RangeStatus.FAILED, FAILURE_SECONDS)

    def _remember(self, digest: Digest, status: RangeStatus, seconds: float) -> None:
        self._failed[digest] = (time.monotonic() + seconds, status)
        self._failed.move_to_end(digest)
        while len(self._failed) > REMEMBERED_MAX:
            self._failed.popitem(last=False)
