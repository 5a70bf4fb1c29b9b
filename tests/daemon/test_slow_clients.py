"""Hundreds of clients that drip, stop and idle, beside an honest one: they are closed at a deadline, and it is served.

``python -m bench abuse`` has the thousands, and the figures.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import numpy as np
import pytest

from bench.hostile_clients import hostile
from quiver.peer import PeerClient
from quiver.wire import RANGE, ReadRequest
from quiver_cacheserver.serving.listening import HEAD_SECONDS
from tests.daemon.test_hostile_sizes import Watched
from tests.daemon.test_limits import BIG, BIG_DATA, SMALL, SMALL_DATA, connected, read_of
from tests.support.waiting import until

HEADS, UPLOADS, IDLE, SLOW_READERS = 150, 150, 700, 40
PATIENCE_SECONDS = 5.0  # of a reader on the path of a batch
CONNECTION_BYTES = 32 << 10


@pytest.mark.chaos
@pytest.mark.fault("S3")
def test_an_honest_reader_is_served_beside_a_thousand_clients_that_give_nothing(tmp_path: Path) -> None:
    ranges = np.zeros(8, RANGE)
    ranges["offset"], ranges["length"] = np.arange(8) * 50, 50
    read = ReadRequest(None, (SMALL,), ranges)
    with Watched(tmp_path / "data") as daemon, contextlib.ExitStack() as stack:
        for digest, data in ((SMALL, SMALL_DATA), (BIG, BIG_DATA)):
            assert daemon.ask("PUT", f"/v1/shards/{digest}", data)[0] == 201
        before = daemon.memory("VmRSS")
        peer = stack.enter_context(contextlib.closing(PeerClient(daemon.url)))
        stack.enter_context(hostile(daemon.url, HEADS, UPLOADS, IDLE))
        for at in range(SLOW_READERS):  # that ask for 16 MiB, and take nothing of it
            sock = stack.enter_context(connected(daemon.address, f"127.0.3.{at % 4 + 1}", receive_bytes=4096))
            sock.sendall(read_of(BIG, len(BIG_DATA)))
        until(lambda: daemon.metric("quiver_reads_in_flight") >= SLOW_READERS)
        longest, count = 0.0, 0
        ends = time.monotonic() + HEAD_SECONDS + 8
        while time.monotonic() < ends:
            began = time.monotonic()
            statuses, data = peer.read(read)
            longest, count = max(longest, time.monotonic() - began), count + 1
            assert not statuses.any()
            assert data.tobytes() == SMALL_DATA[:400]
            time.sleep(0.01)
        assert count > 100
        assert longest < PATIENCE_SECONDS
        closed = daemon.metric("quiver_connections_closed_total")
        assert closed >= HEADS, "what has no head after ten seconds is closed; the fault was there"
        assert daemon.memory("VmHWM") - before < (HEADS + UPLOADS + IDLE) * CONNECTION_BYTES + (96 + 24 << 20)
        assert "Traceback" not in daemon.log
        assert daemon.ask("GET", "/healthz")[0] == 200


@pytest.mark.chaos
@pytest.mark.fault("S3", "S12")
def test_a_daemon_recovers_at_once_when_hostile_clients_leave(tmp_path: Path) -> None:
    with Watched(tmp_path / "data") as daemon:
        with hostile(daemon.url, HEADS, UPLOADS, IDLE):
            assert daemon.ask("GET", "/healthz")[0] == 200
            assert daemon.metric("quiver_under_way") > HEADS
        until(lambda: daemon.metric("quiver_under_way") == 1)  # the connection that asks
        assert daemon.process is not None
        assert len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir())) < 100
