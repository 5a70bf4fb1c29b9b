"""Training while daemons die, join and leave, and while etcd is away, loses leases or contains garbage."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

import aetcd
import numpy as np
import pytest

from quiver.peer import PeerClient
from quiver.ring import Ring
from tests.chaos.history import Client
from tests.chaos.rack import TTL_SECONDS, ChaosDaemon, ChaosRack, Plan
from tests.chaos.validators import origin_reads_at_most
from tests.support.data import Files
from tests.support.waiting import until

pytestmark = pytest.mark.chaos
STEP_SECONDS = 0.03
PREFIX = "/quiver/racks/default/members/"


def after(client: Client, count: int, seconds: float = 40.0) -> None:
    """Wait until the client consumed so many more samples."""
    target = client.samples() + count
    until(lambda: client.samples() >= target or client.script.ended, seconds, f"{client.job.name} stands: {client.log}")


def ring_of(rack: ChaosRack, number: int) -> Ring:
    peer = PeerClient(rack.proxies[number].url)
    try:
        return peer.ring().ring()[0]
    finally:
        peer.close()


def owners(rack: ChaosRack, number: int) -> np.ndarray:
    """Return the id of each shard's owner in the ring of a daemon."""
    ring = ring_of(rack, number)
    ranked = ring.rank(rack.manifest.tables.shard_digests, 1)[:, 0]
    return np.array([ring.members[at].id for at in ranked.tolist()])


# -- peers ------------------------------------------------------------------------------------------------------------


@pytest.mark.fault("M1")
def test_a_peer_killed_within_an_epoch_costs_no_sample_and_leaves_the_ring_in_time(
    chaos_data: Files, tmp_path: Path, seed: int
) -> None:
    with ChaosRack(tmp_path, chaos_data, Plan(seed=seed, etcd=True)) as rack:
        clients = [rack.client(epochs=4, pause_seconds=STEP_SECONDS) for _ in range(2)]
        after(clients[0], 100)
        leaks = rack.leaks()
        rack.kill(1)
        killed_at = time.monotonic()
        rack.until_ring_has(2, TTL_SECONDS + 4)
        assert time.monotonic() - killed_at < TTL_SECONDS + 1 + 1, (
            "etcd grants whole seconds, and checks twice a second"
        )
        rack.check(*[client.wait() for client in clients], wait_seconds=6)
        origin_reads_at_most(rack.origin.reads_per_shard(rack.manifest), mean=1.5, worst=2.0)
        leaks.check()


@pytest.mark.fault("M2")
@pytest.mark.parametrize("left", [1, 0])
def test_an_epoch_ends_with_one_daemon_left_and_with_none(
    chaos_data: Files, tmp_path: Path, seed: int, left: int
) -> None:
    with ChaosRack(tmp_path, chaos_data, Plan(seed=seed, sockets=left == 1)) as rack:
        client = rack.client(epochs=3, pause_seconds=STEP_SECONDS)
        after(client, 300)
        for number in range(left, 3):
            rack.kill(number)
        history = client.wait()
        rack.check(history, wait_seconds=8)
        tiers = {sample.tier for sample in history.epoch(2)}
        assert any("host" in tier for tier in tiers) == (left == 1), "from the disk of its own host"
        assert any("origin" in tier for tier in tiers) or left == 1
        warnings = [line for line in history.log.splitlines() if line.startswith("WARNING")]
        assert 0 < len(warnings) < 20, "a dead rack must not flood a log"
        assert len(set(warnings)) >= len(warnings) - 2, "one warning of a kind in 30 s"


# -- etcd -------------------------------------------------------------------------------------------------------------


