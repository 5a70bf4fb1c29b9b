"""What fills and reports say of an origin."""

from __future__ import annotations

import pytest

from quiver.residency import OriginEstimate, OriginEstimator


def test_nothing_is_known_at_first() -> None:
    assert OriginEstimator().estimate == OriginEstimate(0.0, 0.0, 0.5)


def test_fills_side_by_side_say_how_fast_the_origin_is_and_each_how_long_it_takes() -> None:
    estimator = OriginEstimator()
    for at in range(0, 200, 10):
        estimator.began(float(at))
        estimator.began(float(at))
        estimator.ended(at + 2.0, 2.0, 100.0)
        estimator.ended(at + 2.0, 2.0, 100.0)
        assert estimator.estimate.rate <= 101.0
    assert estimator.estimate.rate == pytest.approx(100.0, rel=0.05), "what all of them brought in that time"
    assert estimator.estimate.fill_seconds == pytest.approx(2.0)


def test_time_in_which_nothing_is_fetched_and_fills_that_fail_say_nothing() -> None:
    estimator = OriginEstimator()
    for at in (0.0, 100.0, 200.0):
        estimator.began(at)
        estimator.ended(at + 1.0, 1.0, 50.0)
        estimator.began(at + 50.0)
        estimator.ended(at + 60.0, None, 0.0)
    assert estimator.estimate.rate == pytest.approx(50.0)
    assert estimator.estimate.fill_seconds == pytest.approx(1.0)


def test_shards_that_peers_had_say_nothing_of_the_origin() -> None:
    estimator = OriginEstimator()
    estimator.began(0.0)
    estimator.ended(1.0, 1.0, 0.0)
    assert estimator.estimate.rate == 0.0
    assert estimator.estimate.fill_seconds == 1.0


def test_reports_say_how_often_they_come() -> None:
    estimator = OriginEstimator()
    for _ in range(50):
        estimator.reported(0.25)
    assert estimator.estimate.report_seconds == pytest.approx(0.25)
