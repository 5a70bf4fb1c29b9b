"""What a loop could read and what it does read: turns, the costs of making batches, and what follows from both."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver_client import read_clock
from quiver_client.loader.loop_rate import LoopRate, LoopSpeed, LoopTurn
from quiver_client.loader.making import COLUMNS, Costs, Making, Row, WorkerRows
from quiver_client.loader.probing import BATCHES, FAILURES_MAX, FIRST_SECONDS, LOST_SECONDS, SHARE, Probed, Prober
from quiver_client.loader.profile import Profile
from quiver_client.loader.turns import PENDING_MAX, GpuSteps, Turns
from quiver_client.read_clock import TIERS, BatchCost, Stopwatch
from tests.support.residency import Clock

NOTHING = (0.0,) * len(TIERS)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def loop(rate: LoopRate, clock: Clock, turns: int, turn: LoopTurn, size_bytes: float = 100.0) -> None:
    for _ in range(turns):
        clock.now += turn.waited_seconds + (turn.step_seconds or 0.0)
        rate.consumed(size_bytes, turn, samples=4)


def begun(clock: Clock) -> LoopRate:
    """Return the rate of a loop that has its first batch, and whose first step has ended."""
    rate = LoopRate(clock.monotonic)
    loop(rate, clock, 2, LoopTurn(0.0, 0.01))
    return rate


def cost(making: float = 0.0, cpu: float = 0.0, read: float = 0.0, probe: bool = False, ok: bool = True) -> BatchCost:
    sizes = (0.0, 1000.0, 0.0, 0.0)
    return BatchCost(read, making, cpu, (0.0, read, 0.0, 0.0), sizes, probe, probe and ok)


# -- turns into rates -------------------------------------------------------------------------------------------------


def test_a_loop_that_an_origin_holds_back_says_what_it_could_read(clock: Clock) -> None:
    rate = begun(clock)
    loop(rate, clock, 20, LoopTurn(waited_seconds=0.9, step_seconds=0.1))
    assert rate.value == pytest.approx(1000.0)
    assert rate.speed.throughput == pytest.approx(100.0)
    assert rate.speed.waited == pytest.approx(0.9)
    assert rate.speed.step_seconds == pytest.approx(0.1)
    assert rate.speed.batch_samples == pytest.approx(4.0)


def test_the_wait_that_a_loop_is_in_counts_while_it_lasts(clock: Clock) -> None:
    rate = begun(clock)
    assert rate.waited(0.4) == 0.0, "too short to say anything"
    assert rate.waited(3.0) > 0.9
    loop(rate, clock, 100, LoopTurn(waited_seconds=0.0, step_seconds=0.1))
    assert rate.waited(0.0) == rate.speed.waited == 0.0
    assert 0.1 < rate.waited(1.0) < 0.5
    assert rate.waited(1000.0) > 0.9
    assert rate.speed.waited == 0.0, "and what is known of the turns that ended stays as it is"


def test_what_makes_batches_more_slowly_than_the_loop_takes_them_is_the_limit(clock: Clock) -> None:
    rate = begun(clock)
    loop(rate, clock, 40, LoopTurn(waited_seconds=0.1, step_seconds=0.1, making_seconds=0.2))
    assert rate.value == pytest.approx(500.0)


def test_the_work_of_the_accelerator_counts_as_the_step_of_a_loop_that_asks_at_once(clock: Clock) -> None:
    rate = begun(clock)
    for _ in range(10):  # not every step is measured
        loop(rate, clock, 1, LoopTurn(waited_seconds=0.5, step_seconds=0.001, gpu_seconds=0.25))
        loop(rate, clock, 1, LoopTurn(waited_seconds=0.5, step_seconds=0.001))
    assert rate.value == pytest.approx(400.0)
    assert rate.speed.gpu_seconds == pytest.approx(0.25)


def test_a_loop_that_waits_for_its_accelerator_now_and_then_has_the_step_of_all_of_them_together(clock: Clock) -> None:
    rate = begun(clock)
    for _ in range(10):
        loop(rate, clock, 15, LoopTurn(0.0, 0.001))
        loop(rate, clock, 1, LoopTurn(0.0, 1.585))  # item(), every sixteenth step
    assert rate.value == pytest.approx(1000.0, rel=0.01)


def test_the_first_step_of_a_process_counts_only_until_another_one_ended(clock: Clock) -> None:
    rate = LoopRate(clock.monotonic)
    loop(rate, clock, 2, LoopTurn(0.0, 100.0))  # the first batch, and a step in which the model is compiled
    assert rate.value == pytest.approx(1.0)
    loop(rate, clock, 8, LoopTurn(0.0, 0.1))
    assert rate.value == pytest.approx(1000.0)


def test_a_very_slow_loop_is_known_after_its_second_step(clock: Clock) -> None:
    rate = LoopRate(clock.monotonic)
    loop(rate, clock, 3, LoopTurn(0.0, 60.0))
    assert rate.value == pytest.approx(100 / 60)


def test_a_pause_is_no_step(clock: Clock) -> None:
    rate = begun(clock)
    loop(rate, clock, 8, LoopTurn(0.0, 0.1))
    rate.pause()
    loop(rate, clock, 1, LoopTurn(0.0, 3600.0))
    loop(rate, clock, 8, LoopTurn(0.0, 0.1))
    assert rate.value == pytest.approx(1000.0)


def test_batches_without_the_samples_of_a_part_take_of_its_rate(clock: Clock) -> None:
    rate = begun(clock)
    for _ in range(20):
        loop(rate, clock, 1, LoopTurn(0.0, 0.1))
        loop(rate, clock, 3, LoopTurn(0.0, 0.1), size_bytes=0.0)
    assert rate.value == pytest.approx(250.0, rel=0.02)


def test_all_that_was_read_counts_as_attained_whatever_it_took(clock: Clock) -> None:
    rate = LoopRate(clock.monotonic)
    rate.attained(5000.0)
    loop(rate, clock, 3, LoopTurn(0.0, 0.1))
    assert rate.speed.attained_bytes == 5300.0


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.floats(1e-4, 10), st.floats(0, 10), st.none() | st.floats(0, 10)), min_size=3
    )
)
def test_no_loop_is_said_to_read_faster_than_it_could(turns: list[Any]) -> None:
    clock = Clock()
    rate = begun(clock)
    for waited, step, making, gpu in turns:
        loop(rate, clock, 1, LoopTurn(waited, step, making, gpu))
    speed = rate.speed
    assert speed.possible >= speed.throughput * (1 - 1e-9)
    assert 0 <= speed.waited <= 1


# -- the loop's own thread --------------------------------------------------------------------------------------------


class Cuda:
    """A device that works behind the loop: ``now`` is its time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done = 0.0
        self.is_on = True
        self.made = 0
        self.device = 0
        cuda = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing
                cuda.made += 1
                self.device = cuda.device

            def record(self) -> None:
                if self.device != cuda.device:
                    raise RuntimeError("Event device does not match recording stream's device")
                self.at = cuda.now

            def query(self) -> bool:
                return self.at <= cuda.done

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) * 1000

        self.Event = Event

    def is_initialized(self) -> bool:
        return self.is_on


