"""Arrays in ``.npy`` files, stacked into one tensor: what numpy loads."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quiver.manifest.schema import ARRAY_DTYPES
from quiver_client import Dataset, index
from quiver_client import batch as batch_module
from quiver_client.collated_dataset import CollatedDataset
from tests.support.columns import same

Make = Callable[..., Dataset]


def write_arrays(where: Path, arrays: list[np.ndarray[Any, Any]]) -> Path:
    (where / "data").mkdir(parents=True)
    for number, array in enumerate(arrays):
        np.save(where / "data" / f"{number:03}.npy", array)
    index(where / "data", where / "arrays.quiver", format="files")
    return where / "arrays.quiver"


@pytest.mark.parametrize("dtype", ARRAY_DTYPES)
@pytest.mark.parametrize("shape", [(3, 2), (), (2, 0)], ids=str)
def test_arrays_in_files_are_stacked_as_numpy_loads_them(
    dataset: Make, tmp_path: Path, dtype: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    arrays = [np.asarray(rng.integers(0, 2 if dtype == "|b1" else 100, shape)).astype(dtype) for _ in range(12)]
    made = dataset(write_arrays(tmp_path, arrays), f"file://{tmp_path}/cache?capacity=1MiB")
    rows = [3, 0, 11, 3]
    ((name, stacked),) = CollatedDataset(made).__getitems__(rows).items()
    monkeypatch.setattr(batch_module, "SMALL_BYTES_MAX", 0)
    assert same(CollatedDataset(made).__getitems__(rows)[name], stacked)
    loaded = np.stack([np.load(tmp_path / "data" / f"{row:03}.npy") for row in rows])
    assert same(stacked, torch.from_numpy(loaded))
    assert [np.load(io.BytesIO(made[row][name])).tolist() for row in rows] == loaded.tolist()


def test_a_bool_that_somebody_wrote_as_another_byte_than_one_is_true(dataset: Make, tmp_path: Path) -> None:
    odd = [np.asarray([0, 1, 2, 255], np.uint8).view(bool), np.asarray([1, 0, 0, 128], np.uint8).view(bool)]
    made = dataset(write_arrays(tmp_path, odd), f"file://{tmp_path}/cache?capacity=1MiB")
    ((_, stacked),) = CollatedDataset(made).__getitems__([0, 1]).items()
    assert stacked.dtype == torch.bool
    assert stacked.view(torch.uint8).tolist() == [[0, 1, 1, 1], [1, 0, 0, 1]]
