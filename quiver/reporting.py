"""How a consumer's needs travel (docs/protocol.md): ``POST /v1/needs`` in a rack, a lease file in an embedded cache.

Arrays on both sides, so binary like the batched read; all integers are little-endian.

    report   "QND1", flags u32, lease_ms u32, shards u32, soon u32, packed_bytes u32, rate f64, ahead_bytes f64,
             consumer (16 bytes), manifest digest (32 bytes), soon (u32 each), left (a byte a shard, zlib)
    answer   "QNA1", status u32, shards u32, uploads u32, packed_bytes u32, uploads (u32 each),
             seen (a byte a shard, zlib): 0 for what is not held here, else 1 + how many other consumers need it
"""

from __future__ import annotations

import enum
import struct
import zlib
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from quiver.digest import DIGEST_BYTES, Bytes, Digest
from quiver.errors import BadRequest
from quiver.need import CONSUMER_BYTES, Report

NEEDS_TYPE: Final = "application/vnd.quiver.needs"
SHARDS_MAX: Final = 1 << 24
SOON_MAX: Final = 4096
UPLOADS_MAX: Final = 64
LEASE_SECONDS_MAX: Final = 60.0
_REPORT: Final = struct.Struct(f"<4sIIIIIdd{CONSUMER_BYTES}s{DIGEST_BYTES}s")
_ANSWER: Final = struct.Struct("<4sIIII")
_LEAVE: Final = 1
_ORDERED: Final = 2
REPORT_BYTES_MAX: Final = _REPORT.size + 4 * SOON_MAX + SHARDS_MAX + (SHARDS_MAX >> 8) + 64
ANSWER_BYTES_MAX: Final = _ANSWER.size + 4 * UPLOADS_MAX + SHARDS_MAX + (SHARDS_MAX >> 8) + 64


class NeedsStatus(enum.IntEnum):
    """What became of a report."""

    TAKEN = 0
    NO_MANIFEST = 1  # put the manifest, then report again
    FULL = 2  # more consumers than the daemon keeps: read as if nobody listened


class ReportHead(NamedTuple):
    """What a report says before its array is unpacked: whether that is worth it."""

    manifest: Digest
    consumer: bytes
    shards: int
    leaving: bool


@dataclass(frozen=True, slots=True, eq=False)
class NeedsReport:
    """A report and the dataset that it is about. ``leaving``: the consumer is done, forget it."""

    manifest: Digest
    report: Report
    leaving: bool = False

    def encode(self) -> bytes:
        report = self.report
        packed = zlib.compress(report.left.tobytes(), 1)
        soon = np.asarray(report.soon[:SOON_MAX], "<u4").tobytes()
        flags = _LEAVE * self.leaving | _ORDERED * report.ordered
        head = _REPORT.pack(
            b"QND1",
            flags,
            round(report.lease_seconds * 1000),
            len(report.left),
            len(soon) // 4,
            len(packed),
            report.rate,
            report.ahead_bytes,
            report.consumer,
            self.manifest,
        )
        return b"".join([head, soon, packed])

    @staticmethod
    def head(body: Bytes) -> ReportHead:
        """Parse what comes first, which takes no time. Raises ``BadRequest`` as ``decode`` does."""
        if len(body) < _REPORT.size or len(body) > REPORT_BYTES_MAX:
            raise BadRequest(f"a report of needs has {_REPORT.size} to {REPORT_BYTES_MAX} bytes, not {len(body)}")
        magic, flags, _, shards, soon_count, size, rate, ahead, consumer, manifest = _REPORT.unpack_from(body)
        if magic != b"QND1":
            raise BadRequest("a report of needs begins with QND1")
        if shards > SHARDS_MAX or soon_count > SOON_MAX:
            raise BadRequest(f"a report of needs is about at most {SHARDS_MAX} shards, {SOON_MAX} of them soon")
        if len(body) != _REPORT.size + 4 * soon_count + size:
            raise BadRequest("the size of a report of needs does not agree with its counts")
        if not (0 <= rate < 1e15 and abs(ahead) < 1e18):  # NaN is neither
            raise BadRequest("a report of needs gives a rate and a runway in bytes")
        return ReportHead(Digest(manifest), consumer, shards, bool(flags & _LEAVE))

    @classmethod
    def decode(cls, body: Bytes) -> NeedsReport:
        """Parse a report. Raises ``BadRequest`` for one that breaks a limit or does not add up."""
        manifest, consumer, shards, leaving = cls.head(body)
        _, flags, lease_ms, _, soon_count, _, rate, ahead, _, _ = _REPORT.unpack_from(body)
        soon = np.frombuffer(body, "<u4", soon_count, _REPORT.size)
        if soon_count and int(soon.max()) >= shards:
            raise BadRequest("a report of needs names a shard that the dataset does not have")
        report = Report(
            consumer=consumer,
            left=_unpacked(memoryview(body)[_REPORT.size + 4 * soon_count :], shards),
            rate=rate if rate >= 1 else 0.0,  # less than a byte a second: as good as not known
            ahead_bytes=ahead,
            lease_seconds=min(lease_ms / 1000, LEASE_SECONDS_MAX),
            soon=tuple(soon.tolist()),
            ordered=bool(flags & _ORDERED),
        )
        return cls(manifest, report, leaving)


@dataclass(frozen=True, slots=True, eq=False)
class NeedsAnswer:
    """What a daemon holds of the dataset, and which shards this consumer is chosen to read and put there."""

    status: NeedsStatus
    seen: npt.NDArray[np.uint8]
    uploads: tuple[int, ...] = ()

    def encode(self) -> bytes:
        packed = zlib.compress(self.seen.tobytes(), 1)
        uploads = np.asarray(self.uploads[:UPLOADS_MAX], "<u4").tobytes()
        head = _ANSWER.pack(b"QNA1", self.status, len(self.seen), len(uploads) // 4, len(packed))
        return b"".join([head, uploads, packed])

    @classmethod
    def decode(cls, body: Bytes) -> NeedsAnswer:
        """Parse an answer. Raises ``BadRequest`` for nonsense."""
        if len(body) < _ANSWER.size:
            raise BadRequest(f"an answer to a report of needs has at least {_ANSWER.size} bytes, not {len(body)}")
        magic, status, shards, upload_count, size = _ANSWER.unpack_from(body)
        uploads_at = _ANSWER.size + 4 * upload_count
        if (
            magic != b"QNA1"
            or status not in list(NeedsStatus)
            or shards > SHARDS_MAX
            or upload_count > UPLOADS_MAX
            or len(body) != uploads_at + size
        ):
            raise BadRequest("an answer to a report of needs that does not add up")
        uploads = tuple(np.frombuffer(body, "<u4", upload_count, _ANSWER.size).tolist())
        if any(shard >= shards for shard in uploads):
            raise BadRequest("an answer to a report of needs names a shard that the dataset does not have")
        return cls(NeedsStatus(status), _unpacked(memoryview(body)[uploads_at:], shards), uploads)


def _unpacked(packed: memoryview, count: int) -> npt.NDArray[np.uint8]:
    """Return ``count`` bytes out of what was packed, and never unpack more than that."""
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(packed, max(count, 1))
        surplus = unpacking.decompress(unpacking.unconsumed_tail, 1) if unpacking.unconsumed_tail else b""
    except zlib.error as error:
        raise BadRequest(f"a report of needs that cannot be unpacked: {error}") from error
    if len(data) != count or surplus or not unpacking.eof or unpacking.unused_data:
        raise BadRequest(f"{len(data)} shards where {count} were announced")
    return np.frombuffer(data, np.uint8)
