"""What is needed, what is fetched for it, and what makes way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quiver.digest import Digest
from quiver.lookup import as_rows
from quiver.need import CONSUMERS_MAX, DROPS_A_REPORT, FULL, GIVEN_UP_SECONDS, Fetch, Needs, Origin, Report, rounded_up

A, B = (Digest(bytes([letter]) * 32) for letter in b"AB")
FAST = Origin(rate=100.0, fill_seconds=0.1, report_seconds=0.5)


def shard(number: int) -> Digest:
    return Digest(number.to_bytes(32, "big"))


def shards(several: Iterable[int]) -> Any:
    return as_rows(map(shard, several))


def report(consumer: int, left: Sequence[int], **more: Any) -> Report:
    """A consumer's word: ``left`` in 255ths; by default it has nothing ahead of it and reads a shard a second."""
    more = {"rate": 1.0, "ahead_bytes": 0.0, "lease_seconds": 10.0} | more
    return Report(consumer.to_bytes(16, "big"), np.array(left, np.uint8), **more)


def board(count: int, held: Iterable[int] = (), mine: Iterable[int] | None = None, size: float = 1.0) -> Needs:
    """A daemon's board of one dataset of ``count`` shards of ``size`` bytes."""
    needs = Needs()
    here, owned = np.zeros(count, bool), np.zeros(count, bool)
    here[list(held)] = True
    owned[list(range(count) if mine is None else mine)] = True
    needs.add_dataset(A, shards(range(count)), np.full(count, size), here, owned)
    return needs


def numbers(fetches: list[Fetch]) -> list[int]:
    return [int.from_bytes(fetch.digest, "big") for fetch in fetches]


def wanted(
    needs: Needs, *, now: float = 0.0, coming: Iterable[int] = (), free: float = 9.0, at_most: int = 9
) -> list[Fetch]:
    fetches = needs.fetches(now, map(shard, coming), free, FAST, at_most)
    return [fetch._replace(starving=()) for fetch in fetches]


def test_what_somebody_has_left_is_needed_and_of_an_unknown_dataset_nothing_is_known() -> None:
    needs = board(3)
    assert needs.needed(shard(0)) is False
    assert needs.needed(shard(9)) is None
    needs.report(A, report(1, [1, 0, FULL]), 0.0)
    assert [needs.needed(shard(at)) for at in range(3)] == [True, False, True]
    needs.report(A, report(1, [0, 1, 0]), 0.0)
    assert [needs.needed(shard(at)) for at in range(3)] == [False, True, False]
    needs.leave((1).to_bytes(16, "big"))
    needs.leave((1).to_bytes(16, "big"))
    assert needs.needed(shard(1)) is False
    assert len(needs) == 0


def test_who_reports_anew_needs_its_shards_all_the_while() -> None:
    """``needed`` is asked from other threads; a shard that nobody needs for an instant would be dropped."""
    needs = board(1)
    needs.report(A, report(1, [9]), 0.0)
    counts: list[int] = []

    class Watched(np.ndarray[tuple[int], np.dtype[np.int32]]):
        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)
            counts.append(int(np.asarray(self)[0]))

    needs._need = needs._need.view(Watched)
    needs.report(A, report(1, [5]), 0.0)
    assert counts
    assert min(counts) >= 1


def test_a_lease_that_ran_out_pins_nothing() -> None:
    needs = board(2)
    needs.report(A, report(1, [FULL, FULL], lease_seconds=10.0), 0.0)
    needs.report(A, report(2, [FULL, 0], lease_seconds=30.0), 0.0)
    needs.expire(10.0)
    assert needs.needed(shard(1)) is True
    assert len(needs) == 2
    needs.expire(10.1)
    assert [needs.needed(shard(at)) for at in range(2)] == [True, False]
    assert numbers(wanted(needs, now=30.1)) == [], "deciding forgets them too"
    assert len(needs) == 0


