"""Fuzz target of a daemon's side of a stream: frames of any content and in any pieces, without a network between.

A real ``Stream`` of a real ``Node`` reads them from a socket. Its bytes must be answers, one after the other, to the
frames as sent; and when it has ended, the daemon holds nothing for it any more.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import msgspec

from quiver.ring import Member
from quiver.store import Kind, Store
from quiver.transport.stream import FRAME, MAGIC, RANGES, REFUSAL, Refusal
from quiver.wire import ReadRequest
from quiver_cacheserver.access.caller import Caller
from quiver_cacheserver.budget import Resource
from quiver_cacheserver.node import Node
from quiver_cacheserver.rack.registry import StaticRegistry
from quiver_cacheserver.residency.readers import ReadBy
from quiver_cacheserver.serving.poller import AGAIN, ENDED, PARKED, Poller
from quiver_cacheserver.serving.streams import Stream, Streams
from quiver_cacheserver.serving.turns import Places
from tests.fuzz.kernel_targets import SHARD, SHARD_DATA, D, _ranges
from tests.fuzz.target import Target, scratch

CLIENT: Final = "a fuzzer"
INSIDE: Final = ReadRequest(None, (SHARD,), _ranges((0, 0, 10), (0, 3, 0)))
OUTSIDE: Final = ReadRequest(None, (SHARD,), _ranges((0, 2**63, 5), (0, len(SHARD_DATA) - 2, 3)))
ABSENT: Final = ReadRequest(D[2], (D[3],), _ranges((0, 0, 10)), 0)


class _Loop:
    """Stands in for the event loop, to which a read of what is not here goes."""

    def call_soon_threadsafe(self, *_: Any) -> None:
        pass


@cache
def _streams() -> Streams:
    store = Store.open(scratch() / "store", 64 << 20, shared=False)
    store.put(Kind.SHARD, SHARD, SHARD_DATA)
    own = Member("a", "http://127.0.0.1:9")
    node = Node("0", store, StaticRegistry("r", own), [])
    node.verification.written(SHARD)
    return Streams(node, Poller(node.budgets, workers=1), Places(node.budgets, Resource.READS))


def _frame(request: ReadRequest) -> bytes:
    body = request.encode()
    return struct.pack("<I", len(body)) + body


def fuzz_one(data: bytes) -> bool:
    streams = _streams()
    budgets = streams.node.budgets
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    ours.setblocking(False)
    assert budgets.hold(CLIENT, Resource.STREAMS)
    stream = Stream(streams, _Loop(), theirs, Caller(CLIENT), ReadBy(CLIENT))  # type: ignore[arg-type]
    cut = data[0] % 7 + 1 if data else 1
    answered = bytearray()
    try:
        for piece in _pieces(data, cut):
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                ours.send(piece)
            events = _served(stream, ours, answered)
            if events in (ENDED, PARKED):
                break
        else:
            ours.shutdown(socket.SHUT_WR)
            events = _served(stream, ours, answered)
            assert events in (ENDED, PARKED), "the end of the connection ends the stream"
    finally:
        theirs.close()
        stream.ended()
        ours.close()
    assert not budgets.held(CLIENT, Resource.STREAMS)
    assert not budgets.held(CLIENT, Resource.BODY_BYTES), "nothing is held for a stream that has ended"
    assert not budgets.held(CLIENT, Resource.READS)
    assert streams.node.counters.reads_in_flight == 0
    return _checked(bytes(answered), whole=events != PARKED)


def _pieces(data: bytes, count: int) -> Iterator[bytes]:
    size = max(-(-len(data) // count), 1)
    return (data[at : at + size] for at in range(0, len(data), size))


def _served(stream: Stream, ours: socket.socket, answered: bytearray) -> int:
    """Serve the stream until it waits for its reader, which takes all that comes."""
    for _ in range(100_000):
        events = stream.serve()
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while more := ours.recv(1 << 16):
                answered += more
        if events in (ENDED, PARKED) or (events != AGAIN and stream._sending is None):
            return events
    raise AssertionError("the stream goes on for ever")


def _checked(answered: bytes, *, whole: bool) -> bool:
    """Check that the bytes are answers, one after another; return whether there is one that is no refusal."""
    at, ranges = 0, 0
    while at < len(answered):
        magic, kind, size = FRAME.unpack_from(answered, at)
        assert magic == MAGIC
        at += FRAME.size
        assert at + size <= len(answered) or not whole
        body = answered[at : at + size]
        at += size
        ranges += kind == RANGES
        if kind != RANGES:
            assert kind == REFUSAL
            msgspec.json.decode(body, type=Refusal)
    assert at == len(answered)
    return ranges > 0


TARGETS: Final = (
    Target(
        "stream-request",
        fuzz_one,
        lambda: [
            _frame(INSIDE),
            _frame(INSIDE) + _frame(OUTSIDE) + _frame(INSIDE),
            _frame(ABSENT),
            struct.pack("<I", 2**32 - 1) + b"QRD1",
            struct.pack("<I", 1 << 20) + bytes(100),
        ],
        share=10,
    ),
)
