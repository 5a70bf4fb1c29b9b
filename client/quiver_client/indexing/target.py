"""Where a manifest may be written: never over anything but another manifest."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from quiver.errors import DiskFailed, Misconfigured, NotFound, QuiverError
from quiver.manifest import Manifest


def check_output(path: Path, *, force: bool) -> Path:
    """Return the file to write the manifest to: ``path``, or the target of a symbolic link.

    Raises ``Misconfigured`` for a folder, a device, a file that is not a manifest, and for a manifest unless ``force``;
    ``NotFound`` and ``DiskFailed`` if the file cannot be created. So it fails before hours of reading, not after.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise Misconfigured(f"{path} is a folder; name a file, for example {path / 'dataset.quiver'}")
    if not target.parent.is_dir():
        raise NotFound(f"there is no folder {target.parent}; make it first")
    if not os.access(target.parent, os.W_OK):
        raise DiskFailed(f"cannot write in {target.parent}; choose another folder for the manifest")
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return target
    if not stat.S_ISREG(mode):
        raise Misconfigured(f"{path} is no regular file; name one for the manifest")
    try:
        Manifest.open(target)
    except QuiverError as error:
        raise Misconfigured(
            f"{path} already exists and cannot be read as a manifest ({error}); other files are never overwritten:"
            " choose another name, or remove it"
        ) from error
    if not force:
        raise Misconfigured(f"{path} already exists; choose another name, or overwrite it with --force")
    return target
