"""Who needs what, counted: the state that decisions are taken from. Pure.

Every rank of every job is a *consumer*. It reports how much of each shard it has still to read this epoch, how fast it
reads, and how much of that is resident, under a lease (``leases``). Consumers of one *group* count once, however many
of them need a shard; by itself each consumer is a group of its own. From the reports follow, by shard: how many groups
need it, and how many bytes of it are left to read.

A daemon decides for the shards that the ring gives to it first (*mine*), and each daemon for itself. What is *held*
comes from the store, by ``arrived`` and ``gone``; what is coming, and what is evicted for it, from ``commitments``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from quiver.digest import DIGEST_BYTES, Digest
from quiver.lookup import DigestRows, as_rows
from quiver.residency.commitments import Commitments, Decision, Recipe
from quiver.residency.leases import Lease, Leases
from quiver.residency.report import FULL, Report

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
U8 = npt.NDArray[np.uint8]

# One who starves may have been suspended since its last report; then shards would replace one another without end.
EVICTIONS_PER_REPORT: Final = 4  # of shards that somebody needs, for one consumer, until it reports again


class Grown(NamedTuple):
    """The slots of all shards once a dataset's are among them, and which those are ``(n,)``."""

    before: DigestRows
    after: DigestRows
    slots: Ints


@dataclass(slots=True, eq=False)
class DatasetNeeds:
    """A dataset that somebody reports on."""

    slots: Ints  # of each of its shards
    mine: Mask
    mine_share: float  # of the dataset's bytes, those of ``mine``
    shard_bytes: float  # of the largest
    consumers: int = 0


class Group(NamedTuple):
    """Consumers that count once, of one dataset. The seam for who gets the cache: today each consumer is one."""

    name: bytes
    dataset: Digest


@dataclass(slots=True, eq=False)
class Consumer:
    """A consumer's last report, in bytes."""

    name: bytes
    group: Group
    report: Report
    reported_at: float
    left: Floats  # bytes, by shard of its dataset
    pending: Mask  # of which shards something is left
    left_mine: Floats  # as ``left``, of what is mine
    local_bytes: float  # of ``left_mine``, those that were resident when it reported
    soon: Ints
    evictions_left: int = EVICTIONS_PER_REPORT

    @property
    def dataset(self) -> Digest:
        return self.group.dataset


