"""Bringing missing shards in: one fill per shard and manifest at a time, whoever asks, a few at once.

A fill belongs to the daemon and not to the reader who asked first: readers wait for it as long as they care to and it
goes on without them. Clients take turns: what one asked for waits for one fill of each other client, not for all of
them. Success alone is shared; a failure is remembered for a moment, so that a hundred readers of one
broken object do not read it a hundred times.

Anybody may put a manifest that names somebody else's shards and a wrong place for their samples. So failures, fills
that hang and uploads that never come count against a shard *as one manifest describes it* (a ``Recipe``), and against
no other recipe. Success counts for all, since a digest names the bytes. So a fill waits while another manifest's fill
of the same shard runs, and need not begin if that one succeeds; it waits until that one fails, or ``OTHERS_SECONDS``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Executor
from functools import partial
from math import inf
from typing import Final, NamedTuple

from quiver.digest import Digest
from quiver.errors import Forbidden, Misconfigured, NotAllowed, NotFound, OverCapacity, QuiverError
from quiver.wire import RangeStatus

log = logging.getLogger(__name__)

Work = Callable[[], object]

FILL_THREADS: Final = 4  # each holds a shard in memory while it fills
# Past it a reader is told to ask again, which costs nothing here; unless its client has none that wait.
PENDING_MAX: Final = 4096
FAILURE_SECONDS: Final = 3.0
OTHERS_SECONDS: Final = 5.0  # for which one manifest's fill or upload waits for another's: most take less
UPLOADS_A_READER: Final = 4  # shards that one reader is asked to put here at a time: the others' turn comes meanwhile
UPLOADS_AN_ADDRESS: Final = 16  # a machine's readers together
UPLOAD_SECONDS: Final = 60.0  # how long one client may take to read a shard and put it here
LAPSED_SECONDS: Final = 10.0  # for which another address is chosen before one that took too long: readers ask often
REMEMBERED_MAX: Final = 65536


class Recipe(NamedTuple):
    """A shard, and the digest of the manifest that says where its samples lie."""

    shard: Digest
    manifest: Digest


class _Fill:
    """A fill that runs, or waits for its turn."""

    def __init__(self, recipe: Recipe, work: Work, client: str) -> None:
        self.recipe, self.work, self.client = recipe, work, client
        self.future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.running = False
        self.since = inf  # it runs
        self.patience_until = inf  # for another manifest's fill of the shard; its turn came first then
        self.timer: asyncio.TimerHandle | None = None  # it is put aside until then


class _Upload:
    """A client was chosen to put a shard here; ``arrival`` ends when it did, or when it is not waited for any more."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.since = time.monotonic()
        self.arrival: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        if not self.arrival.done():
            self.arrival.set_result(None)


class _Failure(NamedTuple):
    since: float
    until: float
    status: RangeStatus


