"""A training script on a dataset in S3: manifest and data by URL, with an embedded cache and through a rack."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quiver_client import index
from tests.indexing.conftest import Bucket
from tests.support.daemon import Daemon, Patient, clean_environment, rack_of
from tests.support.data import random_files

SCRIPT = """
import hashlib, json, sys
from torch.utils.data import DataLoader
from quiver_client import Dataset

def main():
    manifest, cache, start_method = sys.argv[1:]
    dataset = Dataset(manifest, cache=cache, fields=["image", "__key__"])
    dataset[0]  # the parent has read from the origin before its workers are forked
    loader = DataLoader(dataset, batch_size=16, shuffle=True, num_workers=2, collate_fn=list,
                        multiprocessing_context=start_method)
    read = {s["__key__"]: hashlib.sha256(s["image"]).hexdigest() for batch in loader for s in batch}
    print(json.dumps({"read": read, "samples": len(dataset), "parent": dataset.stats()}))

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def content(bucket: Bucket, tmp_path: Path) -> dict[str, bytes]:
    """A class-folder dataset in the bucket, with its manifest."""
    content = random_files(60, low=500, high=20_000)
    for name, data in content.items():
        bucket.put(f"train/{name}", data)
    index(f"s3://{bucket.name}/train", tmp_path / "m.quiver", shard_bytes="64KiB")
    bucket.put("m.quiver", (tmp_path / "m.quiver").read_bytes())
    return content


def train(folder: Path, manifest: str, cache: str, start_method: str = "fork") -> dict[str, Any]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), manifest, cache, start_method]
    ran = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=90, check=False)
    assert ran.returncode == 0, ran.stderr
    told: dict[str, Any] = json.loads(ran.stdout)
    return told


def right(told: dict[str, Any], content: dict[str, bytes]) -> bool:
    import hashlib

    return told["read"] == {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_an_embedded_cache_is_filled_from_s3_in_a_job_that_forks(
    bucket: Bucket, content: dict[str, bytes], tmp_path: Path, start_method: str
) -> None:
    cache = f"file://{tmp_path}/cache?capacity=1GiB"
    assert right(train(tmp_path, f"s3://{bucket.name}/m.quiver", cache, start_method), content)


def test_a_rack_reads_s3_only_once(bucket: Bucket, content: dict[str, bytes], tmp_path: Path) -> None:
    with rack_of(3, tmp_path / "rack", origins=[f"s3://{bucket.name}/train/"], make=Patient) as daemons:
        for _ in range(2):
            told = train(tmp_path, f"s3://{bucket.name}/m.quiver", daemons[0].url)
            assert right(told, content)
            assert told["parent"]["bytes_origin"] == 0
        read = sum(daemon.status()["origin_read_bytes"] for daemon in daemons)
    assert read == sum(map(len, content.values()))


def test_a_job_uploads_shards_whose_origin_the_daemons_may_not_read(
    bucket: Bucket, content: dict[str, bytes], tmp_path: Path
) -> None:
    with Daemon(tmp_path / "data") as daemon:
        assert right(train(tmp_path, f"s3://{bucket.name}/m.quiver", daemon.url), content)
        first = daemon.status()
        assert right(train(tmp_path, f"s3://{bucket.name}/m.quiver", daemon.url), content)
        assert daemon.status()["fills"] == first["fills"] == first["shards"], "each shard was put once"
        assert first["origin_read_bytes"] == 0
        assert daemon.metric("quiver_uploaded_bytes_total") >= sum(map(len, content.values()))
