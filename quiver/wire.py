"""The wire: the messages between clients and daemons, and their limits (docs/protocol.md).

A batched read consists of arrays on both sides and is sent once per peer and batch, so it is binary. The verbs about
whole shards (fill, forgo, recheck) are MessagePack, everything else is JSON. All integers of a read are little-endian.

    request   "QRD1", shards u32, ranges u32, wait_ms u32, flags u32, manifest digest (32 bytes, zeros: none),
              shard digests (32 bytes each), ranges (shard u32, unused u32, offset u64, length u64)
    answer    a status byte per range, then the bytes of those that are present, back to back in the request's order
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from quiver.digest import DIGEST_BYTES, Bytes, Digest
from quiver.errors import BadRequest
from quiver.malformed import MALFORMED
from quiver.prepared import prepare
from quiver.ring import MEMBERS_MAX, REPLICAS_MAX, Member, Ring, check_member, usable_socket

T = TypeVar("T")

PORT: Final = 7717
READ_TYPE: Final = "application/vnd.quiver.read"
SHARD_TYPE: Final = "application/octet-stream"
MSGPACK_TYPE: Final = "application/msgpack"
OK: Final = "ok"  # the state of a working disk or origin
UNCHECKED: Final = "unchecked"
MAGIC: Final = b"QRD1"
RANGE: Final = np.dtype([("shard", "<u4"), ("unused", "<u4"), ("offset", "<u8"), ("length", "<u8")])
RANGES_MAX: Final = 1 << 16
READ_BYTES_MAX: Final = 4 << 30  # of one answer; it is streamed, so this limits a request's time, not memory
WAIT_MS_MAX: Final = 30_000
JSON_BYTES_MAX: Final = 4 << 20
# Flags of a read, for clients without the verbs of their own. They mean ``RecheckRequest`` and ``ForgoRequest``.
RECHECK: Final = 1
FORGO: Final = 2
_HEAD: Final = struct.Struct("<4sIIII32s")
READ_REQUEST_BYTES_MAX: Final = _HEAD.size + RANGES_MAX * (DIGEST_BYTES + RANGE.itemsize)
SHARDS_REQUEST_BYTES_MAX: Final = RANGES_MAX * DIGEST_BYTES + 1024  # of a fill, forgo or recheck


class RangeStatus(enum.IntEnum):
    """Why a range is or is not in the answer."""

    PRESENT = 0
    FILLING = 1  # being filled: retry
    NO_ROOM = 2  # the daemon has no room for the shard now: read it from the origin
    UPLOAD = 3  # the daemon may not read this origin: you were chosen to read the shard and upload it
    NO_MANIFEST = 4  # put the manifest, then retry
    FAILED = 5  # the origin failed the daemon: read it yourself
    BAD_RANGE = 6  # past the end of the shard


@dataclass(frozen=True, slots=True, eq=False)
class ReadRequest:
    """Ranges of shards to read: ``ranges`` has dtype ``RANGE``; its ``shard`` is an index into ``shards``."""

    manifest: Digest | None
    shards: tuple[Digest, ...]
    ranges: npt.NDArray[np.void]
    wait_ms: int = 0
    flags: int = 0

    def encode(self) -> bytes:
        head = _HEAD.pack(
            MAGIC, len(self.shards), len(self.ranges), self.wait_ms, self.flags, self.manifest or bytes(DIGEST_BYTES)
        )
        return b"".join([head, *self.shards, self.ranges.tobytes()])

    @staticmethod
    def shards_named(body: Bytes) -> int:
        """Return how many shards a request names, by its head. The rest need not be well-formed."""
        return min(int.from_bytes(body[4:8], "little"), len(body) // DIGEST_BYTES)

    @classmethod
    def decode(cls, body: Bytes) -> ReadRequest:
        """Parse a request. Raises ``BadRequest`` for one that breaks a limit or is inconsistent."""
        if len(body) < _HEAD.size or len(body) > READ_REQUEST_BYTES_MAX:
            raise BadRequest(f"a read request has {_HEAD.size} to {READ_REQUEST_BYTES_MAX} bytes, not {len(body)}")
        magic, shard_count, range_count, wait_ms, flags, manifest = _HEAD.unpack_from(body)
        if magic != MAGIC:
            raise BadRequest("a read request begins with QRD1")
        if shard_count > RANGES_MAX or range_count > RANGES_MAX:
            raise BadRequest(f"a read request names at most {RANGES_MAX} shards and {RANGES_MAX} ranges")
        ranges_at = _HEAD.size + shard_count * DIGEST_BYTES
        if len(body) != ranges_at + range_count * RANGE.itemsize:
            raise BadRequest("a read request's size does not agree with its counts")
        shards = Digest.many(bytes(body[_HEAD.size : ranges_at]))
        if len(set(shards)) != shard_count:
            raise BadRequest("a read request names each shard once")
        ranges: npt.NDArray[np.void] = np.frombuffer(body, RANGE, range_count, ranges_at)
        if range_count:
            if int(ranges["shard"].max()) >= shard_count:
                raise BadRequest("a range names a shard that the request does not list")
            if ranges["length"].max() > READ_BYTES_MAX or int(ranges["length"].sum()) > READ_BYTES_MAX:
                raise BadRequest(f"a read request asks for at most {READ_BYTES_MAX} bytes")
        known = None if manifest == bytes(DIGEST_BYTES) else Digest(manifest)
        return cls(known, shards, ranges, min(wait_ms, WAIT_MS_MAX), flags)


class _Shards(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of a request about whole shards: their digests back to back."""

    shards: bytes
    manifest: bytes = b""
    wait_ms: Annotated[int, msgspec.Meta(ge=0)] = 0

    @classmethod
    def decode(cls, body: Bytes) -> tuple[_Shards, tuple[Digest, ...]]:
        """Parse a body; return it and the shards. Raises ``BadRequest`` if it breaks a limit or is inconsistent."""
        if len(body) > SHARDS_REQUEST_BYTES_MAX:
            raise BadRequest(f"a request about shards has at most {SHARDS_REQUEST_BYTES_MAX} bytes, not {len(body)}")
        told = decode_msgpack(body, cls, "a request about shards")
        shards = Digest.many(told.shards)
        if len(shards) > RANGES_MAX or len(set(shards)) != len(shards):
            raise BadRequest(f"a request names at most {RANGES_MAX} shards, each once")
        return told, shards

    def manifest_digest(self) -> Digest:
        """Return the manifest that the request must name. Raises ``BadRequest`` if it does not."""
        if len(self.manifest) != DIGEST_BYTES:
            raise BadRequest(f"the request must name its manifest by {DIGEST_BYTES} bytes, not {len(self.manifest)}")
        return Digest(self.manifest)


