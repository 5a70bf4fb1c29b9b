"""Running estimates."""

from __future__ import annotations

import pytest

from quiver.rate import Mean, Rate


def test_the_first_value_is_taken_as_it_is_and_later_ones_by_weight() -> None:
    mean = Mean(0.25)
    mean.add(8.0)
    assert mean.value == 8.0
    mean.add(4.0)
    assert mean.value == 7.0


def test_an_initial_guess_is_replaced_and_not_averaged() -> None:
    mean = Mean(0.25, initial=100.0)
    assert mean.value == 100.0
    mean.add(2.0)
    assert mean.value == 2.0


def test_a_rate_is_known_once_a_window_is_full() -> None:
    rate = Rate(window_seconds=0.5, weight=0.5)
    rate.add(100, 0.25)
    assert rate.value == 0.0
    rate.add(100, 0.25)
    assert rate.value == pytest.approx(400.0)
    rate.add(400, 0.5)
    assert rate.value == pytest.approx(600.0)


def test_a_window_that_is_closed_early_counts_and_an_empty_one_does_not() -> None:
    rate = Rate(window_seconds=10.0, weight=0.5)
    rate.add(50, 0.5)
    rate.close_window()
    assert rate.value == pytest.approx(100.0)
    rate.add(0, 3.0)
    rate.close_window()
    assert rate.value == pytest.approx(100.0)