def test_there_is_room_for_so_many_consumers_and_for_each_to_report_again() -> None:
    needs = board(1)
    for consumer in range(CONSUMERS_MAX):
        assert needs.report(A, report(consumer, [1]), 0.0)
    assert not needs.report(A, report(CONSUMERS_MAX, [1]), 0.0)
    assert needs.report(A, report(5, [1]), 0.0)
    assert len(needs) == CONSUMERS_MAX


def test_the_shard_that_most_need_comes_first() -> None:
    needs = board(3)
    needs.report(A, report(1, [9, 9, 9]), 0.0)
    needs.report(A, report(2, [0, 9, 9]), 0.0)
    needs.report(A, report(3, [0, 0, 9]), 0.0)
    assert numbers(wanted(needs)) == [2, 1, 0]


def test_nothing_is_fetched_but_what_is_needed_mine_and_neither_held_nor_coming() -> None:
    needs = board(8, held=[0, 1], mine=[0, 2, 3, 4, 5])
    needs.report(A, report(1, [FULL] * 5 + [0, FULL, FULL]), 0.0)
    assert sorted(numbers(wanted(needs, coming=[2, 99]))) == [3, 4]


def test_a_consumer_with_enough_ahead_waits_so_that_others_can_share() -> None:
    needs = board(40, held=range(30))
    needs.report(A, report(1, [FULL] * 40, ahead_bytes=30.0), 0.0)
    needs.report(A, report(2, [FULL] * 40, ahead_bytes=30.0), 0.0)
    assert wanted(needs) == []
    needs.report(A, report(2, [0] * 29 + [FULL] * 11, ahead_bytes=1.0), 0.0)
    assert len(wanted(needs)) in (1, 2), "as much as keeps it going, no more"


def test_time_that_passes_shortens_what_is_ahead() -> None:
    needs = board(10, held=range(4))
    for consumer in (1, 2):
        needs.report(A, report(consumer, [FULL] * 10, ahead_bytes=4.0), 0.0)
    assert wanted(needs) == []
    assert wanted(needs, now=2.5) != []


def test_one_that_is_silent_wants_nothing_and_needs_what_it_needed() -> None:
    needs = board(4, held=[0])
    needs.report(A, report(1, [0, FULL, FULL, 0]), 0.0)
    needs.report(A, report(2, [FULL, 0, 0, FULL], soon=(3,), ordered=True), 0.0)
    assert sorted(numbers(wanted(needs, now=2.9))) == [1, 2, 3]
    assert wanted(needs, now=3.1) == []
    assert [needs.needed(shard(at)) for at in range(4)] == [True] * 4
    assert numbers(needs.fetches(9.9, [], 9.0, FAST._replace(report_seconds=4.0), 9)) != [], "nobody reports oftener"
    needs.report(A, report(1, [0, FULL, FULL, 0]), 4.0)
    assert sorted(numbers(wanted(needs, now=4.0))) == [1, 2]


def test_one_who_starves_forces_out_so_much_until_it_reports_again_whoever_else_does() -> None:
    needs = board(20, held=range(10))

    def forced(now: float) -> int:
        fetches = wanted(needs, now=now, free=0.0)
        for fetch in fetches:
            assert fetch.victim is not None
            needs.gone(fetch.victim)
            needs.arrived(fetch.digest)
        return len(fetches)

    starving = report(1, [0] * 10 + [FULL] * 10, rate=1e9)
    needs.report(A, report(2, [FULL] * 10 + [0] * 10, ahead_bytes=10.0), 0.0)
    needs.report(A, starving, 0.0)
    assert forced(0.0) == DROPS_A_REPORT
    needs.report(A, report(2, [FULL] * 10 + [0] * 10, ahead_bytes=10.0), 0.5)
    assert forced(0.5) == 0
    needs.report(A, starving, 1.0)
    assert forced(1.0) == DROPS_A_REPORT


