"""How the room of one cache is divided among the datasets that are read: which may take from which. Pure.

Within one dataset need decides what is evicted. Between datasets a share decides, which a policy gave to each: reading
ranks are no reason to take room from another dataset, and neither is it that its shards were idle for longer, since
what a job has read is what its next epoch finds. A dataset's *excess* is what it holds, needed or not, beyond its
share. A fetch takes from datasets with an excess, the largest first, its own included; a needed shard only if its own
dataset's excess stays smaller than that of the one it takes from. So shards move one way until the shares are met, and
then stay.

A dataset whose share is less than a shard, as where all of the cache is worth more elsewhere, still needs room for what
it is reading: its share is at least its largest shard, or an equal part of a room that is too small for one of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from quiver.digest import Digest
from quiver.residency.consumers import Floats, Ints, Mask
from quiver.residency.needs import Needs

ROUNDED: Final = 0.5  # of a shard, that a dataset may have beyond its share, or lack
NOBODY: Final = -1  # whose shard it is: of no dataset that is read


def with_floors(shares: Mapping[Digest, float], floors: Mapping[Digest, float]) -> dict[Digest, float]:
    """Return shares of the same sum, none below its floor, or below an equal part.

    ``floors``: of each dataset; one that has no share has nothing but its floor.
    """
    room = sum(shares.values())
    if not floors or room <= 0:
        return dict.fromkeys(floors, 0.0)
    most = room / len(floors)
    least = {name: min(floor, most) for name, floor in floors.items()}
    given = {name: max(shares.get(name, 0.0), floor) for name, floor in least.items()}
    beyond = sum(given[name] - least[name] for name in given)
    kept = (room - sum(least.values())) / beyond if beyond > 0 else 0.0
    if kept >= 1:
        return given
    return {name: least[name] + (given[name] - least[name]) * kept for name in given}


class _Summed(NamedTuple):
    """By number of dataset: its excess, with nobody's last; the bytes that it has yet to take; the largest first.

    ``owners``: by slot.
    """

    excess: Floats
    claims: Floats
    largest: Ints
    owners: Ints


class Division:
    """The shares of one round of decisions, and what each dataset holds of the cache as the round proceeds."""

    def __init__(self, needs: Needs, present: Mask, shares: Mapping[Digest, float]) -> None:
        """``present``: by slot, what is here or coming. Whoever changes it calls ``changed``."""
        self._needs = needs
        self._present = present
        read = {name: it.shard_bytes for name, it in needs.datasets.items() if it.consumers}
        self._shares = with_floors(shares, read)
        self._names = list(self._shares)
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._held: dict[Digest, float] = {}
        self._summed: _Summed | None = None

    def changed(self) -> None:
        """What is here or coming changed."""
        self._held.clear()
        self._summed = None

    def excess(self, name: Digest, plus_bytes: float = 0.0) -> float:
        """Return by how much a dataset would hold more than its share, if it held so many bytes more."""
        if name not in self._held:
            slots = self._needs.datasets[name].slots
            self._held[name] = float(self._needs.sizes[slots][self._present[slots]].sum())
        return self._held[name] + plus_bytes - self._shares.get(name, 0.0)

    def has_room_for(self, name: Digest, size_bytes: float) -> bool:
        """Whether a dataset may hold a shard more by its share, which is rounded to whole shards."""
        return self.excess(name, size_bytes) <= ROUNDED * size_bytes

    def free_for(self, name: Digest, size_bytes: float, free_bytes: float) -> float:
        """Return how many of the free bytes a dataset may take for a shard: not what others have yet to take.

        Else a dataset that reads fast would fill the room that a slow one needs now and then, and have its shards
        evicted for it unread.
        """
        if self.has_room_for(name, size_bytes):
            return free_bytes
        number, claims = self.number(name), self._sums.claims
        claimed = float(claims.sum()) - (float(claims[number]) if number != NOBODY else 0.0)
        return max(free_bytes - claimed, 0.0)

    def holds_nothing(self, name: Digest) -> bool:
        slots = self._needs.datasets[name].slots
        return not self._present[slots].any()

    @property
    def owners(self) -> Ints:
        """By slot, the number of the dataset that a shard counts for; of several the one with the least excess."""
        return self._sums.owners

    def owners_of_files(self, slots: Ints) -> Ints:
        """Return the same for files, by their slots under each name ``(n, keys)``, -1 for none."""
        if not len(self._needs.sizes):
            return np.full(len(slots), NOBODY, np.int64)
        owners = np.where(slots >= 0, self.owners[slots], NOBODY)
        best: Ints = owners[np.arange(len(owners)), np.argmin(self._sums.excess[owners], axis=1)]
        return best

    @property
    def _sums(self) -> _Summed:
        """What concerns all datasets. A round asks for it often, and there may be a thousand of them."""
        if self._summed is None:
            needs, names = self._needs, self._names
            excess = np.asarray([self.excess(name) for name in names] + [np.inf])  # the last one is nobody's
            shards = np.asarray([needs.datasets[name].shard_bytes for name in names])
            largest = np.argsort(-excess[:-1], kind="stable")
            owners = np.full(len(needs.sizes), NOBODY, np.int64)
            for number in largest.tolist():
                owners[needs.datasets[names[number]].slots] = number
            claims = np.maximum(-(excess[:-1] + ROUNDED * shards), 0.0)
            self._summed = _Summed(excess, claims, largest, owners)
        return self._summed

    def number(self, name: Digest) -> int:
        return self._numbers.get(name, NOBODY)

    def take(self, name: Digest, size_bytes: float, short: float, owners: Ints, sizes: Sequence[float]) -> list[int]:
        """Choose from files that nobody needs which to evict so that a shard of a dataset fits; return their places.

        ``size_bytes``: of the shard; ``short``: the bytes to free. ``owners``, ``sizes`` ``(n,)``: of the files, in the
        order in which one dataset's are evicted. What is chosen may free too little.
        """
        chosen: list[int] = []
        queues = {int(owner): np.flatnonzero(owners == owner).tolist()[::-1] for owner in np.unique(owners)}
        own = self.number(name)
        excess = {number: self.excess(self._names[number]) for number in queues if number != NOBODY}
        excess[own] = self.excess(name, size_bytes)
        excess[NOBODY] = np.inf
        while short > 0:
            having = [number for number, queue in queues.items() if queue and (excess[number] > 0 or number == own)]
            if not having:
                break
            # Its own come last unless it is beyond its share itself.
            number = max(having, key=lambda it: (excess[it] > 0, excess[it]))
            at = queues[number].pop()
            chosen.append(at)
            excess[number] -= sizes[at]
            short -= sizes[at]
        return chosen

    def yields_to(self, name: Digest, size_bytes: float) -> Mask:
        """Return, by slot, what a dataset may replace by a shard of this size: its own, and the excess of others."""
        found: Mask = self.owners == self.number(name)
        for its in self.takes_from(name, size_bytes):
            found |= its
        return found

    def takes_from(self, name: Digest, size_bytes: float) -> Iterable[Mask]:
        """Yield, by slot, the shards of each dataset that must yield needed shards to one of this size, in turn."""
        own, sums = self.excess(name, size_bytes), self._sums
        for number in sums.largest.tolist():
            excess = float(sums.excess[number])
            if excess <= 0 or own + ROUNDED * size_bytes > excess:
                return
            if number != self.number(name):
                yield self.owners == number
