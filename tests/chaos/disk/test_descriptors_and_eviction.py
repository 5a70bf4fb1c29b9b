"""A daemon that runs out of descriptors while clients train, and shards that are evicted while they are sent."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.disk.job import Shop, shop
from tests.chaos.rack import chaos_files
from tests.support.daemon import Daemon, serve
from tests.support.data import Files, make_shard
from tests.support.waiting import until

pytestmark = pytest.mark.chaos
MIB = 1 << 20


@pytest.fixture
def data(tmp_path: Path) -> Files:
    """120 samples in about fifteen shards: less than a MiB."""
    return chaos_files(tmp_path / "files", 120)


@contextlib.contextmanager
def without_descriptors(at: Shop, left: int) -> Iterator[None]:
    """Leave the daemon so many descriptors above those that it has."""
    assert at.daemon.process is not None
    pid = at.daemon.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    highest = max(int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir())
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 1 + left, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@pytest.mark.fault("C6")
def test_a_daemon_without_descriptors_costs_no_sample_and_recovers(data: Files, tmp_path: Path) -> None:
    """Some connections are accepted, and compete with the shards to be opened for the few that are left."""
    stop = tmp_path / "stop"
    with shop(data, tmp_path, tmp_path / "node") as at:
        at.fill(at.manifest.shard_count)
        assert at.daemon.metric("quiver_overloads_total") == 0
        with at.client(until_file=str(stop), pause_seconds=0.02) as old:
            until(lambda: old.samples() >= 8)
            with without_descriptors(at, 6):
                seen = old.samples()
                # All that is left is taken, and given back when the client that took it ends.
                with contextlib.ExitStack() as stack:
                    for _ in range(20):
                        stack.enter_context(socket.create_connection(at.daemon.address, 10))
                    until(lambda: old.samples() >= seen + 120 or old.script.ended, 60, "the old client trains on")
            stop.touch()
            history = old.wait()
        at.check(history)
        assert at.daemon.metric("quiver_overloads_total") > 0, "the fault really fired"
        until(lambda: at.train().stats["bytes_origin"] == 0, 60, "it serves everything again")
        at.check_end()


def _serve_impatiently(stderr: Any, arguments: list[str], environment: dict[str, str]) -> None:
    """Serve, with shards that count as idle, and may be evicted, after a tenth of a second."""
    from quiver.residency import eviction
    from quiver_cacheserver import opened
    from quiver_cacheserver.residency import rooms

    for module in (eviction, opened, rooms):
        vars(module)["IDLE_SECONDS"] = 0.1
    serve(stderr, arguments, environment)


@pytest.mark.fault("C5")
def test_a_shard_that_is_evicted_while_it_is_sent_is_sent_to_its_end(tmp_path: Path) -> None:
    digest, content = make_shard([os.urandom(16 * MIB)])
    daemon = Daemon(tmp_path / "data", capacity=str(len(content) + 4 * MIB))
    daemon.serve = _serve_impatiently
    with daemon:
        assert daemon.ask("PUT", f"/v1/shards/{digest}", content)[0] == 201
        with socket.create_connection(daemon.address, 30) as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
            reader.sendall(f"GET /v1/shards/{digest} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            received = bytearray(reader.recv(1000))
            other, its_content = make_shard([os.urandom(8 * MIB)])

            def is_evicted() -> bool:
                daemon.ask("PUT", f"/v1/shards/{other}", its_content)
                return str(digest) not in {path.name for path in daemon.files()}

            until(is_evicted, 60, "what nobody needs is evicted once it was idle")
            while piece := reader.recv(1 << 20):
                received += piece
        assert bytes(received.partition(b"\r\n\r\n")[2]) == content
        assert {path.name for path in daemon.files()} == {str(other)}
