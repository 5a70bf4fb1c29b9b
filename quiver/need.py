"""What the readers of a cache still need, and what follows from it: what to fetch next, and what may go. Pure.

Every rank of every job is a *consumer*. It reports how much of each shard it has still to read this epoch, how fast it
reads, and how much of that is resident (its *runway*), under a lease. From the reports alone follow

    fetch   just in time: for consumers whose runway is short, since every moment of patience lets more of them share a
            read; of what those need the shard that most consumers need
    evict   what nobody needs; what is still needed only if a consumer would starve, and then the shard with most left
            in it (a second read costs a whole shard, whatever is left of it)

A consumer that says nothing any more, suspended or killed, wants nothing fetched; what it needs still counts until its
lease runs out. So consumers of one dataset share one stream of reads without knowing of one another, as DESIGN.md
section 7 wants it. The rules were chosen by simulation: ``bench/simulation.py`` runs this very module.

A daemon decides for the shards that the ring gives to it first (*mine*), and each daemon for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from quiver.digest import DIGEST_BYTES, Digest
from quiver.lookup import DigestRows

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
U8 = npt.NDArray[np.uint8]

LOW_SHARDS: Final = 1.25  # runway of the fastest consumer below which the next shard is fetched
STARVING_SHARDS: Final = 0.25  # runway, once a fill is over, below which a shard that somebody needs may be dropped
# One who starves may have been suspended since its last report; then shards would replace one another without end.
DROPS_A_REPORT: Final = 4  # forced ones, for one consumer, until it reports again
SILENT_REPORTS: Final = 3.0  # pauses between two reports after which a consumer is asked for nothing
REPORT_SECONDS_MAX: Final = 1.0  # that a consumer takes between two reports when it has much ahead of it
GIVEN_UP_SECONDS: Final = 30.0  # for which a victim counts as gone: it is dropped once what it is evicted for was read
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


class Grown(NamedTuple):
    """The slots of all shards once a dataset's are among them, and which those are ``(n,)``."""

    before: DigestRows
    after: DigestRows
    slots: Ints


class Fetch(NamedTuple):
    """A shard to fetch now, of which dataset, and what may be dropped for it although somebody needs it.

    ``starving``: the consumers on whose behalf that is dropped.
    """

    digest: Digest
    dataset: Digest
    victim: Digest | None
    starving: tuple[bytes, ...] = ()


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
    pending: Mask  # of which shards something is left
    left_mine: Floats  # as left, of what is mine
    at: float
    local: float  # bytes pending here that were resident when it reported
    soon: Ints
    drops_left: int = DROPS_A_REPORT


@dataclass(slots=True, eq=False)
class _Hungry:
    """A consumer that wants something fetched now. ``starving``: what it has would not last until that is there."""

    consumer: _Consumer
    missing: Mask
    starving: bool


class _Runway(NamedTuple):
    """Bytes that a consumer has ahead of it by now: resident in all, resident of what is mine, absent of it."""

    ahead: float
    local: float
    absent: float


class _Moment(NamedTuple):
    """What a round of decisions is taken by."""

    now: float
    origin: Origin
    only: bytes | None

    def hears(self, it: _Consumer) -> bool:
        """Whether a consumer goes on, as far as is known. Of one that is silent nobody knows how far it is."""
        return self.now - it.at <= SILENT_REPORTS * max(self.origin.report_seconds, REPORT_SECONDS_MAX)


