"""Lists the objects of a source: a path or URL of a file or folder, or a pattern such as ``train-{000..009}.tar``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from braceexpand import braceexpand

from quiver.errors import BadRequest, NotFound
from quiver.origin.base import split_url
from quiver_client.indexing.local import list_local, list_local_files
from quiver_client.indexing.objects import Listing
from quiver_client.indexing.remote import list_named, list_store, store_base
from quiver_client.indexing.report import Notices
from quiver_client.indexing.web import list_web, tidy

PATTERN_OBJECTS_MAX: Final = 1_000_000


def list_source(source: str, notices: Notices, output: Path) -> Listing:
    """List the objects of a source. Raises ``NotFound`` if it does not exist or is empty."""
    scheme, rest = split_url(source)
    if scheme == "file":
        names = [] if os.path.exists(rest) else _expanded(rest)
        listing = _local_pattern(rest, names) if names else list_local(rest, notices, output)
    elif scheme in ("http", "https"):
        names = _expanded(source)
        listing = _web_pattern(names) if names else list_web(source, notices)
    else:
        names = _expanded(source)
        listing = _store_pattern(names) if names else list_store(source, notices)
    if not len(listing):
        left_out = f" ({'; '.join(map(str, notices.all()))})" if notices.all() else ""
        raise NotFound(f"{source} holds no objects{left_out}; check the source's path")
    return listing


def _expanded(pattern: str) -> list[str]:
    """Return the names to which a pattern expands; none if it is no pattern."""
    if "{" not in pattern:
        return []
    try:
        names = []
        for name in braceexpand(pattern):
            names.append(name)
            if len(names) > PATTERN_OBJECTS_MAX:
                raise BadRequest(f"{pattern} stands for more than {PATTERN_OBJECTS_MAX} objects")
    except ValueError:  # unbalanced: a name with a brace in it
        return []
    if names == [pattern]:
        return []
    return list(dict.fromkeys(names))


def list_files(names: list[str]) -> Listing:
    """List local files that are named individually, as by a shell that expands ``train-*.tar``."""
    paths = []
    for name in names:
        scheme, path = split_url(name)
        if scheme != "file":
            raise BadRequest(f"{name} is no local path; of a store name a folder, or a pattern like x-{{0..9}}.tar")
        if not os.path.isfile(path):
            what = "is a folder" if os.path.isdir(path) else "does not exist"
            raise BadRequest(f"{path} {what}; several sources are files, or else name the one folder that holds them")
        paths.append(path)
    return _local_pattern(", ".join(paths[:3]), list(dict.fromkeys(paths)))


def _local_pattern(pattern: str, names: list[str]) -> Listing:
    base = _parent([os.path.abspath(name) for name in names])
    if not any(os.path.exists(name) for name in names):
        raise NotFound(f"there is no {pattern}, and nothing that it stands for as a pattern")
    return list_local_files(base, [os.path.abspath(name)[len(base) :] for name in names])


def _store_pattern(names: list[str]) -> Listing:
    base = _parent(names)
    scheme, _, rest = base.partition("://")
    bucket, _, folder = rest.partition("/")
    if not bucket:
        raise BadRequest(f"{names[0]} and {names[-1]} lie in different buckets; index one at a time")
    return list_named(store_base(scheme, bucket, folder.strip("/")), [name[len(base) :] for name in names])


def _web_pattern(names: list[str]) -> Listing:
    urls = [tidy(name) for name in names]
    base = _parent(urls)
    if base.count("/") < 3:
        raise BadRequest(f"{names[0]} and {names[-1]} lie on different servers; index one at a time")
    return list_named(base, [unquote(url[len(base) :]) for url in urls])


def _parent(names: list[str]) -> str:
    """Return the deepest folder, with its slash, that contains all names."""
    return "/".join(_common([name.split("/")[:-1] for name in names])) + "/"


def _common(paths: list[list[str]]) -> list[str]:
    shortest, longest = min(paths), max(paths)  # what these two share, all share
    same = 0
    while same < min(len(shortest), len(longest)) and shortest[same] == longest[same]:
        same += 1
    return shortest[:same]
