"""The keys of samples inside tars and Parquet files: their names there, as their owner knows them.

If two objects of a source use the same name, the object's path precedes the name, for all samples.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import xxhash

from quiver_client.indexing.columns import Growing, GrowingStrings, Samples
from quiver_client.indexing.objects import Listing

BLOCK_ROWS: Final = 1 << 16


def name_plainly(samples: Samples, listing: Listing) -> None:
    """Remove the object's path from every key if the keys are distinct without it, judged by 8 bytes per sample."""
    keys, objects = samples.keys.view(), samples.objects.view()
    plain, hashes = GrowingStrings(), Growing(np.uint64)
    for lo in range(0, len(keys), BLOCK_ROWS):
        block = objects[lo : lo + BLOCK_ROWS]
        cut = {number: len(listing.object(number).path) + 1 for number in np.unique(block).tolist()}
        names = [
            key[cut[number] :]
            for key, number in zip(keys[lo : lo + BLOCK_ROWS].to_pylist(), block.tolist(), strict=True)
        ]
        plain.extend(names)
        hashes.extend([xxhash.xxh3_64_intdigest(name.encode()) for name in names])
    ordered = np.sort(hashes.take())
    if not (ordered[1:] == ordered[:-1]).any():
        samples.keys = plain