def test_who_has_forced_out_enough_keeps_nobody_else_from_it() -> None:
    needs = board(12, held=[0, 1])
    needs.report(A, report(3, [FULL] * 2 + [0] * 10, ahead_bytes=2.0), 0.0)
    needs.report(A, report(1, [0] * 2 + [FULL] * 9 + [0], rate=1e9), 0.0)
    needs.report(A, report(4, [0] * 2 + [FULL] * 9 + [0], ahead_bytes=99.0), 0.0)
    for number in range(12, 12 + DROPS_A_REPORT):
        (fetch,) = wanted(needs, free=0.0, at_most=1)
        assert fetch.victim is not None
        needs.gone(fetch.victim)
        needs.arrived(fetch.victim)
        needs.gone(shard(number))
    assert wanted(needs, free=0.0) == []
    needs.report(A, report(2, [0] * 11 + [FULL]), 0.0)
    (fetch,) = wanted(needs, free=0.0)
    assert (numbers([fetch]), fetch.victim in {shard(0), shard(1)}) == ([11], True)


def test_a_consumer_alone_is_fetched_for_as_early_as_there_is_room() -> None:
    needs = board(40, held=range(30))
    needs.report(A, report(1, [FULL] * 40, ahead_bytes=30.0), 0.0)
    assert len(wanted(needs, free=4.0)) == 4


def test_a_slow_origin_is_asked_before_the_end_of_the_epoch_needs_it() -> None:
    needs = board(100, held=range(50))
    for consumer in (1, 2):
        needs.report(A, report(consumer, [FULL] * 100, ahead_bytes=50.0), 0.0)
    assert needs.fetches(0.0, [], 50.0, Origin(rate=2.0), 1) == []
    assert needs.fetches(0.0, [], 50.0, Origin(rate=0.6), 1) != []


@pytest.mark.parametrize("rate", [5e-324, 1e-300, 1e-9])
def test_who_reads_next_to_nothing_has_time(rate: float) -> None:
    needs = board(10, held=[0], mine=range(5))
    needs.report(A, report(1, [FULL] * 10, ahead_bytes=9.0, rate=1.0), 0.0)
    needs.report(A, report(2, [FULL] * 10, ahead_bytes=9.0, rate=rate), 0.0)
    assert needs.fetches(0.0, [], 9.0, Origin(rate=100.0), 1, only=(2).to_bytes(16, "big")) == []


def test_only_the_hunger_of_one_counts_where_everyone_fetches_for_itself() -> None:
    needs = board(4)
    needs.report(A, report(1, [FULL, FULL, 0, 0]), 0.0)
    needs.report(A, report(2, [0, 0, FULL, FULL]), 0.0)
    assert sorted(numbers(needs.fetches(0.0, [], 9.0, FAST, 9, only=(2).to_bytes(16, "big")))) == [2, 3]


def test_what_is_needed_makes_way_for_who_starves_alone_and_then_what_has_most_left() -> None:
    needs = board(4, held=[0, 1, 2])
    needs.report(A, report(1, [0, 0, 0, FULL], ahead_bytes=1.5), 0.0)
    needs.report(A, report(2, [9, 200, 0, 0], ahead_bytes=1.0), 0.0)
    needs.report(A, report(3, [9, 0, 0, 0], ahead_bytes=1.0), 0.0)
    assert wanted(needs, free=0.0) == [], "hungry, and not starving"
    needs.report(A, report(1, [0, 0, 0, FULL]), 0.0)
    assert wanted(needs, free=1.0) == [Fetch(shard(3), A, None)], "there is room"
    assert wanted(needs, free=0.0) == [Fetch(shard(3), A, shard(1))], "which one needs, where another two need"
    assert needs.needed(shard(1)) is False
    assert needs.held_bytes() == (3.0, 2.0), "what is needed by nobody, and the victim"
    assert needs.seen_by((2).to_bytes(16, "big")).tolist() == [2, 0, 1, 0]
    assert wanted(needs, free=0.0, coming=[3]) == []
    needs.gone(shard(1))
    assert needs.needed(shard(1)) is True
    needs.arrived(shard(1))
    assert needs.seen_by((2).to_bytes(16, "big")).tolist() == [2, 1, 1, 0]


