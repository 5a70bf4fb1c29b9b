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
from quiver.identity import Identity
from quiver.lookup import as_rows
from quiver.residency import (
    CONSUMERS_MAX,
    ConsumerReport,
    Decision,
    Measured,
    Needs,
    OriginEstimate,
    Recipe,
    Shelf,
    Situation,
    StoredFile,
    decide,
    rounded_up,
)
from quiver.residency.consumers import EVICTIONS_PER_REPORT
from quiver.residency.report import FULL

A, B = (Digest(bytes([letter]) * 32) for letter in b"AB")
FAST = OriginEstimate(rate=100.0, fill_seconds=0.1, report_seconds=0.5)


def shard(number: int) -> Digest:
    return Digest(number.to_bytes(32, "big"))


def shards(several: Iterable[int]) -> Any:
    return as_rows(map(shard, several))


def report(consumer: int, left: Sequence[int], **more: Any) -> ConsumerReport:
    """A consumer's word: ``left`` in 255ths; by default it has nothing ahead of it and reads a shard a second."""
    more = {"rate": 1.0, "ahead_bytes": 0.0, "lease_seconds": 10.0} | more
    return ConsumerReport(consumer.to_bytes(16, "big"), np.array(left, np.uint8), **more)


def board(count: int, held: Iterable[int] = (), mine: Iterable[int] | None = None, size: float = 1.0) -> Needs:
    """A daemon's board of one dataset of ``count`` shards of ``size`` bytes."""
    needs = Needs()
    here, owned = np.zeros(count, bool), np.zeros(count, bool)
    here[list(held)] = True
    owned[list(range(count) if mine is None else mine)] = True
    needs.add_dataset(A, shards(range(count)), np.full(count, size), here, owned)
    return needs


def numbers(decisions: list[Decision]) -> list[int]:
    return [int.from_bytes(decision.shard, "big") for decision in decisions]


def coming_of(needs: Needs, several: Iterable[int]) -> None:
    """Have shards be on their way already."""
    dataset = next(iter(needs.datasets), A)
    for number in several:
        needs.commitments.add(Decision(shard(number), dataset, 1.0))


def decided(needs: Needs, free: float, at_most: int, **more: Any) -> list[Decision]:
    """Decide, as if whatever is decided were carried out from now on."""
    more = {"now": 0.0, "origin": FAST} | more
    needs.expire(more["now"])
    decisions = decide(needs, Situation(free_bytes=free, fetches_max=at_most, **more))
    for decision in decisions:
        needs.commit(decision)
    return decisions


def wanted(
    needs: Needs, *, now: float = 0.0, coming: Iterable[int] = (), free: float = 9.0, at_most: int = 9, **more: Any
) -> list[Decision]:
    """Return what would be decided while this much is coming, of which nothing is carried out."""
    before = set(needs.commitments)
    coming_of(needs, coming)
    needs.expire(now)
    more = {"origin": FAST} | more
    decisions = decide(needs, Situation(now=now, free_bytes=free, fetches_max=at_most, **more))
    for recipe in set(needs.commitments) - before:
        needs.end(recipe)
    return decisions


def fetch_of(number: int, dataset: Digest, *victims: int, starving: tuple[int, ...] = ()) -> Decision:
    evict = tuple(map(shard, victims))
    return Decision(shard(number), dataset, 1.0, evict, evict, tuple(it.to_bytes(16, "big") for it in starving))


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

    needs.counts = needs.counts.view(Watched)
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


def test_who_waits_is_fetched_for_by_the_one_daemon_that_has_all_that_is_left_however_much_is_there() -> None:
    needs = board(12, held=range(4), mine=[*range(4), 8, 9])
    for consumer in (1, 2):
        waiting = report(consumer, [FULL] * 4 + [0] * 4 + [FULL] * 2 + [0] * 2, rate=4.0, ahead_bytes=0.0)
        needs.report(A, waiting, 0.0)
    assert numbers(wanted(needs, at_most=1)) in ([8], [9]), "what is here makes no batch"
    for consumer in (1, 2):
        reading = report(consumer, [FULL] * 4 + [0] * 4 + [FULL] * 2 + [0] * 2, rate=4.0, ahead_bytes=2.0)
        needs.report(A, reading, 0.0)
    assert numbers(wanted(needs)) == [], "it has something ahead, and much of it here"


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
    assert wanted(needs, now=9.9, origin=FAST._replace(report_seconds=4.0)) != [], "nobody reports oftener"
    needs.report(A, report(1, [0, FULL, FULL, 0]), 4.0)
    assert sorted(numbers(wanted(needs, now=4.0))) == [1, 2]


