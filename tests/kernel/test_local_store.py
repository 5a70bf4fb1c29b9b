"""Neighbours in a file are read by one call; what comes of it is what reading them one by one gives."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from quiver.errors import Changed
from quiver.location import Location
from quiver.origin import local
from quiver.origin.base import Extent
from quiver.origin.local import GAP_BYTES_MAX, PIECES_MAX, LocalStore

SIZE = 4 << 20


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    data = np.random.default_rng(0).bytes(SIZE)
    (tmp_path / "data.tar").write_bytes(data)
    return data


def read(folder: Path, ranges: list[tuple[int, int]]) -> tuple[bytes, int]:
    out = memoryview(bytearray(b"\xaa" * sum(length for _, length in ranges)))
    done = LocalStore(Location.parse(folder.as_uri())).read([Extent("data.tar", *each) for each in ranges], out)
    return bytes(out), done


CASES = {
    "back to back": [(1000 * i, 1000) for i in range(50)],
    "headers between": [(1024 * i + 512, 500) for i in range(3 * PIECES_MAX)],
    "the largest gap, and one byte more": [(0, 10), (10 + GAP_BYTES_MAX, 10), (21 + 2 * GAP_BYTES_MAX, 10)],
    "backwards": [(9000, 100), (5000, 100), (0, 100)],
    "overlapping": [(0, 100), (50, 100), (50, 100)],
    "empty samples": [(0, 0), (0, 5), (5, 0), (5, 5), (SIZE, 0)],
    "one": [(7, 77)],
    "up to the end": [(SIZE - 2000, 1000), (SIZE - 1000, 1000)],
}


@pytest.mark.parametrize("case", CASES)
def test_reading_runs_gives_what_reading_pieces_gives(tmp_path: Path, content: bytes, case: str) -> None:
    ranges = CASES[case]
    assert read(tmp_path, ranges)[0] == b"".join(content[offset : offset + length] for offset, length in ranges)


def test_random_ranges_are_what_the_file_has_there(tmp_path: Path, content: bytes) -> None:
    rng = np.random.default_rng(1)
    for _ in range(30):
        gaps, lengths = rng.integers(0, 2 * GAP_BYTES_MAX, 40), rng.integers(0, 3000, 40)
        starts = np.cumsum(gaps + lengths) - lengths
        ranges = list(zip(starts.tolist(), lengths.tolist(), strict=True))
        assert read(tmp_path, ranges)[0] == b"".join(content[at : at + length] for at, length in ranges)


@pytest.mark.usefixtures("content")
def test_the_gaps_that_are_read_are_counted(tmp_path: Path) -> None:
    assert read(tmp_path, [(512, 100), (1024, 100), (100_000, 100)])[1] == 612 + 100


@pytest.mark.usefixtures("content")
def test_a_file_that_became_shorter_is_changed_wherever_it_ends(tmp_path: Path) -> None:
    for end in (0, 300, 900, 1100, 2047):
        os.truncate(tmp_path / "data.tar", end)
        with pytest.raises(Changed, match="became shorter"):
            read(tmp_path, [(0, 500), (512, 500), (1048, 1000)])
        (tmp_path / "data.tar").write_bytes(bytes(4096))


def test_a_call_that_falls_short_is_completed_piece_by_piece(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.preadv

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        return whole(fd, [buffers[0][: max(len(buffers[0]) // 2, 1)]], offset)

    monkeypatch.setattr(local.os, "preadv", short)
    ranges = [(1024 * i + 512, 500) for i in range(20)]
    assert read(tmp_path, ranges)[0] == b"".join(content[offset : offset + length] for offset, length in ranges)


def test_a_run_takes_one_call(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    whole = os.preadv

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return whole(fd, buffers, offset)

    monkeypatch.setattr(local.os, "preadv", counted)
    ranges = [(1024 * i + 512, 500) for i in range(PIECES_MAX + 1)]
    assert read(tmp_path, ranges)[0] == b"".join(content[offset : offset + length] for offset, length in ranges)
    assert len(calls) == 2
