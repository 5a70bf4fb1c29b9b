"""How many samples of each part the next batch of a mixture has: a pure function of the weights and of what was given.

Invariant: under fixed weights each part is less than one sample away from its weight's share of all samples, after
every batch, whatever the sizes of the batches. So the proportions are exact, and do not hold in expectation only.

The next sample of a part has a *due time*, counted in samples of the mixture: by then the part's share reaches it. It
may be given once the share has begun to grow towards it. Every batch gives first what is due by its end, and then what
may be given, the earliest due first. That is the schedule by earliest deadline for Tijdeman's chairman assignment
problem (Discrete Mathematics 32, 1980), known as P-fair scheduling (Baruah et al., Algorithmica 15, 1996); giving to
the part with the largest deficit alone would let a deficit grow beyond one sample where many parts fall due at once.

All is counted in integers: a weight in ``UNIT``ths of the mixture, and a *deficit*, the share due to a part minus what
it was given, in ``UNIT``ths of a sample. Floating point would drift.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from quiver.substitution import Ints

UNIT: Final = 1 << 53  # with 53 bits, a weight is a float's
Weights = tuple[int, ...]


def weights_of(weights: Mapping[str, float] | Sequence[float] | None, sizes: Mapping[str, int]) -> tuple[float, ...]:
    """Return one weight per part, in the order of ``sizes`` (part → samples), which add up to 1; ``None``: equal ones.

    A weight of 0 turns a part off. Raises ``ValueError`` naming ``weights``.
    """
    names = list(sizes)
    if weights is None:
        return (1 / len(names),) * len(names)
    if isinstance(weights, Mapping):
        unknown = [name for name in weights if name not in sizes]
        missing = [name for name in names if name not in weights]
        if unknown or missing:
            wrong = f"no part is called {unknown[0]!r}" if unknown else f"{missing[0]!r} has none"
            raise ValueError(f"weights: {wrong}; give one to each of {', '.join(map(repr, names))} (0: never draw it)")
        given = [weights[name] for name in names]
    else:
        given = _listed(weights, names)
    values = [_weight(name, value) for name, value in zip(names, given, strict=True)]
    largest = max(values)
    if not largest > 0:
        raise ValueError("weights: all are 0, so there is nothing to draw; give at least one part more than 0")
    scaled = [value / largest for value in values]  # their sum is finite, then
    return tuple(value / math.fsum(scaled) for value in scaled)


def tempered(temperature: Any, sizes: Mapping[str, int]) -> tuple[float, ...]:
    """Return weights proportional to ``size ** (1 / temperature)``, as usual in multilingual training.

    1: by size; towards infinity: equal (Arivazhagan et al., 2019, "Massively multilingual NMT in the wild", who take 5;
    mT5, Xue et al., 2021, writes its exponent as alpha = 0.3). Raises ``ValueError`` naming ``temperature``.
    """
    is_number = isinstance(temperature, int | float | np.number) and not isinstance(temperature, bool)
    if not is_number or not temperature > 0:
        raise ValueError(
            f"temperature={temperature!r}: give a number above 0; 1 draws by size, larger ones more evenly"
        )
    logs = [math.log(size) / float(temperature) for size in sizes.values()]
    return weights_of([math.exp(value - max(logs)) for value in logs], sizes)


def in_units(weights: Sequence[float]) -> Weights:
    """Return weights in ``UNIT``ths that add up to ``UNIT`` exactly; none that is above 0 becomes 0."""
    total = math.fsum(weights)
    exact = [weight / total * UNIT for weight in weights]
    units = [max(math.floor(value), 1) if weight > 0 else 0 for value, weight in zip(exact, weights, strict=True)]
    by_remainder = sorted(range(len(units)), key=lambda part: (units[part] - exact[part], part))
    by_remainder = [part for part in by_remainder if weights[part] > 0]
    at = 0
    while (missing := UNIT - sum(units)) != 0:
        part = by_remainder[at % len(by_remainder)]
        step = 1 if missing > 0 else -1
        units[part] += step if units[part] + step > 0 else 0
        at += 1
    return tuple(units)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Weights in ``UNIT``ths, and what each part is owed ``(parts,)``. Never changed: ``after`` returns the next one."""

    weights: Weights
    deficits: tuple[int, ...]

    @classmethod
    def fresh(cls, weights: Weights) -> Schedule:
        return cls(weights, (0,) * len(weights))

    def counts(self, size: int) -> tuple[int, ...]:
        """Return how many samples of each part the next batch of ``size`` has ``(parts,)``."""
        owed = [deficit + weight * size for deficit, weight in zip(self.deficits, self.weights, strict=True)]
        due = [max(each // UNIT, 0) for each in owed]
        # Of each part, the sample after those that are due, if its share has begun to grow towards it.
        may = [part for part, each in enumerate(owed) if each > due[part] * UNIT and self.weights[part]]
        missing = size - sum(due)
        if missing < 0:  # only where deficits came from other weights, and more falls due at once than fits
            return _cut(due, -missing, self)
        for part in sorted(may, key=lambda part: self._due_at(part, due[part] + 1))[:missing]:
            due[part] += 1
        missing = size - sum(due)
        if missing:  # as above: what was given early takes more than there is
            due[max(range(len(owed)), key=lambda part: (self.weights[part], -part))] += missing
        return tuple(due)

    def after(self, counts: Sequence[int]) -> Schedule:
        """Return the schedule after a batch with ``counts`` samples of the parts."""
        size = sum(counts)
        owed = zip(self.deficits, self.weights, counts, strict=True)
        return replace(self, deficits=tuple(deficit + weight * size - UNIT * count for deficit, weight, count in owed))

    def _due_at(self, part: int, nth: int) -> tuple[int, int]:
        """Return when the ``nth`` sample of a part from here on falls due, and the part: ties go to the first."""
        return (((nth * UNIT - self.deficits[part]) * UNIT) // max(self.weights[part], 1), part)


def interleaved(counts: Sequence[int]) -> Ints:
    """Return for each position of a batch which part's sample it has ``(sum(counts),)``, each spread evenly.

    So the halves of a batch that a loop splits, to accumulate gradients for instance, are mixed like the whole.
    """
    parts = np.repeat(np.arange(len(counts)), counts)
    each = np.asarray(counts, np.int64)
    nth = np.arange(len(parts)) - np.repeat(np.cumsum(each) - each, each)
    return parts[np.argsort((nth + 0.5) / np.repeat(each, each), kind="stable")].astype(np.int64)


def placed_after(weights: Weights, samples: int) -> tuple[int, ...]:
    """Return how many of the first ``samples`` samples belong to each part, by largest remainder."""
    owed = [weight * samples for weight in weights]
    counts = [each // UNIT for each in owed]
    by_remainder = sorted(range(len(owed)), key=lambda part: (-(owed[part] % UNIT), part))
    for part in by_remainder[: samples - sum(counts)]:
        counts[part] += 1
    return tuple(counts)


def samples_for(weight: int, share: int) -> int:
    """Return after how many samples of the mixture a part of this weight has given ``share`` samples for certain."""
    return -(-share * UNIT // weight)


def _cut(due: list[int], excess: int, schedule: Schedule) -> tuple[int, ...]:
    """Return counts with the latest due samples left for the next batch."""
    while excess:
        last = max((part for part, count in enumerate(due) if count), key=lambda p: schedule._due_at(p, due[p]))
        due[last] -= 1
        excess -= 1
    return tuple(due)


def _listed(weights: Sequence[float], names: list[str]) -> list[float]:
    try:
        given = list(weights)
    except TypeError:
        given = []
    if len(given) != len(names) or isinstance(weights, str):
        raise ValueError(
            f"weights={weights!r}: give {len(names)} numbers, or a dictionary with one for each of"
            f" {', '.join(map(repr, names))}"
        )
    return given


def _weight(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not 0 <= number < math.inf:
        raise ValueError(f"weights: {name!r} has {value!r}; give a finite number of at least 0")
    return number
