"""What must hold at every moment, checked by records of its own and never by those of the code under test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple, NoReturn

from quiver.digest import Digest
from quiver.residency import ConsumerReport, Decision, Needs
from tests.simulation.dataset import Data

FORCED_MAX: Final = 4  # needed shards evicted for one consumer, until it reports again


class Violation(AssertionError):
    """A promise was broken."""


def violated(promise: str, what: str) -> NoReturn:
    raise Violation(f"{promise}: {what}")


class _Reported(NamedTuple):
    needs: frozenset[Digest]
    at: float
    lease_seconds: float


class Oracle:
    """Sees everything that daemons and ranks do. ``checked`` counts what was compared, so that nothing passes idly."""

    def __init__(self, datasets: dict[Digest, Data]) -> None:
        self.checked: Counter[str] = Counter()
        self._datasets = datasets
        self._reports: dict[tuple[str, bytes], _Reported] = {}  # by daemon and consumer
        self._forced: Counter[tuple[str, bytes]] = Counter()
        self._filling: set[tuple[str, Digest]] = set()

    # -- needs --------------------------------------------------------------------------------------------------------

    def reported(self, daemon: str, report: ConsumerReport, dataset: Digest, now: float) -> None:
        digests = self._datasets[dataset].digests
        needs = frozenset(digests[at] for at in report.left.nonzero()[0].tolist())
        self._reports[daemon, report.consumer] = _Reported(needs, now, report.lease_seconds)
        self._forced[daemon, report.consumer] = 0

    def left(self, daemon: str, consumer: bytes) -> None:
        self._reports.pop((daemon, consumer), None)

    def is_needed(self, daemon: str, shard: Digest, now: float) -> bool:
        return any(
            who == daemon and shard in it.needs and now - it.at <= it.lease_seconds
            for (who, _), it in self._reports.items()
        )

    def expired(self, daemon: str, needs: Needs, now: float) -> None:
        """A lease that has expired pins nothing."""
        self.checked["leases"] += 1
        for name in needs.consumers:
            it = self._reports.get((daemon, name))
            if it is None:
                violated("needs", f"{daemon} counts a consumer that left or never reported")
            if now - it.at > it.lease_seconds:
                violated("leases", f"{daemon} counts a consumer {now - it.at - it.lease_seconds:.1f} s past its lease")

    # -- decisions ----------------------------------------------------------------------------------------------------

    def decided(
        self, daemon: str, decision: Decision, needs: Needs, *, held: Collection[Digest], filling: Collection[Digest]
    ) -> None:
        self.checked["decisions"] += 1
        shard = decision.shard
        if shard in held or shard in filling:
            violated(
                "single-flight", f"{daemon} fetches {shard.short}, which it {'holds' if shard in held else 'fills'}"
            )
        if shard in decision.evict or len(set(decision.evict)) != len(decision.evict):
            violated("decisions", f"{daemon} evicts the shard that it fetches, or one twice")
        if not set(decision.forced) <= set(decision.evict) or bool(decision.forced) != bool(decision.starving):
            violated("decisions", f"{daemon} forces {len(decision.forced)} for {len(decision.starving)} consumers")
        if decision.evict and not set(decision.evict) <= set(held):
            violated("decisions", f"{daemon} evicts what it does not hold")
        is_needed = any(shard in it.needs for (who, _), it in self._reports.items() if who == daemon)
        if not is_needed and not _will_be_used(needs, decision):
            violated("decisions", f"{daemon} fetches {shard.short}, which nobody needs")
        for name in decision.starving:
            it = self._reports.get((daemon, name))
            needs_it = it is not None and shard in it.needs
            if not needs_it and not _will_be_used(needs, decision, name):
                violated("eviction", f"{daemon} evicts needed shards for a consumer that does not need {shard.short}")
            self._forced[daemon, name] += 1
            if self._forced[daemon, name] > FORCED_MAX:
                violated("eviction", f"{daemon} evicts more than {FORCED_MAX} needed shards for one report")

    def evicted(self, daemon: str, evict: Iterable[Digest], decisions: Iterable[Decision], now: float) -> None:
        """A needed shard is evicted only for a starving consumer, and as it was decided."""
        forced = {each for decision in decisions for each in decision.forced}
        for victim in evict:
            self.checked["evictions"] += 1
            if victim not in forced and self.is_needed(daemon, victim, now):
                violated("eviction", f"{daemon} evicts {victim.short}, which a consumer needs, for none that starves")

    # -- fills --------------------------------------------------------------------------------------------------------

    def fill_began(self, daemon: str, shard: Digest) -> None:
        self.checked["fills"] += 1
        if (daemon, shard) in self._filling:
            violated("single-flight", f"{daemon} fills {shard.short} twice at once")
        self._filling.add((daemon, shard))

    def fill_ended(self, daemon: str, shard: Digest) -> None:
        self._filling.discard((daemon, shard))

    def fills_ended(self, daemon: str) -> None:
        """The daemon died."""
        self._filling = {each for each in self._filling if each[0] != daemon}
        self._reports = {key: it for key, it in self._reports.items() if key[0] != daemon}

    def door(self, shard: Digest, content: bytes, data: Data) -> None:
        """What passed verification is what was indexed."""
        self.checked["verified shards"] += 1
        if bytes(content) != data.shards[shard]:
            violated("promise 1", f"wrong bytes of {shard.short} passed verification")

    def capacity(self, daemon: str, held_bytes: int, capacity_bytes: int) -> None:
        if held_bytes > capacity_bytes:
            violated("capacity", f"{daemon} holds {held_bytes} of {capacity_bytes} bytes")

    # -- samples ------------------------------------------------------------------------------------------------------

    def consumed(self, job: str, data: Data, rows: list[int], samples: list[bytes]) -> None:
        """Every byte that reaches the training loop is right."""
        for row, sample in zip(rows, samples, strict=True):
            self.checked["samples"] += 1
            if sample != data.truth[row]:
                violated("promise 1", f"{job} was given wrong bytes of sample {row}")


def _will_be_used(needs: Needs, decision: Decision, consumer: bytes | None = None) -> bool:
    """Whether a consumer whose uses to come are known has a use of the shard left, in the next epoch for instance.

    ``consumer``: this one; ``None``: any.
    """
    slot = needs.shards.get(decision.shard)
    slots = needs.datasets[decision.dataset].slots
    return any(
        bool((slots[it.order.shards[it.report.order_at :]] == slot).any())
        for it in needs.consumers.values()
        if it.order is not None and it.dataset == decision.dataset and consumer in (None, it.name)
    )
