"""Fuzz targets of the kernel: the formats, the messages of the protocol in both directions, and names in text."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from quiver.digest import Digest
from quiver.errors import BadRequest, Corrupt, Misconfigured, NotFound, QuiverError
from quiver.handover import HandoverRequest
from quiver.identity import Identity
from quiver.introduction import Introduction
from quiver.location import Location, is_object_path, refuse_credentials, shown
from quiver.manifest import Manifest
from quiver.membership import Entry, Seat, read, write
from quiver.origin.web_ranges import OtherForm, _parsed
from quiver.residency.messages import NeedsAnswer, NeedsReport, NeedsStatus
from quiver.residency.report import ConsumerReport
from quiver.ring import Member, Ring
from quiver.shard import verified
from quiver.sizes import format_size, parse_size
from quiver.transport.connection import Connection, Endpoint
from quiver.transport.handoff import (
    FileStatus,
    HandoffAnswer,
    HandoffClient,
    HandoffRequest,
    Held,
    Status,
    Verb,
    files_answer,
    held_answer,
    hello_answer,
)
from quiver.transport.http import HttpVerbs
from quiver.transport.liveness import Patience
from quiver.transport.stream import FRAME, MAGIC, ranges_frame, read_on, refusal_frame
from quiver.wire import (
    RANGE,
    FillRequest,
    ForgoRequest,
    NodeStatus,
    RangeStatus,
    ReadRequest,
    RecheckRequest,
    RingView,
    ShardStatuses,
    decode_json,
)
from quiver_cacheserver.bounds import open_manifest
from tests.fuzz.target import MIB, Refused, Target, accepts, lazily, refused, scratch
from tests.support.data import make_shard
from tests.support.golden import CHECKED, FOLDER, MANIFEST

D: Final = [Digest.of(bytes([number])) for number in range(5)]
PATIENCE: Final = Patience(silence_seconds=1.0, connect_seconds=0.1, alive_seconds=0.1)
ENDPOINT: Final = Endpoint("http://127.0.0.1:9", PATIENCE)

# -- names ------------------------------------------------------------------------------------------------------------


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def _digest(data: bytes) -> None:
    digest = Digest.parse(_text(data))
    assert str(digest).encode() == data
    assert Digest.many(bytes(digest) * 2) == (digest, digest)


def _size(data: bytes) -> None:
    assert parse_size(_text(data)) > 0
    format_size(parse_size(_text(data)))


def _location(data: bytes) -> None:
    text = _text(data)
    assert len(shown(text)) <= 10 * 200 + 1
    assert shown(text).isprintable()
    for scheme in ("file", "s3", "http"):
        is_object_path(text, scheme)
    refuse_credentials(text)
    location = Location.parse(text)
    assert Location.parse(location.url) == location, "the normal form is read as itself"
    assert location.contains(location)
    assert not {"", ".", ".."} & set(location.names)


def _ring_entry(data: bytes) -> None:
    seat = read("node-1", Entry("k", data, 1, 2))
    if seat is None:
        raise BadRequest("no record")
    again = read("node-1", Entry("k", write(seat.member, seat.session), 1, 2))
    assert again == Seat(seat.member, seat.session, 2), "what is written is read as itself"
    Ring.of("r", [seat.member, Member("other", "http://h:1")]).owners(D[0])


RECORD: Final = write(Member("node-1", "http://10.0.0.1:7717", 1e12, "up", "/run/quiver/socket"), "session")

# -- requests ---------------------------------------------------------------------------------------------------------


def _ranges(*rows: tuple[int, int, int]) -> np.ndarray[Any, np.dtype[np.void]]:
    return np.array([(shard, 0, offset, length) for shard, offset, length in rows], RANGE)


READ: Final = ReadRequest(D[4], (D[0], D[1]), _ranges((0, 0, 10), (1, 5, 0), (0, 7, 20)), 100, 0)


def _read_request(data: bytes) -> None:
    asked = ReadRequest.decode(data)
    assert 0 <= ReadRequest.shards_named(data) == len(asked.shards)
    again = ReadRequest.decode(asked.encode())
    assert (again.shards, again.manifest, again.wait_ms) == (asked.shards, asked.manifest, asked.wait_ms)
    assert (again.ranges == asked.ranges).all()


def _verbs(data: bytes) -> None:
    request = data[1:]
    kinds: list[Callable[[bytes], FillRequest | ForgoRequest | RecheckRequest]]
    kinds = [FillRequest.decode, ForgoRequest.decode, RecheckRequest.decode]
    asked = kinds[data[0] % 3 if data else 0](request)
    assert type(asked).decode(asked.encode()) == asked


def _handover(data: bytes) -> None:
    asked = HandoverRequest.decode(data)
    assert HandoverRequest.decode(asked.encode()) == asked
    assert all(asked.holder(at) in ("", *asked.holders) for at in range(len(asked.shards)))


def _introduction(data: bytes) -> None:
    told = Introduction.parse(data.decode("latin-1"))
    assert Introduction.parse(told.encode()) == told


def _needs_report(data: bytes) -> None:
    head = NeedsReport.head(data)
    told = NeedsReport.decode(data)
    assert (head.manifest, head.shards, head.leaving) == (told.manifest, len(told.report.left), told.leaving)
    again = NeedsReport.decode(told.encode())
    assert (again.report.left == told.report.left).all()
    assert again.report.soon == told.report.soon


def _report(**more: Any) -> bytes:
    left = np.arange(300, dtype=np.uint8)
    fields: dict[str, Any] = {"rate": 1e8, "ahead_bytes": 5.0, "lease_seconds": 9.0, "soon": (1, 2, 3)} | more
    return NeedsReport(D[0], ConsumerReport(b"c" * 16, left, **fields)).encode()


def _handoff_request(data: bytes) -> None:
    asked = HandoffRequest.decode(data)
    assert HandoffRequest.decode(asked.encode()) == asked


# -- answers, as a client receives them -------------------------------------------------------------------------------


def _received(data: bytes, kind: int, parse: Callable[[Connection], object]) -> None:
    """Have a client parse what a daemon sends on a connection, and then ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with ours, theirs:
        theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # what does not fit is cut off
            theirs.send(data)
        theirs.shutdown(socket.SHUT_WR)
        parse(Connection(ours))


