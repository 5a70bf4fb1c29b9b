"""What an allocation policy is told, and what it answers: values."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Policy(enum.StrEnum):
    """What an allocation is to achieve."""

    MAX_MIN = "max-min"
    THROUGHPUT = "throughput"
    LAS = "las"
    COST = "cost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A group of jobs that reads one dataset, and counts once.

    ``rate``: f*, the bytes per second that it would read if it never waited, over all its ranks. 0: unknown yet, so
    it gets an equal share and no more; infinite: it reads whatever it gets. ``ordered``: it reads in an order that is
    fixed, so its misses are its own; otherwise it substitutes, and shares the dataset's one stream of reads with the
    others that do. ``attained_bytes``: what it has read since it began.
    """

    name: str
    rate: float
    tenant: str = ""
    ordered: bool = False
    attained_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetDemand:
    """A dataset that somebody reads. ``origin`` names where its misses come from, a key of ``Problem.origin_rates``.

    ``resident_bytes``: what the cache holds of it now; None: as much as its share. It matters to the bandwidth alone:
    a dataset whose share is not filled yet reads more from the origin until it is, and is given more until then.
    """

    name: str
    size_bytes: float
    origin: str
    readers: tuple[Reader, ...]
    pinned: bool = False  # an operator wants all of it in the cache
    resident_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything that an allocation depends on. Names of datasets are unique.

    A daemon that solves for its slice scales all by the same factor: capacity, sizes, rates of readers and of
    origins, attained bytes, quotas. Shares then come out scaled by that factor.

    ``origin_rates``: bytes per second, by origin; one that is missing is not known to be a limit. ``weights`` and
    ``quotas`` (bytes of the cache, at most) are by tenant; a missing weight is 1, a missing quota is the capacity.
    """

    capacity_bytes: float
    datasets: tuple[DatasetDemand, ...]
    origin_rates: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    quotas: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one dataset gets. ``origin_rate``: bytes per second; infinite where the origin is not a limit."""

    cache_bytes: float
    origin_rate: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """``shares`` by dataset; ``predicted`` bytes per second, by dataset and reader, that follow from them.

    0 is predicted for a reader of unknown rate that nothing limits.
    """

    policy: Policy
    shares: Mapping[str, Share]
    predicted: Mapping[tuple[str, str], float]
