"""What the readers of a cache still need, and what follows from it: what to fetch next, and what may go. Pure.

Every rank of every job is a *consumer*. It reports how much of each shard it has still to read this epoch, how fast it
reads, and how much of that is resident (its *runway*), under a lease. From the reports alone follow

    fetch   just in time: for consumers whose runway is short, since every moment of patience lets more of them share a
            read; of what those need the shard that most consumers need
    evict   what nobody needs; what is still needed only if a consumer would starve, and then the shard with most left
            in it (a second read costs a whole shard, whatever is left of it)

so that consumers of one dataset share one stream of reads without knowing of one another, as DESIGN.md section 7 wants
it. The rules were chosen by simulation: ``bench/simulation.py`` runs this very module.

A daemon decides for the shards that the ring gives to it first (*mine*), and each daemon for itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from quiver.digest import Digest

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

LOW_SHARDS: Final = 2.0  # runway of the fastest consumer below which the next shard is fetched
STARVING_SHARDS: Final = 0.25  # runway below which a shard that somebody needs may be dropped
ORIGIN_SHARE: Final = 0.8  # of the origin's measured bandwidth that is counted on
FULL: Final = 255  # "all of the shard" in a report
CONSUMERS_MAX: Final = 1024
CONSUMER_BYTES: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """One consumer's word. ``left`` ``(shards,)``: 255ths of each shard that are still to be read, rounded up."""

    consumer: bytes
    left: npt.NDArray[np.uint8]
    rate: float  # bytes a second that the consumer reads while it does not wait; 0: not known yet
    ahead_bytes: float  # of what is left, what is resident as far as the consumer knows
    lease_seconds: float
    soon: tuple[int, ...] = ()  # the order is fixed: these shards are next, in this order
    ordered: bool = False


class Fetch(NamedTuple):
    """A shard to bring in now, of which dataset, and what may be dropped for it although somebody needs it."""

    digest: Digest
    dataset: Digest
    victim: Digest | None


@dataclass(slots=True, eq=False)
class _Dataset:
    slots: Ints  # of each shard
    mine: Mask
    share: float  # of the dataset's bytes, what is mine
    shard_bytes: float  # the largest
    consumers: int = 0


@dataclass(slots=True, eq=False)
class _Consumer:
    dataset: Digest
    report: Report
    left: Floats  # bytes, by shard
    at: float
    local: float  # bytes pending here that were resident when it reported
    soon: list[int] = field(default_factory=list)


