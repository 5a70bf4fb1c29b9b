"""``POST /v1/fill``, ``/v1/forgo`` and ``/v1/recheck``: what a client asks for whole shards, without reading them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from quiver.digest import Digest
from quiver.store import Kind
from quiver.store.inventory import file_of
from quiver.wire import (
    FORGO,
    MSGPACK_TYPE,
    RANGE,
    RANGES_MAX,
    SHARDS_REQUEST_BYTES_MAX,
    FillRequest,
    ForgoRequest,
    RangeStatus,
    ReadRequest,
    RecheckRequest,
    ShardStatuses,
)
from quiver_cacheserver import serve
from quiver_cacheserver.budget import Resource
from quiver_cacheserver.config import Config
from quiver_cacheserver.node import Node
from quiver_cacheserver.serving import reads
from tests.daemon.test_limits import (
    HONEST,
    answer_of,
    asked,
    connected,
    over_capacity,
    request,
    under_way,
    waiting_for_an_upload,
)
from tests.daemon.test_routes import error_of
from tests.support.daemon import Daemon
from tests.support.data import Files, make_shard
from tests.support.inside import in_process
from tests.support.waiting import until


def fill(daemon: Daemon, shards: list[Digest], manifest: Digest, wait_ms: int = 0) -> list[int]:
    status, body, headers = daemon.ask("POST", "/v1/fill", FillRequest(manifest, tuple(shards), wait_ms).encode())
    assert status == 200, body
    assert headers["content-type"] == MSGPACK_TYPE
    return list(ShardStatuses.decode(body, len(shards)).statuses)


def status_of(daemon: Daemon, shard: Digest, manifest: Digest, flags: int = 0, wait_ms: int = 0) -> int:
    """Return the status of a read of nothing of a shard."""
    body = ReadRequest(manifest, (shard,), np.zeros(1, RANGE), wait_ms, flags).encode()
    return daemon.ask("POST", "/v1/read", body)[1][0]


def test_shards_are_filled_while_the_client_waits_and_each_has_its_status(files: Files, tmp_path: Path) -> None:
    manifest = files.opened()
    shards = [manifest.shard_digest(number) for number in range(manifest.shard_count)]
    stranger = Digest.of(b"nobody's")
    with Daemon(tmp_path / "data", origins=[files.folder]) as daemon:
        assert set(fill(daemon, shards, manifest.digest)) == {RangeStatus.NO_MANIFEST}
        daemon.ask("PUT", f"/v1/manifests/{manifest.digest}", files.manifest.read_bytes())
        statuses = fill(daemon, [*shards, stranger], manifest.digest, 20_000)
        assert statuses == [RangeStatus.PRESENT] * len(shards) + [RangeStatus.NO_MANIFEST]
        assert daemon.status()["fills"] == len(shards)
        assert fill(daemon, shards[:2], manifest.digest) == [RangeStatus.PRESENT] * 2
        assert fill(daemon, [], manifest.digest) == []
        assert daemon.metric("quiver_served_bytes_total") == 0


@pytest.mark.parametrize("by_flag", [False, True], ids=["verb", "flag of a read"])
def test_a_client_that_was_chosen_to_upload_and_cannot_says_so(files: Files, tmp_path: Path, by_flag: bool) -> None:
    manifest = files.opened()
    shard = manifest.shard_digest(0)
    with Daemon(tmp_path / "data") as daemon:  # may read no origin
        daemon.ask("PUT", f"/v1/manifests/{manifest.digest}", files.manifest.read_bytes())
        assert fill(daemon, [shard], manifest.digest, 5_000) == [RangeStatus.UPLOAD], "the first that asks is chosen"
        assert fill(daemon, [shard], manifest.digest) == [RangeStatus.FILLING], "the next one waits for it"
        if by_flag:
            assert status_of(daemon, shard, manifest.digest, FORGO) == RangeStatus.FAILED
        else:
            status, body, _ = daemon.ask("POST", "/v1/forgo", ForgoRequest(manifest.digest, (shard,)).encode())
            assert (status, body) == (204, b"")
        assert fill(daemon, [shard], manifest.digest) == [RangeStatus.FAILED], "all read the origin for a moment"


def test_a_shard_of_which_wrong_bytes_came_is_verified_before_it_is_served_again(tmp_path: Path) -> None:
    good, good_data = make_shard([b"good" * 100])
    bad, bad_data = make_shard([b"bad" * 100])
    nobody = Digest.of(b"no manifest")
    with Daemon(tmp_path / "data") as daemon:
        for shard, data in ((good, good_data), (bad, bad_data)):
            assert daemon.ask("PUT", f"/v1/shards/{shard}", data)[0] == 201
        path = file_of(daemon.data_dir, Kind.SHARD, bad)
        path.write_bytes(b"x" + bad_data[1:])
        assert status_of(daemon, bad, nobody) == RangeStatus.PRESENT, "nobody said so yet"
        status, body, _ = daemon.ask("POST", "/v1/recheck", RecheckRequest((good, bad)).encode())
        assert (status, body) == (204, b"")
        assert status_of(daemon, bad, nobody, wait_ms=20_000) == RangeStatus.NO_MANIFEST
        assert status_of(daemon, good, nobody, wait_ms=20_000) == RangeStatus.PRESENT
        until(lambda: daemon.metric("quiver_corruptions_total") == 1)


@pytest.mark.parametrize("verb", ["fill", "forgo", "recheck"])
def test_junk_is_refused_and_what_is_too_large_is_not_read(lone: Daemon, verb: str) -> None:
    for body in (b"", b"\xc1", b"junk", b"\x80", RecheckRequest((Digest.of(b"a"),)).encode()[:-1]):
        status, told, _ = lone.ask("POST", f"/v1/{verb}", body)
        assert (status, error_of(told)) == (400, "bad_request")
    status, told, _ = lone.ask("POST", f"/v1/{verb}", bytes(SHARDS_REQUEST_BYTES_MAX + 1))
    assert (status, error_of(told)) == (400, "bad_request")
    assert lone.ask("GET", f"/v1/{verb}")[0] == 405


@pytest.mark.parametrize("verb", ["fill", "forgo", "recheck"])
def test_naming_many_shards_is_charged_as_in_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setattr(reads, "SHARD_SECONDS", 1.0)
    names = np.random.default_rng(0).bytes(32 * RANGES_MAX)
    shards = tuple(Digest(names[at : at + 32]) for at in range(0, len(names), 32))
    made = FillRequest(Digest.of(b"m"), shards) if verb == "fill" else ForgoRequest(Digest.of(b"m"), shards)
    body = RecheckRequest(shards).encode() if verb == "recheck" else made.encode()
    with in_process(tmp_path) as address:
        assert asked(address, request("POST", f"/v1/{verb}", body))[0] in (200, 204)
        assert over_capacity(asked(address, request("POST", f"/v1/{verb}", body)))
        assert asked(address, request("POST", f"/v1/{verb}", body), HONEST)[0] in (200, 204)


def test_a_fill_that_waits_counts_as_held_with_all_that_it_names(files: Files, tmp_path: Path) -> None:
    """Thousands may wait, and each keeps the names of its shards in memory."""
    manifest = files.opened()
    body = FillRequest(manifest.digest, (manifest.shard_digest(0),), 20_000).encode()
    with waiting_for_an_upload(files, tmp_path, {}) as (address, _, upload), connected(address) as sock:
        sock.sendall(request("POST", "/v1/fill", body))
        until(lambda: under_way(address, Resource.WAITING) == 1)
        assert under_way(address, Resource.BODY_BYTES) == len(body)
        upload()
        status, _, answer = answer_of(sock)
        assert (status, ShardStatuses.decode(answer, 1).statuses) == (200, b"\0")
        until(lambda: under_way(address, Resource.WAITING) == under_way(address, Resource.BODY_BYTES) == 0)


def test_a_daemon_that_drains_waits_for_fills_as_for_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "QUIET_SECONDS", 0.0)
    nodes: list[Node] = []

    async def drained(node: Node) -> None:
        draining = asyncio.create_task(serve._drain(Config(drain_seconds=20), node))
        with node.budgets.holding("a reader", Resource.WAITING):
            await asyncio.sleep(0.2)
            assert not draining.done()
        await asyncio.wait_for(draining, 10)

    with in_process(tmp_path, made=nodes.append):
        asyncio.run(drained(nodes[0]))
