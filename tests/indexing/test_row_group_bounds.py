"""A daemon decodes only row groups of a bounded size, and to the same bytes as without a bound."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quiver.errors import OverCapacity
from quiver.manifest import Manifest
from quiver.origin import open_origin
from quiver.origin import parquet as parquet_module
from quiver.origin.row_group_cache import row_groups
from quiver_client import index

ROWS, VALUE_BYTES = 2_000, 20_000


@pytest.fixture(autouse=True)
def bound() -> Iterator[None]:
    row_groups.group_bytes_max = 4 << 20
    row_groups.forget()
    yield
    row_groups.group_bytes_max = None
    row_groups.forget()


@pytest.mark.fault("S12")
def test_a_small_file_that_decodes_to_a_huge_row_group_is_refused_and_not_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = np.random.default_rng(0).bytes(VALUE_BYTES)
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(ROWS, np.int32)), pa.array([value], pa.binary()))
    pq.write_table(pa.table({"x": column}), tmp_path / "t.parquet", store_schema=False)
    assert (tmp_path / "t.parquet").stat().st_size < 2 * VALUE_BYTES, "where 40 MB come of it"
    index(tmp_path / "t.parquet", tmp_path / "m.quiver")
    manifest = Manifest.open(tmp_path / "m.quiver")
    decoded: list[int] = []

    def counted(table: Any, name: str) -> Any:
        made = column_of(table, name)
        decoded.append(made[0].nbytes)
        return made

    column_of = parquet_module.column_of
    monkeypatch.setattr(parquet_module, "column_of", counted)
    origin = open_origin(manifest)
    out = memoryview(bytearray(VALUE_BYTES))
    with pytest.raises(OverCapacity, match=r"t\.parquet: a row group is larger than 4 MiB when"):
        origin.read([0], out)
    assert 4 << 20 < sum(decoded) < 10 << 20, "it stops at the bound"
    decoded.clear()
    with pytest.raises(OverCapacity):
        origin.read([0], out)
    assert not decoded
    row_groups.group_bytes_max = None
    origin.read([0], out)
    assert bytes(out) == value


def test_a_row_group_whose_metadata_says_that_it_is_too_large_is_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = pa.array([np.random.default_rng(i).bytes(500_000) for i in range(10)], pa.binary())
    pq.write_table(pa.table({"x": values}), tmp_path / "t.parquet")
    index(tmp_path / "t.parquet", tmp_path / "m.quiver")
    monkeypatch.delattr(parquet_module.pq.ParquetFile, "iter_batches")
    with pytest.raises(OverCapacity, match="smaller row groups"):
        open_origin(Manifest.open(tmp_path / "m.quiver")).read([0], memoryview(bytearray(500_000)))


def test_within_its_bound_a_row_group_is_decoded_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_module, "PIECE_ROWS_MAX", 7)
    images = [{"bytes": bytes([i]) * i, "path": f"{i}.png"} for i in range(50)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table(
        {
            "image": pa.array(images, kind),
            "tokens": pa.array([list(range(i)) for i in range(50)], pa.list_(pa.int32())),
            "text": pa.array([None if i % 3 else f"text {i}" for i in range(50)]),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=20)
    index(tmp_path / "t.parquet", tmp_path / "m.quiver")
    manifest = Manifest.open(tmp_path / "m.quiver")
    blobs = range(len(manifest.tables.offsets))
    size = int(manifest.blob_sizes(slice(None)).sum())

    def read() -> bytes:
        row_groups.forget()
        out = bytearray(size)
        open_origin(manifest).read(blobs, memoryview(out))
        return bytes(out)

    bounded = read()
    row_groups.group_bytes_max = None
    assert bounded == read()
