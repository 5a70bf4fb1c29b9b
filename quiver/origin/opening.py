"""The one place that chooses an implementation for an origin's URL.

Libraries that are slow to load are loaded when an origin needs them, perhaps in a thread. A child that is forked while
a thread imports a module can never import that module, so a process that may fork calls ``import_ahead`` before it
starts threads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from quiver.errors import NotAllowed
from quiver.location import Location
from quiver.manifest import Manifest
from quiver.origin.base import READ_SECONDS, ObjectStore
from quiver.origin.local import LocalStore
from quiver.origin.origin_process import ProcessStore
from quiver.origin.samples import Counted, RangeOrigin, SampleOrigin


def import_ahead(manifest: Manifest) -> None:
    """Import what ``open_origin`` and its readers need, in a process that may fork."""
    if manifest.header.source == "parquet":
        importlib.import_module("quiver.origin.parquet")


def open_origin(
    manifest: Manifest,
    *,
    may_fork: bool = False,
    within: Location | None = None,
    count: Callable[[int], None] = lambda read_bytes: None,
    within_seconds: float = READ_SECONDS,
) -> SampleOrigin:
    """Return the origin of a manifest. ``count`` is called with the bytes that the origin delivered for each read.

    ``within``: the folder or prefix that an operator allows; no path or link may lead out of it. ``within_seconds``:
    how long a read of a remote store may take while nothing arrives.
    """
    store = open_store(manifest.header.base, may_fork=may_fork, within=within)
    if manifest.header.source == "parquet":
        from quiver.origin.parquet import ParquetOrigin  # its reader takes a while to load

        return Counted(ParquetOrigin(manifest, store, within_seconds), count)
    return Counted(RangeOrigin(manifest, store, within_seconds), count)


def open_store(base: str, *, may_fork: bool = False, within: Location | None = None) -> ObjectStore:
    """Return the store for a base URL.

    ``may_fork``: the calling process may fork later (a training process): threads of a remote store's client, which do
    not survive a fork, then run in a process of their own. ``within``: the folder that the operator of a daemon allows,
    since a daemon reads on behalf of others. Raises ``NotAllowed`` for a base outside it; a file that a symbolic link
    places outside is rejected when it is read.
    """
    location = Location.parse(base)
    if within is not None and not within.contains(location):
        raise NotAllowed("this daemon may not read that origin; its operator can allow it with --origin")
    base = location.url
    if location.scheme == "file":
        return LocalStore(location, within=within.path if within is not None else None)
    if may_fork:
        return ProcessStore(base)
    from quiver.origin.remote import RemoteStore

    return RemoteStore(base)
