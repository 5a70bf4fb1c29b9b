"""The noun ``ObjectStore``, what it is asked for, and the URLs that it is known by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from quiver.errors import BadRequest, Misconfigured

# How long one read may take without anything arriving. Retries included, requests in parallel: it is one deadline. Long
# enough for a store that is slow to wake up, short enough for a fill thread of a daemon, of which there are four.
READ_SECONDS: Final = 20.0

REMOTE_SCHEMES = frozenset({"s3", "gs", "az", "http", "https"})


class Extent(NamedTuple):
    """A run of bytes of one object; ``path`` is relative to the store's base URL, not quoted."""

    path: str
    offset: int
    length: int


class ObjectStore(Protocol):
    """Objects under a base URL, read by byte ranges."""

    base: str

    def read(self, extents: Sequence[Extent], out: memoryview, within_seconds: float = READ_SECONDS) -> int:
        """Put the extents back to back into ``out`` (exactly their sum in size); return the bytes that were read.

        That is more than their sum where neighbours were coalesced over a gap. Raises ``Changed`` for an object that
        is gone or too short, ``Forbidden`` for refused credentials, ``Unavailable`` when the store does not answer
        ``within_seconds``; what arrives slowly extends that. A local file system has no deadline: a network mount that
        hangs holds the reading thread in the kernel.
        """
        ...

    def close(self) -> None:
        """Let go of threads, connections and processes. The store is not used afterwards."""
        ...


def split_url(url: str) -> tuple[str, str]:
    """Return scheme and the rest; a plain path has scheme ``file``. Raises ``Misconfigured`` for an unknown scheme."""
    if "://" not in url:
        return "file", url
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise Misconfigured(f"{url}: a file URL has three slashes: file:///path")
        return "file", unquote(parts.path)
    if parts.scheme not in REMOTE_SCHEMES:
        known = ", ".join(sorted(REMOTE_SCHEMES))
        raise Misconfigured(f"{url}: scheme {parts.scheme!r} is not known; use a path, file or one of {known}")
    return parts.scheme, url


def check_path(path: str) -> str:
    """Return the path if it stays below its base; raise ``BadRequest`` for ``..``, absolute and odd ones."""
    if not path or "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise BadRequest(f"the manifest names an object with a path that is not allowed: {path[:120]!r}")
    return path
