"""What may be evicted for a shard that is handed over: against a model that knows nothing of arrays."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quiver.residency.worth import IN_USE, Offered, most_needed_first, rooms_for, worth_of

FILES = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from([0.0, IN_USE, 1.0, 2.0, 3.0]), st.integers(0, 3)), max_size=8
)
OFFERS = st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0.0, IN_USE, 1.0, 2.0, 3.0])), max_size=6)


def decided(offers: list[tuple[int, float]], free_bytes: float, files: list[tuple[int, float, int]]):  # type: ignore[no-untyped-def]
    columns = list(zip(*files, strict=True)) or [(), (), ()]
    sizes, worth, idle = np.asarray(columns[0], np.int64), np.asarray(columns[1], float), np.asarray(columns[2], float)
    return rooms_for([Offered(*it) for it in offers], free_bytes, sizes, worth, idle)


@given(offers=OFFERS, free_bytes=st.integers(0, 20), files=FILES)
def test_a_file_goes_only_for_one_that_is_worth_more_and_what_gets_room_fits(
    offers: list[tuple[int, float]], free_bytes: int, files: list[tuple[int, float, int]]
) -> None:
    rooms = decided(offers, free_bytes, files)
    evicted = [at for room in rooms if room is not None for at in room.tolist()]
    assert len(set(evicted)) == len(evicted), "each file is evicted once"
    for (_, worth), room in zip(offers, rooms, strict=True):
        for at in [] if room is None else room.tolist():
            assert files[at][1] < worth
    taken = sum(size for (size, _), room in zip(offers, rooms, strict=True) if room is not None)
    assert taken <= free_bytes + sum(files[at][0] for at in evicted)


@given(
    offer=st.tuples(st.integers(1, 9), st.sampled_from([0.0, IN_USE, 1.0, 2.0])), free=st.integers(0, 9), files=FILES
)
def test_a_single_offer_is_refused_only_if_no_choice_of_less_needed_files_makes_room(
    offer: tuple[int, float], free: int, files: list[tuple[int, float, int]]
) -> None:
    [room] = decided([offer], free, files)
    less = sum(size for size, worth, _ in files if worth < offer[1])
    assert (room is None) == (offer[0] > free + less)


@given(offer=st.tuples(st.integers(1, 9), st.just(2.0)), files=FILES)
def test_what_is_least_needed_goes_first_and_of_equals_what_was_idle_longest(
    offer: tuple[int, float], files: list[tuple[int, float, int]]
) -> None:
    [room] = decided([offer], 0, files)
    if room is not None and len(room):
        gone = set(room.tolist())
        worst = max((files[at][1], -files[at][2]) for at in gone)
        assert all((worth, -idle) >= worst for at, (_, worth, idle) in enumerate(files) if at not in gone)


def test_reported_needs_count_above_use_and_use_above_nothing() -> None:
    counts, known = np.asarray([3, 0, 0, 0]), np.asarray([True, True, False, False])
    worth = worth_of(counts, known, np.asarray([True, True, True, False]))
    assert worth.tolist() == [3.0, 0.0, IN_USE, 0.0]
    assert most_needed_first(worth, np.asarray([1.0, 5.0, 1.0, 2.0])).tolist() == [0, 2, 3, 1]