class Needs:
    """All consumers known here. Belongs to one thread; ``needed`` alone may be asked from others."""

    def __init__(self, seed: int = 0) -> None:
        self._slots: dict[Digest, int] = {}
        self._names: list[Digest] = []
        self._sizes = np.zeros(0)
        self._held = np.zeros(0, bool)
        self._need = np.zeros(0, np.int32)
        self._tie = np.zeros(0)
        self._chance = np.random.default_rng(seed)
        self._datasets: dict[Digest, _Dataset] = {}
        self._consumers: dict[bytes, _Consumer] = {}
        self._given_up: set[Digest] = set()

    def __len__(self) -> int:
        return len(self._consumers)

    # -- what is known ------------------------------------------------------------------------------------------------

    def knows(self, dataset: Digest) -> bool:
        return dataset in self._datasets

    def add_dataset(self, dataset: Digest, shards: Iterable[Digest], sizes: Floats, held: Mask, mine: Mask) -> None:
        """Learn of a dataset's shards: names, bytes, which are held here, and which are mine to fetch."""
        names = list(shards)
        for name in names:
            if name not in self._slots:
                self._slots[name] = len(self._names)
                self._names.append(name)
        slots = np.fromiter((self._slots[name] for name in names), np.int64, len(names))
        new = len(self._names) - len(self._sizes)
        self._sizes = np.concatenate([self._sizes, np.zeros(new)])
        self._held = np.concatenate([self._held, np.zeros(new, bool)])
        self._need = np.concatenate([self._need, np.zeros(new, np.int32)])
        self._tie = np.concatenate([self._tie, self._chance.random(new) / 2])
        self._sizes[slots] = sizes
        self._held[slots] = held
        share = float(sizes[mine].sum() / max(sizes.sum(), 1.0))
        self._datasets[dataset] = _Dataset(slots, mine, share, float(sizes.max(initial=1.0)))

    def set_mine(self, dataset: Digest, mine: Mask) -> None:
        """The ring changed: other shards are mine to fetch."""
        known = self._datasets[dataset]
        sizes = self._sizes[known.slots]
        known.mine, known.share = mine, float(sizes[mine].sum() / max(sizes.sum(), 1.0))

    def report(self, dataset: Digest, report: Report, now: float) -> bool:
        """Take a consumer's report, which replaces its last one; return whether there is room for it here."""
        self.leave(report.consumer)
        if len(self._consumers) >= CONSUMERS_MAX:
            return False
        known = self._datasets[dataset]
        left = report.left / FULL * self._sizes[known.slots]
        local = float(left[self._held[known.slots] & known.mine].sum())
        self._consumers[report.consumer] = _Consumer(dataset, report, left, now, local, list(report.soon))
        self._need[known.slots] += report.left > 0
        known.consumers += 1
        return True

    def leave(self, consumer: bytes) -> None:
        """Forget a consumer: it is done, its lease ran out, or it reports anew."""
        gone = self._consumers.pop(consumer, None)
        if gone is not None:
            known = self._datasets[gone.dataset]
            self._need[known.slots] -= gone.report.left > 0
            known.consumers -= 1

    def expire(self, now: float) -> None:
        """Forget whose lease ran out: killed, suspended or cut off, they pin nothing any more."""
        for name in [name for name, it in self._consumers.items() if now - it.at > it.report.lease_seconds]:
            self.leave(name)

    def forget(self) -> None:
        """Forget datasets that nobody reads. Called now and then; what is read again is added again."""
        if all(known.consumers for known in self._datasets.values()):
            return
        kept = {name: known for name, known in self._datasets.items() if known.consumers}
        used = np.unique(np.concatenate([np.zeros(0, np.int64), *(known.slots for known in kept.values())]))
        place = np.full(len(self._names), -1, np.int64)
        place[used] = np.arange(len(used))
        self._names = [self._names[slot] for slot in used.tolist()]
        self._slots = {name: slot for slot, name in enumerate(self._names)}
        self._sizes, self._held, self._tie = self._sizes[used], self._held[used], self._tie[used]
        self._need = self._need[used]
        for known in kept.values():
            known.slots = place[known.slots]
        self._datasets = kept

    def arrived(self, digest: Digest) -> None:
        self._mark(digest, True)

    def gone(self, digest: Digest) -> None:
        self._mark(digest, False)
        self._given_up.discard(digest)

    def _mark(self, digest: Digest, held: bool) -> None:
        slot = self._slots.get(digest)
        if slot is not None:
            self._held[slot] = held

    # -- what follows -------------------------------------------------------------------------------------------------

    def needed(self, digest: Digest) -> bool | None:
        """Whether some consumer needs a shard; ``None`` for one of a dataset that nobody reports on."""
        slot = self._slots.get(digest)
        if slot is None:
            return None
        need = self._need
        return bool(slot < len(need) and need[slot] > 0) and digest not in self._given_up

    def seen_by(self, consumer: bytes) -> npt.NDArray[np.uint8]:
        """Return by shard of the consumer's dataset: 0 for what is not held here, else 1 + how many others need it."""
        it = self._consumers[consumer]
        slots = self._datasets[it.dataset].slots
        others = self._need[slots] - (it.report.left > 0)
        seen: npt.NDArray[np.uint8] = np.where(self._held[slots], 1 + np.minimum(others, 254), 0).astype(np.uint8)
        return seen

    def held_bytes(self) -> tuple[float, float]:
        """Return the bytes of the known shards that are held here, and of those what nobody needs."""
        return float(self._sizes[self._held].sum()), float(self._sizes[self._held & (self._need == 0)].sum())

    def fetches(
        self,
        now: float,
        coming: Iterable[Digest],
        free_bytes: float,
        origin: Origin,
        at_most: int,
        *,
        only: bytes | None = None,
    ) -> list[Fetch]:
        """Return what to bring in now, the most urgent first.

        ``coming``: under way already. ``free_bytes``: what can be written without dropping what is needed. ``only``:
        the one consumer whose hunger counts, where everyone fetches for itself.
        """
        self.expire(now)
        present = self._held.copy()
        for digest in coming:
            slot = self._slots.get(digest)
            if slot is not None:
                present[slot] = True
        chosen: list[Fetch] = []
        while len(chosen) < at_most:
            fetch = self._next(now, present, free_bytes, origin, only)
            if fetch is None:
                break
            chosen.append(fetch)
            slot = self._slots[fetch.digest]
            present[slot] = True
            free_bytes -= self._sizes[slot]
            if fetch.victim is not None:
                victim = self._slots[fetch.victim]
                self._given_up.add(fetch.victim)
                present[victim] = False
                free_bytes += self._sizes[victim]
        return chosen

    def _next(self, now: float, present: Mask, free_bytes: float, origin: Origin, only: bytes | None) -> Fetch | None:
        hungry, shortest = self._hungry(now, present, origin, only)
        best: tuple[float, int, Digest] | None = None
        for it, missing in hungry:
            slots = self._datasets[it.dataset].slots[missing]
            if it.report.ordered:  # the first of what comes next, and never at the cost of others
                key, slot = 0.0, int(slots[0])
            else:
                scores = self._need[slots] + self._tie[slots]
                at = int(np.argmax(scores))
                key, slot = float(scores[at]), int(slots[at])
            if best is None or key > best[0]:
                best = key, slot, it.dataset
        if best is None:
            return None
        _, slot, dataset = best
        victim = None
        if self._sizes[slot] > free_bytes:
            victim = self._victim(present, slot) if shortest <= STARVING_SHARDS else None
            if victim is None:
                return None
        return Fetch(self._names[slot], dataset, victim)

    def _hungry(
        self, now: float, present: Mask, origin: Origin, only: bytes | None
    ) -> tuple[list[tuple[_Consumer, Ints]], float]:
        """Return who wants something fetched now, with the shards, and the shortest runway of theirs, in shards."""
        reading = [it for it in self._consumers.values() if it.report.left.any()]
        fastest = max((it.report.rate for it in reading), default=0.0)
        hungry, shortest = [], np.inf
        for it in reading:
            if only is not None and it.report.consumer != only:
                continue
            known = self._datasets[it.dataset]
            here = present[known.slots]
            missing = self._missing(it, known, here)
            if not len(missing):
                continue
            if it.report.ordered:
                hungry.append((it, missing))
                continue
            runway, wanted = self._runway(it, known, here, now, fastest, origin)
            if len(reading) == 1 or wanted:
                hungry.append((it, missing))
                shortest = min(shortest, runway / known.shard_bytes)
        return hungry, shortest

    def _missing(self, it: _Consumer, known: _Dataset, here: Mask) -> Ints:
        if it.report.ordered:
            soon = np.asarray(it.soon, np.int64)
            return soon[~here[soon] & known.mine[soon]]
        return np.flatnonzero((it.report.left > 0) & ~here & known.mine)

    def _runway(
        self, it: _Consumer, known: _Dataset, here: Mask, now: float, fastest: float, origin: Origin
    ) -> tuple[float, bool]:
        """Return the bytes that a consumer has ahead of it by now, and whether that is little."""
        rate, since = it.report.rate, now - it.at
        local = float(it.left[here & known.mine].sum())
        ahead = it.report.ahead_bytes + (local - it.local) - rate * since
        if rate <= 0:
            return ahead, ahead < LOW_SHARDS * known.shard_bytes
        low_seconds = max(LOW_SHARDS * known.shard_bytes / fastest, 2 * origin.fill_seconds) + origin.report_seconds
        local -= rate * since * known.share
        low = ahead < rate * low_seconds and local < rate * low_seconds * known.share
        if not low and origin.rate > 0 and known.share > 0:
            # The latest moment to begin: an origin that is slow must be asked before the end of the epoch needs it.
            missing = float(it.left[~here & known.mine].sum())
            low = (local + missing) / (rate * known.share) - missing / (origin.rate * ORIGIN_SHARE) < low_seconds
        return ahead, low

    def _victim(self, present: Mask, wanted: int) -> Digest | None:
        """Return what to drop although it is needed: of what fewest need, the shard with most left in it."""
        held = np.flatnonzero(self._held & present)
        held = held[(held != wanted) & (self._sizes[held] >= self._sizes[wanted] / 2)]
        if not len(held):
            return None
        least = held[self._need[held] == self._need[held].min()]
        left = np.zeros(len(self._sizes))
        for it in self._consumers.values():
            left[self._datasets[it.dataset].slots] += it.left
        return self._names[int(least[np.argmax(left[least])])]


class Origin(NamedTuple):
    """What is known of where shards come from: bytes a second, seconds a fill takes, and how often reports come."""

    rate: float = 0.0  # 0: not known
    fill_seconds: float = 0.0
    report_seconds: float = 0.5


def rounded_up(left: Ints, counts: Ints) -> npt.NDArray[np.uint8]:
    """Return ``left`` of ``counts`` samples a shard as 255ths: 0 for nothing, and never 0 for something."""
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(counts > 0, left / counts, 0.0)
    exact: npt.NDArray[np.uint8] = np.ceil(np.clip(shares, 0.0, 1.0) * FULL).astype(np.uint8)
    return exact
