"""The encoding of a consumer's needs (docs/protocol.md): ``POST /v1/needs`` in a rack, a lease file in an embedded
cache.

MessagePack, by ``msgspec``. The arrays, a byte per shard, are compressed by zlib. A message may come from any client of
the daemon: its announced sizes are checked first, and no more is decompressed than it announces.
"""

from __future__ import annotations

import enum
import zlib
from dataclasses import dataclass, replace
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from quiver.digest import DIGEST_BYTES, Bytes, Digest
from quiver.errors import BadRequest
from quiver.identity import NAME_BYTES_MAX, Identity, check_name
from quiver.introduction import READER_BYTES
from quiver.malformed import MALFORMED
from quiver.residency.orders import ORDER_ENTRIES_MAX, ORDER_ID_BYTES
from quiver.residency.report import CONSUMER_BYTES, ConsumerReport, Measured

NEEDS_TYPE: Final = "application/vnd.quiver.needs"
SHARDS_MAX: Final = 1 << 24
SOON_MAX: Final = 4096
UPLOADS_MAX: Final = 64
LEASE_SECONDS_MAX: Final = 60.0
HOLD_SECONDS_MAX: Final = 3600.0  # of a hold: a job that moves to another rack is queued, and started, meanwhile
PACKED_BYTES_MAX: Final = SHARDS_MAX + (SHARDS_MAX >> 8) + 64  # incompressible data becomes a little longer
_FIELDS_BYTES_MAX: Final = 512 + 4 * NAME_BYTES_MAX  # a message without its lists and its array
_NUMBER_BYTES_MAX: Final = 5
PACKED_USES_BYTES_MAX: Final = 4 * ORDER_ENTRIES_MAX + (ORDER_ENTRIES_MAX >> 6) + 64
REPORT_BYTES_MAX: Final = _FIELDS_BYTES_MAX + _NUMBER_BYTES_MAX * SOON_MAX + PACKED_BYTES_MAX + PACKED_USES_BYTES_MAX
ANSWER_BYTES_MAX: Final = _FIELDS_BYTES_MAX + _NUMBER_BYTES_MAX * UPLOADS_MAX + PACKED_BYTES_MAX

_Number = Annotated[int, Meta(ge=0, lt=SHARDS_MAX)]
_Count = Annotated[int, Meta(ge=0, le=SHARDS_MAX)]
_Name = Annotated[str, Meta(max_length=NAME_BYTES_MAX)]
_Packed = Annotated[bytes, Meta(max_length=PACKED_BYTES_MAX)]


class NeedsStatus(enum.IntEnum):
    """The outcome of a report."""

    TAKEN = 0
    NO_MANIFEST = 1  # put the manifest, then report again
    FULL = 2  # the daemon has too many consumers: read without its help


class _ReportMessage(msgspec.Struct, tag_field="type", tag="needs", kw_only=True):
    manifest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    consumer: Annotated[bytes, Meta(min_length=CONSUMER_BYTES, max_length=CONSUMER_BYTES)]
    shards: _Count
    left: _Packed
    rate: float
    ahead_bytes: float
    lease_seconds: float
    soon: Annotated[list[_Number], Meta(max_length=SOON_MAX)] = []
    ordered: bool = False
    leaving: bool = False
    order: Annotated[bytes, Meta(max_length=ORDER_ID_BYTES)] = b""
    order_at: Annotated[int, Meta(ge=0, le=ORDER_ENTRIES_MAX)] = 0
    uses_count: Annotated[int, Meta(ge=0, le=ORDER_ENTRIES_MAX)] = 0
    uses: Annotated[bytes, Meta(max_length=PACKED_USES_BYTES_MAX)] = b""
    job: _Name = ""
    group: _Name = ""
    tenant: _Name = ""
    dataset_name: _Name = ""
    throughput: float = 0.0
    waited: float = 0.0
    attained_bytes: float = 0.0
    probe_series: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    probed_hits: float = 0.0
    probed_misses: float = 0.0
    reader: Annotated[bytes, Meta(max_length=READER_BYTES)] = b""
    hold: bool = False


