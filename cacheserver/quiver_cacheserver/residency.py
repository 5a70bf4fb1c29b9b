"""Residency by need: what consumers report (``quiver.need``), turned into fills, uploads, and what the store may drop.

All state belongs to the event loop. The store hears ``needed`` from threads, and what it admits and drops comes back
through the loop's queue, in order. A driver wakes when something changed, decides, and begins fills; it waits for
nothing, so a fill that hangs costs one of its few places and no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from quiver.digest import Digest
from quiver.errors import BadRequest, Forbidden, Misconfigured, OverCapacity
from quiver.lookup import as_rows
from quiver.manifest import Manifest
from quiver.need import GIVEN_UP_SECONDS, Fetch, Grown, Needs
from quiver.reporting import NeedsAnswer, NeedsReport, NeedsStatus
from quiver.residency import IDLE_SECONDS, StoredFile
from quiver.ring import Ring
from quiver.store import Kind, MemoryInventory
from quiver.wire import RangeStatus
from quiver_cacheserver.bounds import FILL_BYTES_MAX
from quiver_cacheserver.budget import Cost
from quiver_cacheserver.consumers import Lease, Leases
from quiver_cacheserver.fills import FAILURE_SECONDS, FILL_THREADS, UPLOADS_A_READER, Recipe
from quiver_cacheserver.pace import Pace

if TYPE_CHECKING:
    from quiver_cacheserver.node import Node

log = logging.getLogger(__name__)

TICK_SECONDS: Final = 0.25
COALESCE_SECONDS: Final = 0.02  # what comes within it is decided on together
IDLE_SHARE: Final = 4  # the loop has this much time for others for every second of deciding
NO_ROOM_SECONDS: Final = 1.0  # for which what nobody reports on is taken to be in use, after no room could be made
SUPERVISED_SECONDS: Final = 1.0  # after a round of deciding that failed unexpectedly
PAUSE_SECONDS: Final = 0.05  # after a failed fill; doubled with each further one until one succeeds
DATASETS_MAX: Final = 256
IDLE_BYTES_MAX: Final = 1 << 30  # of manifests in memory of datasets that nobody reports on
DATASET_BYTES_MAX: Final = 2 << 30  # of those of all datasets; a larger one alone
INLINE_SHARDS_MAX: Final = 1 << 20  # reports of more are unpacked, and their answers packed, in a thread: milliseconds
UPLOADS_WANTED_MAX: Final = 64  # of one dataset

Mask = npt.NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class _Dataset:
    manifest: Manifest
    sizes: npt.NDArray[np.float64]
    ring: Ring  # by which ``first`` was found
    first: Mask  # of which shards this daemon is the first owner
    used: float  # when somebody last reported on it


class _Learned(NamedTuple):
    """What is found out of a dataset in a thread: which shards are held, which are this daemon's, and ``grown``."""

    held: Mask
    first: Mask
    grown: Grown


@dataclass(slots=True, eq=False)
class _Fill:
    """A fill that the driver began. The thread writes, the loop reads it when the fill ended."""

    size_bytes: int
    source: str = ""
    seconds: float = 0.0


