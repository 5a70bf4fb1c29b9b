"""Digests and sizes: what is read from people and from the wire is well formed or refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quiver.digest import Digest
from quiver.errors import BadRequest, Misconfigured
from quiver.sizes import format_decimal, format_rate, format_size, parse_size

GOOD = "0123456789abcdef" * 4
HOSTILE = {
    "empty": "",
    "63 digits": GOOD[:-1],
    "65 digits": GOOD + "0",
    "upper case": GOOD.upper(),
    "one upper case": GOOD[:-1] + "F",
    "newline at the end": GOOD + "\n",
    "newline for the last": GOOD[:-1] + "\n",
    "NUL": GOOD[:-1] + "\0",
    "space": " " + GOOD[1:],
    "traversal": "../" * 21 + "a",
    "absolute": "/" + GOOD[1:],
    "slash inside": GOOD[:31] + "/" + GOOD[32:],
    "Arabic digits": "٣" * 64,
    "full-width digits": "\uff10" * 64,
    "0x": "0x" + GOOD[2:],
    "underscore": GOOD[:10] + "_" + GOOD[11:],
    "plus": "+" + GOOD[1:],
    "g": "g" * 64,
    "surrogate": "\ud800" * 64,
}


@pytest.mark.fault("S2")
@pytest.mark.parametrize("text", HOSTILE.values(), ids=list(HOSTILE))
def test_what_is_not_64_lower_case_digits_is_no_digest(text: str) -> None:
    with pytest.raises(BadRequest, match="64 lower-case"):
        Digest.parse(text)


@pytest.mark.fault("S2")
@given(st.text(max_size=80))
def test_any_text_is_a_digest_or_refused(text: str) -> None:
    try:
        assert str(Digest.parse(text)) == text
    except BadRequest:
        assert len(text) != 64 or set(text) - set("0123456789abcdef")


@given(st.binary(min_size=32, max_size=32))
def test_a_digest_survives_its_text_form(raw: bytes) -> None:
    digest = Digest(raw)
    assert Digest.parse(str(digest)) == digest == raw
    assert hash(digest) == hash(raw)


@pytest.mark.fault("S2")
@given(st.binary(max_size=64).filter(lambda raw: len(raw) != 32))
def test_other_than_32_bytes_are_no_digest(raw: bytes) -> None:
    with pytest.raises(BadRequest, match="32 bytes"):
        Digest(raw)


def test_the_representation_of_a_digest_does_not_tell_it() -> None:
    digest = Digest.of(b"secret")
    assert str(digest) not in repr(digest)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4096", 4096),
        ("1B", 1),
        ("32MiB", 32 << 20),
        ("32 MiB", 32 << 20),
        (" 200GiB ", 200 << 30),
        ("2TB", 2 * 10**12),
        ("1.5TB", 15 * 10**11),
        ("1k", 1024),
        ("1kb", 1000),
        ("3gib", 3 << 30),
        ("1PiB", 1 << 50),
        (77, 77),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1GiB",
        "0",
        "0GiB",
        "1XB",
        "1 G i B",
        "1iB",
        "1e9",
        "nan",
        "inf",
        "1,5GB",
        "\u0661GiB",
        "0.0001B",
        0,
        -5,
    ],
    ids=repr,
)
def test_what_is_no_size_is_refused_with_an_example(text: str | int) -> None:
    with pytest.raises(Misconfigured, match=r"200GiB|positive"):
        parse_size(text)


@given(st.text(max_size=30))
def test_any_text_is_a_positive_size_or_refused(text: str) -> None:
    with contextlib.suppress(Misconfigured):
        assert parse_size(text) > 0


@given(st.integers(1, 1 << 60))
@example(1023 << 10)
def test_a_size_survives_being_shown_to_three_digits(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes).replace(",", "")) == pytest.approx(size_bytes, rel=0.006)
    assert parse_size(format_decimal(size_bytes).replace(",", "")) == pytest.approx(size_bytes, rel=0.006)


@pytest.mark.parametrize(
    ("rate", "shown"),
    [
        (0.5, "0.5 B/s"),
        (999.6, "1 kB/s"),
        (4.8e6, "4.8 MB/s"),
        (1e12, "1 TB/s"),
        (2e15, "2,000 TB/s"),
    ],
)
def test_a_rate_is_shown_as_bandwidth_is_stated(rate: float, shown: str) -> None:
    assert format_rate(rate) == shown
