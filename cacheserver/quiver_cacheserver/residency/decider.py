"""Wakes when consumers' needs or the cache change, calls the policy, and carries out its decisions.

All state belongs to the event loop. A round takes the needs, what is coming and the free room, calls
``quiver.residency.decide``, and begins each fetch exactly as decided. It waits for nothing, so a fill that hangs only
occupies one of the few places for fetches.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

from quiver.backoff import Backoff
from quiver.digest import Digest
from quiver.errors import Forbidden, Misconfigured, OverCapacity
from quiver.residency import ConsumerReport, Decision, Needs, OriginEstimator, Recipe, Situation, decide
from quiver.wire import RangeStatus
from quiver_cacheserver.allocation import Allocator
from quiver_cacheserver.bounds import FILL_THREADS
from quiver_cacheserver.residency.datasets import Datasets, ReportedDataset
from quiver_cacheserver.residency.filler import Filler
from quiver_cacheserver.residency.fills import FAILURE_SECONDS, Fills
from quiver_cacheserver.residency.rooms import Rooms
from quiver_cacheserver.residency.uploads import UPLOADS_PER_READER

log = logging.getLogger(__name__)

TICK_SECONDS: Final = 0.25
COALESCE_SECONDS: Final = 0.02  # changes within it are decided on together
IDLE_SHARE: Final = 4  # per second of deciding, the loop has this many seconds for other work
SUPERVISED_SECONDS: Final = 1.0  # the pause after a round that failed unexpectedly
PAUSE_SECONDS: Final = 0.05  # after a failed fill; doubled with each further one until one succeeds
UPLOADS_WANTED_MAX: Final = 64  # of one dataset


@dataclass(slots=True, eq=False)
class _Fetch:
    """A fetch under way. Its thread writes it; the loop reads it after the end."""

    decision: Decision
    source: str = ""
    seconds: float = 0.0


class Decider:
    """The loop that fetches what consumers need of this daemon."""

    def __init__(
        self,
        needs: Needs,
        datasets: Datasets,
        fills: Fills,
        rooms: Rooms,
        filler: Filler,
        allocator: Allocator,
    ) -> None:
        self.estimator = OriginEstimator()
        self._needs = needs
        self._datasets = datasets
        self._fills = fills
        self._uploads = fills.uploads
        self._rooms = rooms
        self._filler = filler
        self._allocator = allocator
        self._fetching = 0
        self._chosen: dict[Recipe, bytes] = {}  # the consumer that was asked to upload the shard
        self._backoff = Backoff(PAUSE_SECONDS, FAILURE_SECONDS)

    async def run(self, is_up: Callable[[], bool] = lambda: True) -> None:
        """Run rounds until cancelled. The loop's supervisor: a bug costs a round, never the daemon."""
        self._datasets.listen()
        while True:
            try:
                await self._round(is_up)
            except Exception:  # if deciding fails, the daemon still serves what it holds
                log.exception("deciding what to fetch failed")
                await asyncio.sleep(SUPERVISED_SECONDS)

    async def _round(self, is_up: Callable[[], bool]) -> None:
        changed = self._datasets.changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_SECONDS if len(self._datasets) else None):
                await changed.wait()
        changed.clear()
        await self._datasets.follow_ring()
        began = time.monotonic()
        self.step(began, fetch=is_up())
        await asyncio.sleep(max(COALESCE_SECONDS, IDLE_SHARE * (time.monotonic() - began)))

    def step(self, now: float, *, fetch: bool = True) -> None:
        """Expire leases, decide, and begin what was decided. ``fetch``: whether to fetch, false while draining."""
        self._needs.expire(now)
        self._fills.expire()
        self._tidy_uploads()
        self._datasets.forget_idle(now)
        fetches_max = FILL_THREADS - self._fetching
        if fetch and fetches_max > 0 and not self._backoff.is_waiting:
            for decision in decide(self._needs, self._situation(now, fetches_max)):
                self._begin(decision, now)

    def _situation(self, now: float, fetches_max: int) -> Situation:
        leases = self._needs.leases
        spent = self._rooms.out_of_budget({lease.client for lease in leases})
        stuck = {recipe for recipe in self._fills.stuck(self._needs.datasets) if self._datasets.has_elsewhere(recipe)}
        wanted = {recipe.dataset for recipe in self._uploads.wanted}
        return Situation(
            now=now,
            free_bytes=self._rooms.free_bytes(),
            fetches_max=fetches_max,
            origin=self.estimator.estimate,
            shelf=self._rooms.shelf,
            on_behalf=self._rooms.on_behalf_of(leases.clients()),
            may_not_force=leases.at(spent) if spent else frozenset(),
            left_out={dataset for dataset in wanted if self._wants_enough(dataset)} | self._allocator.must_wait(now),
            avoid=stuck.union(self._fills.failed),
            pinned=self._rooms.pins.among,
            shares=self._allocator.limits(),
            division=self._allocator.division(self.estimator.estimate.fill_seconds),
            credit=self._allocator.turns.credit(now),
        )

    # -- carrying out -------------------------------------------------------------------------------------------------

    def _begin(self, decision: Decision, now: float) -> None:
        """Begin the fetch that was decided, or request its upload. If neither is possible, commit to nothing."""
        fetch = _Fetch(decision)
        client = self._needs.leases.clients().get(decision.dataset, "")
        dataset = self._datasets[decision.dataset]
        begun = self._fills.start(decision, partial(self._fetch, fetch, dataset, client), room=True)
        if isinstance(begun, asyncio.Future):
            self._needs.charge(decision)
            self._charge(decision.starving)
            self._rooms.counters.need_fetches += 1
            self._fetching += 1
            self.estimator.began(now)
            begun.add_done_callback(partial(self._ended, fetch))
        elif begun is RangeStatus.UPLOAD:
            if self._want(decision):
                self._needs.charge(decision)
                self._charge(decision.starving)
        elif begun is RangeStatus.FILLING:  # too many readers wait for fills: theirs come first
            self._backoff.pause(TICK_SECONDS)

    def _fetch(self, fetch: _Fetch, dataset: ReportedDataset, client: str) -> str:
        """In a thread: return where the shard was."""
        began = time.monotonic()
        shard = dataset.digest_of(fetch.decision.shard)
        fetch.source = self._filler.fill(shard, dataset.manifest, client, dataset.domain)
        fetch.seconds = time.monotonic() - began
        return fetch.source

    def _ended(self, fetch: _Fetch, done: asyncio.Future[object]) -> None:
        self._fetching -= 1
        now, decision = time.monotonic(), fetch.decision
        fetched = fetch.source in ("origin", "peer")
        origin_bytes = decision.size_bytes if fetch.source == "origin" else 0.0
        self.estimator.ended(now, fetch.seconds if fetched else None, origin_bytes)
        error = None if done.cancelled() else done.exception()
        if error is None:
            self._backoff.succeed()
        elif isinstance(error, Forbidden | Misconfigured):
            self._want(decision)
        elif not isinstance(error, OverCapacity):
            self._backoff.fail()
        self._datasets.changed.set()

    def _charge(self, consumers: Iterable[bytes]) -> None:
        leases = filter(None, map(self._needs.leases.get, consumers))
        self._rooms.charge_forced({lease.client for lease in leases})

    # -- uploads ------------------------------------------------------------------------------------------------------

    def choose_uploads(self, name: Digest, report: ConsumerReport, client: str) -> tuple[int, ...]:
        """Choose the wanted shards that this consumer is to read from the origin and upload; return their numbers.

        ``name``: of the dataset that it reports on.
        """
        consumer = report.consumer
        at_most = UPLOADS_PER_READER - sum(who == consumer for who in self._chosen.values())
        number_of = self._datasets[name].number_of
        uploads: list[int] = []
        for recipe in self._uploads.wanted:
            if len(uploads) >= at_most:
                break
            if recipe.dataset != name or not report.left[number_of(recipe.shard)]:
                continue
            decision = self._needs.commitments.get(recipe)
            if decision is None or self._uploads.awaits(recipe):
                continue
            # Room is kept only for chosen uploads, so another file may have taken it by now.
            with_room = self._rooms.with_room(decision, client)
            if with_room is None:
                self._uploads.unwant(recipe)
            elif self._fills.choose_uploader(with_room, client):
                self._chosen[recipe] = consumer
                uploads.append(number_of(recipe.shard))
        return tuple(uploads)

    def _want(self, decision: Decision) -> bool:
        """Want an upload, unless all consumers of the dataset have enough to upload; return whether it is wanted.

        The upload may never arrive, so meanwhile it claims only the needed shards that it evicts.
        """
        if self._wants_enough(decision.dataset):
            return False
        self._uploads.want(decision._replace(evict=decision.forced))
        return True

    def _wants_enough(self, dataset: Digest) -> bool:
        """Whether all consumers of a dataset have enough to upload. Other datasets are not affected."""
        consumers = sum(lease.dataset == dataset for lease in self._needs.leases)
        wanted = sum(recipe.dataset == dataset for recipe in self._uploads.wanted)
        return wanted >= min(UPLOADS_PER_READER * consumers, UPLOADS_WANTED_MAX)

    def _tidy_uploads(self) -> None:
        """Drop uploads of shards that arrived or that nobody needs now, and choices of consumers that have left."""
        uploads = self._uploads
        uploads.expire_all()
        for recipe, consumer in list(self._chosen.items()):
            if consumer not in self._needs.leases:
                uploads.dismiss(recipe)
            if not uploads.awaits(recipe):
                del self._chosen[recipe]
        for recipe in uploads.wanted:
            if uploads.awaits(recipe):
                continue
            cannot = self._fills.refusal(recipe) is not RangeStatus.UPLOAD
            if cannot or uploads.is_stale(recipe) or not self._needs.needed(recipe.shard):
                uploads.unwant(recipe)
