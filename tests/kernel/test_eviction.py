"""What makes way when room is wanted."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.digest import Digest
from quiver.lookup import as_rows
from quiver.residency.eviction import (
    IDLE_SECONDS,
    KEPT_SECONDS,
    SHARED,
    Candidates,
    OnBehalf,
    Shelf,
    StoredFile,
    choose_idle,
)

NOW = 10_000.0
held = st.lists(
    st.builds(StoredFile, st.binary(min_size=32, max_size=32).map(Digest), st.integers(1, 100), st.floats(0, NOW)),
    max_size=20,
    unique_by=lambda item: item.digest,
)


@given(held, st.integers(0, 500), st.lists(st.sampled_from([True, False, None]), min_size=20, max_size=20))
def test_only_what_nobody_needs_makes_way_and_no_more_of_it_than_is_wanted(
    items: list[StoredFile], free_bytes: int, said: list[bool | None]
) -> None:
    need = {item.digest: said[at] for at, item in enumerate(items)}
    free = [
        item
        for item in items
        if need[item.digest] is False or (need[item.digest] is None and NOW - item.used >= IDLE_SECONDS)
    ]
    victims = choose_idle(items, free_bytes, need.__getitem__, NOW)
    if victims is None:
        assert sum(item.size_bytes for item in free) < free_bytes
        return
    assert set(victims) <= set(free)
    assert sum(item.size_bytes for item in victims) >= free_bytes
    assert not victims or sum(item.size_bytes for item in victims[:-1]) < free_bytes
    spared = [item for item in free if item not in victims]
    assert all(NOW - victim.used >= NOW - item.used for victim in victims for item in spared), (
        "idle the longest goes first"
    )


def shelf_of(*rows: tuple[int, float, int, bool, int]) -> Shelf:
    """Return a shelf of (size, idle, needed, in use, holder)."""
    sizes, idle, needed, in_use, holders = (np.array(column) for column in zip(*rows, strict=True))
    digests = as_rows(Digest(at.to_bytes(32, "big")) for at in range(len(rows)))
    return Shelf(digests, sizes, idle.astype(np.float64), needed.astype(np.int8), in_use, holders)


def choose_fairly(shelf: Shelf, free_bytes: int, holder: int | None) -> list[int] | None:
    return Candidates(shelf).choose(free_bytes, OnBehalf(holder))


HOUR = 3600.0


def test_what_nobody_needs_goes_first_the_longest_idle_first() -> None:
    shelf = shelf_of((1, 5.0, 0, True, 2), (1, HOUR, 1, True, 2), (1, 90.0, -1, False, 2), (1, 30.0, -1, False, 2))
    assert choose_fairly(shelf, 1, None) == [2]
    assert choose_fairly(shelf, 2, None) == [2, 0]
    assert choose_fairly(shelf, 3, None) is None, "what is needed, or was read just now, stays"


def test_one_who_holds_more_pushes_out_its_own_alone() -> None:
    mine = [(1, 100.0, -1, False, 1)] * 5
    theirs = [(1, 200.0, -1, False, 2)] * 5
    assert choose_fairly(shelf_of(*mine, *theirs), 2, 1) == [0, 1]
    assert choose_fairly(shelf_of(*mine, *theirs), 6, 1) is None
    forgotten = [(1, 2 * KEPT_SECONDS, -1, False, 2)] * 5
    assert choose_fairly(shelf_of(*mine, *forgotten), 2, 1) == [5, 6], "nobody came back for it"


@pytest.mark.parametrize("use", [(0, False), (-1, True)], ids=["not needed", "in use"])
def test_one_who_holds_less_comes_to_as_much_as_the_other(use: tuple[int, bool]) -> None:
    junk = [(1, 90.0, *use, 1)] * 10
    chosen = choose_fairly(shelf_of(*junk), 5, 2)
    assert chosen is not None
    assert len(chosen) == 5
    assert choose_fairly(shelf_of(*junk), 6, 2) is None, "then it would hold more"
    assert choose_fairly(shelf_of(*junk), 1, 1) == ([0] if use[0] == 0 else None), "its own dataset is not thrashed"


def test_what_several_read_is_not_taken_while_it_is_in_use() -> None:
    shared = [(1, 90.0, -1, True, SHARED)] * 10
    assert choose_fairly(shelf_of(*shared), 1, 2) is None
    assert choose_fairly(shelf_of(*[(1, 90.0, -1, False, SHARED)] * 10), 5, 2) == [0, 1, 2, 3, 4]


rows_of_shelf = st.tuples(
    st.integers(1, 9),
    st.sampled_from([1.0, 90.0, HOUR]),
    st.sampled_from([-1, 0, 1]),
    st.booleans(),
    st.integers(0, 3),
)


@given(st.lists(rows_of_shelf, min_size=1, max_size=12), st.integers(1, 40), st.sampled_from([None, 1, 2, 9]))
def test_nobody_comes_to_more_than_another_by_pushing_out_what_that_one_keeps(
    rows: list[tuple[int, float, int, bool, int]], free_bytes: int, holder: int | None
) -> None:
    chosen = choose_fairly(shelf_of(*rows), free_bytes, holder)
    if chosen is None:
        return
    assert len(set(chosen)) == len(chosen)
    assert sum(rows[at][0] for at in chosen) >= free_bytes
    assert all(rows[at][2] < 1 for at in chosen), "what somebody needs stays"
    held = Counter[int]()
    for size, _, _, _, whose in rows:
        held[whose] += size
    for at in chosen:
        size, idle, _, _, whose = rows[at]
        held[whose] -= size
        if holder is not None and whose != holder:
            assert idle >= KEPT_SECONDS or held[holder] + size <= held[whose]
        if holder is not None:
            held[holder] += size
