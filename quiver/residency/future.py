"""When each shard is used next, and what holding it until then is worth: over all consumers whose uses are known. Pure.

The uses of a consumer are a list (``orders``); its rate makes positions in it into seconds. A table over all consumers
and shards says how many bytes of a shard are used within each of some horizons. Room has a *price* per byte and second:
the one at which just as much is worth holding as there is room for. A shard's *profit* is what holding it saves up to
the best horizon, less the rent for the room until then; for one that is absent, less what fetching it costs as well.

This is Lagrangian relaxation, as in offline caching with general costs. Where each shard is used once, the price is one
over the time beyond which a shard is not kept for its next use: Belady's rule. The table is computed again when it is
old compared with the time that it takes, so that however many consumers there are, that is a small share of all time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from quiver.digest import Digest
from quiver.lookup import DigestRows
from quiver.residency.consumers import Consumer, DatasetNeeds, Floats, Ints, Mask

HORIZONS_MAX: Final = 48
ALIKE: Final = 4.0  # times as long as the shortest: then spans count as alike
SHORTEST_SECONDS: Final = 1.0  # of a span that counts: reports are about as far apart
LONGEST_SECONDS: Final = 1e6  # twelve days
CELLS_MAX: Final = 1 << 20  # horizons times shards: 8 MiB
PRICED_MAX: Final = 4096  # shards that the price is found by: these are as good as all
TABLE_ENTRIES_MAX: Final = 1 << 20  # uses of all consumers that are looked at: the next ones of each
SLOTS_MAX: Final = 1 << 20  # with more shards known, nothing is planned
# A table is used for about twenty times as long as it takes to make.
LEAST_SECONDS: Final = 0.05
ENTRY_SECONDS: Final = 20 * 20e-9
CELL_SECONDS: Final = 20 * 30e-9
CONSUMER_SECONDS: Final = 20 * 25e-6
PAYS_BACK: Final = 0.9  # of a shard's bytes, that fetching it must save: a whole shard is one read, its samples many
STEPS_FIRST: Final = 24  # of bisection, to find the price,
STEPS_LATER: Final = 4  # and to follow it,
FOLLOWED: Final = 1.25  # by at most this factor


class Shards(NamedTuple):
    """What is known of all shards, by slot."""

    names: DigestRows
    sizes: Floats  # bytes
    held: Mask  # or coming
    mine: Mask  # which this daemon fetches
    room_bytes: float  # for all that is held or will be


@dataclass(frozen=True, slots=True, eq=False)
class Future:
    """The uses to come, from ``made_at`` on, by slot. ``names``: the consumers whose uses these are.

    ``profit`` and ``profit_absent`` are in bytes: what holding a shard is worth at the price, and what fetching and
    holding it is.
    """

    made_at: float
    names: tuple[bytes, ...]
    first: Floats  # (slots,) seconds until the first use, infinite for none
    first_by: Ints  # (slots,) which of ``names`` that is
    in_plan: Mask  # (slots,) of the datasets of these consumers
    total: Floats  # (slots,) bytes that are used, as far as uses are known
    profit: Floats  # (slots,), at least 0
    profit_absent: Floats  # (slots,)

    def until_first(self, now: float) -> Floats:
        """Return the seconds from ``now`` until each slot's first use: negative if it should have been."""
        left: Floats = self.first - (now - self.made_at)
        return left


class FutureCache:
    """The last future that was computed, as long as it counts. Used by one thread."""

    def __init__(self) -> None:
        self._future: Future | None = None
        self._of: tuple[object, ...] = ()
        self._until = 0.0
        self._price: float | None = None

    def of(
        self,
        shards: Shards,
        datasets: Mapping[Digest, DatasetNeeds],
        consumers: Sequence[Consumer],
        now: float,
        fill_seconds: float,
    ) -> Future | None:
        """Return the uses to come of these consumers; ``None`` if there are none.

        ``fill_seconds``: what is used before a fetch that begins now could end is not saved by it.
        """
        if not consumers or len(shards.sizes) > SLOTS_MAX:
            self._future, self._of, self._price = None, (), None
            return None
        of = (shards.names, *(it.order for it in consumers))
        if self._of == of and now < self._until:
            return self._future
        if self._of[:1] != of[:1] or len(self._of) != len(of):
            self._price = None
        table = _table(len(shards.sizes), datasets, consumers, now, fill_seconds)
        self._price = _price(table, shards, self._price)
        profit = _profit(table, shards.sizes, self._price)
        names = tuple(it.name for it in consumers)
        self._future = Future(
            now,
            names,
            table.first,
            table.first_by,
            table.in_plan,
            table.saved[-1],
            np.maximum(profit, 0.0),
            profit - PAYS_BACK * shards.sizes,
        )
        self._of = of
        entries = min(sum(len(it.order.shards) for it in consumers if it.order is not None), TABLE_ENTRIES_MAX)
        cells = min(HORIZONS_MAX * len(shards.sizes), CELLS_MAX)
        seconds = LEAST_SECONDS + ENTRY_SECONDS * entries + CELL_SECONDS * cells + CONSUMER_SECONDS * len(consumers)
        self._until = now + seconds
        return self._future


class _Table(NamedTuple):
    horizons: Floats  # (k,) seconds after the end of a fetch that begins now
    saved: Floats  # (k, slots) bytes that are used between then and each horizon
    first: Floats
    first_by: Ints
    in_plan: Mask


