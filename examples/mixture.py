"""Train on a mixture of datasets in exact proportions, stop in the middle of an epoch, and go on with other weights.

    python examples/mixture.py

Everything is made in a temporary folder: two small datasets of different sizes, their manifests, and a cache.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from quiver_client import DataLoader, Dataset, Mix, index


def make_part(folder: Path, name: str, samples: int) -> Path:
    """Write a folder of small files and index it: no file is copied or converted."""
    chance = np.random.default_rng(samples)
    for number in range(samples):
        file = folder / name / f"{number:04}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(chance.bytes(2000))
    manifest = folder / f"{name}.quiver"
    index(folder / name, manifest, shard_bytes="64KiB")
    return manifest


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        cache = f"file://{folder}/cache?capacity=64MiB"
        web = Dataset(make_part(folder, "web", 600), cache)
        code = Dataset(make_part(folder, "code", 100), cache)

        mix = Mix({"web": web, "code": code}, weights={"web": 0.7, "code": 0.3}, part_field="__part__")
        loader = DataLoader(mix, batch_size=50, shuffle=True, seed=1)
        print(f"{mix}\none epoch: {len(loader)} batches")
        state, seen = {}, Counter[str]()
        for number, batch in enumerate(loader, 1):
            seen.update(batch["__part__"])
            if number == 10:
                state = loader.state_dict()  # goes into the checkpoint
                break
        print(f"after 10 batches: {dict(seen)}")
        loader.close()

        # The next run resumes there. From here on a third of each batch is web; the passes of both parts go on.
        mix = Mix({"web": web, "code": code}, weights={"web": 1, "code": 2}, part_field="__part__")
        loader = DataLoader(mix, batch_size=50, shuffle=True, seed=1)
        loader.load_state_dict(state)
        seen = Counter()
        for batch in loader:
            seen.update(batch["__part__"])
        print(f"the rest of the epoch: {dict(seen)}")
        for name, counts in mix.stats().items():
            print(f"{name}: {counts['drawn']} samples, {counts['passes']} passes ended, weight {counts['weight']:.2f}")
        loader.close()
        mix.close()


if __name__ == "__main__":
    main()
