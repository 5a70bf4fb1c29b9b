"""Keeps the allocation of a daemon up to date, and says what follows from it for this daemon.

No daemon is in charge. Placement hashes evenly and every daemon hears every report, so each solves the same problem,
about the whole rack, and takes its slice of the answer: of each dataset's share the part that hashes to it. They agree
as far as they measure the same.

Nothing flaps: speeds are used as ``steady`` values, and an allocation of the cache that was solved anew replaces the
last one only if it is clearly better (``quiver.allocation.is_clearly_better``), or if what is read changed. The
bandwidth is divided anew each time: that moves no data.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from quiver.allocation import Allocation, DatasetDemand, Policy, Problem, allocate, is_clearly_better
from quiver.digest import Digest
from quiver.identity import told_apart
from quiver.location import origin_of
from quiver.residency import Needs
from quiver.ring import Ring
from quiver_cacheserver.allocation.bandwidth import Bandwidth, Turns
from quiver_cacheserver.allocation.gathering import Heard, readers_of, resident_bytes
from quiver_cacheserver.allocation.settings import AllocationSettings
from quiver_cacheserver.allocation.solved import NOTHING, Solved
from quiver_cacheserver.allocation.steady import SteadyValues

TICK_SECONDS: Final = 0.5
SOLVE_SECONDS: Final = 2.0  # between two solutions, if what is read did not change
ROOMY_SHARDS: Final = 1.5  # of each dataset that is read, in the room of this daemon: below that nothing is divided
READ_SECONDS: Final = 1.5  # for which a shard stays that is read once: until it is reported, drawn from and drained
ORIGINS_MAX: Final = 1024  # whose bandwidth is remembered though nobody reads them
READERS_MAX: Final = 3  # of a dataset, for each of which there is room for a shard that the others have read already
SHORT_SHARDS: Final = 0.5  # resident shards ahead, below which a consumer is short of data


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a dataset that is read. ``base``: where its origin lies. ``pinned``: an operator wants it."""

    shown: str
    size_bytes: float
    base: str
    pinned: bool = False


