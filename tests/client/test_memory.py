"""Memory that a batch freed serves the next one, unless the user has it otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path
from statistics import fmean

import pytest

from tests.support.daemon import clean_environment
from tests.support.data import make_files, random_files

SAMPLES, SAMPLE_BYTES, BATCH = 512, 110_000, 64
PAGES = BATCH * SAMPLE_BYTES // os.sysconf("SC_PAGE_SIZE")  # 1,718 of a batch

# What the loader's threads make is freed in the loop's; prints page faults per batch, epoch by epoch.
READS = """
import resource, sys
from quiver_client import DataLoader, Dataset
dataset = Dataset(sys.argv[1], cache=sys.argv[2], fields=["image"])
loader = DataLoader(dataset, batch_size=int(sys.argv[3]), shuffle=True)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    assert sum(1 for batch in loader for sample in batch["image"]) == len(loader.dataset)
for _ in range(9):
    before = faults()
    for batch in loader: pass
    print((faults() - before) / len(loader))
loader.close()
"""

# The same without a loader: batches of pieces, three at a time.
TUNES = """
import resource
from quiver.malloc import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, tune
print(tune({M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 96 << 20}))
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def batch():
    return [bytes(110_000) for _ in range(64)]
for round in range(2):
    before = faults()
    for _ in range(10):
        held = [batch(), batch(), batch()]
        del held
print((faults() - before) / 30)
"""


def faults_of(program: str, *arguments: str, **variables: str) -> list[str]:
    tuned = ("MALLOC_", "GLIBC_", "LD_PRELOAD")
    environment = {name: value for name, value in clean_environment().items() if not name.startswith(tuned)}
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    ended = subprocess.run(
        command, env={**environment, **variables}, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


def test_a_batch_takes_the_memory_that_the_last_one_freed(tmp_path: Path) -> None:
    files = make_files(tmp_path, random_files(SAMPLES, low=SAMPLE_BYTES, high=SAMPLE_BYTES + 1), shard_bytes="8MiB")
    arguments = (str(files.manifest), f"file://{tmp_path}/cache?capacity=1GB", str(BATCH))
    kept = [float(faults) for faults in faults_of(READS, *arguments)]
    given_back = [float(faults) for faults in faults_of(READS, *arguments, QUIVER_KEEP_MEMORY="0")]
    assert fmean(given_back) > PAGES / 4, "what glibc does by itself"
    assert min(given_back) > PAGES / 32
    # As the threads happen to run, an epoch may have more batches at once than any before: their memory is new.
    assert min(kept) < PAGES / 32


USERS_OWN: dict[str, str] = {
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_ARENA_MAX": "1",
    "GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072",
}


def test_malloc_keeps_what_it_is_told_to_keep() -> None:
    tuned, faults = faults_of(TUNES)
    assert tuned == "True"
    assert float(faults) < 50


@pytest.mark.skipif(find_library("jemalloc") is None, reason="no other malloc is installed")
def test_another_malloc_is_left_alone() -> None:
    assert faults_of(TUNES, LD_PRELOAD=str(find_library("jemalloc")))[0] == "False"


@pytest.mark.parametrize(("name", "value"), USERS_OWN.items(), ids=list(USERS_OWN))
def test_what_the_user_tuned_is_left_alone(name: str, value: str) -> None:
    tuned, faults = faults_of(TUNES, **{name: value})
    assert tuned == "False"
    assert float(faults) > PAGES / 2