def _stream_answer(data: bytes) -> None:
    def parse(connection: Connection) -> None:
        statuses, payload = read_on(ENDPOINT, READ, connection)
        assert connection.is_finished
        assert len(payload) == int(READ.ranges["length"][statuses == RangeStatus.PRESENT].sum())
        assert data.startswith(ranges_frame(statuses, len(payload)) + payload.tobytes())

    _received(data, socket.SOCK_STREAM, parse)


def _http_answer(data: bytes) -> None:
    verbs = HttpVerbs(ENDPOINT)
    method = "HEAD" if data[:1] == b"h" else "POST"
    exchange = partial(verbs._exchange, method, b"POST / HTTP/1.1\r\n\r\n", b"", 4096, 0.0)
    _received(data, socket.SOCK_STREAM, lambda connection: len(exchange(connection)) <= 4096)


def _handoff_answer(data: bytes) -> None:
    HandoffAnswer.decode(data)
    client = HandoffClient("/nowhere")
    dialogue = client._dialogue

    def asked(connection: Connection) -> None:
        dialogue.run = lambda opened, exchange: exchange(connection)  # type: ignore[method-assign,misc,assignment]
        with contextlib.suppress(Corrupt):
            client.files([D[0], D[1]])

    def held(connection: Connection) -> None:
        dialogue.run = lambda opened, exchange: exchange(connection)  # type: ignore[method-assign,misc,assignment]
        client.held([Held(D[0], 1), Held(D[1], 2)])

    for parse in (asked, held):
        _received(data, socket.SOCK_SEQPACKET, parse)


