"""What a daemon takes of memory beside the page cache: little at rest and while serving, and again after a fill."""

from __future__ import annotations

import gc
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quiver.origin.row_group_cache import RowGroupCache
from quiver_client import Dataset, index
from tests.support.daemon import FreshDaemon as Daemon
from tests.support.waiting import until

ROWS, GROUP, SAMPLE_BYTES = 800, 100, 100_000  # 80 MB
PANDAS_BYTES = (32 << 20) * bool(importlib.util.find_spec("pandas"))  # where it is installed, pyarrow imports it
GROWTH_BYTES_MAX = 24 << 20
SOON = """
import quiver_cacheserver.memory
from quiver_cacheserver.cli import main
quiver_cacheserver.memory.KEPT_SECONDS = 0.4
main()
"""


class Impatient(Daemon):
    """A daemon that lets go of row groups soon after a fill."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._command[1:3] = ["-c", SOON]
        tuned = [name for name in self._environment if name.startswith(("MALLOC_", "GLIBC_", "ARROW_"))]
        for name in tuned:
            del self._environment[name]

    def anonymous_bytes(self) -> int:
        assert self.process is not None
        lines = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def write_parquet(path: Path) -> Path:
    rng = np.random.default_rng(0)
    ends = pa.py_buffer(np.arange(0, (GROUP + 1) * SAMPLE_BYTES, SAMPLE_BYTES, dtype=np.int64))
    with pq.ParquetWriter(path, pa.schema({"x": pa.large_binary()}), compression="none", use_dictionary=False) as file:
        for _ in range(0, ROWS, GROUP):
            data = pa.py_buffer(rng.bytes(GROUP * SAMPLE_BYTES))
            array = pa.Array.from_buffers(pa.large_binary(), GROUP, [None, ends, data])
            file.write_table(pa.table({"x": array}), row_group_size=GROUP)
    return path


def read_all(manifest: Path, url: str, seed: int) -> int:
    dataset = Dataset(manifest, url)
    try:
        rows = np.random.default_rng(seed).permutation(len(dataset)).tolist()
        return sum(len(s["x"]) for at in range(0, ROWS, 100) for s in dataset.__getitems__(rows[at : at + 100]))
    finally:
        dataset.close()


def test_what_fills_took_is_given_back_and_serving_takes_none(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data.parquet")
    manifest = tmp_path / "data.quiver"
    index(tmp_path / "data.parquet", manifest, shard_bytes="16MiB")
    with Impatient(tmp_path / "d", origins=[tmp_path]) as daemon:
        assert read_all(manifest, daemon.url, 0) == ROWS * SAMPLE_BYTES
        assert daemon.status()["fills"] > 1

        before = daemon.anonymous_bytes()
        assert before > 48 << 20, "row groups are kept for the shards beside those that were filled"
        until(lambda: daemon.anonymous_bytes() < (80 << 20) + PANDAS_BYTES, what="the row groups are released")

        resting = daemon.anonymous_bytes()
        with ThreadPoolExecutor(4) as readers:
            read = list(readers.map(lambda seed: read_all(manifest, daemon.url, seed), range(8)))
        assert read == [ROWS * SAMPLE_BYTES] * 8
        assert daemon.anonymous_bytes() - resting < GROWTH_BYTES_MAX
        assert daemon.anonymous_bytes() < (100 << 20) + PANDAS_BYTES


def array(size_bytes: int) -> list[Any]:
    return [pa.array([b"x" * size_bytes], pa.large_binary())]


def test_row_groups_of_all_origins_are_kept_within_one_bound() -> None:
    kept = RowGroupCache(bytes_max=10_000)
    one, other = object(), object()
    for number in range(3):
        kept.put((one, 0, number), array(2_000))
        kept.put((other, 0, number), array(2_000))
    assert 6_000 < kept.size_bytes <= 10_000
    assert kept.get((one, 0, 0)) is None, "it was used longest ago"
    assert kept.get((one, 0, 1)) is not None

    kept.drop(other)
    assert kept.get((other, 0, 2)) is None
    assert kept.get((one, 0, 1)) is not None
    kept.drop_if_idle(60.0)
    assert kept.size_bytes
    kept.drop_if_idle(0.0)
    assert kept.size_bytes == 0

    kept.put((one, 0, 0), array(50_000))
    assert kept.get((one, 0, 0)) is not None, "one is kept, however large it is"


def test_an_origin_that_the_collector_closes_meanwhile_does_not_stop_it() -> None:
    kept = RowGroupCache(bytes_max=10_000)

    class Closed:
        def __del__(self) -> None:
            kept.drop(self)

    class Meanwhile:
        @property
        def nbytes(self) -> int:  # asked for while the lock is held
            closed: Any = Closed()
            closed.itself = closed
            del closed
            gc.collect()
            return 100

    kept.put((kept, 0, 0), [Meanwhile()])
    assert kept.size_bytes == 100