def test_the_devices_own_time_of_a_step_is_measured_without_waiting_for_it() -> None:
    cuda = Cuda()
    steps = GpuSteps(cuda)
    for _ in range(3):
        steps.begin()
        cuda.now += 0.25  # what the loop has launched takes so long
        steps.end()
    assert steps.take() is None  # the device has not got there
    cuda.done = 0.5
    assert [steps.take(), steps.take(), steps.take()] == [pytest.approx(0.25), pytest.approx(0.25), None]


def test_a_device_that_is_far_behind_has_a_few_steps_measured_and_their_events_are_used_again() -> None:
    cuda = Cuda()
    steps = GpuSteps(cuda)
    for _ in range(100):
        steps.begin()
        steps.end()
        steps.take()
    assert cuda.made <= 2 * PENDING_MAX + 2
    cuda.done = cuda.now = 1.0
    for _ in range(100):
        steps.begin()
        steps.end()
        cuda.done = cuda.now
        assert steps.take() == 0.0
    assert cuda.made <= 2 * PENDING_MAX + 2


def test_a_process_without_a_device_records_nothing() -> None:
    cuda = Cuda()
    cuda.is_on = False
    steps = GpuSteps(cuda)
    steps.begin()
    steps.end()
    assert steps.take() is None
    assert cuda.made == 0


def test_a_loop_that_changes_devices_goes_on_and_is_measured_no_more() -> None:
    """As CUDA has it: an event that was recorded on one device cannot be on another."""
    cuda = Cuda()
    steps = GpuSteps(cuda)
    steps.begin()
    steps.end()
    assert steps.take() == 0.0
    cuda.device = 1
    for _ in range(3):
        steps.begin()
        steps.end()
        assert steps.take() is None


def test_what_the_loops_thread_makes_itself_is_of_its_step_and_not_of_its_wait(clock: Clock) -> None:
    making = Making(0, 4)
    turns = Turns(making, GpuSteps(SimpleNamespace(is_initialized=lambda: False)), clock.monotonic)
    turns.ask()
    clock.now += 5.0
    assert turns.receive().step_seconds is None  # nothing precedes the first batch
    clock.now += 1.0
    turns.ask()
    clock.now += 3.0
    making.here_seconds += 2.0
    turn = turns.receive()
    assert (turn.waited_seconds, turn.step_seconds) == (1.0, 3.0)