def _json_view(data: bytes) -> None:
    kinds = (RingView, NodeStatus)
    view = decode_json(data[1:], kinds[data[0] % 2 if data else 0], "an answer")
    if isinstance(view, RingView):
        ring, left_out = view.ring()
        assert len(ring.members) + left_out == len(view.members)
        ring.owners(D[0])
    else:
        assert all(isinstance(line, str) for line in view.faults)


def _needs_answer(data: bytes) -> None:
    told = NeedsAnswer.decode(data)
    assert (NeedsAnswer.decode(told.encode()).seen == told.seen).all()


def _web_head(data: bytes) -> None:
    """The answers of an origin's web server."""
    head, _ = _parsed(data)
    assert 200 <= head.status <= 599


ANSWER: Final = ranges_frame(np.zeros(3, np.uint8), 30) + bytes(range(30))
RING: Final = msgspec.json.encode(RingView.of(Ring.of("r", [Member("a", "http://h:1"), Member("b", "http://i:2")], 2)))
NODE: Final = NodeStatus("a", "u", "r", "1", "up", 1, 2, 3, 4, 5, 6, 7, 8, 9, 1.0, 2.0, "ok", "", {"/p/": "ok"})
HTTP: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Type: a\r\n\r\nhello",
    b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n",
    b'HTTP/1.1 503 S\r\nRetry-After: 2\r\nContent-Length: 39\r\n\r\n{"error":"over_capacity","message":"no"}',
    b"HTTP/1.1 302 Found\r\nLocation: http://x/\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
)

# -- files ------------------------------------------------------------------------------------------------------------


def _manifest_target() -> Callable[[bytes], bool]:
    path = scratch() / "fuzz.quiver"

    def fuzz_one(data: bytes) -> bool:
        path.write_bytes(data)
        try:
            with refused(BadRequest, Misconfigured):
                Manifest.open(path)  # which its own checksums protect
        except Refused:
            pass
        try:
            with refused(BadRequest, Misconfigured, NotFound, Corrupt):
                manifest = open_manifest(path, Digest.of(data))  # as a daemon does: no checksum stands in the way
        except Refused:
            return False
        for shard in (0, manifest.shard_count - 1):
            blobs = manifest.shard_blobs(shard)
            manifest.blob_sizes(slice(blobs.start, blobs.stop)).tolist()
            assert manifest.shard_numbers[manifest.shard_digest(shard)] == shard
        rows = np.array([0, len(manifest) - 1])
        assert len(manifest.keys(rows)) == 2
        for field in manifest.header.scalars:
            manifest.scalars(field.name, rows)
        manifest.object_url(int(manifest.tables.object_of.max()))
        manifest.keys_of_blobs(manifest.tables.blob_of[:1].astype(np.intp))
        return True

    return fuzz_one


SHARD, SHARD_DATA = make_shard([b"first", b"", b"third" * 20])
_times = itertools.count()


def _shard(data: bytes) -> None:
    name = SHARD if next(_times) % 2 else Digest.of(b"quiver-shard-v1" + data[5 + 100 :])  # the table a forger wrote
    with contextlib.suppress(Corrupt):
        verified(name, data, "a fuzzer")
    assert data == SHARD_DATA or not _is_accepted(SHARD, data)


def _is_accepted(name: Digest, data: bytes) -> bool:
    try:
        verified(name, data, "a fuzzer")
    except Corrupt:
        return False
    return True


def _seeds_of_answers() -> list[bytes]:
    refusals = [refusal_frame(error) for error in (BadRequest("no"), Misconfigured("no"))]
    return [ANSWER, ranges_frame(np.array([0, 0, 1], np.uint8), 10) + bytes(10), FRAME.pack(MAGIC, 0, 2**60), *refusals]


