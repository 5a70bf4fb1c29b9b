"""Finding a digest among many: as a dictionary does, whatever stands in the digests."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.digest import Digest
from quiver.lookup import DigestRows, as_rows

# Few distinct bytes, so that prefixes are shared, and zeros at the end, which some of numpy's strings lose.
digests = st.lists(st.sampled_from([b"\0", b"\1", b"\xff"]), min_size=32, max_size=32).map(b"".join).map(Digest)
alike = st.integers(0, 2**16 - 1).map(lambda number: Digest(bytes(30) + number.to_bytes(2, "big")))


@given(st.lists(digests | alike, unique=True, max_size=30), st.lists(digests | alike, max_size=5), st.data())
def test_a_digest_is_found_where_a_dictionary_has_it(
    names: list[Digest], others: list[Digest], data: st.DataObject
) -> None:
    rows, expected = DigestRows(as_rows(names)), {name: row for row, name in enumerate(names)}
    assert dict(rows) == expected
    assert list(rows) == names
    asked = [*names, *others]
    assert [rows.get(name, -1) for name in asked] == [expected.get(name, -1) for name in asked]
    assert rows.rows_of(as_rows(asked)).tolist() == [expected.get(name, -1) for name in asked]
    kept = np.array([data.draw(st.booleans()) for _ in names], bool)
    left = [name for name, stays in zip(names, kept, strict=True) if stays]
    assert dict(rows.only(kept)) == {name: row for row, name in enumerate(left)}
    assert rows.only(kept).rows_of(as_rows(asked)).tolist() == [
        left.index(name) if name in left else -1 for name in asked
    ]


@given(st.lists(alike, unique=True, min_size=1, max_size=200), st.lists(digests | alike, max_size=5))
def test_a_few_digests_are_found_among_many_that_are_alike(names: list[Digest], others: list[Digest]) -> None:
    rows, expected = DigestRows(as_rows(names)), {name: row for row, name in enumerate(names)}
    for asked in ([names[-1]], others, names):
        assert rows.rows_of(as_rows(asked)).tolist() == [expected.get(name, -1) for name in asked]
        assert rows.among(asked) == expected.keys() & set(asked)


def test_a_lookup_takes_little_memory_and_no_longer_for_digests_chosen_to_be_alike() -> None:
    names = np.zeros((200_000, 32), np.uint8)
    names[:, 28:] = np.arange(200_000, dtype=">u4").view(np.uint8).reshape(-1, 4)
    tracemalloc.start()
    rows = DigestRows(names)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 13 * len(names)
    looked_at = 0

    class Watched(np.ndarray[tuple[int, int], np.dtype[np.uint8]]):
        def __getitem__(self, key: object) -> object:  # type: ignore[override]
            nonlocal looked_at
            looked_at += 1
            return super().__getitem__(key)  # type: ignore[index]

    rows.digests = names.view(Watched)
    assert rows[Digest(names[199_999].tobytes())] == 199_999
    assert looked_at < 25, "bisection, not a walk along those that are alike"
    with pytest.raises(KeyError):
        rows[Digest(b"\1" * 32)]
