"""What a process says of itself with its reads: what travels, and what is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.errors import BadRequest
from quiver.identity import NAME_BYTES_MAX, Identity, check_name
from quiver.introduction import READER_BYTES, TEXT_BYTES_MAX, Introduction

ID = "ab" * READER_BYTES


def is_shown(name: str) -> bool:
    try:
        check_name("", name)
    except ValueError:
        return False
    return True


names = st.text(max_size=NAME_BYTES_MAX).filter(is_shown)


@given(st.binary(min_size=READER_BYTES, max_size=READER_BYTES), names, names, names, names, st.booleans())
def test_every_name_that_may_be_shown_travels_in_a_header(
    reader: bytes, job: str, group: str, tenant: str, dataset: str, follows: bool
) -> None:
    said = Introduction(reader, Identity(job, group, tenant), dataset, follows)
    text = said.encode()
    assert len(text) <= TEXT_BYTES_MAX
    assert text.isascii()
    assert text.isprintable()
    assert Introduction.parse(text) == said


def test_what_a_later_version_adds_is_ignored() -> None:
    assert Introduction.parse(f"id={ID}&job=a&colour=red") == Introduction(bytes.fromhex(ID), Identity("a"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "job=a",
        "id=ab",
        f"id={ID.upper()}",
        f"id={ID}&job",
        f"id={ID}&job=a%0ab",
        f"id={ID}&tenant={'x' * 129}",
        f"id={ID}&job=%ff",
        f"id={ID}&dataset=%E2%80%AEevil",
        "&".join([f"id={ID}", *(f"x{i}=1" for i in range(20))]),
        f"id={ID}&job={'x' * TEXT_BYTES_MAX}",
    ],
)
def test_a_malformed_header_is_refused(text: str) -> None:
    with pytest.raises(BadRequest):
        Introduction.parse(text)


@given(st.text(max_size=200))
def test_no_header_raises_anything_else(text: str) -> None:
    with contextlib.suppress(BadRequest):
        Introduction.parse(text)
