"""Is substitution sound: do batches look like a uniform shuffle's, and does a network learn as much from them?

The loader's own modules (``quiver.substitution``, the loader's ``Epoch`` and ``ShardLayout``, ``quiver.residency``,
and ``quiver.layout`` for the shards) run on a clock that ticks once per batch: no threads, no bytes, every draw seeded.
One cache fetches and evicts for all consumers; a fetched shard arrives ``FILL_TICKS`` later, at most ``FILLS`` are in
progress, and the cache holds at most its share, and at least two shards. Not simulated: batches drawn ahead of the
training loop, and several daemons.

Expected: never a duplicate or an omission; under ``mixed`` labels that no test can distinguish from a uniform
shuffle's, and an order that differs in how often samples share a batch; under ``sequential`` batches of few classes,
and a warning.

    python -m bench.soundness [--write docs/substitution.md] [--json FILE] [--seeds 20]      two to three minutes
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from scipy import stats
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from quiver import layout as placing
from quiver.digest import Digest
from quiver.lookup import as_rows
from quiver.residency import (
    ConsumerReport,
    Needs,
    OriginEstimate,
    Recipe,
    Shelf,
    Situation,
    StoredFile,
    decide,
    rounded_up,
)
from quiver.substitution import DRAINED_AT_ONCE, DRAINED_WHERE_ALIKE, Ints, View
from quiver_client.loader.epoch import Deal, Epoch, ShardLayout
from quiver_client.loader.labels import LabelWatch

BEGIN: Final = "<!-- numbers: begin (python -m bench.soundness --write docs/substitution.md) -->"
END: Final = "<!-- numbers: end -->"
DATASET: Final = Digest(bytes(32))
SAMPLE_BYTES: Final = 1000
FILL_TICKS: Final = 2
FILLS: Final = 2
PATIENCE_TICKS: Final = 20
PERCENTILES: Final = (5, 25, 50, 75, 95, 99)
CLASSES: Final = (10, 100)
MARGIN: Final = 1.0  # percentage points of accuracy, chosen before any run
FEW: Final = 4  # shards at once, to show the effect of the loader's number for the sequential layout


@dataclass(frozen=True)
class Scale:
    """The size of the simulation. ``seeds`` and ``passes`` are those of the training on the digits."""

    shards: int = 256
    samples: int = 128  # per shard, on average
    batch: int = 128
    epochs: int = 8  # per layout and case
    layouts: int = 4  # random layouts, each with its own labels
    seeds: int = 20
    passes: int = 30
    uniform_runs: int = 400


@dataclass(frozen=True)
class Case:
    """A row of the tables. ``larger`` multiplies the scale's batch size, ``fewer`` divides its number of shards."""

    name: str
    cached: float
    layout: placing.Layout = "mixed"
    drained_at_once: int = DRAINED_AT_ONCE
    lookahead: int | None = None  # in batches
    consumers: int = 1
    larger: int = 1
    fewer: int = 1


MIXED: Final = tuple(Case(f"mixed, {cached:.0%}", cached) for cached in (0.1, 0.2, 0.5))
SEQUENTIAL: Final = tuple(
    Case(f"sequential, {cached:.0%}, from {at_once} shards", cached, "sequential", at_once)
    for at_once in (FEW, DRAINED_WHERE_ALIKE)
    for cached in (0.1, 0.2, 0.5)
)
OTHERS: Final = (
    Case("mixed, 20%, two consumers", 0.2, consumers=2),
    Case("mixed, 20%, a sixteenth of the shards", 0.2, fewer=16),
    Case("mixed, 20%, batches eight times as large", 0.2, larger=8),
    Case("mixed, 2%", 0.02),
    Case("sequential, 20%, lookahead of 16 batches", 0.2, "sequential", DRAINED_WHERE_ALIKE, lookahead=16),
)
CASES: Final = MIXED + OTHERS + SEQUENTIAL


@dataclass(frozen=True, eq=False)
class Pass:
    """One epoch of a consumer: its samples in order, the ends of batches, and the resident samples at the start."""

    rows: Ints
    ends: Ints
    resident: Ints  # samples
    direct: int  # samples read from the origin, bypassing the cache

    @property
    def batches(self) -> list[Ints]:
        return np.split(self.rows, self.ends[:-1])


