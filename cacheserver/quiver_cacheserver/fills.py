"""Bringing missing shards in: one fill per shard at a time, whoever asks, a few at once, and never asked for in vain.

A fill belongs to the daemon and not to the reader who asked first: readers wait for it as long as they care to and it
goes on without them. Clients take turns: what one asked for waits for one fill of each other client, not for all of
them. Success alone is shared; a failure is remembered for a moment, so that a hundred readers of one
broken object do not read it a hundred times.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Final

from quiver.digest import Digest
from quiver.errors import Forbidden, Misconfigured, NotAllowed, NotFound, OverCapacity, QuiverError
from quiver.wire import RangeStatus

log = logging.getLogger(__name__)

Work = Callable[[], object]

FILL_THREADS: Final = 4  # each holds a shard in memory while it fills
# Past it a reader is told to ask again, which costs nothing here; unless its client has none that wait.
PENDING_MAX: Final = 4096
FAILURE_SECONDS: Final = 3.0
UPLOADS_A_READER: Final = 4  # shards that one reader is asked to put here at a time: the others' turn comes meanwhile
UPLOAD_SECONDS: Final = 60.0  # how long one client may take to read a shard and put it here
REMEMBERED_MAX: Final = 65536


class _Upload:
    """A client was chosen to put a shard here; ``arrival`` ends when it did, or when it is not waited for any more."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.arrival: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        if not self.arrival.done():
            self.arrival.set_result(None)


class Fills:
    """Single-flight over shards. Everything here runs on the event loop; ``work`` runs in a thread."""

    def __init__(self, executor: Executor, count_failure: Callable[[QuiverError], None]) -> None:
        self._executor = executor
        self._count_failure = count_failure
        self._running: dict[Digest, asyncio.Future[object]] = {}  # or waiting
        self._waiting: OrderedDict[str, deque[tuple[Work, asyncio.Future[object]]]] = (
            OrderedDict()
        )  # by whose turn it is
        self._active = 0
        self._closed = False
        self._failed: OrderedDict[Digest, tuple[float, RangeStatus]] = OrderedDict()
        self._uploads: OrderedDict[Digest, _Upload] = OrderedDict()

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def coming(self) -> list[Digest]:
        """Return what is being brought in, by the daemon or by a client that was chosen."""
        return [*self._running, *(digest for digest in list(self._uploads) if self._upload(digest) is not None)]

    def close(self) -> None:
        """Begin no more fills."""
        self._closed = True

    def start(
        self, digest: Digest, work: Work, client: str = "", *, room: bool = False
    ) -> asyncio.Future[object] | RangeStatus:
        """Return the fill that is under way, or why there is none. ``room``: there is some now, if there was none.

        ``client``: whose turn it takes; ``""`` is the daemon's own.
        """
        running = self._running.get(digest)
        if running is not None:
            return running
        upload = self._upload(digest)
        if upload is not None:
            return upload.arrival  # a client was chosen to put the shard here: wait for it as for a fill
        status = self.refusal(digest)
        if status is not None and not (room and status is RangeStatus.NO_ROOM):
            return status
        if self._closed or (len(self._running) >= PENDING_MAX and client in self._waiting):
            return RangeStatus.FILLING
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._running[digest] = future
        future.add_done_callback(lambda done: self._done(digest, done))
        self._waiting.setdefault(client, deque()).append((work, future))
        self._begin()
        return future

    def _begin(self) -> None:
        """Begin what there are threads for, one of each client in turn."""
        while self._waiting and self._active < FILL_THREADS and not self._closed:
            client, queue = self._waiting.popitem(last=False)
            work, future = queue.popleft()
            if queue:
                self._waiting[client] = queue  # behind the others
            self._active += 1
            ran = asyncio.get_running_loop().run_in_executor(self._executor, work)
            ran.add_done_callback(partial(self._ran, future))

    def _ran(self, future: asyncio.Future[object], ran: asyncio.Future[object]) -> None:
        self._active -= 1
        if ran.cancelled():
            future.cancel()
        elif (error := ran.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(ran.result())
        self._begin()

    def outcome(self, digest: Digest, *, choose: bool) -> RangeStatus:
        """Return what to tell a reader of a shard that is not there after its fill ended, or while it goes on.

        Of those who ask for a shard that a client has to put here, the first who may be is chosen; the others wait.
        """
        if digest in self._running or self.awaits(digest):
            return RangeStatus.FILLING
        status = self.refusal(digest) or RangeStatus.FILLING
        if status is RangeStatus.UPLOAD:
            if not choose:
                return RangeStatus.FILLING
            self._uploads[digest] = _Upload(time.monotonic() + UPLOAD_SECONDS)
            while len(self._uploads) > REMEMBERED_MAX:
                self._uploads.popitem(last=False)[1].end()
        return status

    def arrived(self, digest: Digest) -> None:
        """The shard is here: forget what was remembered against it."""
        self._failed.pop(digest, None)
        upload = self._uploads.pop(digest, None)
        if upload is not None:
            upload.end()

    def forgo(self, digest: Digest) -> None:
        """The client that was to put the shard here cannot: let all read the origin themselves, for a moment."""
        if digest in self._uploads:
            self._uploads.pop(digest).end()
            self._remember(digest, RangeStatus.FAILED, FAILURE_SECONDS)

    def awaits(self, digest: Digest) -> bool:
        """Whether a client was chosen to put the shard here, and may still do so."""
        return self._upload(digest) is not None

    def dismiss(self, digest: Digest) -> None:
        """The client that was to put the shard here is gone: let the next one who asks be chosen."""
        upload = self._uploads.pop(digest, None)
        if upload is not None:
            upload.end()

    def refusal(self, digest: Digest) -> RangeStatus | None:
        """Return what is remembered against a shard."""
        until, status = self._failed.get(digest, (0.0, RangeStatus.FAILED))
        if time.monotonic() < until:
            return status
        self._failed.pop(digest, None)
        return None

    def _upload(self, digest: Digest) -> _Upload | None:
        """Return the upload that is awaited, unless the client that was chosen took too long."""
        upload = self._uploads.get(digest)
        if upload is not None and time.monotonic() >= upload.until:
            self._uploads.pop(digest).end()
            return None
        return upload

    def _done(self, digest: Digest, done: asyncio.Future[object]) -> None:
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
        if isinstance(error, NotFound):
            return  # whoever asked did not say where the samples lie: nothing against the next one, who may
        self._count_failure(error)
        if isinstance(error, Forbidden | Misconfigured):  # it lasts; a client may be able to
            if not isinstance(error, NotAllowed):
                log.warning("a shard was not filled: %s", error)
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
