"""A tiny dataset for the examples: 600 points on a noisy line, each a file of its own, indexed where they are.

Each file holds the sample's number, its point and its value as three floats, so that an example can check that a pass
read every sample exactly once.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quiver_client import Dataset, index

SAMPLES = 600
VARIABLE = "QUIVER_EXAMPLE_DATA"  # processes that a trainer starts get the folder from the first one


def make(folder: Path) -> None:
    """Write the files and their manifest."""
    rng = np.random.default_rng(0)
    points = rng.uniform(-1, 1, SAMPLES)
    values = 3 * points + 0.5 + rng.normal(0, 0.01, SAMPLES)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for number, pair in enumerate(zip(points, values, strict=True)):
        (folder / "data" / f"{number:04}.bin").write_bytes(
            np.array([number, *pair], np.float32).tobytes().ljust(64, b"\0")
        )
    index(str(folder / "data"), str(folder / "line.quiver"), shard_bytes="4KiB")


def made() -> Path:
    """Return a folder with the dataset; the first process makes it, in a temporary folder unless one is named.

    The processes of one torchrun share a folder that is named after the run.
    """
    run, named = os.environ.get("TORCHELASTIC_RUN_ID"), os.environ.get(VARIABLE)
    if run and not named:
        named = f"{tempfile.gettempdir()}/quiver-example-{run}"
    folder = Path(named or tempfile.mkdtemp(prefix="quiver-example-"))
    os.environ[VARIABLE] = str(folder)
    while run and os.environ.get("RANK", "0") != "0" and not (folder / "line.quiver").exists():
        time.sleep(0.1)
    if not (folder / "line.quiver").exists():
        make(folder)
    return folder


def decode(sample: dict[str, Any]) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return a sample's number, its point and its value: the ``transform`` of the examples."""
    content = next(value for value in sample.values() if isinstance(value, bytes))
    number, point, value = np.frombuffer(content, np.float32, 3)
    return int(number), torch.tensor([point]), torch.tensor([value])


def dataset(folder: Path) -> Dataset:
    """Open the dataset, with a cache of its own beside it."""
    return Dataset(folder / "line.quiver", cache=f"file://{folder}/cache?capacity=64MiB", transform=decode)
