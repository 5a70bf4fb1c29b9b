"""The noun ``ObjectStore``: objects under a base URL, read by extents; and the URLs that name one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from quiver.errors import BadRequest, Misconfigured
from quiver.location import SCHEMES, Location, refuse_credentials, shown

# How long a read may take while nothing arrives: one deadline for all of its parallel requests and their retries. Long
# enough for a store that is slow to start, short enough for a fill thread of a daemon, which has four.
READ_SECONDS: Final = 20.0

REMOTE_SCHEMES = SCHEMES - {"file"}


class Extent(NamedTuple):
    """A run of bytes of one object; ``path`` is relative to the store's base URL, not quoted."""

    path: str
    offset: int
    length: int


class ObjectStore(Protocol):
    """Objects under a base URL, read by byte ranges."""

    base: str

    def read(self, extents: Sequence[Extent], out: memoryview, within_seconds: float = READ_SECONDS) -> int:
        """Read the extents, back to back, into ``out``, whose size is their sum; return how many bytes were read.

        That is more than their sum if adjacent extents were coalesced over a gap. Raises ``Changed`` for an object that
        is gone or too short, ``Forbidden`` for rejected credentials, ``Unavailable`` if the store does not answer
        ``within_seconds``; bytes that arrive extend that. A local file system has no deadline: a network mount that
        hangs blocks the reading thread in the kernel.
        """
        ...

    def close(self) -> None:
        """Release threads, connections and processes. The store must not be used afterwards."""
        ...


def split_url(url: str) -> tuple[str, str]:
    """Return scheme and rest of a URL or path that a user gave; a plain path, of any name, has scheme ``file``.

    Raises ``Misconfigured`` for an unknown scheme, ``BadRequest`` for credentials in a URL.
    """
    if "://" not in url:
        return "file", url
    scheme = url.partition("://")[0].lower()
    if scheme == "file":
        location = Location.parse(url)
        return scheme, location.path + ("/" if url.endswith("/") and location.names else "")
    if scheme not in REMOTE_SCHEMES:
        known = ", ".join(sorted(REMOTE_SCHEMES))
        raise Misconfigured(f"{shown(url)}: scheme {scheme!r} is unknown; use a path, file or one of {known}")
    refuse_credentials(url)
    if shown(url, len(url)) != url:
        raise BadRequest(f"{shown(url)}: a URL must not contain control characters")
    return scheme, url