def test_a_victim_is_not_fetched_again_at_once_nor_chosen_twice() -> None:
    needs = board(6, held=[0, 1])
    needs.report(A, report(1, [FULL] * 2 + [0] * 4), 0.0)
    needs.report(A, report(2, [0] * 2 + [FULL] * 4), 0.0)
    needs.report(A, report(3, [FULL] * 2 + [0] * 4), 0.0)
    fetches = needs.fetches(0.0, [], 0.0, FAST, 9)
    more = needs.fetches(0.0, [fetch.digest for fetch in fetches], 0.0, FAST, 9)
    victims = [fetch.victim for fetch in fetches + more]
    assert len(set(victims)) == len(victims)
    assert not set(victims) & {fetch.digest for fetch in fetches + more}


def test_a_victim_that_was_not_dropped_is_needed_again() -> None:
    needs = board(2, held=[0])
    needs.report(A, report(1, [FULL, 0], lease_seconds=60.0), 0.0)
    needs.report(A, report(2, [0, FULL], lease_seconds=60.0), 0.0)
    assert wanted(needs, free=0.0) == [Fetch(shard(1), A, shard(0))]
    assert needs.needed(shard(0)) is False
    needs.fetches(GIVEN_UP_SECONDS + 1, [shard(1)], 0.0, FAST, 9)
    assert needs.needed(shard(0)) is True


def test_who_starves_is_given_what_it_needs_and_not_what_others_need() -> None:
    needs = board(3, held=[0])
    for consumer in (2, 3, 4):
        needs.report(A, report(consumer, [FULL, FULL, 0], ahead_bytes=1.0), 0.0)
    needs.report(A, report(1, [0, 0, FULL]), 0.0)
    assert wanted(needs, free=0.0, at_most=1) == [Fetch(shard(2), A, shard(0))]


def test_nothing_is_evicted_that_a_starving_consumer_needs() -> None:
    """It was fetched a moment ago, and evicting it would have the two replace each other's shards without end."""
    needs = board(4, held=[0, 1])
    needs.report(A, report(1, [200, 0, FULL, 0], rate=1e4), 0.0)
    needs.report(A, report(2, [0, 0, 0, FULL], rate=1e4), 0.0)
    needs.report(A, report(3, [0, 100, 0, 0], ahead_bytes=2.0), 0.0)
    assert [fetch.victim for fetch in wanted(needs, free=0.0)] == [shard(1)]
    needs.gone(shard(1))
    needs.arrived(shard(2))
    assert wanted(needs, free=0.0) == [], "what is held, those need who starve"
    needs.report(A, report(1, [200, 0, FULL, 0]), 1.0)
    assert [fetch.victim for fetch in wanted(needs, now=1.0, free=0.0)] == [shard(2)], "it has a second's worth"


def test_nothing_is_dropped_for_those_who_had_too_much_dropped() -> None:
    needs = board(4, held=[0, 1])
    needs.report(A, report(1, [FULL, FULL, 0, 0], ahead_bytes=2.0), 0.0)
    needs.report(A, report(2, [0, 0, FULL, 0]), 0.0)
    needs.report(A, report(3, [0, 0, 0, FULL]), 0.0)
    needs.spent = {(2).to_bytes(16, "big")}
    forced = needs.fetches(0.0, [], 0.0, FAST, 9)
    assert [(fetch.digest, fetch.starving) for fetch in forced] == [(shard(3), ((3).to_bytes(16, "big"),))]


