"""Is a mixture sound, guided or not: are proportions exact, passes complete, and does a network learn as much?

The loader's own modules (``mix_schedule``, ``mix_part``, ``guided``) on simulated caches (``bench.soundness``), one per
part: no threads, no bytes, every draw seeded. A batch waits until each part can give its samples, as in the loader;
after ``PATIENCE_TICKS`` the missing ones are read past the cache. Not simulated: batches drawn ahead of the loop.

Expected: no duplicate and no omission in any pass; without guidance no part is ever a sample away from its proportion;
guided, no weight beyond the declared bias; labels within a part that no test tells from a uniform shuffle's; and on the
digits, whose parts are groups of classes, an accuracy within ``MARGIN`` of that of a plain shuffle.

    python -m bench.mix_soundness [--write docs/mixtures.md] [--seeds 16]           five to fifteen minutes
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from scipy import stats
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from bench.soundness import MARGIN, PATIENCE_TICKS, SAMPLE_BYTES, Cache, divergences, labels_of, place
from quiver.residency import ConsumerReport, rounded_up
from quiver.substitution import DRAINED_AT_ONCE, Ints, View
from quiver_client.loader.epoch import Deal, Epoch, ShardLayout
from quiver_client.loader.mix.guided import Guided, Losses
from quiver_client.loader.mix.part import Chosen, PartPasses
from quiver_client.loader.mix.schedule import Schedule, in_units, tempered

BEGIN: Final = "<!-- numbers: begin (python -m bench.mix_soundness --write docs/mixtures.md) -->"
END: Final = "<!-- numbers: end -->"
WEIGHTS: Final = (0.5, 0.3, 0.2)
Batch = list[tuple[int, Ints, Ints]]  # of each part drawn: its number, the rows, and the passes that they are of


class SimulatedPart:
    """A part with a cache of its own. It has the attributes that ``bench.soundness.Cache`` reads of a consumer."""

    number = 0

    def __init__(self, name: str, layout: ShardLayout, cached: float, batch: int, seed: int) -> None:
        deal = Deal(len(layout.shard_of), seed, True, 0, 1, 1, False)
        self.passes = PartPasses(name, "0" * 64, layout, deal)
        self.passes.is_read = True
        self.passes.open_next()
        self.layout, self.waited = layout, 0
        count = len(layout.counts)
        self._view = View(np.zeros(count, bool), np.zeros(count, np.uint8), np.zeros(count, np.int64))
        self._arrivals = 0
        self._cache = Cache(layout, cached, batch, seed)
        self._rate = float(batch * SAMPLE_BYTES)

    @property
    def available(self) -> float:
        pending = self.passes.pending
        return self.passes.usable(self._view) / pending if pending else 1.0

    def report(self) -> ConsumerReport:
        left = self.passes.left
        return ConsumerReport(
            consumer=self.number.to_bytes(16, "big"),
            left=rounded_up(left, self.layout.counts),
            rate=self._rate,
            ahead_bytes=float((left * self.layout.sample_bytes)[self._view.resident].sum()),
            lease_seconds=1e9,
        )

    def learn(self, seen: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        resident = seen > 0
        new = resident & ~self._view.resident
        arrived = self._view.arrived
        if new.any():
            self._arrivals += 1
            arrived = np.where(new, self._arrivals, arrived)
        self._view = View(resident, np.where(resident, seen - 1, 0).astype(np.uint8), arrived)

    def tick(self, now: int) -> None:
        self._cache.tick(now, [self])  # type: ignore[list-item]

    def choose(self, count: int) -> Chosen | None:
        def choose(epoch: Epoch, wanted: int) -> Ints | None:
            entries = epoch.choose(wanted, self._view, None)
            return epoch.completed(wanted, self._view, None) if entries is None and self._is_impatient else entries

        found = self.passes.choose(count, choose)
        self.waited = 0 if found is not None else self.waited + 1
        return found

    @property
    def _is_impatient(self) -> bool:
        return self.waited >= PATIENCE_TICKS


class Mixture:
    """A mixture as one rank reads it. ``guided``: as for ``Mix``."""

    def __init__(self, parts: Sequence[SimulatedPart], weights: Sequence[float], batch: int, guided: Guided | None):
        self.parts, self.base, self._batch, self.guided = parts, list(weights), batch, guided
        self._schedule = Schedule.fresh(in_units(weights))
        self._losses = Losses([str(at) for at in range(len(parts))], guided) if guided else None
        self._now = self._drawn = 0
        self.deviation = 0.0  # the largest, in samples
        self.factors: list[float] = [1.0]  # weights ÷ those that were given

    def report(self, part: int, loss: float) -> None:
        if self._losses is not None and self.guided is not None:
            self._losses.add(max(self._drawn - 1, 0) // self.guided.interval, str(part), loss)

    def next(self) -> Batch:
        """Return the next batch."""
        self._guide()
        counts = self._schedule.counts(self._batch)
        while True:
            for part in self.parts:
                part.tick(self._now)
            self._now += 1
            chosen = [part.choose(count) if count else [] for part, count in zip(self.parts, counts, strict=True)]
            if all(each is not None for each in chosen):
                break
        self._schedule = self._schedule.after(counts)
        self.deviation = max(self.deviation, *(abs(each) / self._schedule.unit for each in self._schedule.deficits))
        self._drawn += 1
        batch = []
        for at, (part, found) in enumerate(zip(self.parts, chosen, strict=True)):
            if found:
                taken = part.passes.draw(found)
                part.passes.consume(taken)
                batch.append((at, taken.rows, taken.epochs))
        return batch

    def _guide(self) -> None:
        if self.guided is None or self._losses is None or self._drawn % self.guided.interval:
            return
        utilities = self._losses.utilities(self._drawn // self.guided.interval)
        weights = self.guided.weights(self.base, utilities, [part.available for part in self.parts])
        self.factors += [weight / given for weight, given in zip(weights, self.base, strict=True)]
        self._schedule = Schedule(in_units(weights), self._schedule.deficits)


# -- orders and labels ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One line of the first table."""

    name: str
    passes: list[int]
    duplicates: int
    omissions: int
    deviation: float
    low: float
    high: float
    drawn: list[float]  # share of all samples, by part
    distance: float  # Kolmogorov-Smirnov, of label divergences within the parts
    p: float


