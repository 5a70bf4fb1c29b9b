"""Bytes by dataset, tenant and tier since the daemon started, with a bound on the number of series.

Prometheus keeps every series that it has ever seen, and clients choose the names. So only the largest have a series of
their own; the rest is counted under ``other``. Invariant, which the tests check against a model: no series decreases
while it is shown, and all together are what was counted. For that, a name that gets a series late begins at 0 (what it
had before stays in ``other``), and one that loses its series adds its count to ``other``.

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
    in_other: ByTier = field(default_factory=nothing)  # of them, what ``other`` counts for good
    name: tuple[str, str] | None = None  # of the series: dataset and tenant

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


class Usage:
    """Counts bytes. Safe from threads."""

    def __init__(self, series_max: int = SERIES_MAX, names_max: int = NAMES_MAX) -> None:
        self._series_max, self._names_max = series_max, names_max
        self._counted: dict[Label, _Counted] = {}
        self._shown: set[Label] = set()
        self._other = nothing()  # what is of no name, or of one that is no longer counted
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
            found = {(OTHER, ""): dict(self._other)}
            rest = found[OTHER, ""]
            for label, it in self._counted.items():
                is_shown = label in self._shown and domain in (None, label.domain)
                into = found.setdefault(self._named(it, *naming(label)), nothing()) if is_shown else rest
                for tier in TIERS:
                    into[tier] += it.bytes[tier] - (it.in_other[tier] if is_shown else 0)
                    rest[tier] += it.in_other[tier] if is_shown else 0
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
            it = self._counted.pop(label)
            for tier in TIERS:
                self._other[tier] += it.bytes[tier]
        return bool(without)

    def _named(self, it: _Counted, dataset: str, tenant: str | None) -> tuple[str, str]:
        """Name a series, and return the name; if it had another one, the new series begins at 0."""
        name = dataset, tenant if tenant is not None else it.name[1] if it.name is not None else ""
        if it.name is not None and it.name != name:
            it.in_other = dict(it.bytes)
        it.name = name
        return name

    def _choose(self) -> None:
        """Give the series of small names to much larger ones."""
        without = sorted(self._counted.keys() - self._shown, key=lambda it: -self._counted[it].total)
        for label in without:
            smallest = min(self._shown, key=lambda it: self._counted[it].total)
            if self._counted[label].total < LEAD * self._counted[smallest].total + 1:
                return
            self._shown.remove(smallest)
            self._shown.add(label)
            it = self._counted[label]
            it.in_other = dict(it.bytes)
