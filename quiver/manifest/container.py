"""The Arrow file around a manifest, parsed as untrusted input: only what the writer writes is accepted.

    magic · schema message · record batch message · end of stream · footer · length of the footer · magic

Arrow's own reader does more than a manifest needs: it decompresses implicitly, and several versions of its metadata
announce compression in several places. So Arrow parses only the schema, from metadata that contains nothing else; the
buffers of the record batch are slices of the file. Nothing is decompressed: memory use equals the size of the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from quiver.errors import BadRequest
from quiver.location import shown
from quiver.manifest.flatbuffer import Table

INDEX_AGAIN: Final = "make it again with `quiver index`"
MAGIC: Final = b"ARROW1\0\0"
_TAIL_BYTES: Final = 10  # the footer's length, and the magic without its padding
_CONTINUES: Final = b"\xff\xff\xff\xff"
_PREFIX_BYTES: Final = 8  # the continuation marker, and the length of a message's metadata
_END: Final = _CONTINUES + bytes(4)
_VERSION: Final = 4  # V5, of Arrow 1.0 and later: V4 can declare compression in another place
_SCHEMA, _RECORD_BATCH = 1, 3  # kinds of messages
_PADDING_BYTES: Final = 64  # the most to which Arrow pads a buffer
_FIELDS_MAX: Final = 1 << 10  # of a schema, nested ones too: more than a manifest of FIELDS_MAX fields has
_BUFFERS_MAX: Final = 4 * _FIELDS_MAX  # each of these becomes an object
_HEAD_BYTES_MAX: Final = (
    64 << 20
)  # of a message's metadata, which is parsed: 60 bytes for each of a million class names
_DEPTH_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class Frame:
    """The parts of an Arrow file of one record batch of one row."""

    schema: pa.Schema
    batch: memoryview  # the record batch's message: marker, length, metadata, body
    nodes: list[tuple[int, int]]  # of each column, nested ones too: rows and nulls
    buffers: list[memoryview]  # in the body


def take_apart(file: memoryview) -> Frame:
    """Parse a file. Raises ``BadRequest`` unless it has the structure of a manifest."""
    schema, body_at = _message(file, len(MAGIC), _SCHEMA)
    if schema.number(3, "<q"):
        raise BadRequest("its schema has a body")
    _check_schema(schema.table(2))
    batch_at = body_at
    batch, body_at = _message(file, batch_at, _RECORD_BATCH)
    body_bytes = batch.number(3, "<q")
    footer_at = body_at + body_bytes + len(_END)
    if body_bytes < 0 or body_bytes % 8 or footer_at > len(file) - _TAIL_BYTES:
        raise BadRequest(f"it is truncated, or its length is damaged; {INDEX_AGAIN}")
    if file[footer_at - len(_END) : footer_at] != _END:
        raise BadRequest(f"it is not one schema and one record batch; {INDEX_AGAIN}")
    block = (batch_at, body_at - batch_at, body_bytes)
    nodes, places = _check_batch(batch.table(2), body_bytes)
    _check_footer(file, footer_at, block)
    try:
        first = pa.ipc.read_schema(pa.py_buffer(file[len(MAGIC) : batch_at]))
        again = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(file))).schema
    except (pa.ArrowException, ValueError, OSError) as error:
        raise BadRequest(f"its schema cannot be read ({shown(str(error))}); {INDEX_AGAIN}") from error
    if not first.equals(again, check_metadata=True):
        raise BadRequest(f"its two schemas differ; {INDEX_AGAIN}")
    buffers = [file[body_at + offset : body_at + offset + length] for offset, length in places]
    return Frame(first, file[batch_at : footer_at - len(_END)], nodes, buffers)


def _message(file: memoryview, at: int, kind: int) -> tuple[Table, int]:
    """Return the message at offset ``at``, and the offset of its body."""
    prefix = bytes(file[at : at + _PREFIX_BYTES])
    length = int.from_bytes(prefix[4:], "little", signed=True)
    end = at + _PREFIX_BYTES + length
    if prefix[:4] != _CONTINUES or length <= 0 or length % 8 or end > len(file):
        raise BadRequest(f"it is not an Arrow file of a current version, or it is truncated; {INDEX_AGAIN}")
    if length > _HEAD_BYTES_MAX:
        raise BadRequest(f"its metadata is of {length} bytes, and {_HEAD_BYTES_MAX} are allowed")
    message = Table.root(file[at + _PREFIX_BYTES : end])
    if message.number(0, "<h") != _VERSION:
        raise BadRequest(f"its metadata is not of Arrow's version V5; {INDEX_AGAIN}")
    if message.number(1, "<B") != kind:
        raise BadRequest(f"it is not one schema and one record batch; {INDEX_AGAIN}")
    if message.has(4):
        raise BadRequest(f"one of its messages has custom metadata; {INDEX_AGAIN}")
    return message, end


def _check_schema(schema: Table) -> None:
    """Reject everything in a schema but names and types, before Arrow acts on it."""
    if schema.number(0, "<h") or schema.has(3):
        raise BadRequest(f"its schema has another byte order, or requires optional features; {INDEX_AGAIN}")
    count, fields = 0, schema.tables(1, _FIELDS_MAX)
    for _ in range(_DEPTH_MAX):
        count += len(fields)
        if count > _FIELDS_MAX:
            raise BadRequest(f"its schema has more than {_FIELDS_MAX} fields; {INDEX_AGAIN}")
        if any(field.has(4) or field.has(6) for field in fields):
            raise BadRequest(f"a field of its schema has a dictionary or custom metadata; {INDEX_AGAIN}")
        fields = [child for field in fields for child in field.tables(5, _FIELDS_MAX)]
    if fields:
        raise BadRequest(f"its schema is nested more than {_DEPTH_MAX} deep; {INDEX_AGAIN}")


def _check_batch(batch: Table, body_bytes: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the nodes of a record batch and the places of its buffers, which lie one after another in the body."""
    if batch.number(0, "<q") != 1:
        raise BadRequest(f"it has {batch.number(0, '<q')} rows instead of one")
    if batch.has(3):
        raise BadRequest(f"it is compressed, which manifests are not; {INDEX_AGAIN}")
    if batch.has(4):
        raise BadRequest(f"its columns are not those of a manifest; {INDEX_AGAIN}")
    places = batch.structs(2, "<qq", _BUFFERS_MAX)
    end = 0
    for offset, length in places:
        if not end <= offset < end + _PADDING_BYTES or offset % 8 or not 0 <= length <= body_bytes - offset:
            raise BadRequest("its buffers overlap, leave gaps or leave the file")
        end = offset + length
    if not end <= body_bytes < end + _PADDING_BYTES:
        raise BadRequest("its buffers leave a gap")
    return [(rows, nulls) for rows, nulls in batch.structs(1, "<qq", _BUFFERS_MAX)], [
        (at, length) for at, length in places
    ]


def _check_footer(file: memoryview, at: int, block: tuple[int, int, int]) -> None:
    """Check that the footer describes what was found, and nothing else."""
    tail = file[len(file) - _TAIL_BYTES :]
    length = int.from_bytes(tail[:4], "little", signed=True)
    if tail[4:] != MAGIC[: _TAIL_BYTES - 4] or at + length + _TAIL_BYTES != len(file):
        raise BadRequest(f"it is truncated, or something follows it; {INDEX_AGAIN}")
    footer = Table.root(file[at : at + length])
    if footer.number(0, "<h") != _VERSION or footer.has(4):
        raise BadRequest(f"its footer is not of Arrow's version V5, or has custom metadata; {INDEX_AGAIN}")
    if footer.structs(2, "<qi4xq", 1) or footer.structs(3, "<qi4xq", 1) != [block]:
        raise BadRequest(f"its footer does not name one record batch; {INDEX_AGAIN}")
    _check_schema(footer.table(1))