def _table(
    slots: int, datasets: Mapping[Digest, DatasetNeeds], consumers: Sequence[Consumer], now: float, fill_seconds: float
) -> _Table:
    entries_max = TABLE_ENTRIES_MAX // len(consumers)
    uses = [_Uses.of(datasets[it.dataset], it, now, entries_max) for it in consumers]
    horizons = _horizons([it.seconds for it in uses], fill_seconds, max(CELLS_MAX // max(slots, 1), 2))
    use_bytes, in_plan = np.zeros(slots), np.zeros(slots, bool)
    for it in {it.dataset: datasets[it.dataset] for it in consumers}.values():
        use_bytes[it.slots] = it.sample_bytes
        in_plan[it.slots] = True
    first, first_by, scratch = np.full(slots, np.inf), np.zeros(slots, np.int64), np.zeros(slots)
    cells = []
    for number, its in enumerate(uses):
        ends = np.minimum(np.ceil(horizons * its.rate), len(its.slots)).astype(np.int64)
        segment = np.repeat(np.arange(len(horizons) + 1), np.diff(ends, prepend=0, append=len(its.slots)))
        cells.append(segment * slots + its.slots)
        scratch[its.slots[::-1]] = np.arange(len(its.slots) - 1, -1, -1) / its.rate  # the first of each is set last
        sooner = its.slots[scratch[its.slots] < first[its.slots]]
        first[sooner], first_by[sooner] = scratch[sooner], number
    counts = np.bincount(np.concatenate(cells), minlength=(len(horizons) + 1) * slots)
    saved = np.cumsum(counts.reshape(-1, slots)[1:-1], axis=0) * use_bytes
    return _Table(horizons[1:] - horizons[0], saved, first, first_by, in_plan)


def _profit(table: _Table, sizes: Floats, price: float) -> Floats:
    """Return what holding each shard up to its best horizon saves, less the rent, in bytes ``(slots,)``."""
    best: Floats = (table.saved - price * np.outer(table.horizons, sizes)).max(axis=0)
    return best


def _price(table: _Table, shards: Shards, before: float | None) -> float:
    """Return the price per byte and second at which the room is just filled with what is worth holding.

    ``before``: the last price, which changes slowly.
    """
    mine = np.flatnonzero(table.in_plan & shards.mine & (table.saved[-1] > 0))
    sizes, held = shards.sizes[mine], shards.held[mine]
    if not len(mine) or sizes.sum() <= shards.room_bytes:
        return 0.0
    share = 1.0
    if len(mine) > PRICED_MAX:  # the numbers of shards say nothing about what they are worth
        total = float(sizes.sum())
        mine = mine[:: -(-len(mine) // PRICED_MAX)]
        sizes, held = shards.sizes[mine], shards.held[mine]
        share = float(sizes.sum()) / total
    its = table._replace(saved=table.saved[:, mine])
    fetch = np.where(held, 0.0, PAYS_BACK * sizes)
    highest = float((its.saved / np.outer(table.horizons, sizes)).max())
    low, high, steps = 0.0, highest, STEPS_FIRST
    if before:
        low, high, steps = before / FOLLOWED, min(before * FOLLOWED, highest), STEPS_LATER
    for _ in range(steps):
        price = (low + high) / 2
        if float(sizes[_profit(its, sizes, price) > fetch].sum()) > shards.room_bytes * share:
            low = price
        else:
            high = price
    return (low + high) / 2


@dataclass(frozen=True, slots=True, eq=False)
class _Uses:
    """A consumer's uses from now on: the slots in their order, and how many there are per second."""

    slots: Ints
    rate: float

    @property
    def seconds(self) -> float:
        return len(self.slots) / self.rate

    @classmethod
    def of(cls, dataset: DatasetNeeds, it: Consumer, now: float, entries_max: int) -> _Uses:
        assert it.order is not None
        shards = it.order.shards
        ahead = shards[it.report.order_at : it.report.order_at + entries_max]
        mean_bytes = float(dataset.sample_bytes[ahead].mean()) if len(ahead) else 1.0
        rate = max(it.report.pace or dataset.shard_bytes, 1.0) / max(mean_bytes, 1.0)
        at = min(it.report.order_at + int(rate * (now - it.reported_at)), len(shards))
        return cls(dataset.slots[shards[at : at + entries_max]], rate)


def _horizons(spans: Sequence[float], fill_seconds: float, count_max: int) -> Floats:
    """Return some horizons from ``fill_seconds`` on, closely at first, and at least two.

    ``spans``: the seconds until the last use of each consumer. Where they differ much, a slow consumer, or a hostile
    one, must not move the first horizon beyond the uses of a fast one.
    """
    longest = max(max(spans) - fill_seconds, 1e-6)
    shortest = max(min((it for it in spans if it > 0), default=0.0) - fill_seconds, SHORTEST_SECONDS)
    if longest > ALIKE * shortest:
        several = np.geomspace(shortest / 64, max(min(longest, LONGEST_SECONDS), shortest), HORIZONS_MAX - 1)[::-1]
    else:
        near = np.geomspace(longest / 512, longest / 16, HORIZONS_MAX // 3)
        far = np.linspace(longest / 16, longest, HORIZONS_MAX - len(near))
        several = np.concatenate([near, far[1:]])[::-1]
    several = several[:: -(-len(several) // max(count_max - 1, 1))][::-1]
    horizons: Floats = fill_seconds + np.concatenate([[0.0], several])
    return horizons
