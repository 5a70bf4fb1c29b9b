"""The loader's parts in isolation, each among fakes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.substitution import View
from quiver_client.loader.draw_wait import PATIENCE_SECONDS, PATIENCE_SECONDS_MIN, WAIT_SECONDS_MAX, DrawWait
from quiver_client.loader.epoch import Drawn, Epoch, ShardLayout, _entries_of
from quiver_client.loader.loop_rate import NOT_TIMED, LoopRate, LoopTurn
from quiver_client.loader.threads import ThreadedBatches
from tests.support.residency import Clock
from tests.support.threads import alive
from tests.support.waiting import until

# -- LoopRate ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> Clock:
    return Clock()


def reading(rate: LoopRate, clock: Clock, batches: int, seconds: float, waited: float = 0.0) -> None:
    for _ in range(batches):
        clock.now += seconds
        rate.consumed(100.0, LoopTurn(waited))


def test_the_rate_of_a_loop_is_its_bytes_per_second(clock: Clock) -> None:
    rate = LoopRate(clock.monotonic)
    rate.consumed(100.0, NOT_TIMED)  # how long the first one took says nothing
    assert rate.value == 0.0
    reading(rate, clock, 5, 0.125)
    assert rate.value == 800.0


def test_waiting_because_nothing_is_resident_does_not_lower_the_rate(clock: Clock) -> None:
    rate = LoopRate(clock.monotonic)
    rate.consumed(100.0, NOT_TIMED)
    for _ in range(4):
        rate.starved(9.0)
        reading(rate, clock, 1, 9.125, waited=9.0)
    assert rate.value == 800.0


def test_a_draw_that_waited_while_the_loop_computed_is_not_subtracted(clock: Clock) -> None:
    rate = LoopRate(clock.monotonic)
    rate.consumed(100.0, NOT_TIMED)
    for _ in range(4):
        rate.starved(9.0)
        reading(rate, clock, 1, 0.25, waited=0.125)  # it had to wait for but half of that time itself
    assert rate.value == 800.0


def test_waiting_for_a_slow_transform_counts_as_the_loops_own_time(clock: Clock) -> None:
    rate = LoopRate(clock.monotonic)
    rate.consumed(100.0, NOT_TIMED)
    reading(rate, clock, 4, 0.125, waited=0.125)
    assert rate.value == 800.0


def test_a_pause_between_epochs_does_not_change_the_rate(clock: Clock) -> None:
    rate = LoopRate(clock.monotonic)
    rate.consumed(100.0, NOT_TIMED)
    reading(rate, clock, 4, 0.125)
    rate.pause()
    reading(rate, clock, 1, 3600.0)
    reading(rate, clock, 4, 0.125)
    assert rate.value == 800.0


def test_a_new_rate_is_learned_gradually(clock: Clock) -> None:
    rate = LoopRate(clock.monotonic)
    rate.consumed(100.0, NOT_TIMED)
    reading(rate, clock, 4, 0.125)
    reading(rate, clock, 2, 0.25)
    assert 400.0 < rate.value < 800.0
    reading(rate, clock, 40, 0.25)
    assert rate.value == pytest.approx(400.0, rel=0.01)


# -- DrawWait ---------------------------------------------------------------------------------------------------------


def seconds_waited(wait: DrawWait, usable: Callable[[int], int]) -> int:
    """Look once a second; return after how many seconds the wait is over."""
    for second in range(100):
        if not wait.go_on(float(second), usable(second)):
            return second
    raise AssertionError("it never ends")


def test_a_wait_ends_when_nothing_of_use_arrived_for_a_while() -> None:
    wait = DrawWait()
    assert not wait.is_waiting
    assert seconds_waited(wait, lambda second: min(second, 3)) == 3 + PATIENCE_SECONDS
    assert wait.is_waiting
    assert wait.end(8.0) == 8.0
    assert not wait.is_waiting
    assert wait.end(9.0) == 0.0


def test_a_wait_ends_although_something_of_use_arrives_all_the_time() -> None:
    assert seconds_waited(DrawWait(), lambda second: second) == WAIT_SECONDS_MAX


def test_waits_in_vain_become_shorter_and_worthwhile_ones_longer_within_bounds() -> None:
    wait, patience = DrawWait(), PATIENCE_SECONDS
    for _ in range(9):
        assert wait.go_on(0.0, 0)
        assert wait.go_on(patience * 0.99, 0)
        assert not wait.go_on(patience, 0)
        wait.end(patience)
        patience = max(patience / 2, PATIENCE_SECONDS_MIN)
    for _ in range(9):
        assert wait.go_on(0.0, 0)
        wait.end(patience * 0.99)
        patience = min(patience * 2, PATIENCE_SECONDS)
    assert seconds_waited(wait, lambda second: 0) == PATIENCE_SECONDS


def test_a_wait_that_is_cancelled_is_forgotten() -> None:
    wait = DrawWait()
    assert wait.go_on(0.0, 0)
    wait.cancel()
    assert not wait.is_waiting
    assert wait.go_on(99.0, 0)


# -- Epoch ------------------------------------------------------------------------------------------------------------


def layout(shard_of: list[int]) -> ShardLayout:
    counts = np.bincount(shard_of)
    return ShardLayout(np.array(shard_of), counts, np.full(len(counts), 10.0), 10.0 * float(counts.mean()))


def an_epoch(share: list[int] | None = None, **more: Any) -> Epoch:
    # eight samples in three shards: 0 0 0 1 1 1 2 2
    rows = np.array([5, 0, 6, 1, 3, 7, 2, 4] if share is None else share)
    return Epoch(0, rows, layout([0, 0, 0, 1, 1, 1, 2, 2]), **more)


def test_a_batch_is_left_until_its_bytes_are_in_memory_and_pending_until_it_is_drawn() -> None:
    epoch = an_epoch()
    assert epoch.left.tolist() == [3, 3, 2]
    drawn = epoch.draw(np.array([0, 1, 2]))
    assert (drawn.number, drawn.rows.tolist(), drawn.substituted) == (0, [5, 0, 6], 0)
    assert epoch.left.tolist() == [3, 3, 2]
    assert epoch.pending == 5
    epoch.fetched(0)
    epoch.fetched(0)
    assert epoch.left.tolist() == [2, 2, 1]
    assert not epoch.consumed.any()
    assert epoch.consume(0).tolist() == [5, 0, 6]
    assert epoch.consumed.tolist() == [True] * 3 + [False] * 5
    assert epoch.left.tolist() == [2, 2, 1]


def test_a_pass_is_finished_when_all_is_consumed_not_when_all_is_drawn() -> None:
    epoch = an_epoch()
    numbers = [epoch.draw(np.arange(at, at + 4)).number for at in (0, 4)]
    assert epoch.pending == 0
    for number in reversed(numbers):
        assert not epoch.finished
        epoch.consume(number)
    assert epoch.finished
    assert epoch.batches == 2


def test_what_was_consumed_before_is_not_drawn_again() -> None:
    own = np.array([True, False] * 4)
    epoch = an_epoch(own=own, batches=3)
    assert epoch.left.tolist() == [2, 1, 1]
    drawn = epoch.draw(np.arange(4))
    assert drawn.rows.tolist() == [0, 1, 7, 4]
    epoch.consume(drawn.number)
    assert epoch.consumed.all()
    assert epoch.batches == 4
    assert own.tolist() == [True, False] * 4  # whose mask it is, is not written to


def test_samples_that_came_before_their_turn_are_counted() -> None:
    epoch = an_epoch()
    assert epoch.draw(np.array([2, 5])).substituted == 2
    assert epoch.draw(np.array([0, 3])).substituted == 1
    assert epoch.draw(np.array([1, 4])).substituted == 0


def test_a_batch_that_waits_no_longer_keeps_to_the_lookahead() -> None:
    epoch = an_epoch()
    view = View(np.array([False, False, True]), np.zeros(3, np.uint8), np.zeros(3, np.int64))
    assert epoch.choose(2, view, 3) is None
    assert epoch.completed(2, view, 3).tolist() == [0, 2]  # the sample 6 is resident, and so is 7: too far ahead
    assert epoch.completed(2, view, None).tolist() == [2, 5]
    assert epoch.completed(99, view, 1).tolist() == list(range(8))


def test_the_shards_that_are_next_come_in_the_order_of_their_first_use() -> None:
    epoch = an_epoch()
    assert epoch.soon(2) == [1, 0]
    assert epoch.soon(99) == [1, 0, 2]
    epoch.draw(np.array([0]))
    assert epoch.soon(2) == [0, 2]


@given(
    share=st.lists(st.integers(0, 9), max_size=30),
    consumed=st.lists(st.booleans(), min_size=30, max_size=30),
    rows=st.lists(st.integers(0, 12), max_size=40),
)
def test_entries_of_a_replay_are_found_once_each(share: list[int], consumed: list[bool], rows: list[int]) -> None:
    pending = np.flatnonzero(~np.array(consumed[: len(share)], bool))
    got = _entries_of(np.array(share, np.int64), pending, np.array(rows, np.int64))[0].tolist()
    left = pending.tolist()
    expected = []
    for row in rows:
        entry = next((entry for entry in left if share[entry] == row), None)
        if entry is not None:
            left.remove(entry)
            expected.append(entry)
    assert got == expected


# -- ThreadedBatches --------------------------------------------------------------------------------------------------


class Order:
    """Draws ``count`` batches of one sample each; the one with number ``fails`` cannot be drawn."""

    def __init__(self, count: int, fails: int = -1) -> None:
        self.count, self.fails = count, fails
        self.drawn = 0
        self.abandoned = False
        self.in_memory: list[int] = []

    def draw(self, epoch: Any) -> Drawn | None:
        if self.drawn == self.fails:
            raise ValueError("this one cannot be drawn")
        if self.abandoned or self.drawn == self.count:
            return None
        self.drawn += 1
        return Drawn(self.drawn - 1, np.array([self.drawn - 1]), 0)

    def fetched(self, epoch: Any, number: int) -> None:
        self.in_memory.append(number)

    def abandon(self, epoch: Any) -> None:
        self.abandoned = True


def threaded(order: Order, fetch: Any, depth: int = 3, timeout: float = 0.0) -> ThreadedBatches:
    source = SimpleNamespace(fetch=fetch, asked=lambda: None, received=lambda batch: batch)
    epoch = SimpleNamespace(rows=lambda number: np.array([number]))
    return ThreadedBatches(order, epoch, source, depth, timeout)  # type: ignore[arg-type]


def none_is_left() -> None:
    until(lambda: not alive("quiver-draw") + alive("quiver-fetch"))


def test_batches_come_in_the_order_in_which_they_were_drawn() -> None:
    first_last = threading.Event()

    def fetch(drawn: Drawn) -> int:
        if drawn.number == 0:
            assert first_last.wait(20)
        elif drawn.number == 2:
            first_last.set()
        return drawn.number * 10

    order = Order(9)
    assert list(threaded(order, fetch)) == [(number, number * 10) for number in range(9)]
    assert sorted(order.in_memory) == list(range(9))
    none_is_left()


def test_a_batch_that_fails_is_raised_in_its_turn_and_the_next_one_follows() -> None:
    def fetch(drawn: Drawn) -> int:
        if drawn.number == 1:
            raise TimeoutError("of the transform's own")
        return drawn.number

    batches = threaded(Order(4), fetch, timeout=20.0)
    assert next(batches) == (0, 0)
    with pytest.raises(TimeoutError, match="of the transform's own"):
        next(batches)
    assert [number for number, _ in batches] == [2, 3]
    none_is_left()


def test_a_draw_that_fails_is_raised_after_what_was_drawn_before_it() -> None:
    batches = threaded(Order(4, fails=2), lambda drawn: drawn.number, depth=5)
    assert [next(batches)[0], next(batches)[0]] == [0, 1]
    with pytest.raises(ValueError, match="cannot be drawn"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)
    none_is_left()


def test_closing_waits_for_batches_in_flight_and_releases_them() -> None:
    begun, gate = threading.Event(), threading.Event()

    def fetch(drawn: Drawn) -> int:
        begun.set()
        assert gate.wait(20)
        raise RuntimeError("nobody hears of this one")

    order = Order(99)
    batches = threaded(order, fetch)
    assert begun.wait(20)
    gate.set()
    batches.close()
    assert order.abandoned
    assert order.drawn <= 4
    assert not alive("quiver-draw") + alive("quiver-fetch")
    batches.close()


def test_what_fails_after_the_iterator_is_gone_keeps_nothing_alive() -> None:
    begun, gate = threading.Event(), threading.Event()

    def fetch(drawn: Drawn) -> int:
        begun.set()
        assert gate.wait(20)
        raise RuntimeError("nobody hears of this one")

    order = Order(99)
    there = weakref.ref(order)
    gc.collect()
    gc.disable()  # a cycle would be left
    try:
        batches = threaded(order, fetch)
        assert begun.wait(20)
        del order, batches
        gate.set()
        until(lambda: there() is None)
    finally:
        gc.enable()
    none_is_left()
