"""How fast is indexing, and how much memory does it take?

Question 1: at what rate are 5,000 files of 110 kB indexed, against a plain loop in one process that reads and
BLAKE3-hashes the same files? Expected: at least half of it, and more with a second core. Both are
measured alternately, in one process, so that the page cache and a busy machine affect both; the ratio is by round.

Question 2: by how many bytes per sample does the peak of resident memory grow? Expected: under 200. A fresh process
indexes each source, a small one and a large one; the slope between the two is the cost of a sample, without the
constant cost of the process and its buffers.

    python -m bench.indexing [--files 5000] [--bytes 110000] [--rounds 5] [--samples 300000]     prints JSON
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

PEAK = """
import pathlib, re, sys
from quiver_client.indexing import index
def peak():  # not getrusage: its figure starts at the parent's, which a fork inherits
    return re.search(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]
before = peak()
report = index(sys.argv[1], sys.argv[2])
print(report.samples, before, peak())
"""


def rate(folder: Path, files: int, size_bytes: int, rounds: int) -> dict[str, Any]:
    import blake3

    from quiver_client.indexing import index

    source = folder / "files"
    for i in range(files):
        path = source / f"{i % 50:02d}" / f"{i:06d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size_bytes))
    paths = sorted(path for path in source.rglob("*") if path.is_file())

    def plain() -> None:
        for path in paths:
            with path.open("rb") as file:
                blake3.blake3(file.read()).digest()

    def ours() -> None:
        index(source, folder / "rate.quiver", format="files")

    def seconds(work: Any) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    plain()  # into the page cache
    pairs = [(seconds(plain), seconds(ours)) for _ in range(rounds)]
    megabytes = files * size_bytes / 1e6
    return {
        "files": files,
        "file_bytes": size_bytes,
        "plain_loop_mb_per_second": round(megabytes / statistics.median(pair[0] for pair in pairs)),
        "index_mb_per_second": round(megabytes / statistics.median(pair[1] for pair in pairs)),
        "ratio_by_round": [round(plain_seconds / index_seconds, 2) for plain_seconds, index_seconds in pairs],
        "ratio_median": round(statistics.median(pair[0] / pair[1] for pair in pairs), 2),
    }


def memory(make: Any, folder: Path, samples: int) -> dict[str, Any]:
    peaks = []
    for count in (samples // 6, samples):
        source = make(folder / f"{make.__name__}-{count}", count)
        command = [sys.executable, "-c", PEAK, str(source), str(folder / "memory.quiver")]
        found, before, peak = map(int, subprocess.run(command, capture_output=True, check=True).stdout.split())
        assert found == count
        peaks.append((count, before * 1024, peak * 1024))
        shutil.rmtree(source) if source.is_dir() else source.unlink()
    (few, _, low), (many, before, high) = peaks
    return {
        "samples": many,
        "bytes_a_sample": round((high - low) / (many - few)),
        "bytes_a_sample_with_buffers": round((high - before) / many),
        "peak_mib": round(high / 2**20),
    }


def small_files(folder: Path, count: int) -> Path:
    for i in range(count):
        if i % 1000 == 0:
            below = folder / f"class-{i // 1000:04d}"
            below.mkdir(parents=True)
        (below / f"image_{i:08d}.jpg").write_bytes(b"%d" % i)
    return folder


def one_tar(folder: Path, count: int) -> Path:
    path = folder.with_suffix(".tar")
    with path.open("wb") as file:
        for i in range(count):
            for name, data in ((f"train/{i:08d}.cls", b"%d" % (i % 1000)), (f"train/{i:08d}.jpg", b"%d" % i)):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                file.write(info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512))
        file.write(bytes(1024))
    return path


def one_parquet(folder: Path, count: int) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder.with_suffix(".parquet")
    table = pa.table({"image": [b"%d" % i for i in range(count)], "label": [i % 1000 for i in range(count)]})
    pq.write_table(table, path, row_group_size=1000)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--bytes", type=int, default=110_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=300_000)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="quiver-bench-"))
    try:
        result = {
            "machine": {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()},
            "rate": rate(folder, asked.files, asked.bytes, asked.rounds),
            "memory": {
                make.__name__: memory(make, folder, asked.samples) for make in (one_tar, one_parquet, small_files)
            },
        }
    finally:
        shutil.rmtree(folder)
    json.dump(result, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
