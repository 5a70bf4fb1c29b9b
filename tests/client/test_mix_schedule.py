"""How many samples of each part a batch of a mixture has, and which weights that follows from: pure functions."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from quiver_client.loader.mix.guided import Guided, Losses, rms
from quiver_client.loader.mix.schedule import (
    Schedule,
    in_units,
    interleaved,
    placed_after,
    samples_for,
    spread,
    tempered,
    weights_of,
)

weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e3), st.integers(1, 9)), min_size=1, max_size=9)
sizes = st.lists(st.one_of(st.integers(1, 3), st.integers(1, 300)), min_size=1, max_size=60)


def parts_of(values: list[Any]) -> dict[str, int]:
    return {str(at): 10 for at in range(len(values))}


@given(weights, sizes)
def test_each_part_is_less_than_one_sample_from_its_share_after_every_batch(
    values: list[float], batches: list[int]
) -> None:
    assume(any(values))
    schedule = Schedule.fresh(weights_of(values, parts_of(values)))
    exact = [Fraction(repr(float(value))) for value in values]
    exact = [value / sum(exact) for value in exact]
    given, total = [0] * len(values), 0
    for size in batches:
        counts = schedule.counts(size)
        assert sum(counts) == size
        assert min(counts) >= 0
        schedule = schedule.after(counts)
        given, total = [sum(each) for each in zip(given, counts, strict=True)], total + size
        for value, count in zip(exact, given, strict=True):
            assert abs(value * total - count) < 1
            assert count == 0 or value  # a part of weight 0 is never drawn


@given(weights, st.integers(1, 6), st.integers(1, 40))
def test_a_part_has_given_its_share_when_the_epoch_that_is_as_long_as_its_pass_ends(
    values: list[float], size: int, share: int
) -> None:
    assume(any(values))
    schedule = Schedule.fresh(weights_of(values, parts_of(values)))
    at = max(range(len(values)), key=values.__getitem__)
    needed = samples_for(schedule.weights[at], schedule.unit, share)
    given = 0
    while needed:
        counts = schedule.counts(min(size, needed))
        schedule = schedule.after(counts)
        given, needed = given + counts[at], needed - sum(counts)
    assert given >= share


@given(st.lists(weights, min_size=2, max_size=6), st.integers(1, 50))
def test_counts_carry_over_to_other_weights(changes: list[list[float]], size: int) -> None:
    parts = max(map(len, changes))
    schedule = Schedule.fresh(in_units([1.0] * parts))
    for values in changes:
        padded = [float(value) + 0.01 for value in values] + [0.01] * (parts - len(values))
        schedule = Schedule(in_units(padded), schedule.deficits)
        for _ in range(3):
            counts = schedule.counts(size)
            assert sum(counts) == size
            assert min(counts) >= 0
            schedule = schedule.after(counts)
            assert all(abs(each) < 2 * schedule.unit for each in schedule.deficits)


def test_decimal_weights_are_taken_as_they_are_written() -> None:
    assert weights_of([0.1, 0.7, 0.2], parts_of([1, 1, 1])) == (1, 7, 2)
    assert weights_of({"1": 2, "0": np.float32(0.5)}, parts_of([1, 1])) == (1, 4)
    assert samples_for(1, 10, 10) == 100


@given(st.dictionaries(st.text("ab", min_size=1), st.integers(1, 10**9), min_size=1), st.floats(0.2, 100))
@example({"a": 1, "aa": 1, "aaa": 198}, 0.5)
@example({"a": 1, "b": 782_405_021, "aa": 105_145_462, "aaa": 2}, 0.375)
def test_temperature_flattens_weights_and_keeps_their_order(sizes: dict[str, int], temperature: float) -> None:
    found = dict(zip(sizes, tempered(temperature, sizes), strict=True))
    by_size = sorted(sizes, key=sizes.__getitem__)
    assert all(found[less] <= found[more] + 1 for less, more in pairwise(by_size)), "equal ones may differ by a unit"
    by = tempered(1, sizes)
    assert [Fraction(each, sum(by)) for each in by] == [Fraction(n, sum(sizes.values())) for n in sizes.values()]
    if temperature >= 1 and len(sizes) > 1:
        ratio = found[by_size[-1]] / found[by_size[0]]
        assert ratio <= sizes[by_size[-1]] / sizes[by_size[0]] * 1.001


@given(weights, st.integers(0, 5000))
def test_largest_remainders_place_every_sample(values: list[float], samples: int) -> None:
    assume(any(values))
    found = weights_of(values, parts_of(values))
    counts = placed_after(found, samples)
    assert sum(counts) == samples
    assert all(abs(Fraction(w * samples, sum(found)) - n) < 1 for w, n in zip(found, counts, strict=True))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_parts_are_spread_evenly_over_a_batch(counts: list[int]) -> None:
    where = interleaved(counts)
    assert np.bincount(where, minlength=len(counts)).tolist() == counts
    half = where[: len(where) // 2]
    for part, count in enumerate(counts):
        assert abs(int((half == part).sum()) - count / 2) <= len(counts)
    values = [np.arange(count) + 100 * part for part, count in enumerate(counts)]
    assert sorted(spread(values).tolist()) == sorted(np.concatenate(values).tolist())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": 1}, "weights: 'b' has none"),
        ({"a": 1, "b": 1, "c": 1}, "weights: no part is called 'c'"),
        ([1], "give 2 numbers"),
        ("12", "give 2 numbers"),
        (3, "give 2 numbers"),
        ([1, -1], "'b' has -1; give a finite number"),
        ([1, float("nan")], "'b' has nan"),
        ([1, float("inf")], "'b' has inf"),
        ([1, "2"], "'b' has '2'"),
        ([1, None], "'b' has None"),
        ([True, 1], "'a' has True"),
        ([0, 0], "all are 0"),
        ([1, 1e-300], "'b' is hardly ever drawn"),
    ],
)
def test_wrong_weights_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^weights") as caught:
        weights_of(given, {"a": 1, "b": 1})
    assert message in str(caught.value)


@pytest.mark.parametrize("temperature", [0, -1, float("nan"), "2", True, None])
def test_wrong_temperatures_are_refused(temperature: Any) -> None:
    with pytest.raises(ValueError, match=r"^temperature="):
        tempered(temperature, {"a": 1, "b": 1})


# -- guided -----------------------------------------------------------------------------------------------------------

shares = st.floats(0.0, 1.0)
utilities = st.one_of(st.none(), st.floats(0, 1e6))


@given(
    st.lists(st.tuples(st.floats(1e-3, 1), utilities, shares), min_size=1, max_size=8),
    st.floats(1.0, 10.0),
    shares,
    shares,
)
@example([(0.5, 1.0, 0.0), (0.17, None, 0.6), (0.33, None, 0.0)], 3.7, 0.0, 1.0)  # little of it is resident at all
@example([(0.5, 0.0, 1.0), (0.1, 9.0, 1.0)], 2.0, 0.0, 0.0)
def test_guided_weights_stay_within_the_declared_bias_and_keep_their_floor(
    parts: list[tuple[float, float | None, float]], bias: float, explore: float, availability: float
) -> None:
    guided = Guided(bias=bias, explore=explore, availability=availability)
    total = sum(weight for weight, _, _ in parts)
    base = [weight / total for weight, _, _ in parts]
    found = guided.weights(base, [each for _, each, _ in parts], [each for _, _, each in parts])
    assert sum(found) == pytest.approx(1)
    for weight, before in zip(found, base, strict=True):
        assert before / bias * 0.999 <= weight <= before * bias * 1.001
        assert weight >= explore * before * 0.999


def test_a_part_with_a_higher_loss_or_more_resident_shards_is_drawn_more_often() -> None:
    guided = Guided(bias=4, explore=0, availability=0.5)
    by_loss = guided.weights([0.5, 0.5], [2.0, 1.0], [1, 1])
    assert by_loss == pytest.approx((2 / 3, 1 / 3))
    by_shards = guided.weights([0.5, 0.5], [1.0, 1.0], [1, 0])
    assert by_shards == pytest.approx((2 / 3, 1 / 3))
    unknown = guided.weights([0.5, 0.5], [None, 1.0], [1, 1])
    assert unknown == pytest.approx((0.5, 0.5))
    assert guided.weights([0.5, 0.5, 0.0], [9.0, 1.0, 9.0], [1, 1, 1])[2] == 0.0
    assert Guided(bias=1).weights([0.9, 0.1], [0.0, 9.0], [1, 1]) == pytest.approx((0.9, 0.1))


def test_losses_count_two_blocks_after_they_were_reported() -> None:
    losses = Losses(["a", "b"], Guided(window=2))
    for loss in (1.0, 3.0, 4.0):
        losses.add(0, "a", loss)
    losses.add(1, "b", 7.0)
    assert losses.utilities(1) == [None, None]
    assert losses.utilities(2) == [rms([3.0, 4.0]), None]
    again = Losses(["a", "b"], Guided(window=2))
    again.load(losses.state())
    assert again.utilities(3) == losses.utilities(3) == [rms([3.0, 4.0]), 7.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Guided(bias=0.5), "guided: bias=0.5"),
        (lambda: Guided(explore=2), "guided: explore=2"),
        (lambda: Guided(interval=0), "guided: interval=0"),
        (lambda: Guided(window=True), "guided: window=True"),
        (lambda: Guided(utility=3), "guided: utility=3"),  # type: ignore[arg-type]
        (lambda: Guided.of(3), "guided=3"),
        (lambda: Losses(["a"], Guided(utility=lambda losses: -1.0)), "guided: the utility of part 'a' is -1.0"),
    ],
)
def test_wrong_ways_to_be_guided_are_refused(make: Any, message: str) -> None:
    def use() -> None:
        made = make()
        made.add(0, "a", 1.0)
        made.utilities(2)

    with pytest.raises(ValueError, match=r"^guided") as caught:
        use()
    assert str(caught.value).startswith(message)
    assert Guided.of(None) is None
    assert Guided.of(False) is None
    assert Guided.of(True) == Guided()
