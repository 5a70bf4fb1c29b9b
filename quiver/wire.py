"""The wire: what clients and daemons say to one another, and the limits on it (docs/protocol.md).

The batched read is binary, since it is made of arrays on both sides and asked once per peer and batch; everything else
is JSON. All integers are little-endian.

    request   "QRD1", shards u32, ranges u32, wait_ms u32, flags u32, manifest digest (32 bytes, zeros: none),
              shard digests (32 bytes each), ranges (shard u32, unused u32, offset u64, length u64)
    answer    a status byte per range, then the bytes of those that are present, back to back in the order asked
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from quiver.digest import DIGEST_BYTES, Bytes, Digest
from quiver.errors import BadRequest
from quiver.ring import MEMBERS_MAX, REPLICAS_MAX, Member, Ring, check_member, usable_socket

PORT: Final = 7717
READ_TYPE: Final = "application/vnd.quiver.read"
SHARD_TYPE: Final = "application/octet-stream"
OK: Final = "ok"  # of a daemon's disk and origins
UNCHECKED: Final = "unchecked"
MAGIC: Final = b"QRD1"
RANGE: Final = np.dtype([("shard", "<u4"), ("unused", "<u4"), ("offset", "<u8"), ("length", "<u8")])
RANGES_MAX: Final = 1 << 16
READ_BYTES_MAX: Final = 4 << 30  # of one answer; it is streamed, so this bounds a request's time and not memory
WAIT_MS_MAX: Final = 30_000
MESSAGE_CHARS_MAX: Final = 4096
JSON_BYTES_MAX: Final = 4 << 20
RECHECK: Final = 1  # flag: the reader found wrong bytes; verify these shards on disk before answering
FORGO: Final = 2  # flag: the reader was chosen to put these shards there and cannot
_HEAD: Final = struct.Struct("<4sIIII32s")
READ_REQUEST_BYTES_MAX: Final = _HEAD.size + RANGES_MAX * (DIGEST_BYTES + RANGE.itemsize)


class RangeStatus(enum.IntEnum):
    """Why a range is or is not in the answer."""

    PRESENT = 0
    FILLING = 1  # being brought in: ask again
    NO_ROOM = 2  # the daemon has no room for the shard now: read the origin
    UPLOAD = 3  # the daemon may not read this origin: you were chosen to read the shard and put it here
    NO_MANIFEST = 4  # put the manifest, then ask again
    FAILED = 5  # the origin failed the daemon: read it yourself
    BAD_RANGE = 6  # past the end of the shard


@dataclass(frozen=True, slots=True, eq=False)
class ReadRequest:
    """Ranges of shards wanted by one reader: ``ranges`` has dtype ``RANGE``, its ``shard`` counts in ``shards``."""

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
        """Return how many shards a request names, by its head: before it is parsed, and whether or not it can be."""
        return min(int.from_bytes(body[4:8], "little"), len(body) // DIGEST_BYTES)

    @classmethod
    def decode(cls, body: Bytes) -> ReadRequest:
        """Parse a request. Raises ``BadRequest`` for one that breaks a limit or does not add up."""
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


class _Told(msgspec.Struct, frozen=True):
    """A ``Member`` as somebody tells of it: a socket that is no path must not cost the member."""

    id: str
    url: str
    weight: float = 1.0
    state: Literal["up", "draining"] = "up"
    socket: Any = ""

    def member(self) -> Member:
        return check_member(Member(self.id, self.url, self.weight, self.state, usable_socket(self.socket)))


class RingView(msgspec.Struct, frozen=True):
    """``GET /v1/ring``. Ring content is never trusted, so each member is parsed on its own: junk costs itself alone."""

    rack: str
    replicas: int
    members: list[msgspec.Raw]

    @classmethod
    def of(cls, ring: Ring) -> RingView:
        return cls(ring.rack, ring.replicas, [msgspec.Raw(msgspec.json.encode(member)) for member in ring.members])

    def ring(self) -> tuple[Ring, int]:
        """Return the ring and how many members were left out as impossible, or as more than there can be.

        Replicas that there cannot be are cut down to what there can: they cost every reader memory for every shard.
        """
        good: dict[str, Member] = {}
        for raw in self.members:
            try:
                member = msgspec.json.decode(raw, type=_Told).member()
            except (BadRequest, msgspec.DecodeError, RecursionError):
                continue
            if len(good) < MEMBERS_MAX:
                good.setdefault(member.id, member)
        replicas = min(max(self.replicas, 1), max(len(good), 1), REPLICAS_MAX)
        return Ring.of(self.rack, good.values(), replicas), len(self.members) - len(good)


class NodeStatus(msgspec.Struct, frozen=True):
    """``GET /v1/status``: one daemon, of itself."""

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
        """What keeps the daemon from caching, a line each, for people."""
        disk = [f"disk: {self.disk}"] if self.disk != OK else []
        bad = [f"origin {prefix}: {why}" for prefix, why in self.origins.items() if why not in (OK, UNCHECKED)]
        return disk + bad


class ErrorBody(msgspec.Struct, frozen=True):
    """Every answer that is an error."""

    error: str
    message: str


def message_of(error: Exception) -> str:
    """Return what an answer says of an error: some of what its text repeats may be whatever somebody sent."""
    text = str(error)
    return text if len(text) <= MESSAGE_CHARS_MAX else text[:MESSAGE_CHARS_MAX] + "…"


def decode_json(body: Bytes, kind: type[Any], what: str) -> Any:
    """Parse JSON into a typed value. Raises ``BadRequest`` naming ``what`` for anything else."""
    if len(body) > JSON_BYTES_MAX:
        raise BadRequest(f"{what}: {len(body)} bytes are more than {JSON_BYTES_MAX}")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise BadRequest(f"{what}: {error}") from error
