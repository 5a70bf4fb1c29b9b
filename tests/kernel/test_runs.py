"""Requests that a read of extents makes: every byte once in its place, in runs of a bounded size."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.origin.base import Extent
from quiver.origin.runs import GAP_BYTES_MAX, RUN_BYTES_MAX, coalesce

OBJECTS = {name: bytes((at * step + step) % 251 for at in range(60_000)) for step, name in enumerate("ab", 3)}
extents = st.lists(st.builds(Extent, st.sampled_from("ab"), st.integers(0, 50_000), st.integers(0, 9_000)), max_size=12)


@settings(max_examples=100)
@given(extents)
def test_every_extent_comes_whole_and_in_its_place(wanted: list[Extent]) -> None:
    out = bytearray(sum(extent.length for extent in wanted))
    for run in coalesce(wanted):
        got = OBJECTS[run.path][run.start : run.end]
        assert len(got) == run.end - run.start
        for start, length, target in run.cuts:
            assert start + length <= len(got)
            out[target : target + length] = got[start : start + length]
    assert out == b"".join(OBJECTS[each.path][each.offset : each.offset + each.length] for each in wanted)


@settings(max_examples=50)
@given(extents)
def test_little_is_read_that_nobody_wants(wanted: list[Extent]) -> None:
    read = sum(run.end - run.start for run in coalesce(wanted))
    assert read <= sum(extent.length for extent in wanted) + GAP_BYTES_MAX * len(wanted)


def test_a_large_extent_is_split_and_its_last_byte_is_the_end_of_the_last_run() -> None:
    length = 3 * RUN_BYTES_MAX + 1
    runs = coalesce([Extent("a", 7, length)])
    assert [(run.start, run.end) for run in runs] == [
        (7 + at, min(7 + at + RUN_BYTES_MAX, 7 + length)) for at in range(0, length, RUN_BYTES_MAX)
    ]
    assert all(run.end - run.start <= RUN_BYTES_MAX for run in runs)


def test_neighbours_share_a_request_and_distant_ones_do_not() -> None:
    near = [Extent("a", 0, 10), Extent("a", 10 + GAP_BYTES_MAX, 10)]
    assert [(run.start, run.end) for run in coalesce(near)] == [(0, 20 + GAP_BYTES_MAX)]
    far = [Extent("a", 0, 10), Extent("a", 11 + GAP_BYTES_MAX, 10), Extent("b", 5, 5)]
    assert len(coalesce(far)) == 3
