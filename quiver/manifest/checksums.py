"""Checksums inside a manifest, which detect damage where the reader does not know the manifest's digest.

They are in the schema's metadata beside the header (docs/format.md): BLAKE3 of the header, and of the record batch's
message in chunks. They detect accidents, not forgery: a forger can recompute them. A reader that knows the manifest's
digest compares that instead.
"""

from __future__ import annotations

from typing import Final

import blake3
import msgspec
import pyarrow as pa

from quiver.errors import BadRequest
from quiver.location import shown
from quiver.malformed import MALFORMED
from quiver.manifest.container import INDEX_AGAIN
from quiver.prepared import prepare

CHECKSUMS_KEY: Final = b"quiver-checksums"
CHUNK_BYTES: Final = 4 << 20  # 60 checksums for 1.3 million samples; each locates damage to four megabytes


class Checksums(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON under the metadata key ``quiver-checksums``; digests in hexadecimal."""

    chunk_bytes: int
    header: str
    chunks: tuple[str, ...]


def checksums_of(header: bytes, batch: pa.RecordBatch) -> bytes:
    """Return the checksums of a record batch as it will be written under this header."""
    sink = _Sink(len(batch.schema.serialize()), pa.ipc.get_record_batch_size(batch))
    with pa.ipc.new_stream(pa.PythonFile(sink, "w"), batch.schema) as writer:
        writer.write_batch(batch)
    return msgspec.json.encode(Checksums(CHUNK_BYTES, _hex(header), tuple(sink.digests())))


def check_checksums(told: bytes, header: bytes, batch: memoryview) -> None:
    """Raise ``BadRequest`` if the header or a chunk of the record batch's message does not match its checksum."""
    try:
        checksums = msgspec.json.decode(told, type=Checksums)
    except MALFORMED as error:
        raise BadRequest(f"its checksums cannot be read ({shown(str(error))}); {INDEX_AGAIN}") from error
    starts = range(0, len(batch), CHUNK_BYTES)
    if checksums.chunk_bytes != CHUNK_BYTES or len(checksums.chunks) != len(starts):
        raise BadRequest(f"its checksums are not of {len(starts)} chunks of {CHUNK_BYTES} bytes; {INDEX_AGAIN}")
    if checksums.header != _hex(header):
        raise BadRequest(f"its header is damaged: it does not match its checksum; get the file again, or {INDEX_AGAIN}")
    for number, (start, expected) in enumerate(zip(starts, checksums.chunks, strict=True)):
        if _hex(batch[start : start + CHUNK_BYTES]) != expected:
            raise BadRequest(
                f"it is damaged: chunk {number} of {len(starts)} does not match its checksum;"
                f" get the file again, or {INDEX_AGAIN}"
            )


class _Sink:
    """A file object that keeps only the digest of each chunk of ``size`` bytes, after the first ``skip`` bytes."""

    closed = False

    def __init__(self, skip: int, size: int) -> None:
        self._skip = skip
        self._left = size
        self._chunk = blake3.blake3()
        self._room = CHUNK_BYTES
        self._digests: list[str] = []

    def write(self, data: bytes) -> int:
        view = memoryview(data).cast("B")
        part = view[self._skip :]
        self._skip = max(self._skip - len(view), 0)
        part = part[: self._left]
        self._left -= len(part)
        while part:
            self._chunk.update(part[: self._room])
            taken, part = len(part[: self._room]), part[self._room :]
            self._room -= taken
            if not self._room:
                self._next()
        return len(view)

    def digests(self) -> list[str]:
        if self._room < CHUNK_BYTES:
            self._next()
        return self._digests

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _next(self) -> None:
        self._digests.append(self._chunk.hexdigest())
        self._chunk, self._room = blake3.blake3(), CHUNK_BYTES


def _hex(data: bytes | memoryview) -> str:
    return blake3.blake3(data).hexdigest()


prepare(Checksums)