class Fills:
    """Single-flight over shards. Everything here runs on the event loop; ``work`` runs in a thread."""

    def __init__(self, executor: Executor, count_failure: Callable[[QuiverError], None]) -> None:
        self._executor = executor
        self._count_failure = count_failure
        self._fills: dict[Digest, dict[Digest, _Fill]] = {}  # of a shard, by manifest; those that wait as well
        self._pending = 0
        self._waiting: OrderedDict[str, deque[_Fill]] = OrderedDict()  # by whose turn it is
        self._active = 0
        self._closed = False
        self._failed: OrderedDict[Recipe, _Failure] = OrderedDict()
        self._uploads = _Uploads()

    @property
    def in_flight(self) -> int:
        return self._pending

    def coming(self) -> list[Digest]:
        """Return what is being filled, by the daemon or by a client that was chosen, each once."""
        return list({*self._fills, *(recipe.shard for recipe in self._uploads)})

    def coming_by(self, manifests: Container[Digest]) -> Iterator[tuple[Recipe, bool]]:
        """Yield what is coming by these manifests, and whether that takes long or depends on a client."""
        late = time.monotonic() - OTHERS_SECONDS
        for fill in [fill for fills in self._fills.values() for fill in fills.values()]:
            if fill.recipe.manifest in manifests:
                yield fill.recipe, fill.running and fill.since < late
        for recipe in self._uploads:
            if recipe.manifest in manifests:
                yield recipe, True

    def is_coming(self, recipe: Recipe) -> bool:
        """Whether a shard is being filled as this manifest describes it."""
        return recipe.manifest in self._fills.get(recipe.shard, ()) or self.awaits(recipe)

    def close(self) -> None:
        """Begin no more fills."""
        self._closed = True
        for fill in [fill for fills in self._fills.values() for fill in fills.values()]:
            if fill.timer is not None:
                fill.timer.cancel()

    def start(
        self, recipe: Recipe, work: Work, client: str = "", *, room: bool = False
    ) -> asyncio.Future[object] | RangeStatus:
        """Return the fill that is under way, or why there is none. ``room``: there is some now, if there was none.

        ``client``: whose turn it takes; ``""`` is the daemon's own.
        """
        running = self._fills.get(recipe.shard, {}).get(recipe.manifest)
        if running is not None:
            return running.future
        upload = self._uploads.get(recipe)
        if upload is not None:
            return upload.arrival  # a client was chosen to put the shard here: wait for it as for a fill
        status = self.refusal(recipe)
        if status is not None and not (room and status is RangeStatus.NO_ROOM):
            return status
        if self._closed or (self._pending >= PENDING_MAX and client in self._waiting):
            return RangeStatus.FILLING
        fill = _Fill(recipe, work, client)
        self._fills.setdefault(recipe.shard, {})[recipe.manifest] = fill
        self._pending += 1
        fill.future.add_done_callback(lambda done: self._done(recipe, done))
        self._waiting.setdefault(client, deque()).append(fill)
        self._begin()
        return fill.future

    def _begin(self) -> None:
        """Begin what there are threads for, one of each client in turn."""
        while self._waiting and self._active < FILL_THREADS and not self._closed:
            client, queue = self._waiting.popitem(last=False)
            fill = queue.popleft()
            if queue:
                self._waiting[client] = queue  # behind the others
            if fill.future.done() or self._put_aside(fill):
                continue
            self._active += 1
            fill.running, fill.since = True, time.monotonic()
            ran = asyncio.get_running_loop().run_in_executor(self._executor, fill.work)
            ran.add_done_callback(partial(self._ran, fill))

    def _put_aside(self, fill: _Fill) -> bool:
        """Put a fill aside while another manifest's of the same shard runs, for a while; return whether it is."""
        now = time.monotonic()
        fill.patience_until = min(fill.patience_until, now + OTHERS_SECONDS)
        others = self._fills.get(fill.recipe.shard, {}).values()
        if now >= fill.patience_until or not any(other.running for other in others):
            return False
        seconds = fill.patience_until - now
        fill.timer = asyncio.get_running_loop().call_later(seconds, self._resume, fill)
        return True

    def _resume(self, fill: _Fill) -> None:
        """Give a fill that was put aside its turn again, before its client's others."""
        assert fill.timer is not None
        if time.monotonic() >= fill.timer.when():
            fill.patience_until = -inf
        fill.timer.cancel()
        fill.timer = None
        self._waiting.setdefault(fill.client, deque()).appendleft(fill)
        self._begin()

    def _ran(self, fill: _Fill, ran: asyncio.Future[object]) -> None:
        self._active -= 1
        fill.running = False
        error = None if ran.cancelled() else ran.exception()
        if fill.future.done():  # the shard came another way meanwhile
            pass
        elif ran.cancelled():
            fill.future.cancel()
        elif error is not None:
            fill.future.set_exception(error)
        else:
            fill.future.set_result(ran.result())
        self._begin()

    def outcome(self, recipe: Recipe, client: str, *, choose: bool) -> RangeStatus:
        """Return what to tell a reader of a shard that is not there after its fill ended, or while it goes on.

        Of those who ask for a shard that a client has to put here, the first who may be is chosen; the others wait.
        """
        if self.is_coming(recipe):
            return RangeStatus.FILLING
        status = self.refusal(recipe) or RangeStatus.FILLING
        if status is RangeStatus.UPLOAD and (
            not choose or self._upload(recipe) is not None or not self._uploads.choose(recipe, client)
        ):
            return RangeStatus.FILLING
        return status

    def arrived(self, digest: Digest) -> None:
        """The shard is here: nobody needs to fill it or to put it here any more, whatever manifest they go by."""
        for manifest, fill in list(self._fills.get(digest, {}).items()):
            self._failed.pop(Recipe(digest, manifest), None)
            if not fill.future.done():
                fill.future.set_result("disk")
        for manifest in self._uploads.of(digest):
            self._failed.pop(Recipe(digest, manifest), None)
            self._uploads.end(Recipe(digest, manifest))

    def forgo(self, recipe: Recipe, client: str) -> None:
        """The client that was to put the shard here cannot: let all read the origin themselves, for a moment."""
        upload = self._uploads.get(recipe)
        if upload is not None and upload.client == client:
            self._uploads.end(recipe)
            self._remember(recipe, RangeStatus.FAILED, FAILURE_SECONDS)

    def awaits(self, recipe: Recipe) -> bool:
        """Whether a client was chosen to put the shard here, and may still do so."""
        return self._uploads.get(recipe) is not None

    def dismiss(self, recipe: Recipe) -> None:
        """The client that was to put the shard here is gone: let the next one who asks be chosen."""
        upload = self._uploads.get(recipe)
        if upload is not None:
            self._uploads.end(recipe, lapsed=time.monotonic() >= upload.since + LAPSED_SECONDS)

    def refusal(self, recipe: Recipe) -> RangeStatus | None:
        """Return what is remembered against a shard, as a manifest describes it."""
        failure = self._failed.get(recipe)
        if failure is None:
            return None
        if time.monotonic() < failure.until:
            return failure.status
        del self._failed[recipe]
        return None

    def _upload(self, recipe: Recipe) -> _Upload | None:
        """Return the upload that is awaited: the manifest's own, or for a moment one that another asked for."""
        own = self._uploads.get(recipe)
        failure = self._failed.get(recipe)
        if own is None and failure is not None and time.monotonic() < failure.since + OTHERS_SECONDS:
            return self._uploads.any_of(recipe.shard)
        return own

    def _done(self, recipe: Recipe, done: asyncio.Future[object]) -> None:
        fills = self._fills[recipe.shard]
        fill = fills.pop(recipe.manifest)
        self._pending -= 1
        if not fills:
            del self._fills[recipe.shard]
        if fill.timer is not None:
            fill.timer.cancel()
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._failed.pop(recipe, None)
            self.arrived(recipe.shard)
            return
        for other in list(fills.values()):
            if other.timer is not None:  # one begins, the others are put aside again
                self._resume(other)
        if not isinstance(error, QuiverError):
            log.error("a fill failed unexpectedly", exc_info=error)
            self._remember(recipe, RangeStatus.FAILED, FAILURE_SECONDS)
            return
        if isinstance(error, NotFound):
            return  # whoever asked did not say where the samples lie: nothing against the next one, who may
        self._count_failure(error)
        if isinstance(error, Forbidden | Misconfigured):  # it lasts; a client may be able to
            if not isinstance(error, NotAllowed):
                log.warning("a shard was not filled: %s", error)
            self._remember(recipe, RangeStatus.UPLOAD, UPLOAD_SECONDS * 10)
        elif isinstance(error, OverCapacity):
            self._remember(recipe, RangeStatus.NO_ROOM, FAILURE_SECONDS)
        else:
            log.warning("a shard was not filled: %s", error)
            self._remember(recipe, RangeStatus.FAILED, FAILURE_SECONDS)

    def _remember(self, recipe: Recipe, status: RangeStatus, seconds: float) -> None:
        now = time.monotonic()
        self._failed[recipe] = _Failure(now, now + seconds, status)
        self._failed.move_to_end(recipe)
        while len(self._failed) > REMEMBERED_MAX:
            self._failed.popitem(last=False)


