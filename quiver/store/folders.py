"""The folders of a store, which somebody may delete while it is in use: they are made again, on the same disk.

If the disk that they were on is not mounted any more, they are not made: they would fill another disk.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from quiver.errors import DiskFailed
from quiver.store.inventory import Kind

PRIVATE_MODE: Final = 0o700
NAMES: Final = (*(str(kind) for kind in Kind), "tmp", "quarantine")


class Folders:
    """The folders below ``root``. ``private``: only this user may enter them."""

    def __init__(self, root: Path, *, private: bool = False) -> None:
        self._root = root
        self._private = private
        self._device = _device_of(root)  # the disk that they are on

    def make(self) -> None:
        """Make those that are missing. Raises ``OSError``."""
        for name in NAMES:
            (self._root / name).mkdir(parents=True, exist_ok=True)
            if self._private:
                (self._root / name).chmod(PRIVATE_MODE)  # also of one that was made before the store was private

    def remake(self) -> bool:
        """Make those that somebody deleted; return whether there were any. Raises ``OSError``, ``DiskFailed``."""
        if all((self._root / name).is_dir() for name in NAMES):
            return False
        if _device_of(self._root) != self._device:
            raise DiskFailed(f"the disk of {self._root} is not mounted any more; mount it again")
        self.make()
        return True


def _device_of(path: Path) -> int:
    """Return the disk that a path is on, or would be made on."""
    for each in (path, *path.parents):
        with contextlib.suppress(FileNotFoundError):
            return os.stat(each).st_dev
    return -1
