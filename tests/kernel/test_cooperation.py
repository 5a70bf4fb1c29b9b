"""Jobs that share a cache and know nothing of one another, on a fake clock: small runs of ``bench/simulation.py``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench import simulation
from bench.simulation import Result, simulate
from quiver.identity import Identity
from quiver.residency import ConsumerReport

NEVER = np.inf


def three(**more: object) -> Result:
    more = {"rates": [1.0] * 3, "starts": [0.0, 8.0, 16.0], "shards": 96, "epochs": 3} | more
    return simulate(3, 0.2, origin=2.0, **more)  # type: ignore[arg-type]


def test_a_job_alone_reads_again_only_what_the_cache_cannot_hold() -> None:
    result = simulate(1, 0.2, [1.0], [0.0], 2.0, shards=96, epochs=3)
    assert result.origin_per_epoch[0] == pytest.approx(1.0)
    assert max(result.origin_per_epoch[1:]) <= 0.84
    assert result.forced == result.given_up == 0
    assert result.peak_resident <= 1.0


@pytest.mark.parametrize(("seed", "mixed"), [(0, False), (1, False), (0, True)])
def test_three_jobs_out_of_step_share_one_stream_of_reads(seed: int, mixed: bool) -> None:
    """The bound is 73 %, less the cold start; an LRU cache, or jobs that draw from all that is there, are at 54 %."""
    result = three(seed=seed, mixed=mixed)
    assert result.hit >= 0.66
    assert result.peak_resident <= 1.0
    assert result.given_up == 0
    assert result.waiting_max <= 0.05


@pytest.mark.parametrize("mixed", [False, True])
def test_unequal_speeds_slow_nobody_down(mixed: bool) -> None:
    result = three(rates=[1.0, 0.85, 0.7], starts=[0.0] * 3, mixed=mixed)
    assert result.hit >= 0.58
    assert result.waiting_max <= 0.05
    assert result.given_up == 0
    assert result.peak_resident <= 1.0


def test_the_trials_of_a_sweep_cooperate_as_jobs_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their one vote weighs less beside other jobs; what it says about the shards of their dataset is the same."""
    apart = three(epochs=2)

    def grouped(**told: Any) -> ConsumerReport:
        return ConsumerReport(**told, identity=Identity(group="sweep"))

    monkeypatch.setattr(simulation, "ConsumerReport", grouped)
    assert three(epochs=2).origin_per_epoch == apart.origin_per_epoch


def test_jobs_that_starve_in_turn_leave_each_other_what_was_fetched() -> None:
    """Six shards' room for eight jobs: were they to evict each other's, each epoch would be read dozens of times."""
    result = simulate(8, 0.1, [1.0] * 8, [8.0 * job for job in range(8)], 2.0, shards=64, epochs=1, mixed=True)
    assert result.hit >= 0.15
    assert result.peak_resident <= 1.0


@pytest.mark.fault("E5")
def test_a_killed_job_pins_nothing_past_its_lease() -> None:
    result = three(starts=[0.0] * 3, stops={2: (20.0, NEVER)}, lease=5.0)
    alone = simulate(2, 0.2, [1.0] * 2, [0.0] * 2, 2.0, shards=96, epochs=3)
    assert result.ended[2] == NEVER
    assert max(result.ended[:2]) <= 1.05 * max(alone.ended)
    assert max(result.waiting[:2]) <= 0.05
    assert result.given_up == 0


def test_a_job_that_never_lets_go_would_be_felt() -> None:
    """What the lease is for: with one that does not run out, the dead job's needs crowd the others."""
    with_lease = three(starts=[0.0] * 3, stops={2: (20.0, NEVER)}, lease=5.0)
    without = three(starts=[0.0] * 3, stops={2: (20.0, NEVER)}, lease=1e9)
    assert without.forced > with_lease.forced + 10


@pytest.mark.fault("E5")
def test_a_suspended_job_holds_nobody_up_and_goes_on_where_it_was() -> None:
    result = three(starts=[0.0] * 3, stops={1: (30.0, 130.0)}, lease=5.0)
    assert max(result.waiting[0], result.waiting[2]) <= 0.05
    assert result.ended[1] < NEVER
    assert result.peak_resident <= 1.0


def test_the_tail_of_an_epoch_does_not_stall_on_what_could_have_been_asked_for_before() -> None:
    """The origin is only just fast enough; whoever asks for the missing half at the end would wait for half of it."""
    result = simulate(1, 0.5, [1.0], [0.0], 0.7, shards=96, epochs=3)
    cold = simulate(1, 0.5, [1.0], [0.0], 0.7, shards=96, epochs=1)
    waited = result.waiting[0] * result.ended[0] - cold.waiting[0] * cold.ended[0]
    assert waited <= 0.03 * (result.ended[0] - cold.ended[0])


def test_a_run_is_the_same_again() -> None:
    assert three(seed=3, epochs=1) == three(seed=3, epochs=1)
