"""What to fetch next, and what to evict for it: decided from the needs of all consumers. Pure.

    fetch   just in time, for consumers with a short runway, since waiting lets more of them share a read; of the shards
            that those need, the one that most groups need
    evict   what nobody needs; a needed shard only if a consumer would starve, and then the one with most left to read
            (reading it again costs a whole shard, however little is left)

Nothing is fetched for a consumer that stopped reporting because it is suspended or dead; what it needs still counts
until its lease expires. So consumers of one dataset share one stream of reads without knowing of one another, as
DESIGN.md section 7 requires. The rules were chosen by simulation: ``bench/simulation.py`` runs this module.

``decide`` changes nothing. Its caller carries out each decision exactly: ``Needs.commit`` makes later decisions count
on it, the store evicts what it names, and ``Needs.end`` records that the fetch ended, successfully or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from quiver.digest import Digest
from quiver.residency.commitments import Decision, Recipe
from quiver.residency.consumers import Consumer, DatasetNeeds, Mask
from quiver.residency.eviction import EMPTY_SHELF, SEVERAL, Candidates, OnBehalf, Shelf
from quiver.residency.needs import Needs
from quiver.residency.origin_estimate import OriginEstimate
from quiver.residency.planned import Limits, Planner

LOW_SHARDS: Final = 1.25  # runway of the fastest consumer below which the next shard is fetched
STARVING_SHARDS: Final = 0.25  # runway, at the end of a fill, below which a needed shard may be evicted
SILENT_REPORTS: Final = 3.0  # report intervals without a report, after which nothing is fetched for a consumer
REPORT_SECONDS_MAX: Final = 1.0  # between two reports of a consumer with a long runway
ORIGIN_SHARE: Final = 0.8  # of the origin's measured bandwidth that decisions rely on
NOT_KNOWN: Final = OriginEstimate()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Situation:
    """What decisions are based on beside the needs: a snapshot."""

    now: float
    free_bytes: float  # room that is free and not promised to a shard that is coming
    fetches_max: int
    origin: OriginEstimate = NOT_KNOWN
    # What is held; of it, what nobody needs may be evicted. Called only if a wanted shard does not fit.
    shelf: Callable[[], Shelf] = lambda: EMPTY_SHELF
    on_behalf: Mapping[Digest, OnBehalf] = field(default_factory=dict)  # by dataset; others: several
    only: bytes | None = None  # fetch for this consumer alone, if each fetches for itself
    may_not_force: Set[bytes] = frozenset()  # consumers for which no needed shard is evicted
    left_out: Set[Digest] = frozenset()  # datasets of which no more can be fetched for now
    avoid: Set[Recipe] = frozenset()  # recipes that are not fetched for now, nor counted as coming
    # Bytes that a dataset's needed shards may take, by dataset; one that is not named may take all. A hook for sharing
    # the cache: nothing sets it today.
    shares: Mapping[Digest, float] = field(default_factory=dict)


def decide(needs: Needs, situation: Situation) -> list[Decision]:
    """Return what to fetch now, the most urgent first, each with everything to evict for it."""
    chosen: list[Decision] = []
    ahead = _Round(needs, situation)
    while len(chosen) < situation.fetches_max:
        decision = ahead.next()
        if decision is None:
            break
        chosen.append(decision)
        ahead.assume(decision)
    return chosen


class _Hungry(NamedTuple):
    """A consumer that needs a fetch now. ``starving``: its runway would not last until the fetch ends."""

    consumer: Consumer
    missing: Mask
    starving: bool


class _Runway(NamedTuple):
    """Bytes that a consumer has ahead of it now: resident in all; of what is mine, resident and absent."""

    ahead: float
    local: float
    absent: float


class _Room(NamedTuple):
    """How to make room for one shard."""

    evict: tuple[int, ...]  # positions on the shelf
    missing_bytes: float  # still missing then; 0: there is enough


class _Round:
    """The decisions of one round, each taken as if the earlier ones were carried out."""

    def __init__(self, needs: Needs, situation: Situation) -> None:
        self._needs = needs
        self._situation = situation
        self._present = needs.present()
        self._present[needs.slots_of(_coming(needs, situation.avoid))] = True
        self._free_bytes = situation.free_bytes
        self._ordered_is_next = needs.ordered_is_next
        self._forced: Counter[bytes] = Counter()  # in this round, by consumer
        self._blocked = _blocked(needs, situation.avoid)
        self._votes, self._tie = needs.votes(), 1 / needs.largest_group
        self._future = needs.future(situation.now, situation.origin.fill_seconds, self._present, situation.free_bytes)

    def assume(self, decision: Decision) -> None:
        """Proceed as if a decision were carried out."""
        needs = self._needs
        self._present[needs.shards[decision.shard]] = True
        if decision.evict:
            gone = self._shelf.rows_of(decision.evict).tolist()
            self._candidates.take(gone)
            if self._future is not None:
                self._unplanned.take(gone)
        # What is evicted beyond the shard's own bytes is not free yet: another fetch may end first.
        self._free_bytes -= max(decision.size_bytes - self._bytes_of(decision.evict), 0.0)
        self._present[needs.slots_of_files(decision.evict)] = False
        self._forced.update(decision.starving)
        self._ordered_is_next = not decision.ordered

    def next(self) -> Decision | None:
        hungry, in_order = self._hungry()
        starving = [it for it in hungry if it.starving]
        best = self._most_needed(starving or hungry)
        # Shards that are next in a fixed order take turns with the rest, and never evict what is needed.
        following = next(filter(None, (self._with_room(*wanted, ordered=True) for wanted in in_order)), None)
        following = following or self._planned()
        if best is None or (following is not None and self._ordered_is_next):
            return following
        return self._with_room(*best) or self._smaller(starving or hungry) or self._forcing(starving) or following

    @cached_property
    def _shelf(self) -> Shelf:
        return self._situation.shelf()

    @cached_property
    def _candidates(self) -> Candidates:
        commitments = self._needs.commitments
        return Candidates(self._shelf, without=[*commitments.evicting, *commitments.coming])

    @cached_property
    def _unplanned(self) -> Candidates:
        """The eviction candidates that nobody will use, as far as is known."""
        assert self._future is not None
        commitments = self._needs.commitments
        slots = self._needs.shown.slots_of(self._shelf.digests)
        keep: Mask = np.logical_or.reduce((slots >= 0) & np.isfinite(self._future.first)[slots], axis=1)
        return Candidates(self._shelf, without=[*commitments.evicting, *commitments.coming], keep=keep)

    # -- known uses ---------------------------------------------------------------------------------------------------

    def _planned(self) -> Decision | None:
        """Return the decision to fetch a shard for the consumers whose uses to come are known."""
        needs, situation, future = self._needs, self._situation, self._future
        if future is None:
            return None
        consumers = [needs.consumers[name] for name in future.names if name in needs.consumers]
        may_fetch = {it.name for it in consumers if self._is_heard(it) and situation.only in (None, it.name)}
        absent, datasets = np.zeros(len(needs.sizes), bool), list[tuple[Digest, Mask]]()
        for name in dict.fromkeys(it.dataset for it in consumers):
            if name not in situation.left_out and not self._has_its_share(name):
                slots = needs.datasets[name].slots
                its = np.zeros(len(absent), bool)
                its[slots[self._absent(name, self._present[slots])]] = True
                absent |= its
                datasets.append((name, its))

        def dataset_of(slot: int) -> Digest:
            return next(name for name, its in datasets if its[slot])

        swap = Planner(needs, future, situation.now, situation.origin).next(
            Limits(
                absent=absent,
                dataset_of=dataset_of,
                present=self._present,
                short_of=lambda slot: self._room_unplanned(slot, dataset_of(slot)).missing_bytes,
                may_fetch=may_fetch,
                may_evict=lambda name: self._may_force(needs.consumers[name]),
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
            self._names(self._room_unplanned(swap.slot, swap.dataset).evict) + victims,
            forced,
            (swap.consumer,) if forced else (),
            ordered=True,
        )

    def _room_unplanned(self, slot: int, dataset: Digest) -> _Room:
        """Return how to make room for a shard by evicting what nobody will use."""
        short = float(self._needs.sizes[slot]) - self._free_bytes
        if short <= 0:
            return _Room((), 0.0)
        evict, freed = self._unplanned.most(short, self._situation.on_behalf.get(dataset, SEVERAL))
        return _Room(tuple(evict), max(short - freed, 0.0))

    # -- room ---------------------------------------------------------------------------------------------------------

    def _with_room(self, slot: int, dataset: Digest, *, ordered: bool = False) -> Decision | None:
        """Return the decision to fetch a shard, evicting what nobody needs; ``None`` if that frees too little."""
        room = self._room(slot, dataset)
        if room.missing_bytes > 0:
            return None
        shard, evict = self._needs.shards.name(slot), self._names(room.evict)
        return Decision(shard, dataset, float(self._needs.sizes[slot]), evict, ordered=ordered)

    def _smaller(self, hungry: Sequence[_Hungry]) -> Decision | None:
        """Return the decision to fetch a smaller shard that fits: it evicts nothing needed, and uses idle room."""
        most_bytes = self._free_bytes + self._candidates.most(np.inf)[1]
        fitting = self._most_needed(hungry, most_bytes)
        return self._with_room(*fitting) if fitting is not None else None

    def _forcing(self, starving: Sequence[_Hungry]) -> Decision | None:
        """Return the decision to fetch a shard for starving consumers in place of needed ones, charged to them."""
        starving = [it for it in starving if self._may_force(it.consumer)]
        best = self._most_needed(starving)
        if best is None:
            return None
        slot, dataset = best
        without = self._with_room(slot, dataset)
        if without is not None:
            return without
        room = self._room(slot, dataset)
        unneeded = self._names(room.evict)
        victims = self._victims(room.missing_bytes)
        if not victims:
            return None
        forced = tuple(self._needs.file_of(victim) for victim in victims)
        on_behalf = [it for it in starving if it.missing[self._dataset(it).slots == slot].any()]
        return Decision(
            self._needs.shards.name(slot),
            dataset,
            float(self._needs.sizes[slot]),
            unneeded + forced,
            forced,
            tuple(it.consumer.name for it in on_behalf),
        )

    def _room(self, slot: int, dataset: Digest) -> _Room:
        short = float(self._needs.sizes[slot]) - self._free_bytes
        if short <= 0:
            return _Room((), 0.0)
        evict, freed = self._candidates.most(short, self._situation.on_behalf.get(dataset, SEVERAL))
        return _Room(tuple(evict), max(short - freed, 0.0))

    def _names(self, positions: Sequence[int]) -> tuple[Digest, ...]:
        return tuple(self._shelf.name(at) for at in positions)

    def _bytes_of(self, digests: Collection[Digest]) -> float:
        """Return the bytes of these shards: from the shelf, or from the needs for those not on it."""
        if not digests:
            return 0.0
        shelf, needs = self._shelf, self._needs
        rows = shelf.rows_of(digests)
        others = set(digests) - {shelf.name(at) for at in rows.tolist()}
        known = {needs.file_of(slot): needs.sizes[slot] for slot in needs.slots_of_files(others).tolist()}
        return float(shelf.sizes[rows].sum() + sum(known.values()))

    def _may_force(self, it: Consumer) -> bool:
        return it.evictions_left > self._forced[it.name] and it.name not in self._situation.may_not_force

    def _victims(self, bytes_wanted: float) -> list[int]:
        """Return needed slots to evict: of the shards with the fewest votes, the one with most bytes left to read."""
        needs = self._needs
        may_go = needs.held & self._present & ~self._spared() & (needs.counts > 0)
        held = np.flatnonzero(may_go & (needs.sizes >= bytes_wanted))
        if not len(held):
            return []
        votes = needs.votes_of_files()
        least = held[votes[held] == votes[held].min()]
        left = np.zeros(len(needs.sizes))
        for it in needs.consumers.values():
            left[needs.datasets[it.dataset].slots] += it.left
        return [int(least[np.argmax(left[least])])]

    def _spared(self) -> Mask:
        """Return what starving consumers need: none of it is evicted for another starving consumer.

        A shard just fetched for one consumer has most left in it, and few need it. If the next starving consumer had it
        evicted, and so on, shards would replace one another before they are read, and no consumer would progress.
        A consumer that reads alone replaces its own shards.
        """
        needs = self._needs
        spared = np.zeros(len(needs.sizes), bool)
        reading = [it for it in needs.consumers.values() if it.is_reading]
        for it in reading if len(reading) > 1 else ():
            slots = needs.datasets[it.dataset].slots
            runway = self._runway(it, self._present[slots], it.pending)
            if self._is_heard(it) and max(runway.ahead, runway.local) <= self._little(it):
                spared[slots[it.pending]] = True
        return spared

    # -- who wants what -----------------------------------------------------------------------------------------------

    def _most_needed(self, hungry: Sequence[_Hungry], bytes_max: float = np.inf) -> tuple[int, Digest] | None:
        """Return the missing slot of at most ``bytes_max`` that has most votes, and its dataset."""
        needs = self._needs
        best: tuple[float, int, Digest] | None = None
        missing: dict[Digest, Mask] = {}
        for it in hungry:
            name = it.consumer.dataset
            missing[name] = missing[name] | it.missing if name in missing else it.missing
        for name, mask in missing.items():
            slots = needs.datasets[name].slots[mask]
            slots = slots[needs.sizes[slots] <= bytes_max]
            if not len(slots):
                continue
            scores = self._votes[slots] + self._tie * needs.ties[slots]
            at = int(np.argmax(scores))
            if best is None or scores[at] > best[0]:
                best = float(scores[at]), int(slots[at]), name
        return best[1:] if best is not None else None

    def _hungry(self) -> tuple[list[_Hungry], list[tuple[int, Digest]]]:
        """Return the consumers that need a fetch now, and the slots that those with a fixed order need next."""
        needs, situation = self._needs, self._situation
        reading = [it for it in needs.consumers.values() if it.is_reading]
        fastest = max((it.report.rate for it in reading if self._is_heard(it)), default=0.0)
        here = {name: self._present[it.slots] for name, it in needs.datasets.items()}
        absent = {name: self._absent(name, here[name]) for name in needs.datasets}
        hungry: list[_Hungry] = []
        in_order: list[tuple[int, Digest]] = []
        for it in reading:
            if not self._is_heard(it) or it.dataset in situation.left_out:
                continue
            if situation.only is not None and it.name != situation.only:
                continue
            if self._has_its_share(it.dataset):
                continue
            if it.order is not None:
                continue  # see ``_planned``
            dataset = needs.datasets[it.dataset]
            if it.report.ordered:
                wanted = it.soon[absent[it.dataset][it.soon]][:1]
                in_order += [(slot, it.dataset) for slot in dataset.slots[wanted].tolist()]
                continue
            missing = it.pending & absent[it.dataset]
            if not missing.any():
                continue
            runway = self._runway(it, here[it.dataset], missing)
            if len(reading) == 1 or _is_low(it, dataset, runway, fastest, situation.origin):
                hungry.append(_Hungry(it, missing, runway.ahead <= self._little(it)))
        return hungry, in_order

    def _absent(self, name: Digest, here: Mask) -> Mask:
        """Return which shards of a dataset are mine to fetch: neither here, coming, nor on disk pending eviction."""
        it = self._needs.datasets[name]
        absent: Mask = it.mine & ~here & ~self._needs.held[it.slots]
        if name in self._blocked:
            absent &= ~self._blocked[name][it.slots]
        return absent

    def _runway(self, it: Consumer, here: Mask, missing: Mask) -> _Runway:
        local = float(it.left_mine @ here)
        read_since = it.report.rate * (self._situation.now - it.reported_at)
        ahead = it.report.ahead_bytes + (local - it.local_bytes) - read_since
        mine_since = read_since * self._needs.datasets[it.dataset].mine_share
        return _Runway(ahead, local - mine_since, float(it.left_mine @ missing))

    def _little(self, it: Consumer) -> float:
        """Return the runway below which a consumer starves: a shard fetched now arrives one fill later."""
        shard_bytes = self._needs.datasets[it.dataset].shard_bytes
        return STARVING_SHARDS * shard_bytes + it.report.rate * self._situation.origin.fill_seconds

    def _is_heard(self, it: Consumer) -> bool:
        """Whether a consumer reported recently. The progress of a silent one is unknown."""
        pause = max(self._situation.origin.report_seconds, REPORT_SECONDS_MAX)
        return self._situation.now - it.reported_at <= SILENT_REPORTS * pause

    def _has_its_share(self, name: Digest) -> bool:
        """Whether a dataset's needed shards, here or coming, take all the bytes that they may."""
        if name not in self._situation.shares:
            return False
        slots = self._needs.datasets[name].slots
        taken = self._needs.sizes[slots][self._present[slots] & (self._needs.counts[slots] > 0)].sum()
        return bool(taken + self._needs.datasets[name].shard_bytes > self._situation.shares[name])

    def _dataset(self, it: _Hungry) -> DatasetNeeds:
        return self._needs.datasets[it.consumer.dataset]


