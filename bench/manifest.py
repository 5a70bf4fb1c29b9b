"""Do opening a large manifest and planning a batch with it cost so little that a training job does not notice?

Expected: a manifest of 1,300,000 samples opens, all of it read and checked against its checksums, in under 150 ms, and
takes as much memory as its file, once for all workers, forked or spawned: a process that is passed the manifest
opens it in a few milliseconds. A plan of 256 random indices, grouped by owner in a ring of 30, takes under 300 µs. Run
it with

    python bench/manifest.py [--samples 1300000] [--members 30]

It writes the manifest to a temporary folder (about 200 bytes per sample) and prints JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from quiver.digest import Digest
from quiver.layout import place
from quiver.manifest import Field, Header, Manifest, ManifestParts, write_manifest
from quiver.plan import plan_batch
from quiver.ring import Member, Ring

BATCH = 256
PLANS = 500
OPENS = 7


def write_large(path: Path, samples: int) -> None:
    """Write a manifest as ImageNet's would be: one JPEG per sample, a label, 110 kB on average."""
    rng = np.random.default_rng(0)
    keys = pa.array([f"n{i // 1300:08d}/n{i // 1300:08d}_{i:08d}.JPEG" for i in range(samples)], pa.large_utf8())
    digests = rng.integers(0, 256, (samples, 32), np.uint8)
    lengths = rng.integers(20_000, 200_000, samples).astype(np.uint64)
    order, firsts = place("mixed", digests, lengths, np.zeros(samples, np.uint32), 32 << 20)
    blob_of = np.empty(samples, np.uint32)
    blob_of[order] = np.arange(samples, dtype=np.uint32)
    write_manifest(
        path,
        ManifestParts(
            header=Header(
                format=1,
                layout="mixed",
                shard_bytes=32 << 20,
                source="imagefolder",
                base="file:///data/imagenet/",
                fields=(Field("image", "bytes"), Field("label", "int64")),
            ),
            keys=keys,
            blob_of=blob_of,
            scalars={"label": pa.array(np.arange(samples) // 1300)},
            digests=digests[order],
            xxh3=rng.integers(0, 2**63, (samples, 1)).astype(np.uint64),
            lengths=lengths[order, None],
            objects_of=order.astype(np.uint32),
            origins=np.zeros((samples, 1), np.uint64),
            firsts=firsts,
            object_paths=keys,
            object_sizes=lengths,
            object_etags=pa.array([""] * samples, pa.large_utf8()),
            object_mtimes=np.zeros(samples, np.int64),
        ),
    )


def private_bytes() -> int:
    """Return the memory that only this process uses, which would be freed if it ended (USS)."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def passed_to_another(fd: int, digest: Digest) -> dict[str, float]:
    """Return the time and memory that another process needs to open a manifest that is passed to it."""
    command = [sys.executable, __file__, "--passed", str(fd), str(digest)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, pass_fds=[fd])
    told: dict[str, float] = json.loads(ran.stdout)
    return told


def adopt(fd: int, digest: Digest) -> dict[str, float]:
    started = time.perf_counter()
    Manifest.adopt(Path("passed.quiver"), fd, digest)
    return {"adopt_ms": 1e3 * (time.perf_counter() - started)}


def measure(path: Path, members: int) -> dict[str, float]:
    """Open and plan in this fresh process."""
    small = path.with_name("small.quiver")
    Manifest.open(small)  # libraries load and warm up outside the measurement
    before = private_bytes()
    seconds = []
    for _ in range(OPENS):
        started = time.perf_counter()
        manifest = Manifest.open(path)
        seconds.append(time.perf_counter() - started)
    grown = private_bytes() - before
    started = time.perf_counter()
    digest = manifest.digest
    digest_seconds = time.perf_counter() - started
    started = time.perf_counter()
    shared = manifest.share()
    share_seconds = time.perf_counter() - started
    passed = passed_to_another(shared, digest) if shared is not None else {}

    ring = Ring.of("bench", [Member(f"node{i}", f"http://node{i}:7717", 1e12) for i in range(members)])
    started = time.perf_counter()
    ranked = ring.rank(manifest.tables.shard_digests, 3)
    rank_seconds = time.perf_counter() - started
    rng = np.random.default_rng(1)
    plans = []
    for _ in range(PLANS):
        indices = rng.integers(0, len(manifest), BATCH)
        started = time.perf_counter()
        plan = plan_batch(manifest, indices)
        owners = ranked[plan.shards, 0]
        order = np.argsort(owners, kind="stable")
        np.searchsorted(owners[order], np.arange(members + 1))
        plans.append(time.perf_counter() - started)
    return {
        "shards": manifest.shard_count,
        "open_ms_median": 1e3 * statistics.median(seconds),
        "open_ms_max": 1e3 * max(seconds),
        "open_private_mb": grown / 1e6,
        "digest_ms": 1e3 * digest_seconds,
        "share_ms": 1e3 * share_seconds,
        **passed,
        "rank_all_shards_ms": 1e3 * rank_seconds,
        "plan_us_median": 1e6 * statistics.median(plans),
        "plan_us_p99": 1e6 * float(np.quantile(plans, 0.99)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_300_000)
    parser.add_argument("--members", type=int, default=30)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--passed", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.passed:
        print(json.dumps(adopt(int(arguments.passed[0]), Digest.parse(arguments.passed[1]))))
        return
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.members)))
        return
    with tempfile.TemporaryDirectory(prefix="quiver-bench-") as folder:
        path = Path(folder) / "large.quiver"
        write_large(path.with_name("small.quiver"), 1000)
        write_large(path, arguments.samples)
        command = [sys.executable, __file__, "--measure", str(path), "--members", str(arguments.members)]
        measured = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        facts = {"samples": arguments.samples, "members": arguments.members, "file_mb": path.stat().st_size / 1e6}
        print(json.dumps(facts | measured | {"python": platform.python_version(), "cpu": platform.machine()}, indent=2))


if __name__ == "__main__":
    main()
