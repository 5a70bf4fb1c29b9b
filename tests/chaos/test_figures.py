"""The figures of docs/reliability.md that the harness measures: they hold, and the commands that print them work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import figures
from tests.support.data import Files

pytestmark = pytest.mark.chaos
SECONDS = 20.0
LOADED = 1.05


@pytest.mark.fault("O1")
def test_without_a_fault_each_shard_is_read_once(chaos_data: Files, tmp_path: Path, seed: int) -> None:
    reads = figures.reads_without_a_fault(tmp_path, chaos_data, seed)
    assert 1.0 <= reads.mean <= LOADED, "1.00, unless the machine is so loaded that a daemon seems not to answer"


@pytest.mark.fault("M1")
@pytest.mark.timeout(300)
def test_the_death_of_one_peer_of_sixteen_costs_its_shards_only(tmp_path: Path, seed: int) -> None:
    reads = figures.reads_when_a_peer_dies(tmp_path / "rack", figures.many_shards(tmp_path / "files"), seed)
    assert 1.0 < reads.mean <= 1.1


@pytest.mark.fault("M5")
def test_a_split_doubles_the_reads_at_most(chaos_data: Files, tmp_path: Path, seed: int) -> None:
    assert 2.0 <= figures.reads_of_a_split_rack(tmp_path, chaos_data, seed).mean <= 2.0 * LOADED


@pytest.mark.fault("M3")
@pytest.mark.timeout(300)
def test_no_read_fails_while_etcd_is_away(chaos_data: Files, tmp_path: Path, seed: int) -> None:
    away = figures.etcd_away(tmp_path, chaos_data, seed, SECONDS)
    assert away.failed_reads == 0
    assert away.throughput > 0.7, "the figure is 0.99 or more; this is a loaded machine, and twenty seconds"
