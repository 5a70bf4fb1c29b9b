"""Late reads are sent once more: to daemons that have the shards, else to the origin, but not during a fill."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.grey_proxy import GreyProxy
from quiver.health import HEDGED_BURST_BYTES, HEDGED_SHARE
from quiver.manifest import Manifest
from quiver.peer import PeerClient
from quiver.transport.liveness import IN_RACK
from quiver.wire import FillRequest
from quiver_client import Dataset
from quiver_client.rack import hedging
from quiver_client.rack.members import RING_SECONDS
from quiver_client.rack.tier import RackTier
from tests.support.daemon import Daemon
from tests.support.data import Files, make_files, random_files, rebased
from tests.support.etcd import free_ports
from tests.support.servers import counting_origin
from tests.support.waiting import until

Make = Callable[..., Dataset]
FIELDS = ["image", "__key__"]
GIVEN_UP_SECONDS = 5.0  # no test here waits so long for a daemon that is mute: its patience is seven seconds
PATIENT_SECONDS = 30.0
COUNT = 60


@pytest.fixture(autouse=True)
def patient_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No daemon is passed over because a busy machine keeps it from answering a health check: its reads are hedged."""
    patient = IN_RACK._replace(connect_seconds=PATIENT_SECONDS, alive_seconds=PATIENT_SECONDS)
    monkeypatch.setattr("quiver_client.rack.members.IN_RACK", patient)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("small"), random_files(COUNT, seed=1), shard_bytes="64KiB")


@contextlib.contextmanager
def two_daemons(where: Path, origin: Path | str) -> Iterator[tuple[list[Daemon], GreyProxy]]:
    """Run a rack of two daemons; the second is reached through a proxy."""
    port, hidden = free_ports(2)
    with GreyProxy(hidden) as proxy, contextlib.ExitStack() as ending:
        urls = [f"http://127.0.0.1:{port}", proxy.url]
        daemons = [
            Daemon(where / name, "--peers", ",".join(urls), "--advertise", url, port=at, origins=[origin])
            for name, url, at in (("a", urls[0], port), ("b", urls[1], hidden))
        ]
        for daemon in daemons:
            ending.enter_context(daemon)
        yield daemons, proxy


@pytest.fixture
def rack(small: Files, tmp_path: Path) -> Iterator[tuple[list[Daemon], GreyProxy]]:
    with two_daemons(tmp_path, small.folder) as made:
        yield made


def fill(daemon: Daemon, manifest: Manifest) -> None:
    """Make a daemon hold all shards, whoever owns them."""
    with contextlib.closing(PeerClient(daemon.url)) as peer:
        peer.put_manifest(manifest.digest, manifest.content)
        names = tuple(manifest.shard_digest(number) for number in range(manifest.shard_count))
        assert not peer.fill(FillRequest(manifest.digest, names, 30_000)).any()


def read(made: Dataset, files: Files, rows: list[int] | None = None) -> float:
    """Read samples and compare them; return how long that took."""
    begun = time.monotonic()
    samples = made.__getitems__(list(range(COUNT)) if rows is None else rows)
    seconds = time.monotonic() - begun
    for sample in samples:
        assert sample["image"] == files.content[sample["__key__"]]
    return seconds


def tier_of(made: Dataset) -> RackTier:
    tier: Any = made._open().tiers[1]
    return tier


def within_budget(stats: dict[str, int]) -> bool:
    read_bytes = stats["bytes_host"] + stats["bytes_rack"] + stats["bytes_origin"]
    return stats["bytes_hedged"] <= HEDGED_BURST_BYTES + HEDGED_SHARE * read_bytes


