"""A daemon whose origin does not answer: the shards of others are filled, readers fall back, and it can be ended."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from quiver.errors import Unavailable
from quiver.peer import PeerClient
from quiver.wire import RANGE, RangeStatus, ReadRequest
from quiver_cacheserver.origins.unresponsive import WAITING_MAX, GuardedOrigin, UnresponsiveOrigins
from quiver_client import Dataset
from tests.daemon.test_rack import put_manifest, whole_dataset
from tests.support.daemon import Daemon
from tests.support.data import Files, make_files, random_files, rebased
from tests.support.origins import HANG, OK, Way, scripted_origin
from tests.support.waiting import until


class Hanging:
    """A ``SampleOrigin`` that answers when it is told."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()
        self.failure: Unavailable | None = Unavailable(base, "hangs")

    def read(self, blobs: Sequence[int], out: memoryview) -> int:
        self.begun.release()
        assert self.go.wait(20)
        if self.failure is not None:
            raise self.failure
        return 0

    def close(self) -> None:
        pass


def fill(origin: GuardedOrigin) -> threading.Thread:
    def read() -> None:
        with contextlib.suppress(Unavailable):
            origin.read([0], memoryview(b""))

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def test_of_an_origin_in_trouble_one_fill_waits_and_the_others_fail_at_once() -> None:
    inner, troubled = Hanging("http://a/"), UnresponsiveOrigins()
    origin = GuardedOrigin(inner, troubled)
    inner.go.set()
    with pytest.raises(Unavailable, match="hangs"):
        origin.read([0], memoryview(b""))
    inner.go.clear()
    trying = fill(origin)
    assert inner.begun.acquire(timeout=10)
    assert inner.begun.acquire(timeout=10)
    with pytest.raises(Unavailable, match="another fill"):
        origin.read([0], memoryview(b""))
    inner.failure = None
    inner.go.set()
    trying.join(10)
    assert origin.read([0], memoryview(b"")) == 0
    assert inner.base not in troubled


def test_all_origins_in_trouble_together_hold_half_of_the_threads() -> None:
    troubled = UnresponsiveOrigins()
    inner = [Hanging(f"http://{number}/") for number in range(WAITING_MAX + 1)]
    for each in inner:
        each.go.set()
        fill(GuardedOrigin(each, troubled)).join(10)
        each.go.clear()
    trying = [fill(GuardedOrigin(each, troubled)) for each in inner[:WAITING_MAX]]
    for each in inner[:WAITING_MAX]:
        assert each.begun.acquire(timeout=10)
        assert each.begun.acquire(timeout=10)
    with pytest.raises(Unavailable, match="another fill"):
        GuardedOrigin(inner[-1], troubled).read([0], memoryview(b""))
    for each, thread in zip(inner, trying, strict=False):
        each.go.set()
        thread.join(10)


@pytest.fixture
def local(tmp_path: Path) -> Files:
    return make_files(tmp_path, random_files(60, seed=8), shard_bytes="64KiB")


def ask_for_all(daemon: Daemon, files: Files, wait_ms: int) -> list[int]:
    """Ask for every shard in one read; return their statuses."""
    manifest = files.opened()
    ranges = np.zeros(manifest.shard_count, RANGE)
    ranges["shard"], ranges["length"] = np.arange(manifest.shard_count), 1
    names = tuple(manifest.shard_digest(number) for number in range(manifest.shard_count))
    with contextlib.closing(PeerClient(daemon.url)) as peer:
        statuses, _ = peer.read(ReadRequest(put_manifest(daemon, files), names, ranges, wait_ms))
    return [int(status) for status in statuses]


@pytest.mark.fault("O5")
def test_a_failing_origin_does_not_keep_another_ones_shards_away(local: Files, tmp_path: Path) -> None:
    other = make_files(tmp_path / "other", random_files(60, seed=9), shard_bytes="64KiB")
    with scripted_origin(other.folder, lambda name: Way(503)) as origin:
        remote = rebased(other, origin.url, tmp_path / "remote.quiver")
        with Daemon(tmp_path / "data", origins=[local.folder, origin.url]) as daemon:
            ask_for_all(daemon, remote, 0)
            until(lambda: origin.asked)
            began = time.monotonic()
            whole_dataset(local, daemon.url).close()
            assert time.monotonic() - began < 15
            assert daemon.metric("quiver_resident_bytes") >= local.total_bytes()
            assert len(origin.asked) < 100, "of dozens of fills, each tries once or fails at once"


@pytest.mark.fault("O5")
def test_a_reader_falls_back_while_the_daemons_origin_fails(local: Files, tmp_path: Path) -> None:
    with scripted_origin(local.folder, lambda name: Way(500)) as origin:
        remote = rebased(local, origin.url, tmp_path / "remote.quiver")
        with Daemon(tmp_path / "data", origins=[origin.url]) as daemon:
            statuses = ask_for_all(daemon, remote, 10_000)
            assert set(statuses) == {RangeStatus.FAILED}
            origin.all(OK)
            dataset = Dataset(remote.manifest, daemon.url, fields=["image", "__key__"])
            samples = dataset.__getitems__(range(60))
            dataset.close()
            assert {sample["__key__"]: sample["image"] for sample in samples} == local.content


def test_a_daemon_whose_origin_hangs_ends_when_it_is_told_to(local: Files, tmp_path: Path) -> None:
    with scripted_origin(local.folder, lambda name: HANG) as origin:
        remote = rebased(local, origin.url, tmp_path / "remote.quiver")
        with Daemon(tmp_path / "data", "--drain-seconds", "0.1", origins=[origin.url]) as daemon:
            ask_for_all(daemon, remote, 0)
            assert origin.held.acquire(timeout=20)
            began = time.monotonic()
            assert daemon.stop() == 0
            assert time.monotonic() - began < 15
