"""The format of a ledger's file (``docs/format.md``): a header that names the run, and frames chained by their CRCs.

Invariant: the CRC of a frame continues that of the frame before it, so no frame counts unless all before it do. A last
frame that is incomplete is torn: a process was killed while writing it, and all frames before it count. Anything else
that does not fit is damage and is rejected. A ledger has about one bit per sample and epoch, and is read into memory.
"""

from __future__ import annotations

import enum
import zlib
from typing import Final, NamedTuple

import msgspec
import numpy as np

from quiver.digest import Digest
from quiver.malformed import MALFORMED
from quiver.manifest.checks import SAMPLES_MAX
from quiver.prepared import prepare
from quiver.substitution import Mask
from quiver_client.loader.ledger.batch_encoding import VARINT_BYTES_MAX, number_at, varint

MAGIC: Final = b"qvledger"
VERSION: Final = 2
CHUNK_BYTES: Final = 64 << 10  # of batches in one frame, before they are deflated; a longer batch has its own frame
END_BODY: Final = b"complete"
_CRC_BYTES: Final = 4


class FrameKind(enum.IntEnum):
    """What a frame holds."""

    BATCH = 0
    BATCHES = 1  # each preceded by its length, deflated together
    SEGMENT = 2  # begins a segment, to which the batches that follow belong
    END = 3  # the ledger was closed


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which run a ledger records: if any of these fields differed, its bytes would mean other samples."""

    dataset: str  # digest of the manifest
    seed: int
    shuffle: bool
    rank: int
    world_size: int
    batch_size: int
    drop_last: bool
    block_shards: int = 0  # of a block shuffle; absent for a full one


class Segment(NamedTuple):
    """Batches that one process consumed of one epoch, after ``start`` batches of the same deal."""

    epoch: int
    start: int
    done: Mask | None  # samples consumed before the shares were dealt; ``None``: none
    deal: Digest  # of ``done``: tells deals of one epoch apart
    frames: list[tuple[FrameKind, bytes]]

    def batches(self) -> list[bytes]:
        """Return the batches, each as ``encode_batch`` returned it."""
        return [batch for kind, body in self.frames for batch in _batches_in(kind, body)]


class Contents(NamedTuple):
    segments: list[Segment]
    end: int  # offset behind the last whole frame, not counting the one that closes the ledger
    crc: int  # there


def encode_header(run: Run) -> tuple[bytes, int]:
    """Return the header of this run's ledger, and its CRC."""
    header = msgspec.json.encode(run)
    start = MAGIC + VERSION.to_bytes(4, "little") + len(header).to_bytes(4, "little") + header
    crc = zlib.crc32(start)
    return start + crc.to_bytes(_CRC_BYTES, "little"), crc


def encode_segment(epoch: int, start: int, done: Mask | None) -> bytes:
    """Return the body of the frame that begins a segment."""
    mask = b"" if done is None else varint(len(done)) + zlib.compress(np.packbits(done).tobytes())
    return varint(epoch) + varint(start) + mask


def encode_batches(batches: list[bytes]) -> tuple[FrameKind, bytes]:
    """Return kind and body of the frame for one batch, or for several of at most ``CHUNK_BYTES``."""
    deflated = zlib.compress(b"".join(varint(len(batch)) + batch for batch in batches))
    if len(batches) == 1 and (len(batches[0]) <= len(deflated) or len(batches[0]) > CHUNK_BYTES):
        return FrameKind.BATCH, batches[0]
    return FrameKind.BATCHES, deflated


def encode_frame(kind: FrameKind, body: bytes, crc: int) -> tuple[bytes, int]:
    """Return a frame that follows one with this CRC, and its own CRC."""
    frame = varint(len(body) << 2 | kind) + body
    crc = zlib.crc32(frame, crc)
    return frame + crc.to_bytes(_CRC_BYTES, "little"), crc


