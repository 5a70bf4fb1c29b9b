"""The name of a thing: 32 bytes of BLAKE3, in text 64 lower-case hexadecimal digits.

Parsed once at the edge; inside the process a ``Digest`` is always well formed, so that nothing else needs to check what
goes into a file name or a URL.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Final

import blake3
import numpy as np

from quiver.errors import BadRequest

Bytes = bytes | bytearray | memoryview

DIGEST_BYTES: Final = 32
_TEXT = re.compile(r"[0-9a-f]{64}", re.ASCII)


class Digest(bytes):
    """32 bytes that name content. A ``bytes``, so that it hashes, compares and sorts at C speed as a dictionary key."""

    __slots__ = ()

    def __new__(cls, raw: Bytes) -> Digest:
        self = super().__new__(cls, raw)
        if len(self) != DIGEST_BYTES:
            raise BadRequest(f"a digest has {DIGEST_BYTES} bytes, not {len(self)}")
        return self

    @classmethod
    def parse(cls, text: str) -> Digest:
        """Parse the text form: exactly 64 digits of 0-9a-f, no upper case, no white space. Raises ``BadRequest``."""
        if not _TEXT.fullmatch(text):
            raise BadRequest(f"not a digest: {text[:80]!r}; expected 64 lower-case hexadecimal digits")
        return cls(bytes.fromhex(text))

    @classmethod
    def of(cls, data: Bytes) -> Digest:
        """Return the BLAKE3 digest of ``data``, computed in this thread alone.

        BLAKE3's own thread pool does not survive a fork: a forked child that hashes would wait for it for ever.
        """
        return cls(blake3.blake3(data).digest())

    @classmethod
    def many(cls, raw: bytes) -> tuple[Digest, ...]:
        """Return the digests that lie back to back in ``raw``: 65,536 of them in 10 ms, where a loop takes 50."""
        if len(raw) % DIGEST_BYTES:
            raise BadRequest(f"digests have {DIGEST_BYTES} bytes each, not {len(raw)} together")
        pieces: list[bytes] = np.frombuffer(raw, f"V{DIGEST_BYTES}").tolist()
        return tuple(map(partial(bytes.__new__, cls), pieces))  # no Python step per digest

    @property
    def short(self) -> str:
        """The first twelve digits, for people."""
        return f"{self.hex()[:12]}…"

    def __str__(self) -> str:
        return self.hex()

    def __repr__(self) -> str:
        return f"Digest({self.short})"
