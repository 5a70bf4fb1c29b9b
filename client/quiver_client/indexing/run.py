"""``index``: makes a manifest in one pass over a source where it lies.

list the source → choose the format → hash every sample, in parallel → store equal ones once → place → write
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Final

import numpy as np

from quiver.errors import BadRequest, Misconfigured
from quiver.identity import check_name
from quiver.layout import SHARD_BYTES_MAX, SHARD_BYTES_MIN, Layout
from quiver.manifest import FORMAT_VERSION, Field, Header, Manifest, write_manifest
from quiver.manifest.schema import SourceFormat
from quiver.origin.base import split_url
from quiver.origin.runs import RUN_BYTES_MAX
from quiver.sizes import format_size, parse_size
from quiver_client.indexing.assemble import assemble, check_base
from quiver_client.indexing.columns import Samples
from quiver_client.indexing.detect import Format, choose, warn_of_splits
from quiver_client.indexing.files import index_files
from quiver_client.indexing.keys import name_plainly
from quiver_client.indexing.listing import list_files, list_source
from quiver_client.indexing.objects import Listing
from quiver_client.indexing.parallel import Meter, NoProgress, Progress
from quiver_client.indexing.reading import Objects, RemoteObjects, open_objects
from quiver_client.indexing.report import Notices, Report
from quiver_client.indexing.selection import Selection
from quiver_client.indexing.target import check_output

FORMATS: Final = ("auto", "files", "imagefolder", "webdataset", "parquet")
LAYOUTS: Final = ("auto", "mixed", "sequential")


def index(  # noqa: PLR0913  # pinned: DESIGN.md §9
    source: str | PathLike[str] | Sequence[str | PathLike[str]],
    output: str | PathLike[str],
    format: Format = "auto",
    layout: str = "auto",
    shard_bytes: str | int = "auto",
    base: str | PathLike[str] | None = None,
    *,
    fields: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    force: bool = True,
    name: str = "",
    progress: Progress | None = None,
) -> Report:
    """Read ``source`` once, where it lies, and write its manifest to ``output``.

    ``source``: a path, a ``file://``, ``s3://``, ``gs://``, ``az://`` or ``http(s)://`` URL of a file or folder, or a
    brace pattern of either; or several local files. ``output``: a new file, or an older manifest, which is replaced if
    ``force``; anything else is rejected. ``layout``: default ``mixed`` for separate files, ``sequential`` for tars and
    Parquet files, or the layout of ``base``. ``shard_bytes``: the maximum size of a shard; ``auto`` gives some hundred
    shards of 32 MiB at most.

    ``fields``: the fields to take, all if None; ``exclude``: those to leave out. They are columns of Parquet files
    (``__key__`` names the samples), extensions in tars, else ``data``, or ``image`` and ``label``.

    ``base``: an older manifest. Its shards whose samples all still exist are kept, and the other samples are placed
    among themselves. A shard that lost a sample could not be filled from the new source, so its other samples move.

    ``name``: what people call the dataset, in tables and metrics: at most 128 bytes that print. Without it nothing is
    stored, and the dataset is called by the file that is opened. Versions that do not know format 4 read no manifest
    with a name.

    Return a report. Raises a ``QuiverError`` that names what is wrong, and then leaves no file behind.
    """
    if format not in FORMATS:
        raise Misconfigured(f"unknown format {format!r}; use one of {', '.join(FORMATS)}")
    if layout not in LAYOUTS:
        raise Misconfigured(f"unknown layout {layout!r}; use one of {', '.join(LAYOUTS)}")
    try:
        check_name("name", name)
    except ValueError as error:
        raise Misconfigured(str(error)) from error
    selection = Selection(fields, exclude)
    limit_bytes = None if shard_bytes == "auto" else _shard_bytes(shard_bytes)
    target = check_output(Path(_local(output, "the output")), force=force)
    old = Manifest.open(Path(_local(base, "the base"))) if base is not None else None

    notices = Notices()
    listing, named = _list(source, notices, target)
    form, listing = choose(listing, format, notices)
    warn_of_splits(listing, form, notices)
    meter = Meter(progress or NoProgress())
    meter.progress.start(listing.total_bytes)
    samples, found = _read(form, listing, meter, notices, selection)
    if not listing.single and form in ("webdataset", "parquet"):
        name_plainly(samples, listing)
    if not len(samples):
        raise BadRequest(f"{named} holds no samples in format {form}")
    if limit_bytes is None and old is not None:
        limit_bytes = old.header.shard_bytes
    header = Header(FORMAT_VERSION, _layout(layout, form, old), limit_bytes or 0, form, listing.base, found, name)
    if old is not None:
        check_base(old, header)
    assembled = assemble(samples, listing, header, old)
    del samples, listing
    if old is not None and assembled.left_shards:
        notices.add(
            "shards of the base not kept, since samples in them are gone", str(old.path), count=assembled.left_shards
        )
    check_output(target, force=force)  # hours may have passed
    write_manifest(target, assembled.parts)
    reused = assembled.reused_shards
    del assembled  # before the manifest is read and checked: its content is in memory once
    manifest = Manifest.open(target)
    return Report(
        manifest=target,
        name=manifest.header.name,
        digest=str(manifest.digest),
        format=form,
        layout=header.layout,
        shard_bytes=manifest.header.shard_bytes,
        samples=len(manifest),
        distinct=len(manifest.tables.offsets),
        shards=manifest.shard_count,
        bytes=manifest.total_bytes,
        reused_shards=reused,
        warnings=notices.all(),
    )


def _list(
    source: str | PathLike[str] | Sequence[str | PathLike[str]], notices: Notices, target: Path
) -> tuple[Listing, str]:
    """Return the objects of the source, and a name for it."""
    if isinstance(source, (str, PathLike)):
        return list_source(os.fspath(source), notices, target), os.fspath(source)
    names = [os.fspath(one) for one in source]
    if not names:
        raise Misconfigured("no source is named")
    if len(names) == 1:
        return list_source(names[0], notices, target), names[0]
    return list_files(names), f"{names[0]} … {names[-1]}"


def _read(
    form: SourceFormat, listing: Listing, meter: Meter, notices: Notices, selection: Selection
) -> tuple[Samples, tuple[Field, ...]]:
    objects = open_objects(listing.base, meter)
    try:
        if listing.base.startswith("http"):
            _require_ranges(form, listing, objects)
        if form == "webdataset":
            from quiver_client.indexing.webdataset import index_tars

            return index_tars(listing, objects, meter, notices, selection)
        if form == "parquet":
            from quiver_client.indexing.parquet import index_parquet

            return index_parquet(listing, objects, meter, notices, selection)
        blob, label = ("image", ["label"]) if form == "imagefolder" else ("data", [])
        selection.check([blob, *label], listing.base)
        if not selection.takes(blob):
            raise Misconfigured(f"field {blob!r} holds the bytes, and without it there is nothing to cache")
        return index_files(listing, objects, meter, blob, labels=bool(label) and selection.takes("label"))
    finally:
        objects.close()


def _require_ranges(form: SourceFormat, listing: Listing, objects: Objects) -> None:
    """Any HTTP server can serve small whole files; parts of files need one that answers byte ranges."""
    largest = listing.object(int(np.argmax(listing.sizes)))
    if isinstance(objects, RemoteObjects) and (form in ("webdataset", "parquet") or largest.size > RUN_BYTES_MAX):
        objects.require_ranges(largest)


def _layout(asked: str, form: SourceFormat, base: Manifest | None) -> Layout:
    if asked == "auto":
        if base is not None:
            return base.header.layout
        return "mixed" if form in ("files", "imagefolder") else "sequential"
    return "mixed" if asked == "mixed" else "sequential"


def _shard_bytes(asked: str | int) -> int:
    limit_bytes = parse_size(asked)
    if not SHARD_BYTES_MIN <= limit_bytes <= SHARD_BYTES_MAX:
        raise Misconfigured(
            f"a shard size of {asked} is outside {format_size(SHARD_BYTES_MIN)} to {format_size(SHARD_BYTES_MAX)}"
        )
    return limit_bytes


def _local(path: str | PathLike[str], what: str) -> str:
    scheme, rest = split_url(os.fspath(path))
    if scheme != "file":
        raise Misconfigured(f"{what} {os.fspath(path)} must be a local file; copy it from or to the store")
    return rest
