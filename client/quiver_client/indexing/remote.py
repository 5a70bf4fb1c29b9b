"""Lists object stores (S3, GCS, Azure) through obstore, whose list takes one request per thousand objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import numpy as np

from quiver.errors import BadRequest, NotFound
from quiver.location import Location, is_object_path, shown
from quiver.manifest import SUFFIX, OriginObject
from quiver_client.indexing.local import LEFT_OUT_MANIFEST, LEFT_OUT_NAME
from quiver_client.indexing.objects import Listing, ListingBuilder
from quiver_client.indexing.parallel import THREADS_REMOTE, in_order
from quiver_client.indexing.reading import mapped
from quiver_client.indexing.report import Notices


def list_store(url: str, notices: Notices) -> Listing:
    """List an object, or the objects below a prefix, of ``s3://bucket/path``. The path is the unquoted key."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise BadRequest(f"{url} names no bucket; write {scheme}://bucket/path")
    if key and not key.endswith("/"):
        parent, _, name = key.rpartition("/")
        base = store_base(scheme, bucket, parent)
        found = _head_or_none(base, name)
        if found is not None:
            builder = ListingBuilder()
            builder.add(found)
            return builder.finish(base, single=True)
    base = store_base(scheme, bucket, key.strip("/"))
    return _list_prefix(base, url, notices)


def list_named(base: str, names: Sequence[str]) -> Listing:
    """List objects that are named individually, relative to ``base``."""
    from quiver.origin.remote import connect

    store = connect(base)

    def head(name: str) -> OriginObject:

        with mapped(base + name, listing=True):
            return _object(store.head(name))

    builder = ListingBuilder()
    for found in in_order(head, names, THREADS_REMOTE):
        builder.add(found)
    return builder.finish(base)


def store_base(scheme: str, bucket: str, folder: str) -> str:
    """Return the quoted base URL of a folder of a bucket, with a slash at the end."""
    return f"{scheme}://{bucket}/" + (quote(folder) + "/" if folder else "")


def _list_prefix(base: str, url: str, notices: Notices) -> Listing:

    from quiver.origin.remote import connect

    store = connect(base)
    builder = ListingBuilder()
    markers: list[str] = []
    scheme = Location.parse(base).scheme
    with mapped(url, listing=True):
        for batch in store.list(chunk_size=1000):
            for meta in batch:
                found = _object(meta)
                if not found.size:
                    markers.append(found.path)
                if found.path.endswith(SUFFIX):
                    notices.add(LEFT_OUT_MANIFEST, found.path)
                elif not is_object_path(found.path, scheme):
                    notices.add(LEFT_OUT_NAME, shown(found.path))
                else:
                    builder.add(found)
    listing = builder.finish(base)
    return _without_folder_markers(listing, base, markers)


def _without_folder_markers(listing: Listing, base: str, empty: list[str]) -> Listing:
    """Drop the empty objects ``name/`` that consoles create for folders; the store's client lists them as ``name``."""
    from quiver.origin.remote import connect

    if not empty:
        return listing
    store = connect(base)
    found = in_order(lambda path: _exists(store, base, path), empty, THREADS_REMOTE)
    gone = {path for path, exists in zip(empty, found, strict=True) if not exists}
    if not gone:
        return listing
    kept = [first + at for first, paths in listing.blocks() for at, path in enumerate(paths) if path not in gone]
    return listing.only(np.asarray(kept, np.intp))


def _exists(store: Any, base: str, path: str) -> bool:

    try:
        with mapped(base + path, listing=True):
            store.head(path)
    except NotFound:
        return False
    return True


def _head_or_none(base: str, name: str) -> OriginObject | None:

    from quiver.origin.remote import connect

    store = connect(base)
    try:
        with mapped(base + name, listing=True):
            return _object(store.head(name))
    except NotFound:
        return None


def _object(meta: Any) -> OriginObject:
    modified = meta["last_modified"]
    return OriginObject(
        path=meta["path"],
        size=meta["size"],
        etag=meta.get("e_tag") or "",
        mtime_ns=int(modified.timestamp()) * 1_000_000_000 if modified is not None else 0,
    )
