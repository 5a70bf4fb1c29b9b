"""Checks whether an origin can be read at all, without reading objects."""

from __future__ import annotations

import os
from typing import Final

from quiver.errors import Forbidden, NotFound, QuiverError, Unavailable
from quiver.location import Location, shown
from quiver.origin.remote import PROBE_SECONDS, connect
from quiver.origin.store_errors import store_errors
from quiver.origin.web import WebStore

# The codes of stores that deny a listing, to a client that may only get objects or may do neither.
DENIED: Final = ("AccessDenied", "AuthorizationPermissionMismatch")


def probe(location: Location) -> bool:
    """Return whether the origin is known to be readable; a store that denies a listing may still serve objects.

    Raises what ``ObjectStore.read`` does, ``Misconfigured`` for a missing library, ``NotFound`` for a missing folder.
    """
    if location.scheme == "file":
        _probe_folder(location.path)
        return True
    store = connect(location.url, attempts=1, request_seconds=PROBE_SECONDS)
    if isinstance(store, WebStore):
        try:
            return store.knock()
        finally:
            store.close()
    try:
        with store_errors(location.url):
            next(iter(store.list(chunk_size=1)), None)
    except QuiverError as error:
        if any(denied in str(error) for denied in DENIED):
            return False
        hint = "; a daemon needs credentials of its own, where the store's client looks for them"
        raise Forbidden(f"{error}{hint}") from error
    return True


def _probe_folder(path: str) -> None:
    try:
        os.close(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    except FileNotFoundError:
        raise NotFound(f"there is no folder {shown(path)}; is it mounted?") from None
    except OSError as error:
        raise Unavailable(shown(path), f"cannot be opened as a folder: {error.strerror}") from error
    if not os.access(path, os.X_OK):
        raise Forbidden(f"permission denied for {shown(path)}; let the user that the daemon runs as read it")
