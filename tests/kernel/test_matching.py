"""Assignment and placement: the least cost in all, compared with trying everything."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from quiver.matching import Floats, Place, assign, place

COST = st.one_of(st.integers(0, 6).map(float), st.floats(0, 1e6), st.just(float("inf")))
SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 6)).filter(lambda shape: shape[0] <= shape[1])


def least(costs: Floats) -> float:
    rows, columns = costs.shape
    return min(costs[np.arange(rows), list(each)].sum() for each in itertools.permutations(range(columns), rows))


@given(arrays.arrays(np.float64, SHAPES, elements=COST))
@settings(max_examples=300, deadline=None)
def test_an_assignment_costs_as_little_as_any(costs: Floats) -> None:
    best = least(costs)
    if np.isinf(best):
        with pytest.raises(ValueError, match="no column"):
            assign(costs)
        return
    chosen = assign(costs)
    assert len(set(chosen.tolist())) == len(chosen)
    assert costs[np.arange(len(costs)), chosen].sum() == pytest.approx(best)


def cost_of(places: list[Place], alone: Floats, occupied: Floats) -> float:
    """Return what a placement costs: each job alone, and each job's delay by those that come before it."""
    total = 0.0
    for job, at in enumerate(places):
        total += alone[job, at.machine]
        before = [it for it, other in enumerate(places) if other.machine == at.machine and other.after < at.after]
        total += sum(occupied[it, at.machine] for it in before)
    return float(total)


@given(st.data(), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_a_placement_costs_as_little_as_any(data: st.DataObject, jobs: int, machines: int) -> None:
    plain = st.one_of(st.integers(0, 5).map(float), st.floats(0, 1e4))
    alone = data.draw(arrays.arrays(np.float64, (jobs, machines), elements=plain))
    occupied = data.draw(arrays.arrays(np.float64, (jobs, machines), elements=plain))
    places = place(alone, occupied)
    for machine in range(machines):
        assert sorted(it.after for it in places if it.machine == machine) == list(
            range(sum(it.machine == machine for it in places))
        )
    best = np.inf
    for machine_of in itertools.product(range(machines), repeat=jobs):
        for order in itertools.permutations(range(jobs)):
            turn = {job: sum(machine_of[it] == machine_of[job] for it in order[:at]) for at, job in enumerate(order)}
            tried = [Place(machine_of[job], turn[job]) for job in range(jobs)]
            best = min(best, cost_of(tried, alone, occupied))
    assert cost_of(places, alone, occupied) == pytest.approx(best)


def test_jobs_that_occupy_nothing_may_all_go_to_one_machine() -> None:
    places = place(np.array([[1.0, 9.0]] * 3), np.zeros((3, 2)))
    assert [it.machine for it in places] == [0, 0, 0]
    assert sorted(it.after for it in places) == [0, 1, 2]


def test_the_job_that_occupies_least_comes_first_and_the_rest_move_when_it_gets_crowded() -> None:
    occupied = np.array([[3.0, 100.0], [1.0, 100.0], [2.0, 100.0]])
    places = place(occupied, occupied)
    assert [it.after for it in places] == [2, 0, 1]
    crowded = np.array([[10.0, 12.0]] * 3)
    assert sorted(it.machine for it in place(crowded, crowded)) == [0, 0, 1]


def test_what_is_not_possible_is_refused() -> None:
    forbidden = np.array([[1.0, np.inf], [np.inf, np.inf]])
    with pytest.raises(ValueError, match="job 1 fits no machine"):
        place(forbidden, forbidden)
    assert [it.machine for it in place(np.array([[np.inf, 5.0]]), np.array([[np.inf, np.inf]]))] == [1]
    with pytest.raises(ValueError, match="must be a number"):
        assign(np.array([[np.nan]]))
    with pytest.raises(ValueError, match="3 rows cannot have a column"):
        assign(np.zeros((3, 2)))
    with pytest.raises(ValueError, match="too many"):
        place(np.zeros((4000, 9)), np.zeros((4000, 9)))
    assert place(np.zeros((0, 3)), np.zeros((0, 3))) == []
