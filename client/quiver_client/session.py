"""What one process has open for one dataset: its tiers, composed in one place and read in one order.

A ``Dataset`` is a description and may be pickled or forked; a ``Session`` owns threads, sockets and maps, and belongs
to the process that opened it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from quiver import forks
from quiver.errors import Changed, Misconfigured, NotFound, QuiverError, Unavailable
from quiver.introduction import Introduction
from quiver.manifest import Manifest
from quiver.origin import SampleOrigin, open_origin
from quiver.plan import Plan
from quiver.sizes import format_size
from quiver.store import FolderInventory, Store
from quiver_client import process_exit, read_clock
from quiver_client.batch import Batch, Positions, Verify
from quiver_client.config import CacheConfig, EmbeddedCache
from quiver_client.embedded.fetching import FolderNeeds
from quiver_client.embedded.tier import EmbeddedTier, check_capacity
from quiver_client.identity import IntroducedNeeds
from quiver_client.imports import import_ahead
from quiver_client.needs_reporter import NeedsChannel
from quiver_client.origin_patience import OriginPatience, patience_seconds
from quiver_client.origin_tier import OriginTier
from quiver_client.rack.handoff_tier import HandoffTier
from quiver_client.rack.hedging import Hedges
from quiver_client.rack.members import Members
from quiver_client.rack.needs import RackNeeds
from quiver_client.rack.tier import RackTier
from quiver_client.rack.uploads import ShardUploads
from quiver_client.stats import Stats
from quiver_client.tier import Cache, Tier


class Session:
    """The open resources of one process for one dataset. Safe from threads."""

    def __init__(
        self,
        manifest: Manifest,
        cache: CacheConfig | None,
        verify: Verify,
        *,
        introduce: bool,
        introduction: Introduction | None = None,
        on_wrong: Callable[[str, Batch, Positions], None] = lambda tier, batch, bad: None,
    ) -> None:
        """Compose the tiers: the cache, if there is one, and the origin.

        ``introduce``: the user just made the dataset, so a rack of which no daemon answers raises ``Unavailable``.
        ``introduction``: what to say of this process to daemons, and with reports of needs.
        ``on_wrong`` is called with the samples of a tier that had wrong bytes, before they are fetched again.
        """
        import_ahead(manifest)
        self.manifest = manifest
        self.stats = Stats()
        self._introduction = introduction
        self._verify = verify
        self._lock = forks.lock()
        self._opened_origin: SampleOrigin | None = None
        self.patience = OriginPatience(manifest.header.base, patience_seconds())
        self._on_wrong = on_wrong
        direct = OriginTier(self.origin)
        self._needs: Callable[[], NeedsChannel] | None = None
        self.members: Members | None = None  # of the rack, if the cache is one
        self.store: Store[FolderInventory] | None = None  # of the folder, if it is one
        self._cache: Cache  # the tier that fills shards
        if cache is None:
            self.tiers: tuple[Tier, ...] = (direct,)
        elif isinstance(cache, EmbeddedCache):
            self.tiers = (self._embedded(cache), direct)
        else:
            self.tiers = (*self._rack(cache.urls, introduce, direct), direct)
        self._clock_of = {name: at for at, name in enumerate(read_clock.TIERS)}
        if isinstance(cache, EmbeddedCache):
            self._clock_of["host"] = read_clock.EMBEDDED
        process_exit.call_at_exit(self.stop_waiting, process_exit.Phase.LOOPS)
        process_exit.call_at_exit(self.close, process_exit.Phase.SESSIONS)

    def _embedded(self, cache: EmbeddedCache) -> Tier:
        root = Path(cache.root).expanduser()
        check_capacity(self.manifest, root, cache.capacity_bytes)  # before anything is created there
        self.store = store = Store.open(root, cache.capacity_bytes, shared=True)
        tier = EmbeddedTier(self.manifest, store, self.origin, self.stats, self.patience)
        self._cache = tier
        store.trim()

        def needs() -> NeedsChannel:
            return FolderNeeds(self.manifest, tier)

        self._needs = needs
        return tier

    def _rack(self, urls: tuple[str, ...], introduce: bool, direct: Tier) -> tuple[Tier, Tier]:
        self.members = members = Members(self.manifest, urls, self.stats, self._introduction)
        if introduce:
            with contextlib.ExitStack() as undo:
                undo.callback(members.close)
                self._introduce(members)
                undo.pop_all()
        uploads = ShardUploads(self.manifest, self.origin, self.stats)
        self._needs = lambda: RackNeeds(self.manifest, members, uploads, self.stats)
        hedges = Hedges(members, direct.fetch, self._verify, self.stats)
        self._cache = rack = RackTier(self.manifest, members, uploads, hedges, self.stats)
        return HandoffTier(self.manifest, members, urls, self.stats), rack

    def _introduce(self, members: Members) -> None:
        members.refresh(opening=True)
        largest = int(self.manifest.tables.shard_sizes.max())
        node = members.too_small(largest)
        if node:
            raise Misconfigured(
                f"the capacity of node {node} is smaller than one shard of {self.manifest.path}"
                f" ({format_size(largest)}); give it more, or index with a smaller --shard-size"
            )
        members.introduce(self.manifest)

    def read(self, plan: Plan) -> Batch:
        """Return all samples of the plan, every one verified.

        Raises ``Changed`` for samples that are lost at the origin, ``Unavailable`` if neither cache nor origin delivers
        them while ``patience`` lasts.
        """
        batch = Batch(plan, self._verify, self._replace)
        with read_clock.reading():
            self._complete(batch)
        self.stats.add("samples", len(plan))
        return batch

    def read_each(self, plan: Plan, alone: Callable[[int], Plan]) -> tuple[Batch, dict[int, Changed]]:
        """Return the samples of the plan as ``read`` does, and those that are lost at the origin, by position.

        ``alone`` plans one sample by itself. Samples that were read before one was found to be lost are not read again.
        """
        batch = Batch(plan, self._verify, self._replace)
        lost: dict[int, Changed] = {}
        with read_clock.reading():
            try:
                self._complete(batch)
            except Changed:
                batch.check()
                for at in batch.not_verified().tolist():
                    try:
                        batch.adopt_verified(at, self.read(alone(at)))
                    except Changed as error:
                        lost[at] = error
        self.stats.add("samples", len(plan) - len(lost))
        return batch, lost

    def _replace(self, batch: Batch, torn: Positions) -> None:
        """Fetch samples again whose mapped file was truncated after they were verified. Only the first tier maps."""
        self._blame(self.tiers[0], batch, torn)
        self._complete(batch)

    def _complete(self, batch: Batch) -> None:
        """Fetch what is not verified yet, and wait for the origin as long as ``patience`` lasts."""
        waiting = self.patience.begin()
        while True:
            try:
                self._ask_tiers(batch)
                break
            except Unavailable as error:
                # Read from all tiers again: the cache may hold the samples by then.
                self.patience.wait(waiting, error, lambda: self._described(batch))
                batch.is_retry = True
        if waiting.backoff.failures:
            self.patience.answered()

    def _ask_tiers(self, batch: Batch) -> None:
        """Ask one tier after the other for what is not verified yet."""
        if read_clock.is_past_the_cache():
            self._ask_origin_first(batch)
        for tier in self.tiers:
            before = batch.verified.copy()
            begun = time.monotonic()
            self._ask(tier, batch)
            seconds = time.monotonic() - begun
            self.stats.spent(tier.name, seconds)
            arrived = np.flatnonzero(batch.verified & ~before)
            size_bytes = batch.bytes_at(arrived)
            read_clock.count(self._clock_of[tier.name], seconds, size_bytes)
            self.stats.add(f"samples_{tier.name}", len(arrived))
            if tier.name != "origin":  # the origin's bytes are counted where they are read
                self.stats.add(f"bytes_{tier.name}", size_bytes)
            if batch.verified.all():
                return
        why = f"{self._described(batch)} could not be read"
        raise Unavailable(self.manifest.header.base, why, lasting=True)

    def _ask_origin_first(self, batch: Batch) -> None:
        """Answer a batch as a miss, to measure one. What cannot be read this way is left to the tiers."""
        if len(self.tiers) == 1 or batch.is_retry:
            read_clock.count_probe(answered=False)
            return
        try:
            self._ask(self.tiers[-1], batch)
        except QuiverError:  # this process may not read the origin, or it does not answer, or lost samples
            read_clock.count_probe(answered=False)
        else:
            read_clock.count_probe(answered=True)
            self.stats.add("samples_origin", len(batch.plan))

    def _described(self, batch: Batch) -> str:
        """Return how many samples are missing, and the name of one."""
        missing = batch.not_verified()
        [key, *_] = self.manifest.keys_of_blobs(batch.plan.blobs[missing[:1]], 1)
        return f"{len(missing)} samples, {key!r} among them,"

    def fill(self, plan: Plan) -> dict[int, QuiverError]:
        """Make the plan's shards resident; return those that the cache does not hold, or only in part, and why."""
        batch = Batch(plan, "off")
        waiting = self.patience.begin()
        while True:
            self._cache.fetch(batch)
            batch.check()
            missing = set(plan.shards[batch.not_verified()].tolist())
            failed = {shard: self._cache.why(shard) for shard in plan.shards.tolist()}
            failures = {shard: error for shard, error in failed.items() if shard in missing or error is not None}
            found = {shard: error or NotFound("it was evicted at once") for shard, error in failures.items()}
            away = [error for shard, error in found.items() if shard in missing and isinstance(error, Unavailable)]
            if not away:
                return found
            try:
                self.patience.wait(waiting, away[0], lambda: f"{len(missing)} shards")  # noqa: B023 - called at once
            except Unavailable as error:
                return {shard: error if each in away else each for shard, each in found.items()}

    def introduce_as(self, introduction: Introduction) -> None:
        """Introduce this process differently from now on."""
        self._introduction = introduction
        if self.members is not None:
            self.members.introduce_as(introduction)

    def needs(self) -> NeedsChannel | None:
        """Return a new channel to report needs on; ``None`` if there is no cache."""
        channel, said = self._needs() if self._needs is not None else None, self._introduction
        return IntroducedNeeds(channel, said) if channel is not None and said is not None else channel

    def origin(self) -> SampleOrigin:
        """Return the origin, opened on first use: a job that hits the cache never connects to it."""
        with self._lock:
            if self._opened_origin is None:
                self._opened_origin = open_origin(
                    self.manifest,
                    may_fork=True,
                    count=lambda count: self.stats.add("bytes_origin", count),
                    within_seconds=self.patience.read_seconds,
                )
            return self._opened_origin

    def stop_waiting(self) -> None:
        """End all waits for the origin: each occupies a thread of a tier."""
        self.patience.close()
        if self._opened_origin is not None:
            self._opened_origin.close()

    def close(self) -> None:
        self.stop_waiting()
        for tier in self.tiers:
            tier.close()

    def _ask(self, tier: Tier, batch: Batch) -> None:
        """Fetch from a tier. If samples are wrong, blame the tier and fetch them from it a second time."""
        for _ in (1, 2):
            tier.fetch(batch)
            bad = batch.check()
            if not len(bad):
                return
            self._blame(tier, batch, bad)

    def _blame(self, tier: Tier, batch: Batch, bad: Positions) -> None:
        self.stats.add("corruptions", len(bad))
        self.stats.warn("corrupt", f"{len(bad)} samples from the {tier.name} had wrong bytes; fetching them again")
        self._on_wrong(tier.name, batch, bad)
        tier.blame(batch, bad)
