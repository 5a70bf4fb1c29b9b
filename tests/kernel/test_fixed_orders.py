"""What is fetched and evicted for consumers whose uses to come are known, beside what any policy would need."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.belady import Uses, needed
from bench.fixed_simulation import simulate
from quiver.digest import Digest
from quiver.lookup import as_rows
from quiver.residency import ConsumerReport, Decision, Measured, Needs, OriginEstimate, Situation, decide
from quiver.residency.future import FutureCache, Shards
from quiver.residency.orders import FixedOrder, Orders
from quiver.residency.report import FULL

A, B = (Digest(bytes([letter]) * 32) for letter in b"AB")
PROMPT = OriginEstimate(rate=100.0, fill_seconds=0.0, report_seconds=0.1)
SAMPLES = 4


def shard(number: int) -> Digest:
    return Digest(number.to_bytes(32, "big"))


def board(count: int, held: Sequence[int] = (), samples: int = SAMPLES) -> Needs:
    """A daemon that fetches all shards of a dataset, of so many samples of one byte each."""
    needs, here = Needs(), np.zeros(count, bool)
    here[list(held)] = True
    sizes, mine = np.full(count, float(samples)), np.ones(count, bool)
    needs.add_dataset(
        A, as_rows(map(shard, range(count))), sizes, here, mine, samples=np.full(count, samples, np.int64)
    )
    return needs


def reads(needs: Needs, uses: Sequence[int], consumer: int = 1, at: int = 0, now: float = 0.0, **more: Any) -> None:
    """A consumer reports these uses to come, one byte and second each."""
    list_of_uses = np.asarray(uses, np.int32)
    left = np.zeros(len(needs.sizes), np.uint8)
    left[list_of_uses[at:]] = FULL
    more = {"rate": 1.0, "ahead_bytes": 0.0, "lease_seconds": 60.0, "ordered": True} | more
    report = ConsumerReport(
        consumer.to_bytes(16, "big"),
        left,
        order=bytes([consumer]) * 16,
        order_at=at,
        uses=list_of_uses,
        **more,
    )
    assert needs.report(A, report, now)


def fetched(needs: Needs, free: float = 0.0, at_most: int = 1, **more: Any) -> list[Decision]:
    more = {"now": 0.0, "origin": PROMPT} | more
    return decide(needs, Situation(free_bytes=free, fetches_max=at_most, **more))


def numbers(digests: Sequence[Digest]) -> list[int]:
    return [int.from_bytes(digest, "big") for digest in digests]


def whole(*shards: int) -> list[int]:
    """Uses of whole shards, one after another."""
    return np.repeat(np.asarray(shards), SAMPLES).tolist()


# -- one decision -----------------------------------------------------------------------------------------------------


def test_idle_room_is_filled_in_the_order_of_first_use() -> None:
    needs = board(5)
    reads(needs, whole(3, 1, 4))
    decisions = fetched(needs, free=100.0, at_most=9)
    assert numbers([it.shard for it in decisions]) == [3, 1, 4], "and nothing that is not used"
    assert not any(it.evict for it in decisions)


@given(st.permutations(range(8)), st.integers(1, 5))
def test_of_whole_uses_what_is_used_last_is_evicted_and_never_for_what_is_used_later(
    order: list[int], room: int
) -> None:
    held, absent = order[:room], order[room:]
    uses = sorted(range(8), key=order[::-1].index)  # each shard once per epoch, in some order
    needs = board(8, held=held)
    reads(needs, whole(*uses, *uses))
    for decision in fetched(needs, at_most=8):
        (fetch,) = numbers([decision.shard])
        assert fetch in absent
        for victim in numbers(decision.evict):
            assert uses.index(victim) > uses.index(fetch), "what is read before it would be missed first"


def test_a_slow_consumer_does_not_blur_the_uses_of_a_fast_one() -> None:
    needs = board(4000, held=[1, 2])
    reads(needs, whole(0, 2, *range(3, 40), 1), rate=100.0)
    assert [numbers(it.evict) for it in fetched(needs)] == [[1]]
    reads(needs, list(range(40, 4000)), 2, rate=1.0)
    assert [numbers(it.evict) for it in fetched(needs)] == [[1]]


def test_a_shard_of_which_too_little_will_be_read_is_not_fetched() -> None:
    """Its samples are read by themselves: fetching it would cost more than it saves."""
    needs = board(4, held=[0])
    reads(needs, [1, 2, 3])
    assert fetched(needs) == fetched(needs, free=100.0) == []


def test_in_a_full_shuffle_the_shards_that_are_held_stay() -> None:
    """Each shard is worth the same in the long run, and fetching one costs an epoch's worth of it."""
    order = [np.random.default_rng(epoch).permutation(np.repeat(np.arange(16), 16)) for epoch in range(3)]
    needs = board(16, held=[2, 7, 11], samples=16)
    uses = np.concatenate(order)
    for at in range(0, 256, 16):
        reads(needs, uses[: 512 if at < 256 else 768].tolist(), at=at, now=float(at))
        assert fetched(needs, now=float(at)) == []


