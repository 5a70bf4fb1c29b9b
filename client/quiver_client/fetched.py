"""A manifest that lies at a URL, brought to this machine once per version."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from quiver.digest import Digest
from quiver.errors import DiskFailed
from quiver.origin import split_url
from quiver.origin.remote import download
from quiver_client.config import cache_home

CHUNK_BYTES: Final = 8 << 20


def local_manifest(location: str) -> Path:
    """Return a local path of the manifest at a path or URL. Raises ``NotFound``, ``Forbidden`` or ``Unavailable``."""
    scheme, rest = split_url(location)
    if scheme == "file":
        return Path(rest).expanduser().absolute()
    folder = cache_home() / "fetched"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remote = download(location)
        target = folder / f"{Digest.of(f'{location} {remote.version}'.encode())}.quiver"
        if not target.exists():
            temporary = target.with_suffix(f".{os.getpid()}.tmp")
            try:
                with temporary.open("wb") as file:
                    for chunk in remote.chunks(CHUNK_BYTES):
                        file.write(chunk)
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DiskFailed(f"cannot keep {location} in {folder}: {error.strerror or error}") from error
    return target
