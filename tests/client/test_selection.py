"""Selecting and splitting as functions of values: rows, masks, expressions, fractions, groups."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from quiver_client.selection import Columns, Rows, chosen_rows
from quiver_client.splitting import bounds_of, groups_of, split_groups, split_rows

COUNT = 12
TABLE: dict[str, Any] = {
    "label": pa.array([0, 1, 2] * 4, pa.int32()),
    "score": pa.array([None if i % 4 == 0 else i / 2 for i in range(COUNT)], pa.float64()),
    "__key__": pa.array([f"{'train' if i < 8 else 'test'}/{i:02}" for i in range(COUNT)], pa.large_utf8()),
}
COLUMNS = Columns(["label", "score"], ["image"], TABLE.__getitem__)


def rows(chosen: Any) -> list[int]:
    found: list[int] = chosen_rows(chosen, COUNT, COLUMNS).tolist()
    return found


@pytest.mark.parametrize(
    "chosen",
    [
        [3, 1, 7],
        (3, 1, 7),
        np.array([3, 1, 7], np.uint8),
        torch.tensor([3, 1, -5]),
        pa.array([3, 1, 7]),
        pa.chunked_array([[3], [1, 7]]),
        iter([3, 1, 7]),
        [-9, 1, -5],
    ],
)
def test_rows_are_selected_in_the_order_in_which_they_are_given(chosen: Any) -> None:
    assert rows(chosen) == [3, 1, 7]


def test_a_range_a_slice_and_every_kind_of_mask_select_alike() -> None:
    mask = [i in range(2, 12, 4) for i in range(COUNT)]
    unknown = pa.array([True if each else None for each in mask])
    expected = [2, 6, 10]
    for chosen in (
        range(2, 12, 4),
        slice(2, None, 4),
        mask,
        np.array(mask),
        torch.tensor(mask),
        pa.array(mask),
        unknown,
    ):
        assert rows(chosen) == expected
    assert rows(slice(None, None, -5)) == [11, 6, 1]


def test_a_row_that_is_given_twice_is_there_twice() -> None:
    assert rows([4, 4, -8]) == [4, 4, 4]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (pc.field("label") == 2, [2, 5, 8, 11]),
        ((pc.field("label") == 2) & pc.starts_with(pc.field("__key__"), "test/"), [8, 11]),
        (pc.field("__key__").isin(["train/03", "test/09", "nowhere"]), [3, 9]),
        (pc.field("score") > 4, [9, 10, 11]),  # null is neither above nor below
        (~(pc.field("score") > 1), [1, 2]),
        (pc.field("score").is_null(), [0, 4, 8]),
        (pc.scalar(True), list(range(COUNT))),
    ],
)
def test_an_expression_selects_the_samples_for_which_it_is_true(expression: Any, expected: list[int]) -> None:
    assert rows(expression) == expected


@pytest.mark.parametrize(
    ("chosen", "error", "message"),
    [
        ([True] * 5, ValueError, "a mask of 5 values, but the dataset has 12 samples"),
        (np.ones((COUNT, 1), bool), ValueError, "a mask of 12 × 1 values"),
        ([False] * COUNT, ValueError, "nothing is selected"),
        ([], ValueError, "nothing is selected"),
        (slice(5, 5), ValueError, r"\[5:5\]: it selects none of 12 samples"),
        (pc.field("label") == 7, ValueError, "no sample satisfies"),
        (pc.field("nope") == 7, ValueError, "label, score, __key__.*nope"),
        (pc.field("image") == b"", ValueError, "image hold bytes"),
        (pc.field("label") + 1, ValueError, "gives int32; give a condition"),
        (pc.field("label") == "cat", ValueError, "cannot be evaluated over label"),
        (pa.array([1, None]), ValueError, "1 of the row numbers are null"),
        ([12], IndexError, "index 12 is out of range for 12 samples"),
        ([-13], IndexError, "index -13 is out of range"),
        ([10**30], IndexError, "out of range"),
        (np.array([2**64 - 1], np.uint64), IndexError, "out of range"),
        ([0.5], TypeError, "integers"),
        (["a"], TypeError, "integers"),
        ("label == 3", TypeError, "give row numbers, a mask, or an expression"),
        (lambda sample: True, TypeError, "give row numbers, a mask, or an expression"),
    ],
)
def test_a_selection_that_makes_no_sense_is_refused_with_the_reason(
    chosen: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rows(chosen)


@settings(deadline=None)
@given(some.lists(some.integers(0, 2**31), min_size=1, max_size=200))
def test_rows_survive_pickling(chosen: list[int]) -> None:
    for each in (chosen, sorted(set(chosen))):
        array = np.array(each, np.int64)
        assert (pickle.loads(pickle.dumps(Rows(array))).array == array).all()


@pytest.mark.parametrize(
    ("array", "bytes_max"),
    [
        (np.arange(1_300_000), 300),
        (np.arange(5, 1_300_000, 7), 300),
        (np.full(1_000_000, 3), 300),
        (np.flatnonzero(np.random.default_rng(0).random(1_300_000) < 0.9), 163_000),
        (np.random.default_rng(0).permutation(1_000_000), 4_000_300),
    ],
)
def test_a_large_selection_pickles_into_few_bytes(array: Any, bytes_max: int) -> None:
    pickled = pickle.dumps(Rows(array.astype(np.int64)))
    assert len(pickled) <= bytes_max
    assert (pickle.loads(pickled).array == array).all()


def test_rows_cannot_be_written_to() -> None:
    kept = Rows(np.arange(4, dtype=np.int64))
    with pytest.raises(ValueError, match="read-only"):
        kept.array[0] = 1


# -- splitting ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    count=some.integers(1, 300),
    fractions=some.lists(some.floats(0.001, 1.0), min_size=1, max_size=5),
    seed=some.integers(0, 2**40),
)
def test_parts_are_disjoint_ascending_and_of_the_sizes_asked_for(count: int, fractions: list[float], seed: int) -> None:
    total = sum(fractions)
    fractions = [each / total for each in fractions]
    parts = split_rows(count, bounds_of(fractions, count), seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))  # fractions of one leave nothing out
    for part, fraction in zip(parts, fractions, strict=True):
        assert abs(len(part) - fraction * count) <= 1
        assert (np.diff(part) > 0).all()
    again = split_rows(count, bounds_of(fractions, count), seed)
    assert all((one == other).all() for one, other in zip(parts, again, strict=True))


@settings(deadline=None)
@given(
    groups=some.lists(some.integers(0, 9), min_size=1, max_size=200),
    fractions=some.lists(some.floats(0.05, 1.0), min_size=1, max_size=4),
    seed=some.integers(0, 99),
)
def test_no_group_is_in_two_parts(groups: list[int], fractions: list[float], seed: int) -> None:
    total = sum(fractions)
    ends = bounds_of([each / total for each in fractions], len(groups))
    numbered = np.unique(np.array(groups), return_inverse=True)[1].astype(np.int64)
    parts = split_groups(numbered, ends, seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(groups)))
    owners = [set(numbered[part].tolist()) for part in parts]
    assert sum(map(len, owners)) == len(set.union(*owners))
    assert all(owners) == (numbered.max() + 1 >= len(parts))  # a group for each part, if there are as many
    largest = np.bincount(numbered).max()
    for end, size in zip(ends.tolist(), np.cumsum([len(part) for part in parts]).tolist(), strict=True):
        assert abs(end - size) <= largest * len(parts)


def test_groups_are_dealt_where_their_middles_fall() -> None:
    groups = np.arange(1000) // 10
    for fractions in ((0.9, 0.1), (0.5, 0.25, 0.25)):
        parts = split_groups(groups, bounds_of(fractions, 1000), 0)
        assert all(abs(len(part) - 1000 * share) <= 10 for part, share in zip(parts, fractions, strict=True))


def test_counts_are_met_exactly_and_may_leave_samples_out() -> None:
    parts = split_rows(100, bounds_of([30, 5], 100), 0)
    assert [len(part) for part in parts] == [30, 5]
    assert [len(part) for part in split_rows(10, bounds_of([0.25], 10), 0)] == [2]
    assert [len(part) for part in split_rows(10, bounds_of([0.7, 0.2, 0.1], 10), 0)] == [7, 2, 1]


def test_another_seed_gives_other_parts_and_the_parts_of_a_seed_never_change() -> None:
    ends = bounds_of([0.5], 1000)
    assert split_rows(1000, ends, 0)[0].tolist() != split_rows(1000, ends, 1)[0].tolist()
    golden = [2, 5, 6, 9, 10, 11]
    assert split_rows(12, bounds_of([0.5, 0.5], 12), 7)[0].tolist() == golden  # what users' runs were split into


def test_samples_without_a_value_are_one_group() -> None:
    column = pa.chunked_array([[5, None], [5, 7, None]])
    groups = groups_of(column).tolist()
    assert groups[0] == groups[2]
    assert groups[1] == groups[4]
    assert len({groups[0], groups[1], groups[3]}) == 3


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((), "give the size of each part"),
        ((0.9, 0.2), "add up to 1.1"),
        ((8, 5), "13 samples in all, but the dataset has 12"),
        ((0.5, 3), "either fractions or numbers of samples"),
        ((0.5, 0.0), "above 0"),
        ((-1,), "above 0"),
        ((float("nan"),), "above 0"),
        ((True,), "sizes are fractions"),
        (("0.5",), "sizes are fractions"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bounds_of(sizes, 12)
