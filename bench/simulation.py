"""How near do jobs that share a cache come to the bound, by the very rules that ship?

A discrete simulation with a fake clock, without threads or bytes: every daemon decides by ``quiver.residency``, every
job takes its batches from a ``quiver.substitution.Order``, and both know of each other what reports tell, late, as in
a rack. ``../shared/sim/cooperation.py`` chose the rules shard by shard; this runs them sample by sample.

A unit of time is what a job of rate 1 takes to read a shard, a unit of size is a shard. The origin delivers one shard
after the other at its rate, each ``latency`` later; a daemon has ``fills`` under way at most. Expected: equal speeds
within 4 % of the bound, unequal ones within 9 % and hardly a wait. A run is the same whenever the seed is.

    python -m bench.simulation [--seed 0] [--case NAME ...]     prints the table, beside the bounds
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from quiver.digest import DIGEST_BYTES, Digest
from quiver.layout import place
from quiver.lookup import as_rows
from quiver.residency import (
    ConsumerReport,
    Decision,
    Needs,
    OriginEstimate,
    Recipe,
    Shelf,
    Situation,
    StoredFile,
    decide,
    rounded_up,
)
from quiver.shard import COUNT_BYTES, ROW_BYTES
from quiver.substitution import Ints, Order, View, dealt, permutation

ASKED_AGAIN: Final = 0.125  # of a waiting job: it reports at once, and then so often
GIVEN_UP_AFTER: Final = 10.0  # a job that waited for so long reads from the origin
ROUNDING: Final = 1e-9  # sizes are fractions of a unit
SAMPLE_BYTES: Final = 32 << 10
SMOOTHING: Final = 0.2  # of what a daemon measures of the origin


@dataclass(frozen=True)
class Setting:
    """What is the same for all jobs of a run."""

    counts: Ints  # samples in each shard
    samples: int  # in a unit of size
    batch: int
    epochs: int
    seed: int
    interval: float  # between two reports
    lease: float
    latency: float  # of the origin
    fills: int  # that a daemon has under way at once
    lookahead: int | None
    datasets: int = 1  # of this shape, disjoint
    shares: Mapping[Digest, float] = field(default_factory=dict)  # of each dataset, of the room

    @property
    def shards(self) -> int:
        """Of one dataset. Those of dataset d are numbered from d times this."""
        return len(self.counts)

    @property
    def sizes(self) -> npt.NDArray[np.float64]:
        """Of each shard of all datasets, in units."""
        sizes: npt.NDArray[np.float64] = np.tile(self.counts, self.datasets) / self.samples
        return sizes

    @property
    def shard_bytes(self) -> npt.NDArray[np.float64]:
        """As the needs and the policy are told sizes."""
        return self.counts * float(SAMPLE_BYTES)

    @property
    def unit_bytes(self) -> float:
        return self.samples * float(SAMPLE_BYTES)


@dataclass(frozen=True)
class Result:
    """What a run came to. Shares of one; origin reads of job 0's epochs in datasets."""

    hit: float  # 1 - origin bytes / bytes consumed
    waiting: tuple[float, ...]  # of each job's time
    forced: int  # shards dropped although somebody needed them
    given_up: int  # batches for which no more was waited
    stale: int  # batches for which a shard had gone by the time that it was read
    origin_per_epoch: tuple[float, ...]
    peak_resident: float  # of the capacity
    ended: tuple[float, ...]  # when each job had read its last sample; infinite for one that never did

    @property
    def waiting_max(self) -> float:
        return max(self.waiting)


def dataset(number: int) -> Digest:
    """Return the name of a dataset."""
    return Digest(bytes(31) + bytes([number]))


