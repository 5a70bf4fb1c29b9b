"""What is remembered for a while, and how long something that failed is left alone."""

from __future__ import annotations

import pytest

from quiver.backoff import Backoff
from quiver.expiring import Expiring


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_value_is_there_until_its_time_and_not_at_it(clock: Clock) -> None:
    memo: Expiring[str, int] = Expiring(clock=clock)
    memo.set("a", 1, 2.0)
    clock.now += 1.999
    assert memo.get("a") == 1
    assert "a" in memo
    assert list(memo) == ["a"]
    clock.now = 102.0
    assert "a" not in memo
    assert memo.items() == []
    assert memo.get("a", 7) == 7
    assert len(memo) == 0


def test_setting_again_replaces_value_and_time(clock: Clock) -> None:
    memo: Expiring[str, int] = Expiring(clock=clock)
    memo.set("a", 1, 10.0)
    memo.set("a", 2, 1.0)
    assert memo.pop("a") == 2
    assert memo.pop("a") is None
    memo.set("b", 3, 1.0)
    clock.now += 1.0
    assert memo.pop("b") is None


def test_what_has_expired_is_returned_once(clock: Clock) -> None:
    memo: Expiring[str, int] = Expiring(clock=clock)
    memo.set("a", 1, 1.0)
    memo.set("b", 2, 3.0)
    clock.now += 1.0
    assert memo.expire() == [("a", 1)]
    assert memo.expire() == []
    assert memo.items() == [("b", 2)]


def test_it_is_bounded_and_forgets_what_was_set_longest_ago(clock: Clock) -> None:
    memo: Expiring[int, int] = Expiring(3, clock=clock)
    for key in range(3):
        memo.set(key, key, 10.0)
    memo.set(0, 0, 10.0)  # the newest now
    memo.set(3, 3, 10.0)
    assert list(memo) == [2, 0, 3]


def test_each_failure_in_a_row_doubles_the_pause_up_to_a_limit(clock: Clock) -> None:
    backoff = Backoff(0.5, 3.0, clock=clock)
    assert not backoff.is_waiting
    assert [backoff.fail() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.is_waiting
    assert backoff.left_seconds == 3.0
    clock.now += 3.0
    assert not backoff.is_waiting
    assert backoff.failures == 5
    backoff.succeed()
    assert backoff.fail() == 0.5


def test_a_pause_counts_no_failure_and_jitter_only_shortens(clock: Clock) -> None:
    backoff = Backoff(1.0, 8.0, jitter=0.5, clock=clock)
    backoff.pause(2.0)
    assert backoff.is_waiting
    assert backoff.failures == 0
    assert all(0.5 <= Backoff(1.0, 8.0, jitter=0.5, clock=clock).fail() <= 1.0 for _ in range(50))
    for _ in range(5000):
        backoff.fail()
    assert backoff.left_seconds <= 8.0
