"""A manifest by its path or URL. What lies at a URL is brought to this machine once per version, and kept.

By a process of its own, as all that is remote: this one may fork, and Ctrl-C must end it whatever the server does. A
kept file is named by where it is from, its version there, and the digest of what came. It is compared with that each
time: one that a crash or a disk has spoiled is fetched again.
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
from quiver.origin.isolated import IsolatedStore
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
            kept = _kept(path, location)
            if kept is not None:
                return kept
            path = _downloaded(location, folder)
    except OSError as error:
        raise DiskFailed(f"cannot keep {location} in {folder}: {error.strerror or error}") from error
    try:
        return Manifest.open(path, _digest(path))
    except QuiverError as error:
        path.unlink(missing_ok=True)  # it is what came: to fetch it again is all that may help
        raise type(error)(f"{location}: {error}") if isinstance(error, BadRequest) else error from error


def _digest(path: Path) -> Digest:
    return Digest.parse(path.name.removesuffix(SUFFIX).rpartition(".")[2])


def _kept(path: Path, location: str) -> Manifest | None:
    """Return the manifest that was fetched once, or remove what is not that any more."""
    try:
        return Manifest.open(path, _digest(path))
    except NotFound:  # another process found it spoiled just then, or it is a link to nowhere
        path.unlink(missing_ok=True)
        return None
    except (BadRequest, Corrupt, DiskFailed) as error:
        log.warning("%s is fetched again: %s", location, error)
        path.unlink(missing_ok=True)
        return None


def _downloaded(location: str, folder: Path) -> Path:
    """Return where the object is in the folder, after it came if it was not there in this version."""
    base, _, name = location.rpartition("/")
    patience = OriginPatience(location, patience_seconds())
    waiting = patience.begin()
    with contextlib.closing(IsolatedStore(base)) as store:
        while True:
            try:
                return store.download(unquote(name), folder)
            except Unavailable as error:
                patience.wait(waiting, error, lambda: "the manifest's samples")
