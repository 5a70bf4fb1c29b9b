"""Where the cache is: the ``cache=`` argument, parsed once.

http://node1:7717,node2:7717          a rack, through any of its daemons; https:// if they speak TLS
file:///ssd/quiver?capacity=200GiB    embedded: a folder of this machine, shared by its processes
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit

from quiver.errors import BadRequest, Misconfigured, QuiverError
from quiver.ring import SCHEMES, check_url
from quiver.sizes import parse_size
from quiver.transport.tls import credentials_of_environment
from quiver.wire import PORT

CAPACITY_BYTES_DEFAULT: Final = 100 << 30


@dataclass(frozen=True, slots=True)
class EmbeddedCache:
    """A folder that all processes of this machine share."""

    root: Path
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class RackCache:
    """A rack, given by the URLs of some of its daemons."""

    urls: tuple[str, ...]


CacheConfig = EmbeddedCache | RackCache


def cache_home() -> Path:
    """Return the user's cache folder, by the XDG convention."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quiver"


def parse_cache(cache: str | None) -> CacheConfig:
    """Parse ``cache=``; ``None`` means ``$QUIVER_CACHE`` or else an embedded cache in ``~/.cache/quiver``.

    Raises ``Misconfigured`` for anything else.
    """
    if cache is not None and not isinstance(cache, str):
        raise Misconfigured(f"cache={cache!r}: write http://HOST:{PORT},… for a rack, or file:///FOLDER?capacity=SIZE")
    text = (cache if cache is not None else os.environ.get("QUIVER_CACHE", "")).strip()
    if not text:
        return EmbeddedCache(cache_home(), CAPACITY_BYTES_DEFAULT)
    for scheme in SCHEMES:
        if text.startswith(f"{scheme}://"):
            return _rack(text, scheme)
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        options = parse_qs(parts.query, keep_blank_values=True)
        unknown = set(options) - {"capacity"}
        if unknown:
            raise Misconfigured(f"cache={text!r}: unknown option {sorted(unknown)[0]!r}; there is capacity=SIZE")
        try:
            capacity = parse_size(options["capacity"][-1]) if "capacity" in options else CAPACITY_BYTES_DEFAULT
        except QuiverError as error:
            raise Misconfigured(f"cache={text!r}: capacity is {error}") from error
        return EmbeddedCache(Path(unquote(parts.path)), capacity)
    raise Misconfigured(f"cache={text!r}: write http://HOST:{PORT},… for a rack, or file:///FOLDER?capacity=SIZE")


def _rack(text: str, scheme: str) -> RackCache:
    """Return the rack of these daemons, which all speak TLS or none of them."""
    if scheme == "https":
        credentials_of_environment().client()  # raises for files that are missing or wrong: now, and not in a worker
    return RackCache(tuple(_daemon(part.strip(), scheme) for part in text.split(",") if part.strip()))


def _daemon(text: str, scheme: str) -> str:
    url = text if "://" in text else f"{scheme}://{text}"
    if not url.startswith(f"{scheme}://"):
        raise Misconfigured(f"cache: {text[:120]!r}: the first daemon has {scheme}://, and so must all of them")
    try:
        return check_url(url if urlsplit(url).port else f"{url.rstrip('/')}:{PORT}")
    except (BadRequest, ValueError) as error:
        raise Misconfigured(f"cache: {text[:120]!r}: {error}; write {scheme}://HOST:{PORT}") from error
