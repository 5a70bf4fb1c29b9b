"""The one place that decides which implementation an origin gets.

Libraries that take a while to load are loaded when an origin needs them. That may be in a thread, and a process that is
forked while a thread imports a module can never import it: who may fork calls ``import_ahead`` before it has threads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from quiver.manifest import Manifest
from quiver.origin.base import ObjectStore, split_url
from quiver.origin.isolated import IsolatedStore
from quiver.origin.local import LocalStore
from quiver.origin.samples import Counted, RangeOrigin, SampleOrigin


def import_ahead(manifest: Manifest) -> None:
    """Import what ``open_origin`` and its readers need in a process that may fork."""
    if manifest.header.source == "parquet":
        importlib.import_module("quiver.origin.parquet")


def open_origin(
    manifest: Manifest,
    *,
    may_fork: bool = False,
    contain: bool = False,
    count: Callable[[int], None] = lambda read_bytes: None,
) -> SampleOrigin:
    """Return the origin of a manifest. ``count`` is told the bytes of each read that the origin delivered."""
    store = open_store(manifest.header.base, may_fork=may_fork, contain=contain)
    if manifest.header.source == "parquet":
        from quiver.origin.parquet import ParquetOrigin  # its reader takes a while to load

        return Counted(ParquetOrigin(manifest, store), count)
    return Counted(RangeOrigin(manifest, store), count)


def open_store(base: str, *, may_fork: bool = False, contain: bool = False) -> ObjectStore:
    """Return the store for a base URL.

    ``may_fork``: the calling process may fork later (a training process): threads of a remote store's client, which do
    not survive that, then live in a process of their own. ``contain``: refuse local files that a symbolic link puts
    outside the base (a daemon, which reads on behalf of others).
    """
    scheme, rest = split_url(base)
    if scheme == "file":
        return LocalStore(rest, contain=contain)
    if may_fork:
        return IsolatedStore(base)
    from quiver.origin.remote import RemoteStore

    return RemoteStore(base)
