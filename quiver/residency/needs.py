"""How many consumers need each shard: the state on which decisions are based. Pure.

Every rank of every job is a *consumer*. Under a lease (``leases``) it reports how much of each shard it still has to
read this epoch, how much of that is resident, and how fast it reads. The consumers of one *group*, the trials of a
sweep, count once, however many of them need a shard; any other consumer is a group of its own, also each rank of a job:
ranks read different samples, so each needs what it needs. The reports determine, by shard, how many groups need it, and
how many bytes of it are left to read. A group's *vote* for a shard is the part of its consumers that need it.

Each daemon decides on its own, for the shards whose first owner in the ring it is (*mine*). The store says what is
*held*, by ``arrived`` and ``gone``; ``commitments`` says what is coming, and what is evicted for it.

Datasets of different sharing domains must not meet: one domain's report is answered as if no other one existed. So a
dataset is added with its domain's *key*, and a digest XOR this key is the *name* of a manifest or shard here. The same
file has another name in each domain: it is held, needed and fetched in each by itself. What is evicted is the file, and
so gone under all its names. Without a key (a folder, a daemon without tokens) names are digests. Whoever chooses keys
keeps them secret: who knew two could choose a digest that has another domain's name.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quiver.digest import DIGEST_BYTES, Digest
from quiver.lookup import DigestRows, as_rows
from quiver.residency.commitments import Commitments, Decision, Recipe
from quiver.residency.consumers import U8, Consumer, DatasetNeeds, Floats, Group, Ints, Mask, Members
from quiver.residency.future import Future, FutureCache, Shards
from quiver.residency.leases import Lease, Leases
from quiver.residency.orders import FixedOrder, Orders
from quiver.residency.report import CONSUMER_BYTES, FULL, ConsumerReport


class Grown(NamedTuple):
    """The slots of all shards including a new dataset's, which of them are that dataset's ``(n,)``, and its key."""

    before: DigestRows
    after: DigestRows
    slots: Ints
    key: U8 | None = None


class Shown(NamedTuple):
    """What other threads may look at: parts that belong together."""

    shards: DigestRows
    counts: npt.NDArray[np.int32]
    held: Mask
    keys: tuple[U8 | None, ...]

    def slots_of(self, files: U8) -> Ints:
        """Return the slots ``(n, keys)`` of files ``(n, 32)`` under each name, -1 for none."""
        slots = np.full((len(files), len(self.keys)), -1, np.int64)
        for number, key in enumerate(self.keys):
            slots[:, number] = self.shards.rows_of(named(files, key))
        return slots

    def needed(self, slots: Ints) -> npt.NDArray[np.int8]:
        """Return ``Needs.needed`` of files, given their slots: 1, 0, and -1 for unknown.

        A domain has no say about a file that it does not hold: keeping it would not spare that domain a fill.
        """
        if not len(self.counts):
            return np.full(len(slots), -1, np.int8)
        has_say = slots >= 0
        has_say[:, 1:] &= self.held[slots[:, 1:]]
        needed: npt.NDArray[np.int8] = np.where(has_say, self.counts[slots] > 0, -1).max(axis=1).astype(np.int8)
        return needed

    def counted(self, files: U8) -> tuple[Ints, Mask]:
        """Return how many groups need each file ``(n, 32)``, and whether anybody reports on it: as ``needed`` does."""
        if not len(self.counts):
            return np.zeros(len(files), np.int64), np.zeros(len(files), bool)
        slots = self.slots_of(files)
        has_say = slots >= 0
        has_say[:, 1:] &= self.held[slots[:, 1:]]
        counts: Ints = np.where(has_say, self.counts[slots], 0).sum(axis=1).astype(np.int64)
        known: Mask = np.any(has_say, axis=1)
        return counts, known


class Needs:
    """All consumers that report here, and the shards of their datasets, each by its *slot*.

    Belongs to one thread; others may call ``needed``, ``needed_of``, ``sizes_of`` and ``grown``.
    """

    def __init__(self, seed: int = 0, leases: Leases | None = None) -> None:
        self.leases = leases if leases is not None else Leases()
        self.orders = Orders()
        self.commitments = Commitments()
        self.datasets: dict[Digest, DatasetNeeds] = {}
        self.consumers: dict[bytes, Consumer] = {}
        self.shards = DigestRows(np.zeros((0, DIGEST_BYTES), np.uint8))  # the slot of each
        # By slot.
        self.sizes = np.zeros(0)
        self.held = np.zeros(0, bool)
        self.counts = np.zeros(0, np.int32)  # of groups that need it
        self.ties = np.zeros(0)  # less than a half: breaks ties at random
        self.key_of = np.zeros(0, np.int16)  # the number of the key by which it is named
        self.keys: tuple[U8 | None, ...] = (None,)  # of all domains whose datasets are known; the first is no key
        self.ordered_is_next = False  # whether a consumer with a fixed order has the next turn
        self._chance = np.random.default_rng(seed)
        self._futures = FutureCache()
        self._groups: dict[Group, Members] = {}
        self.shown = self._shown()  # for other threads

    def __len__(self) -> int:
        return len(self.consumers)

    # -- datasets -----------------------------------------------------------------------------------------------------

    def has_dataset(self, dataset: Digest) -> bool:
        return dataset in self.datasets

    @property
    def manifests(self) -> set[Digest]:
        """The digests of the manifests of all datasets, whatever their domains."""
        return {self._digest(name, it.key) for name, it in self.datasets.items()}

    def sizes_of(self, shards: U8) -> Floats:
        """Return the bytes of each shard ``(n, 32)``, by name; 0 for a shard of no reported dataset."""
        if not len(self.shards):
            return np.zeros(len(shards))
        rows = self.shards.rows_of(shards)
        sizes: Floats = np.where(rows >= 0, self.sizes[rows], 0.0)
        return sizes

    def grown(self, shards: U8, key: U8 | None = None) -> Grown:
        """Return the slow part of ``add_dataset``. Any thread may call it, while the needs stay in use.

        ``key`` ``(32,)``: of the shards' domain; their names are their digests XOR this.
        """
        before = self.shards
        rows = before.rows_of(shards)
        new = rows < 0
        rows[new] = np.arange(len(before), len(before) + int(new.sum()))
        after = DigestRows(np.concatenate([before.digests, shards[new]])) if new.any() else before
        return Grown(before, after, rows, key)

    def add_dataset(  # noqa: PLR0913 - the columns of one table
        self,
        dataset: Digest,
        shards: U8,
        sizes: Floats,
        held: Mask,
        mine: Mask,
        grown: Grown | None = None,
        *,
        samples: npt.ArrayLike | None = None,
    ) -> None:
        """Add a dataset's shards: names ``(n, 32)``, bytes, which are held here, and which this daemon fetches.

        ``grown``: a recent result of ``grown(shards, key)``, for the domain that has this key; by default without one.
        ``samples`` ``(n,)``: how many samples each has; by default one.
        """
        if grown is None or grown.before is not self.shards:  # another dataset was added or removed meanwhile
            grown = self.grown(shards, grown.key if grown is not None else None)
        slots = grown.slots
        new = len(grown.after) - len(self.sizes)
        self.shards = grown.after
        self.sizes = np.concatenate([self.sizes, np.zeros(new)])
        self.held = np.concatenate([self.held, np.zeros(new, bool)])
        self.counts = np.concatenate([self.counts, np.zeros(new, np.int32)])
        self.ties = np.concatenate([self.ties, self._chance.random(new) / 2])
        self.key_of = np.concatenate([self.key_of, np.zeros(new, np.int16)])
        number = self._number(grown.key)
        self.sizes[slots] = sizes
        self.held[slots] = held
        self.key_of[slots] = number
        self.shown = self._shown()
        share = float(sizes[mine].sum() / max(sizes.sum(), 1.0))
        sample_bytes = sizes / np.maximum(np.asarray(samples, np.int64), 1) if samples is not None else sizes
        self.datasets[dataset] = DatasetNeeds(slots, mine, share, float(sizes.max(initial=1.0)), sample_bytes, number)

    def _number(self, key: U8 | None) -> int:
        """Return the number of a key, new or not."""
        for number, known in enumerate(self.keys):
            if known is key or (known is not None and key is not None and np.array_equal(known, key)):
                return number
        self.keys = (*self.keys, key)
        return len(self.keys) - 1

    def set_mine(self, dataset: Digest, mine: Mask) -> None:
        """Set which shards this daemon fetches, after the ring changed."""
        it = self.datasets[dataset]
        sizes = self.sizes[it.slots]
        it.mine, it.mine_share = mine, float(sizes[mine].sum() / max(sizes.sum(), 1.0))
        for consumer in self.consumers.values():
            if consumer.dataset == dataset:
                consumer.left_mine = np.where(mine, consumer.left, 0.0)
                consumer.local_bytes = float(consumer.left_mine @ self.present()[it.slots])

    def forget_unused(self) -> None:
        """Forget datasets that no consumer reports on. Called periodically; one that is read again is added again."""
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
        numbers = sorted({0, *(it.key for it in kept.values())})
        self.keys = tuple(self.keys[number] for number in numbers)
        self.key_of = np.searchsorted(numbers, self.key_of[used]).astype(np.int16)
        for it in kept.values():
            it.slots = place[it.slots]
            it.key = numbers.index(it.key)
        self.datasets = kept
        self.shown = self._shown()

    # -- consumers ----------------------------------------------------------------------------------------------------

    def report(
        self, dataset: Digest, report: ConsumerReport, now: float, *, client: str = "", group: bytes | None = None
    ) -> bool:
        """Take a consumer's report, which replaces its last one; return whether it got a lease.

        ``client``: the address that it came from. ``group``: its consumers count once; by default those whose reports
        name the same group, else the consumer alone. Consumers that lose their lease for it are forgotten.
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
        of = Group(group_named(report) if group is None else group, dataset)
        pending = report.left > 0
        before = self.consumers.get(report.consumer)
        order = self._order(dataset, report, client)
        report = replace(report, uses=None)
        new = Consumer(report.consumer, of, report, now, left, pending, left_mine, local_bytes, soon, order)
        self.consumers[report.consumer] = new
        it.consumers += 1
        it.holds += report.hold
        it.known += order is not None
        # Count the new report before removing the last one: in between no thread may see a needed shard as not needed.
        self._recount(of, report.consumer, new)
        if before is not None:
            if before.group != of:
                self._recount(before.group, before.name, None)
            self._uncount(before)
        elif new.is_reading:
            self._end_holds(new)
        return True

    def _end_holds(self, new: Consumer) -> None:
        """End the holds for the sake of a consumer that begins, if it needs nothing beyond them: it resumes that job.

        From now on it says itself what it needs. Else what it has read would be kept until the hold expires.
        """
        if not self.datasets[new.dataset].holds:
            return
        holds = [it for it in self.consumers.values() if it.report.hold and it.dataset == new.dataset]
        for hold in holds:
            if not (new.pending & ~hold.pending).any():
                self.leave(hold.name)

    def is_planned(self, dataset: Digest) -> bool:
        """Whether all uses to come are known of each consumer that reads a dataset, and there is one."""
        it = self.datasets.get(dataset)
        return it is not None and it.is_planned

    def _uncount(self, gone: Consumer) -> None:
        """Count a consumer, or its last report, no longer among those of its dataset."""
        of = self.datasets[gone.dataset]
        of.consumers -= 1
        of.holds -= gone.report.hold
        of.known -= gone.order is not None

    def wants_order(self, consumer: bytes) -> bool:
        """Whether a consumer should send the list of its uses to come: it is not known here, and there is room."""
        it = self.consumers.get(consumer)
        if it is None or not it.report.order or it.order is not None:
            return False
        return self.orders.has_room_for(consumer, it.report.order)

    def _order(self, dataset: Digest, report: ConsumerReport, client: str) -> FixedOrder | None:
        """Return the list of uses that a report names, if it is known or comes with it."""
        if not report.order:
            self.orders.drop(report.consumer)
            return None
        known = self.orders.get(report.consumer, dataset, report.order)
        if known is not None or report.uses is None:
            return known
        order = FixedOrder(dataset, report.order, report.uses, client)
        lost = self.orders.put(report.consumer, order)
        for name in lost or ():
            loser = self.consumers.get(name)
            if loser is not None and loser.order is not None:
                loser.order = None
                self.datasets[loser.dataset].known -= 1
        return order if lost is not None else None

    def leave(self, consumer: bytes) -> None:
        """Forget a consumer that has finished."""
        self.leases.leave(consumer)
        self._forget(consumer)

    def expire(self, now: float) -> None:
        """Forget the consumers whose lease has expired."""
        for consumer in self.leases.expire(now):
            self._forget(consumer)

    def _forget(self, consumer: bytes) -> None:
        gone = self.consumers.pop(consumer, None)
        self.orders.drop(consumer)
        if gone is not None:
            self._recount(gone.group, consumer, None)
            self._uncount(gone)

    def _recount(self, group: Group, consumer: bytes, now: Consumer | None) -> None:
        """Count a group's needs with a consumer's new report, or without it."""
        members = self._groups.setdefault(group, Members())
        before = members.pending
        if now is not None:
            members.put(now)
        else:
            members.remove(consumer)
        after = members.pending
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
        """Commit a decision: its shard counts as coming, its evictions as gone, and starving consumers are charged."""
        self.commitments.add(decision)
        self.charge(decision)

    def charge(self, decision: Decision) -> None:
        """Charge a decision to the consumers that it evicts for, and switch turns between fixed order and the rest."""
        self.ordered_is_next = not decision.ordered
        for name in decision.starving:
            consumer = self.consumers.get(name)
            if consumer is not None:
                consumer.evictions_left -= 1

    def end(self, recipe: Recipe) -> None:
        """End a fetch, successful or not: ``arrived`` and ``gone`` have reported what is held by then."""
        self.commitments.end(recipe)

    # -- what is derived ----------------------------------------------------------------------------------------------

    def future(self, now: float, fill_seconds: float, here: Mask, free_bytes: float) -> Future | None:
        """Return the uses to come that are known; ``None`` if there are none.

        ``here``: by slot, what is held or coming. ``free_bytes``: the room beside that.
        """
        consumers = [it for it in self.consumers.values() if it.order is not None]
        if not consumers:
            return self._futures.of(Shards(self.shards, self.sizes, here, here, 0.0), {}, (), now, fill_seconds)
        mine, in_plan = np.zeros(len(self.sizes), bool), np.zeros(len(self.sizes), bool)
        for it in {it.dataset: self.datasets[it.dataset] for it in consumers}.values():
            mine[it.slots] |= it.mine
            in_plan[it.slots] = True
        room_bytes = free_bytes + float(self.sizes[here & in_plan].sum())
        shards = Shards(self.shards, self.sizes, here, mine, room_bytes)
        return self._futures.of(shards, self.datasets, consumers, now, fill_seconds)

    def needed(self, shard: Digest) -> bool | None:
        """Whether some group needs a shard, by name; ``None`` if no consumer reports on its dataset."""
        shown = self.shown
        slot = shown.shards.get(shard)
        return None if slot is None else bool(shown.counts[slot] > 0)

    def needed_of(self, files: U8) -> npt.NDArray[np.int8]:
        """Return ``needed`` for many files ``(n, 32)``, by any name: 1, 0, and -1 for unknown."""
        shown = self.shown
        return shown.needed(shown.slots_of(files))

    def _shown(self) -> Shown:
        return Shown(self.shards, self.counts, self.held, self.keys)

    def present(self) -> Mask:
        """Return a new mask, by slot, of what is held here and is not about to be evicted."""
        present = self.held.copy()
        present[self.slots_of_files(self.commitments.evicting)] = False
        return present

    def slots_of_files(self, files: Collection[Digest]) -> Ints:
        """Return the slots of files under all their names."""
        if not files:
            return np.zeros(0, np.int64)
        rows = as_rows(files)
        slots = np.concatenate([self.shards.rows_of(named(rows, key)) for key in self.keys])
        return slots[slots >= 0]

    def file_of(self, slot: int) -> Digest:
        """Return the digest of the shard that has a slot."""
        return self._digest(self.shards.name(slot), int(self.key_of[slot]))

    def _digest(self, name: Digest, key: int) -> Digest:
        return Digest(named(as_rows([name]), self.keys[key]).tobytes())

    def files(self) -> U8:
        """Return by slot the digests ``(n, 32)`` of the shards."""
        if len(self.keys) == 1:
            return self.shards.digests
        files = self.shards.digests.copy()
        for number, key in enumerate(self.keys):
            files[self.key_of == number] = named(files[self.key_of == number], key)
        return files

    def counts_of_files(self) -> Ints:
        """Return by slot how many groups need its file, under whatever name."""
        return self._of_files(self.counts).astype(np.int64)

    def votes(self) -> Floats:
        """Return by slot the votes of all groups: ``counts``, but of a sweep only the part that needs the shard.

        So all the trials of a sweep weigh as much as one consumer, and among them what most need comes first.
        """
        votes: Floats = self.counts.astype(np.float64)
        for group, members in self._groups.items():
            if len(members) > 1:
                needing = members.needing
                votes[self.datasets[group.dataset].slots] += needing / len(members) - (needing > 0)
        return votes

    @property
    def largest_group(self) -> int:
        """The number of consumers in the largest group, at least one: votes differ by one over this, or more."""
        return max(map(len, self._groups.values()), default=1)

    def votes_of_files(self) -> Floats:
        """Return by slot the votes for its file, under whatever name."""
        return self._of_files(self.votes())

    def _of_files(self, values: npt.NDArray[np.number[Any]]) -> Floats:
        """Return by slot the sum of what its file's slots have."""
        if len(self.keys) == 1:
            return values.astype(np.float64)
        files = np.ascontiguousarray(self.files())
        _, which = np.unique(files.view(f"S{DIGEST_BYTES}").reshape(-1), return_inverse=True)
        totals: Floats = np.bincount(which, weights=values)[which].astype(np.float64)
        return totals

    def slots_of(self, shards: Collection[Digest]) -> Ints:
        """Return the slots of those of the shards that have one, by name."""
        if not shards:
            return np.zeros(0, np.int64)
        slots = self.shards.rows_of(as_rows(shards))
        return slots[slots >= 0]

    def seen_by(self, consumer: bytes) -> U8:
        """Return per shard of the consumer's dataset 0 if it is not held here, else 1 + how many others need it.

        The other trials of its sweep are others, so that trials cooperate as jobs do.
        """
        it = self.consumers[consumer]
        slots = self.datasets[it.dataset].slots
        members = self._groups[it.group]
        needing = members.needing
        others: Ints = self.counts[slots].astype(np.int64) - (needing > 0)
        if it.report.identity.group and len(members) > 1:
            others = others + needing - it.pending
        held = self.present()[slots]
        seen: U8 = np.where(held, 1 + np.minimum(others, 254), 0).astype(np.uint8)
        return seen


def named(digests: U8, key: U8 | None) -> U8:
    """Return the names of digests ``(n, 32)`` under a domain's key, and as well the digests of names."""
    return digests if key is None else digests ^ key


def group_named(report: ConsumerReport) -> bytes:
    """Return the name of the group that a report belongs to: its tenant's group of that name, else the consumer's own.

    Longer than a consumer's name, so that none is taken for the other.
    """
    said = report.identity
    return f"group {said.tenant}\0{said.group}".encode() + bytes(CONSUMER_BYTES) if said.group else report.consumer
