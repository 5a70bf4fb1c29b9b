"""Weights that follow what the training loop reports: a pure function, off unless ``Mix(..., guided=...)`` asks for it.

After Oort (Lai et al., OSDI 2021), which draws those clients of federated learning more often whose samples have a
higher loss and that answer sooner, and always explores. Here a part of a mixture takes the place of a client: its
*utility* is the root of the mean square of its recent losses (Oort's statistical utility), and it counts for more the
more of its pending samples is resident (Oort's system utility).

Invariant, the declared bias: every weight stays within a factor ``bias`` of the weight that the user gave, above and
below, and at least ``explore`` of every weight is independent of utility. Weights change at the beginning of a block of
``interval`` batches only, by the losses reported before the block before it: batches drawn ahead of the loop are then
drawn alike however far ahead they are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

BISECTIONS: Final = 100  # more than a float's 53 bits and its exponents need
LEAST: Final = 1e-100  # of the largest: as good as nothing, and yet more than that
REPORTS_MAX: Final = 65_536  # reports that wait for the loop's next batch

Utility = Callable[[Sequence[float]], float]


def rms(losses: Sequence[float]) -> float:
    """Return the root of the mean square of losses: Oort's statistical utility."""
    return math.sqrt(math.fsum(loss * loss for loss in losses) / len(losses))


@dataclass(frozen=True, slots=True)
class Guided:
    """How far reported losses may move the weights of a mixture.

    ``bias``: the factor by which a weight may differ from the one that was given, at least 1. ``explore``: the share of
    every weight that utility does not move, 0 to 1. ``interval``: batches between two changes; keep it above the number
    of batches that are prefetched. ``window``: how many of a part's last losses count. ``availability``: how much of a
    part's weight depends on the share of its pending samples that is resident, 0 to 1; with 0 the weights follow from
    the reports alone, and two runs with the same reports draw the same proportions. ``utility``: from a part's last
    losses, oldest first, to a number of at least 0; by default the root of their mean square.

    Raises ``ValueError`` naming the field that is wrong.
    """

    bias: float = 2.0
    explore: float = 0.1
    interval: int = 64
    window: int = 64
    availability: float = 0.5
    utility: Utility = rms

    def __post_init__(self) -> None:
        for name, least, most in (("bias", 1.0, 1e6), ("explore", 0.0, 1.0), ("availability", 0.0, 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise ValueError(f"guided: {name}={value!r}; give a number from {least:g} to {most:g}")
        for name in ("interval", "window"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 20:
                raise ValueError(f"guided: {name}={value!r}; give an integer of at least 1")
        if not callable(self.utility):
            raise ValueError(f"guided: utility={self.utility!r}; give a function from losses to a number")

    @classmethod
    def of(cls, guided: Any) -> Guided | None:
        """Return what ``Mix(guided=...)`` means: ``True``, a function for the utility, or a ``Guided``."""
        if guided is None or guided is False:
            return None
        if guided is True:
            return cls()
        if isinstance(guided, cls):
            return guided
        if callable(guided):
            return cls(utility=guided)
        raise ValueError(
            f"guided={guided!r}: give True, a function from a part's last losses to its utility, or Guided"
        )

    def weights(
        self, base: Sequence[float], utilities: Sequence[float | None], available: Sequence[float]
    ) -> tuple[float, ...]:
        """Return the weights that follow, in the order of the parts; they add up to 1, as ``base`` does.

        ``utilities``: of each part, ``None`` for one without a report, which counts as the mean of the others.
        ``available``: of each part the share of its pending samples that is resident, 0 to 1.
        """
        known = [(weight, each) for weight, each in zip(base, utilities, strict=True) if weight and each is not None]
        mean = _mean(known)
        raw = []
        for utility, share in zip(utilities, available, strict=True):
            relative = 1.0 if utility is None or mean <= 0 else utility / mean
            raw.append(relative * (1 - self.availability * (1 - share)))
        followed = _within(base, raw, self.bias)
        return tuple((1 - self.explore) * to + self.explore * given for given, to in zip(base, followed, strict=True))


class Losses:
    """The last losses of every part, and those that are too recent to count. Changed by one thread at a time."""

    def __init__(self, parts: Iterable[str], guided: Guided) -> None:
        self._guided = guided
        self._counted: dict[str, deque[float]] = {part: deque(maxlen=guided.window) for part in parts}
        self._recent: deque[tuple[int, str, float]] = deque(maxlen=REPORTS_MAX)  # by block

    def add(self, block: int, part: str, loss: float) -> None:
        """Record a loss that was reported while the loop was in this block."""
        self._recent.append((block, part, loss))

    def utilities(self, block: int) -> list[float | None]:
        """Return the utilities for this block: of what was reported before the block before it.

        Raises ``ValueError`` if the user's function does not return a number of at least 0.
        """
        while self._recent and self._recent[0][0] < block - 1:
            _, part, loss = self._recent.popleft()
            self._counted[part].append(loss)
        return [self._utility(part, losses) for part, losses in self._counted.items()]

    def state(self) -> dict[str, list[Any]]:
        """Return plain lists: the losses that count by part, and the recent ones."""
        recent: list[Any] = [list(each) for each in self._recent]
        return {"losses": [[part, list(losses)] for part, losses in self._counted.items()], "recent": recent}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state`` returned, of the parts that are here."""
        for part, losses in state["losses"]:
            if part in self._counted:
                self._counted[part].extend(loss_of(part, loss) for loss in losses)
        self._recent.extend((int(block), part, float(x)) for block, part, x in state["recent"] if part in self._counted)

    def _utility(self, part: str, losses: deque[float]) -> float | None:
        if not losses:
            return None
        value = float(self._guided.utility(list(losses)))
        if not 0 <= value < math.inf:
            raise ValueError(f"guided: the utility of part {part!r} is {value}; return a finite number of at least 0")
        return value


def loss_of(part: str, loss: Any) -> float:
    """Return a reported loss. Raises ``ValueError``."""
    value = float(loss)
    if not math.isfinite(value):
        raise ValueError(f"loss={value}: of part {part!r}; report finite numbers, and leave out batches without one")
    return value


def _mean(known: Sequence[tuple[float, float]]) -> float:
    total = math.fsum(weight for weight, _ in known)
    return math.fsum(weight * each for weight, each in known) / total if total else 0.0


def _within(base: Sequence[float], raw: Sequence[float], bias: float) -> list[float]:
    """Return ``base`` times ``raw`` times the one factor with which all add up to 1 and each is within ``bias``."""
    low, high = 1e-300, 1e300

    def scaled(factor: float) -> list[float]:
        return [weight * min(max(each * factor, 1 / bias), bias) for weight, each in zip(base, raw, strict=True)]

    if not any(weight and each for weight, each in zip(base, raw, strict=True)):
        return list(base)
    # What nothing speaks for is drawn more than the least where the others, at their most, do not add up to 1.
    least = max(LEAST * max(each for weight, each in zip(base, raw, strict=True) if weight), 1e-290)
    raw = [max(each, least) for each in raw]
    for _ in range(BISECTIONS):
        factor = math.sqrt(low) * math.sqrt(high)
        if math.fsum(scaled(factor)) < 1:
            low = factor
        else:
            high = factor
    found = scaled(high)
    total = math.fsum(found)
    return [weight / total for weight in found]
