"""The data of the questions: random bytes, which do not compress, and one order per run.

A folder holds all samples back to back in ``samples.bin`` (what raw readers map or send), ``offsets.npy``, and
``order.npy``: the seeded permutation that every contender gets. Other forms are derived on demand: one file per sample
(plain files, nginx, and the source of ``quiver index``), or a Parquet file of tokens.
"""

from __future__ import annotations

import functools
import io
import json
import mmap
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

Kind = Literal["blobs", "tokens", "jpeg"]
SPREAD: Final = 0.4  # sizes vary by this share around the mean, so that nothing is aligned by chance
FILES_A_FOLDER: Final = 1000
TOKENS: Final = 1024  # int32 each: 4 KiB per sample
ROWS_A_GROUP: Final = 4096
SHARD_BYTES: Final = "32MiB"


@dataclass(frozen=True)
class Data:
    """Where one dataset is. Passed to every contender as JSON."""

    folder: Path
    kind: Kind
    count: int
    sample_bytes: int  # the mean; for tokens the exact size of each

    def encode(self) -> dict[str, Any]:
        return asdict(self) | {"folder": str(self.folder)}

    @classmethod
    def decode(cls, raw: dict[str, Any]) -> Data:
        return cls(**{**raw, "folder": Path(raw["folder"])})

    @property
    def blob(self) -> Path:
        return self.folder / "samples.bin"

    @cached_property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Where each sample begins in ``blob``, and the end: ``(count + 1,)`` bytes."""
        loaded: npt.NDArray[np.int64] = np.load(self.folder / "offsets.npy")
        return loaded

    @cached_property
    def order(self) -> npt.NDArray[np.int64]:
        """The samples in the order in which every contender reads them: ``(count,)``."""
        loaded: npt.NDArray[np.int64] = np.load(self.folder / "order.npy")
        return loaded

    @property
    def total_bytes(self) -> int:
        return int(self.offsets[-1])

    def file(self, number: int) -> Path:
        return self.folder / "files" / f"{number // FILES_A_FOLDER:04}" / f"{number:08}.bin"

    def sample(self, number: int) -> bytes:
        begin, end = self.offsets[number : number + 2].tolist()
        return bytes(_mapped(self.blob)[begin:end])

    def batches(self, size: int) -> list[list[int]]:
        """Return the order as batches of sample numbers."""
        return [self.order[at : at + size].tolist() for at in range(0, self.count, size)]

    def files(self) -> Path:
        """Return the folder with one file per sample; make it if it does not exist."""
        folder = self.folder / "files"
        done = self.folder / "files.done"
        if not done.exists():
            with self.blob.open("rb") as blob:
                for number, size in enumerate(np.diff(self.offsets).tolist()):
                    path = self.file(number)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(blob.read(size))
            done.touch()
        return folder

    def rebased(self, base: str, target: Path) -> Path:
        """Copy the manifest to ``target``, with another base URL in its header; return the path."""
        import msgspec
        import pyarrow as pa

        from quiver.manifest.schema import METADATA_KEY
        from quiver.manifest.writer import write_atomically

        target.parent.mkdir(parents=True, exist_ok=True)
        with pa.memory_map(str(self.manifest())) as file:
            reader = pa.ipc.open_file(file)
            header = msgspec.json.decode(reader.schema.metadata[METADATA_KEY])
            metadata = {METADATA_KEY: msgspec.json.encode(header | {"base": base})}
            write_atomically(target, reader.get_batch(0).replace_schema_metadata(metadata))
        return target

    def manifest(self) -> Path:
        """Return the manifest of the Parquet file of tokens, else of the files; make it if it does not exist."""
        path = self.folder / "data.quiver"
        if not path.exists():
            from quiver_client import index

            if self.kind == "tokens":
                index(str(tokens_file(self)), path, shard_bytes=SHARD_BYTES)
            else:
                index(str(self.files()), path, format="files", shard_bytes=SHARD_BYTES)
        return path


@functools.lru_cache
def _mapped(path: Path) -> memoryview:
    """Map a file, so that reading a million samples does not open a million files."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


def make_data(folder: Path, kind: Kind, count: int, sample_bytes: int, seed: int = 0) -> Data:
    """Write a dataset and its order; equal arguments give equal bytes."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    data = Data(folder, kind, count, TOKENS * 4 if kind == "tokens" else sample_bytes)
    with data.blob.open("wb") as blob:
        if kind == "jpeg":
            sizes = np.array([blob.write(_picture(rng)) for _ in range(count)], np.int64)
        else:
            sizes = _sizes(rng, data)
            for size in sizes.tolist():
                blob.write(rng.bytes(size))
    np.save(folder / "offsets.npy", np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]))
    np.save(folder / "order.npy", rng.permutation(count))
    (folder / "data.json").write_text(json.dumps(data.encode()))
    return data


def tokens_file(data: Data) -> Path:
    """Return a folder with the samples as a Parquet column: fixed-length lists, or bytes if Quiver reads no lists."""
    folder = data.folder / "parquet"
    if folder.exists():
        return folder
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    values = np.fromfile(data.blob, np.int32)
    tokens = pa.FixedSizeListArray.from_arrays(pa.array(values), TOKENS)
    pq.write_table(pa.table({"tokens": tokens}), folder / "data.parquet", row_group_size=ROWS_A_GROUP, compression=None)
    if not _indexes_as_tokens(folder):
        raw = pa.array([bytes(row) for row in values.reshape(-1, TOKENS)], pa.binary())
        table = pa.table({"tokens": raw})
        pq.write_table(table, folder / "data.parquet", row_group_size=ROWS_A_GROUP, compression=None)
    return folder


def _indexes_as_tokens(folder: Path) -> bool:
    """Say whether this Quiver reads a column of fixed-length lists."""
    from quiver.errors import QuiverError
    from quiver.manifest import Manifest
    from quiver_client import index

    trial = folder.parent / "trial.quiver"
    try:
        index(str(folder), trial, shard_bytes=SHARD_BYTES)
        return any(field.name == "tokens" for field in Manifest.open(trial).header.blobs)
    except (QuiverError, ValueError):
        return False
    finally:
        trial.unlink(missing_ok=True)


def _sizes(rng: np.random.Generator, data: Data) -> npt.NDArray[np.int64]:
    if data.kind == "tokens":
        return np.full(data.count, data.sample_bytes, np.int64)
    low, high = data.sample_bytes * (1 - SPREAD), data.sample_bytes * (1 + SPREAD)
    return rng.integers(int(low), int(high) + 1, data.count)


def _picture(rng: np.random.Generator) -> bytes:
    """Return a JPEG of 500 × 375 that resembles a photograph: soft colours and some noise, about 110 kB."""
    from PIL import Image

    soft = Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8)).resize((500, 375), Image.Resampling.BICUBIC)
    noisy = np.asarray(soft, np.int16) + rng.integers(-16, 17, (375, 500, 3), np.int16)
    packed = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(packed, "JPEG", quality=90)
    return packed.getvalue()
