"""Whether one allocation is clearly better than another: what is measured is never exact, and moving data costs reads.

A share of the cache that is taken from one dataset and given to another one is filled by reading the origin. So an
allocation that was solved anew, from estimates that changed a little, replaces the old one only if what its policy is
for becomes better by more than estimates err (``CLEARLY``). Where all is about as good, as with two equal jobs and an
origin that is no limit, the old one stays for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from quiver.allocation.equal_split import equal_cache, equal_rates
from quiver.allocation.fair import raise_within
from quiver.allocation.instance import Instance
from quiver.allocation.solve import full_rates
from quiver.allocation.values import Policy, Problem

CLEARLY: Final = 0.05  # of what is compared


def is_clearly_better(problem: Problem, policy: Policy, new: Mapping[str, float], old: Mapping[str, float]) -> bool:
    """Return whether shares of the cache, in bytes by dataset, serve a policy clearly better than the old ones."""
    if not problem.datasets:
        return bool(new != old)
    for ours, theirs in zip(_worth(problem, policy, new), _worth(problem, policy, old), strict=True):
        scale = max(abs(ours), abs(theirs))
        if scale > 0 and abs(ours - theirs) > CLEARLY * scale:
            return ours > theirs
    return False


def _worth(problem: Problem, policy: Policy, shares: Mapping[str, float]) -> tuple[float, ...]:
    """Return what the policy looks at, the first first; more is better."""
    instance = Instance.of(problem)
    unlimited = np.where(np.isnan(instance.rate), np.inf, instance.rate)
    full = full_rates(instance, equal_rates(instance, equal_cache(instance), unlimited))
    cached = np.array([shares.get(name, 0.0) for name in instance.names], dtype=np.float64)
    demand = instance.demand(full)
    spared = float((demand * (1 - instance.missing(cached))).sum())
    if policy in (Policy.COST, Policy.LAS):
        return (spared,)
    x = raise_within(instance, cached, equal_rates(instance, cached, full), full)
    total = float(x.sum())
    if policy is Policy.THROUGHPUT:
        return total, spared
    part = np.divide(x, full * instance.weight, out=np.ones_like(x), where=full > 0)
    return float(part.min(initial=1.0)), total, spared
