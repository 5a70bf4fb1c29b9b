"""A manifest that lies at a URL, brought to this machine once per version.

By a process of its own, as all that is remote: this one may fork, and Ctrl-C must end it whatever the server does.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from urllib.parse import unquote

from quiver.errors import DiskFailed, Unavailable
from quiver.origin import split_url
from quiver.origin.isolated import IsolatedStore
from quiver_client.config import cache_home
from quiver_client.patience import Patience, patience_seconds


def local_manifest(location: str) -> Path:
    """Return a local path of the manifest at a path or URL. Raises ``NotFound``, ``Forbidden`` or ``Unavailable``."""
    scheme, rest = split_url(location)
    if scheme == "file":
        return Path(rest).expanduser().absolute()
    folder = cache_home() / "fetched"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskFailed(f"cannot keep {location} in {folder}: {error.strerror or error}") from error
    base, _, name = location.rpartition("/")
    patience = Patience(location, patience_seconds())
    waiting = patience.begin()
    with contextlib.closing(IsolatedStore(base)) as store:
        while True:
            try:
                return store.download(unquote(name), folder)
            except Unavailable as error:
                patience.wait(waiting, error, lambda: "the manifest's samples")
