"""The shard verifies itself: whatever byte is wrong is found, and where a sample is wrong it is named."""

from __future__ import annotations

import struct

import blake3
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.digest import Digest
from quiver.errors import Corrupt
from quiver.shard import table_bytes, verified
from tests.support.data import make_shard

samples = st.lists(st.binary(max_size=200), min_size=1, max_size=12)


def test_the_name_is_the_hash_that_the_format_says() -> None:
    parts = [b"first", b"", b"third sample"]
    table = b"".join(blake3.blake3(part).digest() + struct.pack("<Q", len(part)) for part in parts)
    table += struct.pack("<Q", len(parts))
    digest, data = make_shard(parts)
    assert data == b"".join(parts) + table
    assert digest == blake3.blake3(b"quiver-shard-v1" + table).digest()
    assert len(table) == table_bytes(3)


@given(samples)
def test_what_was_encoded_verifies(parts: list[bytes]) -> None:
    digest, data = make_shard(parts)
    assert bytes(verified(digest, data, "test").data) == data


@pytest.mark.fault("S1")
@given(samples, st.data())
def test_any_flipped_bit_is_found_and_a_sample_that_has_it_is_named(parts: list[bytes], draw: st.DataObject) -> None:
    digest, data = make_shard(parts)
    at = draw.draw(st.integers(0, len(data) * 8 - 1))
    wrong = bytearray(data)
    wrong[at // 8] ^= 1 << at % 8
    with pytest.raises(Corrupt) as caught:
        verified(digest, wrong, "the test")
    assert str(caught.value).startswith("the test: ")
    end = 0
    for number, part in enumerate(parts):
        start, end = end, end + len(part)
        if start <= at // 8 < end:
            assert caught.value.positions == (number,)


@pytest.mark.fault("S1")
@given(samples, st.data())
def test_any_truncation_and_any_extension_is_found(parts: list[bytes], draw: st.DataObject) -> None:
    digest, data = make_shard(parts)
    for wrong in (
        data[: draw.draw(st.integers(0, len(data) - 1))],
        data + draw.draw(st.binary(min_size=1, max_size=99)),
    ):
        with pytest.raises(Corrupt):
            verified(digest, wrong, "test")


@pytest.mark.fault("S1")
@given(st.binary(max_size=300))
def test_garbage_is_no_shard(data: bytes) -> None:
    with pytest.raises(Corrupt):
        verified(Digest.of(b"some other"), data, "test")


@pytest.mark.fault("S1")
@settings(max_examples=30)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_a_table_that_hashes_right_and_lies_is_refused(first: int, second: int) -> None:
    """A hostile writer names its shard correctly: lengths that overflow when summed must not get through."""
    body = b"0123456789"
    rows = b"".join(blake3.blake3(b"").digest() + struct.pack("<Q", length) for length in (first, second))
    table = rows + struct.pack("<Q", 2)
    digest = Digest(blake3.blake3(b"quiver-shard-v1" + table).digest())
    with pytest.raises(Corrupt):
        verified(digest, body + table, "test")


@pytest.mark.parametrize("count", [1, 2**32, 2**60, 2**64 - 1])
def test_a_count_beyond_the_data_is_refused(count: int) -> None:
    with pytest.raises(Corrupt, match="claims"):
        verified(Digest.of(b""), b"x" * 20 + struct.pack("<Q", count), "test")


def test_samples_that_change_places_are_found() -> None:
    digest, data = make_shard([b"aaaa", b"bbbb"])
    with pytest.raises(Corrupt) as caught:
        verified(digest, b"bbbbaaaa" + data[8:], "test")
    assert caught.value.positions == (0, 1)


@pytest.mark.fault("C2", "N1")
def test_the_bytes_of_another_shard_are_not_those_of_this_one() -> None:
    """Both are whole and right in themselves: only the name tells them apart."""
    digest, data = make_shard([b"aaaa", b"bbbb"])
    other, other_data = make_shard([b"aaaa", b"cccc"])
    assert bytes(verified(digest, data, "test").data) == data
    assert bytes(verified(other, other_data, "test").data) == other_data
    with pytest.raises(Corrupt, match="name"):
        verified(digest, other_data, "test")