def shards_in(body: Bytes) -> int:
    """Return how many shards the body of a fill, forgo or recheck names at most, without parsing it."""
    return len(body) // DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class FillRequest:
    """``POST /v1/fill``: fill shards of a manifest, and wait for them. Answered by ``ShardStatuses``."""

    manifest: Digest
    shards: tuple[Digest, ...]
    wait_ms: int = 0  # at most ``WAIT_MS_MAX``

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(_Shards(b"".join(self.shards), bytes(self.manifest), self.wait_ms))

    @classmethod
    def decode(cls, body: Bytes) -> FillRequest:
        """Parse a body. Raises ``BadRequest``."""
        told, shards = _Shards.decode(body)
        return cls(told.manifest_digest(), shards, min(told.wait_ms, WAIT_MS_MAX))


@dataclass(frozen=True, slots=True)
class ForgoRequest:
    """``POST /v1/forgo``: the reader was chosen to upload these shards and cannot. Answered 204."""

    manifest: Digest
    shards: tuple[Digest, ...]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(_Shards(b"".join(self.shards), bytes(self.manifest)))

    @classmethod
    def decode(cls, body: Bytes) -> ForgoRequest:
        """Parse a body. Raises ``BadRequest``."""
        told, shards = _Shards.decode(body)
        return cls(told.manifest_digest(), shards)


@dataclass(frozen=True, slots=True)
class RecheckRequest:
    """``POST /v1/recheck``: the reader got wrong bytes of these shards; verify them. Answered 204."""

    shards: tuple[Digest, ...]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(_Shards(b"".join(self.shards)))

    @classmethod
    def decode(cls, body: Bytes) -> RecheckRequest:
        """Parse a body. Raises ``BadRequest``."""
        return cls(_Shards.decode(body)[1])