def test_what_a_consumer_with_other_needs_has_left_is_not_evicted() -> None:
    needs = board(3, held=[0, 1])
    reads(needs, whole(2, 2, 1))
    [decision] = fetched(needs)
    assert numbers(decision.evict) == [0], "nobody needs it"
    other = np.array([FULL, 0, 0], np.uint8)
    needs.report(A, ConsumerReport((9).to_bytes(16, "big"), other, 1.0, 4.0, 60.0), 0.0)
    assert [numbers(it.evict) for it in fetched(needs)] in ([], [[1]])


def test_needed_shards_are_evicted_on_behalf_of_the_consumer_and_only_so_often() -> None:
    needs = board(12, held=range(6))
    soon = [shard for shard in range(6, 12) for _ in range(3)]
    uses = whole(*soon, *range(6))
    reads(needs, uses)
    decisions = fetched(needs, at_most=9)
    assert 0 < len(decisions) <= 4
    assert all(it.forced == it.evict and it.starving == ((1).to_bytes(16, "big"),) for it in decisions)
    spent = frozenset({(1).to_bytes(16, "big")})
    assert fetched(needs, at_most=9, may_not_force=spent) == []


def test_nothing_is_fetched_for_one_that_is_silent_or_for_another_process() -> None:
    needs = board(3)
    reads(needs, whole(0, 1, 2))
    assert len(fetched(needs, free=100.0, only=(1).to_bytes(16, "big"))) == 1
    assert fetched(needs, free=100.0, only=(2).to_bytes(16, "big")) == []
    assert fetched(needs, free=100.0, now=30.0) == []
    assert fetched(needs, free=100.0, left_out={A}) == []


def test_fetches_begin_when_the_origin_needs_that_and_not_before() -> None:
    needs = board(40, held=range(10))
    uses = whole(*range(10), *range(20, 30), *range(10))
    for consumer in (1, 2, 3):  # the shards 0 to 5 are read, and absent ones are used from 16 s on
        reads(needs, uses, consumer, at=24)
    assert fetched(needs) == []
    slow = OriginEstimate(rate=0.5, fill_seconds=0.0, report_seconds=0.1)
    [decision] = fetched(needs, origin=slow)
    assert numbers([decision.shard]) == [20]
    assert set(numbers(decision.evict)) <= set(range(6))


def test_who_sends_no_list_is_fetched_for_as_before() -> None:
    needs = board(4)
    left = np.full(4, FULL, np.uint8)
    report = ConsumerReport(bytes(16), left, 1.0, 0.0, 60.0, soon=(2, 0), ordered=True, order=bytes(16))
    needs.report(A, report, 0.0)
    assert needs.wants_order(bytes(16))
    assert not needs.is_planned(A)
    assert numbers([it.shard for it in fetched(needs, free=100.0, at_most=9)]) == [2, 0]


def test_a_list_is_known_until_its_consumer_leaves_or_names_another() -> None:
    needs = board(4)
    reads(needs, whole(0, 1))
    assert needs.is_planned(A)
    assert not needs.wants_order((1).to_bytes(16, "big"))
    reads(needs, whole(0, 1), at=3)
    assert needs.is_planned(A)
    left = np.full(4, FULL, np.uint8)
    needs.report(A, ConsumerReport((1).to_bytes(16, "big"), left, 1.0, 0.0, 60.0, order=bytes(16)), 0.0)
    assert needs.wants_order((1).to_bytes(16, "big"))
    assert not needs.is_planned(A)
    reads(needs, whole(0, 1))
    needs.expire(61.0)
    assert not len(needs.orders)
    assert not needs.is_planned(A)