class Needs:
    """All consumers that report here, and the shards of their datasets, each by its *slot*.

    Belongs to one thread; ``needed``, ``needed_of``, ``sizes_of`` and ``grown`` may be asked from others.
    """

    def __init__(self, seed: int = 0, leases: Leases | None = None) -> None:
        self.leases = leases if leases is not None else Leases()
        self.commitments = Commitments()
        self.datasets: dict[Digest, DatasetNeeds] = {}
        self.consumers: dict[bytes, Consumer] = {}
        self.shards = DigestRows(np.zeros((0, DIGEST_BYTES), np.uint8))  # the slot of each
        # By slot.
        self.sizes = np.zeros(0)
        self.held = np.zeros(0, bool)
        self.counts = np.zeros(0, np.int32)  # of groups that need it
        self.ties = np.zeros(0)  # less than a half: which of equals comes first, by chance
        self.ordered_is_next = False  # whether the next fetch is for a consumer of a fixed order, if one wants it
        self._chance = np.random.default_rng(seed)
        self._groups: dict[Group, dict[bytes, Consumer]] = {}
        self.shown = self.shards, self.counts  # for other threads: both of one moment

    def __len__(self) -> int:
        return len(self.consumers)

    # -- datasets -----------------------------------------------------------------------------------------------------

    def has_dataset(self, dataset: Digest) -> bool:
        return dataset in self.datasets

    def sizes_of(self, shards: U8) -> Floats:
        """Return the bytes of each shard ``(n, 32)``; 0 for those of no dataset that is reported on."""
        if not len(self.shards):
            return np.zeros(len(shards))
        rows = self.shards.rows_of(shards)
        sizes: Floats = np.where(rows >= 0, self.sizes[rows], 0.0)
        return sizes

    def grown(self, shards: U8) -> Grown:
        """Return what ``add_dataset`` takes its time for. From any thread, while the needs stay in use."""
        before = self.shards
        rows = before.rows_of(shards)
        new = rows < 0
        rows[new] = np.arange(len(before), len(before) + int(new.sum()))
        after = DigestRows(np.concatenate([before.digests, shards[new]])) if new.any() else before
        return Grown(before, after, rows)

    def add_dataset(
        self, dataset: Digest, shards: U8, sizes: Floats, held: Mask, mine: Mask, grown: Grown | None = None
    ) -> None:
        """Add a dataset's shards: digests ``(n, 32)``, bytes, which are held here, and which are mine to fetch.

        ``grown``: what ``grown(shards)`` returned a moment ago.
        """
        if grown is None or grown.before is not self.shards:  # another dataset came or went meanwhile
            grown = self.grown(shards)
        slots = grown.slots
        new = len(grown.after) - len(self.sizes)
        self.shards = grown.after
        self.sizes = np.concatenate([self.sizes, np.zeros(new)])
        self.held = np.concatenate([self.held, np.zeros(new, bool)])
        self.counts = np.concatenate([self.counts, np.zeros(new, np.int32)])
        self.ties = np.concatenate([self.ties, self._chance.random(new) / 2])
        self.sizes[slots] = sizes
        self.held[slots] = held
        self.shown = self.shards, self.counts
        share = float(sizes[mine].sum() / max(sizes.sum(), 1.0))
        self.datasets[dataset] = DatasetNeeds(slots, mine, share, float(sizes.max(initial=1.0)))

    def set_mine(self, dataset: Digest, mine: Mask) -> None:
        """The ring changed: other shards are mine to fetch."""
        it = self.datasets[dataset]
        sizes = self.sizes[it.slots]
        it.mine, it.mine_share = mine, float(sizes[mine].sum() / max(sizes.sum(), 1.0))
        for consumer in self.consumers.values():
            if consumer.dataset == dataset:
                consumer.left_mine = np.where(mine, consumer.left, 0.0)
                consumer.local_bytes = float(consumer.left_mine @ self.present()[it.slots])

    def forget_unused(self) -> None:
        """Forget datasets that nobody reports on. Called now and then; what is read again is added again."""
        if all(it.consumers for it in self.datasets.values()):
            return
        kept = {name: it for name, it in self.datasets.items() if it.consumers}
        used = np.zeros(len(self.shards), bool)
        for it in kept.values():
            used[it.slots] = True
        place = np.cumsum(used) - 1
        self.shards = self.shards.only(used)
        self.sizes, self.held, self.ties = self.sizes[used], self.held[used], self.ties[used]
        self.counts = self.counts[used]
        for it in kept.values():
            it.slots = place[it.slots]
        self.datasets = kept
        self.shown = self.shards, self.counts

    # -- consumers ----------------------------------------------------------------------------------------------------

    def report(
        self, dataset: Digest, report: Report, now: float, *, client: str = "", group: bytes | None = None
    ) -> bool:
        """Take a consumer's report, which replaces its last one; return whether there is a place for it here.

        ``client``: the address that it came from. ``group``: consumers of one count once; by default it is its own.
        Who loses its place for it is forgotten.
        """
        lease = Lease(dataset, len(report.left), now, report.lease_seconds, client)
        lost = self.leases.take(report.consumer, lease)
        for name in [report.consumer] if lost is None else lost:
            self._forget(name)
        if lost is None:
            return False
        it = self.datasets[dataset]
        left = report.left * (self.sizes[it.slots] / FULL)
        left_mine = np.where(it.mine, left, 0.0)
        local_bytes = float(left_mine @ self.present()[it.slots])
        soon = np.asarray(report.soon, np.int64)
        of = Group(report.consumer if group is None else group, dataset)
        pending = report.left > 0
        before = self.consumers.get(report.consumer)
        new = Consumer(report.consumer, of, report, now, left, pending, left_mine, local_bytes, soon)
        self.consumers[report.consumer] = new
        it.consumers += 1
        # Counted before the last report is uncounted: in between nobody may find a shard not needed.
        self._recount(of, report.consumer, new)
        if before is not None:
            if before.group != of:
                self._recount(before.group, before.name, None)
            self.datasets[before.dataset].consumers -= 1
        return True

    def leave(self, consumer: bytes) -> None:
        """Forget a consumer that is done."""
        self.leases.leave(consumer)
        self._forget(consumer)

    def expire(self, now: float) -> None:
        """Forget the consumers whose lease has expired."""
        for consumer in self.leases.expire(now):
            self._forget(consumer)

    def _forget(self, consumer: bytes) -> None:
        gone = self.consumers.pop(consumer, None)
        if gone is not None:
            self._recount(gone.group, consumer, None)
            self.datasets[gone.dataset].consumers -= 1

    def _recount(self, group: Group, consumer: bytes, now: Consumer | None) -> None:
        """Count a group's needs with a consumer's new report, or without it."""
        members = self._groups.setdefault(group, {})
        before = _union(members.values())
        if now is not None:
            members[consumer] = now
        else:
            members.pop(consumer, None)
        after = _union(members.values())
        slots = self.datasets[group.dataset].slots
        if after is not None:
            self.counts[slots] += after
        else:
            del self._groups[group]
        if before is not None:
            self.counts[slots] -= before

    # -- what is held, and what is decided ----------------------------------------------------------------------------

    def arrived(self, shard: Digest) -> None:
        self._mark(shard, True)

    def gone(self, shard: Digest) -> None:
        self._mark(shard, False)

    def _mark(self, shard: Digest, held: bool) -> None:
        slot = self.shards.get(shard)
        if slot is not None:
            self.held[slot] = held

    def commit(self, decision: Decision) -> None:
        """Carry a decision from now on: its shard is coming, what it evicts is gone, and who starves is charged."""
        self.commitments.add(decision)
        self.charge(decision)

    def charge(self, decision: Decision) -> None:
        """A decision is carried out: count it to the consumers that it evicts for, and let a fixed order take turns."""
        self.ordered_is_next = not decision.ordered
        for name in decision.starving:
            consumer = self.consumers.get(name)
            if consumer is not None:
                consumer.evictions_left -= 1

    def end(self, recipe: Recipe) -> None:
        """A fetch ended, whatever came of it: what is held by then was told by ``arrived`` and ``gone``."""
        self.commitments.end(recipe)

    # -- what follows -------------------------------------------------------------------------------------------------

    def needed(self, shard: Digest) -> bool | None:
        """Whether some group needs a shard; ``None`` for one of a dataset that nobody reports on."""
        shards, counts = self.shown
        slot = shards.get(shard)
        return None if slot is None else bool(counts[slot] > 0)

    def needed_of(self, shards: U8) -> npt.NDArray[np.int8]:
        """Return of many shards ``(n, 32)`` what ``needed`` says of each: 1, 0, and -1 where nobody said."""
        known, counts = self.shown
        slots = known.rows_of(shards)
        if not len(counts):
            return np.full(len(shards), -1, np.int8)
        return np.where(slots < 0, -1, counts[slots] > 0).astype(np.int8)

    def present(self) -> Mask:
        """Return a new mask, by slot, of what is held here and is not going to be evicted."""
        present = self.held.copy()
        present[self.slots_of(self.commitments.evicting)] = False
        return present

    def slots_of(self, shards: Collection[Digest]) -> Ints:
        """Return the slots of those of some shards that have one."""
        if not shards:
            return np.zeros(0, np.int64)
        slots = self.shards.rows_of(as_rows(shards))
        return slots[slots >= 0]

    def seen_by(self, consumer: bytes) -> U8:
        """Return by shard of the consumer's dataset: 0 for what is not held here, else 1 + how many others need it."""
        it = self.consumers[consumer]
        slots = self.datasets[it.dataset].slots
        members = self._groups[it.group]
        own = it.pending if len(members) == 1 else _union(members.values())
        others = self.counts[slots] - (it.pending if own is None else own)
        held = self.present()[slots]
        seen: U8 = np.where(held, 1 + np.minimum(others, 254), 0).astype(np.uint8)
        return seen


def _union(members: Iterable[Consumer]) -> Mask | None:
    """Return which shards any of these consumers of one dataset needs; ``None`` if there are none."""
    union: Mask | None = None
    for it in members:
        union = it.pending if union is None else union | it.pending
    return union