def measure_order(name: str, cached: float, guided: Guided | None, batches: int, seed: int) -> Row:
    """Draw from parts of 256, 64 and 16 shards; the smallest has the highest loss."""
    batch, sizes = 96, (256, 64, 16)
    layouts = [place("mixed", size * 128, 128, seed + at, DRAINED_AT_ONCE) for at, size in enumerate(sizes)]
    parts = [
        SimulatedPart(str(at), each, cached, int(batch * WEIGHTS[at]), seed + at) for at, each in enumerate(layouts)
    ]
    mixture = Mixture(parts, WEIGHTS, batch, guided)
    labels = [labels_of("mixed", len(each.shard_of), 10, seed + at) for at, each in enumerate(layouts)]
    taken: list[list[tuple[Ints, Ints]]] = [[] for _ in parts]
    for _ in range(batches):
        for part, rows, passes in mixture.next():
            taken[part].append((rows, passes))
            mixture.report(part, (1.0, 1.5, 3.0)[part])
    duplicates = omissions = 0
    completed, ours, uniform = [], [], []
    chance = np.random.default_rng([seed, 9])
    for at, each in enumerate(taken):
        rows, passes = (np.concatenate(one) for one in zip(*each, strict=True))
        last = int(passes.max())
        for number in range(last + 1):
            found = np.bincount(rows[passes == number], minlength=len(labels[at]))
            duplicates += int((found > 1).sum())
            omissions += int((found == 0).sum()) if number < last else 0
        completed.append(last)
        ours.append(divergences(labels[at], [rows for rows, _ in each]))
        ends = np.cumsum([len(rows) for rows, _ in each])
        order = np.concatenate([chance.permutation(len(labels[at])) for _ in range(last + 1)])
        uniform.append(divergences(labels[at], np.split(order[: ends[-1]], ends[:-1])))
    test = stats.ks_2samp(np.concatenate(ours), np.concatenate(uniform), method="asymp")
    total = sum(len(rows) for each in taken for rows, _ in each)
    drawn = [sum(len(rows) for rows, _ in each) / total for each in taken]
    low, high = min(mixture.factors), max(mixture.factors)
    distance, p = float(test.statistic), float(test.pvalue)
    return Row(name, completed, duplicates, omissions, mixture.deviation, low, high, drawn, distance, p)


# -- training ---------------------------------------------------------------------------------------------------------

GROUPS: Final = ((0, 1, 2), (3, 4, 5, 6), (7, 8, 9))


def accuracy(cached: float | None, guided: Guided | None, seed: int, passes: int = 20) -> float:
    """Train on the digits, whose parts are groups of classes; return the test accuracy in percent.

    ``cached=None``: a plain shuffle of all digits.
    """
    pixels, digits = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        (pixels / 16).astype(np.float32), digits, test_size=0.25, random_state=0, stratify=digits
    )
    rows = [np.flatnonzero(np.isin(train_y, group)) for group in GROUPS]
    batch, steps = 32, passes * len(train_x) // 32
    torch.manual_seed(seed)
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    mixture = _mixture_of(rows, cached, guided, batch, seed) if cached is not None else None
    plain = _plain(len(train_x), batch, seed)
    for _ in range(steps):
        drawn = mixture.next() if mixture is not None else []
        at = np.concatenate([rows[part][each] for part, each, _ in drawn]) if drawn else next(plain)
        optimizer.zero_grad()
        inputs, labels = torch.from_numpy(train_x[at]), torch.from_numpy(train_y[at])
        losses = torch.nn.functional.cross_entropy(network(inputs), labels, reduction="none")
        losses.mean().backward()
        optimizer.step()
        begin = 0
        for part, each, _ in drawn:
            assert mixture is not None
            mixture.report(part, float(losses[begin : begin + len(each)].detach().mean()))
            begin += len(each)
    with torch.no_grad():
        found = network(torch.from_numpy(test_x)).argmax(1) == torch.from_numpy(test_y)
    return 100 * float(found.float().mean())


