"""Makes malformed messages of valid ones: seeded, so that a number replays a message.

The operators are those of AFL and libFuzzer (bits, bytes, interesting integers, blocks that are removed, repeated or
spliced), plus numbers in text. Deliberately without coverage: ``guided`` has that, where atheris is installed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Final

POOL_MAX: Final = 256  # of mutated messages that were accepted, and are mutated further
_EDGES: Final = (0, 1, 2, 7, 8, 63, 64, 127, 128, 255, 256, 4095, 4096, 32767, 65535, 65536, 65537, 1 << 20, 1 << 24)
_WIDE: Final = (
    *_EDGES,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    (1 << 47),
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
_TEXT: Final = (
    *(b"-1", b"0", b"1e999", b"NaN", b"-0", b"1.5", b"9" * 30, b"9" * 5000, b"null", b"true", b'""', b"[]", b"{}"),
    *(b"../", b"..%2f", b"%00", b"\0", b"\r\n", b"\xff\xfe", b"\xed\xa0\x80", b"\\ud800", b"[" * 200, b"{" * 200, b'"'),
    *(b"\x90", b"\x80", b"\xc0", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 200, b"\x81" * 200),
)
_NUMBER: Final = re.compile(rb"-?\d+")


class Mutator:
    """Endless malformed messages of a corpus. The same seed and the same verdicts give the same messages."""

    def __init__(self, corpus: Sequence[bytes], seed: int, size_max: int) -> None:
        self._random = random.Random(seed)
        self._corpus = list(corpus) or [b""]
        self._grown: list[bytes] = []
        self._size_max = size_max

    def next(self) -> bytes:
        """Return the next message."""
        rng = self._random
        if rng.random() < 0.01:
            return rng.randbytes(rng.choice((0, 1, 4, 32, 100, 1000)))
        data = rng.choice(self._grown if self._grown and rng.random() < 0.3 else self._corpus)
        for _ in range(1 << rng.randrange(4)):
            data = rng.choice(_OPERATORS)(self, data)[: self._size_max]
        return data

    def accepted(self, data: bytes) -> None:
        """Keep a message that its parser accepted: a mutation of it goes deeper than one of a seed."""
        if len(self._grown) < POOL_MAX:
            self._grown.append(data)
        else:
            self._grown[self._random.randrange(POOL_MAX)] = data

    # -- operators ----------------------------------------------------------------------------------------------------

    def _at(self, data: bytes) -> int:
        return self._random.randrange(len(data) + 1)

    def _slice(self, data: bytes) -> tuple[int, int]:
        at = self._at(data)
        return at, min(at + self._random.choice((1, 1, 2, 4, 8, 16, 64, 512, len(data))), len(data))

    def _flip(self, data: bytes) -> bytes:
        if not data:
            return data
        out = bytearray(data)
        out[self._random.randrange(len(out))] ^= 1 << self._random.randrange(8)
        return bytes(out)

    def _set(self, data: bytes) -> bytes:
        at, end = self._slice(data)
        return data[:at] + self._random.randbytes(end - at) + data[end:]

    def _remove(self, data: bytes) -> bytes:
        at, end = self._slice(data)
        return data[:at] + data[end:]

    def _repeat(self, data: bytes) -> bytes:
        at, end = self._slice(data)
        times = self._random.choice((1, 1, 2, 10, 300))
        return data[:at] + data[at:end] * times + data[at:]

    def _cut(self, data: bytes) -> bytes:
        return data[: self._at(data)]

    def _integer(self, data: bytes) -> bytes:
        size = self._random.choice((1, 2, 4, 8))
        order = self._random.choice(("little", "little", "big"))
        value = self._random.choice(_EDGES if size < 4 else _WIDE) % (1 << 8 * size)
        at = self._at(data)
        return data[:at] + value.to_bytes(size, order) + data[at + size :]  # type: ignore[arg-type]

    def _number(self, data: bytes) -> bytes:
        found = [match.span() for match in _NUMBER.finditer(data[:4096])]
        if not found:
            return self._integer(data)
        at, end = self._random.choice(found)
        value = self._random.choice((*_WIDE, -1, -(1 << 31), 10**25))
        return data[:at] + str(value).encode() + data[end:]

    def _insert(self, data: bytes) -> bytes:
        at = self._at(data)
        return data[:at] + self._random.choice(_TEXT) + data[at:]

    def _splice(self, data: bytes) -> bytes:
        other = self._random.choice(self._corpus)
        return data[: self._at(data)] + other[self._at(other) :]


_OPERATORS: Final[tuple[Callable[[Mutator, bytes], bytes], ...]] = (
    Mutator._flip,
    Mutator._flip,
    Mutator._set,
    Mutator._remove,
    Mutator._repeat,
    Mutator._cut,
    Mutator._integer,
    Mutator._integer,
    Mutator._number,
    Mutator._insert,
    Mutator._splice,
)
