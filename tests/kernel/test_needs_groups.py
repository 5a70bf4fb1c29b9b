"""A sweep's trials vote once, cooperate among themselves, and are told apart from other tenants' sweeps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quiver.identity import Identity
from quiver.residency import Needs
from quiver.residency.report import FULL
from tests.kernel.test_needs_policy import A, B, board, numbers, report, shard, shards, wanted


def trial(consumer: int, left: Sequence[int], group: str = "sweep", tenant: str = "", **more: float) -> object:
    return report(consumer, left, identity=Identity(f"trial {consumer}", group, tenant), **more)


def name(consumer: int) -> bytes:
    return consumer.to_bytes(16, "big")


def test_the_trials_of_a_sweep_vote_once() -> None:
    needs = board(3)
    for consumer in range(1, 21):
        needs.report(A, trial(consumer, [FULL, 0, 0]), 0.0)
    for consumer in (30, 31):
        needs.report(A, report(consumer, [0, FULL, 0]), 0.0)
    assert needs.counts.tolist() == [1, 2, 0]
    assert needs.votes().tolist() == [1.0, 2.0, 0.0]
    assert numbers(wanted(needs)) == [1, 0]


def test_ranks_of_one_job_that_is_in_no_sweep_count_each() -> None:
    needs = board(2)
    for rank in (1, 2):
        needs.report(A, report(rank, [FULL, 0], identity=Identity("job")), 0.0)
    assert needs.votes().tolist() == [2.0, 0.0], "what they read has nothing in common but the shards"


def test_within_a_sweep_what_most_trials_need_comes_first_and_what_fewest_need_is_evicted() -> None:
    needs = board(3, held=[0, 1])
    for consumer in range(1, 20):
        needs.report(A, trial(consumer, [FULL, 0, FULL]), 0.0)
    needs.report(A, trial(20, [0, FULL, FULL]), 0.0)
    [decision] = wanted(needs, free=0.0)
    assert (decision.shard, decision.forced) == (shard(2), (shard(1),)), "one trial needs it where 19 need the other"


def test_trials_see_what_the_others_need() -> None:
    needs = board(2, held=[0, 1])
    for consumer in (1, 2, 3):
        needs.report(A, trial(consumer, [FULL, FULL if consumer == 3 else 0]), 0.0)
    needs.report(A, report(4, [FULL, 0]), 0.0)
    assert needs.seen_by(name(1)).tolist() == [1 + 3, 1 + 1]
    assert needs.seen_by(name(3)).tolist() == [1 + 3, 1]
    assert needs.seen_by(name(4)).tolist() == [1 + 1, 1 + 1], "to others the sweep is one"


def test_sweeps_of_one_name_are_told_apart_by_tenant_and_dataset() -> None:
    needs = board(1)
    needs.add_dataset(B, shards([0]), np.ones(1), np.zeros(1, bool), np.ones(1, bool))
    for consumer, tenant in ((1, "alice"), (2, "alice"), (3, "bob")):
        needs.report(A, trial(consumer, [FULL], tenant=tenant), 0.0)
    needs.report(B, trial(4, [FULL], tenant="alice"), 0.0)
    assert needs.counts.tolist() == [3], "alice's and bob's, and alice's on the other dataset"


steps = st.lists(
    st.tuples(st.integers(1, 6), st.sampled_from(["", "a", "b"]), st.lists(st.booleans(), min_size=4, max_size=4)),
    max_size=30,
)


@given(steps, st.sets(st.integers(1, 6)))
def test_votes_are_those_of_a_plain_count(told: list[tuple[int, str, list[bool]]], leaving: set[int]) -> None:
    needs: Needs = board(4, held=[0, 1, 2, 3])
    last: dict[int, tuple[str, list[bool]]] = {}
    for consumer, group, left in told:
        needs.report(A, trial(consumer, [FULL * each for each in left], group), 0.0)
        last[consumer] = group, left
    for consumer in leaving:
        needs.leave(name(consumer))
        last.pop(consumer, None)
    sweeps = {group or f"alone {consumer}" for consumer, (group, _) in last.items()}
    members = {
        sweep: [left for consumer, (group, left) in last.items() if (group or f"alone {consumer}") == sweep]
        for sweep in sweeps
    }
    expected = [sum(sum(left[at] for left in of) / len(of) for of in members.values()) for at in range(4)]
    np.testing.assert_allclose(needs.votes(), expected)
    assert needs.counts.tolist() == [sum(any(left[at] for left in of) for of in members.values()) for at in range(4)]