@pytest.mark.fault("M3")
def test_a_rack_whose_etcd_is_absent_serves_and_joins_when_there_is_one(
    chaos_data: Files, tmp_path: Path, seed: int
) -> None:
    with ChaosRack(tmp_path, chaos_data, Plan(seed=seed, etcd=True, etcd_runs=False)) as rack:
        assert [daemon.metric("quiver_ring_members") for daemon in rack.daemons] == [1, 1, 1]
        client = rack.client(epochs=3, pause_seconds=STEP_SECONDS)
        after(client, 240)
        assert rack.etcd is not None
        rack.etcd.start()
        rack.until_ring_has(3)
        rack.check(client.wait())
        origin_reads_at_most(rack.origin.reads_per_shard(rack.manifest), mean=2.0, worst=3.0)
        for daemon in rack.daemons:
            assert len([line for line in daemon.log.splitlines() if "Check that etcd runs there" in line]) == 1


AWAY: dict[str, tuple[Callable[[ChaosRack], None], Callable[[ChaosRack], None]]] = {
    "killed": (lambda rack: rack.etcd.kill(), lambda rack: rack.etcd.start()),  # type: ignore[union-attr]
    "frozen": (lambda rack: rack.etcd.freeze(), lambda rack: rack.etcd.thaw()),  # type: ignore[union-attr]
    "cut off": (lambda rack: rack.etcd_proxy.refuse(), lambda rack: rack.etcd_proxy.listen()),
}


@pytest.mark.fault("M3")
@pytest.mark.parametrize("how", AWAY)
def test_etcd_may_be_away_for_three_leases(chaos_data: Files, tmp_path: Path, seed: int, how: str) -> None:
    go, come_back = AWAY[how]
    with ChaosRack(tmp_path, chaos_data, Plan(seed=seed, etcd=True)) as rack:
        client = rack.client(epochs=1, pause_seconds=STEP_SECONDS, until_file=str(tmp_path / "over"))
        after(client, 240)
        go(rack)
        gone_at = time.monotonic()
        members = set()
        while time.monotonic() - gone_at < 3 * TTL_SECONDS:
            members |= {daemon.metric("quiver_ring_members") for daemon in rack.daemons}
            after(client, 8)
        ages = [daemon.metric("quiver_ring_age_seconds") for daemon in rack.daemons]
        assert min(ages) > TTL_SECONDS, "the metric shows that the ring is old"
        come_back(rack)
        until(lambda: max(daemon.metric("quiver_ring_age_seconds") for daemon in rack.daemons) < TTL_SECONDS)
        for _ in range(20):
            members |= {daemon.metric("quiver_ring_members") for daemon in rack.daemons}
            after(client, 8)
        assert members == {3}, "the last ring stayed, and no member left it when etcd came back"
        (tmp_path / "over").touch()
        history = client.wait()
        rack.check(history, wait_seconds=5)
        assert history.stats["samples_origin"] < 0.01 * history.stats["samples"], "hits are unaffected"
        origin_reads_at_most(rack.origin.reads_per_shard(rack.manifest), mean=1.05, worst=2.0)
        assert rack.etcd is not None
        versions = re.findall(r'"Version" : (\d+)', rack.etcd.ctl("get", "--prefix", "--write-out=fields", PREFIX))
        assert len(versions) == 3
        assert max(map(int, versions)) <= 3, "no storm of registrations"