TARGETS: Final = (
    Target("digest", accepts(_digest, BadRequest), lambda: [str(D[0]).encode()], share=100),
    Target("size", accepts(_size, Misconfigured), lambda: [b"200GiB", b"1.5 TB", b"32MiB", b"4096"], share=100),
    Target(
        "location",
        accepts(_location, BadRequest),
        lambda: [b"file:///data/a%20b/", b"s3://bucket/a/b", b"http://host:80/x/", b"https://[::1]:443/a", b"az://c"],
        share=60,
    ),
    Target(
        "ring-entry",
        accepts(_ring_entry, BadRequest),
        lambda: [RECORD, b'{"url":"http://h:1","weight":2,"session":"s"}'],
        share=100,
    ),
    Target(
        "read-request",
        accepts(_read_request, BadRequest),
        lambda: [READ.encode(), ReadRequest(None, (), _ranges()).encode()],
        share=100,
    ),
    Target(
        "verbs",
        accepts(_verbs, BadRequest),
        lambda: [
            b"\0" + FillRequest(D[0], (D[1], D[2]), 500).encode(),
            b"\1" + ForgoRequest(D[0], (D[1],)).encode(),
            b"\2" + RecheckRequest((D[1], D[3])).encode(),
        ],
        share=100,
    ),
    Target(
        "handover",
        accepts(_handover, BadRequest),
        lambda: [
            HandoverRequest("node-1", (D[0], D[1]), manifests=(D[2],)).encode(),
            HandoverRequest("n", (D[0], D[1]), (9, 2**40), (), True, 500, ("team:a", "b"), (0, 2)).encode(),
        ],
        share=60,
    ),
    Target(
        "introduction",
        accepts(_introduction, BadRequest),
        lambda: [
            Introduction(bytes(16)).encode().encode(),
            Introduction(bytes(range(16)), Identity("j", "g 1", "lab/ä"), "imagenet", follows=True).encode().encode(),
        ],
        share=60,
    ),
    Target(
        "needs-report",
        accepts(_needs_report, BadRequest),
        lambda: [
            _report(),
            _report(ordered=True, soon=()),
            _report(ordered=True, order=bytes(16), order_at=2, uses=np.arange(5, dtype=np.int32)),
        ],
        share=40,
    ),
    Target(
        "needs-answer",
        accepts(_needs_answer, BadRequest),
        lambda: [NeedsAnswer(NeedsStatus.TAKEN, np.arange(200, dtype=np.uint8), (5, 7)).encode()],
        share=40,
    ),
    Target(
        "statuses",
        accepts(lambda data: ShardStatuses.decode(data, 3), BadRequest),
        lambda: [ShardStatuses(b"\0\1\2").encode()],
        share=100,
    ),
    Target(
        "json-view",
        accepts(_json_view, BadRequest),
        lambda: [b"\0" + RING, b"\1" + msgspec.json.encode(NODE)],
        share=60,
    ),
    Target("stream-answer", accepts(_stream_answer, QuiverError, OSError), _seeds_of_answers, share=25),
    Target("http-answer", accepts(_http_answer, QuiverError, OSError), lambda: HTTP, share=10),
    Target(
        "handoff-request",
        accepts(_handoff_request, BadRequest),
        lambda: [
            HandoffRequest(Verb.HELLO).encode(),
            HandoffRequest(Verb.FILES, (Held(D[0], 0), Held(D[1], 0)), 3).encode(),
            HandoffRequest(Verb.HELD, (Held(D[0], 1), Held(D[1], 2**63)), 2).encode(),
        ],
        share=100,
    ),
    Target(
        "handoff-answer",
        accepts(_handoff_answer, QuiverError, OSError),
        lambda: [
            hello_answer("node-1"),
            files_answer([(FileStatus.ABSENT, 0), (FileStatus.NOT_NOW, 5)]),
            held_answer([True, False]),
            HandoffAnswer(Status.BUSY).encode(),
        ],
        share=20,
    ),
    Target(
        "web-head",
        accepts(_web_head, OtherForm),
        lambda: [b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-4/9\r\nContent-Length: 5"],
        share=60,
    ),
    Target("shard", accepts(_shard), lambda: [SHARD_DATA], share=40),
    Target(
        "manifest",
        lazily(_manifest_target),
        lambda: [path.read_bytes() for path in (MANIFEST, CHECKED, FOLDER / "arrays.quiver")],
        share=8,
        memory_bytes_max=128 * MIB,
    ),
)
