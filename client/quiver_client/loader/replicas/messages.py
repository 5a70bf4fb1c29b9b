"""What leader and follower tell each other, as frames on a connection: a length (4 bytes, big-endian), then msgpack.

Whatever arrives is untrusted: a frame has a limit, which is small until the other side has shown the secret, and a
frame that does not decode ends the connection.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from quiver.errors import BadRequest
from quiver.malformed import MALFORMED

LENGTH: Final = struct.Struct(">I")
STRANGER_BYTES_MAX: Final = 256  # of a frame before the other side has shown the secret
RANK_MAX: Final = 1 << 31


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Follower: I am this rank, of this meeting."""

    secret: bytes
    rank: int


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Leader: I am the one whom you look for."""

    secret: bytes


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Follower: I begin this pass, my loader's n-th."""

    number: int


class Batch(msgspec.Struct, frozen=True, tag="batch"):
    """Leader: the next batch of a pass."""

    number: int
    decision: bytes


class Drawn(msgspec.Struct, frozen=True, tag="drawn"):
    """Follower: I have drawn so many batches of a pass."""

    number: int
    batches: int


class Left(msgspec.Struct, frozen=True, tag="left"):
    """Either: I have left a pass, at its end or earlier, and consumed so many batches of it."""

    number: int
    consumed: int
    at_end: bool


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """Either: I close the connection on purpose."""


Message = Hello | Welcome | Join | Batch | Drawn | Left | Bye
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return a message as a frame."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


class Frames:
    """Cuts what arrives on a connection into messages."""

    def __init__(self, bytes_max: int) -> None:
        """``bytes_max``: of one frame. It may be set later, once the other side is known."""
        self.bytes_max = bytes_max
        self._buffer = bytearray()

    def add(self, data: bytes) -> None:
        """Add what arrived: at most one frame's bytes and one receive buffer's are held."""
        self._buffer += data

    def next(self) -> Message | None:
        """Return the next complete message, ``None`` if none is. Raises ``BadRequest``."""
        if len(self._buffer) < LENGTH.size:
            return None
        [length] = LENGTH.unpack_from(self._buffer)
        if length > self.bytes_max:
            raise BadRequest(f"a frame of {length} bytes, where {self.bytes_max} are the most")
        end = LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        try:
            message: Message = _decoder.decode(body)
        except MALFORMED as error:
            raise BadRequest(f"malformed message: {error}") from error
        return message


def frame_bytes_max(batch_size: int) -> int:
    """Return the limit of a frame whose largest message is a batch: eight bytes per sample, and some more for parts."""
    return 4096 + 16 * batch_size
