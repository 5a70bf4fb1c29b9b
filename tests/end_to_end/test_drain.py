"""A daemon is drained in the middle of an epoch, while it fetches: the rack reads next to nothing again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from quiver_client import DataLoader, Dataset
from quiver_client.cli.main import run
from tests.daemon.test_drain import cache_of, rack
from tests.support.data import make_files, random_files, rebased
from tests.support.etcd import Etcd
from tests.support.servers import counting_origin

pytestmark = pytest.mark.usefixtures("patient_reads")

FETCH_SECONDS = 0.004  # of one file: an epoch of the loop below takes some seconds, and fetches are always under way


@pytest.mark.fault("M9")
def test_a_drain_in_the_middle_of_an_epoch_costs_at_most_a_fiftieth_of_what_the_daemon_held(tmp_path: Path) -> None:
    local = make_files(tmp_path, random_files(600, seed=2, low=3_000, high=4_000), shard_bytes="8KiB")
    with (
        Etcd() as etcd,
        counting_origin(local.folder) as origin,
        rack(etcd, tmp_path / "r", origin) as daemons,
    ):
        origin.latency_seconds = FETCH_SECONDS
        remote = rebased(local, origin.url, tmp_path / "remote.quiver")
        dataset = Dataset(remote.manifest, cache_of([*daemons.values()]), fields=["image", "__key__"])
        loader = DataLoader(dataset, batch_size=10, shuffle=True, num_workers=0, collate_fn=list)
        leaving, keys = daemons["b"], list[str]()
        batches = iter(loader)
        for batch in batches:
            keys += [sample["__key__"] for sample in batch]
            if len(keys) >= 200:
                break
        held = leaving.status()["resident_bytes"]
        assert 0 < held < local.total_bytes() / 3, "not all of its part: it was still fetching"
        before = Counter(origin.requests)
        assert run(["drain", "b", "--cache", daemons["a"].url, "--deadline", "60s"]) == 0
        assert leaving.stop() == 0
        for batch in batches:
            keys += [sample["__key__"] for sample in batch]
        dataset.close()
        assert sorted(keys) == sorted(local.content), "each sample once"
        since = origin.requests - before
        again = sum(count * len(local.content[name]) for name, count in since.items() if before[name])
        assert again <= held / 50, (again, held, leaving.log)