class Clock:
    """What happens when: calls in the order of time, and then in that in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, delay: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (self.now + delay, next(self._numbers), call))

    def run(self, until: Callable[[], bool]) -> None:
        while self._calls and not until():
            self.now, _, call = heapq.heappop(self._calls)
            call()


class Pipe:
    """The origin: one shard after the other at its rate, each ``latency`` later. Counts what it delivers."""

    def __init__(self, clock: Clock, rate: float, latency: float) -> None:
        self._clock, self._rate, self._latency = clock, rate, latency
        self._free_at = 0.0
        self.read = 0.0

    def seconds_for(self, size: float) -> float:
        """Ask for ``size`` and return when all of it is there, from now."""
        self.read += size
        self._free_at = max(self._free_at, self._clock.now) + size / self._rate
        return self._free_at - self._clock.now + self._latency


@dataclass
class Daemon:
    """A daemon with room for ``room`` units; of the dataset the shards ``mine`` are its to fetch."""

    clock: Clock
    pipe: Pipe
    setting: Setting
    names: list[Digest]
    mine: npt.NDArray[np.bool_]
    room: float
    held: dict[int, float] = field(default_factory=dict)  # shard: when it arrived
    coming: dict[int, float] = field(default_factory=dict)  # shard: when it was asked for
    forced: int = 0
    rate: float = 0.0
    fill: float = 0.0
    last: float = 0.0  # when the last fill ended

    def __post_init__(self) -> None:
        self.needs = Needs(self.setting.seed)
        self.sizes = self.setting.sizes
        self.shard_bytes = self.setting.shard_bytes
        each = self.setting.shards
        held = np.zeros(each, bool)
        for at in range(self.setting.datasets):
            some = slice(at * each, (at + 1) * each)
            self.needs.add_dataset(
                dataset(at),
                as_rows(self.names[some]),
                self.shard_bytes,
                held.copy(),
                self.mine[some],
                samples=self.setting.counts,
            )
        self.numbers = {name: shard for shard, name in enumerate(self.names)}

    def told(self, report: ConsumerReport, at: int = 0) -> npt.NDArray[np.uint8]:
        """Take a report on dataset number ``at``."""
        assert self.needs.report(dataset(at), report, self.clock.now)
        seen = self.needs.seen_by(report.consumer)
        self.decide()
        return seen

    def decide(self) -> None:
        """Begin what fills the needs ask for, each in place of what was decided."""
        at_most = self.setting.fills - len(self.coming)
        if at_most <= 0:
            return
        self.needs.expire(self.clock.now)
        unit_bytes = self.setting.unit_bytes
        situation = Situation(
            now=self.clock.now,
            free_bytes=(self.room - self.units_of(self.held) - self.units_of(self.coming) + ROUNDING) * unit_bytes,
            fetches_max=at_most,
            origin=OriginEstimate(self.rate * unit_bytes, self.fill, self.setting.interval),
            shelf=self.shelf,
            division={name: share * self.room * unit_bytes for name, share in self.setting.shares.items()},
        )
        for decision in decide(self.needs, situation):
            self.begin(decision)

    def shelf(self) -> Shelf:
        held = [
            StoredFile(self.names[shard], int(self.shard_bytes[shard % self.setting.shards]), at)
            for shard, at in self.held.items()
        ]
        return Shelf.of(held, self.clock.now, self.needs.needed_of)

    def units_of(self, shards: Iterable[int]) -> float:
        return float(self.sizes[list(shards)].sum())

    def begin(self, decision: Decision) -> None:
        shard = self.numbers[decision.shard]
        assert self.mine[shard]
        assert shard not in self.held
        assert shard not in self.coming
        self.needs.commit(decision)
        self.forced += len(decision.forced)
        for victim in decision.evict:
            del self.held[self.numbers[victim]]
            self.needs.gone(victim)
        size = float(self.sizes[shard])
        assert self.units_of(self.held) + self.units_of(self.coming) + size <= self.room + ROUNDING
        self.coming[shard] = self.clock.now
        self.clock.after(self.pipe.seconds_for(size), lambda: self.arrive(shard))

    def arrive(self, shard: int) -> None:
        asked, now = self.coming.pop(shard), self.clock.now
        self.held[shard] = now
        self.needs.arrived(self.names[shard])
        self.needs.end(Recipe(self.names[shard], dataset(shard // self.setting.shards)))
        rate = float(self.sizes[shard]) / max(now - max(asked, self.last), 1e-6)
        weight = SMOOTHING if self.last else 1.0
        self.rate += (min(rate, 1e3) - self.rate) * weight
        self.fill += (now - asked - self.fill) * weight
        self.last = now
        self.decide()


class Job:
    """A job of one rank that reads at ``rate`` from ``start`` on, and stands still between ``stops``."""

    def __init__(self, number: int, rate: float, stops: tuple[float, float], rack: Rack, of: int = 0) -> None:
        """``of``: the number of the dataset that it reads."""
        self._of = of
        self._rack, self._clock, self._setting = rack, rack.clock, rack.setting
        self._number, self._rate, self._stops = number, rate, stops
        self._step = rack.setting.batch / rack.setting.samples / rate
        shards = len(rack.setting.counts)
        self._shard_of = np.repeat(np.arange(shards), rack.setting.counts)
        self._seen = [np.zeros(shards, np.uint8) for _ in rack.daemons]
        self._arrived = np.zeros(shards, np.int64)
        self._asked_since: float | None = None
        self._reported = -np.inf
        self._began: float | None = None
        self.epoch = -1
        self.consumed = self.waited = 0.0
        self.ended = np.inf
        self.marks = [0.0]
        self.given_up = self.stale = 0
        self._view = self._learned()

    def begin(self) -> None:
        self._began = self._clock.now
        self._next_epoch()
        self._report_in_turns()
        self._batch()

    @property
    def waiting_share(self) -> float:
        alive = min(self.ended, self._clock.now) - (self._began or 0.0)
        return self.waited / alive if alive > 0 else 0.0

    def _standing(self) -> float:
        """Return for how much longer the job stands still."""
        begin, end = self._stops
        return end - self._clock.now if begin <= self._clock.now < end else 0.0

    def _next_epoch(self) -> None:
        setting = self._setting
        self.epoch += 1
        order = permutation(len(self._shard_of), setting.seed * 64 + self._number, self.epoch)
        share, _ = dealt(order, 0, 1, setting.batch, drop_last=False)
        self._order = Order(self._shard_of[share], len(setting.counts))
        self._report()

    def _report_in_turns(self) -> None:
        if self.epoch >= self._setting.epochs:
            return
        if (standing := self._standing()) > 0:
            if standing < np.inf:
                self._clock.after(standing, self._report_in_turns)
            return
        if self._clock.now - self._reported >= self._setting.interval / 2:
            self._report()
        self._clock.after(self._setting.interval, self._report_in_turns)

    def _report(self) -> None:
        left = self._order.left
        report = ConsumerReport(
            consumer=self._number.to_bytes(16, "big"),
            left=rounded_up(left, self._setting.counts),
            rate=self._rate * self._setting.unit_bytes,
            ahead_bytes=float(left[self._view.resident].sum()) * SAMPLE_BYTES,
            lease_seconds=self._setting.lease,
        )
        for at, daemon in enumerate(self._rack.daemons):
            self._seen[at] = daemon.told(report, self._of)
        self._reported = self._clock.now
        self._view = self._learned()

    def _learned(self) -> View:
        seen = np.maximum.reduce(self._seen)
        resident = seen > 0
        if hasattr(self, "_view"):
            new = resident & ~self._view.resident
            self._arrived = np.where(new, self._arrived.max() + 1, self._arrived) if new.any() else self._arrived
        return View(resident, np.where(resident, seen - 1, 0).astype(np.uint8), self._arrived)

    def _batch(self) -> None:
        """Take a batch if there is one, and come again when it is computed; else wait."""
        if self.epoch >= self._setting.epochs:
            return
        now = self._clock.now
        if (standing := self._standing()) > 0:
            if standing < np.inf:
                self._clock.after(standing, self._batch)
            return
        if self._asked_since is None:
            self._asked_since = now
        batch = self._order.substituted(self._setting.batch, self._view, self._setting.lookahead)
        if batch is None:
            if now - self._asked_since < GIVEN_UP_AFTER:
                self._report()
                self._clock.after(ASKED_AGAIN, self._batch)
                return
            self.given_up += 1
            batch = self._order.completed(self._setting.batch, self._view)
        self.waited += now - self._asked_since
        self._asked_since = None
        self._clock.after(self._read(batch) + self._step * len(batch) / self._setting.batch, self._batch)

    def _read(self, batch: Ints) -> float:
        """Consume a batch; return how long what is not held any more takes to come from the origin."""
        lies = self._order.shards[batch]
        absent = ~self._rack.holds(lies + self._of * self._setting.shards)
        self._order.take(batch)
        self.consumed += len(batch) / self._setting.samples
        late = 0.0
        if absent.any():
            self.stale += 1
            late = self._rack.pipe.seconds_for(float(absent.sum()) / self._setting.samples)
            self.waited += late
        if not len(self._order):
            self.marks.append(self._rack.pipe.read)
            if self.epoch + 1 < self._setting.epochs:
                self._next_epoch()
            else:
                self.epoch += 1
                self.ended = self._clock.now
                for daemon in self._rack.daemons:
                    daemon.needs.leave(self._number.to_bytes(16, "big"))
        return late


class Rack:
    """Daemons, an origin and jobs on one clock."""

    def __init__(self, setting: Setting, daemons: int, cached: float, origin: float) -> None:
        self.clock = Clock()
        self.setting = setting
        self.pipe = Pipe(self.clock, origin, setting.latency)
        chance = np.random.default_rng(setting.seed)
        self._owner = chance.integers(0, daemons, setting.shards * setting.datasets)
        names = [Digest(shard.to_bytes(8, "big") + bytes(24)) for shard in range(1, len(self._owner) + 1)]
        total = float(setting.sizes.sum())
        rooms = np.full(daemons, cached * total / daemons)
        if (setting.counts == setting.counts[0]).all():  # whole shards
            rooms = np.diff(np.linspace(0, round(cached * total), daemons + 1).astype(int)).astype(np.float64)
        self.daemons = [
            Daemon(self.clock, self.pipe, setting, names, self._owner == at, float(room))
            for at, room in enumerate(rooms)
        ]
        self.peak = 0.0

    def holds(self, shards: Ints) -> npt.NDArray[np.bool_]:
        held = sum(daemon.units_of(daemon.held) + daemon.units_of(daemon.coming) for daemon in self.daemons)
        self.peak = max(self.peak, held / sum(daemon.room for daemon in self.daemons))
        return np.array([shard in self.daemons[self._owner[shard]].held for shard in shards.tolist()])


def mixed_counts(samples: int, most: int, seed: int) -> Ints:
    """Return the samples in each shard, ``most`` at most, as ``mixed`` places so many of one size."""
    digests = np.random.default_rng(seed).integers(0, 256, (samples, DIGEST_BYTES), dtype=np.uint8)
    cost = SAMPLE_BYTES + ROW_BYTES
    sizes, units = np.full(samples, SAMPLE_BYTES, np.uint64), np.zeros(samples, np.uint32)
    _, firsts = place("mixed", digests, sizes, units, most * cost + COUNT_BYTES)
    return np.diff(firsts)


def simulate(
    jobs: int,
    cached: float,
    rates: Sequence[float],
    starts: Sequence[float],
    origin: float,
    *,
    daemons: int = 3,
    epochs: int = 4,
    shards: int = 256,
    samples: int = 64,
    mixed: bool = False,
    batch: int = 16,
    seed: int = 0,
    interval: float = 0.5,
    lease: float = 10.0,
    latency: float = 0.05,
    fills: int = 2,
    lookahead: int | None = None,
    stops: Mapping[int, tuple[float, float]] | None = None,
    of: Sequence[int] = (),
    shares: Sequence[float] = (),
) -> Result:
    """Run ``jobs`` over a cache that holds ``cached`` of all datasets. ``stops``: from when to when jobs stand.

    ``of``: the number of the dataset that each job reads, by default the same one. ``shares``: of the room, by dataset;
    by default need alone decides.
    """
    counts = mixed_counts(shards * samples, samples, seed) if mixed else np.full(shards, samples)
    given = {dataset(number): share for number, share in enumerate(shares)}
    setting = Setting(
        counts, samples, batch, epochs, seed, interval, lease, latency, fills, lookahead, max(of, default=0) + 1, given
    )
    rack = Rack(setting, daemons, cached, origin)
    stops = stops or {}
    never = (np.inf, np.inf)
    all_jobs = [Job(at, rates[at], stops.get(at, never), rack, of[at] if of else 0) for at in range(jobs)]
    for job, start in zip(all_jobs, starts, strict=True):
        rack.clock.after(start, job.begin)
    lasting = [job for at, job in enumerate(all_jobs) if stops.get(at, never)[1] < np.inf or at not in stops]
    rack.clock.run(lambda: all(job.epoch >= epochs for job in lasting))
    return Result(
        hit=1 - rack.pipe.read / sum(job.consumed for job in all_jobs),
        waiting=tuple(job.waiting_share for job in all_jobs),
        forced=sum(daemon.forced for daemon in rack.daemons),
        given_up=sum(job.given_up for job in all_jobs),
        stale=sum(job.stale for job in all_jobs),
        origin_per_epoch=tuple((np.diff(all_jobs[0].marks) / shards).tolist()),
        peak_resident=rack.peak,
        ended=tuple(float(job.ended) for job in all_jobs),
    )


CASES: Final[dict[str, dict[str, Any]]] = {
    "one job, 20 %": {"jobs": 1, "cached": 0.2, "rates": [1.0], "starts": [0.0], "origin": 2.0},
    "three equal, 20 %": {"jobs": 3, "cached": 0.2, "rates": [1.0] * 3, "starts": [0.0, 21.0, 42.0], "origin": 2.0},
    "eight equal, 10 %": {
        "jobs": 8,
        "cached": 0.1,
        "rates": [1.0] * 8,
        "starts": [21.0 * job for job in range(8)],
        "origin": 2.0,
    },
    "three unequal, 20 %": {"jobs": 3, "cached": 0.2, "rates": [1.0, 0.85, 0.7], "starts": [0.0] * 3, "origin": 2.0},
    "eight unequal, 10 %": {
        "jobs": 8,
        "cached": 0.1,
        "rates": [1 - 0.3 * job / 7 for job in range(8)],
        "starts": [0.0] * 8,
        "origin": 2.0,
    },
}


def bound(cached: float, rates: Sequence[float]) -> float:
    """Return the hit ratio that nothing can exceed in steady state."""
    return 1 - (1 - cached) * max(rates) / sum(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, nargs="*", default=[0])
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--shards", choices=("equal", "mixed"), nargs="*", default=["equal"])
    parser.add_argument("--units", type=int, default=256, help="the size of the dataset, in full shards")
    parser.add_argument("--interval", type=float, default=0.5, help="between two reports; less is a slower pace")
    asked = parser.parse_args()
    for kind, name in itertools.product(asked.shards, asked.case):
        began = time.perf_counter()
        every = [
            simulate(**CASES[name], seed=seed, mixed=kind == "mixed", shards=asked.units, interval=asked.interval)
            for seed in asked.seed
        ]
        hits, waits = [result.hit for result in every], [result.waiting_max for result in every]
        origin = [np.mean(result.origin_per_epoch[1:]) for result in every]
        limit = bound(CASES[name]["cached"], CASES[name]["rates"])
        print(
            f"{kind} {name:20s} bound {limit:5.1%} hit {np.mean(hits):5.1%} ({min(hits):5.1%}..{max(hits):5.1%})"
            f"   origin {np.mean(origin):.3f} ({max(origin):.3f})   waits {np.mean(waits):5.1%} ({max(waits):5.1%})"
            f"   forced {[result.forced for result in every]} given up {[result.given_up for result in every]}"
            f" stale {[result.stale for result in every]} peak {max(result.peak_resident for result in every):.1%}"
            f"   {time.perf_counter() - began:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