class Needs:
    """All consumers known here. Belongs to one thread; ``needed`` alone may be asked from others."""

    def __init__(self, seed: int = 0) -> None:
        self._shards = DigestRows(np.zeros((0, DIGEST_BYTES), np.uint8))  # the slot of each
        self._sizes = np.zeros(0)
        self._held = np.zeros(0, bool)
        self._need = np.zeros(0, np.int32)
        self._tie = np.zeros(0)
        self._chance = np.random.default_rng(seed)
        self._datasets: dict[Digest, _Dataset] = {}
        self._consumers: dict[bytes, _Consumer] = {}
        self._turn_of_ordered = False
        self._given_up: dict[Digest, float] = {}  # when each victim was chosen, until it is gone
        self._shown = self._shards, self._need  # to other threads, both of one moment
        self.spent: Set[bytes] = frozenset()  # consumers for whom nothing may be dropped that somebody needs
        self.left_out: Set[Digest] = frozenset()  # datasets of which no more can come for now

    def __len__(self) -> int:
        return len(self._consumers)

    # -- what is known ------------------------------------------------------------------------------------------------

    def knows(self, dataset: Digest) -> bool:
        return dataset in self._datasets

    def sizes_of(self, shards: U8) -> Floats:
        """Return the bytes of each shard ``(n, 32)``; 0 of those of no dataset that is known."""
        if not len(self._shards):
            return np.zeros(len(shards))
        rows = self._shards.rows_of(shards)
        sizes: Floats = np.where(rows >= 0, self._sizes[rows], 0.0)
        return sizes

    def grown(self, shards: U8) -> Grown:
        """Return what ``add_dataset`` takes its time for. From any thread, while the needs stay in use."""
        before = self._shards
        rows = before.rows_of(shards)
        new = rows < 0
        rows[new] = np.arange(len(before), len(before) + int(new.sum()))
        after = DigestRows(np.concatenate([before.digests, shards[new]])) if new.any() else before
        return Grown(before, after, rows)

    def add_dataset(
        self, dataset: Digest, shards: U8, sizes: Floats, held: Mask, mine: Mask, grown: Grown | None = None
    ) -> None:
        """Learn of a dataset's shards: names ``(n, 32)``, bytes, which are held here, and which are mine to fetch.

        ``grown``: what ``grown(shards)`` returned a moment ago.
        """
        if grown is None or grown.before is not self._shards:  # another dataset came or went meanwhile
            grown = self.grown(shards)
        slots = grown.slots
        new = len(grown.after) - len(self._sizes)
        self._shards = grown.after
        self._sizes = np.concatenate([self._sizes, np.zeros(new)])
        self._held = np.concatenate([self._held, np.zeros(new, bool)])
        self._need = np.concatenate([self._need, np.zeros(new, np.int32)])
        self._tie = np.concatenate([self._tie, self._chance.random(new) / 2])
        self._sizes[slots] = sizes
        self._held[slots] = held
        self._shown = self._shards, self._need
        share = float(sizes[mine].sum() / max(sizes.sum(), 1.0))
        self._datasets[dataset] = _Dataset(slots, mine, share, float(sizes.max(initial=1.0)))

    def set_mine(self, dataset: Digest, mine: Mask) -> None:
        """The ring changed: other shards are mine to fetch."""
        known = self._datasets[dataset]
        sizes = self._sizes[known.slots]
        known.mine, known.share = mine, float(sizes[mine].sum() / max(sizes.sum(), 1.0))
        for it in self._consumers.values():
            if it.dataset == dataset:
                it.left_mine = np.where(mine, it.left, 0.0)
                it.local = float(it.left_mine @ self._present()[known.slots])

    def report(self, dataset: Digest, report: Report, now: float) -> bool:
        """Take a consumer's report, which replaces its last one; return whether there is room for it here."""
        before = self._consumers.pop(report.consumer, None)
        if len(self._consumers) >= CONSUMERS_MAX:
            return False
        known = self._datasets[dataset]
        pending = report.left > 0
        left = report.left * (self._sizes[known.slots] / FULL)
        left_mine = np.where(known.mine, left, 0.0)
        local = float(left_mine @ self._present()[known.slots])
        soon = np.asarray(report.soon, np.int64)
        self._consumers[report.consumer] = _Consumer(dataset, report, left, pending, left_mine, now, local, soon)
        self._need[known.slots] += pending  # before the last report goes: in between nobody may find it not needed
        known.consumers += 1
        if before is not None:
            self._uncount(before)
        return True

    def leave(self, consumer: bytes) -> None:
        """Forget a consumer: it is done, or its lease ran out."""
        gone = self._consumers.pop(consumer, None)
        if gone is not None:
            self._uncount(gone)

    def _uncount(self, gone: _Consumer) -> None:
        known = self._datasets[gone.dataset]
        self._need[known.slots] -= gone.pending
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
        used = np.zeros(len(self._shards), bool)
        for known in kept.values():
            used[known.slots] = True
        place = np.cumsum(used) - 1
        self._shards = self._shards.only(used)
        self._sizes, self._held, self._tie = self._sizes[used], self._held[used], self._tie[used]
        self._need = self._need[used]
        for known in kept.values():
            known.slots = place[known.slots]
        self._datasets = kept
        self._shown = self._shards, self._need

    def arrived(self, digest: Digest) -> None:
        self._mark(digest, True)

    def gone(self, digest: Digest) -> None:
        self._mark(digest, False)

    def _mark(self, digest: Digest, held: bool) -> None:
        slot = self._shards.get(digest)
        if slot is not None:
            self._held[slot] = held
        self._given_up.pop(digest, None)

    # -- what follows -------------------------------------------------------------------------------------------------

    def needed(self, digest: Digest) -> bool | None:
        """Whether some consumer needs a shard; ``None`` for one of a dataset that nobody reports on."""
        shards, need = self._shown
        slot = shards.get(digest)
        if slot is None:
            return None
        return bool(need[slot] > 0) and digest not in self._given_up

    def needed_of(self, shards: U8) -> npt.NDArray[np.int8]:
        """Return of many shards ``(n, 32)`` what ``needed`` says of each: 1, 0, and -1 where nobody said."""
        known, need = self._shown
        slots = known.rows_of(shards)
        if not len(need):
            return np.full(len(shards), -1, np.int8)
        said: npt.NDArray[np.int8] = np.where(slots < 0, -1, need[slots] > 0).astype(np.int8)
        for digest in list(self._given_up):
            slot = known.get(digest)
            if slot is not None:
                said[slots == slot] = 0
        return said

    def seen_by(self, consumer: bytes) -> npt.NDArray[np.uint8]:
        """Return by shard of the consumer's dataset: 0 for what is not held here, else 1 + how many others need it."""
        it = self._consumers[consumer]
        slots = self._datasets[it.dataset].slots
        others = self._need[slots] - it.pending
        held = self._present()[slots]
        seen: npt.NDArray[np.uint8] = np.where(held, 1 + np.minimum(others, 254), 0).astype(np.uint8)
        return seen

    def held_bytes(self) -> tuple[float, float]:
        """Return the bytes of the known shards that are held here, and of those what may go."""
        may_go = self._held & ((self._need == 0) | ~self._present())
        return float(self._sizes[self._held].sum()), float(self._sizes[may_go].sum())

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
        for digest, since in list(self._given_up.items()):
            if now - since > GIVEN_UP_SECONDS:  # it was not dropped after all
                del self._given_up[digest]
        present = self._present()
        for digest in coming:
            slot = self._shards.get(digest)
            if slot is not None:
                present[slot] = True
        moment = _Moment(now, origin, only)
        chosen: list[Fetch] = []
        while len(chosen) < at_most:
            fetch = self._next(moment, present, free_bytes)
            if fetch is None:
                break
            chosen.append(fetch)
            slot = self._shards[fetch.digest]
            present[slot] = True
            free_bytes -= self._sizes[slot]
            if fetch.victim is not None:
                victim = self._shards[fetch.victim]
                self._given_up[fetch.victim] = now
                present[victim] = False
                free_bytes += self._sizes[victim]
        return chosen

    def _present(self) -> Mask:
        """Return a new mask of what is held here, and will be for as long as somebody needs it."""
        present = self._held.copy()
        for digest in self._given_up:
            slot = self._shards.get(digest)
            if slot is not None:
                present[slot] = False
        return present

    def _next(self, moment: _Moment, present: Mask, free_bytes: float) -> Fetch | None:
        hungry, in_order = self._hungry(moment, present)
        starving = [it for it in hungry if it.starving]
        best = self._most_needed(starving or hungry)
        # What comes next in a fixed order takes turns with the rest, and never goes at the cost of what is needed.
        following = next((it for it in in_order if self._sizes[self._shards[it.digest]] <= free_bytes), None)
        if best is None or (following is not None and self._turn_of_ordered):
            self._turn_of_ordered = False
            return following
        self._turn_of_ordered = True
        slot, dataset = best
        if self._sizes[slot] > free_bytes:  # a smaller one that fits costs no second read, and leaves no room idle
            fitting = self._most_needed(starving or hungry, free_bytes)
            if fitting is None:
                return self._forced(moment, starving, present, free_bytes)
            slot, dataset = fitting
        return Fetch(self._shards.name(slot), dataset, None)

    def _forced(self, moment: _Moment, starving: list[_Hungry], present: Mask, free_bytes: float) -> Fetch | None:
        """Return what to bring in for those who starve at the cost of what is needed, on account of all it is for."""
        starving = [
            it for it in starving if it.consumer.drops_left > 0 and it.consumer.report.consumer not in self.spent
        ]
        best = self._most_needed(starving)
        if best is None:
            return None
        slot, dataset = best
        if self._sizes[slot] <= free_bytes:
            return Fetch(self._shards.name(slot), dataset, None)
        victim = self._victim(present & ~self._spared(moment, present), self._sizes[slot] - free_bytes)
        if victim is None:
            return None
        on_behalf = [it for it in starving if it.missing[self._datasets[it.consumer.dataset].slots == slot].any()]
        for it in on_behalf:
            it.consumer.drops_left -= 1
        return Fetch(self._shards.name(slot), dataset, victim, tuple(it.consumer.report.consumer for it in on_behalf))

    def _most_needed(self, hungry: list[_Hungry], bytes_max: float = np.inf) -> tuple[int, Digest] | None:
        """Return the slot that most need of what some of them miss and fits, and of which dataset it is."""
        best: tuple[float, int, Digest] | None = None
        missing: dict[Digest, Mask] = {}
        for it in hungry:
            name = it.consumer.dataset
            missing[name] = missing[name] | it.missing if name in missing else it.missing
        for name, mask in missing.items():
            slots = self._datasets[name].slots[mask]
            slots = slots[self._sizes[slots] <= bytes_max]
            if not len(slots):
                continue
            scores = self._need[slots] + self._tie[slots]
            at = int(np.argmax(scores))
            if best is None or scores[at] > best[0]:
                best = float(scores[at]), int(slots[at]), name
        return best[1:] if best is not None else None

    def _hungry(self, moment: _Moment, present: Mask) -> tuple[list[_Hungry], list[Fetch]]:
        """Return who wants something fetched now, and what those of a fixed order want next."""
        reading = [it for it in self._consumers.values() if it.pending.any()]
        fastest = max((it.report.rate for it in reading if moment.hears(it)), default=0.0)
        here = {name: present[known.slots] for name, known in self._datasets.items()}
        absent = {name: known.mine & ~here[name] & ~self._held[known.slots] for name, known in self._datasets.items()}
        hungry, in_order = [], []
        for it in reading:
            if not moment.hears(it) or it.dataset in self.left_out:
                continue
            if moment.only is not None and it.report.consumer != moment.only:
                continue
            known = self._datasets[it.dataset]
            if it.report.ordered:
                wanted = it.soon[absent[it.dataset][it.soon]][:1]
                in_order += [Fetch(self._shards.name(slot), it.dataset, None) for slot in known.slots[wanted].tolist()]
                continue
            missing = it.pending & absent[it.dataset]
            if not missing.any():
                continue
            mine = self._runway(it, here[it.dataset], missing, moment.now)
            if len(reading) == 1 or self._low(it, mine, fastest, moment.origin):
                hungry.append(_Hungry(it, missing, mine.ahead <= self._little(it, moment.origin)))
        return hungry, in_order

    def _runway(self, it: _Consumer, here: Mask, missing: Mask, now: float) -> _Runway:
        local = float(it.left_mine @ here)
        read_since = it.report.rate * (now - it.at)
        ahead = it.report.ahead_bytes + (local - it.local) - read_since
        share = self._datasets[it.dataset].share
        return _Runway(ahead, local - read_since * share, float(it.left_mine @ missing))

    def _little(self, it: _Consumer, origin: Origin) -> float:
        """Return the runway with which a consumer starves: what is asked for now comes a fill later."""
        return STARVING_SHARDS * self._datasets[it.dataset].shard_bytes + it.report.rate * origin.fill_seconds

    def _spared(self, moment: _Moment, present: Mask) -> Mask:
        """Return what those need that starve themselves: nothing of it is evicted for another one.

        What was just fetched for one has most left in it, and few need it. If the next one to starve had that evicted,
        and so on in turn, shards would replace one another before they are read, and nobody would get anywhere.
        A consumer that reads alone replaces what is its own.
        """
        spared = np.zeros(len(self._sizes), bool)
        reading = [it for it in self._consumers.values() if it.pending.any()]
        for it in reading if len(reading) > 1 else ():
            slots = self._datasets[it.dataset].slots
            mine = self._runway(it, present[slots], it.pending, moment.now)
            if moment.hears(it) and max(mine.ahead, mine.local) <= self._little(it, moment.origin):
                spared[slots[it.pending]] = True
        return spared

    def _low(self, it: _Consumer, runway: _Runway, fastest: float, origin: Origin) -> bool:
        """Return whether what a consumer has ahead of it by now is little, in all and of what is mine."""
        rate, known = it.report.rate, self._datasets[it.dataset]
        if rate <= 0:
            return runway.ahead < LOW_SHARDS * known.shard_bytes
        low_seconds = max(LOW_SHARDS * known.shard_bytes / fastest, origin.fill_seconds) + origin.report_seconds
        if runway.ahead < rate * low_seconds and runway.local < rate * low_seconds * known.share:
            return True
        if origin.rate <= 0 or known.share <= 0:
            return False
        # The latest moment to begin: an origin that is slow must be asked before the end of the epoch needs it.
        mine_rate = rate * known.share
        seconds = (runway.local + runway.absent) / mine_rate if mine_rate > 0 else np.inf
        return seconds - runway.absent / (origin.rate * ORIGIN_SHARE) < low_seconds

    def _victim(self, present: Mask, bytes_wanted: float) -> Digest | None:
        """Return what to drop although it is needed: of what fewest need, the shard of which most is left.

        As a share of the shard: what is read again for the room that it makes.
        """
        held = np.flatnonzero(self._held & present & (self._need > 0) & (self._sizes >= bytes_wanted))
        if not len(held):
            return None
        least = held[self._need[held] == self._need[held].min()]
        left = np.zeros(len(self._sizes))
        for it in self._consumers.values():
            left[self._datasets[it.dataset].slots] += it.report.left
        return self._shards.name(int(least[np.argmax(left[least])]))


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