class Consumer:
    """A job of one rank, with the behaviour of the loader's sampler."""

    def __init__(self, number: int, deal: Deal, layout: ShardLayout, lookahead: int | None) -> None:
        self.number, self.deal, self.layout, self._lookahead = number, deal, layout, lookahead
        count = len(layout.counts)
        self._view = View(np.zeros(count, bool), np.zeros(count, np.uint8), np.zeros(count, np.int64))
        self._arrivals = self._waited = 0
        self.passes: list[Pass] = []
        self._begin()

    def _begin(self) -> None:
        number = len(self.passes)
        share, _ = self.deal.share(self.deal.order(number, np.zeros(self.deal.samples, bool)))
        self._epoch = Epoch(number, share, self.layout)
        self._taken: list[Ints] = []
        self._resident = np.flatnonzero(self._view.resident[self.layout.shard_of])
        self._direct = 0

    @property
    def starving(self) -> bool:
        return self._waited > 0

    def report(self) -> ConsumerReport:
        left = self._epoch.left
        return ConsumerReport(
            consumer=self.number.to_bytes(16, "big"),
            left=rounded_up(left, self.layout.counts),
            rate=float(self.deal.batch_size * SAMPLE_BYTES),
            ahead_bytes=float((left * self.layout.sample_bytes)[self._view.resident].sum()),
            lease_seconds=1e9,
        )

    def learn(self, seen: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Learn what is resident, as ``quiver_client.needs_reporter`` does."""
        resident = seen > 0
        new = resident & ~self._view.resident
        arrived = self._view.arrived
        if new.any():
            self._arrivals += 1
            arrived = np.where(new, self._arrivals, arrived)
        self._view = View(resident, np.where(resident, seen - 1, 0).astype(np.uint8), arrived)

    def step(self, held: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        """Take a batch, unless the draw has to wait."""
        if not self._taken:
            self._resident = np.flatnonzero(self._view.resident[self.layout.shard_of])
        entries = self._epoch.choose(self.deal.batch_size, self._view, self._lookahead)
        if entries is None:
            self._waited += 1
            if self._waited < PATIENCE_TICKS:
                return
            entries = self._epoch.completed(self.deal.batch_size, self._view, self._lookahead)
        self._waited = 0
        drawn = self._epoch.draw(entries)
        self._direct += int(np.count_nonzero(~held[self.layout.shard_of[drawn.rows]]))
        self._taken.append(self._epoch.consume(drawn.number))
        if self._epoch.finished:
            ends = np.cumsum([len(batch) for batch in self._taken])
            self.passes.append(Pass(np.concatenate(self._taken), ends, self._resident, self._direct))
            self._begin()


class Cache:
    """A cache with room for a share of the dataset: it fetches and evicts as the policy decides."""

    def __init__(self, layout: ShardLayout, cached: float, batch: int, seed: int) -> None:
        self._needs = Needs(seed)
        self._sizes = layout.counts * layout.sample_bytes
        self._names = [Digest((shard + 1).to_bytes(32, "big")) for shard in range(len(layout.counts))]
        self._shard_of = {name: shard for shard, name in enumerate(self._names)}
        self.held = np.zeros(len(self._sizes), bool)
        self._needs.add_dataset(
            DATASET, as_rows(self._names), self._sizes, self.held.copy(), np.ones(len(self._sizes), bool)
        )
        self._room = max(cached * self._sizes.sum(), 2 * self._sizes.max())
        self._since = np.zeros(len(self._sizes))
        self._coming: dict[int, int] = {}
        # Twice as fast as one consumer reads.
        self._origin = OriginEstimate(2.0 * batch * SAMPLE_BYTES, float(FILL_TICKS), 1.0)
        self.fetched_bytes = 0.0

    def tick(self, now: int, consumers: Sequence[Consumer]) -> None:
        for shard, at in list(self._coming.items()):
            if at <= now:
                del self._coming[shard]
                self.held[shard], self._since[shard] = True, now
                self._needs.arrived(self._names[shard])
                self._needs.end(Recipe(self._names[shard], DATASET))
        for it in consumers:
            assert self._needs.report(DATASET, it.report(), float(now))
        self._fetch(now)
        for it in consumers:
            it.learn(self._needs.seen_by(it.number.to_bytes(16, "big")))

    def _fetch(self, now: int) -> None:
        situation = Situation(
            now=float(now),
            free_bytes=self._room - self.bytes,
            fetches_max=FILLS - len(self._coming),
            origin=self._origin,
            shelf=lambda: self._shelf(now),
        )
        self._needs.expire(float(now))
        for decision in decide(self._needs, situation):
            self._needs.commit(decision)
            for victim in decision.evict:
                self.held[self._shard_of[victim]] = False
                self._needs.gone(victim)
            shard = self._shard_of[decision.shard]
            self._coming[shard] = now + FILL_TICKS
            self.fetched_bytes += self._sizes[shard]
            assert self.bytes <= self._room

    @property
    def bytes(self) -> float:
        return float(self._sizes[self.held].sum() + self._sizes[list(self._coming)].sum())

    def _shelf(self, now: int) -> Shelf:
        held = np.flatnonzero(self.held).tolist()
        files = [StoredFile(self._names[at], int(self._sizes[at]), self._since[at]) for at in held]
        return Shelf.of(files, float(now), self._needs.needed_of)


def place(layout: placing.Layout, samples: int, per_shard: int, seed: int, drained_at_once: int) -> ShardLayout:
    """Place samples in shards as indexing does, with digests derived from the seed."""
    digests = np.random.default_rng([seed, 1]).integers(0, 256, (samples, 32), np.uint8)
    # Shards come out at about three quarters (mixed) and half (sequential) of the limit.
    limit = int(per_shard * (SAMPLE_BYTES + placing.ROW_BYTES) * (1.35 if layout == "mixed" else 2.0))
    sizes = np.full(samples, SAMPLE_BYTES, np.uint64)
    order, firsts = placing.place(layout, digests, sizes, np.zeros(samples, np.uint32), limit)
    counts = np.diff(firsts)
    shard_of = np.zeros(samples, np.int64)
    shard_of[order] = np.repeat(np.arange(len(counts)), counts)
    mean_bytes = np.full(len(counts), float(SAMPLE_BYTES))
    return ShardLayout(shard_of, counts, mean_bytes, float(counts.mean() * SAMPLE_BYTES), drained_at_once)


def take(case: Case, layout: ShardLayout, batch: int, epochs: int, seed: int) -> tuple[list[Consumer], float]:
    """Run the consumers over complete epochs, the second half an epoch later; return them and the fetched bytes."""
    cache = Cache(layout, case.cached, batch, seed)
    lookahead = None if case.lookahead is None else case.lookahead * batch
    samples = len(layout.shard_of)
    deals = [Deal(samples, seed * 64 + at, True, 0, 1, batch, False) for at in range(case.consumers)]
    consumers = [Consumer(0, deals[0], layout, lookahead)]
    now = 0
    while any(len(it.passes) < epochs for it in consumers) or len(consumers) < case.consumers:
        if len(consumers) < case.consumers and now >= samples // batch // 2 * len(consumers):
            consumers.append(Consumer(len(consumers), deals[len(consumers)], layout, lookahead))
        cache.tick(now, consumers)
        for it in consumers:
            it.step(cache.held)
        now += 1
    return consumers, cache.fetched_bytes


# -- measurements -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ordered:
    """Properties of a case's order; those that depend on the previous epoch are from the second epoch on."""

    name: str
    epochs: int
    duplicates: int
    omissions: int
    origin: float  # bytes read from the origin ÷ dataset, per epoch and consumer
    direct: float  # the part that bypassed the cache
    spearman: float  # rank correlation of the orders of consecutive epochs, mean
    spearman_worst: float  # the one farthest from 0
    met_again: float  # share of a sample's batch mates that were its batch mates in the previous epoch
    met_again_by_chance: float
    resident: float  # share of samples that are resident when an epoch begins
    position: float  # the mean position of those samples in the epoch, 0 to 1


@dataclass(frozen=True)
class Labelled:
    """Chi-squared of batches' labels, divided by its degrees of freedom: a uniform shuffle's mean is 1."""

    name: str
    classes: int
    percentiles: tuple[float, ...]
    uniform: tuple[float, ...]
    statistic: float  # of the two-sample Kolmogorov-Smirnov test
    p: float
    epochs: int
    warned: int  # epochs in which a new LabelWatch warned


@dataclass(frozen=True)
class Alarms:
    """How often ``LabelWatch`` warns of uniform shuffles."""

    name: str
    epochs: int
    warned: int


@dataclass(frozen=True)
class Accuracy:
    """Test accuracy on the digits, in percent; differences are paired by seed, relative to no substitution."""

    name: str
    seeds: int
    mean: float
    deviation: float
    difference: float
    low: float  # of the 90 % confidence interval
    high: float
    p: float  # of the larger of the two one-sided tests
    each: tuple[float, ...]


def measure_order(case: Case, consumers: Sequence[Consumer], fetched_bytes: float) -> Ordered:
    samples, batch = consumers[0].deal.samples, consumers[0].deal.batch_size
    duplicates = omissions = direct = 0
    correlations, again, positions, resident = [], [], [], []
    for it in consumers:
        place_before: Ints | None = None
        for number, one in enumerate(it.passes):
            counts = np.bincount(one.rows, minlength=samples)
            duplicates += int(np.maximum(counts - 1, 0).sum())
            omissions += int(np.count_nonzero(counts == 0))
            direct += one.direct
            place_now = np.empty(samples, np.int64)
            place_now[one.rows] = np.arange(len(one.rows))
            if place_before is not None:
                if number > 1:  # the first epoch begins with an empty cache
                    correlations.append(float(np.corrcoef(place_before, place_now)[0, 1]))
                    again.append(_met_again(place_before // batch, place_now // batch))
                if len(one.resident):
                    positions.append(float(place_now[one.resident].mean() / (samples - 1)))
                resident.append(len(one.resident) / samples)
            place_before = place_now
    epochs = sum(len(it.passes) for it in consumers)
    return Ordered(
        name=case.name,
        epochs=epochs,
        duplicates=duplicates,
        omissions=omissions,
        origin=(fetched_bytes / SAMPLE_BYTES + direct) / samples / epochs,
        direct=direct / samples / epochs,
        spearman=float(np.mean(correlations)),
        spearman_worst=max(correlations, key=abs),
        met_again=float(np.mean(again)),
        met_again_by_chance=(batch - 1) / (samples - 1),
        resident=float(np.mean(resident)),
        position=float(np.mean(positions)) if positions else float("nan"),
    )


def _met_again(before: Ints, now: Ints) -> float:
    """Return the share of all pairs in one batch ``now (samples,)`` that were in one batch ``before``."""
    both = np.unique(before * (int(now.max()) + 1) + now, return_counts=True)[1]
    alone = np.bincount(now)
    return float((both * (both - 1)).sum() / (alone * (alone - 1)).sum())


def labels_of(layout: placing.Layout, samples: int, classes: int, seed: int) -> Ints:
    """Return a label per sample: sorted, as in folders of classes, if the layout keeps the order."""
    labels = np.random.default_rng([seed, classes]).integers(0, classes, samples)
    return np.sort(labels) if layout == "sequential" else labels


def divergences(labels: Ints, batches: Iterable[Ints]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return, per batch, Pearson's chi-squared of its labels against all labels ÷ its degrees of freedom."""
    counts = np.bincount(labels)
    shares = counts / counts.sum()
    found = []
    for rows in batches:
        expected = shares * len(rows)
        found.append((((np.bincount(labels[rows], minlength=len(shares)) - expected) ** 2) / expected).sum())
    return np.asarray(found) / (len(shares) - 1)


def measure_labels(case: Case, runs: Sequence[Sequence[Consumer]], classes: int, seed: int) -> Labelled:
    """Compare the labels of batches with a uniform shuffle's. ``runs``: the consumers by layout."""
    found, by_chance = [], []
    epochs = warned = 0
    for run, consumers in enumerate(runs):
        deal = consumers[0].deal
        labels = labels_of(case.layout, deal.samples, classes, seed + run)
        taken = [one.batches for it in consumers for one in it.passes[1:]]
        found += [divergences(labels, batches) for batches in taken]
        by_chance += [divergences(labels, batches) for batches in _uniform(deal, len(taken), seed + run)]
        epochs += len(taken)
        warned += sum(warns(labels, batches) for batches in taken)
    ours, uniform = np.concatenate(found), np.concatenate(by_chance)
    test = stats.ks_2samp(ours, uniform, method="asymp")
    return Labelled(
        name=case.name,
        classes=classes,
        percentiles=tuple(np.percentile(ours, PERCENTILES).tolist()),
        uniform=tuple(np.percentile(uniform, PERCENTILES).tolist()),
        statistic=float(test.statistic),
        p=float(test.pvalue),
        epochs=epochs,
        warned=warned,
    )


def _uniform(deal: Deal, epochs: int, seed: int) -> Iterable[list[Ints]]:
    chance = np.random.default_rng([seed, 2])
    for _ in range(epochs):
        yield np.split(chance.permutation(deal.samples), range(deal.batch_size, deal.samples, deal.batch_size))


def warns(labels: Ints, batches: Iterable[Ints]) -> bool:
    """Whether a new ``LabelWatch`` warns of these batches."""
    watch = LabelWatch(labels)
    for rows in batches:
        watch.seen(rows)
    return watch.has_warned


def measure_alarms(scale: Scale, seed: int) -> list[Alarms]:
    """Count false alarms: warnings about uniform shuffles, of balanced and of unbalanced labels."""
    samples = scale.shards * scale.samples
    deal = Deal(samples, seed, True, 0, 1, scale.batch, False)
    chance = np.random.default_rng([seed, 3])
    weights = 1 / np.arange(1, 201)
    kinds = {
        "uniform, 10 even classes": chance.integers(0, 10, samples),
        "uniform, 200 classes by Zipf's law": chance.choice(200, samples, p=weights / weights.sum()),
        "uniform, 2 classes, one of 0.01% of the samples": (np.arange(samples) < max(samples // 10_000, 2)).astype(int),
    }
    found = []
    for name, labels in kinds.items():
        warned = sum(warns(labels, batches) for batches in _uniform(deal, scale.uniform_runs, seed))
        found.append(Alarms(name, scale.uniform_runs, warned))
    return found


def measure_accuracy(scale: Scale) -> list[Accuracy]:
    """Train on the digits. Each seed gives the same initial weights and the same layout to every case."""
    pixels, digits = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        (pixels / 16).astype(np.float32), digits, test_size=0.25, random_state=0, stratify=digits
    )
    tensors = torch.from_numpy(train_x), torch.from_numpy(train_y)
    test = torch.from_numpy(test_x), torch.from_numpy(test_y)
    batch, per_shard = 32, 16
    reached: dict[str, list[float]] = {}
    for seed in range(scale.seeds):
        layout = place("mixed", len(train_x), per_shard, seed, DRAINED_AT_ONCE)
        deal = Deal(len(train_x), seed * 64, True, 0, 1, batch, False)
        plain = [deal.order(epoch, np.zeros(deal.samples, bool)) for epoch in range(scale.passes)]
        orders = {"none": [np.split(rows, range(batch, len(rows), batch)) for rows in plain]}
        for case in MIXED:
            consumers, _ = take(case, layout, batch, scale.passes, seed)
            taken = consumers[0].passes
            assert all(len(one.rows) == len(np.unique(one.rows)) == deal.samples for one in taken)
            orders[case.name] = [one.batches for one in taken]
        for name, epochs in orders.items():
            reached.setdefault(name, []).append(_trained(tensors, test, epochs, seed))
    return [_compared(name, np.asarray(each), np.asarray(reached["none"])) for name, each in reached.items()]


def _trained(
    tensors: tuple[torch.Tensor, torch.Tensor],
    test: tuple[torch.Tensor, torch.Tensor],
    epochs: Sequence[list[Ints]],
    seed: int,
) -> float:
    """Return the accuracy, in percent, of a small network after these epochs."""
    torch.manual_seed(seed)
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for batches in epochs:
        for rows in batches:
            at = torch.from_numpy(rows)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(tensors[0][at]), tensors[1][at]).backward()
            optimizer.step()
    with torch.no_grad():
        return 100 * float((network(test[0]).argmax(1) == test[1]).float().mean())


def _compared(name: str, ours: np.ndarray[Any, Any], without: np.ndarray[Any, Any]) -> Accuracy:
    """Test, paired by seed, whether the means differ by less than ``MARGIN`` (two one-sided t-tests)."""
    differences = ours - without
    mean, count = float(differences.mean()), len(differences)
    error = max(float(differences.std(ddof=1)) / count**0.5, 1e-12)
    half = float(stats.t.ppf(0.95, count - 1)) * error
    p = float(stats.t.sf((MARGIN - abs(mean)) / error, count - 1))
    deviation = float(ours.std(ddof=1))
    return Accuracy(name, count, float(ours.mean()), deviation, mean, mean - half, mean + half, p, tuple(ours.tolist()))


# -- the report -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """All that the document shows."""

    scale: Scale
    seed: int
    seconds: float
    orders: list[Ordered]
    labels: list[Labelled]
    alarms: list[Alarms]
    accuracy: list[Accuracy]


def measure(scale: Scale, seed: int = 0, cases: Sequence[Case] = CASES) -> Results:
    began = time.perf_counter()
    torch.set_num_threads(1)
    orders, labels = [], []
    for case in cases:
        samples = scale.shards * scale.samples
        runs, fetched_bytes = [], 0.0
        for run in range(seed, seed + scale.layouts):
            layout = place(case.layout, samples, scale.samples * case.fewer, run, case.drained_at_once)
            consumers, fetched = take(case, layout, scale.batch * case.larger, scale.epochs, run)
            runs.append(consumers)
            fetched_bytes += fetched
        order = measure_order(case, [it for consumers in runs for it in consumers], fetched_bytes)
        assert order.duplicates == order.omissions == 0, order
        orders.append(order)
        labels += [measure_labels(case, runs, classes, seed) for classes in CLASSES]
    alarms, accuracy = measure_alarms(scale, seed), measure_accuracy(scale)
    return Results(scale, seed, time.perf_counter() - began, orders, labels, alarms, accuracy)


def rendered(results: Results) -> str:
    """Return the tables of the document."""
    scale = results.scale
    expected = 1 / (scale.shards * scale.samples - 1) ** 0.5
    orders = [
        [
            it.name,
            it.epochs,
            f"{it.duplicates} / {it.omissions}",
            f"{it.origin:.2f}" + (f" ({it.direct:.2f})" if it.direct >= 0.005 else ""),
            f"{it.spearman:+.3f} ({it.spearman_worst:+.3f})",
            f"{it.met_again:.1%} / {it.met_again_by_chance:.1%}",
            f"{it.resident:.0%}: {it.position:.2f}" if it.resident else "0%",
        ]
        for it in results.orders
    ]
    labels = [
        [
            it.name,
            it.classes,
            " ".join(f"{value:.2f}" for value in it.percentiles),
            " ".join(f"{value:.2f}" for value in it.uniform),
            f"{it.statistic:.3f}",
            f"{it.p:.2f}" if it.p >= 0.005 else "< 0.005",
            f"{it.warned} of {it.epochs}",
        ]
        for it in results.labels
    ]
    alarms = [[it.name, f"{it.warned} of {it.epochs}"] for it in results.alarms]
    accuracy = [
        [
            it.name,
            it.seeds,
            f"{it.mean:.2f} ± {it.deviation:.2f}",
            *(
                ("", "", "")
                if it.name == "none"
                else (f"{it.difference:+.2f}", f"{it.low:+.2f} to {it.high:+.2f}", _p(it.p))
            ),
        ]
        for it in results.accuracy
    ]
    percentiles = "/".join(str(at) for at in PERCENTILES)
    uniform = f"uniform: 0 ± {expected:.3f}"
    parts = [
        f"{scale.shards} shards of about {scale.samples} samples, batches of {scale.batch}; "
        f"{scale.layouts} layouts, {scale.epochs} epochs each, from seed {results.seed}.",
        _table(
            [
                "layout, cache",
                "epochs",
                "duplicates / omissions",
                "read from the origin, datasets an epoch (past the cache)",
                f"rank correlation of consecutive epochs, mean (farthest); {uniform}",
                "batch mates that were batch mates in the epoch before / by chance",
                "resident at the start: mean place in the epoch",
            ],
            orders,
        ),
        _table(
            [
                "layout, cache",
                "classes",
                f"label divergence, percentiles {percentiles}",
                "of a uniform shuffle",
                "KS distance",
                "p",
                "epochs with a warning",
            ],
            labels,
        ),
        _table(["false alarms", "epochs with a warning"], alarms),
        _table(
            ["digits, substitution", "seeds", "test accuracy %", "difference", "its 90 % interval", "TOST p"], accuracy
        ),
    ]
    return "\n\n".join(parts)


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.0005 else "< 0.0005"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def shape(text: str) -> list[str]:
    """Return the parts of the numbers' block that do not depend on the numbers: heads, and the rows' names."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    heads = [rows[at - 1].split("; uniform")[0] for at, row in enumerate(rows) if row.startswith("| ---")]
    return heads + [row.split("|")[1].strip() for row in rows]


def block(document: str) -> str:
    """Return the text between the two comments."""
    return document.split(BEGIN)[1].split(END, maxsplit=1)[0].strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="the document whose numbers to replace")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=Scale.seeds, help="of the training of the digits")
    parser.add_argument("--seed", type=int, default=0, help="of everything else")
    asked = parser.parse_args()
    logging.getLogger("quiver_client").setLevel(logging.ERROR)  # its warnings are counted
    results = measure(Scale(seeds=asked.seeds), asked.seed)
    print(rendered(results))
    print(f"{results.seconds:.0f} s", file=sys.stderr)
    if asked.write:
        text = asked.write.read_text()
        asked.write.write_text(text.replace(block(text), rendered(results)))
    if asked.json:
        asked.json.write_text(json.dumps(asdict(results), indent=2))


if __name__ == "__main__":
    main()
