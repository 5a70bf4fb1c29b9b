"""Training while the origin throttles, lies, loses objects, hangs or is away, and while daemons that read it die."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import pytest

from quiver.peer import PeerClient
from tests.chaos import origin as faults
from tests.chaos.origin import Fault
from tests.chaos.rack import ChaosRack, Plan
from tests.chaos.validators import errors_name, fired, origin_reads_at_most
from tests.support.data import Files
from tests.support.scripts import Script
from tests.support.waiting import until

pytestmark = pytest.mark.chaos
READERS, PROCESSES = 300, 6
READ = """
import sys
from tests.chaos.readers import read_all
manifest, count, *urls = sys.argv[1:]
read_all(manifest, int(count), urls)
"""
FILLS_AT_ONCE = 4  # per daemon, of up to 64 requests each


@pytest.mark.fault("O1")
def test_hundreds_of_readers_of_a_cold_rack_cost_one_read_of_each_shard(
    chaos_data: Files, tmp_path: Path, seed: int
) -> None:
    with ChaosRack(tmp_path, chaos_data, Plan(seed=seed)) as rack:
        manifest = rack.manifest
        urls = [daemon.own_url for daemon in rack.daemons]
        for url in urls:
            with contextlib.closing(PeerClient(url)) as peer:
                peer.put_manifest(manifest.digest, manifest.content)
        readers = [
            Script(READ, [rack.files.manifest, READERS // PROCESSES, *urls], tmp_path / f"readers{number}")
            for number in range(PROCESSES)
        ]
        try:
            assert [each.wait(60) for each in readers] == [0] * PROCESSES
        finally:
            for each in readers:
                each.kill()
        origin_reads_at_most(rack.origin.reads_per_shard(manifest), mean=3.0, worst=3.0)
        fills = [daemon.status()["fills"] for daemon in rack.daemons]
        assert fills == [manifest.shard_count] * 3, "one for each shard and daemon, as each daemon was asked for all"
        assert rack.origin.most_at_once <= 3 * FILLS_AT_ONCE * 64
        rack.check_logs()


@pytest.mark.fault("O1")
@pytest.mark.parametrize("s3", [False, True], ids=["http", "s3"])
def test_many_jobs_on_a_cold_rack_cost_one_read_of_each_shard(
    chaos_data: Files, tmp_path: Path, seed: int, s3: bool
) -> None:
    with ChaosRack(tmp_path, chaos_data, Plan(seed=seed, s3=s3, etcd=True)) as rack:
        clients = [rack.client(epochs=1, seed=number) for number in range(6)]
        rack.check(*[client.wait(90) for client in clients])
        origin_reads_at_most(rack.origin.reads_per_shard(rack.manifest), mean=1.05, worst=2.0)


@pytest.mark.fault("O2")
def test_a_daemon_that_dies_while_it_fills_costs_no_sample(chaos_data: Files, tmp_path: Path, seed: int) -> None:
    with ChaosRack(tmp_path, chaos_data, Plan(seed=seed)) as rack:
        rack.origin.all(Fault("slow", bytes_per_second=64 << 10))
        client = rack.client(epochs=2, cache=rack.proxies[0].url)
        until(lambda: rack.origin.now > 0 and len(rack.origin.asked) > 20, 40)
        rack.kill(1)
        rack.origin.heal()
        history = client.wait(90)
        rack.check(history, wait_seconds=10)
        fired(rack.origin.fired, "slow")
        assert history.stats["fallbacks"] > 0
        origin_reads_at_most(rack.origin.reads_per_shard(rack.manifest), mean=2.0, worst=3.0)


WRONG = {
    "429": faults.throttle("1", chance=0.05),
    "503": faults.throttle("1", 503, chance=0.05),
    "500": Fault("500", 500, chance=0.2),
    "slow": Fault("slow", bytes_per_second=64 << 10, chance=0.3),
    "truncated": Fault("truncated", truncated_at=100, chance=0.3),
    "reset": Fault("reset", reset_at=100, chance=0.3),
    "wrong range": Fault("wrong range", offset=7, chance=0.3),
    "said wrong range": Fault("said wrong range", offset=7, says_offset=True, chance=0.3),
    "whole object": Fault("whole object", offset=-1, chance=0.3),
}


@pytest.mark.fault("O3")
@pytest.mark.parametrize(
    ("what", "s3"),
    [*((what, False) for what in WRONG), *((what, True) for what in ("503", "truncated", "wrong range"))],
    ids=lambda value: {False: "http", True: "s3"}.get(value, value),
)
def test_an_origin_that_throttles_or_lies_for_a_while_is_read_right_in_the_end(
    chaos_data: Files, tmp_path: Path, seed: int, what: str, s3: bool
) -> None:
    with ChaosRack(tmp_path, chaos_data, Plan(daemons=2, seed=seed, s3=s3)) as rack:
        fault = WRONG[what]
        rack.origin.rule = lambda name, number: fault if number < 200 else None
        leaks = rack.leaks()
        history = rack.client(epochs=1).wait(100)
        rack.check(history, wait_seconds=60)
        fired(rack.origin.fired, fault.name)
        requests = Counter(asked.object for asked in rack.origin.asked if asked.object)
        assert max(requests.values()) < 60, "it backs off and does not ask in a frenzy"
        leaks.check()


@pytest.mark.fault("O3")
def test_substitution_hides_an_origin_that_is_slow(chaos_data: Files, tmp_path: Path, seed: int) -> None:
    """What is resident is taken first: the batches before the last cold shards arrive do not wait for the origin."""
    with ChaosRack(tmp_path, chaos_data, Plan(daemons=2, seed=seed)) as rack:
        cold = rack.objects_of(range(0, rack.manifest.shard_count, 4))
        rack.origin.of(cold, Fault("slow", bytes_per_second=16 << 10))
        client = rack.client(epochs=1, pause_seconds=0.05)
        history = client.wait(100)
        rack.check(history, wait_seconds=10)
        fired(rack.origin.fired, "slow")
        assert history.stats["substitutions"] > 0


@pytest.mark.fault("O4")
@pytest.mark.parametrize("what", ["changed", "gone"])
def test_what_the_origin_lost_is_named_and_not_asked_for_without_end(
    chaos_data: Files, tmp_path: Path, seed: int, what: str
) -> None:
    with ChaosRack(tmp_path, chaos_data, Plan(daemons=2, seed=seed)) as rack:
        lost = rack.manifest.key(17)
        rack.origin.of({lost}, faults.CHANGED if what == "changed" else faults.GONE)
        client = rack.client(epochs=1)
        until(lambda: client.script.ended, 60)
        history = client.history()
        assert not history.ended
        errors_name(history, lost, rack.origin.base, within_seconds=20)
        assert history.errors[-1]["type"] == "Changed"
        rack.check(history, errors=True)
        assert lost not in {rack.manifest.key(sample.index) for sample in history.samples}
        fired(rack.origin.fired, what)
        requests = Counter(asked.object for asked in rack.origin.asked)
        assert requests[lost] < 60, "no loop"
        rack.origin.heal()
        until(lambda: client.script.ended)
        client.resume()
        rack.check(client.wait(), errors=True)
        assert client.history().epochs == (0,), "once the object is back, the epoch is exact"


@pytest.mark.fault("O5")
def test_an_origin_that_is_away_is_waited_for_named_and_the_run_resumes_exactly(
    chaos_data: Files, tmp_path: Path, seed: int
) -> None:
    with ChaosRack(tmp_path, chaos_data, Plan(daemons=2, seed=seed)) as rack:
        half = rack.objects_of(range(rack.manifest.shard_count // 2))
        rack.origin.rule = lambda name, number: None if name in half else faults.throttle("", 503)
        client = rack.client(epochs=1, environment={"QUIVER_ORIGIN_PATIENCE": "3s"})
        until(lambda: client.script.ended, 90)
        history = client.history()
        errors_name(history, rack.origin.base, "QUIVER_ORIGIN_PATIENCE", within_seconds=20)
        rack.check(history, errors=True)
        assert len(history.samples) > 40, "what was there was trained on"
        fired(rack.origin.fired, "503")
        rack.origin.heal()
        rack.origin_proxy.refuse()
        client.resume()
        until(lambda: client.script.ended, 90)
        assert not client.history().ended, "with nobody listening, too"
        rack.origin_proxy.listen()
        client.resume()
        rack.check(client.wait(), errors=True)
        assert client.history().epochs == (0,)


@pytest.mark.fault("O5")
def test_cached_data_trains_on_while_the_origin_is_down(chaos_data: Files, tmp_path: Path, seed: int) -> None:
    with ChaosRack(tmp_path, chaos_data, Plan(daemons=2, seed=seed)) as rack:
        rack.check(rack.client(epochs=1).wait())
        rack.origin_proxy.refuse()
        before = len(rack.origin.asked)
        rack.check(rack.client(epochs=2).wait(), wait_seconds=4)
        assert len(rack.origin.asked) == before
