"""A sharing domain: within it the digest is a capability, across domains nothing is readable.

A token names its domain by a text. Everything below the check of tokens knows the first 16 bytes of its BLAKE3 digest:
of one length, safe in an attribute of a file and in a header, and no tenant's name in either.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import blake3

from quiver.errors import BadRequest

DOMAIN_BYTES: Final = 16
HEADER: Final = "Quiver-Domain"  # in requests of daemons: the domain on whose behalf they ask
_CONTEXT: Final = b"quiver-domain-v1\0"
_TEXT = re.compile(r"[0-9a-f]{32}", re.ASCII)
NAMES_REMEMBERED_MAX: Final = 1024


class Domain(bytes):
    """16 bytes that stand for a sharing domain; none for ``SINGLE``, the only one of a daemon without tokens."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Domain:
        """Parse the text form: exactly 32 digits of 0-9a-f. Raises ``BadRequest``."""
        if not _TEXT.fullmatch(text):
            raise BadRequest(f"not a sharing domain: {text[:80]!r}; expected 32 lower-case hexadecimal digits")
        return cls(bytes.fromhex(text))

    def __str__(self) -> str:
        return self.hex()

    def __repr__(self) -> str:
        return f"Domain({self.hex()[:8]}…)" if self else "SINGLE"


SINGLE: Final = Domain(b"")


@lru_cache(NAMES_REMEMBERED_MAX)
def domain_named(name: str) -> Domain:
    """Return the domain of this name; ``""`` is ``SINGLE``."""
    return Domain(blake3.blake3(_CONTEXT + name.encode()).digest()[:DOMAIN_BYTES]) if name else SINGLE
