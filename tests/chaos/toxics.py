"""Faults of a connection, as values: what a proxy does to the pieces that pass.

A toxic is frozen; the proxy counts what it did. ``apply`` returns the pieces to pass on and calls ``link.fire`` if it
changed something, so that a test can require that its fault happened.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from quiver.transport.stream import FRAME
from tests.chaos.framing import Part, Piece

DOWN: Final = "down"  # from the server to the client
UP: Final = "up"
PAYLOAD: Final = (Part.BODY, Part.RAW)


class Link(Protocol):
    """What a toxic sees of the connection and direction that it is applied to."""

    rng: Any  # random.Random of this connection, from the seed
    passed_bytes: int  # in this direction, before this piece
    begins: bool  # the first piece since the other direction spoke

    def fire(self) -> None: ...
    async def hang(self) -> None: ...
    def reset(self) -> None: ...
    def end(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Toxic:
    """``eq=False``: two toxics of equal values are two toxics, each switched off by itself."""

    direction: str = field(default=DOWN, kw_only=True)
    chance: float = field(default=1.0, kw_only=True)  # of each occasion

    async def apply(self, link: Link, piece: Piece) -> list[Piece]:
        raise NotImplementedError

    def strikes(self, link: Link) -> bool:
        if self.chance < 1 and link.rng.random() >= self.chance:
            return False
        link.fire()
        return True

    @property
    def name(self) -> str:
        return type(self).__name__


@dataclass(frozen=True, eq=False)
class Latency(Toxic):
    """Each answer begins later, by ``seconds`` and up to ``jitter`` more."""

    seconds: float = 0.05
    jitter: float = 0.0

    async def apply(self, link: Link, piece: Piece) -> list[Piece]:
        if link.begins and self.strikes(link):
            await asyncio.sleep(self.seconds + link.rng.random() * self.jitter)
        return [piece]


@dataclass(frozen=True, eq=False)
class Bandwidth(Toxic):
    bytes_per_second: int = 1 << 20

    async def apply(self, link: Link, piece: Piece) -> list[Piece]:
        if piece.data:
            link.fire()
            await asyncio.sleep(len(piece.data) / self.bytes_per_second)
        return [piece]


@dataclass(frozen=True, eq=False)
class Slices(Toxic):
    """Bytes come a few at a time."""

    size: int = 100
    pause_seconds: float = 0.0
    at_most: int = 64  # slices of one piece: more make a test slow and show nothing new

    async def apply(self, link: Link, piece: Piece) -> list[Piece]:
        if len(piece.data) <= self.size or not self.strikes(link):
            return [piece]
        size = max(self.size, -(-len(piece.data) // self.at_most))
        return [Piece(piece.part, piece.data[at : at + size]) for at in range(0, len(piece.data), size)]


@dataclass(frozen=True, eq=False)
class Reset(Toxic):
    """The connection is reset once ``after_bytes`` have passed in this direction."""

    after_bytes: int = 0

    async def apply(self, link: Link, piece: Piece) -> list[Piece]:
        if link.passed_bytes + len(piece.data) <= self.after_bytes or not self.strikes(link):
            return [piece]
        link.reset()
        return []


@dataclass(frozen=True, eq=False)
class Truncate(Toxic):
    """The connection ends in order once ``after_bytes`` have passed."""

    after_bytes: int = 0

    async def apply(self, link: Link, piece: Piece) -> list[Piece]:
        left = self.after_bytes - link.passed_bytes
        if len(piece.data) <= left or not self.strikes(link):
            return [piece]
        link.end()
        return [Piece(piece.part, piece.data[: max(left, 0)])]


@dataclass(frozen=True, eq=False)
class Hang(Toxic):
    """Once ``after_bytes`` have passed nothing more does, until the toxic is removed."""

    after_bytes: int = 0

    async def apply(self, link: Link, piece: Piece) -> list[Piece]:
        if link.passed_bytes + len(piece.data) > self.after_bytes and self.strikes(link):
            await link.hang()
        return [piece]


@dataclass(frozen=True, eq=False)
class BitFlip(Toxic):
    """One bit of a piece of payload is flipped."""

    least_bytes: int = 512

    async def apply(self, link: Link, piece: Piece) -> list[Piece]:
        if piece.part not in PAYLOAD or len(piece.data) < self.least_bytes or not self.strikes(link):
            return [piece]
        data = bytearray(piece.data)
        data[link.rng.randrange(len(data))] ^= 1 << link.rng.randrange(8)
        return [Piece(piece.part, bytes(data))]


@dataclass(frozen=True, eq=False)
class Garbage(Toxic):
    """Bytes that nobody asked for come after a body."""

    data: bytes = b"\0garbage" * 100

    async def apply(self, link: Link, piece: Piece) -> list[Piece]:
        strikes = piece.part is Part.END and self.strikes(link)
        return [piece, Piece(Part.RAW, self.data)] if strikes else [piece]


@dataclass(frozen=True, eq=False)
class LyingLength(Toxic):
    """The announced length of an answer is wrong by ``by`` bytes."""

    by: int = 1

    async def apply(self, link: Link, piece: Piece) -> list[Piece]:
        if piece.part is Part.FRAME and self.strikes(link):
            magic, kind, size = FRAME.unpack(piece.data)
            return [Piece(piece.part, FRAME.pack(magic, kind, max(size + self.by, 0)))]
        if piece.part is Part.HEAD and _LENGTH.search(piece.data) and self.strikes(link):
            return [Piece(piece.part, _LENGTH.sub(self._lie, piece.data))]
        return [piece]

    def _lie(self, found: re.Match[bytes]) -> bytes:
        return b"\r\nContent-Length: %d" % max(int(found[1]) + self.by, 0)


_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Head(Toxic):
    """HTTP heads are changed: another status line, more header fields."""

    status: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    async def apply(self, link: Link, piece: Piece) -> list[Piece]:
        if piece.part is not Part.HEAD or not self.strikes(link):
            return [piece]
        first, _, rest = piece.data.partition(b"\r\n")
        if self.status:
            first = b"HTTP/1.1 " + self.status.encode()
        more = b"".join(b"%s: %s\r\n" % (name.encode(), value.encode()) for name, value in self.headers.items())
        return [Piece(piece.part, first + b"\r\n" + more + rest)]


EVERY: Final[tuple[Callable[[], Toxic], ...]] = (
    lambda: Latency(0.02, 0.05),
    lambda: Bandwidth(4 << 20),
    lambda: Slices(64),
    lambda: Reset(20_000, chance=0.3),
    lambda: Truncate(20_000, chance=0.3),
    lambda: Hang(20_000, chance=0.1),
    lambda: BitFlip(chance=0.3),
    lambda: Garbage(chance=0.3),
    lambda: LyingLength(7, chance=0.2),
    lambda: LyingLength(-7, chance=0.2),
)
"""One of each kind, at strengths with which a rack still trains: for runs in which everything fails at random."""
