"""How near do jobs that read in fixed orders come to the least that they need of the origin, by the rules that ship?

The daemons, the origin and the clock are those of ``bench.simulation``; the jobs read in an order that nothing changes,
fetch some batches ahead, and read past the cache what it does not hold, sample by sample. ``bench.belady`` says what
any policy would need.

    python -m bench.fixed_simulation [--case NAME ...] [--seed 0 1]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from blake3 import blake3

from bench.belady import Uses, needed
from bench.simulation import Rack, Setting, mixed_counts
from quiver.residency import ConsumerReport, rounded_up
from quiver.substitution import Ints, permutation

AHEAD: Final = 4  # batches that are fetched ahead of the loop


def full_order(shard_of: Ints, seed: int, epoch: int) -> Ints:
    return shard_of[permutation(len(shard_of), seed, epoch)]


def block_order(shard_of: Ints, seed: int, epoch: int, window: int = 8) -> Ints:
    """Shards in random order, samples mixed within a window of shards that moves on."""
    chance = np.random.default_rng([seed, epoch])
    place = chance.permutation(shard_of.max() + 1)[shard_of] + chance.random(len(shard_of)) * window
    return shard_of[np.argsort(place, kind="stable")]


def plain_order(shard_of: Ints, seed: int, epoch: int) -> Ints:
    return shard_of


ORDERS: Final = {"full": full_order, "block": block_order, "none": plain_order}


class FixedJob:
    """A job of one rank that reads ``orders``, an epoch each, at ``rate`` from ``start`` on."""

    def __init__(self, number: int, rate: float, rack: Rack, orders: list[Ints], knows: bool) -> None:
        self._rack, self._setting, self._number, self._rate = rack, rack.setting, number, rate
        self._orders, self._knows = orders, knows
        self._step = rack.setting.batch / rack.setting.samples / rate
        self._epoch, self._at = 0, 0
        self._ready: list[float] = []  # when each batch that was fetched ahead is there
        self.consumed = self.waited = self.waited_warm = 0.0
        self._free_at = 0.0
        self.began = self.warm = 0.0
        self.marks = [0.0]
        self.ended = np.inf

    @property
    def is_done(self) -> bool:
        return self._epoch >= len(self._orders)

    def begin(self) -> None:
        self.began = self._free_at = self._rack.clock.now
        self._report_in_turns()
        for _ in range(AHEAD):
            self._fetch()
        self._take()

    def _report_in_turns(self) -> None:
        if self.is_done:
            return
        self._report()
        self._rack.clock.after(self._setting.interval, self._report_in_turns)

    def _report(self) -> None:
        order, at = self._orders[self._epoch], self._at
        left = np.bincount(order[at:], minlength=len(self._setting.counts))
        uses = np.concatenate(self._orders[self._epoch : self._epoch + 2]).astype(np.int32)
        soon = list(dict.fromkeys(order[at : at + 64 * self._setting.batch].tolist()))
        report = ConsumerReport(
            consumer=self._number.to_bytes(16, "big"),
            left=rounded_up(left, self._setting.counts),
            rate=self._rate * self._setting.unit_bytes,
            ahead_bytes=0.0,
            lease_seconds=self._setting.lease,
            soon=tuple(soon),
            ordered=True,
            order=blake3(uses.tobytes()).digest(16) if self._knows else b"",
            order_at=at,
            uses=uses if self._knows else None,
        )
        for daemon in self._rack.daemons:
            daemon.told(report)

    def _fetch(self) -> None:
        """Begin to fetch the next batch."""
        if self.is_done:
            return
        order = self._orders[self._epoch]
        batch = order[self._at : self._at + self._setting.batch]
        self._at += len(batch)
        absent = ~self._rack.holds(batch)
        late = self._rack.pipe.seconds_for(float(absent.sum()) / self._setting.samples) if absent.any() else 0.0
        self.consumed += len(batch) / self._setting.samples
        self._ready.append(self._rack.clock.now + late)
        if self._at >= len(order):
            self._epoch, self._at = self._epoch + 1, 0
            self.marks.append(self._rack.pipe.read)
            if self.is_done:
                for daemon in self._rack.daemons:
                    daemon.needs.leave(self._number.to_bytes(16, "big"))
            else:
                self._report()
                if self._epoch == 1:
                    self.warm = self._rack.clock.now

    def _take(self) -> None:
        """The loop takes a batch, and comes again when it is computed."""
        clock = self._rack.clock
        if not self._ready:
            self.ended = clock.now
            return
        wait = max(self._ready.pop(0) - clock.now, 0.0)
        self.waited += wait
        self.waited_warm += wait if self._epoch else 0.0
        clock.after(wait, self._fetch)
        clock.after(wait + self._step, self._take)


@dataclass(frozen=True)
class FixedResult:
    """Origin bytes in datasets. ``least``: what any policy would read."""

    origin: float
    origin_per_epoch: tuple[float, ...]
    hit: float
    least: float
    hit_most: float
    waiting: tuple[float, ...]
    waiting_warm: tuple[float, ...]
    peak: float


def simulate(
    order: str,
    cached: float,
    rates: list[float],
    starts: list[float],
    origin: float,
    *,
    same: bool = True,
    daemons: int = 3,
    epochs: int = 3,
    shards: int = 256,
    samples: int = 16,
    mixed: bool = False,
    batch: int = 4,
    seed: int = 0,
    interval: float = 0.5,
    latency: float = 0.05,
    knows: bool = True,
    bound: bool = True,
) -> FixedResult:
    """Run jobs in fixed orders. ``same``: all have one seed."""
    counts = mixed_counts(shards * samples, samples, seed) if mixed else np.full(shards, samples)
    setting = Setting(counts, samples, batch, epochs, seed, interval, 10.0, latency, 2, None)
    rack = Rack(setting, daemons, cached, origin)
    shard_of = np.repeat(np.arange(len(counts)), counts)
    orders = [[ORDERS[order](shard_of, 0 if same else job, e) for e in range(epochs)] for job in range(len(rates))]
    jobs = [FixedJob(at, rate, rack, orders[at], knows) for at, rate in enumerate(rates)]
    for job, start in zip(jobs, starts, strict=True):
        rack.clock.after(start, job.begin)
    rack.clock.run(lambda: all(job.ended < np.inf for job in jobs))
    consumed = sum(job.consumed for job in jobs)
    total = float(setting.sizes.sum())
    least = 0.0
    if bound:
        uses = Uses.merged([np.concatenate(it) for it in orders], starts, [1 / samples / rate for rate in rates])
        least = needed(uses, counts, cached * counts.sum()) / samples
    return FixedResult(
        origin=rack.pipe.read / total,
        origin_per_epoch=tuple((np.diff(jobs[0].marks) / total).tolist()),
        hit=1 - rack.pipe.read / consumed,
        least=least / total,
        hit_most=1 - least / consumed,
        waiting=tuple(job.waited / (job.ended - job.began) for job in jobs),
        waiting_warm=tuple(job.waited_warm / max(job.ended - job.warm, 1e-9) for job in jobs),
        peak=rack.peak,
    )


CASES: Final[dict[str, dict[str, Any]]] = {
    "one, full": {"order": "full", "cached": 0.2, "rates": [1.0], "starts": [0.0], "origin": 2.0},
    "one, block": {"order": "block", "cached": 0.2, "rates": [1.0], "starts": [0.0], "origin": 2.0},
    "one, block, tight": {"order": "block", "cached": 0.2, "rates": [1.0], "starts": [0.0], "origin": 0.88},
    "one, full, tight": {"order": "full", "cached": 0.2, "rates": [1.0], "starts": [0.0], "origin": 0.88},
    "one, none": {"order": "none", "cached": 0.2, "rates": [1.0], "starts": [0.0], "origin": 2.0},
    "three, full": {"order": "full", "cached": 0.2, "rates": [1.0] * 3, "starts": [0.0, 21.0, 42.0], "origin": 3.0},
    "three, block": {"order": "block", "cached": 0.2, "rates": [1.0] * 3, "starts": [0.0, 21.0, 42.0], "origin": 2.0},
    "three seeds, full": {
        "order": "full",
        "cached": 0.2,
        "rates": [1.0] * 3,
        "starts": [0.0, 21.0, 42.0],
        "origin": 3.0,
        "same": False,
    },
    "three seeds, block": {
        "order": "block",
        "cached": 0.2,
        "rates": [1.0] * 3,
        "starts": [0.0, 21.0, 42.0],
        "origin": 3.0,
        "same": False,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seed", type=int, nargs="*", default=[0])
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--soon", action="store_true", help="the next 64 batches are reported, and nothing else")
    parser.add_argument("--no-bound", action="store_true")
    asked = parser.parse_args()
    for name in asked.case:
        for seed in asked.seed:
            it = simulate(**CASES[name], seed=seed, mixed=asked.mixed, knows=not asked.soon, bound=not asked.no_bound)
            per_epoch = " ".join(f"{each:.3f}" for each in it.origin_per_epoch)
            print(
                f"{name:20s} origin {it.origin:.3f} least {it.least:.3f} ({it.origin / max(it.least, 1e-9):.3f})"
                f"   job 0's epochs {per_epoch}   hit {it.hit:.1%} of {it.hit_most:.1%}"
                f"   waits {max(it.waiting):.1%} (warm {max(it.waiting_warm):.1%})   peak {it.peak:.1%}",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