class _AnswerMessage(msgspec.Struct, tag_field="type", tag="residency", kw_only=True):
    status: NeedsStatus
    shards: _Count
    seen: _Packed
    uploads: Annotated[list[_Number], Meta(max_length=UPLOADS_MAX)] = []
    order_wanted: bool = False
    probe_wanted: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode_report: Final = msgspec.msgpack.Decoder(_ReportMessage).decode
_decode_answer: Final = msgspec.msgpack.Decoder(_AnswerMessage).decode


class ReportHead(NamedTuple):
    """A report without its array, to decide whether to decompress that."""

    manifest: Digest
    consumer: bytes
    shards: int
    leaving: bool
    uses: int = 0  # entries of the list of uses that comes with it


@dataclass(frozen=True, slots=True, eq=False)
class NeedsReport:
    """A report and the dataset that it is about. ``leaving``: the consumer has finished; forget it."""

    manifest: Digest
    report: ConsumerReport
    leaving: bool = False

    def encode(self) -> bytes:
        report = self.report
        return _encode(
            _ReportMessage(
                manifest=bytes(self.manifest),
                consumer=report.consumer,
                shards=len(report.left),
                left=zlib.compress(report.left.tobytes(), 1),
                rate=report.rate,
                ahead_bytes=report.ahead_bytes,
                lease_seconds=report.lease_seconds,
                soon=list(report.soon[:SOON_MAX]),
                ordered=report.ordered,
                leaving=self.leaving,
                order=report.order,
                order_at=report.order_at,
                uses_count=len(report.uses) if report.uses is not None else 0,
                uses=zlib.compress(report.uses.astype("<u4").tobytes(), 1) if report.uses is not None else b"",
                job=report.identity.job,
                group=report.identity.group,
                tenant=report.identity.tenant,
                dataset_name=report.dataset_name,
                throughput=report.measured.throughput,
                waited=report.measured.waited,
                attained_bytes=report.measured.attained_bytes,
                probe_series=report.measured.probe_series,
                probed_hits=report.measured.probed_hits,
                probed_misses=report.measured.probed_misses,
                reader=report.reader,
                hold=report.hold,
            )
        )

    def without_uses(self) -> NeedsReport:
        """Return the report without its list of uses: the receiver knows it, or has not asked for it."""
        return NeedsReport(self.manifest, replace(self.report, uses=None), self.leaving)

    @staticmethod
    def head(body: Bytes) -> ReportHead:
        """Parse all but the array, which is cheap. Raises ``BadRequest`` as ``decode`` does."""
        message = _report_message(body)
        return ReportHead(
            Digest(message.manifest), message.consumer, message.shards, message.leaving, message.uses_count
        )

    @classmethod
    def decode(cls, body: Bytes) -> NeedsReport:
        """Parse a report. Raises ``BadRequest`` for one that breaks a limit or is malformed."""
        message = _report_message(body)
        report = ConsumerReport(
            consumer=message.consumer,
            left=_unpacked(message.left, message.shards),
            rate=message.rate if message.rate >= 1 else 0.0,  # less than a byte per second counts as unknown
            ahead_bytes=message.ahead_bytes,
            lease_seconds=min(message.lease_seconds, HOLD_SECONDS_MAX if message.hold else LEASE_SECONDS_MAX),
            soon=tuple(message.soon),
            ordered=message.ordered,
            order=message.order,
            order_at=message.order_at,
            uses=_uses(message),
            identity=Identity(message.job, message.group, message.tenant),
            dataset_name=message.dataset_name,
            measured=Measured(
                message.throughput,
                message.waited,
                message.attained_bytes,
                message.probe_series,
                message.probed_hits,
                message.probed_misses,
            ),
            reader=message.reader,
            hold=message.hold,
        )
        return cls(Digest(message.manifest), report, message.leaving)