def _is_low(it: Consumer, dataset: DatasetNeeds, runway: _Runway, fastest: float, origin: OriginEstimate) -> bool:
    """Return whether a consumer's runway is short, in all and of what is mine."""
    rate = it.report.rate
    if rate <= 0:
        return runway.ahead < LOW_SHARDS * dataset.shard_bytes
    low_seconds = max(LOW_SHARDS * dataset.shard_bytes / fastest, origin.fill_seconds) + origin.report_seconds
    if runway.ahead < rate * low_seconds and runway.local < rate * low_seconds * dataset.mine_share:
        return True
    if origin.rate <= 0 or dataset.mine_share <= 0:
        return False
    # The latest time to begin: with a slow origin, fetches must start early enough to finish within the epoch.
    mine_rate = rate * dataset.mine_share
    seconds = (runway.local + runway.absent) / mine_rate if mine_rate > 0 else np.inf
    return bool(seconds - runway.absent / (origin.rate * ORIGIN_SHARE) < low_seconds)


def _coming(needs: Needs, avoid: Set[Recipe]) -> set[Digest]:
    """Return what is coming by reported datasets. Others do not count: any client can have them filled."""
    return {it.shard for it in needs.commitments if it.dataset in needs.datasets and it not in avoid}


def _blocked(needs: Needs, avoid: Set[Recipe]) -> dict[Digest, Mask]:
    """Return by dataset which slots may not be fetched by its manifest, if there are any."""
    by_dataset: dict[Digest, list[Digest]] = {}
    for recipe in avoid:
        if recipe.dataset in needs.datasets:
            by_dataset.setdefault(recipe.dataset, []).append(recipe.shard)
    blocked = {}
    for name, shards in by_dataset.items():
        mask = np.zeros(len(needs.sizes), bool)
        mask[needs.slots_of(shards)] = True
        blocked[name] = mask
    return blocked
