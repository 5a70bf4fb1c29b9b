"""The messages of a drain: what daemons say to one another about shards that are handed over, and to an operator.

A daemon that drains (the *giver*) names shards to the daemons that own them next (*receivers*), most needed first. A
receiver fetches what it takes from the giver, by the same requests and with the same verification as any fill. So
these messages hold no data, and a wrong one costs room or a read at most (ADR 0041).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from quiver.digest import Bytes, Digest
from quiver.errors import BadRequest
from quiver.prepared import prepare
from quiver.ring import NODE_ID
from quiver.wire import WAIT_MS_MAX, decode_msgpack

T = TypeVar("T")

OFFERED_MAX: Final = 256  # files that one request may ask a receiver to take
ASKED_MAX: Final = 4096  # files that one request may ask about
HOLDERS_MAX: Final = 64  # accounts that one request may name
HOLDER_BYTES_MAX: Final = 512
SHARED: Final = 0  # in ``holder_of``: no single account
HANDOVER_BYTES_MAX: Final = ASKED_MAX * 48 + HOLDERS_MAX * HOLDER_BYTES_MAX + 1024
DEADLINE_SECONDS_MAX: Final = 24 * 3600.0


class Taken(enum.IntEnum):
    """What a receiver says about a shard or manifest that it was asked about, or offered."""

    HELD = 0  # it held it before it was asked
    TAKEN = 1  # it fetched it from the giver
    PENDING = 2  # it is fetching it: ask again
    ABSENT = 3  # it does not hold it, and was not asked to take it
    NO_ROOM = 4  # there is no room that less needed shards would leave
    FAILED = 5  # the giver did not deliver it now, or what it delivered was wrong
    GONE = 6  # the giver does not hold it any more


class _Handover(msgspec.Struct, frozen=True, omit_defaults=True):
    giver: str
    shards: bytes = b""
    sizes: list[Annotated[int, msgspec.Meta(ge=1, lt=2**48)]] = []
    manifests: bytes = b""
    take: bool = False
    wait_ms: Annotated[int, msgspec.Meta(ge=0)] = 0
    holders: list[str] = []
    holder_of: list[Annotated[int, msgspec.Meta(ge=0, le=HOLDERS_MAX)]] = []


@dataclass(frozen=True, slots=True)
class HandoverRequest:
    """``POST /v1/handover``: what a receiver holds of these, and with ``take``: fetch the others from the giver.

    ``giver``: its node id in the ring. ``sizes`` in bytes, by shard, if they are to be taken. ``holders``: the accounts
    for which shards are kept, and ``holder_of`` by shard 0 (several) or 1 + the position of one of them.
    """

    giver: str
    shards: tuple[Digest, ...] = ()
    sizes: tuple[int, ...] = ()
    manifests: tuple[Digest, ...] = ()
    take: bool = False
    wait_ms: int = 0
    holders: tuple[str, ...] = ()
    holder_of: tuple[int, ...] = ()

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(
            _Handover(
                self.giver,
                b"".join(self.shards),
                list(self.sizes),
                b"".join(self.manifests),
                self.take,
                self.wait_ms,
                list(self.holders),
                list(self.holder_of),
            )
        )

    @classmethod
    def decode(cls, body: Bytes) -> HandoverRequest:
        """Parse a body. Raises ``BadRequest`` if it breaks a limit or is inconsistent."""
        told = _decoded(body, _Handover, "a handover")
        if not NODE_ID.fullmatch(told.giver):
            raise BadRequest(f"a handover names its giver by a node id, not {told.giver[:80]!r}")
        shards, manifests = Digest.many(told.shards), Digest.many(told.manifests)
        count = len(shards) + len(manifests)
        if count > (OFFERED_MAX if told.take else ASKED_MAX):
            raise BadRequest(f"a handover names at most {OFFERED_MAX} files to take, or asks about {ASKED_MAX}")
        if len(set(shards)) != len(shards) or len(set(manifests)) != len(manifests):
            raise BadRequest("a handover names each file once")
        if told.take and len(told.sizes) != len(shards):
            raise BadRequest(f"a handover of {len(shards)} shards names {len(told.sizes)} sizes")
        if told.holder_of and len(told.holder_of) != len(shards):
            raise BadRequest(f"a handover of {len(shards)} shards names {len(told.holder_of)} holders")
        if len(told.holders) > HOLDERS_MAX or max(told.holder_of, default=0) > len(told.holders):
            raise BadRequest(f"a handover names at most {HOLDERS_MAX} accounts, and every shard's among them")
        for name in told.holders:
            if not name.isprintable() or not 0 < len(name.encode()) <= HOLDER_BYTES_MAX:
                raise BadRequest("a handover names an account by a printable text")
        wait_ms = min(told.wait_ms, WAIT_MS_MAX)
        return cls(
            *(told.giver, shards, tuple(told.sizes), manifests, told.take, wait_ms),
            *(tuple(told.holders), tuple(told.holder_of)),
        )

    def holder(self, at: int) -> str:
        """Return the account for which a shard is kept; ``""`` for several."""
        number = self.holder_of[at] if self.holder_of else SHARED
        return self.holders[number - 1] if number else ""


class HandoverAnswer(msgspec.Struct, frozen=True):
    """The answer to a ``HandoverRequest``: a ``Taken`` per shard and per manifest, a byte each.

    ``state``: of the receiver. What one that drains holds will be gone soon, and it takes nothing.
    """

    shards: bytes = b""
    manifests: bytes = b""
    state: Literal["up", "draining"] = "up"

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, body: Bytes, request: HandoverRequest) -> HandoverAnswer:
        """Parse the answer to a request. Raises ``BadRequest``."""
        told = _decoded(body, cls, "an answer to a handover")
        for what, asked in ((told.shards, request.shards), (told.manifests, request.manifests)):
            if len(what) != len(asked) or max(what, default=0) > max(Taken):
                raise BadRequest(f"malformed answer: {len(what)} statuses for {len(asked)} files, or an unknown one")
        return told


# -- what an operator asks ---------------------------------------------------------------------------------------------


class DrainRequest(msgspec.Struct, frozen=True):
    """``POST /v1/drain``: leave placement, and hand over within ``deadline_seconds``."""

    deadline_seconds: Annotated[float, msgspec.Meta(ge=0, le=DEADLINE_SECONDS_MAX)] = 30.0

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


class DrainStatus(msgspec.Struct, frozen=True):
    """``GET /v1/drain``: how far a daemon's drain is. Bytes and counts are of shards, since the drain began.

    ``state``: ``up``; ``draining`` while it hands over; ``drained`` afterwards, while it still serves what it holds.
    ``held_bytes``: what it held. It falls into ``elsewhere_bytes``, which other members held already;
    ``handed_over_bytes``; ``refused_bytes``, for which no next owner had room; and ``left_bytes``, the rest: still to
    be handed over, or, once drained, not handed over within the deadline. ``why``: why nothing can be handed over.
    """

    id: str
    state: Literal["up", "draining", "drained"]
    deadline_seconds: float = 0.0  # until the deadline, 0 once it has passed
    elapsed_seconds: float = 0.0
    held_bytes: int = 0
    elsewhere_bytes: int = 0
    handed_over_bytes: int = 0
    refused_bytes: int = 0
    left_bytes: int = 0
    handed_over_shards: int = 0
    left_shards: int = 0
    manifests: int = 0  # handed over
    receivers: dict[str, int] = {}  # bytes by node id
    why: str = ""


def _decoded(body: Bytes, kind: type[T], what: str) -> T:
    if len(body) > HANDOVER_BYTES_MAX:
        raise BadRequest(f"{what} has at most {HANDOVER_BYTES_MAX} bytes, not {len(body)}")
    return decode_msgpack(body, kind, what)


prepare(_Handover, HandoverAnswer, DrainRequest, DrainStatus)