class Residency:
    """What consumers need of one daemon, and the driver that follows it."""

    def __init__(self, node: Node) -> None:
        inventory = node.store.inventory
        assert isinstance(inventory, MemoryInventory)
        self._node = node
        self._inventory = inventory
        self._needs = Needs()
        self._pace = Pace()
        self._datasets: dict[Digest, _Dataset] = {}
        self._learning = asyncio.Lock()
        self._heard_meanwhile: list[tuple[Digest, bool]] = []  # what came and went since the last one was looked into
        self._leases = Leases()
        self._fills: dict[Recipe, _Fill] = {}
        self._refused: dict[Recipe, float] = {}  # until when a shard is not tried again
        self._wanted: dict[Recipe, None] = {}  # to be uploaded by some consumer, since the origin is not ours to read
        self._chosen: dict[Recipe, bytes] = {}  # who was asked to
        self._left_to_others: set[Recipe] = (
            set()
        )  # shards that are to come by another dataset that has them, if any can
        self._victims: dict[Digest, float] = {}  # given up for another shard, and until when that counts
        self._mine_changed = False
        self._others_busy_until = 0.0  # what nobody reports on is in use
        self._paused_until = 0.0
        self._failures = 0
        self._wake = asyncio.Event()

    @property
    def consumers(self) -> int:
        return len(self._needs)

    def close(self) -> None:
        self._inventory.listener = lambda digest, held: None

    def needed_of(self, shards: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
        """Return of each shard ``(n, 32)``: 1 somebody needs it, 0 nobody does, -1 nobody said. From threads."""
        return self._needs.needed_of(shards)

    def given_up(self) -> list[Digest]:
        """Return what is to be evicted although it is needed. From threads."""
        return list(self._victims)

    def reported_of(self, manifests: Iterable[StoredFile]) -> npt.NDArray[np.int8]:
        """Return of each manifest 1 if its dataset is known here, else -1. From threads."""
        return np.asarray([1 if item.digest in self._datasets else -1 for item in manifests], np.int8)

    # -- reports ------------------------------------------------------------------------------------------------------

    async def take(self, body: bytes, client: str) -> NeedsAnswer:
        """Take one report. Raises ``BadRequest`` for one that does not fit its manifest."""
        head = NeedsReport.head(body)
        consumer, shards = head.consumer, head.shards
        if head.leaving:
            self._needs.leave(consumer)
            self._leases.leave(consumer)
            self._wake.set()
            return _empty(NeedsStatus.TAKEN)
        manifest = await self._manifest(head.manifest, client)
        if manifest is None:
            return _empty(NeedsStatus.NO_MANIFEST)
        if shards != manifest.shard_count:
            raise BadRequest(f"a report about {shards} shards where the manifest has {manifest.shard_count}")
        budgets, began = self._node.budgets, time.monotonic()
        if budgets.left(client, Cost.WORK_SECONDS, began) <= 0:
            raise budgets.refusal(Cost.WORK_SECONDS, client, began)
        if shards > INLINE_SHARDS_MAX:
            told = await asyncio.get_running_loop().run_in_executor(None, NeedsReport.decode, body)
        else:
            told = NeedsReport.decode(body)
        report = told.report
        unpacked_seconds = time.monotonic() - began
        dataset = await self._learned(head.manifest, manifest)
        if dataset is None:
            return _empty(NeedsStatus.FULL)
        now = time.monotonic()
        before = self._leases.get(consumer)
        gone = self._leases.take(consumer, Lease(told.manifest, shards, now, report.lease_seconds, client))
        for loser in [consumer] if gone is None else gone:
            self._needs.leave(loser)
        if gone is None or not self._needs.report(told.manifest, report, now):
            self._leases.leave(consumer)
            return _empty(NeedsStatus.FULL)
        if before is not None:
            self._pace.reported(now - before.at)
        dataset.used = now
        self._wake.set()
        answer = NeedsAnswer(NeedsStatus.TAKEN, self._needs.seen_by(consumer), self._uploads_of(told, dataset, now))
        done = time.monotonic()
        budgets.charge(client, Cost.WORK_SECONDS, unpacked_seconds + done - now, done)
        return answer

    async def _manifest(self, name: Digest, client: str) -> Manifest | None:
        known = self._datasets.get(name)
        return known.manifest if known is not None else await self._node.manifests.get(name, client)

    async def _learned(self, name: Digest, manifest: Manifest) -> _Dataset | None:
        """Return the dataset, learned from its manifest if it was not known; ``None`` if its manifest finds no room."""
        if name in self._datasets:
            return self._datasets[name]
        async with self._learning:  # one at a time, as each sorts the shards of all
            if name in self._datasets:
                return self._datasets[name]
            if not self._fits(manifest):
                return None
            return await self._learn(name, manifest)

    def _fits(self, manifest: Manifest) -> bool:
        """Whether one more manifest may be kept, once those that nobody reports on are forgotten if need be."""
        most = DATASET_BYTES_MAX - _bytes_of(manifest)
        if sum(_bytes_of(it.manifest) for it in self._datasets.values()) > most:
            self._forget_idle()
        return not self._datasets or sum(_bytes_of(it.manifest) for it in self._datasets.values()) <= most

    async def _learn(self, name: Digest, manifest: Manifest) -> _Dataset:
        ring = self._node.registry.ring
        self._listen()
        heard = self._heard_meanwhile = []  # from before what is held is looked at: nothing is missed
        learned = await asyncio.get_running_loop().run_in_executor(None, self._described, manifest, ring)
        sizes = manifest.tables.shard_sizes.astype(np.float64)
        self._needs.add_dataset(name, manifest.tables.shard_digests, sizes, learned.held, learned.first, learned.grown)
        for digest, held in heard:  # hearing twice does no harm
            (self._needs.arrived if held else self._needs.gone)(digest)
        self._datasets[name] = _Dataset(manifest, sizes, ring, learned.first, time.monotonic())
        self._mine_changed = True
        return self._datasets[name]

    def _described(self, manifest: Manifest, ring: Ring) -> _Learned:
        """In a thread, since it takes a while for many shards."""
        held = np.zeros(manifest.shard_count, bool)
        rows = manifest.shard_numbers.rows_of(self._inventory.digests(Kind.SHARD))
        held[rows[rows >= 0]] = True
        return _Learned(held, self._first(manifest, ring), self._needs.grown(manifest.tables.shard_digests))

    def _first(self, manifest: Manifest, ring: Ring) -> Mask:
        """In a thread: return which shards the ring gives to this daemon first."""
        own = next((at for at, member in enumerate(ring.members) if member.id == self._node.name), -2)
        first: Mask = ring.rank(manifest.tables.shard_digests, 1)[:, 0] == own
        return first

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()

        def hear(digest: Digest, held: bool) -> None:
            with contextlib.suppress(RuntimeError):  # the loop ended, and with it whoever wanted to know
                loop.call_soon_threadsafe(self._heard, digest, held)

        self._inventory.listener = hear

    def _heard(self, digest: Digest, held: bool) -> None:
        if self._learning.locked():
            self._heard_meanwhile.append((digest, held))
        if held:
            self._needs.arrived(digest)
            for name in self._datasets:
                self._wanted.pop(Recipe(digest, name), None)
        else:
            self._needs.gone(digest)
            if self._victims.pop(digest, None) is not None:
                self._node.counters.forced_drops += 1
        self._wake.set()

    # -- the driver ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow what is needed, until cancelled. The driver's supervisor: a bug costs a round, never the daemon."""
        self._listen()
        while True:
            try:
                await self._round()
            except Exception:  # whatever is wrong with deciding, the daemon serves what it holds
                log.exception("deciding what to fetch failed")
                await asyncio.sleep(SUPERVISED_SECONDS)

    async def _round(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_SECONDS if self._datasets else None):
                await self._wake.wait()
        self._wake.clear()
        await self._follow_ring()
        began = time.monotonic()
        self._step(began)
        await asyncio.sleep(max(COALESCE_SECONDS, IDLE_SHARE * (time.monotonic() - began)))

    async def _follow_ring(self) -> None:
        ring = self._node.registry.ring
        loop = asyncio.get_running_loop()
        for dataset in list(self._datasets.values()):
            if dataset.ring is not ring:
                first = await loop.run_in_executor(None, self._first, dataset.manifest, ring)
                dataset.ring, dataset.first, self._mine_changed = ring, first, True

    def _step(self, now: float) -> None:
        self._needs.expire(now)
        self._tidy(now)
        self._tidy_uploads(now)
        self._forget(now)
        known = self._known(now)
        if self._mine_changed:
            self._set_mine()
        at_most = FILL_THREADS - len(self._fills)
        if at_most <= 0 or now < self._paused_until or self._node.state != "up":
            return
        self._needs.left_out = {name for name in {each.manifest for each in self._wanted} if self._wants_enough(name)}
        self._needs.spent = self._spent(now)
        for fetch in self._needs.fetches(now, known, self._free_bytes(now), self._pace.origin, at_most):
            if fetch.victim is not None:
                self._victims[fetch.victim] = now + GIVEN_UP_SECONDS
                self._charge(fetch.starving, now)
            if not self._begin(fetch, now) and fetch.victim is not None:
                del self._victims[fetch.victim]
                self._needs.arrived(fetch.victim)  # it stays: what was given up is not any more

    def _known(self, now: float) -> set[Digest]:
        """Return the shards that are coming already, by whatever dataset or reader's manifest.

        Not those that are coming for long or that nobody could fetch, if there is another dataset that has them.
        """
        known: set[Digest] = set()
        left: set[Recipe] = set()
        coming = dict(self._node.fills.coming_by(self._datasets))
        coming.update(dict.fromkeys(self._wanted, True))
        for recipe, stuck in coming.items():
            if stuck and self._in_another(recipe):
                left.add(recipe)
            else:
                known.add(recipe.shard)
        self._mine_changed |= left != self._left_to_others
        self._left_to_others = left
        return known

    def _in_another(self, recipe: Recipe) -> bool:
        return any(
            recipe.shard in dataset.manifest.shard_numbers
            for name, dataset in self._datasets.items()
            if name != recipe.manifest
        )

    def _spent(self, now: float) -> set[bytes]:
        """Return the consumers whose addresses may have nothing evicted that somebody needs, for now."""
        budgets = self._node.budgets
        clients = {lease.client for lease in self._leases}
        spent = {client for client in clients if budgets.left(client, Cost.EVICTIONS, now) <= 0}
        return self._leases.of(spent) if spent else set()

    def _charge(self, consumers: Iterable[bytes], now: float) -> None:
        leases = filter(None, map(self._leases.get, consumers))
        for client in {lease.client for lease in leases}:
            self._node.budgets.charge(client, Cost.EVICTIONS, 1, now)

    def _tidy(self, now: float) -> None:
        """Let go of what has run out: leases, refusals, and victims that were not dropped after all."""
        self._leases.expire(now)
        self._victims = {digest: until for digest, until in self._victims.items() if now < until}
        over = [recipe for recipe, until in self._refused.items() if now >= until]
        for recipe in over:
            del self._refused[recipe]
        self._mine_changed |= bool(over)

    def _forget(self, now: float) -> None:
        """Forget datasets that nobody reports on: not at once, since then the store would take them to be in use.

        A dataset that is known and not reported on makes way for whatever is needed; of one that is not known, being
        idle decides, and it was read until a moment ago.
        """
        reported = {lease.dataset for lease in self._leases}
        idle = [dataset for name, dataset in self._datasets.items() if name not in reported]
        for name in reported:
            self._datasets[name].used = now
        if idle and (
            now - max(dataset.used for dataset in idle) >= IDLE_SECONDS
            or len(self._datasets) > DATASETS_MAX
            or sum(_bytes_of(dataset.manifest) for dataset in idle) > IDLE_BYTES_MAX
        ):
            self._forget_idle()

    def _forget_idle(self) -> None:
        self._needs.forget()
        self._datasets = {name: it for name, it in self._datasets.items() if self._needs.knows(name)}

    def _set_mine(self) -> None:
        """Say which shards are to be fetched here: those of this daemon that it can have now."""
        self._mine_changed = False
        for name, dataset in self._datasets.items():
            mine = dataset.first & (dataset.sizes <= min(self._node.store.capacity_bytes, FILL_BYTES_MAX))
            for recipe in (*self._refused, *self._left_to_others):
                if recipe.manifest == name:
                    mine[dataset.manifest.shard_numbers[recipe.shard]] = False
            self._needs.set_mine(name, mine)

    def _free_bytes(self, now: float) -> float:
        """Return what can be written without dropping what is needed, once all that is coming has come."""
        inventory = self._inventory
        known_bytes, may_go_bytes = self._needs.held_bytes()
        held_bytes = inventory.resident_bytes() - inventory.reserved_bytes()
        coming = [digest for digest in self._node.fills.coming() if not inventory.has(Kind.SHARD, digest)]
        coming_bytes = float(self._needs.sizes_of(as_rows(coming)).sum())
        free = self._node.store.capacity_bytes - held_bytes + may_go_bytes
        free -= max(inventory.reserved_bytes(), coming_bytes)  # what is coming reserves its room when it begins
        if now >= self._others_busy_until:
            free += max(inventory.shard_bytes() - known_bytes, 0.0)
        return free

    # -- fills --------------------------------------------------------------------------------------------------------

    def _begin(self, fetch: Fetch, now: float) -> bool:
        """Begin a fill, or want an upload; return whether either is so."""
        digest = fetch.digest
        recipe = Recipe(digest, fetch.dataset)
        if recipe in self._fills:
            return False
        fill = _Fill(int(self._needs.sizes_of(as_rows([digest]))[0]))
        manifest = self._datasets[fetch.dataset].manifest
        client = self._leases.client_of(fetch.dataset)

        def work() -> None:
            began = time.monotonic()
            fill.source = self._node.fill(digest, manifest, client)
            fill.seconds = time.monotonic() - began

        begun = self._node.fills.start(recipe, work, room=True)
        if isinstance(begun, asyncio.Future):
            self._node.counters.need_fetches += 1
            self._fills[recipe] = fill
            self._pace.began(now)
            begun.add_done_callback(lambda done: self._ended(fetch, fill, done))
            return True
        if begun is RangeStatus.UPLOAD:
            return self._want(fetch)
        if begun is RangeStatus.FILLING:  # too many readers wait for fills: theirs go first
            self._paused_until = now + TICK_SECONDS
        else:
            self._refuse(recipe, now + FAILURE_SECONDS)
        return False

    def _ended(self, fetch: Fetch, fill: _Fill, done: asyncio.Future[object]) -> None:
        recipe = Recipe(fetch.digest, fetch.dataset)
        del self._fills[recipe]
        now = time.monotonic()
        brought = fill.source in ("origin", "peer")
        self._pace.ended(now, fill.seconds if brought else None, fill.size_bytes if fill.source == "origin" else 0)
        error = None if done.cancelled() else done.exception()
        if error is not None and fetch.victim is not None and self._victims.pop(fetch.victim, None) is not None:
            self._needs.arrived(fetch.victim)  # nothing was evicted for what did not come
        if error is None:
            self._failures = 0
        elif isinstance(error, Forbidden | Misconfigured):
            self._want(fetch)
        elif isinstance(error, OverCapacity):
            self._others_busy_until = now + NO_ROOM_SECONDS
            self._refuse(recipe, now + NO_ROOM_SECONDS)
        else:
            self._refuse(recipe, now + FAILURE_SECONDS)
            self._paused_until = now + min(PAUSE_SECONDS * 2**self._failures, FAILURE_SECONDS)
            self._failures = min(self._failures + 1, 16)
        self._wake.set()

    def _refuse(self, recipe: Recipe, until: float) -> None:
        self._refused[recipe] = until
        self._mine_changed = True
        self._wake.set()

    # -- uploads ------------------------------------------------------------------------------------------------------

    def _want(self, fetch: Fetch) -> bool:
        """Want an upload, unless so many of the dataset are wanted that nobody can be asked; return whether it is."""
        if self._wants_enough(fetch.dataset):
            return False
        self._wanted[Recipe(fetch.digest, fetch.dataset)] = None
        return True

    def _wants_enough(self, dataset: Digest) -> bool:
        """Whether all consumers of a dataset have enough to upload. Other datasets do not wait for them."""
        consumers = sum(lease.dataset == dataset for lease in self._leases)
        wanted = sum(recipe.manifest == dataset for recipe in self._wanted)
        return wanted >= min(UPLOADS_A_READER * consumers, UPLOADS_WANTED_MAX)

    def _uploads_of(self, told: NeedsReport, dataset: _Dataset, now: float) -> tuple[int, ...]:
        """Choose which shards this consumer is to read from the origin and put here."""
        consumer = told.report.consumer
        at_most = UPLOADS_A_READER - sum(who == consumer for who in self._chosen.values())
        uploads: list[int] = []
        free_bytes: float | None = None
        lease = self._leases.get(consumer)
        client = lease.client if lease is not None else ""
        for recipe in list(self._wanted):
            if len(uploads) >= at_most:
                break
            if recipe.manifest != told.manifest:
                continue
            number = dataset.manifest.shard_numbers[recipe.shard]
            if not told.report.left[number] or self._node.fills.awaits(recipe):
                continue
            # Room is kept for what was chosen alone, so by now something else may have taken it.
            free_bytes = self._free_bytes(now) if free_bytes is None else free_bytes
            if dataset.sizes[number] > free_bytes:
                del self._wanted[recipe]
                continue
            if self._node.fills.outcome(recipe, client, choose=True) is RangeStatus.UPLOAD:
                self._chosen[recipe] = consumer
                free_bytes -= dataset.sizes[number]
                uploads.append(number)
        return tuple(uploads)

    def _tidy_uploads(self, now: float) -> None:
        """Want no upload of what came, of what nobody needs any more, and from nobody who has gone."""
        fills = self._node.fills
        for recipe, consumer in list(self._chosen.items()):
            if consumer not in self._leases:
                fills.dismiss(recipe)
            if not fills.awaits(recipe):
                del self._chosen[recipe]
        for recipe in list(self._wanted):
            if fills.awaits(recipe):
                continue
            against = fills.refusal(recipe)
            if against is not RangeStatus.UPLOAD or not self._needs.needed(recipe.shard):
                del self._wanted[recipe]
            if against is RangeStatus.FAILED:  # whoever was chosen cannot
                self._refuse(recipe, now + FAILURE_SECONDS)


def _bytes_of(manifest: Manifest) -> int:
    return len(manifest.content)


def _empty(status: NeedsStatus) -> NeedsAnswer:
    return NeedsAnswer(status, np.zeros(0, np.uint8))
