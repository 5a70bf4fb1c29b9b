"""Which dataset may take room from which, and that it comes to rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulation import simulate
from quiver.digest import Digest
from quiver.residency import Needs, Shelf, Situation, StoredFile, decide
from quiver.residency.division import with_floors
from tests.kernel.test_needs_policy import FAST, FULL, A, B, numbers, report, shard, shards

SECOND = 10  # the number of the second dataset's first shard


def two(count: int, held: Iterable[int]) -> Needs:
    """Return the needs of a daemon that knows datasets A, of shards 0 …, and B, of shards 10 …, of one byte each."""
    needs, here = Needs(), set(held)
    for dataset, first in ((A, 0), (B, SECOND)):
        names = range(first, first + count)
        present = np.array([number in here for number in names])
        needs.add_dataset(dataset, shards(names), np.ones(count), present, np.ones(count, bool))
    return needs


def decided(
    needs: Needs, held: Sequence[int], division: dict[Digest, float], **more: Any
) -> list[tuple[int, list[int]]]:
    """Return what is fetched and what is evicted for it, with no free room. ``held``: the longest idle first."""
    files = [StoredFile(shard(number), 1, float(at)) for at, number in enumerate(held)]
    situation = Situation(
        now=0.0,
        free_bytes=0.0,
        fetches_max=1,
        origin=FAST,
        shelf=lambda: Shelf.of(files, 1000.0, needs.needed_of),
        division=division,
        **more,
    )
    decisions = decide(needs, situation)
    return [
        (number, [int.from_bytes(it, "big") for it in decision.evict])
        for number, decision in zip(numbers(decisions), decisions, strict=True)
    ]


def test_what_nobody_needs_is_evicted_from_the_dataset_that_holds_more_than_its_share() -> None:
    """Both have read some; B's was idle for longer, which decides without shares."""
    needs = two(5, [0, 1, 2, 10])
    needs.report(A, report(1, [0, 0, 0, 0, FULL]), 0.0)
    needs.report(B, report(2, [0, FULL, FULL, FULL, FULL], ahead_bytes=99.0), 0.0)
    assert decided(needs, [10, 0, 1, 2], {})[0][1] == [10]
    assert decided(needs, [10, 0, 1, 2], {A: 2.0, B: 2.0})[0] == (4, [0]), "its own, since it has more than its share"


def test_a_dataset_below_its_share_takes_a_needed_shard_from_one_above_it_and_not_the_other_way_round() -> None:
    held = [0, 1, 2, 10]
    needs = two(5, held)
    needs.report(A, report(1, [FULL] * 5, ahead_bytes=9.0), 0.0)
    needs.report(B, report(2, [0, *[FULL] * 4]), 0.0)
    needs.gone(shard(10))
    (fetched, evicted) = decided(needs, [0, 1, 2], {A: 1.0, B: 2.0})[0]
    assert fetched > SECOND
    assert evicted[0] in (0, 1, 2)
    assert decided(needs, [0, 1, 2], {A: 3.0, B: 0.0}) != [], "even with no share there is room for one to read"
    needs = two(5, [0, 10, 11])
    needs.report(A, report(1, [FULL] * 5, ahead_bytes=9.0), 0.0)
    needs.report(B, report(2, [FULL] * 5), 0.0)
    taken = [evicted for _, evicted in decided(needs, [0, 10, 11], {A: 1.0, B: 2.0})]
    assert all(number >= SECOND for each in taken for number in each), "B has its share: A keeps what it has"


def test_ranks_of_one_dataset_are_no_reason_to_take_from_another() -> None:
    needs = two(5, [0, 1, 10, 11])
    for rank in range(8):
        needs.report(A, report(rank, [FULL] * 5), 0.0)
    needs.report(B, report(9, [FULL] * 5, ahead_bytes=99.0), 0.0)
    for _, evicted in decided(needs, [0, 1, 10, 11], {A: 2.0, B: 2.0}):
        assert all(number < SECOND for number in evicted)


def test_patience_is_within_a_dataset() -> None:
    """A slow job whose runway is shorter than its own next shard is fetched for, however fast another dataset's is."""
    needs = two(5, [])
    needs.report(A, report(1, [FULL] * 5, rate=1000.0, ahead_bytes=1e6), 0.0)
    needs.report(B, report(2, [FULL] * 5, rate=0.01, ahead_bytes=1.0), 0.0)
    situation = Situation(now=0.0, free_bytes=9.0, fetches_max=1, origin=FAST)
    assert numbers(decide(needs, situation))[0] >= SECOND


def in_order(needs: Needs, uses: Sequence[int]) -> None:
    """Dataset A is read in this order, one shard a second, and nobody may change it."""
    left = np.zeros(5, np.uint8)
    left[list(uses)] = FULL
    known: dict[str, Any] = {"ordered": True, "order": bytes(16), "order_at": 0, "uses": np.asarray(uses, np.int32)}
    assert needs.report(A, report(1, left.tolist(), **known), 0.0)


@pytest.mark.parametrize(
    ("share", "evicted"),
    [
        pytest.param(3.0, {10, 11, 12}, id="below its share, it takes one from who has more"),
        pytest.param(1.0, set(), id="with its share it keeps to that, though the other has more"),
    ],
)
def test_what_is_read_in_a_known_order_takes_from_others_only_up_to_its_share(share: float, evicted: set[int]) -> None:
    held = [0, 10, 11, 12]
    needs = two(5, held)
    in_order(needs, [4, 0, 1, 2, 3])
    needs.report(B, report(2, [FULL] * 5, ahead_bytes=3.0), 0.0)
    found = decided(needs, held, {A: share, B: 4.0 - share})
    assert {number for _, each in found for number in each} <= evicted
    assert bool(found) == bool(evicted)
    assert decided(needs, held, {}) == [], "without shares, it never evicts what others need"


