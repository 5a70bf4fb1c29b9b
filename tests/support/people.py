"""A dataset of a Parquet file with scalar columns to select, split and join by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quiver_client import index

USERS = 9
LABELS = 4


def make_people(
    where: Path, count: int = 120, *, name: str = "people", seed: int = 0, column: str = "image", low_id: int = 0
) -> Path:
    """Write ``count`` samples of 5000 random bytes, a ``label``, a ``user`` and an ``id``; return the
    manifest. Ids descend from ``low_id + count - 1``. About 12 samples share a shard."""
    rng = np.random.default_rng(seed)
    table = pa.table(
        {
            column: [rng.bytes(5000) for _ in range(count)],
            "label": pa.array(np.arange(count) % LABELS, pa.int32()),
            "user": np.arange(count) % USERS,
            "id": np.arange(low_id, low_id + count)[::-1].copy(),
        }
    )
    folder = where / name
    folder.mkdir()
    pq.write_table(table, folder / "data.parquet", row_group_size=20)
    manifest = where / f"{name}.quiver"
    index(folder / "data.parquet", manifest, shard_bytes="64KiB")
    return manifest
