"""Detects the format of a source, and which of its objects are data in that format.

Nothing is skipped silently: a README beside tars is no sample, but the report names it.
"""

from __future__ import annotations

import re
from typing import Final, Literal, cast

import numpy as np
import numpy.typing as npt

from quiver.errors import BadRequest
from quiver.manifest.schema import SourceFormat
from quiver.origin.base import split_url
from quiver_client.indexing.objects import Listing
from quiver_client.indexing.report import Notices

Format = Literal["auto", "files", "imagefolder", "webdataset", "parquet"]

# The extensions of torchvision's ImageFolder, and newer image formats.
IMAGE_SUFFIXES: Final = (
    *(".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"),
    *(".gif", ".jfif", ".jp2", ".avif", ".heic", ".jxl"),
)
TAR_SUFFIXES: Final = (".tar",)
PACKED_TAR_SUFFIXES: Final = (
    ".tgz",
    ".tbz2",
    ".txz",
    ".tar.gz",
    ".tar.bz2",
    ".tar.xz",
    ".tar.zst",
    ".tar.lz4",
    ".tar.z",
)
PARQUET_SUFFIXES: Final = (".parquet", ".parq", ".pq")

SPLITS: Final = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_SPLIT_ENDS: Final = re.compile(r"[-_.0-9]")

OTHER, TAR, PACKED, PARQUET, IMAGE, TOP_IMAGE = range(6)


def choose(listing: Listing, asked: Format, notices: Notices) -> tuple[SourceFormat, Listing]:
    """Return the format, and the objects that are data in it."""
    kinds = _kinds(listing)
    form = asked if asked != "auto" else _detect(listing, kinds, notices)
    if form == "files":
        return form, listing
    if form == "imagefolder":
        return form, _images(listing, kinds, notices)
    kind, suffixes = (TAR, TAR_SUFFIXES) if form == "webdataset" else (PARQUET, PARQUET_SUFFIXES)
    packed = np.flatnonzero(kinds == PACKED)
    if form == "webdataset" and len(packed):
        raise BadRequest(
            f"{_path(listing, packed[0])} is compressed, and samples inside it cannot be read by byte ranges;"
            " decompress the tars and index again"
        )
    if listing.single:
        return form, listing
    return form, _only(listing, kinds == kind, form, suffixes, notices)


def warn_of_splits(listing: Listing, form: SourceFormat, notices: Notices) -> None:
    """Warn if splits that belong apart, such as train and test, would become one dataset.

    Splits are recognised by name: top folders, and for tars and Parquet files the beginning of the file name.
    """
    splits: dict[str, str] = {}
    for _, paths in listing.blocks():
        for path in paths:
            top, slash, _ = path.partition("/")
            name = top if slash else _SPLIT_ENDS.split(top, 1)[0] if form in ("webdataset", "parquet") else ""
            if (split := SPLITS.get(name.lower())) is not None:
                splits.setdefault(split, name)
    if len(splits) > 1:
        notices.add(
            "parts that look like train and test sets become one dataset; to keep them apart index each by itself:"
            f" {', '.join(_alone(listing, name, form) for name in splits.values())}",
            *splits.values(),
        )


def _alone(listing: Listing, name: str, form: SourceFormat) -> str:
    folder = any(path.startswith(f"{name}/") for _, paths in listing.blocks() for path in paths)
    base = split_url(listing.base)[1] if listing.local else listing.base
    return base + (f"{name}/" if folder else f"{name}-*{'.tar' if form == 'webdataset' else '.parquet'}")


def _detect(listing: Listing, kinds: npt.NDArray[np.uint8], notices: Notices) -> SourceFormat:
    """Return the format of most objects, or of most bytes if those are tars or Parquet files."""
    tars = (kinds == TAR) | (kinds == PACKED)
    for form, mask in (("webdataset", tars), ("parquet", kinds == PARQUET)):
        held = float(listing.sizes[mask].sum()) > listing.total_bytes / 2 and not (kinds >= IMAGE).any()
        if mask.sum() * 2 > len(kinds) or held:
            return cast(SourceFormat, form)
    if listing.single or not (kinds == IMAGE).any():
        return "files"
    top = np.flatnonzero(kinds == TOP_IMAGE)
    if len(top):
        notices.add(
            "images outside any class folder, so all was indexed as plain files without labels;"
            " --format imagefolder leaves them out and makes labels",
            *(_path(listing, at) for at in top[:100]),
            count=len(top),
        )
        return "files"
    return "imagefolder"


def _images(listing: Listing, kinds: npt.NDArray[np.uint8], notices: Notices) -> Listing:
    if not (kinds == IMAGE).any():
        raise BadRequest(
            f"{listing.base} has no folders of images, one for each class; for files without labels use --format files"
        )
    _leave_out(listing, kinds == TOP_IMAGE, "left out, images outside any class folder", notices)
    _leave_out(listing, kinds < IMAGE, "left out, not images by their names", notices)
    return listing.only(np.flatnonzero(kinds == IMAGE))


def _only(
    listing: Listing, mask: npt.NDArray[np.bool_], form: str, suffixes: tuple[str, ...], notices: Notices
) -> Listing:
    if not mask.any():
        raise BadRequest(f"{listing.base} holds no file that ends in {suffixes[0]}, which --format {form} takes")
    _leave_out(listing, ~mask, f"left out, names do not end in {suffixes[0]}", notices)
    return listing.only(np.flatnonzero(mask))


def _leave_out(listing: Listing, mask: npt.NDArray[np.bool_], what: str, notices: Notices) -> None:
    rows = np.flatnonzero(mask)
    if len(rows):
        notices.add(what, *(_path(listing, at) for at in rows[:1000]), count=len(rows))


def _kinds(listing: Listing) -> npt.NDArray[np.uint8]:
    kinds = np.empty(len(listing), np.uint8)
    for first, paths in listing.blocks():
        kinds[first : first + len(paths)] = [_kind(path) for path in paths]
    return kinds


def _kind(path: str) -> int:
    name = path.lower()
    if name.endswith(IMAGE_SUFFIXES):
        return IMAGE if "/" in path else TOP_IMAGE
    if name.endswith(TAR_SUFFIXES):
        return TAR
    if name.endswith(PACKED_TAR_SUFFIXES):
        return PACKED
    return PARQUET if name.endswith(PARQUET_SUFFIXES) else OTHER


def _path(listing: Listing, number: int) -> str:
    return cast(str, listing.paths[int(number)].as_py())
