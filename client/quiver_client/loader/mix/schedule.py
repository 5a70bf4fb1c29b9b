"""How many samples of each part the next batch of a mixture has: a pure function of the weights and of what was given.

Invariant: under fixed weights each part is less than one sample away from its weight's share of all samples, after
every batch, whatever the sizes of the batches. So the proportions are exact, and do not hold in expectation only.

The next sample of a part has a *due time*, counted in samples of the mixture: by then the part's share reaches it. It
may be given once the share has begun to grow towards it. Every batch gives first what is due by its end, and then what
may be given, the earliest due first. That is the schedule by earliest deadline for Tijdeman's chairman assignment
problem (Discrete Mathematics 32, 1980), known as P-fair scheduling (Baruah et al., Algorithmica 15, 1996); giving to
the part with the largest deficit alone would let a deficit grow beyond one sample where many parts fall due at once.

All is counted in integers, since floating point would drift: weights are integers, their sum is the *unit*; a
*deficit*, the share due to a part minus what it was given, is in fractions of a sample, of which a unit makes one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

import numpy as np

from quiver.substitution import Ints

UNIT: Final = 1 << 53  # of weights that are floats
UNIT_MAX: Final = 1 << 62  # serialisers know integers of 64 bits
RATIO_MAX: Final = 1 << 40  # of the largest to the smallest weight
Weights = tuple[int, ...]


def weights_of(weights: Any, sizes: Mapping[str, int]) -> Weights:
    """Return the weights that a user gave, as integers in the order of ``sizes`` (part → samples): their sum is 1.

    Decimals are taken as they are written: 0.1, 0.7 and 0.2 are 1, 7 and 2. A weight of 0 turns a part off. Raises
    ``ValueError`` naming ``weights``.
    """
    names = list(sizes)
    if isinstance(weights, Mapping):
        unknown = [name for name in weights if name not in sizes]
        missing = [name for name in names if name not in weights]
        if unknown or missing:
            wrong = f"no part is called {unknown[0]!r}" if unknown else f"{missing[0]!r} has none"
            raise ValueError(f"weights: {wrong}; give one to each of {', '.join(map(repr, names))} (0: never draw it)")
        given = [weights[name] for name in names]
    else:
        given = _listed(weights, names)
    exact = [_weight(name, value) for name, value in zip(names, given, strict=True)]
    largest = max(exact)
    if not largest:
        raise ValueError("weights: all are 0, so there is nothing to draw; give at least one part more than 0")
    for name, value in zip(names, exact, strict=True):
        if 0 < value * RATIO_MAX < largest:
            raise ValueError(f"weights: {name!r} is hardly ever drawn, at {float(value)}; give it 0 to never draw it")
    scale = math.lcm(*(value.denominator for value in exact))
    whole = [int(value * scale) for value in exact]
    common = math.gcd(*whole)
    found = tuple(value // common for value in whole)
    return found if sum(found) <= UNIT_MAX else in_units([float(value / largest) for value in exact])


def tempered(temperature: Any, sizes: Mapping[str, int]) -> Weights:
    """Return weights proportional to ``size ** (1 / temperature)``, as usual in multilingual training.

    1: by size; towards infinity: equal (Arivazhagan et al., 2019, "Massively multilingual NMT in the wild", who take 5;
    mT5, Xue et al., 2021, writes its exponent as alpha = 0.3). Raises ``ValueError`` naming ``temperature``.
    """
    is_number = isinstance(temperature, int | float | np.number) and not isinstance(temperature, bool)
    if not is_number or not temperature > 0:
        raise ValueError(
            f"temperature={temperature!r}: give a number above 0; 1 draws by size, larger ones more evenly"
        )
    if temperature == 1:
        return weights_of(sizes, sizes)
    largest = max(sizes.values())
    scaled = [max((size / largest) ** (1 / float(temperature)), 2 / RATIO_MAX) for size in sizes.values()]
    return weights_of(scaled, sizes)


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
    """Weights, and what each part is owed ``(parts,)``. A value: ``after`` returns the next one."""

    weights: Weights
    deficits: tuple[int, ...]

    @classmethod
    def fresh(cls, weights: Weights) -> Schedule:
        return cls(weights, (0,) * len(weights))

    @property
    def unit(self) -> int:
        return sum(self.weights)

    def counts(self, size: int) -> tuple[int, ...]:
        """Return how many samples of each part the next batch of ``size`` has ``(parts,)``."""
        unit = self.unit
        owed = [deficit + weight * size for deficit, weight in zip(self.deficits, self.weights, strict=True)]
        due = [max(each // unit, 0) for each in owed]
        # Of each part, the sample after those that are due, if its share has begun to grow towards it.
        may = [part for part, each in enumerate(owed) if each > due[part] * unit and self.weights[part]]
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
        size, unit = sum(counts), self.unit
        owed = zip(self.deficits, self.weights, counts, strict=True)
        return replace(self, deficits=tuple(deficit + weight * size - unit * count for deficit, weight, count in owed))

    def _due_at(self, part: int, nth: int) -> tuple[int, int]:
        """Return when the ``nth`` sample of a part from here on falls due, and the part: ties go to the first."""
        return (((nth * self.unit - self.deficits[part]) << 64) // max(self.weights[part], 1), part)


def interleaved(counts: Sequence[int]) -> Ints:
    """Return for each position of a batch which part's sample it has ``(sum(counts),)``, each spread evenly.

    So the halves of a batch that a loop splits, to accumulate gradients for instance, are mixed like the whole.
    """
    parts = np.repeat(np.arange(len(counts)), counts)
    each = np.asarray(counts, np.int64)
    nth = np.arange(len(parts)) - np.repeat(np.cumsum(each) - each, each)
    return parts[np.argsort((nth + 0.5) / np.repeat(each, each), kind="stable")].astype(np.int64)


def spread(parts: Sequence[Ints]) -> Ints:
    """Return the values of several parts as one batch, in the order of ``interleaved``."""
    where = interleaved([len(each) for each in parts])
    values = np.zeros(len(where), np.int64)
    for at, each in enumerate(parts):
        values[where == at] = each
    return values


def placed_after(weights: Weights, samples: int) -> tuple[int, ...]:
    """Return how many of the first ``samples`` samples belong to each part, by largest remainder."""
    unit = sum(weights)
    owed = [weight * samples for weight in weights]
    counts = [each // unit for each in owed]
    by_remainder = sorted(range(len(owed)), key=lambda part: (-(owed[part] % unit), part))
    for part in by_remainder[: samples - sum(counts)]:
        counts[part] += 1
    return tuple(counts)


def samples_for(weight: int, unit: int, share: int) -> int:
    """Return after how many samples of the mixture a part of this weight has given ``share`` samples for certain."""
    return -(-share * unit // weight)


def _cut(due: list[int], excess: int, schedule: Schedule) -> tuple[int, ...]:
    """Return counts with the latest due samples left for the next batch."""
    while excess:
        last = max((part for part, count in enumerate(due) if count), key=lambda p: schedule._due_at(p, due[p]))
        due[last] -= 1
        excess -= 1
    return tuple(due)


def _listed(weights: Any, names: list[str]) -> list[float]:
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


def _weight(name: str, value: Any) -> Fraction:
    is_number = hasattr(value, "__float__") and not isinstance(value, bool | str)
    number = float(value) if is_number else math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"weights: {name!r} has {value!r}; give a finite number of at least 0")
    return Fraction(repr(number))
