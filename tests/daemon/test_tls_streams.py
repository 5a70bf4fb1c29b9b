"""Streams whose sockets speak TLS: the same answers, from copies, since a page that is gone must be no signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quiver.ring import Member
from quiver.store import Kind, Store
from quiver.store.inventory import file_of
from quiver.transport.stream import FRAME, RANGES, SIZE
from quiver.wire import ReadRequest
from quiver_cacheserver.access.caller import Caller
from quiver_cacheserver.budget import Resource
from quiver_cacheserver.node import Node
from quiver_cacheserver.rack.registry import StaticRegistry
from quiver_cacheserver.residency.readers import ReadBy
from quiver_cacheserver.serving.poller import READABLE, Poller
from quiver_cacheserver.serving.streams import Stream, Streams
from quiver_cacheserver.serving.turns import Places
from tests.daemon.test_streams import BIG, BIG_DATA, LITTLE, SMALL, SMALL_DATA, WHOLE, asking
from tests.support.tls import Contexts, make_contexts
from tests.support.waiting import until


class Served:
    """A node whose streams are given to its poller as they are after a handshake."""

    def __init__(self, where: Path, contexts: Contexts) -> None:
        store = Store.open(where / "store", 256 << 20, shared=False)
        for digest, data in ((BIG, BIG_DATA), (SMALL, SMALL_DATA)):
            store.put(Kind.SHARD, digest, data)
        self.node = Node("0", store, StaticRegistry("r", Member("a", "http://127.0.0.1:9")), [])
        for digest in (BIG, SMALL):
            self.node.verification.written(digest)
        self.poller = Poller(self.node.budgets)
        self.streams = Streams(self.node, self.poller, Places(self.node.budgets, Resource.READS))
        self.loop = asyncio.new_event_loop()
        self.contexts = contexts
        self.root = store.root

    @contextlib.contextmanager
    def stream(self, send_bytes: int = 0) -> Iterator[ssl.SSLSocket]:
        """Yield the reader's end of a new stream."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            if send_bytes:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
            plain = socket.create_connection(listener.getsockname(), 20)
            accepted, _ = listener.accept()

        def hand_over() -> None:
            wrapped = self.contexts.server.wrap_socket(accepted, server_side=True)
            wrapped.setblocking(False)
            assert self.node.budgets.hold("reader", Resource.STREAMS)
            self.poller.add(Stream(self.streams, self.loop, wrapped, Caller("reader"), ReadBy("reader")), READABLE)

        thread = threading.Thread(target=hand_over)
        thread.start()
        with self.contexts.client.client().wrap_socket(plain, server_hostname="127.0.0.1") as reader:
            thread.join()
            yield reader


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path, make_contexts(tmp_path))
    thread = threading.Thread(target=made.loop.run_forever)
    thread.start()
    made.poller.start()
    try:
        yield made
    finally:
        made.poller.stop()
        made.loop.call_soon_threadsafe(made.loop.stop)
        thread.join()
        made.loop.close()
        made.node.close()


def framed(request: ReadRequest) -> bytes:
    body = request.encode()
    return SIZE.pack(len(body)) + body


def received(sock: ssl.SSLSocket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count and (more := sock.recv(count - len(data))):
        data += more
    return bytes(data)


def answer(sock: ssl.SSLSocket) -> bytes:
    magic, kind, size = FRAME.unpack(received(sock, FRAME.size))
    assert (magic, kind) == (b"QRA1", RANGES)
    return received(sock, size)


def test_answers_through_tls_are_the_bytes_of_the_shards(served: Served) -> None:
    rng = np.random.default_rng(1)
    rows = [(int(rng.integers(2)), int(rng.integers(400)), int(rng.integers(99))) for _ in range(3_000)]
    rows += [(0, 0, len(BIG_DATA)), (1, 0, 0), (0, 7, 1_000_000)]
    data = {0: BIG_DATA, 1: SMALL_DATA}
    expected = bytes(len(rows)) + b"".join(data[shard][at : at + size] for shard, at, size in rows)
    with served.stream() as reader:
        for _ in range(2):
            reader.sendall(framed(asking([BIG, SMALL], rows)))
            assert answer(reader) == expected
    until(lambda: not len(served.poller))
    until(lambda: served.node.counters.reads_in_flight == 0)


def test_requests_that_came_in_one_record_are_each_answered(served: Served) -> None:
    """The second is in OpenSSL's memory, where no poll sees it."""
    with served.stream() as reader:
        reader.sendall(framed(LITTLE) * 5)
        for _ in range(5):
            assert answer(reader) == b"\0" + SMALL_DATA[:500]
        half = framed(LITTLE)
        reader.sendall(half[:30])
        reader.sendall(half[30:])
        assert answer(reader) == b"\0" + SMALL_DATA[:500]


def test_a_reader_that_stops_midway_holds_no_thread_and_may_go_on(served: Served) -> None:
    with served.stream(4096) as slow, served.stream() as other:
        slow.sendall(framed(WHOLE))
        assert FRAME.unpack(received(slow, FRAME.size)) == (b"QRA1", RANGES, 1 + len(BIG_DATA))
        until(lambda: not served.node.budgets.used[Resource.SENDS])
        other.sendall(framed(LITTLE))
        assert answer(other) == b"\0" + SMALL_DATA[:500]
        assert received(slow, 1 + len(BIG_DATA)) == b"\0" + BIG_DATA


def test_a_shard_that_becomes_shorter_while_it_is_sent_cuts_the_answer_off_and_is_suspected(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with served.stream(4096) as slow:
        slow.sendall(framed(WHOLE))
        received(slow, FRAME.size)
        os.truncate(file_of(served.root, Kind.SHARD, BIG), 4096)
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert len(received(slow, 1 + len(BIG_DATA))) < len(BIG_DATA)
    until(lambda: served.node.verification.is_pending(BIG))
    assert "an answer was cut off: a shard's file cannot be read, or became shorter" in caplog.text


def test_a_reader_that_leaves_midway_leaves_nothing(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    for what in (b"", framed(WHOLE), framed(WHOLE)[:40], b"\1"):
        with served.stream(4096) as reader:
            reader.sendall(what)
    until(lambda: not any(served.node.budgets.used.values()))
    assert not len(served.poller)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
