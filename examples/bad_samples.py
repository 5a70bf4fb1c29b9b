"""A training loop that goes on where samples are bad: three of 600 images are damaged, and one has vanished.

    python examples/bad_samples.py

Each epoch has whole batches, each good sample once, and the log names each bad one. Random augmentation asks for
``rng``, so it is the same with any number of workers.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quiver_client import DataLoader, Dataset, index

SAMPLES, DAMAGED, VANISHED = 600, ("0007.npy", "0123.npy", "0400.npy"), "0300.npy"
BATCH_SIZE = 32


def make_dataset(folder: Path) -> None:
    """Write small arrays, of which some are damaged from the beginning, and one vanishes once they are indexed."""
    chance = np.random.default_rng(0)
    for number in range(SAMPLES):
        np.save(folder / f"{number:04}.npy", chance.standard_normal((8, 8), np.float32))
    for name in DAMAGED:
        (folder / name).write_bytes(b"not an array at all")
    index(folder, folder.parent / "images.quiver", shard_bytes="16KiB")
    (folder / VANISHED).unlink()


def augment(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Decode, and flip half of the images: which ones follows from the loader's seed, the epoch and the sample."""
    import io

    image = np.load(io.BytesIO(sample["data"]))
    return {"key": sample["__key__"], "image": torch.from_numpy(image[:, ::-1].copy() if rng.random() < 0.5 else image)}


def main() -> None:
    logging.basicConfig(format="%(levelname)s %(message)s")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "images")
        folder.mkdir()
        make_dataset(folder)
        dataset = Dataset(
            folder.parent / "images.quiver",
            cache=f"file://{name}/cache?capacity=64MiB",
            fields=["data", "__key__"],
            transform=augment,
        )
        loader = DataLoader(dataset, BATCH_SIZE, shuffle=True, on_error="replace", errors_max=10)
        for epoch in range(2):
            sizes, keys = [], set()
            for batch in loader:
                sizes.append(len(batch["image"]))
                keys.update(batch["key"])
            print(f"epoch {epoch}: {len(sizes)} batches, {len(keys)} different samples, sizes {sorted(set(sizes))}")
        counts = loader.stats()
        print(f"replaced {counts['replaced']}, skipped {counts['skipped']}")
        loader.close()
        dataset.close()


if __name__ == "__main__":
    main()
