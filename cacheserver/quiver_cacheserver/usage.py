"""Bytes by dataset, tenant and tier since the daemon started, with a bound on the number of series.

Prometheus keeps every series that it has ever seen, and clients choose the names. So only the largest have a series of
their own; the rest is counted under ``other``. Invariant, which the tests check against a model: no series decreases
while it is shown, and all together are what was counted. For that, a name that gets a series late begins at 0 (what it
had before stays in ``other``), and one that loses its series adds its count to ``other``. Several names may have one
series, such as those of readers that name their tenant and of readers that do not; what one of them added to it stays
there when it gets another series, for as long as that one is shown.

A name keeps its series until one that has none has counted twice as much: nothing flaps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from quiver.digest import Digest
from quiver.domain import Domain

Tier = Literal["host", "rack", "origin"]

TIERS: Final[tuple[Tier, ...]] = ("host", "rack", "origin")
SERIES_MAX: Final = 100  # pairs of dataset and tenant with series of their own
NAMES_MAX: Final = 4096  # pairs that are counted at all: to tell which are the largest
LEAD: Final = 2  # times as much as the smallest that is shown, to take its series
OTHER: Final = "other"

ByTier = dict[Tier, int]


class Label(NamedTuple):
    """What is counted together: a tenant's use of a manifest in a sharing domain."""

    domain: Domain
    manifest: Digest
    tenant: str = ""


# What to call a label in series: the dataset's name, and the tenant; ``None`` for the tenant that it was shown with.
Naming = Callable[[Label], tuple[str, str | None]]


def nothing() -> ByTier:
    return dict.fromkeys(TIERS, 0)


@dataclass(slots=True)
class _Counted:
    bytes: ByTier = field(default_factory=nothing)
    before: ByTier = field(default_factory=nothing)  # of them, what is counted elsewhere for good
    name: tuple[str, str] | None = None  # of the series: dataset and tenant

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def add_to(self, sums: ByTier) -> None:
        """Add what is not counted elsewhere."""
        for tier in TIERS:
            sums[tier] += self.bytes[tier] - self.before[tier]

    def leave(self, sums: ByTier) -> None:
        """Have all of it counted there for good."""
        self.add_to(sums)
        self.before = dict(self.bytes)


class Usage:
    """Counts bytes. Safe from threads."""

    def __init__(self, series_max: int = SERIES_MAX, names_max: int = NAMES_MAX) -> None:
        self._series_max, self._names_max = series_max, names_max
        self._counted: dict[Label, _Counted] = {}
        self._shown: set[Label] = set()
        self._other = nothing()  # what is of no name, or was counted before its name had a series
        self._kept: dict[tuple[Domain, tuple[str, str]], ByTier] = {}  # in a series, of names that have another one now
        self._lock = threading.Lock()

    def add(self, label: Label | None, tier: Tier, size_bytes: int) -> None:
        """Count bytes; under ``other`` if it is not known whose they are."""
        with self._lock:
            it = self._counted.get(label) if label is not None else None
            if it is None and label is not None:
                it = self._new(label)
            (self._other if it is None else it.bytes)[tier] += size_bytes

    def by_dataset(self) -> dict[tuple[Domain, Digest], ByTier]:
        """Return the bytes of each dataset, of all tenants together, as far as they are counted."""
        found: dict[tuple[Domain, Digest], ByTier] = {}
        with self._lock:
            for label, it in self._counted.items():
                into = found.setdefault((label.domain, label.manifest), nothing())
                for tier in TIERS:
                    into[tier] += it.bytes[tier]
        return found

    def series(self, naming: Naming, domain: Domain | None = None) -> dict[tuple[str, str], ByTier]:
        """Return the bytes by (dataset's name, tenant), with ``(OTHER, "")`` for all the rest.

        ``domain``: show names of this sharing domain alone; the others' are counted under ``other``.
        """
        with self._lock:
            self._choose()
            shown = {label for label in self._shown if domain in (None, label.domain)}
            for label in sorted(shown):
                self._name(label, *naming(label))
            self._end_series()
            found = {(OTHER, ""): dict(self._other)}
            rest = found[OTHER, ""]
            for label, it in self._counted.items():
                name = it.name if label in shown else None
                it.add_to(found.setdefault(name, nothing()) if name is not None else rest)
            for (of, name), its in self._kept.items():
                into = found.get(name, rest) if domain in (None, of) else rest
                for tier in TIERS:
                    into[tier] += its[tier]
            return found

    def _new(self, label: Label) -> _Counted | None:
        """Begin to count a name; return ``None`` if as many as may be are counted, and all have a series."""
        if len(self._counted) >= self._names_max and not self._forget():
            return None
        if len(self._shown) < self._series_max:
            self._shown.add(label)
        it = self._counted[label] = _Counted()
        return it

    def _forget(self) -> bool:
        """Count the smaller half of the names without a series under ``other`` alone; return whether there were any."""
        without = sorted(self._counted.keys() - self._shown, key=lambda it: self._counted[it].total)
        for label in without[: (len(without) + 1) // 2]:
            self._counted.pop(label).leave(self._other)
        return bool(without)

    def _name(self, label: Label, dataset: str, tenant: str | None) -> None:
        """Name a series; if it had another name, it begins at 0."""
        it = self._counted[label]
        name = dataset, tenant if tenant is not None else it.name[1] if it.name is not None else ""
        if it.name is not None and it.name != name:
            self._leave(label)
        it.name = name

    def _leave(self, label: Label) -> None:
        """Have a name no longer add to its series, which keeps what it has."""
        it = self._counted[label]
        if it.name is not None:
            it.leave(self._kept.setdefault((label.domain, it.name), nothing()))
        it.name = None

    def _end_series(self) -> None:
        """Count what was kept in series that no name has any more under ``other`` alone."""
        shown = {self._counted[label].name for label in self._shown}
        for key in [key for key in self._kept if key[1] not in shown]:
            for tier, size_bytes in self._kept.pop(key).items():
                self._other[tier] += size_bytes

    def _choose(self) -> None:
        """Give the series of small names to much larger ones."""
        without = sorted(self._counted.keys() - self._shown, key=lambda it: -self._counted[it].total)
        for label in without:
            smallest = min(self._shown, key=lambda it: self._counted[it].total)
            if self._counted[label].total < LEAD * self._counted[smallest].total + 1:
                return
            self._leave(smallest)
            self._shown.remove(smallest)
            self._shown.add(label)
            self._counted[label].leave(self._other)