def _mixture_of(rows: Sequence[Ints], cached: float, guided: Guided | None, batch: int, seed: int) -> Mixture:
    sizes = {str(at): len(each) for at, each in enumerate(rows)}
    weights = [weight / sum(tempered(1, sizes)) for weight in tempered(1, sizes)]
    layouts = [place("mixed", size, 16, seed, DRAINED_AT_ONCE) for size in sizes.values()]
    parts = [
        SimulatedPart(name, layout, cached, max(round(batch * weight), 1), seed)
        for name, layout, weight in zip(sizes, layouts, weights, strict=True)
    ]
    return Mixture(parts, weights, batch, guided)


def _plain(samples: int, batch: int, seed: int) -> Iterator[Ints]:
    chance = np.random.default_rng([seed, 4])
    while True:
        order = chance.permutation(samples)
        yield from np.split(order, range(batch, samples, batch))


def equivalence(name: str, ours: np.ndarray[Any, Any], plain: np.ndarray[Any, Any]) -> list[Any]:
    """Return a line of the second table: two one-sided t-tests, paired by seed."""
    differences = ours - plain
    mean, error = float(differences.mean()), max(float(differences.std(ddof=1)) / len(ours) ** 0.5, 1e-12)
    half = float(stats.t.ppf(0.95, len(ours) - 1)) * error
    p = float(stats.t.sf((MARGIN - abs(mean)) / error, len(ours) - 1))
    value = f"{p:.3f}" if p >= 0.0005 else "< 0.0005"
    spread = f"{ours.mean():.2f} ± {ours.std(ddof=1):.2f}"
    return [name, len(ours), spread, f"{mean:+.2f}", f"{mean - half:+.2f} to {mean + half:+.2f}", value]


# -- the report -------------------------------------------------------------------------------------------------------


def rendered(rows: Sequence[Row], trained: Sequence[Sequence[Any]]) -> str:
    orders = [
        [
            row.name,
            " ".join(map(str, row.passes)),
            f"{row.duplicates} / {row.omissions}",
            f"{row.deviation:.3f}",
            f"{row.low:.2f} to {row.high:.2f}",
            " ".join(f"{share:.1%}" for share in row.drawn),
            f"{row.distance:.3f}",
            f"{row.p:.2f}" if row.p >= 0.005 else "< 0.005",
        ]
        for row in rows
    ]
    heads = ["case", "passes of each part", "duplicates / omissions", "farthest from the proportions, samples"]
    heads += ["weights ÷ given", "drawn of each part", "labels within parts: KS distance", "p"]
    second = ["digits", "seeds", "test accuracy %", "difference", "its 90 % interval", "TOST p"]
    return f"{_table(heads, orders)}\n\n{_table(second, trained)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


CASES: Final[tuple[tuple[str, float, Callable[[], Guided | None]], ...]] = (
    ("everything cached", 1.0, lambda: None),
    ("20% cached", 0.2, lambda: None),
    ("guided, everything cached", 1.0, Guided),
    ("guided, 20% cached", 0.2, Guided),
    ("guided, bias 1.25, 20% cached", 0.2, lambda: Guided(bias=1.25)),
)


def measure(batches: int, seeds: int) -> tuple[list[Row], list[list[Any]]]:
    torch.set_num_threads(1)
    rows = [measure_order(name, cached, guided(), batches, 0) for name, cached, guided in CASES]
    plain = np.asarray([accuracy(None, None, seed) for seed in range(seeds)])
    trained: list[list[Any]] = [["plain shuffle", seeds, f"{plain.mean():.2f} ± {plain.std(ddof=1):.2f}", "", "", ""]]
    for name, cached, guided in CASES:
        ours = np.asarray([accuracy(cached, guided(), seed) for seed in range(seeds)])
        trained.append(equivalence(name, ours, plain))
    return rows, trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="the document whose numbers to replace")
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--batches", type=int, default=1000)
    asked = parser.parse_args()
    began = time.perf_counter()
    text = rendered(*measure(asked.batches, asked.seeds))
    print(text)
    print(f"{time.perf_counter() - began:.0f} s")
    if asked.write:
        document = asked.write.read_text()
        old = document.split(BEGIN)[1].split(END, maxsplit=1)[0]
        asked.write.write_text(document.replace(old, f"\n{text}\n"))


if __name__ == "__main__":
    main()
