"""The wire: a request survives it, and whatever else comes over it is refused in bounded time and memory."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.digest import Digest
from quiver.errors import BadRequest
from quiver.ring import MEMBERS_MAX, REPLICAS_MAX, Member, Ring
from quiver.wire import (
    JSON_BYTES_MAX,
    RANGE,
    RANGES_MAX,
    READ_BYTES_MAX,
    READ_REQUEST_BYTES_MAX,
    SHARDS_REQUEST_BYTES_MAX,
    WAIT_MS_MAX,
    FillRequest,
    ForgoRequest,
    NodeStatus,
    RangeStatus,
    ReadRequest,
    RecheckRequest,
    RingView,
    ShardStatuses,
    decode_json,
    shards_in,
)

digests = st.binary(min_size=32, max_size=32).map(Digest)


def ranges_of(*rows: tuple[int, int, int]) -> np.ndarray:
    ranges = np.zeros(len(rows), RANGE)
    for at, row in enumerate(rows):
        ranges[at] = (row[0], 0, row[1], row[2])
    return ranges


@given(
    st.none() | digests.filter(any),
    st.lists(digests, min_size=1, max_size=5, unique=True),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2**64 - 1), st.integers(0, 1 << 20)), max_size=20),
    st.integers(0, WAIT_MS_MAX),
    st.integers(0, 1),
)
def test_a_read_request_survives_the_wire(
    manifest: Digest | None, shards: list[Digest], rows: list[tuple[int, int, int]], wait_ms: int, flags: int
) -> None:
    ranges = ranges_of(*((shard % len(shards), offset, length) for shard, offset, length in rows))
    sent = ReadRequest(manifest, tuple(shards), ranges, wait_ms, flags)
    got = ReadRequest.decode(sent.encode())
    assert (got.manifest, got.shards, got.wait_ms, got.flags) == (manifest, tuple(shards), wait_ms, flags)
    assert got.ranges.tobytes() == ranges.tobytes()


@settings(max_examples=300)
@given(st.binary(max_size=400))
def test_any_body_is_a_read_request_or_refused(body: bytes) -> None:
    for attempt in (body, b"QRD1" + body):
        with contextlib.suppress(BadRequest):
            ReadRequest.decode(attempt)


@given(st.data())
def test_a_request_cut_short_or_with_more_behind_it_is_refused(draw: st.DataObject) -> None:
    body = ReadRequest(None, (Digest.of(b"a"), Digest.of(b"b")), ranges_of((0, 1, 2), (1, 3, 4))).encode()
    cut = draw.draw(st.integers(0, len(body) - 1))
    for wrong in (body[:cut], body + b"\0"):
        with pytest.raises(BadRequest):
            ReadRequest.decode(wrong)


def head(shards: int, ranges: int, wait_ms: int = 0) -> bytes:
    return struct.pack("<4sIIII32s", b"QRD1", shards, ranges, wait_ms, 0, bytes(32))


@pytest.mark.parametrize(
    "body",
    [
        head(2**32 - 1, 2**32 - 1),
        head(RANGES_MAX + 1, 0) + bytes(32 * (RANGES_MAX + 1)),
        head(0, 1) + ranges_of((0, 0, 1)).tobytes(),
        head(1, 1) + bytes(32) + ranges_of((1, 0, 1)).tobytes(),
        head(1, 1) + bytes(32) + ranges_of((0, 0, READ_BYTES_MAX + 1)).tobytes(),
        head(1, 2) + bytes(32) + ranges_of((0, 0, READ_BYTES_MAX), (0, 0, READ_BYTES_MAX)).tobytes(),
        head(1, 1) + bytes(32) + ranges_of((0, 0, 2**64 - 1)).tobytes(),
        b"QRD2" + head(0, 0)[4:],
    ],
    ids=["counts", "shards", "no shard", "other shard", "one too long", "too long together", "overflow", "magic"],
)
@pytest.mark.fault("S4")
def test_a_request_that_breaks_a_limit_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        ReadRequest.decode(body)


@pytest.mark.fault("S4")
def test_the_largest_request_allowed_is_decoded_in_little_memory() -> None:
    ranges = np.zeros(RANGES_MAX, RANGE)
    shards = tuple(Digest.of(b"%d" % number) for number in range(RANGES_MAX))
    body = ReadRequest(None, shards, ranges).encode()
    assert ReadRequest.shards_named(body) == RANGES_MAX
    del shards
    assert len(body) == READ_REQUEST_BYTES_MAX
    tracemalloc.start()
    ReadRequest.decode(body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20
    with pytest.raises(BadRequest):
        ReadRequest.decode(body + b"\0")


def test_a_request_that_names_a_shard_twice_is_refused() -> None:
    with pytest.raises(BadRequest, match="each shard once"):
        ReadRequest.decode(ReadRequest(None, (Digest.of(b"a"), Digest.of(b"a")), ranges_of()).encode())


def test_a_wait_is_cut_to_its_limit() -> None:
    assert ReadRequest.decode(head(0, 0, 2**32 - 1)).wait_ms == WAIT_MS_MAX


@given(digests, st.lists(digests, max_size=5, unique=True), st.integers(0, WAIT_MS_MAX))
def test_requests_about_shards_survive_the_wire(manifest: Digest, shards: list[Digest], wait_ms: int) -> None:
    fill = FillRequest(manifest, tuple(shards), wait_ms)
    forgo, recheck = ForgoRequest(manifest, tuple(shards)), RecheckRequest(tuple(shards))
    assert FillRequest.decode(fill.encode()) == fill
    assert ForgoRequest.decode(forgo.encode()) == forgo
    assert RecheckRequest.decode(recheck.encode()) == recheck
    assert all(type(shard) is Digest for shard in FillRequest.decode(fill.encode()).shards)
    assert shards_in(recheck.encode()) >= len(shards)


ABOUT_SHARDS = [FillRequest, ForgoRequest, RecheckRequest]
ANY = st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=70) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["shards", "manifest", "x"]), inner),
)


@pytest.mark.parametrize("kind", ABOUT_SHARDS)
@settings(max_examples=200)
@given(st.binary(max_size=200), ANY)
def test_any_body_is_a_request_about_shards_or_refused(kind: type[FillRequest], body: bytes, value: object) -> None:
    for attempt in (body, msgspec.msgpack.encode(value)):
        with contextlib.suppress(BadRequest):
            kind.decode(attempt)


def body_of(shards: object, **other: object) -> bytes:
    return msgspec.msgpack.encode({"shards": shards, "manifest": b"m" * 32, **other})


@pytest.mark.parametrize("kind", ABOUT_SHARDS)
@pytest.mark.parametrize(
    "body",
    [
        body_of(b"a" * 33),
        body_of(b"a" * 64),
        body_of(np.random.default_rng(0).bytes(32 * (RANGES_MAX + 1))),
        body_of(["a"]),
        body_of("a" * 32),
        body_of(b"a" * 32, wait_ms=-1),
        body_of(b"a" * 32) + b"\0",
        body_of(b"a" * 32)[:-1],
        body_of(b"a" * 32, unknown=bytes(SHARDS_REQUEST_BYTES_MAX)),
        b"\x91" * 100_000,
        b"\x83\xa6shards\xdd\xff\xff\xff\xff",
        b"\x81\xa6shards\xc6\xff\xff\xff\xff",
    ],
    ids=[
        "size",
        "twice",
        "too many",
        "list",
        "text",
        "wait",
        "tail",
        "short",
        "too long",
        "nested",
        "a huge array",
        "huge bytes",
    ],
)
@pytest.mark.fault("S4")
def test_a_request_about_shards_that_breaks_a_limit_is_refused(kind: type[FillRequest], body: bytes) -> None:
    with pytest.raises(BadRequest):
        kind.decode(body)


@pytest.mark.parametrize("manifest", [b"", b"m" * 31, b"m" * 33])
@pytest.mark.parametrize("kind", [FillRequest, ForgoRequest])
def test_a_fill_names_its_manifest(kind: type[FillRequest], manifest: bytes) -> None:
    with pytest.raises(BadRequest, match="must name its manifest"):
        kind.decode(body_of(b"a" * 32, manifest=manifest))


def test_a_fill_waits_no_longer_than_its_limit_and_may_name_as_many_shards_as_a_read() -> None:
    shards = tuple(Digest.of(b"%d" % number) for number in range(RANGES_MAX))
    body = FillRequest(Digest(b"m" * 32), shards, 2**40).encode()
    assert len(body) <= SHARDS_REQUEST_BYTES_MAX
    request = FillRequest.decode(body)
    assert (request.shards, request.wait_ms) == (shards, WAIT_MS_MAX)


def test_what_a_later_client_adds_to_a_request_is_ignored() -> None:
    request = FillRequest.decode(body_of(b"a" * 32, priority={"class": [1, 2]}))
    assert request == FillRequest(Digest(b"m" * 32), (Digest(b"a" * 32),))


def test_statuses_of_shards_survive_the_wire_and_others_are_refused() -> None:
    sent = ShardStatuses(bytes([RangeStatus.PRESENT, RangeStatus.FILLING, RangeStatus.FAILED]))
    assert ShardStatuses.decode(sent.encode(), 3) == sent
    wrong = [ShardStatuses(b"\0\0").encode(), ShardStatuses(b"\0\0\6").encode(), b"", b"\x80", sent.encode() + b"\0"]
    for body in wrong:
        with pytest.raises(BadRequest):
            ShardStatuses.decode(body, 3)


def test_a_ring_survives_the_wire() -> None:
    ring = Ring.of("r", [Member("a", "http://a:1", 5.0), Member("b", "http://b:2", state="draining")], 2)
    body = msgspec.json.encode(RingView.of(ring))
    assert decode_json(body, RingView, "it").ring() == (ring, 0)


@pytest.mark.parametrize(
    "junk",
    [
        "null",
        "7",
        '"x"',
        "{}",
        "[]",
        '{"id": "b"}',
        '{"id": "b", "url": 5}',
        '{"id": "b", "url": "http://b:1", "weight": "much"}',
        '{"id": "b", "url": "http://b:1", "weight": 1e999}',
        '{"id": "b", "url": "http://b:1", "weight": -1}',
        '{"id": "b", "url": "http://b:1", "state": "asleep"}',
        '{"id": "../b", "url": "http://b:1"}',
        '{"id": "b", "url": "file:///etc/passwd"}',
        '{"id": "b", "url": "http://user:pw@b:1"}',
        '{"id": "b", "url": "http://b:99999"}',
        '{"id": "b", "url": "http://[b"}',
    ],
)
def test_a_member_that_is_junk_costs_itself_alone(junk: str) -> None:
    body = f'{{"rack": "r", "replicas": 1, "members": [{{"id": "a", "url": "http://a:1"}}, {junk}]}}'.encode()
    ring, ignored = decode_json(body, RingView, "it").ring()
    assert [member.id for member in ring.members] == ["a"]
    assert ignored == 1


def test_a_ring_of_too_many_members_is_cut_and_counted() -> None:
    members = [Member(f"n{i}", f"http://n{i}:1") for i in range(10_000)]
    body = msgspec.json.encode({"rack": "r", "replicas": 10**9, "members": members})
    ring, ignored = decode_json(body, RingView, "it").ring()
    assert len(ring.members) == MEMBERS_MAX
    assert ignored == 10_000 - MEMBERS_MAX
    assert ring.replicas <= REPLICAS_MAX
    assert ring.rank(np.zeros((5, 32), np.uint8), ring.replicas).nbytes <= 5 * 4 * 8, "what a reader keeps of shards"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b"[" * 100_000, b'{"rack": 1}', b" " * (JSON_BYTES_MAX + 1), b"null"], ids=str
)
@pytest.mark.parametrize("kind", [RingView, NodeStatus])
def test_json_that_is_not_what_it_should_be_is_refused_by_name(body: bytes, kind: type) -> None:
    with pytest.raises(BadRequest, match="the thing"):
        decode_json(body, kind, "the thing")
