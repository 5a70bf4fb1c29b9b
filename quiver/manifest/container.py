"""The Arrow file around a manifest, opened as what may come from anybody: mapped, never unpacked, one batch.

Arrow's file reader decompresses without asking, and a few kilobytes can unpack to any size. So the messages are read
one after another, as in a stream, and the head of the only record batch is looked at before its body is.
"""

from __future__ import annotations

import itertools
import mmap
import os
import stat
from pathlib import Path
from typing import Final

import pyarrow as pa

from quiver.errors import BadRequest

INDEX_AGAIN: Final = "make it again with `quiver index`"
_MAGIC: Final = b"ARROW1\0\0"


def map_file(path: Path) -> mmap.mmap:
    """Map a file read-only. Raises ``OSError``, and ``BadRequest`` for what is empty or no regular file."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # non-blocking: a fifo must not hang us
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise BadRequest("it is no regular file")
        if not found.st_size:
            raise BadRequest(f"it is empty; {INDEX_AGAIN}")
        return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)


def only_batch(file: pa.Buffer, schema: pa.Schema) -> pa.RecordBatch:
    """Return the record batch of an Arrow file. Raises ``BadRequest`` if there are others, or if it is compressed."""
    messages = iter(pa.ipc.MessageReader.open_stream(pa.BufferReader(file.slice(len(_MAGIC)))))
    kinds = []
    for message in itertools.islice(messages, 3):
        kinds.append(message.type)
        if message.type == "record batch":
            if _is_compressed(message.metadata.to_pybytes()):
                raise BadRequest(f"it is compressed, which manifests are not; {INDEX_AGAIN}")
            batch = pa.ipc.read_record_batch(message, schema)
    if kinds != ["schema", "record batch"]:
        raise BadRequest(f"it is not one schema and one record batch; {INDEX_AGAIN}")
    return batch


def _is_compressed(metadata: bytes) -> bool:
    """Whether a record batch message (a flatbuffer, see Arrow's ``Message.fbs``) says how it is compressed."""
    header = _field(metadata, _u32(metadata, 0), 2)  # Message.header
    return _field(metadata, header + _u32(metadata, header), 3) > 0  # RecordBatch.compression


def _field(data: bytes, table: int, slot: int) -> int:
    """Return the position of a field of a flatbuffer's table, 0 if it is absent."""
    vtable = table - int.from_bytes(data[table : table + 4], "little", signed=True)
    at = 4 + 2 * slot
    inside = at < int.from_bytes(data[vtable : vtable + 2], "little")
    offset = int.from_bytes(data[vtable + at : vtable + at + 2], "little") if inside else 0
    return table + offset if offset else 0


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")
