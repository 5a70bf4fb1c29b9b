"""Whose quota the cached bytes of a dataset count against.

A dataset's bytes may be charged to any tenant that reads it, and are split between them as it suits: so a tenant
without quota left costs the others that read the same dataset nothing. One that is also read by a tenant without a
quota is not charged. What fits is then a polymatroid (each set of datasets may hold what the tenants that read it
have together), so taking the most useful bytes first is optimal for one origin; ``take`` finds what still fits by
rerouting earlier charges, as an augmenting path of a flow.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from quiver.allocation.instance import Floats, Instance

_SLIGHT: Final = 1e-12  # of the amount that is asked for


class Charges:
    """What is left of each tenant's quota."""

    def __init__(self, instance: Instance) -> None:
        self._left: list[float] = instance.quota.tolist()
        self._payers = instance.payers
        self._paid: dict[int, dict[int, float]] = {}  # of datasets with several payers: dataset -> tenant -> bytes
        for dataset in np.flatnonzero(instance.pinned).tolist():
            self.take(dataset, float(instance.pinned[dataset]))

    @staticmethod
    def binding(instance: Instance) -> bool:
        """Say whether any quota can matter."""
        return bool((instance.quota < min(instance.capacity, float(instance.sizes.sum()))).any())

    def take(self, dataset: int, wanted: float) -> float:
        """Charge up to ``wanted`` bytes of a dataset; return how many were charged."""
        payers = self._payers[dataset]
        if payers is None:
            return wanted
        granted = 0.0
        for tenant in payers:
            granted += self._charge(dataset, tenant, min(self._left[tenant], wanted - granted))
        while granted < wanted * (1 - _SLIGHT):
            moved = self._reroute(dataset, payers, wanted - granted)
            if moved <= wanted * _SLIGHT:
                break
            granted += moved
        return granted

    def _charge(self, dataset: int, tenant: int, amount: float) -> float:
        self._left[tenant] -= amount
        if len(self._payers[dataset] or ()) > 1:
            paid = self._paid.setdefault(dataset, {})
            paid[tenant] = paid.get(tenant, 0.0) + amount
        return amount

    def _reroute(self, dataset: int, payers: tuple[int, ...], wanted: float) -> float:
        """Have others pay for what one of ``payers`` paid, and charge ``dataset`` to it instead; return the bytes."""
        came: dict[int, tuple[int, int]] = {}  # tenant -> (who relies on it, which dataset moves to it)
        queue = deque(payers)
        seen = set(payers)
        while queue:
            tenant = queue.popleft()
            if self._left[tenant] > wanted * _SLIGHT:
                return self._move(dataset, tenant, came, wanted)
            for other, paid in self._paid.items():
                if other == dataset or paid.get(tenant, 0.0) <= 0:
                    continue
                for next_ in self._payers[other] or ():
                    if next_ not in seen:
                        seen.add(next_)
                        came[next_] = (tenant, other)
                        queue.append(next_)
        return 0.0

    def _move(self, dataset: int, tenant: int, came: dict[int, tuple[int, int]], wanted: float) -> float:
        amount: float = min(wanted, self._left[tenant])
        at = tenant
        while at in came:
            before, other = came[at]
            amount, at = min(amount, self._paid[other][before]), before
        at = tenant
        self._left[tenant] -= amount
        while at in came:
            before, other = came[at]
            paid = self._paid[other]
            paid[before] -= amount
            paid[at] = paid.get(at, 0.0) + amount
            at = before
        if len(self._payers[dataset] or ()) > 1:
            paid = self._paid.setdefault(dataset, {})
            paid[at] = paid.get(at, 0.0) + amount
        return amount


def still_free(instance: Instance, cached: Floats) -> Charges:
    """Return what is left of the quotas where ``cached`` bytes of each dataset are held."""
    charges = Charges(instance)
    for dataset in np.flatnonzero(cached > instance.pinned).tolist():
        charges.take(dataset, float(cached[dataset] - instance.pinned[dataset]))
    return charges
