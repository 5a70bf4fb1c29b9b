"""Bytes that lie anywhere, copied together or hashed: what slicing gives, by native code and by Python."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.store import OpenFile
from quiver_client import native
from quiver_client.buffers import JOINED_BYTES, SMALL_BYTES_MAX, Buffer, copy_each, copy_rows, xxh3_64

contents = st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=6)


@pytest.fixture(scope="module", params=["native", "python"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test twice."""
    if request.param == "native" and native.pieces is None:
        pytest.skip("no native code was built where these tests run: it takes a C compiler")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setattr(native, "pieces", None)
        yield


@settings(deadline=None)
@given(contents=contents, cuts=st.lists(st.tuples(st.integers(0), st.integers(0)), max_size=40), length=st.integers(0))
def test_what_is_gathered_out_of_many_buffers_is_what_slicing_gives(
    contents: list[bytes], cuts: list[tuple[int, int]], length: int
) -> None:
    length %= min(map(len, contents)) + 1
    buffers = [Buffer.of(bytearray(content)) for content in contents]
    which = [one % len(buffers) for one, _ in cuts]
    at = [start % (len(contents[one]) - length + 1) for one, (_, start) in zip(which, cuts, strict=True)]
    rows, _ = copy_rows(buffers, np.asarray(which, np.intp), np.asarray(at, np.int64), length)
    assert rows.shape == (len(cuts), length)
    assert rows.dtype == np.uint8
    assert [row.tobytes() for row in rows] == [
        contents[one][start : start + length] for one, start in zip(which, at, strict=True)
    ]


@pytest.mark.parametrize("longest", [0, 1, 300, SMALL_BYTES_MAX, 2 * SMALL_BYTES_MAX])
@pytest.mark.parametrize("count", [0, 1, 30, 500])
def test_what_is_taken_is_what_slicing_gives(count: int, longest: int, tmp_path: Path) -> None:
    """Of mapped files and of other memory, of all lengths: none, some that are copied together, larger ones."""
    rng = np.random.default_rng(count + longest)
    contents = [rng.bytes(JOINED_BYTES), rng.bytes(3 * mmap.PAGESIZE + longest), rng.bytes(longest + 5), b"short"]
    for at, content in enumerate(contents):
        (tmp_path / str(at)).write_bytes(content)
    buffers = [Buffer.of(OpenFile(tmp_path / str(at)).map(), mapped=True) for at in range(4)] + [Buffer.of(contents[1])]
    contents.append(contents[1])
    for sources in ([0, 1], [4], [0, 1, 2, 3, 4]):
        which = rng.choice(sources, count)
        sizes = np.asarray([len(content) for content in contents])[which]
        lengths = np.minimum(rng.integers(-1, longest + 1, count), sizes)
        starts = (rng.random(count) * (sizes - np.maximum(lengths, 0) + 1)).astype(np.int64)
        cuts = zip(which.tolist(), starts.tolist(), lengths.tolist(), strict=True)
        expected = [None if length < 0 else contents[at][start : start + length] for at, start, length in cuts]
        assert list(copy_each(buffers, which, starts, lengths)) == expected


@settings(deadline=None)
@given(contents=contents, cuts=st.lists(st.tuples(st.integers(0), st.integers(0), st.integers(0)), max_size=40))
def test_the_hashes_of_pieces_of_many_buffers_are_those_of_slices(
    contents: list[bytes], cuts: list[tuple[int, int, int]]
) -> None:
    buffers = [Buffer.of(bytearray(content)) for content in contents]
    which = [one % len(buffers) for one, _, _ in cuts]
    at = [start % (len(contents[one]) + 1) for one, (_, start, _) in zip(which, cuts, strict=True)]
    lengths = [
        length % (len(contents[one]) - start + 1) for one, start, (_, _, length) in zip(which, at, cuts, strict=True)
    ]
    found, _ = xxh3_64(buffers, np.asarray(which, np.intp), np.asarray(at, np.int64), np.asarray(lengths, np.int64))
    assert found.dtype == np.uint64
    assert found.tolist() == [
        xxhash.xxh3_64_intdigest(contents[one][start : start + length])
        for one, start, length in zip(which, at, lengths, strict=True)
    ]


@pytest.mark.parametrize("size", [4096, 110_000, 3 << 20])
def test_the_hashes_of_larger_pieces_are_those_of_slices(size: int) -> None:
    content = np.random.default_rng(1).bytes(size + 7)
    starts = np.arange(8)[::-1]  # as columns of larger arrays come: not contiguous
    found, _ = xxh3_64([Buffer.of(content)], np.zeros(8, np.intp), starts, np.full(8, size))
    assert found.tolist() == [xxhash.xxh3_64_intdigest(content[start : start + size]) for start in starts.tolist()]


