"""Opens a manifest by its path or URL. One at a URL is downloaded to this machine once per version, and kept.

A separate process downloads it, as for all remote reads: this process may fork, and Ctrl-C must end it even if the
server hangs. A kept file is named by its URL, its version there, and the digest of its content. Its content is compared
with that digest each time it is opened: a file damaged by a crash or a disk is downloaded again.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from urllib.parse import unquote

from quiver.digest import Digest
from quiver.errors import BadRequest, Corrupt, DiskFailed, NotFound, QuiverError, Unavailable
from quiver.manifest import SUFFIX, Manifest
from quiver.origin import split_url
from quiver.origin.origin_process import ProcessStore
from quiver_client.config import cache_home
from quiver_client.origin_patience import OriginPatience, patience_seconds

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
        before = set(folder.iterdir())
        path = _downloaded(location, folder)
        if path in before:
            kept = _opened_again(path, location)
            if kept is not None:
                return kept
            path = _downloaded(location, folder)
    except OSError as error:
        raise DiskFailed(f"cannot keep {location} in {folder}: {error.strerror or error}") from error
    try:
        return Manifest.open(path, _digest(path))
    except QuiverError as error:
        path.unlink(missing_ok=True)  # the next attempt downloads it again
        raise type(error)(f"{location}: {error}") if isinstance(error, BadRequest) else error from error


def _digest(path: Path) -> Digest:
    return Digest.parse(path.name.removesuffix(SUFFIX).rpartition(".")[2])


def _opened_again(path: Path, location: str) -> Manifest | None:
    """Return the manifest that was downloaded before; if the file is damaged, remove it and return ``None``."""
    try:
        return Manifest.open(path, _digest(path))
    except NotFound:  # another process removed it meanwhile, or it is a dangling link
        path.unlink(missing_ok=True)
        return None
    except (BadRequest, Corrupt, DiskFailed) as error:
        log.warning("downloading %s again: %s", location, error)
        path.unlink(missing_ok=True)
        return None


def _downloaded(location: str, folder: Path) -> Path:
    """Return the path of the object in the folder, downloaded if this version of it was not there."""
    base, _, name = location.rpartition("/")
    patience = OriginPatience(location, patience_seconds())
    waiting = patience.begin()
    with contextlib.closing(ProcessStore(base)) as store:
        while True:
            try:
                return store.download(unquote(name), folder)
            except Unavailable as error:
                patience.wait(waiting, error, lambda: "the manifest's samples")