def test_a_daemon_that_is_stuck_is_overtaken_by_the_runner_up_that_has_the_shards(
    dataset: Make, small: Files, rack: tuple[list[Daemon], GreyProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hedging, "RUNNER_UP_SECONDS", 30.0)  # a busy machine is no reason to read the origin
    daemons, proxy = rack
    for daemon in daemons:
        fill(daemon, small.opened())
    made = dataset(small.manifest, daemons[0].url, fields=FIELDS)
    with monkeypatch.context() as patch:
        patch.setattr("quiver.health.HEDGE_SECONDS_MIN", 30.0)
        read(made, small)
        assert made.stats()["hedges"] == 0
    proxy.behave("mute")
    for _ in range(5):
        assert read(made, small) < GIVEN_UP_SECONDS
    assert proxy.fired > 0
    stats = made.stats()
    assert stats["hedges"] >= 1
    assert stats["samples_rack"] == 6 * COUNT
    assert stats["bytes_origin"] == 0, "another daemon had everything"
    members = tier_of(made)._members
    until(lambda: members.is_avoided(proxy.url))
    asked = made.stats()["hedges"]
    with monkeypatch.context() as patch:
        patch.setattr("quiver.health.HEDGE_SECONDS_MIN", 3.0)  # below which the other one answers on a busy machine too
        assert read(made, small) < 3.0
        assert made.stats()["hedges"] == asked, "it is passed over, not hedged again and again"
    proxy.behave("pass")
    until(lambda: read(made, small) >= 0 and not members.is_avoided(proxy.url))


def test_a_stuck_daemon_that_would_be_asked_for_the_ring_holds_no_batch_up(
    dataset: Make, small: Files, rack: tuple[list[Daemon], GreyProxy]
) -> None:
    daemons, proxy = rack
    for daemon in daemons:
        fill(daemon, small.opened())
    made = dataset(small.manifest, proxy.url, fields=FIELDS)
    read(made, small)
    members = tier_of(made)._members
    members._asked_at = -RING_SECONDS  # the loop has paused for so long
    proxy.behave("mute")
    assert read(made, small) < IN_RACK.silence_seconds - 1.0


def test_what_no_daemon_has_is_read_from_the_origin_within_the_budget(
    dataset: Make, small: Files, rack: tuple[list[Daemon], GreyProxy]
) -> None:
    daemons, proxy = rack
    made = dataset(small.manifest, daemons[0].url, fields=FIELDS)
    for _ in range(2):
        read(made, small)
    before = made.stats()
    assert before["bytes_origin"] == 0
    proxy.behave("mute")
    assert read(made, small) < GIVEN_UP_SECONDS
    stats = made.stats()
    assert stats["hedges"] >= 1
    assert 0 < stats["bytes_origin"] <= stats["bytes_hedged"], "all of it counts as hedged"
    assert stats["samples_rack"] + stats["samples_origin"] == 3 * COUNT
    assert within_budget(stats)
    assert stats["corruptions"] == 0


def test_samples_that_a_hedge_read_in_vain_from_the_origin_are_counted_as_the_racks(
    dataset: Make, small: Files, rack: tuple[list[Daemon], GreyProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemons, proxy = rack
    made = dataset(small.manifest, daemons[0].url, fields=FIELDS)
    for _ in range(2):
        read(made, small)
    hedges = tier_of(made)._hedges
    answered = threading.Event()
    real = hedges._origin
    assert real is not None

    def overtaken(scratch: Any) -> None:
        real(scratch)
        proxy.behave("pass")
        assert answered.wait(60)

    monkeypatch.setattr(hedges, "_origin", overtaken)
    proxy.behave("mute")
    read(made, small)
    answered.set()
    until(lambda: hedges._running == 0)
    stats = made.stats()
    assert stats["bytes_origin"] > 0, "the hedge read"
    assert (stats["samples_rack"], stats["samples_origin"]) == (3 * COUNT, 0)
    assert stats["bytes_rack"] == 3 * small.total_bytes()


def test_a_hedge_that_may_cost_nothing_is_not_made_and_a_stuck_daemon_is_passed_over_all_the_same(
    dataset: Make, small: Files, rack: tuple[list[Daemon], GreyProxy]
) -> None:
    daemons, proxy = rack
    made = dataset(small.manifest, daemons[0].url, fields=FIELDS)
    for _ in range(12):  # until it is known what is usual
        read(made, small)
    tier = tier_of(made)
    until(lambda: tier._hedges._running == 0)  # on a loaded machine there may be some
    health = tier._members.health
    assert health.take(int(health.budget._left_bytes))
    before = made.stats()
    proxy.behave("mute")
    assert read(made, small) < GIVEN_UP_SECONDS
    stats = made.stats()
    assert stats["hedges"] == before["hedges"]
    assert stats["bytes_hedged"] == before["bytes_hedged"]
    assert stats["fallbacks"] > before["fallbacks"]


def test_a_daemon_that_waits_for_the_origin_is_no_failure(dataset: Make, small: Files, tmp_path: Path) -> None:
    with counting_origin(small.folder) as origin:
        files = rebased(small, origin.url, tmp_path / "web.quiver")
        with two_daemons(tmp_path, origin.url) as (daemons, proxy):
            made = dataset(files.manifest, daemons[0].url, fields=FIELDS)
            origin.open.clear()
            reading = threading.Thread(target=read, args=(made, files))
            reading.start()
            until(lambda: made.stats()["hedges"] >= 1, what="a read becomes late")
            hedges = tier_of(made)._hedges
            until(lambda: hedges._running == 0, what="the hedge has found out that the daemon fills")
            origin.open.set()
            reading.join(60)
            stats = made.stats()
            assert stats["samples_rack"] == COUNT
            assert stats["bytes_origin"] == 0
            assert stats["fallbacks"] == 0
            assert not tier_of(made)._members.is_avoided(proxy.url)
            assert all(count == 1 for count in origin.requests.values()), "one origin read of each"


def test_a_daemon_that_has_filled_just_now_is_given_time_to_answer(
    dataset: Make, small: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hedging, "FILLED_SECONDS", 30.0, raising=False)  # on a busy machine an answer takes long
    with counting_origin(small.folder) as origin:
        files = rebased(small, origin.url, tmp_path / "web.quiver")
        with two_daemons(tmp_path, origin.url) as (daemons, _):
            made = dataset(files.manifest, daemons[0].url, fields=FIELDS)
            hedges = tier_of(made)._hedges
            asked: list[bool] = []

            def holds(late: object) -> bool:
                origin.open.set()  # it has them a moment later, and says so
                asked.append(True)
                return True

            monkeypatch.setattr(hedges, "_holds", holds)
            origin.open.clear()
            read(made, files)
            assert asked
            until(lambda: hedges._running == 0)
            assert made.stats()["samples_rack"] == COUNT
            assert made.stats()["bytes_origin"] == 0
            assert all(count == 1 for count in origin.requests.values()), "one origin read of each"


def test_when_the_origin_is_down_daemons_that_are_avoided_are_asked_all_the_same(
    dataset: Make, small: Files, rack: tuple[list[Daemon], GreyProxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIVER_ORIGIN_PATIENCE", "60s")
    daemons, proxy = rack
    for daemon in daemons:
        fill(daemon, small.opened())
    [nowhere] = free_ports(1)
    files = rebased(small, f"http://127.0.0.1:{nowhere}/", tmp_path / "nowhere.quiver")
    made = dataset(files.manifest, daemons[0].url, fields=FIELDS)
    members = tier_of(made)._members
    monkeypatch.setattr(members, "begin_probes", list)
    for url in (daemons[0].url, proxy.url):
        for _ in range(8):
            members.health.overtaken(url)
        assert members.is_avoided(url)
    read(made, files)
    assert made.stats()["samples_rack"] == COUNT


def test_a_hedge_delivers_no_wrong_byte(
    dataset: Make, small: Files, rack: tuple[list[Daemon], GreyProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemons, proxy = rack
    for daemon in daemons:
        fill(daemon, small.opened())
    made = dataset(small.manifest, daemons[0].url, fields=FIELDS)
    read(made, small)
    hedges = tier_of(made)._hedges
    lied: list[str] = []
    real = hedges._read

    def lying(peer: PeerClient, *rest: Any) -> None:
        request = peer.read

        def wrong(*args: Any) -> Any:
            statuses, data = request(*args)
            lied.append(peer.url)
            return statuses, data ^ np.uint8(1)

        monkeypatch.setattr(peer, "read", wrong)
        try:
            real(peer, *rest)
        finally:
            monkeypatch.setattr(peer, "read", request)

    monkeypatch.setattr(hedges, "_read", lying)
    proxy.behave("mute")
    assert read(made, small) < GIVEN_UP_SECONDS
    assert lied, "the runner-up's answer to the hedge was wrong"
    assert made.stats()["samples_origin"] > 0, "so the hedge went on to the origin"