# -- what making costs ------------------------------------------------------------------------------------------------


def test_threads_make_as_many_at_once_as_there_are_and_compute_on_as_many_processors() -> None:
    sleepy, busy = Making(0, 4, processors=2), Making(0, 4, processors=2)
    for _ in range(3):
        sleepy.add(cost(making=0.4, cpu=0.0))
        busy.add(cost(making=0.4, cpu=0.4))
    assert sleepy.seconds == pytest.approx(0.1)
    assert busy.seconds == pytest.approx(0.2)


def test_the_first_batch_which_opens_connections_is_not_counted() -> None:
    making = Making(0, 1)
    making.add(cost(making=60.0))
    assert making.seconds == 0.0
    making.add(cost(making=0.5))
    assert making.seconds == pytest.approx(0.5)


def test_costs_are_averaged_over_the_last_batches() -> None:
    making = Making(0, 1)
    for seconds in [1.0] * 100 + [3.0] * 400:
        making.add(cost(making=seconds))
        making.seconds  # noqa: B018 - it learns
    assert making.seconds == pytest.approx(3.0, rel=0.01)


def _work(rows: WorkerRows) -> None:
    for _ in range(3):
        rows.add(cost(making=0.5, read=0.25))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_a_worker_measures_is_seen_in_the_process_that_started_it(method: Any) -> None:
    making = Making(2, 4)
    assert making.rows is not None
    worker = multiprocessing.get_context(method).Process(target=_work, args=(making.rows,))
    worker.start()
    worker.join(120)
    assert worker.exitcode == 0
    assert making.costs.batches == 2
    assert making.costs.tier_bytes[TIERS.index("rack")] == 3000
    assert making.costs.read_seconds == pytest.approx(0.75)
    assert making.seconds == pytest.approx(0.25)


