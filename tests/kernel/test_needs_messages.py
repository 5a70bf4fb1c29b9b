"""Reports of needs and their answers: they survive the wire, and whatever else comes over it is refused cheaply."""

from __future__ import annotations

import contextlib
import dataclasses
import tracemalloc
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.digest import Digest
from quiver.errors import BadRequest
from quiver.residency import ConsumerReport, Measured
from quiver.residency.messages import (
    ANSWER_BYTES_MAX,
    LEASE_SECONDS_MAX,
    REPORT_BYTES_MAX,
    SHARDS_MAX,
    SOON_MAX,
    UPLOADS_MAX,
    NeedsAnswer,
    NeedsReport,
    NeedsStatus,
)
from quiver.residency.orders import ORDER_ENTRIES_MAX

NAME = Digest(bytes(range(32)))


def report(shards: int = 5, **changes: object) -> NeedsReport:
    plain = ConsumerReport(bytes(16), np.arange(shards).astype(np.uint8), 1e6, 2e6, 5.0)
    return NeedsReport(NAME, dataclasses.replace(plain, **changes))  # type: ignore[arg-type]


def body(left: bytes = b"\1\2\3", packed: bytes | None = None, **changes: object) -> bytes:
    fields: dict[str, object] = {
        "type": "needs",
        "manifest": bytes(NAME),
        "consumer": bytes(16),
        "shards": len(left),
        "left": zlib.compress(left) if packed is None else packed,
        "rate": 1.0,
        "ahead_bytes": 1.0,
        "lease_seconds": 5.0,
    }
    return msgspec.msgpack.encode(fields | changes)


def answer_body(seen: bytes = b"\0\1", packed: bytes | None = None, **changes: object) -> bytes:
    packed = zlib.compress(seen) if packed is None else packed
    fields: dict[str, object] = {"type": "residency", "status": 0, "shards": len(seen), "seen": packed}
    return msgspec.msgpack.encode(fields | changes)


amounts = st.floats(0, 1e14)
measured = st.builds(Measured, amounts, st.floats(0, 1), amounts, st.integers(0, 1000), amounts, amounts)


@given(st.data())
def test_a_report_survives_the_wire(data: st.DataObject) -> None:
    left = data.draw(st.binary(max_size=300))
    soon = data.draw(st.lists(st.integers(0, len(left) - 1), max_size=20)) if left else []
    sent = NeedsReport(
        Digest(data.draw(st.binary(min_size=32, max_size=32))),
        ConsumerReport(
            consumer=data.draw(st.binary(min_size=16, max_size=16)),
            left=np.frombuffer(left, np.uint8),
            rate=data.draw(st.floats(0, 1e12)),
            ahead_bytes=data.draw(st.floats(-1e15, 1e15)),
            lease_seconds=data.draw(st.integers(0, 60_000)) / 1000,
            soon=tuple(soon),
            ordered=data.draw(st.booleans()),
            order=data.draw(st.sampled_from([b"", bytes(range(16))])),
            order_at=data.draw(st.integers(0, ORDER_ENTRIES_MAX)),
            measured=data.draw(measured),
        ),
        leaving=data.draw(st.booleans()),
    )
    got = NeedsReport.decode(sent.encode())
    assert (got.manifest, got.leaving) == (sent.manifest, sent.leaving)
    assert got.report.left.tobytes() == left
    assert got.report.rate == (sent.report.rate if sent.report.rate >= 1 else 0.0)
    for name in ("consumer", "ahead_bytes", "lease_seconds", "soon", "ordered", "order", "order_at", "measured"):
        assert getattr(got.report, name) == getattr(sent.report, name), name


@given(st.lists(st.integers(0, 69_999), min_size=1, max_size=300))
def test_a_list_of_uses_survives_the_wire_and_may_be_left_out(uses: list[int]) -> None:
    sent = report(70_000, order=bytes(16), uses=np.asarray(uses, np.int32))
    got = NeedsReport.decode(sent.encode())
    assert got.report.uses is not None
    assert got.report.uses.tolist() == uses
    assert NeedsReport.head(sent.encode()).uses == len(uses)
    brief = NeedsReport.decode(sent.without_uses().encode())
    assert (brief.report.order, brief.report.uses) == (bytes(16), None)


def test_who_knows_no_lists_of_uses_reads_the_rest() -> None:
    """An older daemon ignores the fields; an older daemon's answer, and an older client's report, lack them."""
    assert NeedsReport.decode(body()).report.order == b""
    assert not NeedsAnswer.decode(answer_body()).order_wanted
    assert NeedsAnswer.decode(answer_body(order_wanted=True, added_later=1)).order_wanted
    assert NeedsAnswer.decode(NeedsAnswer(NeedsStatus.TAKEN, np.zeros(2, np.uint8), (), True).encode()).order_wanted