def test_what_was_gathered_is_a_copy_that_may_be_written_to() -> None:
    content = np.arange(100, dtype=np.uint8)
    rows, _ = copy_rows([Buffer.of(content)], np.zeros(2, np.intp), np.zeros(2, np.int64), 10)
    rows[0] = 7
    assert rows[1].tolist() == list(range(10)), "equal addresses give rows of their own"
    assert content[:10].tolist() == list(range(10))
    content[:] = 9
    assert rows[1].tolist() == list(range(10))


def test_the_first_and_the_last_bytes_of_a_mapped_file_are_within_reach(tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(3 * mmap.PAGESIZE)  # its end is that of the map: what is past it is fatal
    (tmp_path / "shard").write_bytes(content)
    buffer = Buffer.of(OpenFile(tmp_path / "shard").map())
    for length in (1, 100, len(content)):
        rows, _ = copy_rows([buffer], np.zeros(2, np.intp), np.asarray([0, len(content) - length]), length)
        assert [row.tobytes() for row in rows] == [content[:length], content[-length:]]


@pytest.mark.parametrize("length", [100, SMALL_BYTES_MAX, SMALL_BYTES_MAX + 1, 150_528, 1 << 20])
def test_buffers_far_apart_in_memory_are_read_as_one(tmp_path: Path, length: int) -> None:
    """The heap and what is mapped are some 2^45 bytes apart, and an array has 2^62 bytes at most, all rows counted."""
    content = np.random.default_rng(0).bytes(length)
    (tmp_path / "shard").write_bytes(content)
    mapped = Buffer.of(OpenFile(tmp_path / "shard").map())
    heap = Buffer.of(bytearray(content[::-1]))
    held = [Buffer.of(bytearray(64)) for _ in range(100)]  # some of small ones are on the heap
    heap_or_not = min([heap, *held], key=lambda buffer: buffer.address)
    size = min(len(heap_or_not.view), length)
    rows, _ = copy_rows([mapped, heap], np.asarray([0, 1], np.intp), np.zeros(2, np.int64), length)
    assert [row.tobytes() for row in rows] == [content, content[::-1]]
    rows, _ = copy_rows([mapped, heap_or_not], np.asarray([0, 1], np.intp), np.zeros(2, np.int64), size)
    assert rows[0].tobytes() == content[:size]


@pytest.mark.parametrize(
    ("start", "length"), [(-1, 2), (0, 11), (10, 1), (3, 8), (2**63 - 5, 10), (2**62, 2**62), (0, 2**63 - 1)]
)
def test_nothing_is_read_outside_a_buffer(start: int, length: int) -> None:
    buffers, which = [Buffer.of(b"0123456789")], np.zeros(1, np.intp)
    with pytest.raises(IndexError):
        copy_rows(buffers, which, np.asarray([start]), length)
    with pytest.raises(IndexError):
        xxh3_64(buffers, which, np.asarray([start]), np.asarray([length]))


def test_what_does_not_fit_together_is_refused() -> None:
    buffers, two = [Buffer.of(b"0123456789")], np.zeros(2, np.int64)
    for which, starts, lengths in (
        (np.zeros(2, np.intp), two[:1], two),
        (np.zeros(2, np.intp), two, two[:1]),
        (np.full(2, -1), two, two),
        (np.zeros((2, 1), np.intp), two[:, None], two[:, None]),
    ):
        with pytest.raises(IndexError):
            xxh3_64(buffers, which, starts, lengths)
    with pytest.raises(TypeError, match="uint64"):
        copy_rows(buffers, np.zeros(2, np.intp), two.astype(np.uint64), 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="int32"):
        xxh3_64(buffers, np.zeros(2, np.intp), two, two.astype(np.int32))  # type: ignore[arg-type]


def test_no_length_is_taken_from_the_end() -> None:
    with pytest.raises(IndexError):
        xxh3_64([Buffer.of(b"0123456789")], np.zeros(1, np.intp), np.asarray([5]), np.asarray([-1]))


@pytest.mark.parametrize(
    "data", [b"abc", bytearray(b"abc"), memoryview(b"xabc")[1:], np.asarray([25185, 99], "<u2"), np.empty((2, 0)), b""]
)
def test_a_buffer_of_anything_holds_its_bytes_and_keeps_them(data: Any) -> None:
    buffer = Buffer.of(data)
    expected = data.tobytes() if hasattr(data, "tobytes") else bytes(data)
    assert bytes(buffer.view) == expected
    del data
    if expected:
        rows, _ = copy_rows([buffer], np.zeros(1, np.intp), np.zeros(1, np.int64), len(expected))
        assert rows[0].tobytes() == expected
    else:
        assert buffer.address == 0
