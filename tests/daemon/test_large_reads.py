"""Reads that name as many shards as may be: the event loop serves others meanwhile, and who sends them is charged."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from quiver.digest import Digest
from quiver.wire import RANGE, RANGES_MAX, RangeStatus, ReadRequest
from quiver_cacheserver.budget import RATES, Cost
from quiver_cacheserver.serving import reads
from tests.daemon.test_limits import HONEST, asked, request
from tests.daemon.test_routes import error_of
from tests.support.daemon import Daemon
from tests.support.data import Files
from tests.support.inside import in_process

AT_ONCE = 24
SLOWEST_SECONDS = 4.0  # of the daemon's processors, however busy the machine is: a quarter to one; it was 17


def large(manifest: Digest | None) -> bytes:
    """A read of shards that nobody has."""
    names = np.random.default_rng(0).bytes(32 * RANGES_MAX)
    shards = tuple(Digest(names[at : at + 32]) for at in range(0, len(names), 32))
    return request("POST", "/v1/read", ReadRequest(manifest, shards, np.zeros(0, RANGE), 0).encode())


@pytest.mark.fault("S12")
def test_reads_of_many_shards_hold_up_nobody_else(files: Files, tmp_path: Path) -> None:
    manifest = files.opened()
    shard = manifest.shard_digest(0)
    ranges = np.zeros(1, RANGE)
    ranges["length"] = 100
    usual = request("POST", "/v1/read", ReadRequest(manifest.digest, (shard,), ranges, 20_000).encode())
    with Daemon(tmp_path / "node", origins=[files.folder]) as daemon, ThreadPoolExecutor(AT_ONCE) as threads:
        assert daemon.ask("PUT", f"/v1/manifests/{manifest.digest}", files.manifest.read_bytes())[0] == 201
        address = (daemon.url.removeprefix("http://").split(":")[0], int(daemon.url.rpartition(":")[2]))
        body = large(manifest.digest)
        over = threading.Event()
        took: list[float] = []

        def computed() -> float:
            """Return for how long the daemon has computed, in seconds."""
            assert daemon.process is not None
            fields = Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

        def poll() -> None:
            while not over.is_set():
                began = computed()
                assert asked(address, request("GET", "/healthz"), HONEST)[0] == 200
                took.append(computed() - began)
                over.wait(0.02)

        polling = threads.submit(poll)
        answers = [threads.submit(asked, address, body) for _ in range(AT_ONCE - 1)]
        began = computed()
        status, _, answer = asked(address, usual, HONEST)
        usual_seconds = computed() - began
        assert (status, answer[0]) == (200, RangeStatus.PRESENT)
        assert {each.result()[0] for each in answers} <= {200, 503}
        over.set()
        polling.result()
    assert usual_seconds < 2 * SLOWEST_SECONDS, "it is filled from its origin meanwhile"
    assert max(took) < SLOWEST_SECONDS


@pytest.mark.fault("S12")
def test_an_address_that_reads_many_shards_over_and_over_is_refused_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "SHARD_SECONDS", RATES[Cost.WORK_SECONDS].burst / RANGES_MAX)
    body = large(None)
    with in_process(tmp_path) as address:
        answers = [asked(address, body) for _ in range(3)]
        assert answers[0][0] == 200
        status, headers, refusal = answers[-1]
        assert (status, error_of(refusal)) == (503, "over_capacity")
        assert int(headers["retry-after"]) >= 1
        few = request("POST", "/v1/read", ReadRequest(None, (Digest.of(b"a"),), np.zeros(1, RANGE), 0).encode())
        assert asked(address, few)[0] == 200, "a usual batch is not charged"
        assert asked(address, body, HONEST)[0] == 200


def test_each_of_many_shards_has_its_own_status(files: Files, tmp_path: Path) -> None:
    manifest = files.opened()
    known = [manifest.shard_digest(number) for number in range(manifest.shard_count)]
    names = np.random.default_rng(1).bytes(32 * 2000)
    made_up = [Digest(names[at : at + 32]) for at in range(0, len(names), 32)]
    shards = (*made_up[:1500], *known, *made_up[1500:])
    ranges = np.zeros(len(shards), RANGE)
    ranges["shard"] = np.arange(len(shards))
    body = ReadRequest(manifest.digest, shards, ranges, 20_000).encode()
    with Daemon(tmp_path / "node", origins=[files.folder]) as daemon:
        daemon.ask("PUT", f"/v1/manifests/{manifest.digest}", files.manifest.read_bytes())
        statuses = np.frombuffer(daemon.ask("POST", "/v1/read", body)[1], np.uint8)
    there = np.isin(np.arange(len(shards)), np.arange(1500, 1500 + len(known)))
    assert set(statuses[there].tolist()) == {RangeStatus.PRESENT}
    assert set(statuses[~there].tolist()) == {RangeStatus.NO_MANIFEST}