def test_what_is_read_in_a_known_order_leaves_the_free_room_of_others_alone() -> None:
    needs = two(5, [0, 1, 10])  # 4 is read at once, before it could come
    in_order(needs, [4, 0, 1, 2, 3])
    needs.report(B, report(2, [FULL, 0, 0, 0, 0], ahead_bytes=9.0), 0.0)
    situation = Situation(now=0.0, free_bytes=2.0, fetches_max=9, origin=FAST, division={A: 2.0, B: 3.0})
    assert decide(needs, situation) == []
    situation = Situation(now=0.0, free_bytes=2.0, fetches_max=9, origin=FAST, division={A: 4.0, B: 1.0})
    assert numbers(decide(needs, situation)) == [2, 3]


def test_what_no_order_uses_again_is_evicted_for_it_only_where_the_shares_allow_that() -> None:
    held = [0, 1, 10, 11]
    needs = two(5, held)
    in_order(needs, [4, 0, 1, 2, 3])
    needs.report(B, report(2, [0, FULL, 0, 0, 0], ahead_bytes=9.0), 0.0)
    assert decided(needs, held, {A: 2.0, B: 2.0}) == [], "what B has read is what its next epoch finds"
    assert decided(needs, held, {A: 3.0, B: 1.0}) == [(2, [10])]


def test_who_reads_a_dataset_alone_is_fetched_for_early_only_within_its_share() -> None:
    needs = two(5, [0])
    needs.report(A, report(1, [FULL] * 5, ahead_bytes=99.0), 0.0)
    needs.report(B, report(2, [FULL] * 5, ahead_bytes=99.0), 0.0)
    situation = Situation(now=0.0, free_bytes=9.0, fetches_max=9, origin=FAST, division={A: 3.0, B: 4.0})
    fetched = numbers(decide(needs, situation))
    assert sum(number < SECOND for number in fetched) == 2
    assert sum(number >= SECOND for number in fetched) == 4


def test_a_consumer_does_not_replace_its_own_shards_while_it_can_read_them() -> None:
    needs = two(5, [0, 1])
    needs.report(A, report(1, [FULL] * 5, ahead_bytes=0.1), 0.0)
    needs.report(B, report(2, [0] * 5), 0.0)
    assert decided(needs, [0, 1], {A: 2.0, B: 0.0}) == []
    needs.report(A, report(1, [FULL] * 5, ahead_bytes=0.0), 0.0)
    assert decided(needs, [0, 1], {A: 2.0, B: 0.0}) == [], "it has not heard of them yet"
    needs.report(A, report(1, [9, 9, *[FULL] * 3], ahead_bytes=0.0), 0.0)
    assert decided(needs, [0, 1], {A: 2.0, B: 0.0})[0][1][0] in (0, 1), "what it has makes no batch: it waits"


@given(st.dictionaries(st.sampled_from([A, B, Digest(bytes(32))]), st.floats(0, 1e6)), st.floats(0.1, 1e6))
def test_floors_leave_the_sum_as_it_is_and_give_each_something(shares: dict[Digest, float], floor: float) -> None:
    names = [A, B, Digest(bytes(32))]
    room = sum(shares.values())
    given_ = with_floors(shares, dict.fromkeys(names, floor))
    assert sum(given_.values()) == pytest.approx(room)
    if room > 0:
        assert min(given_.values()) >= min(floor, room / 3) * (1 - 1e-9)


@given(st.integers(0, 99), st.integers(1, 7))
@settings(max_examples=20, deadline=None)
def test_shards_move_until_the_shares_are_met_and_then_stay(seed: int, share: int) -> None:
    """Two datasets that starve all the time, each shard evicted at once read again: nothing goes back and forth."""
    rng = np.random.default_rng(seed)
    held = [*rng.permutation(8)[: rng.integers(0, 9)].tolist()]
    held += [SECOND + number for number in rng.permutation(8)[: 8 - len(held)].tolist()]
    needs, moved = two(8, held), []
    for _ in range(24):
        for consumer, dataset in ((1, A), (2, B)):
            needs.report(dataset, report(consumer, [FULL] * 8, ahead_bytes=1e-6), 0.0)
        made = decided(needs, held, {A: float(share), B: 8.0 - share})
        if not made:
            break
        fetched, evicted = made[0]
        moved.append(fetched)
        for number in evicted:
            needs.gone(shard(number))
            held.remove(number)
        needs.arrived(shard(fetched))
        held.append(fetched)
    assert len(moved) <= 8, "every move is towards the shares"
    assert sum(number < SECOND for number in held) == share


def test_disjoint_datasets_wait_for_nothing_if_the_origin_has_room() -> None:
    """A fast job and one of a tenth of its speed, an origin of twice the need."""
    need = 1.1 * 0.8
    result = simulate(
        2, 0.2, [1.0, 0.1], [0.0, 0.0], 2 * need, of=[0, 1], shards=64, samples=64, epochs=2, shares=[1.0, 0.0]
    )
    assert result.waiting_max <= 0.02
    assert result.forced == 0
