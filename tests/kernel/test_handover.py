"""The messages of a drain: they come back as they went, and whatever else arrives is refused in one line."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.digest import Digest
from quiver.errors import BadRequest
from quiver.handover import ASKED_MAX, HOLDERS_MAX, OFFERED_MAX, HandoverAnswer, HandoverRequest, Taken

DIGESTS = st.lists(st.binary(min_size=32, max_size=32).map(Digest), unique=True, max_size=5).map(tuple)


def digests(count: int) -> tuple[Digest, ...]:
    return tuple(Digest(number.to_bytes(32, "big")) for number in range(count))


@given(shards=DIGESTS, manifests=DIGESTS, take=st.booleans(), wait_ms=st.integers(0, 1000))
def test_a_request_comes_back_as_it_went(
    shards: tuple[Digest, ...], manifests: tuple[Digest, ...], take: bool, wait_ms: int
) -> None:
    sizes = tuple(range(1, len(shards) + 1)) if take else ()
    holder_of = tuple(at % 3 for at in range(len(shards)))
    request = HandoverRequest("a", shards, sizes, manifests, take, wait_ms, ("10.0.0.1", "tenant x"), holder_of)
    assert HandoverRequest.decode(request.encode()) == request
    assert [request.holder(at) for at in range(len(shards))] == [("", "10.0.0.1", "tenant x")[it] for it in holder_of]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        pytest.param(*case, id=what)
        for what, case in {
            "a giver that is no node": (HandoverRequest("http://evil/"), "node id"),
            "too many to take": (HandoverRequest("a", digests(OFFERED_MAX + 1), take=True), "at most"),
            "too many to ask": (HandoverRequest("a", digests(ASKED_MAX + 1)), "at most"),
            "one twice": (HandoverRequest("a", digests(1) * 2), "once"),
            "no sizes": (HandoverRequest("a", digests(1), take=True), "sizes"),
            "a holder that is missing": (HandoverRequest("a", digests(1), holder_of=(1,)), "accounts"),
            "too many holders": (HandoverRequest("a", holders=("x",) * (HOLDERS_MAX + 1)), "accounts"),
            "a holder with a line feed": (HandoverRequest("a", holders=("x\ny",)), "printable"),
        }.items()
    ],
)
def test_a_request_past_a_limit_is_refused(wrong: HandoverRequest, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        HandoverRequest.decode(wrong.encode())


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(body: bytes) -> None:
    for parse in (HandoverRequest.decode, lambda data: HandoverAnswer.decode(data, HandoverRequest("a"))):
        try:
            parse(body)
        except BadRequest:
            continue


def test_an_answer_says_one_thing_of_each_file() -> None:
    request = HandoverRequest("a", digests(2), manifests=digests(1))
    answer = HandoverAnswer(bytes([Taken.HELD, Taken.NO_ROOM]), bytes([Taken.PENDING]))
    assert HandoverAnswer.decode(answer.encode(), request) == answer
    for wrong in (HandoverAnswer(b"\0", b"\0"), HandoverAnswer(b"\0\0", b""), HandoverAnswer(b"\0\xff", b"\0")):
        with pytest.raises(BadRequest):
            HandoverAnswer.decode(wrong.encode(), request)


def test_fields_of_later_versions_are_ignored_and_missing_ones_have_defaults() -> None:
    body = msgspec.msgpack.encode({"giver": "a", "from_a_later_version": [1]})
    assert HandoverRequest.decode(body) == HandoverRequest("a")
