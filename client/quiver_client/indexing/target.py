"""Where a manifest may be written: over nothing that is anybody's data."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from quiver.errors import DiskFailed, Misconfigured, NotFound, QuiverError
from quiver.manifest import Manifest


def check_output(path: Path, *, force: bool) -> Path:
    """Return the file that a manifest is to be written to: itself, or what a link of that name stands for.

    Raises ``Misconfigured`` for a folder, a device, a file that is no manifest, and for a manifest unless ``force``;
    ``NotFound`` and ``DiskFailed`` where no file can be made. So what cannot work is refused before hours of reading.
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
            f"{path} is there already and is no manifest that can be read, and nothing else is written over"
            f" ({error}); choose another name, or remove it"
        ) from error
    if not force:
        raise Misconfigured(f"{path} is there already; choose another name, or write over it with --force")
    return target