def test_memory_that_cannot_be_mapped_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second time it may be the descriptor of another file."""
    made: list[int] = []

    def create(*of: Any) -> int:
        made.append(memfd_create(*of))
        return made[-1]

    def refuse(*_: Any) -> None:
        raise OSError(12, "cannot allocate memory")

    memfd_create, close, closed = os.memfd_create, os.close, []
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", create)
        patch.setattr("quiver_client.loader.making.mmap.mmap", refuse)
        patch.setattr(os, "close", lambda fd: (closed.append(fd), close(fd)))
        assert Making(2, 4).rows is None
        gc.collect()
    assert [fd for fd in closed if fd in made] == made


def test_a_loader_whose_system_has_no_memory_to_share_measures_nothing_in_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    making = Making(2, 4)
    assert making.rows is None
    assert making.seconds == 0.0
    assert making.costs == Costs()


def test_a_read_in_the_middle_of_making_is_told_from_it_and_one_within_another_counts_once() -> None:
    begun = time.perf_counter()
    watch = Stopwatch()
    with read_clock.reading(), read_clock.reading():
        threading.Event().wait(0.05)
        read_clock.count(1, 0.04, 500)
    found = watch.stop()
    taken = time.perf_counter() - begun
    assert 0.045 <= found.read_seconds <= taken
    assert found.making_seconds <= taken - found.read_seconds
    assert found.tier_bytes == (0, 500, 0, 0)
    assert found.tier_seconds == pytest.approx((0, 0.04, 0, 0))
    assert Stopwatch().stop().read_seconds == 0.0


def test_reads_of_other_threads_are_theirs() -> None:
    watch = Stopwatch()

    def read() -> None:
        with read_clock.reading():
            read_clock.count(0, 1.0, 10)

    other = threading.Thread(target=read)
    other.start()
    other.join()
    assert watch.stop().tier_bytes == NOTHING


# -- probing ----------------------------------------------------------------------------------------------------------


class Probes:
    """A prober among a loop that reads a batch every ``step`` seconds, and whose probes take ``seconds``."""

    def __init__(self, seconds: float = 0.05, step: float = 0.1, *, ok: Callable[[int], bool] = lambda _: True) -> None:
        self.clock = Clock()
        self.row = np.zeros(COLUMNS)
        self._costs, self._seconds, self._step, self._ok = Row(self.row), seconds, step, ok
        self.taken = 0
        self.wanted = False
        self.prober = Prober(lambda: Costs.of(self.row), lambda: self.wanted, self.clock.monotonic)

    def read(self, batches: int) -> None:
        for _ in range(batches):
            is_probe = self.prober.take()
            self.taken += is_probe
            self._costs.add(
                cost(0.01, read=self._seconds if is_probe else 0.002, probe=is_probe, ok=self._ok(self.taken))
            )
            self.clock.now += self._step


@pytest.mark.parametrize("seconds", [0.001, 0.05, 2.0])
def test_probes_take_a_hundredth_of_the_time_and_are_twenty(seconds: float) -> None:
    it = Probes(seconds)
    it.prober.begin()
    while it.prober.is_on:
        it.read(1)
        longest = max(seconds, SHARE * it.clock.now)  # what the first one takes nobody knows before
        assert it.row[6] <= longest + 1e-9
    assert it.taken == BATCHES + 1  # the first one connects, and does not count
    assert Costs.of(it.row).probes == BATCHES
    assert it.prober.series == 1


def test_nothing_is_probed_unless_somebody_asks() -> None:
    it = Probes()
    it.read(1000)
    assert it.taken == 0


def test_nothing_is_probed_before_the_loop_runs() -> None:
    it = Probes(step=0.001)
    it.prober.begin()
    it.read(int(FIRST_SECONDS / 0.001) - 1)
    assert it.taken == 0


def test_a_process_that_cannot_read_past_the_cache_gives_up() -> None:
    it = Probes(ok=lambda _: False)
    it.prober.begin()
    it.read(10_000)
    assert it.taken == FAILURES_MAX
    assert it.prober.has_failed
    assert Probed.of(Costs.of(it.row), batch_bytes=1.0, step_seconds=1.0, makers=1) is None


def test_a_single_failure_does_not_end_the_series() -> None:
    it = Probes(ok=lambda taken: taken != 4)
    it.prober.begin()
    it.read(20_000)
    assert Costs.of(it.row).probes == BATCHES
    assert not it.prober.has_failed


def test_a_probe_whose_batch_was_dropped_is_given_up() -> None:
    it = Probes()
    it.prober.begin()
    it.clock.now += 10 * FIRST_SECONDS
    assert not it.prober.take()  # the time counts from the first batch on
    it.clock.now += 10 * FIRST_SECONDS
    assert it.prober.take()
    it.read(int(LOST_SECONDS / 0.1) - 1)
    assert it.taken == 0
    it.read(10_000)
    assert it.taken == BATCHES + 1


def test_an_operator_gets_a_series_for_each_request() -> None:
    it = Probes(0.001)
    it.wanted = True
    it.read(5000)
    assert (it.prober.series, it.taken) == (1, BATCHES + 1)  # while the answers still ask for it, too
    it.wanted = False
    it.read(1)
    it.wanted = True
    it.read(5000)
    assert (it.prober.series, it.taken) == (2, 2 * BATCHES + 1)


def test_a_probe_says_what_hits_are_worth() -> None:
    costs = Costs(batches=10, making_seconds=1.0, probes=5, probe_seconds=2.5, fast_seconds=0.02)
    alone = Probed.of(costs, batch_bytes=1000.0, step_seconds=0.05, makers=2)
    assert alone == Probed(5, pytest.approx(1000 / 0.06), pytest.approx(1000 / 0.3), 0.02, 0.5)
    slow = Probed.of(costs, batch_bytes=1000.0, step_seconds=1.0, makers=2)
    assert slow is not None
    assert slow.hits == slow.misses == pytest.approx(1000.0)  # a compute-bound job gains nothing


# -- the profile ------------------------------------------------------------------------------------------------------

SPEED = LoopSpeed(2e6, 1e6, 0.5, 0.05, 0.01, 0.04, 1e5, 100.0, 7e9)
COSTS = Costs(40, 0.8, 0.9, 3.0, tier_seconds=(0, 2.0, 1.0, 0), tier_bytes=(0, 4e6, 1e6, 0))


def test_a_profile_says_where_the_time_goes() -> None:
    profile = Profile.of([SPEED], COSTS, rank=(3, 8), makers=2)
    assert (profile.rank, profile.world_size) == (3, 8)
    assert profile.samples_per_second == pytest.approx(1000.0)
    assert profile.making_seconds == pytest.approx(0.02)
    assert profile.making_rate == pytest.approx(10_000)
    assert profile.tiers["rack"].bytes == 4_000_000
    assert json.loads(json.dumps(profile.as_dict()))["tiers"]["origin"] == {"bytes": 1_000_000, "seconds": 1.0}
    text = str(profile)
    assert "rank 3 of 8" in text
    assert "waits        50.0% of the time" in text
    assert "probed" not in text
    assert "embedded" not in text  # nothing came from there


def test_the_profile_of_a_mixture_adds_up_its_parts() -> None:
    profile = Profile.of([SPEED, SPEED], COSTS, rank=(0, 1), makers=2)
    assert profile.possible_rate == 4e6
    assert profile.wait_share == 0.5
    assert profile.samples_per_second == pytest.approx(2000.0)


def test_a_profile_before_the_first_batch_says_so() -> None:
    assert "nothing is known yet" in str(Profile.of([LoopSpeed()], Costs(), rank=(0, 1), makers=4))
