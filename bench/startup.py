"""How long does a daemon with 100,000 resident shards take to start serving?

Expected: under 5 s from its start to a shard's first byte, including verification of that shard. Run it with

    python bench/startup.py [--shards 100000]

It writes as many small shards to a temporary folder, starts a daemon on it and prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np

from quiver.digest import Digest
from quiver.shard import encode_table, name_of
from quiver.store import Kind, Store
from quiver.store.inventory import file_of


def write_shards(root: Path, count: int) -> Digest:
    """Write shards of one small sample each, directly under their names; return one of the names."""
    Store.open(root, 1 << 40, shared=True).close()
    name = Digest(bytes(32))
    for number in range(count):
        content = number.to_bytes(8, "little") * 16
        table = encode_table(np.frombuffer(Digest.of(content), np.uint8)[None], np.asarray([len(content)], np.uint64))
        name = name_of(table)
        path = file_of(root, Kind.SHARD, name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content + table)
    return name


def drop_caches() -> bool:
    """Drop the directory cache, if permitted, so that the scan starts cold; return whether it was dropped."""
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=100_000)
    count = parser.parse_args().shards
    with tempfile.TemporaryDirectory(prefix="quiver-bench-") as folder:
        name = write_shards(Path(folder), count)
        cold = drop_caches()
        command = [sys.executable, "-m", "quiver_cacheserver.cli", "--listen", "127.0.0.1:0"]
        command += ["--data-dir", folder, "--capacity", "1TiB"]
        started = time.perf_counter()
        daemon = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert daemon.stderr is not None
            url = next(line for line in daemon.stderr if " serves rack " in line).split()[-1]
            ready_seconds = time.perf_counter() - started
            with urllib.request.urlopen(f"{url}/v1/shards/{name}") as answer:
                answer.read()
            served_seconds = time.perf_counter() - started
            with urllib.request.urlopen(f"{url}/v1/status") as answer:
                held = json.load(answer)["shards"]
        finally:
            daemon.terminate()
            daemon.wait()
    print(
        json.dumps({"shards": held, "cold": cold, "ready_s": ready_seconds, "first_shard_s": served_seconds}, indent=2)
    )


if __name__ == "__main__":
    main()
