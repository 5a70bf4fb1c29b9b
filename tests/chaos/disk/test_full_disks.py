"""Disks that refuse files: full, out of inodes, read-only, failing.

Serving goes on, filling stops, says so, and recovers by itself. A mounted disk with files open for writing becomes
read-only by its own errors alone; so here calls fail as they do then, and ``tests/store`` remounts a disk at rest.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos import validators
from tests.chaos.disk.conftest import Mount
from tests.chaos.disk.faultfs import WRITING, Control, Op
from tests.chaos.disk.job import WAIT_SECONDS_MAX, Shop, shop
from tests.chaos.history import Client, Job
from tests.chaos.rack import chaos_files
from tests.support.data import Files
from tests.support.waiting import until

pytestmark = pytest.mark.chaos


@dataclass(frozen=True)
class Disk:
    """A disk that can be made to fail. ``fired``: whether it did."""

    folder: Path
    fail: Callable[[], object]
    heal: Callable[[], object]
    fired: Callable[[], bool]
    environment: dict[str, str] | None = None


def full(folder: Path) -> Disk:
    junk = folder / "junk"

    def fill() -> None:
        with contextlib.suppress(OSError), junk.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))

    return Disk(folder / "data", fill, junk.unlink, lambda: os.statvfs(folder).f_bavail < 16)


def without_inodes(folder: Path) -> Disk:
    junk = folder / "junk"

    def fill() -> None:
        junk.mkdir()
        with contextlib.suppress(OSError):
            for number in range(100_000):
                (junk / str(number)).touch()

    return Disk(folder / "data", fill, lambda: shutil.rmtree(junk), lambda: os.statvfs(folder).f_ffree < 4)


MOUNTED = {
    "full": (full, "size=8m"),
    "out of inodes": (without_inodes, "size=64m,nr_inodes=400"),
}
FAILING = {
    "EIO on write": ((Op.WRITE,), errno.EIO),
    "EIO on fsync": ((Op.FSYNC,), errno.EIO),
    "EIO on rename": ((Op.RENAME,), errno.EIO),
    "ENOSPC on allocation": ((Op.ALLOCATE,), errno.ENOSPC),
    "EROFS on everything that writes": (WRITING, errno.EROFS),
}


@pytest.fixture
def data(tmp_path: Path) -> Files:
    """120 samples in about fifteen shards: less than a MiB."""
    return chaos_files(tmp_path / "files", 120)


def fails_and_recovers(disk: Disk, at: Shop) -> None:
    """Half of the dataset is resident when the disk fails; the other half is read while it does."""
    half = at.manifest.shard_count // 2
    at.fill(half)
    kept = at.resident()
    assert disk.environment is not None or disk.fired() is False
    disk.fail()
    during = at.train()
    assert disk.fired()
    assert during.stats["samples_rack"] > 0, "what is held is served"
    assert during.stats["samples_origin"] > 0
    assert at.resident() == kept, "filling stops"
    status, said = at.readiness()
    assert status == 503
    assert "disk: cannot write" in said
    assert at.daemon.metric("quiver_disk_writable") == 0
    assert at.daemon.log.count("nothing can be cached") == 1
    disk.heal()
    until(lambda: at.readiness()[0] == 200, what="it recovers by itself")
    assert at.daemon.metric("quiver_disk_writable") == 1
    at.train()
    until(lambda: at.resident() == at.shard_bytes, what="it fills again")
    assert at.train().stats["bytes_origin"] == 0, "all is served from the disk again"
    at.check_end()


@pytest.mark.fault("C4")
@pytest.mark.parametrize("how", MOUNTED)
def test_a_daemon_whose_disk_takes_no_files_serves_on_and_fills_again_once_it_does(
    data: Files, mount: Mount, tmp_path: Path, how: str
) -> None:
    make, options = MOUNTED[how]
    disk = make(mount(options))
    with shop(data, tmp_path, disk.folder) as at:
        fails_and_recovers(disk, at)


@pytest.mark.fault("C4")
@pytest.mark.parametrize("how", FAILING)
def test_a_daemon_whose_disk_fails_serves_on_and_fills_again_once_it_works(
    data: Files, control: Control, tmp_path: Path, how: str
) -> None:
    ops, number = FAILING[how]
    control.root = tmp_path / "data"
    disk = Disk(
        control.root, lambda: control.fail(ops, number), control.heal, lambda: control.hits > 0, control.environment
    )
    with shop(data, tmp_path, disk.folder, control.environment) as at:
        fails_and_recovers(disk, at)


@pytest.mark.fault("C4")
@pytest.mark.parametrize("how", MOUNTED)
def test_a_training_process_whose_folder_takes_no_files_reads_on_and_fills_again_once_it_does(
    data: Files, mount: Mount, tmp_path: Path, how: str
) -> None:
    make, options = MOUNTED[how]
    disk = make(mount(options))
    cache = f"file://{disk.folder}?capacity=1GiB"
    manifest = data.opened()
    expected = validators.Expected.of(manifest, data.content)
    stop = tmp_path / "stop"
    job = Job("job", str(data.manifest), cache, epochs=1, until_file=str(stop), pause_seconds=0.01)
    shards = disk.folder / "shards"
    with Client(job, tmp_path) as client:
        until(lambda: any(shards.glob("*/*")))
        disk.fail()
        epochs = len(client.history().epochs)
        until(lambda: len(client.history().epochs) >= epochs + 2, 60)
        assert disk.fired()
        disk.heal()
        until(lambda: len(list(shards.glob("*/*"))) == manifest.shard_count, 60, "it fills again by itself")
        stop.touch()
        history = client.wait()
    validators.digests_are_right(history, expected)
    validators.epochs_are_exact([history], expected)
    validators.has_no_error(history)
    validators.no_wait_exceeds(history, WAIT_SECONDS_MAX)
    validators.log_is_clean("job", history.log, expected)
    assert "disk is full" in history.log, "it says so"
    assert not list((disk.folder / "tmp").iterdir())