def test_who_knows_no_probes_reads_the_rest() -> None:
    assert NeedsReport.decode(body()).report.measured == Measured()
    assert not NeedsAnswer.decode(answer_body()).probe_wanted
    assert NeedsAnswer.decode(answer_body(probe_wanted=True, added_later=1)).probe_wanted
    answer = NeedsAnswer(NeedsStatus.TAKEN, np.zeros(2, np.uint8), probe_wanted=True)
    assert NeedsAnswer.decode(answer.encode()).probe_wanted


@pytest.mark.parametrize("field", ["throughput", "waited", "attained_bytes", "probed_hits", "probed_misses"])
@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
def test_what_nobody_can_have_measured_is_refused(field: str, number: float) -> None:
    with pytest.raises(BadRequest, match="not possible"):
        NeedsReport.decode(body(**{field: number}))


def packed_uses(*uses: int) -> bytes:
    return zlib.compress(np.asarray(uses, "<u4").tobytes())


@pytest.mark.parametrize(
    "wrong",
    [
        body(order=bytes(15)),
        body(order=bytes(17)),
        body(order=bytes(16), order_at=-1),
        body(order=bytes(16), order_at=ORDER_ENTRIES_MAX + 1),
        body(order=bytes(16), uses_count=ORDER_ENTRIES_MAX + 1, uses=packed_uses(0)),
        body(order=bytes(16), uses_count=2, uses=packed_uses(0)),
        body(order=bytes(16), uses_count=1, uses=packed_uses(0, 0)),
        body(order=bytes(16), uses_count=1, uses=packed_uses(3)),
        body(order=bytes(16), uses_count=1, uses=packed_uses(2**32 - 1)),
        body(order=bytes(16), uses_count=1, uses=b"junk"),
        body(uses_count=1, uses=packed_uses(0)),
    ],
)
@pytest.mark.fault("S12")
def test_a_malformed_list_of_uses_is_refused(wrong: bytes) -> None:
    with pytest.raises(BadRequest):
        NeedsReport.decode(wrong)


@pytest.mark.fault("S12")
def test_no_more_of_a_list_is_unpacked_than_was_announced() -> None:
    bomb = body(order=bytes(16), uses_count=1, uses=zlib.compress(bytes(64 << 20)))
    tracemalloc.start()
    with pytest.raises(BadRequest, match="more bytes"):
        NeedsReport.decode(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@given(st.binary(max_size=300), st.lists(st.integers(0, 299), max_size=UPLOADS_MAX), st.sampled_from(NeedsStatus))
def test_an_answer_survives_the_wire(seen: bytes, uploads: list[int], status: NeedsStatus) -> None:
    uploads = [shard for shard in uploads if shard < len(seen)]
    got = NeedsAnswer.decode(NeedsAnswer(status, np.frombuffer(seen, np.uint8), tuple(uploads)).encode())
    assert (got.status, got.seen.tobytes(), got.uploads) == (status, seen, tuple(uploads))


@settings(max_examples=300)
@given(st.binary(max_size=400))
def test_any_body_is_a_report_or_an_answer_or_refused(data: bytes) -> None:
    for start in (b"", body()[:-20], answer_body()[:-9]):
        with contextlib.suppress(BadRequest):
            NeedsReport.decode(start + data)
        with contextlib.suppress(BadRequest):
            NeedsAnswer.decode(start + data)


@given(st.data())
def test_a_report_that_was_cut_or_changed_is_refused_or_another_report(data: st.DataObject) -> None:
    good = report(200, soon=(1, 2, 3)).encode()
    with pytest.raises(BadRequest):
        NeedsReport.decode(good[: data.draw(st.integers(0, len(good) - 1))])
    with pytest.raises(BadRequest):
        NeedsReport.decode(good + b"x")
    at, bit = data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(0, 7))
    with contextlib.suppress(BadRequest):
        NeedsReport.decode(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])