def check_header(data: bytes, run: Run) -> tuple[int, int]:
    """Return the offset of the first frame, and the CRC there. ``ValueError`` with the reason for another run's."""
    if not data.startswith(MAGIC):
        raise ValueError("it is not a ledger")
    start = len(MAGIC) + 8
    version, size = (int.from_bytes(data[start - at : start - at + 4], "little") for at in (8, 4))
    if version != VERSION:
        raise ValueError(f"it is version {version} of the format; this release of Quiver reads version {VERSION}")
    end = start + size
    crc = zlib.crc32(data[:end])
    if data[end : end + _CRC_BYTES] != crc.to_bytes(_CRC_BYTES, "little"):
        raise ValueError("its header is damaged")
    try:
        theirs = msgspec.json.decode(data[start:end], type=Run)
    except MALFORMED as error:
        raise ValueError(f"its header is damaged: {error}") from error
    for name in Run.__struct_fields__:
        there, ours = getattr(theirs, name), getattr(run, name)
        if there != ours:
            raise ValueError(f"it is of another {name}: {there!r} there, {ours!r} in this run")
    return end + _CRC_BYTES, crc


def parse(data: bytes, run: Run) -> Contents:
    """Check a whole ledger, and return what it holds. ``ValueError`` for damage, but not for a torn last frame."""
    at, crc = check_header(data, run)
    segments: list[Segment] = []
    while (frame := _frame_at(data, at, crc)) is not None:
        kind, body, end, after = frame
        if kind is FrameKind.END:
            if end != len(data) or body != END_BODY:
                raise ValueError(f"it continues at byte {end}, where it was closed")
            return Contents(segments, at, crc)
        if kind is FrameKind.SEGMENT:
            segments.append(_segment(body))
        elif segments:
            _batches_in(kind, body)
            segments[-1].frames.append((kind, body))
        else:
            raise ValueError(f"it is damaged at byte {at}: a batch outside a segment")
        at, crc = end, after
    if data[-_CRC_BYTES - len(END_BODY) :].startswith(END_BODY):
        raise ValueError(f"it is damaged at byte {at}")
    return Contents(segments, at, crc)


def _frame_at(data: bytes, at: int, crc: int) -> tuple[FrameKind, bytes, int, int] | None:
    """Return kind, body, end and CRC of the frame at ``at``; ``None`` if there is none, or a torn one.

    ``ValueError`` if it is whole and damaged. After a crash of the machine a file may end in zeros: that is torn, too.
    """
    head = data[at : at + VARINT_BYTES_MAX]
    if len(head) < VARINT_BYTES_MAX and all(byte >= 0x80 for byte in head):
        return None
    number, start = number_at(data, at)
    end = start + (number >> 2) + _CRC_BYTES
    if end > len(data):
        return None
    body = data[start : end - _CRC_BYTES]
    crc = zlib.crc32(body, zlib.crc32(data[at:start], crc))
    if data[end - _CRC_BYTES : end] == crc.to_bytes(_CRC_BYTES, "little"):
        return FrameKind(number & 3), body, end, crc
    if any(data[end:]):
        raise ValueError(f"it is damaged at byte {at}")
    return None


def _segment(body: bytes) -> Segment:
    epoch, at = number_at(body, 0)
    start, at = number_at(body, at)
    if at == len(body):
        return Segment(epoch, start, None, Digest.of(b""), [])
    count, at = number_at(body, at)
    if count >= SAMPLES_MAX:
        raise ValueError(f"a segment has a mask of {count} samples, more than a dataset has")
    packed = _inflated(body[at:], -(-count // 8))
    if len(packed) != -(-count // 8):
        raise ValueError(f"a segment has a mask of {len(packed)} bytes for {count} samples")
    done = np.unpackbits(np.frombuffer(packed, np.uint8), count=count).astype(bool)
    return Segment(epoch, start, done, Digest.of(done.tobytes()), [])


def _batches_in(kind: FrameKind, body: bytes) -> list[bytes]:
    if kind is FrameKind.BATCH:
        return [body]
    data = _inflated(body, 2 * CHUNK_BYTES)  # the lengths are at most as many bytes as the batches
    batches, at = [], 0
    while at < len(data):
        size, at = number_at(data, at)
        if size > len(data) - at:
            raise ValueError("a frame ends within a batch")
        batches.append(data[at : at + size])
        at += size
    return batches


def _inflated(data: bytes, size_max: int) -> bytes:
    """Return what ``data`` inflates to. ``ValueError`` if that is malformed, or more than ``size_max`` bytes."""
    inflater = zlib.decompressobj()
    try:
        out = inflater.decompress(data, size_max + 1)
    except zlib.error as error:
        raise ValueError(f"a frame cannot be inflated: {error}") from error
    if len(out) > size_max or not inflater.eof or inflater.unused_data:
        raise ValueError("a frame that inflates to too little or too much")
    return out


prepare(Run)