# -- the table --------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=30), min_size=1, max_size=3), st.data())
def test_first_uses_and_their_bytes_are_those_of_the_lists(lists: list[list[int]], data: st.DataObject) -> None:
    needs, firsts, counts = board(6), np.full(6, np.inf), np.zeros(6)
    for number, uses in enumerate(lists, 1):
        at = data.draw(st.integers(0, len(uses)))
        reads(needs, uses, number, at=at)
        for seconds, used in enumerate(uses[at:]):
            firsts[used] = min(firsts[used], seconds)
            counts[used] += 1
    consumers = list(needs.consumers.values())
    shards = Shards(needs.shards, needs.sizes, needs.held, np.ones(6, bool), 8.0)
    future = FutureCache().of(shards, needs.datasets, consumers, 0.0, 0.0)
    assert future is not None
    assert future.first.tolist() == firsts.tolist()
    assert future.total.tolist() == counts.tolist()
    assert (future.profit >= 0).all()
    assert (future.profit <= future.total + 1e-9).all()


def test_the_uses_of_a_consumer_that_is_held_back_come_when_it_reads_them() -> None:
    """It could read ten bytes a second, and reads one."""
    needs = board(4, [0])
    reads(needs, whole(0, 1, 2, 3), rate=10.0, measured=Measured(throughput=1.0, waited=0.9))
    shards = Shards(needs.shards, needs.sizes, needs.held, np.ones(4, bool), 8.0)
    future = FutureCache().of(shards, needs.datasets, list(needs.consumers.values()), 0.0, 0.0)
    assert future is not None
    assert future.first.tolist() == [0.0, SAMPLES, 2 * SAMPLES, 3 * SAMPLES]


# -- lists of many clients --------------------------------------------------------------------------------------------


@pytest.mark.fault("S12")
def test_lists_that_one_address_sends_crowd_out_no_other_address() -> None:
    orders = Orders(entries_max=100)

    def put(name: str, entries: int, client: str) -> list[bytes] | None:
        return orders.put(name.encode(), FixedOrder(A, name.encode(), np.zeros(entries, np.int32), client))

    assert put("a", 60, "hostile") == []
    assert put("b", 40, "hostile") == []
    assert put("c", 1, "hostile") is None
    assert put("d", 30, "honest") == [b"a"], "the longest of who has most"
    assert put("e", 100, "honest") is None
    assert orders.get(b"d", A, b"d") is not None
    assert orders.get(b"d", A, b"another") is None
    assert orders.get(b"d", B, b"d") is None
    assert orders.entries <= 100


def test_a_list_that_is_refused_costs_nobody_theirs() -> None:
    orders = Orders(entries_max=100)
    assert orders.put(b"a", FixedOrder(A, b"a", np.zeros(60, np.int32), "one")) == []
    assert orders.put(b"b", FixedOrder(A, b"b", np.zeros(30, np.int32), "two")) == []
    assert orders.put(b"c", FixedOrder(A, b"c", np.zeros(55, np.int32), "two")) is None
    assert orders.get(b"a", A, b"a") is not None
    assert orders.entries == 90


def test_nobody_is_asked_for_a_list_again_before_there_is_room_for_it() -> None:
    needs = board(4)
    needs.orders = Orders(entries_max=12)
    first, second = (number.to_bytes(16, "big") for number in (1, 2))
    reads(needs, whole(0, 1), 1)
    reads(needs, whole(2, 3), 2)
    assert not needs.wants_order(second), "the list was refused"
    left = np.full(4, FULL, np.uint8)
    needs.report(A, ConsumerReport(second, left, 1.0, 0.0, 60.0, order=bytes([3]) * 16), 0.0)
    assert needs.wants_order(second), "another list"
    reads(needs, whole(2, 3), 2)
    needs.leave(first)
    assert needs.wants_order(second)
    reads(needs, whole(2, 3), 2)
    assert needs.is_planned(A)


@pytest.mark.fault("S12")
def test_a_list_of_one_dataset_is_not_taken_for_a_list_of_another_one() -> None:
    needs, consumer = board(8), (1).to_bytes(16, "big")
    reads(needs, whole(6, 7))
    small = np.ones(2, bool)
    needs.add_dataset(B, as_rows(map(shard, (100, 101))), np.full(2, 4.0), ~small, small)
    left = np.full(2, FULL, np.uint8)
    needs.report(B, ConsumerReport(consumer, left, 1.0, 0.0, 60.0, ordered=True, order=bytes([1]) * 16), 0.0)
    assert needs.wants_order(consumer)
    assert not needs.is_planned(B)
    assert fetched(needs, free=100.0) == []