class _Uploads:
    """Who was chosen to put which shard here, and who of late was and did not."""

    def __init__(self) -> None:
        self._chosen: OrderedDict[Recipe, _Upload] = OrderedDict()
        self._of: dict[Digest, dict[Digest, None]] = {}  # manifests by shard
        self._owed: dict[str, dict[Recipe, None]] = {}  # by address
        self._lapsed: OrderedDict[tuple[Digest, str], float] = OrderedDict()  # until when others come first

    def __iter__(self) -> Iterator[Recipe]:
        """Yield what is awaited."""
        return (recipe for recipe in list(self._chosen) if self.get(recipe) is not None)

    def of(self, shard: Digest) -> list[Digest]:
        """Return by which manifests a shard is awaited."""
        return list(self._of.get(shard, ()))

    def get(self, recipe: Recipe) -> _Upload | None:
        """Return the upload that is awaited, unless the client that was chosen took too long."""
        upload = self._chosen.get(recipe)
        if upload is not None and time.monotonic() >= upload.since + UPLOAD_SECONDS:
            self.end(recipe, lapsed=True)
            return None
        return upload

    def any_of(self, shard: Digest) -> _Upload | None:
        """Return an upload of a shard that is awaited, by whatever manifest."""
        return next(filter(None, (self.get(Recipe(shard, manifest)) for manifest in self.of(shard))), None)

    def choose(self, recipe: Recipe, client: str) -> bool:
        """Have a client put a shard here; return whether it may: not if it owes many, or let this one lapse of late."""
        if time.monotonic() < self._lapsed.get((recipe.shard, client), -inf):
            return False
        owed = self._owed.get(client, {})
        for each in list(owed):
            self.get(each)  # which ends it if it took too long
        if len(owed) >= UPLOADS_AN_ADDRESS:
            return False
        self._chosen[recipe] = _Upload(client)
        self._of.setdefault(recipe.shard, {})[recipe.manifest] = None
        self._owed.setdefault(client, {})[recipe] = None
        while len(self._chosen) > REMEMBERED_MAX:
            self.end(next(iter(self._chosen)))
        return True

    def end(self, recipe: Recipe, *, lapsed: bool = False) -> None:
        """Await an upload no longer, if it is. ``lapsed``: it did not come, and others are chosen first now."""
        upload = self._chosen.pop(recipe, None)
        if upload is None:
            return
        del self._of[recipe.shard][recipe.manifest], self._owed[upload.client][recipe]
        if not self._of[recipe.shard]:
            del self._of[recipe.shard]
        if not self._owed[upload.client]:
            del self._owed[upload.client]
        if lapsed:
            until = min(time.monotonic(), upload.since + UPLOAD_SECONDS) + LAPSED_SECONDS
            self._lapsed[recipe.shard, upload.client] = until
            self._lapsed.move_to_end((recipe.shard, upload.client))
            while len(self._lapsed) > REMEMBERED_MAX:
                self._lapsed.popitem(last=False)
        upload.end()