def test_what_is_needed_is_said_of_many_as_of_each() -> None:
    needs = board(6, held=range(4))
    needs.report(A, report(1, [FULL, 1, 0, 0, 0, 0], ahead_bytes=4.0), 0.0)
    needs.report(A, report(2, [0, 0, 0, 0, FULL, 0]), 0.0)
    (fetch,) = needs.fetches(0.0, [], 0.0, FAST, 1)
    assert fetch.victim is not None
    several = [*range(6), 99]
    said = {True: 1, False: 0, None: -1}
    assert needs.needed_of(shards(several)).tolist() == [said[needs.needed(shard(at))] for at in several]
    assert needs.needed(fetch.victim) is False


def test_no_victim_is_chosen_that_makes_too_little_room() -> None:
    needs = Needs()
    sizes, held = np.array([1.0, 3.0, 4.0]), np.array([True, True, False])
    needs.add_dataset(A, shards(range(3)), sizes, held, np.ones(3, bool))
    needs.report(A, report(1, [FULL, FULL, 0], ahead_bytes=4.0), 0.0)
    needs.report(A, report(2, [0, 0, FULL]), 0.0)
    assert wanted(needs, free=0.5) == []
    assert wanted(needs, free=1.0) == [Fetch(shard(2), A, shard(1))]


def test_a_smaller_shard_that_fits_is_fetched_before_anything_needed_is_evicted() -> None:
    needs = Needs()
    sizes = np.array([2.0, 2.0, 1.0])
    needs.add_dataset(A, shards(range(3)), sizes, np.array([True, False, False]), np.ones(3, bool))
    needs.report(A, report(1, [FULL, FULL, 0], ahead_bytes=4.0), 0.0)
    needs.report(A, report(2, [0, FULL, FULL]), 0.0)
    assert wanted(needs, free=1.5, at_most=1) == [Fetch(shard(2), A, None)], "although fewer need it"
    assert wanted(needs, free=2.0, at_most=1) == [Fetch(shard(1), A, None)]
    assert wanted(needs, free=0.5, at_most=1) == [Fetch(shard(1), A, shard(0))]


def test_of_needed_shards_the_one_is_evicted_of_which_the_larger_share_is_left() -> None:
    needs = Needs()
    sizes = np.array([4.0, 3.0, 1.0])
    needs.add_dataset(A, shards(range(3)), sizes, np.array([True, True, False]), np.ones(3, bool))
    needs.report(A, report(1, [200, FULL, 0], ahead_bytes=6.0), 0.0)
    needs.report(A, report(2, [0, 0, FULL]), 0.0)
    assert wanted(needs, free=0.0) == [Fetch(shard(2), A, shard(1))]


def test_a_fixed_order_is_fetched_in_that_order_and_never_at_the_cost_of_others() -> None:
    needs = board(6, held=[5])
    needs.report(A, report(2, [0] * 5 + [FULL], ahead_bytes=1.0), 0.0)
    needs.report(A, report(1, [FULL] * 5 + [0], soon=(3, 0, 4), ordered=True), 0.0)
    assert numbers(wanted(needs, free=2.0)) == [3, 0]
    assert numbers(wanted(needs, free=9.0)) == [3, 0, 4], "no further than it said"
    assert wanted(needs, free=0.0) == []


def test_a_fixed_order_has_its_turn_however_hungry_others_are() -> None:
    needs = board(12, held=[11])
    needs.report(A, report(1, [FULL] * 4 + [0] * 8, soon=(3, 0, 2), ordered=True), 0.0)
    needs.report(A, report(2, [0] * 4 + [FULL] * 7 + [0], rate=1e9), 0.0)
    needs.report(A, report(3, [0] * 11 + [FULL], ahead_bytes=9.0), 0.0)
    fetched = numbers(wanted(needs, free=6.0, at_most=6))
    assert [it for it in fetched if it < 4] == [3, 0, 2]
    assert [it < 4 for it in fetched] == [False, True] * 3
    more = wanted(needs, free=0.0, coming=fetched, at_most=1)
    assert [fetch.victim for fetch in more] == [shard(11)], "room is made for who starves alone"