def test_a_dataset_is_planned_while_the_uses_of_all_its_consumers_are_known() -> None:
    needs = board(4)
    needs.orders = Orders(entries_max=12)
    reads(needs, whole(0, 1), 1)
    reads(needs, [2], 2)
    assert needs.is_planned(A)
    needs.leave((2).to_bytes(16, "big"))
    assert needs.is_planned(A)
    left = np.full(4, FULL, np.uint8)
    needs.report(A, ConsumerReport(bytes(16), left, 1.0, 0.0, 60.0), 0.0)
    assert not needs.is_planned(A)
    needs.leave(bytes(16))
    assert needs.is_planned(A)
    needs.report(
        A,
        ConsumerReport(bytes(16), left, 1.0, 0.0, 60.0, order=b"z" * 16, uses=np.zeros(6, np.int32)),
        0.0,
        client="two",
    )
    assert not needs.is_planned(A), "the list of whoever has most was dropped"
    reads(needs, [3], 1)
    assert needs.is_planned(A)


# -- beside what any policy would need --------------------------------------------------------------------------------


def exactly_needed(uses: list[int], counts: list[int], room: int) -> int:
    """Return the least that any policy reads, by trying all sets of held shards, one use after another."""
    every = [
        frozenset(some)
        for size in range(len(counts) + 1)
        for some in itertools.combinations(range(len(counts)), size)
        if sum(counts[it] for it in some) <= room
    ]
    cost = {frozenset[int](): 0}
    for used in uses:
        after: dict[frozenset[int], int] = {}
        for held in every:
            before = min(value + sum(counts[it] for it in held - old) for old, value in cost.items())
            after[held] = before + (used not in held)
        cost = after
    return min(cost.values())


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=16), st.integers(0, 6))
@example([0] * 4 + [1] * 5 + [0] * 3, 2)  # with slices of several uses each it is 6.99 of 6
def test_the_bound_is_never_above_the_least_that_any_policy_reads(uses: list[int], room: int) -> None:
    counts, slices = [2, 2, 3, 1], len(uses)
    times = Uses(np.arange(float(len(uses))), np.asarray(uses))
    found = needed(times, np.asarray(counts), room, slices=slices, steps=40)
    assert found <= exactly_needed(uses, counts, room) + 1e-6


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=4, max_size=14))
def test_the_bound_of_fine_slices_is_near_the_least(uses: list[int]) -> None:
    counts = [2, 2, 2, 2]
    times = Uses(np.arange(float(len(uses))), np.asarray(uses))
    least = exactly_needed(uses, counts, 8)
    assert needed(times, np.asarray(counts), 8, slices=len(uses), steps=200) >= 0.9 * least - 1e-6


def test_one_job_in_a_full_shuffle_reads_what_the_cache_cannot_hold_and_no_more() -> None:
    result = simulate("full", 0.2, [1.0], [0.0], 2.0, shards=64, epochs=3)
    assert result.origin <= 1.1 * result.least
    assert max(result.origin_per_epoch[1:]) <= 0.84
    assert max(result.waiting_warm) <= 0.02
    assert result.peak <= 1.0


def test_before_the_uses_to_come_were_reported_it_read_a_quarter_more() -> None:
    before = simulate("full", 0.2, [1.0], [0.0], 2.0, shards=64, epochs=3, knows=False, bound=False)
    assert min(before.origin_per_epoch[1:]) > 1.0


@pytest.mark.parametrize("shuffle", ["block", "none"])
def test_one_job_in_blocks_or_in_order_reads_four_fifths_of_each_epoch(shuffle: str) -> None:
    result = simulate(shuffle, 0.2, [1.0], [0.0], 2.0, shards=96, epochs=2, bound=False)
    assert max(result.origin_per_epoch[1:]) <= 0.84


def test_three_jobs_of_one_order_share_its_blocks() -> None:
    result = simulate("block", 0.2, [1.0] * 3, [0.0, 8.0, 16.0], 2.0, shards=96, epochs=2)
    assert result.hit >= 0.9 * result.hit_most
    assert max(result.waiting) <= 0.05


def test_three_jobs_in_a_full_shuffle_come_near_the_optimum() -> None:
    result = simulate("full", 0.2, [1.0] * 3, [0.0, 5.0, 10.0], 3.0, shards=64, epochs=2)
    assert result.origin <= 1.05 * result.least
