"""The golden manifests: a small dataset whose manifests, shards and digests are committed.

    python -m tests.support.golden        rewrites tests/golden/checked.quiver and tests/golden/small.json

Do that only when the format changes on purpose: the same code reads every existing manifest.
``small.quiver`` is from before manifests had checksums, and is never rewritten. The dataset is computed, not random,
and its manifest's base is a fixed URL.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from quiver.digest import Digest
from quiver.layout import place
from quiver.manifest import ABSENT, FORMAT_VERSION, Field, Header, Manifest, ManifestParts, write_manifest
from quiver.manifest.writer import sample_sizes

FOLDER = Path(__file__).parent.parent / "golden"
MANIFEST = FOLDER / "small.quiver"  # without checksums
CHECKED = FOLDER / "checked.quiver"
EXPECTED = FOLDER / "small.json"
SHARD_BYTES = 4096


def content(number: int) -> tuple[bytes, bytes | None]:
    """Return the two byte fields of a distinct sample; every fifth sample lacks the second."""
    image = hashlib.shake_128(f"image {number}".encode()).digest(100 + number * 37 % 900)
    return image, None if number % 5 == 0 else hashlib.shake_128(f"mask {number}".encode()).digest(number % 50)


def write(target: Path) -> None:
    """Write the manifest of 40 samples, of which the last two repeat the first two."""
    parts = [content(number) for number in range(38)]
    digests = np.array([list(Digest.of(image + (mask or b""))) for image, mask in parts], np.uint8)
    lengths = np.array([[len(image), ABSENT if mask is None else len(mask)] for image, mask in parts], np.uint64)
    xxh3 = np.array([[xxhash.xxh3_64_intdigest(field or b"") for field in pair] for pair in parts], np.uint64)
    sizes = sample_sizes(lengths)
    ends = np.cumsum(sizes, dtype=np.uint64)
    origins = np.stack([ends - sizes, ends - sizes + lengths[:, 0]], axis=1)
    order, firsts = place("mixed", digests, sizes, np.zeros(38, np.uint32), SHARD_BYTES)
    place_of = np.argsort(order)
    fields = (Field("image", "bytes"), Field("mask", "bytes"), Field("label", "int64", ("even", "odd")))
    write_manifest(
        target,
        ManifestParts(
            header=Header(FORMAT_VERSION, "mixed", SHARD_BYTES, "webdataset", "https://example.org/small/", fields),
            keys=pa.array([f"sample-{number:02}" for number in range(40)], pa.large_utf8()),
            blob_of=place_of[np.arange(40) % 38].astype(np.uint32),
            scalars={"label": pa.array(np.arange(40) % 2)},
            digests=digests[order],
            xxh3=xxh3[order],
            lengths=lengths[order],
            objects_of=np.zeros(38, np.uint32),
            origins=origins[order],
            firsts=firsts,
            object_paths=pa.array(["all.tar"], pa.large_utf8()),
            object_sizes=np.array([int(ends[-1])], np.uint64),
            object_etags=pa.array(['"abc"'], pa.large_utf8()),
            object_mtimes=np.array([0], np.int64),
        ),
    )


def described(manifest: Manifest) -> dict[str, Any]:
    return {
        "digest": str(manifest.digest),
        "shards": [str(manifest.shard_digest(number)) for number in range(manifest.shard_count)],
        "shard_bytes": manifest.tables.shard_sizes.tolist(),
        "keys": [manifest.key(index) for index in range(len(manifest))],
    }


if __name__ == "__main__":
    write(CHECKED)
    EXPECTED.write_text(json.dumps(described(Manifest.open(CHECKED)), indent=1) + "\n")