@pytest.mark.fault("M4")
def test_revoked_leases_lost_keys_and_compaction_are_mended_while_a_job_trains(
    chaos_data: Files, tmp_path: Path, seed: int
) -> None:
    with ChaosRack(tmp_path, chaos_data, Plan(seed=seed, etcd=True)) as rack:
        etcd = rack.etcd
        assert etcd is not None
        client = rack.client(epochs=1, pause_seconds=STEP_SECONDS, until_file=str(tmp_path / "over"))
        after(client, 240)

        def lease(name: str) -> str:
            found = re.search(r'"Lease" : (\d+)', etcd.ctl("get", "--write-out=fields", PREFIX + name))
            return f"{int(found[1]):x}" if found else ""

        before = lease("node0")
        etcd.ctl("lease", "revoke", before)
        etcd.ctl("del", PREFIX + "node1")
        etcd.ctl("put", PREFIX + "node2", "junk")
        etcd.compact()
        until(lambda: lease("node0") not in ("", before), what="it noticed that its lease is gone")
        until(lambda: all("url" in etcd.ctl("get", PREFIX + f"node{each}") for each in range(3)), what="keys are back")
        rack.until_ring_has(3)
        rack.etcd_proxy.sever()  # the watches end, and begin again at a revision that was compacted meanwhile
        etcd.ctl("put", "/other", "1")
        etcd.compact()
        extra = ChaosDaemon(rack.plan, tmp_path / "extra", "--etcd", etcd.url, "--node-id", "node3")
        with extra:
            rack.until_ring_has(4, 15)
            assert extra.stop() == 0
        rack.until_ring_has(3, 15)
        listed = set(re.findall(rf"{PREFIX}(\w+)", etcd.ctl("get", "--prefix", "--keys-only", PREFIX)))
        assert {member.id for member in ring_of(rack, 0).members} == listed == {"node0", "node1", "node2"}
        (tmp_path / "over").touch()
        rack.check(client.wait(), wait_seconds=4)


# -- rings that differ ------------------------------------------------------------------------------------------------


@pytest.mark.fault("M5")
def test_any_ring_for_each_client_costs_speed_only(chaos_data: Files, tmp_path: Path, seed: int) -> None:
    chance = np.random.default_rng(seed)
    rings = tuple(
        tuple(sorted({number, *chance.choice(4, int(chance.integers(0, 4)), replace=False).tolist()}))
        for number in range(4)
    )
    assert len(set(rings)) > 1
    with ChaosRack(tmp_path, chaos_data, Plan(daemons=4, seed=seed, rings=rings)) as rack:
        clients = [rack.client(epochs=2, cache=proxy.url) for proxy in rack.proxies]
        rack.check(*[client.wait() for client in clients])
        origin_reads_at_most(rack.origin.reads_per_shard(rack.manifest), mean=len(set(rings)), worst=4.0)


# -- joins and leaves -------------------------------------------------------------------------------------------------


@pytest.mark.fault("M6")
def test_a_daemon_that_joins_and_leaves_all_the_time_moves_few_shards_and_fails_no_read(
    chaos_data: Files, tmp_path: Path, seed: int
) -> None:
    plan = Plan(daemons=4, seed=seed, etcd=True, flags=("--drain-seconds", "0.2"))
    with ChaosRack(tmp_path, chaos_data, plan) as rack:
        client = rack.client(epochs=1, pause_seconds=STEP_SECONDS, until_file=str(tmp_path / "over"))
        after(client, 240)
        moved = []
        for _ in range(4):
            for change, count in ((rack.stop, 3), (rack.restart, 4)):
                before = owners(rack, 0)
                change(3)
                rack.until_ring_has(count)
                moved.append(float(np.mean(before != owners(rack, 0))))
                after(client, 24)
        assert max(moved) <= 2 / 4
        assert min(moved) > 0, "each change was one"
        (tmp_path / "over").touch()
        history = client.wait()
        rack.check(history, wait_seconds=6)
        origin_reads_at_most(rack.origin.reads_per_shard(rack.manifest), mean=1.5, worst=3.0)


@pytest.mark.fault("M6")
def test_a_rolling_restart_fails_no_read(chaos_data: Files, tmp_path: Path, seed: int) -> None:
    plan = Plan(seed=seed, etcd=True, flags=("--drain-seconds", "3"))
    with ChaosRack(tmp_path, chaos_data, plan) as rack:
        client = rack.client(epochs=1, pause_seconds=STEP_SECONDS, until_file=str(tmp_path / "over"))
        after(client, 480)
        for number in range(3):
            assert rack.stop(number) == 0
            rack.restart(number)
            rack.until_ring_has(3)
            after(client, 24)
        (tmp_path / "over").touch()
        history = client.wait()
        rack.check(history, wait_seconds=4)
        origin_reads_at_most(rack.origin.reads_per_shard(rack.manifest), mean=2.0, worst=3.0)


