"""Making sources the way other tools make them, and reading manifests back as a user would."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import xxhash

from quiver.manifest import ABSENT, Manifest
from quiver.origin import open_origin


def write_tree(root: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def read_back(path: Path) -> dict[str, dict[str, Any]]:
    """Read every sample from the origin, check it against the manifest, and return key -> field -> value."""
    manifest = Manifest.open(path)
    tables = manifest.tables
    origin = open_origin(manifest)
    blobs = []
    try:
        for row in range(len(tables.offsets)):
            data = bytearray(int(manifest.blob_sizes(np.asarray([row]))[0]))
            origin.read([row], memoryview(data))
            assert blake3.blake3(data).digest() == tables.digests[row].tobytes()
            fields, at = {}, 0
            for column, field in enumerate(manifest.header.blobs):
                length = int(tables.lengths[row, column])
                value = None if length == ABSENT else bytes(data[at : at + length])
                assert xxhash.xxh3_64_intdigest(value or b"") == int(tables.xxh3[row, column])
                at += len(value or b"")
                fields[field.name] = value
            blobs.append(fields)
    finally:
        origin.close()
    scalars = {name: column.to_pylist() for name, column in tables.scalars.items()}
    return {
        manifest.key(row): {**blobs[int(blob)], **{name: values[row] for name, values in scalars.items()}}
        for row, blob in enumerate(tables.blob_of)
    }


def shard_names(path: Path) -> list[str]:
    manifest = Manifest.open(path)
    return [str(manifest.shard_digest(shard)) for shard in range(manifest.shard_count)]


def warned(report: Any) -> dict[str, list[str]]:
    return {notice.what: list(notice.names) for notice in report.warnings}
