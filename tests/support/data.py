"""Small real datasets for tests: folders of files, their manifests, and manifests with another base."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from quiver.digest import Digest
from quiver.fill import OriginShards
from quiver.manifest import Manifest
from quiver.manifest.schema import METADATA_KEY
from quiver.origin import open_origin
from quiver.shard import encode_table, name_of
from quiver_client import index


@dataclass(repr=False)
class Files:
    """A folder of files on disk, its manifest, and the expected samples. ``repr`` omits their bytes."""

    folder: Path
    manifest: Path
    content: dict[str, bytes]

    def __repr__(self) -> str:
        return f"Files({str(self.manifest)!r})"

    def opened(self) -> Manifest:
        return Manifest.open(self.manifest)

    def expected(self, keys: list[str]) -> list[bytes]:
        return [self.content[key] for key in keys]

    def total_bytes(self) -> int:
        return sum({hashlib.sha256(data).digest(): len(data) for data in self.content.values()}.values())


def random_files(count: int, *, seed: int = 0, low: int = 1_000, high: int = 40_000) -> dict[str, bytes]:
    """Return names in three class folders and random bytes; equal seeds give equal content."""
    rng = np.random.default_rng(seed)
    return {f"{'abc'[i % 3]}/{i:04}.png": rng.bytes(int(rng.integers(low, high))) for i in range(count)}


def write_files(folder: Path, content: dict[str, bytes]) -> Path:
    for name, data in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def make_files(
    where: Path, content: dict[str, bytes], *, name: str = "data", shard_bytes: str | int = "256KiB", **more: Any
) -> Files:
    """Write the files into ``where/name`` and index them."""
    folder = write_files(where / name, content)
    manifest = where / f"{name}.quiver"
    index(folder, manifest, shard_bytes=shard_bytes, **more)
    return Files(folder, manifest, content)


def shard_bytes_of(manifest: Manifest, number: int) -> tuple[Digest, bytes]:
    """Return a shard's name and bytes, built from the origin."""
    digest = manifest.shard_digest(number)
    source = OriginShards(manifest, open_origin(manifest))
    return digest, bytes(source.load(digest, int(manifest.tables.shard_sizes[number])))


def make_shard(samples: list[bytes]) -> tuple[Digest, bytes]:
    """Return a shard made of these samples."""
    digests = np.array([list(Digest.of(sample)) for sample in samples], np.uint8).reshape(-1, 32)
    table = encode_table(digests, np.array([len(sample) for sample in samples], np.uint64))
    return name_of(table), b"".join(samples) + table


def rewritten(source: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copy a manifest with its JSON header changed: to name another origin, or to be invalid."""
    with pa.memory_map(str(source)) as file:
        reader = pa.ipc.open_file(file)
        header = msgspec.json.decode(reader.schema.metadata[METADATA_KEY])
        change(header)
        schema = reader.schema.with_metadata({METADATA_KEY: msgspec.json.encode(header)})
        batch = reader.get_batch(0).replace_schema_metadata(schema.metadata)
        with pa.ipc.new_file(str(target), schema) as writer:
            writer.write_batch(batch)
    return target


def rebased(files: Files, base: str, target: Path) -> Files:
    """Return the same dataset with its bytes at another base URL."""
    rewritten(files.manifest, target, lambda header: header.update(base=base if base.endswith("/") else base + "/"))
    return Files(files.folder, target, files.content)
