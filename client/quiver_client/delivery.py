"""A batch on its way in: what has arrived, from which tier, and the one door at which it is checked.

A tier puts views into a ``Delivery``; only what passed ``check`` counts as there. What did not is taken out again, so
that the next try or the next tier brings it.
"""

from __future__ import annotations

from typing import Literal, Protocol

import blake3
import numpy as np
import numpy.typing as npt
import xxhash

from quiver.plan import Plan

Verify = Literal["fast", "full", "off"]
Positions = npt.NDArray[np.intp]


class Delivery:
    """The bytes of a plan's samples; position i is the plan's sample i."""

    def __init__(self, plan: Plan, verify: Verify) -> None:
        self.plan = plan
        self.views: list[memoryview | None] = [None] * len(plan)
        self.checked = np.zeros(len(plan), bool)
        self._verify = verify

    def missing(self) -> Positions:
        """Return the positions that still have to come."""
        return np.flatnonzero(~self.checked)

    def check(self) -> Positions:
        """Check what came since the last call; return the positions that were wrong, now missing again."""
        bad = []
        for at in np.flatnonzero(~self.checked).tolist():
            view = self.views[at]
            if view is None:
                continue
            if self._right(at, view):
                self.checked[at] = True
            else:
                self.views[at] = None
                bad.append(at)
        return np.asarray(bad, np.intp)

    def bytes_at(self, positions: Positions) -> int:
        return int(self.plan.sizes[positions].sum())

    def _right(self, at: int, view: memoryview) -> bool:
        plan = self.plan
        if len(view) != plan.sizes[at]:
            return False
        if self._verify == "off" or not plan.lengths.shape[1]:
            return True
        tables, blob = plan.manifest.tables, plan.blobs[at]
        if self._verify == "full":
            return blake3.blake3(view).digest() == bytes(tables.digests[blob])
        first = plan.first_field
        for i, (start, length) in enumerate(zip(plan.starts[at].tolist(), plan.lengths[at].tolist(), strict=True)):
            expected = int(tables.xxh3[blob, first + i])
            if length >= 0 and xxhash.xxh3_64_intdigest(view[start : start + length]) != expected:
                return False
        return True


class Tier(Protocol):
    """A place that samples come from: this host, the rack, the origin."""

    name: str

    def fetch(self, delivery: Delivery) -> None:
        """Put into the delivery what this tier has of the missing. What it has not stays missing: that is no error."""
        ...

    def blame(self, delivery: Delivery, bad: Positions) -> None:
        """Hear that these were wrong, and see to it that asking again can help."""
        ...

    def close(self) -> None: ...


def field_views(delivery: Delivery, at: int) -> list[memoryview | None]:
    """Return the views of the wanted byte fields of one checked sample; ``None`` for a field that it lacks."""
    view = delivery.views[at]
    assert view is not None
    starts, lengths = delivery.plan.starts[at].tolist(), delivery.plan.lengths[at].tolist()
    return [
        view[start : start + length] if length >= 0 else None for start, length in zip(starts, lengths, strict=True)
    ]
