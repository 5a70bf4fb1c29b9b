"""An open manifest, which the processes of a job share: read once, validated, and answered from arrays.

Nothing is parsed per sample, and nothing is copied after the file has been read: the arrays are views of ``Content``.
It is immutable, whatever happens to the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quiver.digest import Digest
from quiver.errors import BadRequest, Corrupt, Misconfigured
from quiver.location import shown
from quiver.lookup import DigestRows
from quiver.malformed import MALFORMED
from quiver.manifest.checks import check_arrays, check_tables
from quiver.manifest.checksums import CHECKSUMS_KEY, check_checksums
from quiver.manifest.columns import tables_of
from quiver.manifest.container import INDEX_AGAIN, Frame, take_apart
from quiver.manifest.content import Content
from quiver.manifest.schema import (
    FORMAT_VERSION,
    METADATA_KEY,
    Header,
    OriginObject,
    arrow_schema,
    check_header,
)
from quiver.manifest.tables import Tables
from quiver.manifest.writer import sample_sizes

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]


class Manifest:
    """An opened, checked manifest. Open one with ``Manifest.open``."""

    _numbers: DigestRows | None = None

    def __init__(
        self,
        path: Path,
        header: Header,
        tables: Tables,
        content: Content | None = None,
        *,
        has_checksums: bool = False,
        digest: Digest | None = None,
    ) -> None:
        self.path = path
        self.header = header
        self.tables = tables
        self.has_checksums = has_checksums  # without them, damage to labels and keys goes undetected
        self._content = content
        self._digest = digest

    @classmethod
    def open(cls, path: Path, digest: Digest | None = None, *, size_bytes_max: int | None = None) -> Manifest:
        """Read and validate the manifest at ``path``; with ``digest``, also check that the file has this digest.

        ``size_bytes_max``: reject a larger file, so that an untrusted one cannot exhaust this process's memory.

        Raises ``NotFound`` if there is no file, ``BadRequest`` if it is no manifest, truncated, damaged or
        inconsistent, ``Misconfigured`` if its format is newer than this version reads, ``DiskFailed`` if the disk
        fails, ``Corrupt`` if its digest differs.
        """
        content = Content.read(path, size_bytes_max)
        if digest is not None:
            found = Digest.of(content.view)
            if found != digest:
                raise Corrupt(
                    f"this is manifest {found.short}, but {digest.short} was expected: the dataset was indexed again,"
                    " or the file is damaged. Restore the old file, or open the new one as a new dataset",
                    str(path),
                )
        return cls._of(path, content, digest, trusted=False)

    @classmethod
    def adopt(cls, path: Path, fd: int, digest: Digest) -> Manifest:
        """Return the manifest that another process of this job passed by ``share``. Takes over the descriptor."""
        return cls._of(path, Content.adopt(fd), digest, trusted=True)

    @classmethod
    def _of(cls, path: Path, content: Content, digest: Digest | None, *, trusted: bool) -> Manifest:
        """``trusted``: the process that passed the content has validated it, and it cannot have changed since."""
        try:
            frame = take_apart(content.view)
            header, raw = _header(frame.schema)
            told = _expect_schema(frame, header, raw)
            if told is not None and digest is None:  # comparing the digest covers all that the checksums do
                check_checksums(told, raw, frame.batch)
            tables = tables_of(frame, header)
            if not trusted:
                check_tables(tables, byte_ranges=header.source != "parquet")
                check_arrays(tables, header.blobs)
        except (BadRequest, Misconfigured) as error:
            raise type(error)(f"{path} is not a manifest that can be read: {error}") from error
        except (pa.ArrowException, ValueError) as error:
            raise BadRequest(f"{path} is not a manifest ({error}); {INDEX_AGAIN}") from error
        return cls(path, header, tables, content, has_checksums=told is not None, digest=digest)

    def __len__(self) -> int:
        return len(self.tables.blob_of)

    def __repr__(self) -> str:
        return f"Manifest({str(self.path)!r}, {len(self)} samples, {self.shard_count} shards, {self.header.layout})"

    @property
    def digest(self) -> Digest:
        """BLAKE3 of the file as it was opened: the manifest's name in a rack. Computed on first use, 0.2 s per GB."""
        digest = self._digest
        if digest is None:  # two threads may both compute it; no lock, which a fork could leave held
            digest = self._digest = Digest.of(self.content)
        return digest

    @property
    def content(self) -> memoryview:
        """The bytes of the file as it was opened."""
        if self._content is None:
            raise ValueError(f"{self} was not opened from a file")
        return self._content.view

    def share(self) -> int | None:
        """Return a descriptor of the content for ``adopt`` in another process; ``None`` if the system has none."""
        return None if self._content is None else self._content.share()

    @property
    def shard_count(self) -> int:
        return len(self.tables.firsts)

    @property
    def total_bytes(self) -> int:
        """Bytes of the distinct samples: what one epoch through an empty cache reads from the origin."""
        tables = self.tables
        counts = np.diff(np.append(tables.firsts.astype(np.int64), len(tables.offsets)))
        return int(tables.shard_sizes.sum()) - int(counts.sum()) * 40 - 8 * len(counts)

    def shard_digest(self, shard: int) -> Digest:
        return Digest(self.tables.shard_digests[shard].tobytes())

    @property
    def shard_numbers(self) -> DigestRows:
        """Digest -> position in the shard table. Sorted on first use, which takes 0.1 s for a million shards."""
        numbers = self._numbers
        if numbers is None:  # two threads may both make it; no lock, which a fork could leave held
            numbers = self._numbers = DigestRows(self.tables.shard_digests)
        return numbers

    def shard_blobs(self, shard: int) -> range:
        """Return the rows of ``blobs`` that make up the shard, in shard order."""
        firsts = self.tables.firsts
        end = int(firsts[shard + 1]) if shard + 1 < len(firsts) else len(self.tables.offsets)
        return range(int(firsts[shard]), end)

    def blob_sizes(self, blobs: slice | Indices) -> U64:
        """Return the bytes of distinct samples, all fields together."""
        return sample_sizes(self.tables.lengths[blobs])

    def key(self, index: int) -> str:
        return cast(str, self.tables.keys[index].as_py())

    def keys_of_blobs(self, blobs: Indices, limit: int = 100) -> list[str]:
        """Return the keys of the samples that refer to these blobs: for error messages, not for hot paths."""
        rows = np.flatnonzero(np.isin(self.tables.blob_of, blobs))[:limit]
        return [self.key(int(row)) for row in rows]

    def keys(self, indices: Indices) -> list[str]:
        return cast(list[str], self.tables.keys.take(pa.array(indices)).to_pylist())

    def scalars(self, name: str, indices: Indices) -> list[Any]:
        """Return a scalar field of the samples as Python values."""
        return cast(list[Any], self.scalar_column(name, indices).to_pylist())

    def scalar_column(self, name: str, indices: Indices) -> pa.Array[Any]:
        """Return a scalar field of the samples as an Arrow array."""
        return self.tables.scalars[name].take(pa.array(indices))

    def object(self, number: int) -> OriginObject:
        tables = self.tables
        return OriginObject(
            path=tables.object_paths[number].as_py(),
            size=int(tables.object_sizes[number]),
            etag=tables.object_etags[number].as_py(),
            mtime_ns=int(tables.object_mtimes[number]),
        )

    def object_url(self, number: int) -> str:
        """Return the full URL of an origin object, for people."""
        return self.header.base + quote(self.object(number).path)