@pytest.mark.parametrize("free", [0.0, 1.0])
def test_who_starves_comes_before_a_fixed_order(free: float) -> None:
    needs = board(3, held=[0])
    needs.report(A, report(3, [FULL, 0, 0], ahead_bytes=1.0), 0.0)
    needs.report(A, report(1, [0, FULL, 0], soon=(1,), ordered=True), 0.0)
    needs.report(A, report(2, [0, 0, FULL]), 0.0)
    assert wanted(needs, free=free) == [Fetch(shard(2), A, shard(0) if not free else None)]


def test_datasets_that_share_shards_share_their_reads() -> None:
    needs = board(3)
    needs.add_dataset(B, shards([2, 7]), np.ones(2), np.zeros(2, bool), np.ones(2, bool))
    needs.report(A, report(1, [FULL] * 3), 0.0)
    needs.report(B, report(2, [FULL, FULL]), 0.0)
    fetched = wanted(needs)
    assert numbers(fetched)[0] == 2, "two need it, under two names of a dataset"
    assert 7 in numbers(fetched)
    needs.arrived(shard(2))
    assert needs.seen_by((1).to_bytes(16, "big")).tolist() == [0, 0, 2]
    assert needs.seen_by((2).to_bytes(16, "big")).tolist() == [2, 0]
    needs.leave((1).to_bytes(16, "big"))
    needs.forget()
    assert (needs.knows(A), needs.knows(B)) == (False, True)
    assert [needs.needed(shard(at)) for at in (0, 2, 7)] == [None, True, True]
    assert needs.held_bytes() == (1.0, 0.0)


def test_a_dataset_of_which_no_more_can_come_is_left_out() -> None:
    needs = board(3)
    needs.add_dataset(B, shards([2, 7]), np.ones(2), np.zeros(2, bool), np.ones(2, bool))
    needs.report(A, report(1, [FULL] * 3), 0.0)
    needs.report(B, report(2, [FULL, FULL], soon=(0, 1), ordered=True), 0.0)
    needs.left_out = {B}
    assert set(numbers(wanted(needs))) in ({0, 2}, {1, 2}), "what it shares with another, and nothing else of it"
    needs.left_out = {A}
    assert sorted(numbers(wanted(needs))) == [2, 7]


def test_a_changed_ring_gives_others_to_fetch() -> None:
    needs = board(4, mine=[0, 1])
    needs.report(A, report(1, [FULL] * 4), 0.0)
    needs.set_mine(A, np.array([False, False, True, True]))
    assert sorted(numbers(wanted(needs))) == [2, 3]


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), max_size=20))
def test_a_report_never_says_nothing_of_something(pairs: list[tuple[int, int]]) -> None:
    left = np.array([min(pair) for pair in pairs], np.int64)
    counts = np.array([max(pair) for pair in pairs], np.int64)
    exact = rounded_up(left, counts)
    assert ((exact == 0) == (left == 0)).all()
    assert (exact >= np.floor(left / np.maximum(counts, 1) * FULL)).all()
    assert (exact[left == counts] == np.where(counts[left == counts] > 0, FULL, 0)).all()


SHARDS = {A: [0, 1, 2, 3, 4], B: [3, 4, 5, 6]}