# -- hostile rings ----------------------------------------------------------------------------------------------------


async def put_all(url: str, records: dict[str, bytes]) -> None:
    """Write many keys of the rack, a hundred per transaction."""
    host, _, port = url.removeprefix("http://").partition(":")
    async with aetcd.Client(host=host, port=int(port)) as etcd:
        items = list(records.items())
        for at in range(0, len(items), 100):
            puts = [etcd.transactions.put((PREFIX + key).encode(), value) for key, value in items[at : at + 100]]
            await etcd.transaction(compare=[], success=puts, failure=[])


def member(url: str, weight: float = 1e9) -> bytes:
    return b'{"url": "%s", "weight": %f, "state": "up", "session": "s", "socket": ""}' % (url.encode(), weight)


@pytest.mark.fault("M7")
def test_hostile_records_in_etcd_are_counted_and_cost_speed_only(chaos_data: Files, tmp_path: Path, seed: int) -> None:
    with ChaosRack(tmp_path, chaos_data, Plan(seed=seed, etcd=True)) as rack:
        assert rack.etcd is not None
        leaks = rack.leaks()
        odd = ["", "ftp://x", "http://", "http://a:0", "http://[", "http://x:1/../y", "http://x:99999", "javascript:1"]
        junk = {f"odd{at}": member(url) for at, url in enumerate(odd)}
        junk |= {"json": b"{", "nested": b"[" * 10_000, "large": b"x" * (1 << 20), "list": b"[1]", "utf8": b"\xff\xfe"}
        junk |= {"weight": member("http://127.0.0.1:9", -1.0), "a b": member("http://127.0.0.1:9")}
        asyncio.run(put_all(rack.etcd.url, junk))
        until(lambda: all(each.metric("quiver_ring_records_ignored_total") >= len(junk) for each in rack.daemons))
        assert all(daemon.metric("quiver_ring_members") == 3 for daemon in rack.daemons)
        rack.check(rack.client(epochs=2).wait())
        asyncio.run(put_all(rack.etcd.url, {f"m{at}": member("http://127.0.0.1:9") for at in range(10_000)}))
        until(lambda: all(each.metric("quiver_ring_members") > 3 for each in rack.daemons))
        assert all(daemon.metric("quiver_ring_members") <= 4096 for daemon in rack.daemons)
        rack.check(rack.client(epochs=2).wait(90), wait_seconds=30)
        leaks.check()


# -- two of one -------------------------------------------------------------------------------------------------------


@pytest.mark.fault("M8")
def test_a_second_daemon_with_a_name_or_a_folder_in_use_says_so_and_ends(
    chaos_data: Files, tmp_path: Path, seed: int
) -> None:
    with ChaosRack(tmp_path, chaos_data, Plan(seed=seed, etcd=True)) as rack:
        assert rack.etcd is not None
        client = rack.client(epochs=3, pause_seconds=STEP_SECONDS)
        same_name = ChaosDaemon(rack.plan, tmp_path / "other", "--etcd", rack.etcd.url, "--node-id", "node1")
        same_folder = ChaosDaemon(rack.plan, rack.daemons[1].data_dir, "--etcd", rack.etcd.url, "--node-id", "node9")
        for second, says in ((same_name, "node1"), (same_folder, str(rack.daemons[1].data_dir))):
            second.start()
            try:
                assert second.wait() == 1
            finally:
                second.kill()
            assert says in second.log
            assert "Traceback" not in second.log
        assert ring_of(rack, 0).members == ring_of(rack, 1).members
        assert len(ring_of(rack, 0).members) == 3
        rack.check(client.wait(), wait_seconds=4)