def _expect_schema(frame: Frame, header: Header, raw: bytes) -> bytes | None:
    """Check that the schema belongs to this header; return the checksums beside it, ``None`` in an older file."""
    check_header(header)
    metadata = dict(frame.schema.metadata)
    told: bytes | None = metadata.pop(CHECKSUMS_KEY, None)
    if metadata != {METADATA_KEY: raw}:
        raise BadRequest(f"its schema has metadata that a manifest does not have; {INDEX_AGAIN}")
    expected = arrow_schema(header).with_metadata(frame.schema.metadata)
    if not frame.schema.equals(expected, check_metadata=True):
        raise BadRequest(f"its columns are not those of format {header.format}; {INDEX_AGAIN}")
    return told


def _header(schema: pa.Schema) -> tuple[Header, bytes]:
    raw: bytes | None = (schema.metadata or {}).get(METADATA_KEY)
    if raw is None:
        raise BadRequest(f"it is an Arrow file but not a manifest; {INDEX_AGAIN}")
    try:
        version = msgspec.json.decode(raw, type=dict[str, Any]).get("format")
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise Misconfigured(
                f"manifest format {version} is newer than this Quiver reads ({FORMAT_VERSION}); upgrade quiver-cache"
            )
        header = msgspec.json.decode(raw, type=Header)
    except MALFORMED as error:
        raise BadRequest(f"its header cannot be read ({shown(str(error))}); {INDEX_AGAIN}") from error
    if header.format < 1:
        raise BadRequest(f"manifest format {header.format} is not read any more; {INDEX_AGAIN}")
    return header, raw