@dataclass(frozen=True, slots=True, eq=False)
class NeedsAnswer:
    """Which shards of the dataset a daemon holds, and which ones this consumer is chosen to upload to it."""

    status: NeedsStatus
    seen: npt.NDArray[np.uint8]
    uploads: tuple[int, ...] = ()
    order_wanted: bool = False  # the consumer should send the list of uses that its report named
    probe_wanted: bool = False  # an operator asks the consumer's job for a series of probes

    def encode(self) -> bytes:
        seen = zlib.compress(self.seen.tobytes(), 1)
        uploads = list(self.uploads[:UPLOADS_MAX])
        return _encode(
            _AnswerMessage(
                status=self.status,
                shards=len(self.seen),
                seen=seen,
                uploads=uploads,
                order_wanted=self.order_wanted,
                probe_wanted=self.probe_wanted,
            )
        )

    @classmethod
    def decode(cls, body: Bytes) -> NeedsAnswer:
        """Parse an answer. Raises ``BadRequest`` for one that breaks a limit or is malformed."""
        if len(body) > ANSWER_BYTES_MAX:
            raise BadRequest(f"an answer to a report of needs has at most {ANSWER_BYTES_MAX} bytes, not {len(body)}")
        try:
            message = _decode_answer(body)
        except MALFORMED as error:
            raise BadRequest(f"malformed answer to a report of needs: {error}") from error
        _check_numbers(message.uploads, message.shards)
        seen = _unpacked(message.seen, message.shards)
        uploads = tuple(message.uploads)
        return cls(message.status, seen, uploads, message.order_wanted, message.probe_wanted)


def _report_message(body: Bytes) -> _ReportMessage:
    if len(body) > REPORT_BYTES_MAX:
        raise BadRequest(f"a report of needs has at most {REPORT_BYTES_MAX} bytes, not {len(body)}")
    try:
        message = _decode_report(body)
    except MALFORMED as error:
        raise BadRequest(f"malformed report of needs: {error}") from error
    if not (0 <= message.rate < 1e15 and abs(message.ahead_bytes) < 1e18):  # NaN is neither
        raise BadRequest("malformed report of needs: its rate or its runway is not a number of bytes")
    if not (0 <= message.throughput < 1e15 and 0 <= message.waited <= 1 and 0 <= message.attained_bytes < 1e21):
        raise BadRequest("malformed report of needs: what the consumer measured of itself is not possible")
    if not (0 <= message.probed_hits < 1e15 and 0 <= message.probed_misses < 1e15):
        raise BadRequest("malformed report of needs: what its probes measured is not possible")
    try:
        for what in ("job", "group", "tenant", "dataset_name"):
            check_name(what, getattr(message, what))
    except ValueError as error:
        raise BadRequest(f"malformed report of needs: {error}") from error
    if not 0 <= message.lease_seconds < 1e9:
        raise BadRequest("malformed report of needs: its lease is not a number of seconds")
    _check_numbers(message.soon, message.shards)
    if len(message.order) not in (0, ORDER_ID_BYTES) or (message.uses_count and not message.order):
        raise BadRequest(f"malformed report of needs: an order is named by {ORDER_ID_BYTES} bytes")
    return message


def _uses(message: _ReportMessage) -> npt.NDArray[np.int32] | None:
    """Return the list of uses that comes with a report, if one does."""
    if not message.uses_count:
        return None
    uses = _unpacked(message.uses, 4 * message.uses_count, "bytes").view("<u4")
    if int(uses.max()) >= message.shards:
        raise BadRequest(f"malformed needs: a use of shard {int(uses.max())} of a dataset of {message.shards}")
    return uses.astype(np.int32)


def _check_numbers(numbers: list[int], shards: int) -> None:
    if numbers and max(numbers) >= shards:
        raise BadRequest(f"malformed needs: shard {max(numbers)} of a dataset of {shards}")


def _unpacked(packed: bytes, count: int, what: str = "shards") -> npt.NDArray[np.uint8]:
    """Decompress ``count`` bytes, and never more."""
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(packed, max(count, 1))
        surplus = unpacking.decompress(unpacking.unconsumed_tail, 1) if unpacking.unconsumed_tail else b""
    except zlib.error as error:
        raise BadRequest(f"malformed needs: the array cannot be decompressed: {error}") from error
    if len(data) < count:
        raise BadRequest(f"malformed needs: the array has {len(data)} bytes where {count} {what} were announced")
    if len(data) > count or surplus:
        raise BadRequest(f"malformed needs: the array has more bytes than the {count} {what} that were announced")
    if not unpacking.eof or unpacking.unused_data:
        raise BadRequest("malformed needs: the packed array is cut short, or other bytes follow it")
    return np.frombuffer(data, np.uint8)
