"""Origin reads per shard, as the origin counted them: one, whatever reads, and little more when peers die."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.rack import ChaosRack, Plan
from tests.chaos.validators import origin_reads_at_most
from tests.support.data import Files


@pytest.mark.chaos
@pytest.mark.fault("O1")
@pytest.mark.parametrize("s3", [False, True], ids=["http", "s3"])
def test_without_a_fault_each_shard_is_read_once(chaos_data: Files, tmp_path: Path, seed: int, s3: bool) -> None:
    with ChaosRack(tmp_path, chaos_data, Plan(seed=seed, s3=s3, etcd=True)) as rack:
        jobs = [rack.client(epochs=2), rack.client(epochs=2)]
        rack.check(*[job.wait() for job in jobs])
        origin_reads_at_most(rack.origin.reads_per_shard(rack.manifest), mean=1.05, worst=2.0)
