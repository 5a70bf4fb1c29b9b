"""What to fetch for consumers whose uses to come are known, and what to evict for it. Pure.

    fetch   what is used first, just in time for the origin's bandwidth; into idle room at once
    admit   a shard only if, up to some moment, it saves nine tenths of its own bytes more than what it replaces would
            have saved: otherwise its samples are read by themselves, and nothing is evicted
    evict   what saves least, and of that what is used last

With whole uses (a shard that is read in one go) this is Belady's rule (1966) with bypass: what is evicted is used later
than what is admitted. Where each sample of a shard is used at another time of the epoch, as in a full shuffle, all
shards are worth about the same, a fetched one only pays for itself in an epoch, and the best is to keep a fixed set.

A needed shard is evicted only if all who need it are such consumers, and only so often until the next report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from quiver.cached import cached_property
from quiver.digest import Digest
from quiver.residency.commitments import Decision
from quiver.residency.consumers import Ints, Mask
from quiver.residency.eviction import Candidates
from quiver.residency.future import PAYS_BACK, Future
from quiver.residency.hunger import Hunger
from quiver.residency.needs import Needs
from quiver.residency.origin_estimate import OriginEstimate
from quiver.residency.room import Making, Room
from quiver.residency.situation import Situation

LOW_SHARDS: Final = 1.5  # time for this many shards, by which a fetch ends before its shard is used
ORIGIN_SHARE: Final = 0.9  # of the origin's measured bandwidth that decisions rely on
VICTIMS_MAX: Final = 8  # for one shard
CONSIDERED_MAX: Final = 256  # of the shards that are used next


class Swap(NamedTuple):
    """Fetch the shard of ``slot`` in place of those of ``victims``, on behalf of ``consumer``."""

    slot: int
    dataset: Digest
    victims: tuple[int, ...]
    consumer: bytes


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Limits:
    """What the planned decisions of one round must keep to.

    ``absent``: by slot, what may be fetched. ``dataset_of``: a slot's dataset. ``present``: by slot, what is here or
    coming, less what is evicted or must stay. ``short_of``: the bytes by which a slot's shard does not fit into free
    room. ``may_fetch``, ``may_evict``: whether a shard may be fetched, and a needed one evicted, for a consumer.
    """

    absent: Mask
    dataset_of: Callable[[int], Digest]
    present: Mask
    short_of: Callable[[int], float]
    may_fetch: Set[bytes]
    may_evict: Callable[[bytes], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Planner:
    """The planned decisions of one round."""

    needs: Needs
    future: Future
    now: float
    origin: OriginEstimate

    def next(self, limits: Limits) -> Swap | None:
        """Return what to fetch now, ``None`` for nothing."""
        needs, future = self.needs, self.future
        slots = self.paying(limits.absent, limits.may_fetch)
        if not len(slots):
            return None
        short = np.asarray([limits.short_of(slot) for slot in slots.tolist()])
        if (short <= 0).any():
            return self._swap(int(slots[np.argmax(short <= 0)]), (), limits)
        residents = np.flatnonzero(self._evictable(limits.present))
        worth = future.profit_absent[slots] > 0
        slots, short = slots[worth], short[worth]
        if not len(residents) or not len(slots):
            return None
        density = future.profit[residents] / np.maximum(needs.sizes[residents], 1.0)
        some = residents[np.lexsort((-future.first[residents], density))[:VICTIMS_MAX]]
        freed, lost = np.cumsum(needs.sizes[some]), np.cumsum(future.profit[some])
        count = np.minimum(np.searchsorted(freed, short), len(some) - 1)
        admitted = (freed[count] >= short) & (future.profit_absent[slots] > lost[count])
        if not admitted.any() or not self._is_time(slots[admitted]):
            return None
        for at in np.flatnonzero(admitted).tolist():
            swap = self._swap(int(slots[at]), tuple(some[: int(count[at]) + 1].tolist()), limits)
            if self._may(swap, limits):
                return swap
        return None

    def _swap(self, slot: int, victims: tuple[int, ...], limits: Limits) -> Swap:
        return Swap(slot, limits.dataset_of(slot), victims, self._consumer(slot))

    def _may(self, swap: Swap, limits: Limits) -> bool:
        return not (self.needs.counts[list(swap.victims)] > 0).any() or limits.may_evict(swap.consumer)

    def _consumer(self, slot: int) -> bytes:
        return self.future.names[int(self.future.first_by[slot])]

    def paying(self, absent: Mask, may_fetch: Set[bytes]) -> Ints:
        """Return the absent slots that are used next, the first first, without those that are not worth a read."""
        slots = self._wanted(absent, may_fetch)
        return slots[self.future.total[slots] >= PAYS_BACK * self.needs.sizes[slots]]

    def _wanted(self, absent: Mask, may_fetch: Set[bytes]) -> Ints:
        future = self.future
        may = np.asarray([name in may_fetch for name in future.names], bool)
        slots = np.flatnonzero(absent & np.isfinite(future.first) & may[future.first_by])
        if len(slots) > CONSIDERED_MAX:
            slots = slots[np.argpartition(future.first[slots], CONSIDERED_MAX)[:CONSIDERED_MAX]]
        wanted: Ints = slots[np.argsort(future.first[slots], kind="stable")]
        return wanted

    def _evictable(self, present: Mask) -> Mask:
        """Return which slots may be evicted for a planned fetch: held, and needed by no consumer with other needs."""
        needs = self.needs
        found: Mask = needs.held & present & self.future.in_plan & (needs.counts_of_files() == needs.counts)
        for it in needs.consumers.values():
            if it.order is None:
                found[needs.datasets[it.dataset].slots[it.pending]] = False
        return found

    def _is_time(self, slots: Ints) -> bool:
        """Return whether a fetch must begin now so that all of these end in time, one after the other."""
        needs, origin = self.needs, self.origin
        deadlines = self.future.until_first(self.now)[slots]
        sizes = needs.sizes[slots]
        rate = max((needs.consumers[it].report.pace for it in self.future.names if it in needs.consumers), default=0.0)
        ahead = LOW_SHARDS * float(sizes.max()) / rate if rate > 0 else np.inf
        slack = deadlines - ahead - origin.fill_seconds - origin.report_seconds
        if origin.rate > 0:
            slack -= (np.cumsum(sizes) - sizes) / (origin.rate * ORIGIN_SHARE)
        return bool((slack <= 0).any())


class Planned:
    """The decisions of one round for consumers whose uses to come are known, each for its dataset's share if any."""

    def __init__(self, needs: Needs, situation: Situation, room: Room, hunger: Hunger) -> None:
        self._needs, self._situation, self._room, self._hunger = needs, situation, room, hunger
        fill_seconds = situation.origin.fill_seconds
        self._future = needs.future(situation.now, fill_seconds, room.present, room.free_bytes)

    def assume(self, decision: Decision) -> None:
        """Proceed as if a decision were carried out."""
        if decision.evict and self._future is not None:
            self._unused.take(self._room.shelf.rows_of(decision.evict).tolist())

    def next(self) -> Decision | None:
        """Return the decision to fetch a shard, ``None`` for none."""
        needs, situation, future = self._needs, self._situation, self._future
        if future is None:
            return None
        consumers = [needs.consumers[name] for name in future.names if name in needs.consumers]
        may_fetch = {it.name for it in consumers if self._hunger.is_heard(it) and situation.only in (None, it.name)}
        absent: dict[Digest, Mask] = {}
        for name in dict.fromkeys(it.dataset for it in consumers):
            if name not in situation.left_out and not self._room.has_its_share(name):
                absent[name] = np.zeros(len(needs.sizes), bool)
                absent[name][needs.datasets[name].slots[self._room.absent(name)]] = True
        planner, division = Planner(needs, future, situation.now, situation.origin), self._room.division
        may_go = self._room.present & ~self._room.pinned
        if division is None:
            return self._swapping(planner, absent, may_go, may_fetch)
        for name in sorted(absent, key=division.excess):
            yielding = may_go & division.yields_to(name, float(needs.datasets[name].shard_bytes))
            found = self._swapping(planner, {name: absent[name]}, yielding, may_fetch)
            found = found or self._growing(planner, name, absent[name], may_fetch)
            if found is not None:
                return found
        return None

    def _swapping(
        self, planner: Planner, absent: Mapping[Digest, Mask], may_go: Mask, may_fetch: Set[bytes]
    ) -> Decision | None:
        """Return the decision to fetch a shard of ``absent``, which is by dataset, in place of what ``may_go``."""
        needs = self._needs

        def dataset_of(slot: int) -> Digest:
            return next(name for name, its in absent.items() if its[slot])

        short: dict[Digest, tuple[float, float]] = {}  # the smallest size that did not fit, and what it lacked

        def short_of(slot: int) -> float:
            dataset, size_bytes = dataset_of(slot), float(needs.sizes[slot])
            if dataset in short and size_bytes >= short[dataset][0]:  # all that may go was not enough for less
                return short[dataset][1] + size_bytes - short[dataset][0]
            missing_bytes = self._making(slot, dataset).missing_bytes
            if missing_bytes > 0:
                short[dataset] = size_bytes, missing_bytes
            return missing_bytes

        swap = planner.next(
            Limits(
                absent=np.logical_or.reduce([np.zeros(len(needs.sizes), bool), *absent.values()]),
                dataset_of=dataset_of,
                present=may_go,
                short_of=short_of,
                may_fetch=may_fetch,
                may_evict=lambda name: self._room.may_force(needs.consumers[name]),
            )
        )
        if swap is None:
            return None
        victims = tuple(needs.file_of(slot) for slot in swap.victims)
        forced = tuple(needs.file_of(slot) for slot in swap.victims if needs.counts[slot] > 0)
        return Decision(
            needs.shards.name(swap.slot),
            swap.dataset,
            float(needs.sizes[swap.slot]),
            self._room.names(self._making(swap.slot, swap.dataset).evict) + victims,
            forced,
            (swap.consumer,) if forced else (),
            ordered=True,
        )

    def _growing(self, planner: Planner, dataset: Digest, absent: Mask, may_fetch: Set[bytes]) -> Decision | None:
        """Return the decision to fetch the next shard of a dataset below its share, from the excess of others."""
        division = self._room.division
        assert division is not None
        if division.excess(dataset) >= 0:
            return None
        slots = planner.paying(absent, may_fetch)
        if not len(slots) or not division.has_room_for(dataset, float(self._needs.sizes[slots[0]])):
            return None
        return self._room.from_others(int(slots[0]), dataset, (), ordered=True)

    def _making(self, slot: int, dataset: Digest) -> Making:
        """Return how to make room for a shard by evicting what nobody will use, as far as is known."""
        return self._room.making(slot, dataset, among=self._unused)

    @cached_property
    def _unused(self) -> Candidates:
        """The eviction candidates that nobody will use, as far as is known."""
        assert self._future is not None
        slots = self._needs.shown.slots_of(self._room.shelf.digests)
        keep: Mask = np.logical_or.reduce((slots >= 0) & np.isfinite(self._future.first)[slots], axis=1)
        return self._room.candidates(keep)