def test_one_who_starves_forces_out_so_much_until_it_reports_again_whoever_else_does() -> None:
    needs = board(20, held=range(10))

    def forced(now: float) -> int:
        fetches = decided(needs, 0.0, 9, now=now)
        for fetch in fetches:
            (victim,) = fetch.evict
            assert fetch.forced == fetch.evict
            needs.gone(victim)
            needs.arrived(fetch.shard)
            needs.end(fetch.recipe)
        return len(fetches)

    starving = report(1, [0] * 10 + [FULL] * 10, rate=1e9)
    needs.report(A, report(2, [FULL] * 10 + [0] * 10, ahead_bytes=10.0), 0.0)
    needs.report(A, starving, 0.0)
    assert forced(0.0) == EVICTIONS_PER_REPORT
    needs.report(A, report(2, [FULL] * 10 + [0] * 10, ahead_bytes=10.0), 0.5)
    assert forced(0.5) == 0
    needs.report(A, starving, 1.0)
    assert forced(1.0) == EVICTIONS_PER_REPORT


def test_who_has_forced_out_enough_keeps_nobody_else_from_it() -> None:
    needs = board(12, held=[0, 1])
    needs.report(A, report(3, [FULL] * 2 + [0] * 10, ahead_bytes=2.0), 0.0)
    needs.report(A, report(1, [0] * 2 + [FULL] * 9 + [0], rate=1e9), 0.0)
    needs.report(A, report(4, [0] * 2 + [FULL] * 9 + [0], ahead_bytes=99.0), 0.0)
    for number in range(12, 12 + EVICTIONS_PER_REPORT):
        (fetch,) = decided(needs, 0.0, 1)
        assert fetch.forced
        needs.end(fetch.recipe)  # it failed, and nothing was evicted
        needs.gone(shard(number))
    assert wanted(needs, free=0.0) == []
    needs.report(A, report(2, [0] * 11 + [FULL]), 0.0)
    (fetch,) = wanted(needs, free=0.0)
    assert (numbers([fetch]), set(fetch.evict) <= {shard(0), shard(1)}, len(fetch.forced)) == ([11], True, 1)


def test_a_consumer_alone_is_fetched_for_as_early_as_there_is_room() -> None:
    needs = board(40, held=range(30))
    needs.report(A, report(1, [FULL] * 40, ahead_bytes=30.0), 0.0)
    assert len(wanted(needs, free=4.0)) == 4


