"""Filling missing shards: a few fills at once, and single-flight per shard and manifest.

A fill belongs to the daemon and not to its first reader: readers wait for it as long as they choose, and it continues
without them. Clients take turns: a client's fill waits for one fill of each other client, not for all of them. Only
success is shared. A failure is remembered briefly, in this module alone, so that a hundred readers of one broken object
do not read it a hundred times.

A client may upload a manifest that names other datasets' shards and locates their samples wrongly. So failures, fills
that hang and uploads that never arrive count against a shard *as one manifest describes it* (a ``Recipe``), and against
no other recipe. Success counts for all recipes, since a digest names the bytes. So a fill waits while another
manifest's fill of the same shard runs, and is not needed if that one succeeds; it waits until that one fails, or
``OTHERS_SECONDS``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Executor
from functools import partial
from math import inf
from typing import Final, NamedTuple, Protocol

from quiver.digest import Digest
from quiver.errors import Forbidden, Misconfigured, NotAllowed, NotFound, OverCapacity, QuiverError
from quiver.expiring import Expiring
from quiver.residency import Commitments, Decision, Recipe
from quiver.wire import RangeStatus
from quiver_cacheserver.bounds import FILL_THREADS
from quiver_cacheserver.residency.uploads import Uploads

log = logging.getLogger(__name__)

Work = Callable[[], object]

# Beyond it readers are told to retry, which costs nothing here, unless their client has no fill waiting.
PENDING_MAX: Final = 4096
FAILURE_SECONDS: Final = 3.0
NO_ROOM_SECONDS: Final = 1.0  # for a fetch by the policy whose room was taken meanwhile
FORBIDDEN_SECONDS: Final = 600.0  # for which the daemon does not retry a forbidden origin
OTHERS_SECONDS: Final = 5.0  # for which a fill waits for another manifest's fill or upload: most take less
REMEMBERED_MAX: Final = 65536


class Gate(Protocol):
    """Says whose turn it is to read an origin. Belongs to the event loop."""

    def wait_seconds(self, dataset: Digest, now: float) -> float:
        """Return how long a fill of a dataset waits before it asks again; 0 if it may begin."""

    def began(self, dataset: Digest, size_bytes: float, now: float) -> Callable[[float, bool], None]:
        """A fill began, which may read the origin. Return what to call at its end: when, and whether it did read."""


class OpenGate:
    """Everyone may read at any time."""

    def wait_seconds(self, dataset: Digest, now: float) -> float:
        del dataset, now
        return 0.0

    def began(self, dataset: Digest, size_bytes: float, now: float) -> Callable[[float, bool], None]:
        del dataset, size_bytes, now
        return lambda now, from_origin: None


class _Fill:
    """A fill that is running, or waiting for its turn."""

    def __init__(self, recipe: Recipe, work: Work, client: str, size_bytes: float) -> None:
        self.recipe, self.work, self.client, self.size_bytes = recipe, work, client, size_bytes
        self.future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.running = False
        self.since = inf  # it runs
        self.patience_until = inf  # for another manifest's fill of the shard; set when it first waits for one
        self.timer: asyncio.TimerHandle | None = None  # while it is put aside, for another fill or at the gate


class _Failure(NamedTuple):
    since: float
    status: RangeStatus


class Fills:
    """Single-flight over shards. Everything here runs on the event loop; ``work`` runs in a thread."""

    def __init__(
        self,
        executor: Executor,
        commitments: Commitments,
        uploads: Uploads,
        count_failure: Callable[[QuiverError], None],
        gate: Gate | None = None,
    ) -> None:
        """``gate``: by default every fill may read its origin at once."""
        self.uploads = uploads
        self._gate = gate or OpenGate()
        self._executor = executor
        self._commitments = commitments
        self._count_failure = count_failure
        self._fills: dict[Digest, dict[Digest, _Fill]] = {}  # by shard, then manifest; including waiting ones
        self._pending = 0
        self._waiting: OrderedDict[str, deque[_Fill]] = OrderedDict()  # by whose turn it is
        self._not_begun: Counter[str] = Counter()  # fills by client, of those that wait and those that are put aside
        self._active = 0
        self._closed = False
        self._failed: Expiring[Recipe, _Failure] = Expiring(REMEMBERED_MAX, clock=_now)  # for seconds
        self._forbidden: Expiring[Recipe, _Failure] = Expiring(REMEMBERED_MAX, clock=_now)

    @property
    def in_flight(self) -> int:
        return self._pending

    def stuck(self, manifests: Container[Digest]) -> Iterator[Recipe]:
        """Yield what is coming by these manifests and takes long or depends on a client."""
        late = time.monotonic() - OTHERS_SECONDS
        for fill in [fill for fills in self._fills.values() for fill in fills.values()]:
            if fill.recipe.dataset in manifests and fill.running and fill.since < late:
                yield fill.recipe
        for recipe in (*self.uploads, *self.uploads.wanted):
            if recipe.dataset in manifests:
                yield recipe

    def is_coming(self, recipe: Recipe) -> bool:
        """Whether a shard is being filled as this manifest describes it."""
        return recipe.dataset in self._fills.get(recipe.shard, ()) or self.uploads.awaits(recipe)

    @property
    def failed(self) -> list[Recipe]:
        """What the daemon does not fetch now, since it failed a moment ago; without what clients may upload."""
        since = time.monotonic() - NO_ROOM_SECONDS
        return [
            recipe
            for recipe, failure in self._failed.items()
            if failure.status is not RangeStatus.NO_ROOM or failure.since > since
        ]

    def expire(self) -> None:
        """Forget the failures that are not remembered any longer: each round of deciding looks at those that are."""
        self._failed.expire()
        self._forbidden.expire()

    def close(self) -> None:
        """Begin no more fills."""
        self._closed = True
        for fill in [fill for fills in self._fills.values() for fill in fills.values()]:
            if fill.timer is not None:
                fill.timer.cancel()

    def start(
        self, decision: Decision, work: Work, client: str = "", *, room: bool = False
    ) -> asyncio.Future[object] | RangeStatus:
        """Start a fill or join it; return it, or why there is none. ``room``: there is room now, if there was none.

        ``client``: the client whose turn the fill takes; ``""`` is the daemon's own.
        """
        recipe = decision.recipe
        running = self._fills.get(recipe.shard, {}).get(recipe.dataset)
        if running is not None:
            return running.future
        self.uploads.expire(recipe)
        arrival = self.uploads.arrival(recipe)
        if arrival is not None:
            return arrival  # a client was chosen to upload the shard: wait for it as for a fill
        status = self.refusal(recipe)
        if status is not None and not (room and status is RangeStatus.NO_ROOM):
            return status
        if self._closed or (self._pending >= PENDING_MAX and self._not_begun[client]):
            return RangeStatus.FILLING
        fill = _Fill(recipe, work, client, decision.size_bytes)
        self._fills.setdefault(recipe.shard, {})[recipe.dataset] = fill
        self._commitments.add(decision)
        self._pending += 1
        self._not_begun[client] += 1
        fill.future.add_done_callback(lambda done: self._done(recipe, done))
        self._waiting.setdefault(client, deque()).append(fill)
        self._begin()
        return fill.future

    def _begin(self) -> None:
        """Begin as many fills as there are threads, one of each client at a time."""
        while self._waiting and self._active < FILL_THREADS and not self._closed:
            client, queue = self._waiting.popitem(last=False)
            fill = queue.popleft()
            if queue:
                self._waiting[client] = queue  # behind the others
            if fill.future.done() or self._put_aside(fill) or self._waits_at_gate(fill):
                continue
            self._active += 1
            fill.running, fill.since = True, time.monotonic()
            self._begins(client)
            ended = self._gate.began(fill.recipe.dataset, fill.size_bytes, fill.since)
            ran = asyncio.get_running_loop().run_in_executor(self._executor, fill.work)
            ran.add_done_callback(partial(self._ran, fill, ended))

    def _begins(self, client: str) -> None:
        """One fill less of this client has not begun."""
        self._not_begun[client] -= 1
        if not self._not_begun[client]:
            del self._not_begun[client]

    def _put_aside(self, fill: _Fill) -> bool:
        """Put a fill aside, for a while, if another manifest's fill of the shard runs; return whether it is."""
        if not any(other.running for other in self._fills.get(fill.recipe.shard, {}).values()):
            return False
        now = time.monotonic()
        fill.patience_until = min(fill.patience_until, now + OTHERS_SECONDS)
        seconds = fill.patience_until - now
        if seconds > 0:
            fill.timer = asyncio.get_running_loop().call_later(seconds, self._resume, fill)
        return seconds > 0

    def _waits_at_gate(self, fill: _Fill) -> bool:
        """Put a fill aside if it is not its dataset's turn to read the origin; return whether it is."""
        seconds = self._gate.wait_seconds(fill.recipe.dataset, time.monotonic())
        if seconds > 0:
            fill.timer = asyncio.get_running_loop().call_later(seconds, self._resume, fill)
        return seconds > 0

    def _resume(self, fill: _Fill) -> None:
        """Queue a fill that was put aside again, before its client's others."""
        assert fill.timer is not None
        fill.timer.cancel()
        fill.timer = None
        self._waiting.setdefault(fill.client, deque()).appendleft(fill)
        self._begin()

    def _ran(self, fill: _Fill, ended: Callable[[float, bool], None], ran: asyncio.Future[object]) -> None:
        self._active -= 1
        fill.running = False
        error = None if ran.cancelled() else ran.exception()
        ended(time.monotonic(), not ran.cancelled() and error is None and ran.result() == "origin")
        if fill.future.done():  # the shard arrived another way meanwhile
            pass
        elif ran.cancelled():
            fill.future.cancel()
        elif error is not None:
            fill.future.set_exception(error)
        else:
            fill.future.set_result(ran.result())
        self._begin()

    def status(self, recipe: Recipe) -> RangeStatus:
        """Return the status of an absent shard whose fill has ended, or is still running.

        ``UPLOAD``: a client has to upload it, and none is chosen; ``choose_uploader`` chooses one.
        """
        if self.is_coming(recipe):
            return RangeStatus.FILLING
        status = self.refusal(recipe) or RangeStatus.FILLING
        return RangeStatus.FILLING if status is RangeStatus.UPLOAD and self._waits_for_another(recipe) else status

    def choose_uploader(self, decision: Decision, client: str) -> bool:
        """Choose a client to upload a shard that the daemon cannot read; return whether it was chosen."""
        return self.status(decision.recipe) is RangeStatus.UPLOAD and self.uploads.choose(decision, client)

    def arrived(self, digest: Digest) -> None:
        """Record that the shard is here: end its fills and uploads by whatever manifest."""
        for manifest, fill in list(self._fills.get(digest, {}).items()):
            self._forget_failure(Recipe(digest, manifest))
            if not fill.future.done():
                fill.future.set_result("disk")
        for recipe in self._commitments.of(digest):
            if self.uploads.awaits(recipe):
                self._forget_failure(recipe)
        self.uploads.arrived(digest)

    def forgo(self, recipe: Recipe, client: str) -> None:
        """The chosen client cannot upload the shard: for a moment all clients read the origin themselves."""
        if self.uploads.client_of(recipe) == client:
            self.uploads.end(recipe)
            self._remember(recipe, RangeStatus.FAILED, FAILURE_SECONDS)

    def refusal(self, recipe: Recipe) -> RangeStatus | None:
        """Return the remembered failure of a recipe as a status."""
        failure = self._failure(recipe)
        return failure.status if failure is not None else None

    def _failure(self, recipe: Recipe) -> _Failure | None:
        return self._failed.get(recipe) or self._forbidden.get(recipe)

    def _forget_failure(self, recipe: Recipe) -> None:
        self._failed.pop(recipe)
        self._forbidden.pop(recipe)

    def _waits_for_another(self, recipe: Recipe) -> bool:
        """Whether to wait, for a moment, for another manifest's upload of the shard."""
        failure = self._failure(recipe)
        recent = failure is not None and time.monotonic() < failure.since + OTHERS_SECONDS
        return recent and self.uploads.awaits_shard(recipe.shard)

    def _done(self, recipe: Recipe, done: asyncio.Future[object]) -> None:
        fills = self._fills[recipe.shard]
        fill = fills.pop(recipe.dataset)
        self._pending -= 1
        if fill.since == inf:
            self._begins(fill.client)
        self._commitments.end(recipe)
        if not fills:
            del self._fills[recipe.shard]
        if fill.timer is not None:
            fill.timer.cancel()
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._forget_failure(recipe)
            self.arrived(recipe.shard)
            return
        for other in list(fills.values()):
            if other.timer is not None:  # one of them begins, the others are put aside again
                self._resume(other)
        if not isinstance(error, QuiverError):
            log.error("a fill failed unexpectedly", exc_info=error)
            self._remember(recipe, RangeStatus.FAILED, FAILURE_SECONDS)
            return
        if isinstance(error, NotFound):
            return  # the request named no manifest; the next one may name one
        self._count_failure(error)
        if isinstance(error, Forbidden | Misconfigured):  # this lasts; a client may be able to read it
            if not isinstance(error, NotAllowed):
                log.warning("a shard was not filled: %s", error)
            self._remember(recipe, RangeStatus.UPLOAD, FORBIDDEN_SECONDS)
        elif isinstance(error, OverCapacity):
            self._remember(recipe, RangeStatus.NO_ROOM, FAILURE_SECONDS)
        else:
            log.warning("a shard was not filled: %s", error)
            self._remember(recipe, RangeStatus.FAILED, FAILURE_SECONDS)

    def _remember(self, recipe: Recipe, status: RangeStatus, seconds: float) -> None:
        self._forget_failure(recipe)
        known = self._forbidden if status is RangeStatus.UPLOAD else self._failed
        known.set(recipe, _Failure(time.monotonic(), status), seconds)


def _now() -> float:
    return time.monotonic()
