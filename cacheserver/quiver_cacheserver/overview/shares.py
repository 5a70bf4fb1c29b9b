"""The last allocation as a message. Pure.

A caller of one sharing domain is shown the allocation as if its domain had the daemon for itself: the capacity and the
bandwidth are what its datasets were given together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from quiver.allocation import Allocation, DatasetDemand, Problem
from quiver.overview import AllocationView, ReaderView, ShareView
from quiver_cacheserver.allocation.gathering import shown_name


class Shown(NamedTuple):
    """What a dataset of the problem is called, and its id."""

    id: str
    name: str


def view(
    node: str,
    problem: Problem,
    allocation: Allocation,
    shown: Callable[[DatasetDemand], Shown | None],
    *,
    age_seconds: float,
    entries_max: int,
) -> AllocationView:
    """Return the message. ``shown``: ``None`` for a dataset that the caller may not see."""
    seen = [(it, named) for it in problem.datasets if (named := shown(it)) is not None]
    shares = [_share(it, named, allocation) for it, named in seen]
    shares.sort(key=lambda share: (-share.size_bytes, share.name))
    is_whole = len(seen) == len(problem.datasets)
    tenants = {reader.tenant for it, _ in seen for reader in it.readers}
    return AllocationView(
        node=node,
        policy=allocation.policy,
        age_seconds=age_seconds,
        capacity_bytes=problem.capacity_bytes if is_whole else sum(share.cache_bytes for share in shares),
        datasets=shares[:entries_max],
        origin_rates={
            origin: rate if is_whole else min(sum(_rate(it) for it in shares if it.origin == origin), rate)
            for origin, rate in problem.origin_rates.items()
            if math.isfinite(rate) and (is_whole or any(it.origin == origin for it in shares))
        },
        weights={tenant: it for tenant, it in problem.weights.items() if is_whole or tenant in tenants},
        quotas={tenant: it for tenant, it in problem.quotas.items() if is_whole or tenant in tenants},
        left_out=max(len(shares) - entries_max, 0),
    )


def _share(it: DatasetDemand, named: Shown, allocation: Allocation) -> ShareView:
    share = allocation.shares.get(it.name)
    return ShareView(
        id=named.id,
        name=named.name,
        size_bytes=it.size_bytes,
        origin=it.origin,
        readers=[
            ReaderView(
                name=shown_name(reader),
                rate=reader.rate if math.isfinite(reader.rate) else None,
                tenant=reader.tenant,
                ordered=reader.ordered,
                attained_bytes=reader.attained_bytes,
                predicted=allocation.predicted.get((it.name, reader.name), 0.0),
            )
            for reader in it.readers
        ],
        cache_bytes=share.cache_bytes if share is not None else 0.0,
        origin_rate=share.origin_rate if share is not None and math.isfinite(share.origin_rate) else None,
        reason=share.reason[:400] if share is not None else "",
        pinned=it.pinned,
        resident_bytes=it.resident_bytes,
    )


def _rate(share: ShareView) -> float:
    return math.inf if share.origin_rate is None else share.origin_rate
