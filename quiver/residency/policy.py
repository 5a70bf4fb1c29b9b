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
from typing import Final, NamedTuple

import numpy as np

from quiver.cached import cached_property
from quiver.digest import Digest
from quiver.residency.commitments import Decision, Recipe
from quiver.residency.consumers import U8, Consumer, Ints, Mask
from quiver.residency.division import NOBODY, Division
from quiver.residency.eviction import EMPTY_SHELF, SEVERAL, Candidates, OnBehalf, Shelf
from quiver.residency.hunger import Hunger, Hungry
from quiver.residency.needs import Needs
from quiver.residency.origin_estimate import OriginEstimate
from quiver.residency.planned import Limits, Planner

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
    # Which of these files ``(n, 32)`` must stay, whoever needs room: an operator wants it.
    pinned: Callable[[U8], Mask] = lambda files: np.zeros(len(files), bool)
    # Bytes that a dataset's needed shards may take at most, by dataset; one that is not named may take all.
    shares: Mapping[Digest, float] = field(default_factory=dict)
    # Bytes of this cache that each dataset should have (``division``). Empty: need alone decides between datasets too.
    division: Mapping[Digest, float] = field(default_factory=dict)
    # Seconds of its part of the origin's bandwidth that a dataset has to its credit, where the origin is the limit.
    credit: Mapping[Digest, float] = field(default_factory=dict)


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
        self._hunger = Hunger(needs, situation.now, situation.origin)
        self._division = Division(needs, self._present, situation.division) if situation.division else None
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
        if self._division is not None:
            self._division.changed()
        self._ordered_is_next = not decision.ordered

    def next(self) -> Decision | None:
        hungry, in_order = self._hungry()
        # Shards that are next in a fixed order take turns with the rest, and never evict what their dataset needs.
        following = next(filter(None, (self._with_room(*wanted, ordered=True) for wanted in in_order)), None)
        following = following or self._planned()
        if following is not None and (self._ordered_is_next or not hungry):
            return following
        return (
            next(filter(None, map(self._for_dataset, _by_urgency(hungry, self._situation.credit))), None) or following
        )

    def _for_dataset(self, hungry: list[Hungry]) -> Decision | None:
        """Return the decision to fetch a shard for the hungry consumers of one dataset."""
        starving = [it for it in hungry if it.starving]
        some = starving or hungry
        best = self._most_needed(some)
        if best is None:
            return None
        if not any(it.low or it.starving for it in some):
            return self._early(*best)
        return self._with_room(*best) or self._smaller(some) or self._forcing(starving)

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
        may_fetch = {it.name for it in consumers if self._hunger.is_heard(it) and situation.only in (None, it.name)}
        absent: dict[Digest, Mask] = {}
        for name in dict.fromkeys(it.dataset for it in consumers):
            if name not in situation.left_out and not self._has_its_share(name):
                slots = needs.datasets[name].slots
                absent[name] = np.zeros(len(needs.sizes), bool)
                absent[name][slots[self._absent(name, self._present[slots])]] = True
        planner, division = Planner(needs, future, situation.now, situation.origin), self._division
        if division is None:
            return self._next_of_plan(planner, absent, self._present & ~self._pinned, may_fetch)
        for name in sorted(absent, key=division.excess):
            may_go = self._present & ~self._pinned & division.yields_to(name, float(needs.datasets[name].shard_bytes))
            found = self._next_of_plan(planner, {name: absent[name]}, may_go, may_fetch)
            found = found or self._growing(planner, name, absent[name], may_fetch)
            if found is not None:
                return found
        return None

    def _next_of_plan(
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
            missing_bytes = self._room_unplanned(slot, dataset).missing_bytes
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

    def _growing(self, planner: Planner, dataset: Digest, absent: Mask, may_fetch: Set[bytes]) -> Decision | None:
        """Return the decision to fetch the next shard of a dataset below its share, from the excess of others."""
        assert self._division is not None
        if self._division.excess(dataset) >= 0:
            return None
        slots = planner.paying(absent, may_fetch)
        if not len(slots) or not self._division.has_room_for(dataset, float(self._needs.sizes[slots[0]])):
            return None
        return self._from_others(int(slots[0]), dataset, (), ordered=True)

    def _room_unplanned(self, slot: int, dataset: Digest) -> _Room:
        """Return how to make room for a shard by evicting what nobody will use."""
        return self._room(slot, dataset, unplanned=True)

    # -- room ---------------------------------------------------------------------------------------------------------

    def _with_room(self, slot: int, dataset: Digest, *, ordered: bool = False) -> Decision | None:
        """Return the decision to fetch a shard, evicting what nobody needs; ``None`` if that frees too little."""
        room = self._room(slot, dataset)
        if room.missing_bytes > 0:
            return self._from_others(slot, dataset, (), ordered=True) if ordered else None
        shard, evict = self._needs.shards.name(slot), self._names(room.evict)
        return Decision(shard, dataset, float(self._needs.sizes[slot]), evict, ordered=ordered)

    def _early(self, slot: int, dataset: Digest) -> Decision | None:
        """Return the decision to fetch a shard before it is urgent: within the dataset's share, or for its own."""
        division = self._division
        if division is None or division.has_room_for(dataset, float(self._needs.sizes[slot])):
            return self._with_room(slot, dataset)
        room = self._room(slot, dataset, own=True)
        if not room.evict or room.missing_bytes > 0:
            return None
        evict = self._names(room.evict)
        return Decision(self._needs.shards.name(slot), dataset, float(self._needs.sizes[slot]), evict)

    def _smaller(self, hungry: Sequence[Hungry]) -> Decision | None:
        """Return the decision to fetch a smaller shard that fits: it evicts nothing needed, and uses idle room."""
        most_bytes = self._free_bytes + self._candidates.most(np.inf)[1]
        fitting = self._most_needed(hungry, most_bytes)
        return self._with_room(*fitting) if fitting is not None else None

    def _forcing(self, starving: Sequence[Hungry]) -> Decision | None:
        """Return the decision to fetch a shard for starving consumers in place of needed ones, charged to them."""
        starving = [it for it in starving if self._may_force(it.consumer)]
        if self._division is not None:
            # A slow origin makes everybody starve by its fills; needed shards evicted for that are reads wasted on it.
            starving = [it for it in starving if it.dry]
        best = self._most_needed(starving)
        if best is None:
            return None
        slot, dataset = best
        without = self._with_room(slot, dataset)
        if without is not None:
            return without
        slots = self._needs.datasets[dataset].slots
        on_behalf = tuple(it.consumer.name for it in starving if it.missing[slots == slot].any())
        taken = self._from_others(slot, dataset, on_behalf)
        if taken is not None:
            return taken
        # Its own, as the share has it; or what fewest need of all, if there are no shares, or it has nothing here.
        only = None
        if self._division is not None and not self._division.holds_nothing(dataset):
            only = self._division.owners == self._division.number(dataset)
        return self._in_place_of(slot, dataset, only, on_behalf, self._spared(dataset))

    def _from_others(
        self, slot: int, dataset: Digest, on_behalf: tuple[bytes, ...], *, ordered: bool = False
    ) -> Decision | None:
        """Return the decision to fetch a shard in place of needed ones of a dataset that has more than its share."""
        if self._division is None:
            return None
        for only in self._division.takes_from(dataset, float(self._needs.sizes[slot])):
            decision = self._in_place_of(slot, dataset, only, on_behalf, ~only, ordered=ordered)
            if decision is not None:
                return decision
        return None

    def _in_place_of(
        self,
        slot: int,
        dataset: Digest,
        only: Mask | None,
        on_behalf: tuple[bytes, ...],
        spared: Mask,
        *,
        ordered: bool = False,
    ) -> Decision | None:
        """Return the decision to fetch a shard in place of what nobody needs, and of needed slots among ``only``."""
        room = self._room(slot, dataset)
        victims = self._victims(room.missing_bytes, spared if only is None else spared | ~only)
        if not victims:
            return None
        forced = tuple(self._needs.file_of(victim) for victim in victims)
        shard, size_bytes = self._needs.shards.name(slot), float(self._needs.sizes[slot])
        return Decision(shard, dataset, size_bytes, self._names(room.evict) + forced, forced, on_behalf, ordered)

    def _room(self, slot: int, dataset: Digest, *, own: bool = False, unplanned: bool = False) -> _Room:
        """Return how to make room for a shard by evicting what nobody needs; with ``own``, of its own dataset.

        ``unplanned``: nothing that will be used later, either.
        """
        size_bytes = float(self._needs.sizes[slot])
        free_bytes = self._free_bytes
        if self._division is not None:
            free_bytes = self._division.free_for(dataset, size_bytes, free_bytes)
        short = size_bytes - free_bytes
        if short <= 0:
            return _Room((), 0.0)
        on_behalf = self._situation.on_behalf.get(dataset, SEVERAL)
        candidates = self._unplanned if unplanned else self._candidates
        if self._division is None:
            evict, freed_bytes = candidates.most(short, on_behalf)
        else:
            evict, freed_bytes = self._divided(dataset, size_bytes, short, on_behalf, candidates, own=own)
        return _Room(tuple(evict), max(short - freed_bytes, 0.0))

    def _divided(
        self,
        dataset: Digest,
        size_bytes: float,
        short: float,
        on_behalf: OnBehalf,
        candidates: Candidates,
        *,
        own: bool,
    ) -> tuple[list[int], int]:
        """Return the places on the shelf, and bytes, of what nobody needs and the shares let a dataset evict."""
        assert self._division is not None
        nobody = candidates.nobody
        owners = self._division.owners_of_files(self._shelf_slots[nobody])
        number, strangers = self._division.number(dataset), owners == NOBODY
        may = owners == number if own else np.ones(len(nobody), bool)
        # The share protects the shards of datasets that are read. What nobody reads is divided among the clients.
        if on_behalf.holder is not None and strangers.any():
            may &= ~strangers | np.isin(nobody, candidates.most(np.inf, on_behalf)[0])
        if on_behalf.own_only:
            may &= (self._shelf.holders[nobody] == on_behalf.holder) | (owners == number)
        some = nobody[may]
        sizes = self._shelf.sizes[some]
        chosen = self._division.take(dataset, size_bytes, short, owners[may], sizes.tolist())
        return some[chosen].tolist(), int(sizes[chosen].sum())

    @cached_property
    def _pinned(self) -> Mask:
        """By slot, what must stay."""
        return self._situation.pinned(self._needs.files())

    @cached_property
    def _shelf_slots(self) -> Ints:
        """The slots of the shelf's files under each name ``(n, keys)``."""
        return self._needs.shown.slots_of(self._shelf.digests)

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

    def _victims(self, bytes_wanted: float, spared: Mask) -> list[int]:
        """Return needed slots to evict: of the shards with the fewest votes, the one with most bytes left to read."""
        needs = self._needs
        may_go = needs.held & self._present & ~spared & ~self._pinned & (needs.counts > 0)
        held = np.flatnonzero(may_go & (needs.sizes >= bytes_wanted))
        if not len(held):
            return []
        votes = needs.votes_of_files()
        least = held[votes[held] == votes[held].min()]
        left = np.zeros(len(needs.sizes))
        for it in needs.consumers.values():
            left[needs.datasets[it.dataset].slots] += it.left
        return [int(least[np.argmax(left[least])])]

    def _spared(self, dataset: Digest) -> Mask:
        """Return what is not evicted for a starving consumer of this dataset (``Hunger.spared``)."""
        hunger, spared = self._hunger, np.zeros(len(self._needs.sizes), bool)
        if self._division is None and sum(len(hunger.reading(name)) for name in hunger.datasets) == 1:
            return spared
        for name in hunger.datasets:
            slots = self._needs.datasets[name].slots
            alone = self._division is not None and name == dataset and len(hunger.reading(name)) == 1
            for it in hunger.spared(name, self._present[slots], alone=alone):
                spared[slots[it.pending]] = True
        return spared

    # -- who wants what -----------------------------------------------------------------------------------------------

    def _most_needed(self, hungry: Sequence[Hungry], bytes_max: float = np.inf) -> tuple[int, Digest] | None:
        """Return the missing slot of at most ``bytes_max`` that has most votes, and its dataset: that of all."""
        if not hungry:
            return None
        needs, name = self._needs, hungry[0].consumer.dataset
        slots = needs.datasets[name].slots[np.logical_or.reduce([it.missing for it in hungry])]
        slots = slots[needs.sizes[slots] <= bytes_max]
        if not len(slots):
            return None
        return int(slots[np.argmax(self._votes[slots] + self._tie * needs.ties[slots])]), name

    def _hungry(self) -> tuple[list[Hungry], list[tuple[int, Digest]]]:
        """Return the consumers that need a fetch now, and the slots that those with a fixed order need next."""
        needs, situation, hunger = self._needs, self._situation, self._hunger
        hungry: list[Hungry] = []
        in_order: list[tuple[int, Digest]] = []
        alone = len(hunger.datasets) == 1
        for name in hunger.datasets:
            if name in situation.left_out or self._has_its_share(name):
                continue
            dataset = needs.datasets[name]
            here = self._present[dataset.slots]
            absent = self._absent(name, here)
            for it in hunger.reading(name):
                if not hunger.is_heard(it) or situation.only not in (None, it.name) or it.order is not None:
                    continue  # for a known order, see ``_planned``
                if it.report.ordered:
                    wanted = it.soon[absent[it.soon]][:1]
                    in_order += [(slot, name) for slot in dataset.slots[wanted].tolist()]
                    continue
                missing = it.pending & absent
                found = hunger.of(it, here, missing) if missing.any() else None
                # Fetching early takes room from others, unless shares say how much.
                if found is not None and (found.low or found.starving or alone or self._division is not None):
                    hungry.append(found)
        return hungry, in_order

    def _absent(self, name: Digest, here: Mask) -> Mask:
        """Return which shards of a dataset are mine to fetch: neither here, coming, nor on disk pending eviction."""
        it = self._needs.datasets[name]
        absent: Mask = it.mine & ~here & ~self._needs.held[it.slots]
        if name in self._blocked:
            absent &= ~self._blocked[name][it.slots]
        return absent

    def _has_its_share(self, name: Digest) -> bool:
        """Whether a dataset's needed shards, here or coming, take all the bytes that they may."""
        if name not in self._situation.shares:
            return False
        slots = self._needs.datasets[name].slots
        taken = self._needs.sizes[slots][self._present[slots] & (self._needs.counts[slots] > 0)].sum()
        return bool(taken + self._needs.datasets[name].shard_bytes > self._situation.shares[name])


def _by_urgency(hungry: Sequence[Hungry], credit: Mapping[Digest, float]) -> list[list[Hungry]]:
    """Return the hungry consumers by dataset, the first first: who has most bandwidth to its credit, or least time."""
    by_dataset: dict[Digest, list[Hungry]] = {}
    for it in hungry:
        by_dataset.setdefault(it.consumer.dataset, []).append(it)

    def urgency(name: Digest) -> tuple[bool, float, bool, float]:
        some = by_dataset[name]
        # Where bandwidth is divided, who has some to its credit may use it early: it is spent on nobody's account.
        early = name not in credit and not any(it.low or it.starving for it in some)
        return early, -credit.get(name, 0.0), not any(it.starving for it in some), min(it.seconds for it in some)

    return [by_dataset[name] for name in sorted(by_dataset, key=urgency)]


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