class ShardStatuses(msgspec.Struct, frozen=True):
    """The answer to a ``FillRequest``: a ``RangeStatus`` per shard, a byte each, in the request's order.

    Never ``BAD_RANGE``. ``PRESENT``: resident and verified.
    """

    statuses: bytes

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, body: Bytes, count: int) -> ShardStatuses:
        """Parse an answer about ``count`` shards. Raises ``BadRequest``."""
        told = decode_msgpack(body, cls, "an answer about shards")
        if len(told.statuses) != count or max(told.statuses, default=0) >= RangeStatus.BAD_RANGE:
            raise BadRequest(f"malformed answer: {len(told.statuses)} statuses for {count} shards, or an unknown one")
        return told


class _Told(msgspec.Struct, frozen=True):
    """A ``Member`` as received: an invalid socket path must not invalidate the member."""

    id: str
    url: str
    weight: float = 1.0
    state: Literal["up", "draining"] = "up"
    socket: Any = ""

    def member(self) -> Member:
        return check_member(Member(self.id, self.url, self.weight, self.state, usable_socket(self.socket)))


class RingView(msgspec.Struct, frozen=True):
    """``GET /v1/ring``. It is not trusted: each member is parsed on its own, and an invalid one is left out alone."""

    rack: str
    replicas: int
    members: list[msgspec.Raw]

    @classmethod
    def of(cls, ring: Ring) -> RingView:
        return cls(ring.rack, ring.replicas, [msgspec.Raw(msgspec.json.encode(member)) for member in ring.members])

    def ring(self) -> tuple[Ring, int]:
        """Return the ring, and how many members were left out because they are invalid or exceed the limit.

        The number of replicas is cut to its limit: every replica costs every reader memory for every shard.
        """
        good: dict[str, Member] = {}
        for raw in self.members:
            try:
                member = msgspec.json.decode(raw, type=_Told).member()
            except (*MALFORMED, BadRequest):
                continue
            if len(good) < MEMBERS_MAX:
                good.setdefault(member.id, member)
        replicas = min(max(self.replicas, 1), max(len(good), 1), REPLICAS_MAX)
        return Ring.of(self.rack, good.values(), replicas), len(self.members) - len(good)


class NodeStatus(msgspec.Struct, frozen=True):
    """``GET /v1/status``: a daemon's own state."""

    id: str
    url: str
    rack: str
    version: str
    state: Literal["up", "draining"]
    resident_bytes: int
    capacity_bytes: int
    shards: int
    manifests: int
    origin_read_bytes: int
    served_bytes: int
    fills: int
    corruptions: int
    ring_members: int
    ring_age_seconds: float
    uptime_seconds: float
    disk: str  # "ok", or why nothing can be written
    ring_problem: str = ""  # what is wrong with its place in the ring, and what to do
    origins: dict[str, str] = {}  # by prefix: "ok", "unchecked", or why it cannot be read

    @property
    def faults(self) -> list[str]:
        """What keeps the daemon from caching: a line each, for operators."""
        disk = [f"disk: {self.disk}"] if self.disk != OK else []
        bad = [f"origin {prefix}: {why}" for prefix, why in self.origins.items() if why not in (OK, UNCHECKED)]
        return disk + bad


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every error answer. ``quiver.errors.answer_of`` gives its code and message."""

    error: str
    message: str


def decode_msgpack(body: Bytes, kind: type[T], what: str) -> T:
    """Parse MessagePack into a typed value. Raises ``BadRequest`` naming ``what`` for anything else."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except MALFORMED as error:
        raise BadRequest(f"{what}: {error}") from error


def decode_json(body: Bytes, kind: type[Any], what: str) -> Any:
    """Parse JSON into a typed value. Raises ``BadRequest`` naming ``what`` for anything else."""
    if len(body) > JSON_BYTES_MAX:
        raise BadRequest(f"{what}: {len(body)} bytes are more than {JSON_BYTES_MAX}")
    try:
        return msgspec.json.decode(body, type=kind)
    except MALFORMED as error:
        raise BadRequest(f"{what}: {error}") from error


prepare(_Shards, ShardStatuses, _Told, RingView, NodeStatus, ErrorBody)
