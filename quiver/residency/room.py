"""What is here and what is free as one round of decisions proceeds, and how to make room for a shard. Pure.

free room first, then what nobody needs; what somebody needs only in place of the excess of a dataset that has more
than its share, or for a consumer that would starve
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence, Set
from typing import NamedTuple

import numpy as np

from quiver.cached import cached_property
from quiver.digest import Digest
from quiver.residency.commitments import Decision, Recipe
from quiver.residency.consumers import Consumer, Ints, Mask
from quiver.residency.division import NOBODY, Division
from quiver.residency.eviction import SEVERAL, Candidates, OnBehalf, Shelf
from quiver.residency.needs import Needs
from quiver.residency.situation import Situation


class Making(NamedTuple):
    """How to make room for one shard by evicting what nobody needs."""

    evict: tuple[int, ...]  # positions on the shelf
    missing_bytes: float  # still missing then; 0: there is enough


class Room:
    """The room of a cache, as if the decisions taken so far were carried out."""

    def __init__(self, needs: Needs, situation: Situation) -> None:
        self._needs, self._situation = needs, situation
        self.present = needs.present()
        """By slot, what is here or coming, less what is evicted."""
        self.present[needs.slots_of(_coming(needs, situation.avoid))] = True
        self.free_bytes = situation.free_bytes
        self.division = Division(needs, self.present, situation.division) if situation.division else None
        self._forced: Counter[bytes] = Counter()  # in this round, by consumer
        self._blocked = _blocked(needs, situation.avoid)

    def assume(self, decision: Decision) -> None:
        """Proceed as if a decision were carried out."""
        needs = self._needs
        self.present[needs.shards[decision.shard]] = True
        if decision.evict:
            self._candidates.take(self.shelf.rows_of(decision.evict).tolist())
        # What is evicted beyond the shard's own bytes is not free yet: another fetch may end first.
        self.free_bytes -= max(decision.size_bytes - self._bytes_of(decision.evict), 0.0)
        self.present[needs.slots_of_files(decision.evict)] = False
        self._forced.update(decision.starving)
        if self.division is not None:
            self.division.changed()

    # -- what there is ------------------------------------------------------------------------------------------------

    @cached_property
    def shelf(self) -> Shelf:
        return self._situation.shelf()

    @cached_property
    def pinned(self) -> Mask:
        """By slot, what must stay."""
        return self._situation.pinned(self._needs.files())

    def absent(self, name: Digest) -> Mask:
        """Return which shards of a dataset are mine to fetch: neither here, coming, nor on disk pending eviction."""
        it = self._needs.datasets[name]
        here = self.present[it.slots]
        absent: Mask = it.mine & ~here & ~self._needs.held[it.slots]
        if name in self._blocked:
            absent &= ~self._blocked[name][it.slots]
        return absent

    def has_its_share(self, name: Digest) -> bool:
        """Whether a dataset's needed shards, here or coming, take all the bytes that they may."""
        if name not in self._situation.shares:
            return False
        slots = self._needs.datasets[name].slots
        taken = self._needs.sizes[slots][self.present[slots] & (self._needs.counts[slots] > 0)].sum()
        return bool(taken + self._needs.datasets[name].shard_bytes > self._situation.shares[name])

    def may_force(self, it: Consumer) -> bool:
        """Whether needed shards may be evicted for a consumer: only so often until it reports again."""
        return it.evictions_left > self._forced[it.name] and it.name not in self._situation.may_not_force

    @property
    def largest_bytes(self) -> float:
        """The bytes of a shard for which there would be room if all that nobody needs were evicted."""
        return self.free_bytes + self._candidates.most(np.inf)[1]

    def candidates(self, keep: Mask | None = None) -> Candidates:
        """Return the eviction candidates that nobody needs, less those that ``keep`` marks: ``(n,)``, of the shelf."""
        commitments = self._needs.commitments
        return Candidates(self.shelf, without=[*commitments.evicting, *commitments.coming], keep=keep)

    @cached_property
    def _candidates(self) -> Candidates:
        return self.candidates()

    # -- decisions ----------------------------------------------------------------------------------------------------

    def with_room(self, slot: int, dataset: Digest, *, ordered: bool = False) -> Decision | None:
        """Return the decision to fetch a shard, evicting what nobody needs; ``None`` if that frees too little."""
        room = self.making(slot, dataset)
        if room.missing_bytes > 0:
            return self.from_others(slot, dataset, (), ordered=True) if ordered else None
        shard, evict = self._needs.shards.name(slot), self.names(room.evict)
        return Decision(shard, dataset, float(self._needs.sizes[slot]), evict, ordered=ordered)

    def early(self, slot: int, dataset: Digest) -> Decision | None:
        """Return the decision to fetch a shard before it is urgent: within the dataset's share, or for its own."""
        division = self.division
        if division is None or division.has_room_for(dataset, float(self._needs.sizes[slot])):
            return self.with_room(slot, dataset)
        room = self.making(slot, dataset, own=True)
        if not room.evict or room.missing_bytes > 0:
            return None
        evict = self.names(room.evict)
        return Decision(self._needs.shards.name(slot), dataset, float(self._needs.sizes[slot]), evict)

    def from_others(
        self, slot: int, dataset: Digest, on_behalf: tuple[bytes, ...], *, ordered: bool = False
    ) -> Decision | None:
        """Return the decision to fetch a shard in place of needed ones of a dataset that has more than its share."""
        if self.division is None:
            return None
        for only in self.division.takes_from(dataset, float(self._needs.sizes[slot])):
            decision = self.in_place_of(slot, dataset, only, on_behalf, ~only, ordered=ordered)
            if decision is not None:
                return decision
        return None

    def in_place_of(
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
        room = self.making(slot, dataset)
        victims = self._victims(room.missing_bytes, spared if only is None else spared | ~only)
        if not victims:
            return None
        forced = tuple(self._needs.file_of(victim) for victim in victims)
        shard, size_bytes = self._needs.shards.name(slot), float(self._needs.sizes[slot])
        return Decision(shard, dataset, size_bytes, self.names(room.evict) + forced, forced, on_behalf, ordered)

    def making(self, slot: int, dataset: Digest, *, own: bool = False, among: Candidates | None = None) -> Making:
        """Return how to make room for a shard by evicting what nobody needs; with ``own``, of its own dataset.

        ``among``: these candidates, if not all.
        """
        size_bytes = float(self._needs.sizes[slot])
        free_bytes = self.free_bytes
        if self.division is not None:
            free_bytes = self.division.free_for(dataset, size_bytes, free_bytes)
        short = size_bytes - free_bytes
        if short <= 0:
            return Making((), 0.0)
        on_behalf = self._situation.on_behalf.get(dataset, SEVERAL)
        candidates = among if among is not None else self._candidates
        if self.division is None:
            evict, freed_bytes = candidates.most(short, on_behalf)
        else:
            evict, freed_bytes = self._divided(dataset, size_bytes, short, on_behalf, candidates, own=own)
        return Making(tuple(evict), max(short - freed_bytes, 0.0))

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
        assert self.division is not None
        nobody = candidates.nobody
        owners = self.division.owners_of_files(self._shelf_slots[nobody])
        number, strangers = self.division.number(dataset), owners == NOBODY
        may = owners == number if own else np.ones(len(nobody), bool)
        # The share protects the shards of datasets that are read. What nobody reads is divided among the clients.
        if on_behalf.holder is not None and strangers.any():
            may &= ~strangers | np.isin(nobody, candidates.most(np.inf, on_behalf)[0])
        if on_behalf.own_only:
            may &= (self.shelf.holders[nobody] == on_behalf.holder) | (owners == number)
        some = nobody[may]
        sizes = self.shelf.sizes[some]
        chosen = self.division.take(dataset, size_bytes, short, owners[may], sizes.tolist())
        return some[chosen].tolist(), int(sizes[chosen].sum())

    @cached_property
    def _shelf_slots(self) -> Ints:
        """The slots of the shelf's files under each name ``(n, keys)``."""
        return self._needs.shown.slots_of(self.shelf.digests)

    def names(self, positions: Sequence[int]) -> tuple[Digest, ...]:
        return tuple(self.shelf.name(at) for at in positions)

    def _bytes_of(self, digests: Collection[Digest]) -> float:
        """Return the bytes of these shards: from the shelf, or from the needs for those not on it."""
        if not digests:
            return 0.0
        shelf, needs = self.shelf, self._needs
        rows = shelf.rows_of(digests)
        others = set(digests) - {shelf.name(at) for at in rows.tolist()}
        known = {needs.file_of(slot): needs.sizes[slot] for slot in needs.slots_of_files(others).tolist()}
        return float(shelf.sizes[rows].sum() + sum(known.values()))

    def _victims(self, bytes_wanted: float, spared: Mask) -> list[int]:
        """Return needed slots to evict: of the shards with the fewest votes, the one with most bytes left to read."""
        needs = self._needs
        may_go = needs.held & self.present & ~spared & ~self.pinned & (needs.counts > 0)
        held = np.flatnonzero(may_go & (needs.sizes >= bytes_wanted))
        if not len(held):
            return []
        votes = needs.votes_of_files()
        least = held[votes[held] == votes[held].min()]
        left = np.zeros(len(needs.sizes))
        for it in needs.consumers.values():
            left[needs.datasets[it.dataset].slots] += it.left
        return [int(least[np.argmax(left[least])])]


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
