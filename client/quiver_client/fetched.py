"""A manifest by its path or URL. What lies at a URL is brought to this machine once per version, and kept.

A kept file is named by where it is from, its version there, and the digest of what came. It is compared with that each
time: one that a crash or a disk has spoiled is fetched again.
"""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path
from typing import Final

import blake3

from quiver.digest import Digest
from quiver.errors import BadRequest, Corrupt, DiskFailed, NotFound, QuiverError
from quiver.manifest import SUFFIX, Manifest
from quiver.origin import split_url
from quiver.origin.remote import Download, download
from quiver_client.config import cache_home

CHUNK_BYTES: Final = 8 << 20

log = logging.getLogger("quiver_client")


def open_manifest(location: str) -> Manifest:
    """Open the manifest at a path or URL.

    Raises what ``Manifest.open`` does, and ``NotFound``, ``Forbidden`` or ``Unavailable`` for a URL.
    """
    scheme, rest = split_url(location)
    if scheme == "file":
        return Manifest.open(Path(rest).expanduser().absolute())
    folder = cache_home() / "fetched"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remote = download(location)
        version = str(Digest.of(f"{location} {remote.version}".encode()))
        for kept in sorted(folder.glob(f"{version}.*{SUFFIX}")):
            manifest = _kept(kept, location)
            if manifest is not None:
                return manifest
        target, digest = _fetched(remote, folder, version)
    except OSError as error:
        raise DiskFailed(f"cannot keep {location} in {folder}: {error.strerror or error}") from error
    try:
        return Manifest.open(target, digest)
    except QuiverError as error:
        target.unlink(missing_ok=True)  # it is what came: to fetch it again is all that may help
        raise type(error)(f"{location}: {error}") if isinstance(error, BadRequest) else error from error


def _kept(path: Path, location: str) -> Manifest | None:
    """Return the manifest that was fetched once, or remove what is not that any more."""
    try:
        return Manifest.open(path, Digest.parse(path.name.removesuffix(SUFFIX).rpartition(".")[2]))
    except NotFound:  # another process found it spoiled just then
        return None
    except (BadRequest, Corrupt, DiskFailed) as error:
        log.warning("%s is fetched again: %s", location, error)
        path.unlink(missing_ok=True)
        return None


def _fetched(remote: Download, folder: Path, version: str) -> tuple[Path, Digest]:
    """Write what comes under its own name, complete or not at all; return that, and the digest of what came."""
    temporary = folder / f".{version}.{secrets.token_hex(8)}.tmp"
    hasher = blake3.blake3()
    try:
        with temporary.open("wb") as file:
            for chunk in remote.chunks(CHUNK_BYTES):
                file.write(chunk)
                hasher.update(chunk)
            file.flush()
            os.fsync(file.fileno())
        digest = Digest(hasher.digest())
        target = folder / f"{version}.{digest}{SUFFIX}"
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target, digest