@pytest.mark.parametrize(
    "wrong",
    [
        body(type="others"),
        body(type="residency"),
        msgspec.msgpack.encode([1, 2, 3]),
        b"\x91" * 100_000,
        b"\x82\xa1x" + b"\x91" * 100_000,
        b"\x81\xa1\xff\x00",
        body()[:-1],
        body() + b"x",
        body(manifest=bytes(31)),
        body(consumer=bytes(17)),
        body(shards=SHARDS_MAX + 1),
        body(shards=-1),
        body(shards=2),
        body(shards=4),
        body(soon=[0] * (SOON_MAX + 1)),
        body(soon=[3]),
        body(soon=[-1]),
        body(left=b"", soon=[0]),
        body(packed="not bytes"),  # type: ignore[arg-type]
        body(rate=-1.0),
        body(rate=float("nan")),
        body(rate=float("inf")),
        body(ahead_bytes=float("nan")),
        body(ahead_bytes=float("-inf")),
        body(lease_seconds=-1.0),
        body(lease_seconds=float("nan")),
        body(packed=b"not zlib at all"),
        body(packed=b""),
        body(packed=zlib.compress(b"\1\2\3")[:-1]),
        body(packed=zlib.compress(b"\1\2\3")[:-4] + b"abcd"),
        body(packed=zlib.compress(b"\1\2\3") + b"x"),
        bytes(REPORT_BYTES_MAX + 1),
    ],
    ids=lambda wrong: f"{len(wrong)}-{zlib.crc32(wrong):08x}",
)
def test_a_report_that_breaks_a_limit_or_does_not_add_up_is_refused(wrong: bytes) -> None:
    NeedsReport.decode(body())
    with pytest.raises(BadRequest):
        NeedsReport.decode(wrong)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        pytest.param(body(shards=4), "has 3 bytes where 4 shards", id="too-few"),
        pytest.param(body(shards=2), "more bytes than the 2 shards", id="too-many"),
        pytest.param(body(packed=zlib.compress(b"\1\2\3")[:-1]), "cut short", id="cut-short"),
        pytest.param(body(packed=zlib.compress(b"\1\2\3") + b"x"), "other bytes follow", id="more-behind"),
    ],
)
def test_a_report_whose_array_has_another_length_is_refused_with_the_reason(wrong: bytes, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        NeedsReport.decode(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        answer_body()[:-1],
        answer_body() + b"x",
        answer_body(type="needs"),
        answer_body(status=99),
        answer_body(shards=SHARDS_MAX + 1),
        answer_body(shards=1),
        answer_body(shards=3),
        answer_body(uploads=[0] * (UPLOADS_MAX + 1)),
        answer_body(uploads=[2]),
        answer_body(packed=b"garbage"),
        answer_body(packed=zlib.compress(b"\0\1") + b"x"),
    ],
    ids=lambda wrong: f"{len(wrong)}-{zlib.crc32(wrong):08x}",
)
def test_an_answer_that_breaks_a_limit_or_does_not_add_up_is_refused(wrong: bytes) -> None:
    NeedsAnswer.decode(answer_body())
    with pytest.raises(BadRequest):
        NeedsAnswer.decode(wrong)


@pytest.mark.parametrize("rate", [5e-324, 1e-9, 0.99])
def test_less_than_a_byte_a_second_is_not_known_yet(rate: float) -> None:
    assert NeedsReport.decode(body(rate=rate)).report.rate == 0.0
    assert NeedsReport.decode(body(rate=1.0)).report.rate == 1.0


def test_the_largest_report_and_answer_fit_into_their_limits() -> None:
    noise = np.random.default_rng(0).integers(0, 256, SHARDS_MAX, np.uint8)
    sent = report(SHARDS_MAX, left=noise, soon=tuple(range(SOON_MAX))).encode()
    assert len(sent) <= REPORT_BYTES_MAX
    assert len(NeedsReport.decode(sent).report.soon) == SOON_MAX
    answer = NeedsAnswer(NeedsStatus.TAKEN, noise, tuple(range(UPLOADS_MAX))).encode()
    assert len(answer) <= ANSWER_BYTES_MAX
    assert len(NeedsAnswer.decode(answer).uploads) == UPLOADS_MAX


def test_what_is_too_much_to_tell_is_cut_where_it_is_told() -> None:
    long = NeedsReport.decode(report(SOON_MAX + 9, soon=tuple(range(SOON_MAX + 9))).encode())
    assert long.report.soon == tuple(range(SOON_MAX))
    assert NeedsReport.decode(report(lease_seconds=3600.0).encode()).report.lease_seconds == LEASE_SECONDS_MAX
    many = NeedsAnswer(NeedsStatus.TAKEN, np.zeros(99, np.uint8), tuple(range(99))).encode()
    assert NeedsAnswer.decode(many).uploads == tuple(range(UPLOADS_MAX))


def test_the_head_of_a_report_is_read_without_its_array() -> None:
    told = NeedsReport.head(body(shards=SHARDS_MAX, packed=b"not zlib at all", leaving=True))
    assert told == (NAME, bytes(16), SHARDS_MAX, True, 0)
    with pytest.raises(BadRequest):
        NeedsReport.head(body(rate=float("nan")))
    with pytest.raises(BadRequest):
        NeedsReport.head(body()[:-1])


def test_a_bomb_is_not_unpacked() -> None:
    bomb = zlib.compress(bytes(256 << 20), 9)
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest):
            NeedsReport.decode(body(packed=bomb))
        with pytest.raises(BadRequest):
            NeedsAnswer.decode(answer_body(packed=bomb))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
