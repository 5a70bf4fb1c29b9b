"""What the tests of disks share: the library that fails file-system calls, built once, and disks that are limited."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.disk.faultfs import Control, library

Mount = Callable[..., Path]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, compiled."""
    return library(tmp_path_factory.mktemp("faultfs"))


@pytest.fixture
def control(built: Path, tmp_path: Path) -> Control:
    """What the processes that are started with its ``environment`` obey."""
    folder = tmp_path / "faultfs"
    folder.mkdir()
    (folder / built.name).symlink_to(built)
    return Control(folder)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mount file systems in memory, limited by the options that are given; skips where that is not allowed."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        if os.geteuid() != 0:
            pytest.skip("only root may mount a file system")
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=False, capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)
