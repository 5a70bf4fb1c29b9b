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

from collections.abc import Mapping, Sequence

import numpy as np

from quiver.digest import Digest
from quiver.residency.commitments import Decision
from quiver.residency.consumers import Mask
from quiver.residency.hunger import Hunger, Hungry
from quiver.residency.needs import Needs
from quiver.residency.planned import Planned
from quiver.residency.room import Room
from quiver.residency.situation import Situation


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


class _Round:
    """The decisions of one round, each taken as if the earlier ones were carried out."""

    def __init__(self, needs: Needs, situation: Situation) -> None:
        self._needs = needs
        self._situation = situation
        self._room = Room(needs, situation)
        self._ordered_is_next = needs.ordered_is_next
        self._votes, self._tie = needs.votes(), 1 / needs.largest_group
        self._hunger = Hunger(needs, situation.now, situation.origin)
        self._planned = Planned(needs, situation, self._room, self._hunger)

    def assume(self, decision: Decision) -> None:
        """Proceed as if a decision were carried out."""
        self._room.assume(decision)
        self._planned.assume(decision)
        self._ordered_is_next = not decision.ordered

    def next(self) -> Decision | None:
        hungry, in_order = self._hungry()
        # Shards that are next in a fixed order take turns with the rest, and never evict what their dataset needs.
        following = next(filter(None, (self._room.with_room(*wanted, ordered=True) for wanted in in_order)), None)
        following = following or self._planned.next()
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
            return self._room.early(*best)
        return self._room.with_room(*best) or self._smaller(some) or self._forcing(starving)

    def _smaller(self, hungry: Sequence[Hungry]) -> Decision | None:
        """Return the decision to fetch a smaller shard that fits: it evicts nothing needed, and uses idle room."""
        fitting = self._most_needed(hungry, self._room.largest_bytes)
        return self._room.with_room(*fitting) if fitting is not None else None

    def _forcing(self, starving: Sequence[Hungry]) -> Decision | None:
        """Return the decision to fetch a shard for starving consumers in place of needed ones, charged to them."""
        starving = [it for it in starving if self._room.may_force(it.consumer)]
        if self._room.division is not None:
            # A slow origin makes everybody starve by its fills; needed shards evicted for that are reads wasted on it.
            starving = [it for it in starving if it.dry]
        best = self._most_needed(starving)
        if best is None:
            return None
        slot, dataset = best
        without = self._room.with_room(slot, dataset)
        if without is not None:
            return without
        slots = self._needs.datasets[dataset].slots
        on_behalf = tuple(it.consumer.name for it in starving if it.missing[slots == slot].any())
        taken = self._room.from_others(slot, dataset, on_behalf)
        if taken is not None:
            return taken
        # Its own, as the share has it; or what fewest need of all, if there are no shares, or it has nothing here.
        only = None
        if self._room.division is not None and not self._room.division.holds_nothing(dataset):
            only = self._room.division.owners == self._room.division.number(dataset)
        return self._room.in_place_of(slot, dataset, only, on_behalf, self._spared(dataset))

    def _spared(self, dataset: Digest) -> Mask:
        """Return what is not evicted for a starving consumer of this dataset (``Hunger.spared``)."""
        hunger, spared = self._hunger, np.zeros(len(self._needs.sizes), bool)
        if self._room.division is None and sum(len(hunger.reading(name)) for name in hunger.datasets) == 1:
            return spared
        for name in hunger.datasets:
            slots = self._needs.datasets[name].slots
            alone = self._room.division is not None and name == dataset and len(hunger.reading(name)) == 1
            for it in hunger.spared(name, self._room.present[slots], alone=alone):
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
            if name in situation.left_out or self._room.has_its_share(name):
                continue
            dataset = needs.datasets[name]
            here = self._room.present[dataset.slots]
            absent = self._room.absent(name)
            for it in hunger.reading(name):
                if not hunger.is_heard(it) or situation.only not in (None, it.name) or it.order is not None:
                    continue  # for a known order, see ``Planned``
                if it.report.ordered:
                    wanted = it.soon[absent[it.soon]][:1]
                    in_order += [(slot, name) for slot in dataset.slots[wanted].tolist()]
                    continue
                missing = it.pending & absent
                found = hunger.of(it, here, missing) if missing.any() else None
                # Fetching early takes room from others, unless shares say how much.
                if found is not None and (found.low or found.starving or alone or self._room.division is not None):
                    hungry.append(found)
        return hungry, in_order


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