class Allocator:
    """The allocation that holds now. Belongs to the event loop."""

    def __init__(
        self,
        needs: Needs,
        facts: Callable[[Digest], Facts | None],
        capacity_bytes: Callable[[], float],
        ring: Callable[[], tuple[Ring, str]],
        unreported: Callable[[float], Sequence[Heard]] = lambda _: (),
    ) -> None:
        """``facts``: of a dataset by name. ``capacity_bytes``: for shards, here. ``ring``: and this daemon's id.

        ``unreported``: readers that report no needs, as they are seen now.
        """
        self.settings = AllocationSettings()
        self.current: Solved = NOTHING
        self.turns = Turns()
        self._needs, self._facts = needs, facts
        self._capacity_bytes, self._ring, self._unreported = capacity_bytes, ring, unreported
        self._bandwidths: dict[str, Bandwidth] = {}
        self._under_way: Counter[str] = Counter()  # fills, by origin
        self._origin_of: dict[Digest, str] = {}
        self._rates: SteadyValues[tuple[Digest, str]] = SteadyValues()
        self._limits: SteadyValues[str] = SteadyValues()

    async def run(self) -> None:
        """Solve again and again, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            problem, names = self.problem(now := time.monotonic())
            if self.is_due(problem, now):
                # In a thread: two thousand jobs on a thousand datasets take most of a second.
                solved = await loop.run_in_executor(None, self.solve, problem, names, now)
                self.take(solved)

    # -- what follows from it -----------------------------------------------------------------------------------------

    def division(self, fill_seconds: float = 0.0) -> dict[Digest, float]:
        """Return the bytes of this daemon that each dataset should have (``Situation.division``).

        Empty without a policy, and where there is not even room for a shard of each dataset and half of its next one:
        in parts that hold no shard, nothing could be read. There need alone decides.

        ``fill_seconds``: how long a fill takes. What passes through needs room beside what is kept, for as long as it
        is fetched and read; without it a dataset that nothing is kept of could not use its part of the origin.
        """
        if self.settings.policy is None or not self._needs.datasets:
            return {}
        shards_bytes = sum(it.shard_bytes for it in self._needs.datasets.values() if it.consumers)
        return self._parts(fill_seconds) if self._capacity_bytes() >= ROOMY_SHARDS * shards_bytes else {}

    def _parts(self, fill_seconds: float = 0.0) -> dict[Digest, float]:
        allocation, capacity = self.current.allocation, self._capacity_bytes()
        fastest: dict[str, float] = {}
        for (shown, _), rate in allocation.predicted.items():
            fastest[shown] = max(fastest.get(shown, 0.0), rate)
        parts = {}
        for name, shown in self.current.names.items():
            it = self._needs.datasets.get(name)
            if it is not None and shown in allocation.shares:
                shards_bytes = min(max(it.consumers, 1), READERS_MAX) * it.shard_bytes
                passing = shards_bytes + fastest.get(shown, 0.0) * it.mine_share * (fill_seconds + READ_SECONDS)
                parts[name] = allocation.shares[shown].cache_bytes * it.mine_share + min(passing, capacity / 2)
        total = sum(parts.values())
        if not total:  # nothing was solved yet
            read = [name for name, it in self._needs.datasets.items() if it.consumers]
            return {name: capacity / len(read) for name in read}
        # What hashes here is not exactly this daemon's part of everything; and all of its room is somebody's.
        return {name: part * capacity / total for name, part in parts.items()}

    def limits(self) -> Mapping[Digest, float]:
        """Return how many bytes of this daemon the needed shards of datasets may take at most: quotas."""
        if not self.settings.quotas or self.settings.policy is None:
            return {}
        tenants: dict[Digest, set[str]] = {}  # in one pass: it is asked for in every round
        for it in self._needs.consumers.values():
            tenants.setdefault(it.dataset, set()).add(it.report.identity.tenant)
        return {
            name: max(share, self._needs.datasets[name].shard_bytes)
            for name, share in self._parts().items()
            if name in tenants and tenants[name] <= self.settings.quotas.keys()
        }

    def wait_seconds(self, dataset: Digest, now: float) -> float:
        """Return how long a fill of a dataset waits before it asks again; 0 if it may read its origin now."""
        self._cap_unread(dataset, now)
        return self.turns.wait_seconds(dataset, now, idle=not self._under_way[self._origin(dataset)])

    def must_wait(self, now: float) -> set[Digest]:
        """Return the datasets whose turn to read their origin it is not."""
        return {name for name in self._needs.datasets if self.wait_seconds(name, now) > 0}

    def began(self, dataset: Digest, size_bytes: float, now: float) -> Callable[[float, bool], None]:
        """A fill of a dataset began, which may read the origin. Return what to call at its end: when, and if it did."""
        self.turns.take(dataset, size_bytes)
        origin, began = self._origin(dataset), now
        bandwidth = self._bandwidths.setdefault(origin, Bandwidth())
        self._under_way[origin] += 1

        def ended(now: float, from_origin: bool) -> None:
            self._under_way[origin] -= 1
            if not self._under_way[origin]:
                del self._under_way[origin]
            if from_origin:
                bandwidth.was_read(began, now, size_bytes)
            else:
                self._cap_unread(dataset, now)
                self.turns.take(dataset, -size_bytes)

        return ended

    def _origin(self, dataset: Digest) -> str:
        if dataset not in self._origin_of:
            facts = self._facts(dataset)
            return origin_of(facts.base) if facts is not None else ""
        return self._origin_of[dataset]

    # -- solving ------------------------------------------------------------------------------------------------------

    def is_due(self, problem: Problem, now: float) -> bool:
        """Whether to solve now: something is read that was not, or it was long ago."""
        before = self.current.problem
        if _who(problem) != _who(before) or problem.capacity_bytes != before.capacity_bytes:
            return True
        return bool(problem.datasets) and now - self.current.made_at >= SOLVE_SECONDS

    def solve(self, problem: Problem, names: Mapping[Digest, str], now: float) -> Solved:
        """Return the solution that holds from now on. Any thread."""
        policy, before = self.settings.policy, self.current
        solving = policy or Policy.MAX_MIN
        allocation = allocate(problem, solving)
        if before.made_at and _who(problem) == _who(before.problem):
            old, new = _cached(before.allocation), _cached(allocation)
            if not is_clearly_better(problem, solving, new, old):
                allocation = allocate(problem, solving, kept=old)
        return Solved(problem=problem, allocation=allocation, names=names, made_at=now, policy=policy)

    def take(self, solved: Solved) -> None:
        """Let a solution hold."""
        self.current = solved
        now = time.monotonic()
        shares, share = solved.allocation.shares, self._own_share()
        rates = {name: shares[shown].origin_rate * share for name, shown in solved.names.items() if shown in shares}
        self.turns.set_rates(rates if self.settings.policy is not None else {}, self._origin_of, now)

    def problem(self, now: float) -> tuple[Problem, dict[Digest, str]]:
        """Return what is to be solved now, about the whole rack, and what each dataset is called in it."""
        readers = readers_of(self._heard(now))
        facts = {name: it for name in readers if (it := self._facts(name)) is not None}
        names = told_apart({name: it.shown for name, it in facts.items()})  # they may be of several sharing domains
        share = self._own_share()
        self._origin_of = {name: origin_of(it.base) for name, it in facts.items()}
        self._forget(now)
        self._cap(facts, share, now)
        limits = self._measure(now, share)
        # A dataset whose share is still empty needs bandwidth to fill it, however little it will need then.
        resident = resident_bytes(self._needs, {name: it.size_bytes for name, it in facts.items()})
        return (
            Problem(
                capacity_bytes=self._capacity_bytes() / share,
                datasets=tuple(
                    DatasetDemand(
                        name=names[name],
                        size_bytes=it.size_bytes,
                        origin=self._origin_of[name],
                        readers=readers[name],
                        pinned=it.pinned,
                        resident_bytes=resident.get(name),
                    )
                    for name, it in facts.items()
                ),
                origin_rates=limits,
                weights=self.settings.weights,
                quotas={tenant: quota / share for tenant, quota in self.settings.quotas.items()},
            ),
            names,
        )

    def _heard(self, now: float) -> list[Heard]:
        consumers, seen = self._needs.consumers, self._unreported(now)
        reporting = [(it.dataset, name.hex()) for name, it in consumers.items()]
        self._rates.keep([*reporting, *((it.dataset, it.consumer) for it in seen)])
        heard = [it._replace(rate=self._rates.add((it.dataset, it.consumer), it.rate, now)) for it in seen]
        for name, it in consumers.items():
            report = it.report
            # A hold gets the equal share of a job of which nothing is known yet: without a share it would keep nothing.
            rate = 0.0 if report.hold else self._rates.add((it.dataset, name.hex()), report.rate, now)
            who, attained = report.identity, report.measured.attained_bytes
            heard.append(Heard(it.dataset, name.hex(), rate, who.job, who.group, who.tenant, report.ordered, attained))
        return heard

    def _measure(self, now: float, share: float) -> dict[str, float]:
        """Return the bandwidth of each origin that is a limit, for the whole rack."""
        needs = self._needs
        hungry = {
            self._origin(it.dataset)
            for it in needs.consumers.values()
            if it.is_reading and it.report.ahead_bytes < SHORT_SHARDS * needs.datasets[it.dataset].shard_bytes
        }
        limits = {}
        for origin, bandwidth in self._bandwidths.items():
            bandwidth.hungry(now, hungry=origin in hungry)
            rate = self._limits.add(origin, bandwidth.value, now)
            if rate > 0:
                limits[origin] = rate / share
        # Caps of prefixes limit an origin only together, and only if all that is read of it lies below one of them.
        caps: dict[str, dict[str, float]] = {}
        for name, origin in self._origin_of.items():
            facts = self._facts(name)
            prefix, rate = (self.settings.cap_of(facts.base) if facts is not None else None) or ("no cap", math.inf)
            caps.setdefault(origin, {})[prefix] = rate
        for origin, rates in caps.items():
            rate = min(sum(rates.values()), limits.get(origin, math.inf))
            if math.isfinite(rate):
                limits[origin] = rate
        return limits

    def _cap(self, facts: Mapping[Digest, Facts], share: float, now: float) -> None:
        for name, it in facts.items():
            cap = self.settings.cap_of(it.base)
            if cap is not None:
                self.turns.set_cap(name, cap[0] or origin_of(it.base), cap[1] * share, now)

    def _cap_unread(self, dataset: Digest, now: float) -> None:
        """Have a cap hold for a dataset that nobody reports on, as one that is warmed, or nobody yet."""
        is_known = dataset in self._origin_of or self.turns.is_capped(dataset)
        if self.settings.origin_rates and not is_known:
            facts = self._facts(dataset)
            if facts is not None:
                self._cap({dataset: facts}, self._own_share(), now)

    def _forget(self, now: float) -> None:
        """Forget origins that nobody reads now, the first that were read first, once there are very many."""
        self.turns.keep(set(self._origin_of), now)
        read = {*self._origin_of.values(), *self._under_way}
        for origin in [it for it in self._bandwidths if it not in read][: max(len(self._bandwidths) - ORIGINS_MAX, 0)]:
            del self._bandwidths[origin]
        self._limits.keep(self._bandwidths)

    def _own_share(self) -> float:
        """Return this daemon's part of the rack: that of what hashes to it."""
        ring, own = self._ring()
        weights = {member.id: member.weight for member in ring.members if member.state == "up"}
        total = sum(weights.values())
        return weights[own] / total if own in weights and total > 0 else 1.0


def _who(problem: Problem) -> list[tuple[str, float, bool, list[tuple[str, str, bool, bool]]]]:
    """Return what of a problem is not measured: when that changes, the allocation does."""
    return [
        (it.name, it.size_bytes, it.pinned, [(who.name, who.tenant, who.ordered, who.rate > 0) for who in it.readers])
        for it in problem.datasets
    ]


def _cached(allocation: Allocation) -> dict[str, float]:
    return {name: share.cache_bytes for name, share in allocation.shares.items()}
