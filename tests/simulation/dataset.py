"""Small datasets whose shards are real: real bytes, tables, digests and manifests, and nothing on disk."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import xxhash

from quiver.digest import Digest
from quiver.manifest import Manifest
from quiver.manifest.schema import Field, Header
from quiver.manifest.tables import Tables
from quiver.shard import COUNT_BYTES, ROW_BYTES, encode_table, name_of
from quiver_client import Dataset
from quiver_client.opened import Opened

VARIANTS: Final = 12


@dataclass(frozen=True, eq=False)
class Data:
    """A dataset: its manifest, its shards by digest, and the bytes of each sample."""

    manifest: Manifest
    shards: dict[Digest, bytes]
    truth: list[bytes]  # by sample

    @property
    def digests(self) -> tuple[Digest, ...]:
        return tuple(self.shards)

    @property
    def total_bytes(self) -> int:
        return sum(map(len, self.shards.values()))


@functools.lru_cache(VARIANTS)
def data_of(variant: int) -> Data:
    """Return one of a few datasets, made once per process: the same in every process."""
    chance = np.random.default_rng(variant)
    shard_count = int(chance.integers(5, 15))
    counts = chance.integers(2, 8, shard_count)
    blobs = int(counts.sum())
    sizes = np.full(blobs, 24) if variant % 2 else chance.integers(8, 40, blobs)
    samples = [chance.bytes(int(size)) for size in sizes]
    blob_of = chance.permutation(np.concatenate([np.arange(blobs), chance.integers(0, blobs, variant % 4)]))
    firsts = np.cumsum(counts) - counts
    digests = np.array([list(Digest.of(sample)) for sample in samples], np.uint8)
    shards: dict[Digest, bytes] = {}
    offsets = np.zeros(blobs, np.uint64)
    for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
        own = samples[first : first + count]
        lengths = np.array([len(sample) for sample in own], np.uint64)
        offsets[first : first + count] = np.cumsum(lengths) - lengths
        table = encode_table(digests[first : first + count], lengths)
        assert len(table) == count * ROW_BYTES + COUNT_BYTES
        shards[name_of(table)] = b"".join(own) + table
    tables = Tables(
        keys=pa.array([str(row) for row in range(len(blob_of))], pa.large_utf8()),
        blob_of=blob_of.astype(np.uint32),
        scalars={},
        offsets=offsets,
        digests=digests,
        xxh3=np.array([[xxhash.xxh3_64_intdigest(sample)] for sample in samples], np.uint64),
        lengths=np.array([[len(sample)] for sample in samples], np.uint64),
        object_of=np.zeros(blobs, np.uint32),
        origins=np.zeros((blobs, 1), np.uint64),
        shard_digests=np.frombuffer(b"".join(shards), np.uint8).reshape(-1, 32),
        shard_sizes=np.array([len(data) for data in shards.values()], np.uint64),
        firsts=firsts.astype(np.uint32),
        object_paths=pa.array(["all"], pa.large_utf8()),
        object_sizes=np.array([sizes.sum()], np.uint64),
        object_etags=pa.array([""], pa.large_utf8()),
        object_mtimes=np.zeros(1, np.int64),
    )
    layout = "sequential" if variant % 3 == 0 else "mixed"
    header = Header(1, layout, 1 << 20, "files", "file:///simulated/", (Field("x", "bytes"),))
    digest = Digest.of(f"simulated {variant}".encode())
    manifest = Manifest(Path(f"simulated-{variant}.quiver"), header, tables, digest=digest)
    return Data(manifest, shards, [samples[blob] for blob in blob_of.tolist()])


class SimulatedDataset(Dataset):
    """What a sampler asks of a dataset; its needs go where the rank says."""

    def __init__(self, data: Data, channel: Any) -> None:
        self._data, self._channel = data, channel
        self._opened, self._rows = Opened(data.manifest), None
        self.substitutions = 0

    def __repr__(self) -> str:
        return f"SimulatedDataset({self._data.manifest.path})"

    def __len__(self) -> int:
        return len(self._data.truth)

    def count(self, name: str, amount: int) -> None:
        if name == "substitutions":
            self.substitutions += amount

    def needs(self) -> Any:
        return self._channel

    def close(self) -> None: ...