@pytest.mark.parametrize(
    ("left", "names", "fetched"),
    [
        pytest.param(FULL // 2, ("run", "run"), 4, id="the ranks of a job, each with half of each shard"),
        pytest.param(FULL, ("run", "run"), 0, id="two loops of one name that read everything each"),
        pytest.param(FULL // 2, ("run", "other"), 0, id="two jobs"),
        pytest.param(FULL // 2, ("", ""), 0, id="who told no name"),
    ],
)
def test_the_ranks_of_a_job_are_fetched_for_as_early_as_if_they_were_one(
    left: int, names: tuple[str, str], fetched: int
) -> None:
    needs = board(40, held=range(30))
    for consumer, name in enumerate(names):
        told = report(consumer, [left] * 40, ahead_bytes=15.0, identity=Identity(job=name))
        needs.report(A, told, 0.0)
    assert len(wanted(needs, free=4.0)) == fetched


@pytest.mark.parametrize(
    ("names", "ahead", "waited", "evicts"),
    [
        pytest.param(("run", "run"), 2.0, 0.3, False, id="a rank that reads on with what another has read"),
        pytest.param(("run", "run"), 2.0, 0.0, True, id="the same, where nobody waits much: a read more costs nothing"),
        pytest.param(("run", "run"), 0.0, 0.3, True, id="a rank that waits as well"),
        pytest.param(("run", "other"), 2.0, 0.3, True, id="another job"),
    ],
)
def test_for_a_rank_that_starves_nothing_is_evicted_that_another_rank_is_about_to_read(
    names: tuple[str, str], ahead: float, waited: float, evicts: bool
) -> None:
    needs = board(8, held=range(4))
    half = FULL // 2
    starving = report(1, [0] * 4 + [half] * 4, identity=Identity(job=names[0]), measured=Measured(waited=waited))
    needs.report(A, starving, 0.0)
    needs.report(A, report(2, [half] * 8, ahead_bytes=ahead, identity=Identity(job=names[1])), 0.0)
    assert bool(wanted(needs, free=0.0, at_most=1)) == evicts


def test_a_slow_origin_is_asked_in_time_for_whole_shards_however_little_of_them_a_rank_reads() -> None:
    needs = board(100, held=range(50))
    for consumer in range(2):  # there are 50 shards to read: an eighth of each, of which all comes
        needs.report(A, report(consumer, [FULL // 8] * 100, ahead_bytes=50 / 8, rate=1 / 8), 0.0)
    assert wanted(needs, free=50.0, origin=OriginEstimate(rate=2.0)) == []
    assert wanted(needs, free=50.0, origin=OriginEstimate(rate=0.6)) != []


def test_a_slow_origin_is_asked_before_the_end_of_the_epoch_needs_it() -> None:
    needs = board(100, held=range(50))
    for consumer in (1, 2):
        needs.report(A, report(consumer, [FULL] * 100, ahead_bytes=50.0), 0.0)
    assert wanted(needs, free=50.0, origin=OriginEstimate(rate=2.0)) == []
    assert wanted(needs, free=50.0, origin=OriginEstimate(rate=0.6)) != []


@pytest.mark.parametrize("rate", [5e-324, 1e-300, 1e-9])
def test_who_reads_next_to_nothing_has_time(rate: float) -> None:
    needs = board(10, held=[0], mine=range(5))
    needs.report(A, report(1, [FULL] * 10, ahead_bytes=9.0, rate=1.0), 0.0)
    needs.report(A, report(2, [FULL] * 10, ahead_bytes=9.0, rate=rate), 0.0)
    assert wanted(needs, at_most=1, origin=OriginEstimate(rate=100.0), only=(2).to_bytes(16, "big")) == []


def test_only_the_hunger_of_one_counts_where_everyone_fetches_for_itself() -> None:
    needs = board(4)
    needs.report(A, report(1, [FULL, FULL, 0, 0]), 0.0)
    needs.report(A, report(2, [0, 0, FULL, FULL]), 0.0)
    assert sorted(numbers(wanted(needs, only=(2).to_bytes(16, "big")))) == [2, 3]


def test_what_is_needed_makes_way_for_who_starves_alone_and_then_what_has_most_left() -> None:
    needs = board(4, held=[0, 1, 2])
    needs.report(A, report(1, [0, 0, 0, FULL], ahead_bytes=1.5), 0.0)
    needs.report(A, report(2, [9, 200, 0, 0], ahead_bytes=1.0), 0.0)
    needs.report(A, report(3, [9, 0, 0, 0], ahead_bytes=1.0), 0.0)
    assert wanted(needs, free=0.0) == [], "hungry, and not starving"
    needs.report(A, report(1, [0, 0, 0, FULL]), 0.0)
    assert wanted(needs, free=1.0) == [fetch_of(3, A)], "there is room"
    (fetch,) = decided(needs, 0.0, 9)
    assert fetch == fetch_of(3, A, 1, starving=(1,)), "which one needs, where another two need"
    assert needs.commitments.evicting == [shard(1)]
    assert needs.seen_by((2).to_bytes(16, "big")).tolist() == [2, 0, 1, 0]
    assert wanted(needs, free=0.0) == [], "it is coming"
    needs.gone(shard(1))
    assert needs.needed(shard(1)) is True
    needs.arrived(shard(1))
    needs.end(fetch.recipe)
    assert needs.seen_by((2).to_bytes(16, "big")).tolist() == [2, 1, 1, 0]


def test_a_victim_is_not_fetched_again_at_once_nor_chosen_twice() -> None:
    needs = board(6, held=[0, 1])
    needs.report(A, report(1, [FULL] * 2 + [0] * 4), 0.0)
    needs.report(A, report(2, [0] * 2 + [FULL] * 4), 0.0)
    needs.report(A, report(3, [FULL] * 2 + [0] * 4), 0.0)
    fetches = decided(needs, 0.0, 9)
    more = decided(needs, 0.0, 9)
    victims = [victim for fetch in fetches + more for victim in fetch.evict]
    assert victims
    assert len(set(victims)) == len(victims)
    assert not set(victims) & {fetch.shard for fetch in fetches + more}


@pytest.mark.parametrize("evicted", [False, True])
def test_when_a_fetch_fails_its_victims_are_held_as_before(evicted: bool) -> None:
    needs = board(2, held=[0])
    needs.report(A, report(1, [FULL, 0]), 0.0)
    needs.report(A, report(2, [0, FULL]), 0.0)
    (fetch,) = decided(needs, 0.0, 9)
    assert fetch == fetch_of(1, A, 0, starving=(2,))
    seen = needs.seen_by((1).to_bytes(16, "big")).tolist()
    assert seen == [0, 0], "whoever reads it has to hurry"
    if evicted:
        needs.gone(shard(0))
    needs.end(fetch.recipe)
    assert needs.seen_by((1).to_bytes(16, "big")).tolist() == ([0, 0] if evicted else [1, 0])
    assert (len(needs.commitments), needs.commitments.evicting, needs.commitments.coming) == (0, [], [])
    assert needs.needed(shard(0)) is True


def test_who_starves_is_given_what_it_needs_and_not_what_others_need() -> None:
    needs = board(3, held=[0])
    for consumer in (2, 3, 4):
        needs.report(A, report(consumer, [FULL, FULL, 0], ahead_bytes=1.0), 0.0)
    needs.report(A, report(1, [0, 0, FULL]), 0.0)
    assert wanted(needs, free=0.0, at_most=1) == [fetch_of(2, A, 0, starving=(1,))]


def test_nothing_is_dropped_for_those_who_had_too_much_dropped() -> None:
    needs = board(4, held=[0, 1])
    needs.report(A, report(1, [FULL, FULL, 0, 0], ahead_bytes=2.0), 0.0)
    needs.report(A, report(2, [0, 0, FULL, 0]), 0.0)
    needs.report(A, report(3, [0, 0, 0, FULL]), 0.0)
    forced = wanted(needs, free=0.0, may_not_force={(2).to_bytes(16, "big")})
    assert [(fetch.shard, fetch.starving) for fetch in forced] == [(shard(3), ((3).to_bytes(16, "big"),))]


def test_what_is_needed_is_said_of_many_as_of_each() -> None:
    needs = board(6, held=range(4))
    needs.report(A, report(1, [FULL, 1, 0, 0, 0, 0], ahead_bytes=4.0), 0.0)
    needs.report(A, report(2, [0, 0, 0, 0, FULL, 0]), 0.0)
    several = [*range(6), 99]
    said = {True: 1, False: 0, None: -1}
    assert needs.needed_of(shards(several)).tolist() == [said[needs.needed(shard(at))] for at in several]
    (fetch,) = decided(needs, 0.0, 1)
    assert len(fetch.forced) == 1
    assert needs.needed_of(shards(several)).tolist() == [said[needs.needed(shard(at))] for at in several]


def test_no_victim_is_chosen_that_makes_too_little_room() -> None:
    needs = Needs()
    sizes, held = np.array([1.0, 3.0, 4.0]), np.array([True, True, False])
    needs.add_dataset(A, shards(range(3)), sizes, held, np.ones(3, bool))
    needs.report(A, report(1, [FULL, FULL, 0], ahead_bytes=4.0), 0.0)
    needs.report(A, report(2, [0, 0, FULL]), 0.0)
    assert wanted(needs, free=0.5) == []
    assert wanted(needs, free=1.0) == [fetch_of(2, A, 1, starving=(2,))._replace(size_bytes=4.0)]


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
    fetched = numbers(decided(needs, 6.0, 6))
    assert [it for it in fetched if it < 4] == [3, 0, 2]
    assert [it < 4 for it in fetched] == [False, True] * 3
    more = wanted(needs, free=0.0, at_most=1)
    assert [fetch.evict for fetch in more] == [(shard(11),)], "room is made for who starves alone"


@pytest.mark.parametrize("free", [0.0, 1.0])
def test_who_starves_comes_before_a_fixed_order(free: float) -> None:
    needs = board(3, held=[0])
    needs.report(A, report(3, [FULL, 0, 0], ahead_bytes=1.0), 0.0)
    needs.report(A, report(1, [0, FULL, 0], soon=(1,), ordered=True), 0.0)
    needs.report(A, report(2, [0, 0, FULL]), 0.0)
    assert wanted(needs, free=free) == [fetch_of(2, A, *([] if free else [0]), starving=(() if free else (2,)))]


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
    needs.forget_unused()
    assert (needs.has_dataset(A), needs.has_dataset(B)) == (False, True)
    assert [needs.needed(shard(at)) for at in (0, 2, 7)] == [None, True, True]
    assert needs.sizes_of(shards([0, 2, 7])).tolist() == [0.0, 1.0, 1.0]
    assert needs.held.sum() == 1


def test_a_dataset_of_which_no_more_can_come_is_left_out() -> None:
    needs = board(3)
    needs.add_dataset(B, shards([2, 7]), np.ones(2), np.zeros(2, bool), np.ones(2, bool))
    needs.report(A, report(1, [FULL] * 3), 0.0)
    needs.report(B, report(2, [FULL, FULL], soon=(0, 1), ordered=True), 0.0)
    assert set(numbers(wanted(needs, left_out={B}))) in ({0, 2}, {1, 2}), (
        "what it shares with another, and nothing else of it"
    )
    assert sorted(numbers(wanted(needs, left_out={A}))) == [2, 7]


def test_a_changed_ring_gives_others_to_fetch() -> None:
    needs = board(4, mine=[0, 1])
    needs.report(A, report(1, [FULL] * 4), 0.0)
    needs.set_mine(A, np.array([False, False, True, True]))
    assert sorted(numbers(wanted(needs))) == [2, 3]


def shelf_of(needs: Needs, idle: dict[int, float], size: int = 1) -> Shelf:
    """Return a shelf of shards that were read so many seconds ago."""
    files = [StoredFile(shard(at), size, -seconds) for at, seconds in idle.items()]
    return Shelf.of(files, 0.0, needs.needed_of)


def test_a_decision_names_all_that_is_evicted_for_it_what_nobody_needs_first() -> None:
    needs = board(8, held=[0, 1, 2, 3])
    needs.report(A, report(1, [0, 0, 0, 9, FULL, FULL, FULL, 0]), 0.0)
    shelf = shelf_of(needs, {0: 5.0, 1: 9.0, 2: 7.0, 3: 99.0})
    fetches = decided(needs, 0.5, 9, shelf=lambda: shelf)
    assert [fetch.evict for fetch in fetches[:3]] == [(shard(1),), (shard(2),), (shard(0),)], "idle the longest first"
    assert [fetch.forced for fetch in fetches] == [()] * 3, "what it needs itself is not evicted for it"
    assert set(needs.commitments.evicting) == {shard(0), shard(1), shard(2)}
    assert decided(needs, 0.5, 9, shelf=lambda: shelf) == [], "nothing is evicted twice"


def test_a_shard_may_take_the_place_of_several_and_of_one_that_is_needed() -> None:
    needs = Needs()
    sizes, held = np.array([1.0, 1.0, 3.0, 5.0]), np.array([True, True, True, False])
    needs.add_dataset(A, shards(range(4)), sizes, held, np.ones(4, bool))
    needs.report(A, report(1, [0, 0, FULL, 0], ahead_bytes=3.0), 0.0)
    needs.report(A, report(2, [0, 0, 0, FULL]), 0.0)
    files = [StoredFile(shard(at), int(sizes[at]), float(at)) for at in range(3)]
    shelf = Shelf.of(files, 100.0, needs.needed_of)
    (fetch,) = wanted(needs, free=0.0, shelf=lambda: shelf)
    assert (fetch.evict, fetch.forced) == ((shard(0), shard(1), shard(2)), (shard(2),))
    (fetch,) = wanted(needs, free=3.5, shelf=lambda: shelf)
    assert (fetch.evict, fetch.forced) == ((shard(0), shard(1)), ())


def test_the_shelf_is_looked_at_only_if_room_is_short() -> None:
    needs = board(4)
    needs.report(A, report(1, [FULL] * 4), 0.0)

    def look() -> Shelf:
        raise AssertionError("there is room")

    assert len(wanted(needs, free=4.0, shelf=look)) == 4


def test_what_is_avoided_is_neither_fetched_nor_counted_as_coming() -> None:
    needs = board(3)
    needs.add_dataset(B, shards([2, 7]), np.ones(2), np.zeros(2, bool), np.ones(2, bool))
    needs.report(A, report(1, [0, FULL, FULL]), 0.0)
    needs.report(B, report(2, [FULL, 0]), 0.0)
    needs.commit(Decision(shard(2), A, 1.0))
    assert numbers(wanted(needs)) == [1], "it is coming"
    stuck = {Recipe(shard(2), A), Recipe(shard(1), A)}
    assert wanted(needs, avoid=stuck) == [fetch_of(2, B)], "by the other dataset that has it"


# -- bytes and not shards ---------------------------------------------------------------------------------------------


def test_nothing_is_evicted_that_a_starving_consumer_needs() -> None:
    """It was fetched a moment ago, and evicting it would have the two replace each other's shards without end."""
    needs = board(4, held=[0, 1])
    needs.report(A, report(1, [200, 0, FULL, 0], rate=1e4), 0.0)
    needs.report(A, report(2, [0, 0, 0, FULL], rate=1e4), 0.0)
    needs.report(A, report(3, [0, 100, 0, 0], ahead_bytes=2.0), 0.0)
    assert [fetch.forced for fetch in wanted(needs, free=0.0)] == [(shard(1),)]
    needs.gone(shard(1))
    needs.arrived(shard(2))
    assert wanted(needs, free=0.0) == [], "what is held, those need who starve"
    needs.report(A, report(1, [200, 0, FULL, 0]), 1.0)
    assert [fetch.forced for fetch in wanted(needs, now=1.0, free=0.0)] == [(shard(2),)], "it has a second's worth"


def test_what_is_evicted_beyond_a_shard_is_free_to_others_only_once_it_is_evicted() -> None:
    """Until then another one finds no room, if it comes first."""
    needs = Needs()
    sizes = np.array([3.0, 1.0, 1.0])
    needs.add_dataset(A, shards(range(3)), sizes, np.array([True, False, False]), np.ones(3, bool))
    needs.report(A, report(1, [0, FULL, FULL]), 0.0)
    shelf = Shelf.of([StoredFile(shard(0), 3, 0.0)], 100.0, needs.needed_of)
    (fetch,) = wanted(needs, free=0.5, shelf=lambda: shelf)
    assert fetch.evict == (shard(0),)
    assert len(wanted(needs, free=1.0, shelf=lambda: shelf)) == 2, "what is free by now, the other one may have"


def test_a_smaller_shard_that_fits_is_fetched_before_anything_needed_is_evicted() -> None:
    needs = Needs()
    sizes = np.array([2.0, 2.0, 1.0])
    needs.add_dataset(A, shards(range(3)), sizes, np.array([True, False, False]), np.ones(3, bool))
    needs.report(A, report(1, [FULL, FULL, 0], ahead_bytes=4.0), 0.0)
    needs.report(A, report(2, [0, FULL, FULL]), 0.0)

    def first(free: float) -> tuple[Digest, tuple[Digest, ...]]:
        (fetch,) = wanted(needs, free=free, at_most=1)
        return fetch.shard, fetch.evict

    assert first(1.5) == (shard(2), ()), "although fewer need it"
    assert first(2.0) == (shard(1), ())
    assert first(0.5) == (shard(1), (shard(0),))


def test_of_needed_shards_the_one_is_evicted_of_which_most_bytes_are_left() -> None:
    needs = Needs()
    sizes = np.array([4.0, 3.0, 1.0])
    needs.add_dataset(A, shards(range(3)), sizes, np.array([True, True, False]), np.ones(3, bool))
    needs.report(A, report(1, [200, FULL, 0], ahead_bytes=6.0), 0.0)
    needs.report(A, report(2, [0, 0, FULL]), 0.0)
    assert [(fetch.shard, fetch.forced) for fetch in wanted(needs, free=0.0)] == [(shard(2), (shard(0),))], (
        "of 4 bytes 3.1, of 3 all"
    )


# -- the seams for who gets the cache ---------------------------------------------------------------------------------


def test_consumers_of_one_group_count_once() -> None:
    needs = board(3, held=[2])
    for consumer in (1, 2, 3):
        assert needs.report(A, report(consumer, [FULL, 0, FULL]), 0.0, group=b"one job")
    for consumer in (4, 5):
        assert needs.report(A, report(consumer, [0, FULL, 0]), 0.0)
    assert numbers(wanted(needs)) == [1, 0], "two groups need it, where one of three consumers needs the other"
    assert needs.seen_by((1).to_bytes(16, "big")).tolist() == [0, 0, 1], "no other group needs it"
    needs.report(A, report(1, [0, 0, 0]), 0.0, group=b"one job")
    assert needs.counts.tolist() == [1, 2, 1], "the others of the group do"
    for consumer in (2, 3):
        needs.leave(consumer.to_bytes(16, "big"))
    assert needs.counts.tolist() == [0, 2, 0]


def test_a_dataset_that_has_its_share_is_fetched_no_more_of() -> None:
    needs = board(4)
    needs.add_dataset(B, shards([8, 9]), np.ones(2), np.zeros(2, bool), np.ones(2, bool))
    needs.report(A, report(1, [FULL] * 4, rate=1e9), 0.0)
    needs.report(B, report(2, [FULL] * 2, rate=1e9), 0.0)
    assert len(wanted(needs)) == 6, "by itself each may have all"
    fetched = numbers(wanted(needs, shares={A: 2.0}))
    assert sorted(it < 8 for it in fetched) == [False, False, True, True]


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
        self.said: dict[int, tuple[Digest, ConsumerReport, float]] = {}

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
        assert len(self.needs.leases) == len(self.needs)
        self.said = {name: it for name, it in self.said.items() if self.now - it[2] <= it[1].lease_seconds}

    @rule()
    def forget(self) -> None:
        self.needs.forget_unused()
        self.known = {dataset for dataset, _, _ in self.said.values()}
        self.held &= {at for dataset in self.known for at in SHARDS[dataset]}

    @rule(at=st.integers(0, 6), held=st.booleans())
    def mark(self, at: int, held: bool) -> None:
        (self.needs.arrived if held else self.needs.gone)(shard(at))
        if any(at in SHARDS[dataset] for dataset in self.known):
            (self.held.add if held else self.held.discard)(at)

    @rule(
        coming=st.sets(st.integers(0, 6)),
        free=st.sampled_from([0.0, 1.0, 2.5]),
        at_most=st.integers(0, 4),
        succeeds=st.booleans(),
    )
    def fetch(self, coming: set[int], free: float, at_most: int, succeeds: bool) -> None:
        names = sorted(self.held)
        shelf = Shelf.of([StoredFile(shard(at), 1, self.now) for at in names], self.now, self.needs.needed_of)
        coming_of(self.needs, coming)
        before = set(self.needs.commitments)
        fetches = decided(self.needs, free, at_most, now=self.now, shelf=lambda: shelf)
        assert len(fetches) <= at_most
        for fetch in fetches:
            number = int.from_bytes(fetch.shard, "big")
            assert self.naive(number) > 0
            assert number not in self.held | coming
            assert number in SHARDS[fetch.dataset]
            free -= 1.0
            for victim in fetch.evict:
                at = int.from_bytes(victim, "big")
                assert at in self.held
                assert (self.naive(at) > 0) == (victim in fetch.forced)
                free += 1.0
                if succeeds:
                    self.needs.gone(victim)
                    self.held.discard(at)
            assert free >= 0
        assert len({fetch.shard for fetch in fetches}) == len(fetches)
        for recipe in before | {fetch.recipe for fetch in fetches}:
            self.needs.end(recipe)
        assert (self.needs.commitments.coming, self.needs.commitments.evicting) == ([], [])

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
        assert self.needs.held.sum() == len(self.held)
        assert (self.needs.held & (self.needs.counts == 0)).sum() == unneeded


TestBoards = Boards.TestCase
TestBoards.settings = settings(deadline=None, max_examples=60, stateful_step_count=25)
