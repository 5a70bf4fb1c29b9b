"""An allocation of the cache that is kept, as a new one is not clearly better, divides bandwidth by its policy too."""

from __future__ import annotations

import pytest

from quiver.allocation import DatasetDemand, Policy, Problem, Reader, allocate


def test_a_kept_allocation_predicts_what_the_same_allocation_solved_anew_does() -> None:
    """All of the cache is worth most to the slower job; the faster one lives on bandwidth, and needs more of it."""
    problem = Problem(
        capacity_bytes=49.9e6,
        datasets=(
            DatasetDemand(name="a", size_bytes=80e6, origin="o", readers=(Reader(name="fast", rate=15.7e6),)),
            DatasetDemand(name="b", size_bytes=78.4e6, origin="o", readers=(Reader(name="slow", rate=7.9e6),)),
        ),
        origin_rates={"o": 6e6},
    )
    anew = allocate(problem, Policy.MAX_MIN)
    kept = allocate(problem, Policy.MAX_MIN, kept={name: it.cache_bytes for name, it in anew.shares.items()})
    for key, rate in anew.predicted.items():
        assert kept.predicted[key] == pytest.approx(rate, rel=1e-6)
    split = allocate(problem, Policy.MAX_MIN, kept={"a": 24.95e6, "b": 24.95e6})
    assert all(kept.predicted[key] >= rate * (1 - 1e-6) for key, rate in split.predicted.items() if key[0] == "a")