class Boards(RuleBasedStateMachine):
    """A board beside a recount of everything that it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.needs = Needs()
        self.now = 0.0
        self.known: set[Digest] = set()
        self.held: set[int] = set()
        self.said: dict[int, tuple[Digest, Report, float]] = {}

    @rule(dataset=st.sampled_from([A, B]))
    def add(self, dataset: Digest) -> None:
        if dataset not in self.known:
            self.known.add(dataset)
            held = np.array([at in self.held for at in SHARDS[dataset]])
            self.needs.add_dataset(dataset, shards(SHARDS[dataset]), np.ones(len(held)), held, np.ones(len(held), bool))

    @precondition(lambda self: self.known)
    @rule(
        consumer=st.integers(0, 4), data=st.data(), lease=st.sampled_from([2.0, 5.0]), rate=st.sampled_from([0.0, 1.0])
    )
    def report(self, consumer: int, data: st.DataObject, lease: float, rate: float) -> None:
        dataset = data.draw(st.sampled_from(sorted(self.known)))
        size = len(SHARDS[dataset])
        left = data.draw(st.lists(st.sampled_from([0, 1, FULL]), min_size=size, max_size=size))
        told = report(
            consumer, left, lease_seconds=lease, rate=rate, ahead_bytes=data.draw(st.sampled_from([0.0, 3.0]))
        )
        assert self.needs.report(dataset, told, self.now)
        self.said[consumer] = dataset, told, self.now

    @rule(consumer=st.integers(0, 4))
    def leave(self, consumer: int) -> None:
        self.needs.leave(consumer.to_bytes(16, "big"))
        self.said.pop(consumer, None)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        self.needs.expire(self.now)
        self.said = {name: it for name, it in self.said.items() if self.now - it[2] <= it[1].lease_seconds}

    @rule()
    def forget(self) -> None:
        self.needs.forget()
        self.known = {dataset for dataset, _, _ in self.said.values()}
        self.held &= {at for dataset in self.known for at in SHARDS[dataset]}

    @rule(at=st.integers(0, 6), held=st.booleans())
    def mark(self, at: int, held: bool) -> None:
        (self.needs.arrived if held else self.needs.gone)(shard(at))
        if any(at in SHARDS[dataset] for dataset in self.known):
            (self.held.add if held else self.held.discard)(at)

    @rule(coming=st.sets(st.integers(0, 6)), free=st.sampled_from([0.0, 1.0, 2.5]), at_most=st.integers(0, 4))
    def fetch(self, coming: set[int], free: float, at_most: int) -> None:
        fetches = self.needs.fetches(self.now, map(shard, coming), free, FAST, at_most)
        assert len(fetches) <= at_most
        for fetch in fetches:
            number = int.from_bytes(fetch.digest, "big")
            assert self.naive(number) > 0
            assert number not in self.held | coming
            assert number in SHARDS[fetch.dataset]
            free -= 1.0
            if fetch.victim is not None:
                victim = int.from_bytes(fetch.victim, "big")
                assert victim in self.held
                assert self.naive(victim) > 0, "what nobody needs is free already"
                free += 1.0
                self.needs.gone(fetch.victim)
                self.held.discard(victim)
            assert free >= 0
        assert len({fetch.digest for fetch in fetches}) == len(fetches)

    def naive(self, number: int) -> int:
        return sum(
            int(told.left[SHARDS[dataset].index(number)] > 0)
            for dataset, told, _ in self.said.values()
            if number in SHARDS[dataset]
        )

    @invariant()
    def counts_are_a_recount(self) -> None:
        for number in range(7):
            known = any(number in SHARDS[dataset] for dataset in self.known)
            assert self.needs.needed(shard(number)) is (self.naive(number) > 0 if known else None)
        for consumer, (dataset, told, _) in self.said.items():
            seen = [
                1 + self.naive(number) - int(left > 0) if number in self.held else 0
                for number, left in zip(SHARDS[dataset], told.left.tolist(), strict=True)
            ]
            assert self.needs.seen_by(consumer.to_bytes(16, "big")).tolist() == seen
        assert len(self.needs) == len(self.said)
        unneeded = sum(self.naive(number) == 0 for number in self.held)
        assert self.needs.held_bytes() == (len(self.held), unneeded)


TestBoards = Boards.TestCase
TestBoards.settings = settings(deadline=None, max_examples=60, stateful_step_count=25)
