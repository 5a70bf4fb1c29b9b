"""Whom to avoid, when to hedge, and how much: decisions as functions of outcomes, under a clock that tests set."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver import health as health_module
from quiver.health import (
    FEW,
    FORGET_SECONDS,
    GIVE_UP_SECONDS_MIN,
    HEDGE_SECONDS_MIN,
    HEDGE_SECONDS_UNKNOWN,
    LATE_MAX,
    LATE_WINDOW,
    PAUSE_SECONDS_MAX,
    PEERS_MAX,
    PROBE_SECONDS_MAX,
    RECENT,
    WINDOW,
    Health,
    HedgeBudget,
)
from tests.conftest import PATIENT_SECONDS

SIZE = 2_000_000
PEERS = ("a", "b", "c", "d")


def warmed(*urls: str, seconds: float = 0.005) -> Health:
    health = Health()
    for at in range(RECENT):
        for url in urls:
            health.answered(url, seconds, SIZE, at * 0.01)
    return health


# -- when a request is late -------------------------------------------------------------------------------------------


def test_nothing_known_means_a_default_and_no_giving_up() -> None:
    health = Health()
    assert health.late_after_seconds(SIZE) == HEDGE_SECONDS_UNKNOWN
    assert health.give_up_after_seconds(SIZE) == inf
    assert not health.is_slow(100.0, SIZE)


def test_a_fast_rack_hedges_no_earlier_than_the_floor() -> None:
    health = warmed(*PEERS)
    assert health.late_after_seconds(SIZE) == HEDGE_SECONDS_MIN
    assert health.give_up_after_seconds(SIZE) == GIVE_UP_SECONDS_MIN


@pytest.mark.usefixtures("patient_reads")
def test_where_tests_count_what_came_from_where_nothing_is_late() -> None:
    for health in (Health(), warmed(*PEERS)):
        assert health.late_after_seconds(SIZE) == PATIENT_SECONDS
        assert health.give_up_after_seconds(SIZE) >= PATIENT_SECONDS


def test_a_request_is_late_at_the_95th_percentile_of_what_the_rack_takes() -> None:
    health = Health()
    for at in range(WINDOW):
        for url in PEERS:
            health.answered(url, 1.0 if at % 32 == 0 else 0.2, SIZE, at)  # two of 64 are slow: below 5 %
    assert health.late_after_seconds(SIZE) == pytest.approx(0.2)
    assert health.late_after_seconds(10 * SIZE) > 0.2, "more bytes may take longer"
    assert health.give_up_after_seconds(SIZE) == pytest.approx(1.6)


def test_one_slow_peer_does_not_make_slowness_usual() -> None:
    health = warmed("a", "b", "c")
    for at in range(FEW - 1):
        health.answered("c", 5.0, SIZE, 1 + at)
    assert health.late_after_seconds(SIZE) == HEDGE_SECONDS_MIN


def test_where_all_are_slow_nobody_is_late_or_avoided() -> None:
    health = warmed(*PEERS)
    for at in range(2 * WINDOW):
        for url in PEERS:
            health.answered(url, 0.5, SIZE, 1 + at)
    assert health.late_after_seconds(SIZE) == pytest.approx(0.5)
    assert not any(map(health.is_avoided, PEERS))


# -- breakers ---------------------------------------------------------------------------------------------------------


def test_a_peer_that_does_not_answer_is_avoided_at_once_and_its_failure_counts_once() -> None:
    health = Health()
    health.failed("a", 1.0)
    health.failed("a", 1.1)  # by another thread
    assert health.is_avoided("a")
    assert health.is_silent("a")
    assert health.failures("a") == 1
    assert "a silent" in repr(health)
    health.recovered("a", 1.2)
    assert not health.is_avoided("a")


def test_a_peer_that_hedges_overtake_again_and_again_is_avoided() -> None:
    health = warmed("a", "b")
    for at in range(LATE_MAX - 1):
        health.overtaken("a", 1 + at)
    assert not health.is_avoided("a")
    for at in range(LATE_WINDOW):
        health.answered("a", 0.005, SIZE, 10 + at)
    health.overtaken("a", 20)
    assert not health.is_avoided("a"), "late now and then"
    health.overtaken("a", 21)
    health.overtaken("a", 22)
    assert health.is_avoided("a")
    assert not health.is_silent("a")
    health.recovered("a", 23)
    assert health.is_avoided("a"), "an answer does not show that it is fast again"


def test_requests_that_end_late_while_a_peer_is_avoided_do_not_count_once_it_is_back() -> None:
    health = Health()
    for at in range(3 * LATE_MAX):  # as many were under way
        health.overtaken("a", at * 0.01)
    assert health.begin_probes(5.0) == ["a"]
    health.probed("a", good=True, now=5.0)
    for at in range(LATE_MAX - 1):
        health.overtaken("a", 6.0 + at)
    assert not health.is_avoided("a"), "late now and then"


def test_a_peer_ten_times_slower_than_the_others_is_avoided_and_only_that_one() -> None:
    health = warmed("a", "b", "c")
    for at in range(2 * RECENT):
        if not health.is_avoided("b"):
            health.answered("b", 0.05, SIZE, 1 + at)
        for url in ("a", "c"):
            health.answered(url, 0.005, SIZE, 1 + at)
    assert [health.is_avoided(url) for url in ("a", "b", "c")] == [False, True, False]


def test_a_ratio_that_nobody_notices_is_no_reason_to_avoid_a_peer() -> None:
    health = warmed("a", "b", "c", seconds=0.0005)
    for at in range(4 * RECENT):
        health.answered("b", 0.01, SIZE, 1 + at)
    assert not health.is_avoided("b")


def test_at_most_a_third_is_avoided_for_being_slower_than_the_others() -> None:
    urls = [f"n{at}" for at in range(9)]
    health = warmed(*urls)
    for at in range(4 * RECENT):
        for url in urls:
            if not health.is_avoided(url):
                health.answered(url, 0.5 if url in urls[:4] else 0.005, SIZE, 1 + at)
    assert sum(map(health.is_avoided, urls)) == 3


def test_a_peer_that_is_asked_although_it_is_avoided_shows_nothing_about_the_rack() -> None:
    health = Health()
    for at in range(LATE_MAX):
        health.overtaken("a", at)
    for at in range(2 * WINDOW):
        health.answered("a", 5.0, SIZE, 10 + at)
    assert health.late_after_seconds(SIZE) == HEDGE_SECONDS_UNKNOWN
    assert health.is_avoided("a")


def test_an_avoided_peer_is_probed_once_after_a_pause_and_used_again_if_that_goes_well() -> None:
    health = Health(pause_seconds=2.0)
    health.failed("a", 10.0)
    assert health.begin_probes(10.5) == [], "the pause, of which at most half is left to chance"
    assert health.begin_probes(12.1) == ["a"]
    assert health.begin_probes(12.2) == [], "one probe at a time"
    assert health.is_avoided("a"), "half-open: no request is sent meanwhile"
    health.probed("a", good=True, now=12.3)
    assert not health.is_avoided("a")


def test_each_failed_probe_doubles_the_pause_up_to_a_limit() -> None:
    health = Health(pause_seconds=1.0)
    now, pauses = 0.0, []
    health.failed("a", now)
    for _ in range(12):
        begun = now
        while not health.begin_probes(now):
            now += 0.05
        pauses.append(now - begun)
        health.probed("a", good=False, now=now)
    assert pauses[-1] > pauses[0]
    assert max(pauses) <= PAUSE_SECONDS_MAX + 0.1


def test_a_probe_that_never_ends_is_begun_again() -> None:
    health = Health()
    health.failed("a", 0.0)
    assert health.begin_probes(5.0) == ["a"]
    assert health.begin_probes(5.0 + PROBE_SECONDS_MAX + 0.1) == ["a"]


def test_a_peer_that_comes_and_goes_is_avoided_for_longer_until_it_stays() -> None:
    health = Health(pause_seconds=1.0)
    now = 0.0
    for _ in range(4):
        health.failed("a", now)
        while not health.begin_probes(now):
            now += 0.1
        health.probed("a", good=True, now=now)
    assert health.failures("a") == 4
    health.failed("a", now + FORGET_SECONDS + 1)
    assert health.failures("a") == 1


def test_a_peer_that_left_the_ring_is_forgotten_and_no_ring_makes_it_grow() -> None:
    health = Health()
    for at in range(PEERS_MAX + 10):
        health.failed(f"n{at}", 0.0)
    assert len(health._peers) == PEERS_MAX
    health.retain(["n4000"])
    assert list(health._peers) == ["n4000"]


EVENTS = st.sampled_from(["answered", "slow", "overtaken", "failed", "probe well", "probe badly", "recovered"])


@given(st.lists(st.tuples(EVENTS, st.sampled_from(PEERS), st.floats(0, 3)), max_size=200))
@settings(deadline=None)
def test_whatever_happens_a_peer_is_probed_within_its_pause_and_then_used(events: list[tuple[str, str, float]]) -> None:
    health, now = Health(), 0.0
    for event, url, seconds in events:
        now += seconds
        if event in ("answered", "slow"):
            health.answered(url, 0.005 if event == "answered" else 0.5, SIZE, now)
        elif event.startswith("probe"):
            for due in health.begin_probes(now):
                assert health.is_avoided(due)
                health.probed(due, good=event == "probe well", now=now)
        else:
            getattr(health, event)(url, now)
        assert health.late_after_seconds(SIZE) >= HEDGE_SECONDS_MIN
        assert all(health.is_avoided(peer) for peer in PEERS if health.is_silent(peer))
    avoided = {url for url in PEERS if health.is_avoided(url)}
    assert set(health.begin_probes(now + PAUSE_SECONDS_MAX + PROBE_SECONDS_MAX + 1)) == avoided
    for url in avoided:
        health.probed(url, good=True, now=now)
    assert not any(map(health.is_avoided, PEERS))


# -- the budget -------------------------------------------------------------------------------------------------------

STEPS = st.lists(st.tuples(st.sampled_from(["read", "hedge", "hedge, half of it in vain"]), st.integers(0, 10_000)))


@given(STEPS)
def test_hedges_transfer_no_more_in_vain_than_their_share_and_the_burst(steps: list[tuple[str, int]]) -> None:
    budget = HedgeBudget(0.05, 20_000)
    read = hedged = 0
    for what, size in steps:
        if what == "read":
            budget.earn(size)
            read += size
        elif budget.take(size):
            unused = size // 2 if what != "hedge" else 0
            budget.refund(unused)
            hedged += size - unused
    assert hedged <= 20_000 + 0.05 * read + 1e-6


def test_a_budget_that_is_spent_comes_back_with_what_is_read() -> None:
    budget = HedgeBudget(0.05, 1000)
    assert budget.take(1000)
    assert not budget.take(1)
    budget.earn(400)
    assert budget.take(20)
    assert not budget.take(1)
    budget.refund(10_000)
    assert "1000 of 1000" in repr(budget)


def test_the_constants_agree() -> None:
    assert FEW <= RECENT <= WINDOW
    assert LATE_MAX <= LATE_WINDOW
    assert health_module.PAUSE_SECONDS <= PAUSE_SECONDS_MAX
