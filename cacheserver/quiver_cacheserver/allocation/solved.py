"""The last solved allocation, as others may show it: a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from quiver.allocation import Allocation, Policy, Problem
from quiver.digest import Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """What was asked, and what was answered. All numbers are of the whole rack.

    ``names``: by a dataset's name in its sharing domain, what it is called in ``problem`` and ``allocation``: a name
    that may be shown, of which no two are equal. ``made_at``: seconds on the monotonic clock; 0: never. ``policy`` is
    ``None`` if this daemon allocates nothing.
    """

    problem: Problem
    allocation: Allocation
    names: Mapping[Digest, str] = field(default_factory=dict)
    made_at: float = 0.0
    policy: Policy | None = Policy.MAX_MIN


NOTHING: Final = Solved(
    problem=Problem(capacity_bytes=0.0, datasets=()),
    allocation=Allocation(policy=Policy.MAX_MIN, shares={}, predicted={}),
)
