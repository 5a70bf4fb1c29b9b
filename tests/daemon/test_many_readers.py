"""As many readers as a rack has: each gets a stream, and idle ones cost neither a thread nor a handler."""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from quiver.transport.stream import SIZE
from quiver_cacheserver.budget import Resource
from tests.daemon.test_limits import UPGRADE, metric, under_way, waiting_for_an_upload
from tests.daemon.test_streams import LITTLE, SMALL, SMALL_DATA, ask, asking, connected, rest_of
from tests.support.daemon import Daemon, FreshDaemon
from tests.support.data import Files
from tests.support.inside import in_process
from tests.support.waiting import until

READERS = 2_000
THREADS_MAX = 64


@pytest.fixture
def many_files() -> Iterator[None]:
    """Allow this process, and the daemons that it starts, as many open files as the system does."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    if before[1] < 4 * READERS:
        pytest.skip(f"no more than {before[1]} files may be open")
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def threads_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def test_all_readers_of_a_rack_have_streams_and_the_daemon_has_few_threads(tmp_path: Path, many_files: None) -> None:
    with FreshDaemon(tmp_path / "data") as daemon, contextlib.ExitStack() as stack:
        assert daemon.process is not None
        daemon.ask("PUT", f"/v1/shards/{SMALL}", SMALL_DATA)
        readers = []
        for _ in range(READERS):
            sock = stack.enter_context(socket.create_connection(daemon.address, 60))
            sock.sendall(UPGRADE)
            readers.append(sock)
        for sock in readers:
            assert sock.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 101"
            while not sock.recv(1 << 10).endswith(b"\r\n\r\n"):
                pass
        for sock in readers:  # and all read at once
            ask(sock, LITTLE)
        for sock in readers:
            assert rest_of(sock, 16 + 1 + 500)[16:] == b"\0" + SMALL_DATA[:500]
        assert threads_of(daemon.process.pid) <= THREADS_MAX
        until(lambda: daemon.metric("quiver_reads_in_flight") == 0)
        held = daemon.ask("GET", "/metrics")[1].decode()
        assert f'quiver_under_way{{limit="streams"}} {float(READERS)}' in held
        assert 'quiver_under_way{limit="connections"} 1.0' in held, "aiohttp has none of them any more"


def test_a_reader_that_leaves_while_its_answer_is_computed_leaves_nothing(files: Files, tmp_path: Path) -> None:
    with waiting_for_an_upload(files, tmp_path, {}) as (address, waits, upload):
        body = waits.partition(b"\r\n\r\n")[2]
        before = open_files()
        with contextlib.ExitStack() as stack:
            leaving = [stack.enter_context(connected(address)) for _ in range(4)]
            staying = stack.enter_context(connected(address))
            for sock in (*leaving, staying):
                sock.sendall(SIZE.pack(len(body)) + body)
            until(lambda: under_way(address, Resource.WAITING) == 5)
            leaving[0].close()
            leaving[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            leaving[1].close()
            leaving[2].shutdown(socket.SHUT_WR)  # it still listens
            leaving[3].sendall(SIZE.pack(len(body)) + body[:20])  # and asks for more, and goes
            leaving[3].close()
            upload()
            for sock in (leaving[2], staying):
                assert len(rest_of(sock, 16 + 1 + 100)) == 16 + 1 + 100
        for what in (Resource.STREAMS, Resource.WAITING, Resource.READS, Resource.BODY_BYTES, Resource.SENDS):
            until(lambda what=what: under_way(address, what) == 0, what=what)
        until(lambda: metric(address, "quiver_reads_in_flight") == 0)
        until(lambda: open_files() <= before + 1)  # the daemon keeps the shard open


@pytest.mark.fault("S3")
def test_a_reader_that_is_silent_between_requests_costs_no_handler(tmp_path: Path) -> None:
    """The connection's task, transport and protocol end with the upgrade."""
    with in_process(tmp_path, {SMALL: SMALL_DATA}) as address, contextlib.ExitStack() as stack:
        streams = [stack.enter_context(connected(address)) for _ in range(20)]
        until(lambda: under_way(address, Resource.STREAMS) == 20)
        until(lambda: under_way(address, Resource.CONNECTIONS) == 1)  # the one that asks
        until(lambda: under_way(address, Resource.ARRIVING) == 0)
        for sock in streams:
            ask(sock, LITTLE)
            assert rest_of(sock, 16 + 501)[16:] == b"\0" + SMALL_DATA[:500]


@pytest.mark.fault("S5")
def test_requests_that_are_sent_ahead_are_answered_in_order(tmp_path: Path) -> None:
    with in_process(tmp_path, {SMALL: SMALL_DATA}) as address, connected(address) as sock:
        rows = [(0, at, 7) for at in range(50)]
        for row in rows:
            ask(sock, asking([SMALL], [row]))
        for _, at, size in rows:
            assert rest_of(sock, 16 + 1 + size)[17:] == SMALL_DATA[at : at + size]


@pytest.mark.fault("C6")
def test_streams_without_descriptors_are_refused_and_the_daemon_serves_on(tmp_path: Path) -> None:
    """A stream is a descriptor of its own while it is handed over."""
    with Daemon(tmp_path / "data") as daemon, connected(daemon.address) as old, contextlib.ExitStack() as stack:
        daemon.ask("PUT", f"/v1/shards/{SMALL}", SMALL_DATA)
        ask(old, LITTLE)
        assert rest_of(old, 16 + 501)[16:] == b"\0" + SMALL_DATA[:500]
        assert daemon.process is not None
        pid = daemon.process.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        highest = max(int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir())
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 4, limits[1]))
        many = [stack.enter_context(socket.create_connection(daemon.address, 20)) for _ in range(20)]
        for sock in many:
            with contextlib.suppress(ConnectionError):
                sock.sendall(UPGRADE)
        for _ in range(3):
            ask(old, LITTLE)
            assert rest_of(old, 16 + 501)[16:] == b"\0" + SMALL_DATA[:500]
        stack.close()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)

        def serves() -> bool:
            # While the daemon closes those that waited for a descriptor, it closes whatever else connects.
            with contextlib.suppress(ConnectionError), connected(daemon.address) as sock:
                ask(sock, LITTLE)
                return rest_of(sock, 16 + 501)[16:] == b"\0" + SMALL_DATA[:500]
            return False

        until(serves)
        assert "Traceback" not in daemon.log


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
