"""Files that somebody deletes, moves or puts into a daemon's folder while it serves: ignored, or filled again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.disk.job import shop
from tests.chaos.rack import chaos_files
from tests.support.data import Files
from tests.support.waiting import until

pytestmark = pytest.mark.chaos


@pytest.fixture
def data(tmp_path: Path) -> Files:
    """120 samples in about fifteen shards: less than a MiB."""
    return chaos_files(tmp_path / "files", 120)


def delete_shards(folder: Path) -> None:
    for path in (folder / "shards").glob("*/*"):
        path.unlink()


def delete_everything(folder: Path) -> None:
    shutil.rmtree(folder)


def move_everything(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


def put_strays_in_their_places(folder: Path) -> None:
    for number, path in enumerate(sorted((folder / "shards").glob("*/*"))):
        path.unlink()
        match number % 4:
            case 0:
                path.mkdir()
            case 1:
                path.symlink_to("/etc/hostname")
            case 2:
                os.mkfifo(path)
            case 3:
                path.write_bytes(b"")


@pytest.mark.fault("C3")
@pytest.mark.parametrize("lose", [delete_shards, delete_everything, move_everything, put_strays_in_their_places])
def test_what_is_taken_from_a_daemon_that_serves_is_filled_again(
    data: Files, tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    with shop(data, tmp_path, tmp_path / "node") as at:
        at.fill(at.manifest.shard_count)
        lose(at.daemon.data_dir)
        assert at.resident() < len(at.manifest.key(0)) * 10, "the fault really fired: nothing but a link"
        at.train()
        until(lambda: at.readiness()[0] == 200, what="it recovers by itself")
        until(lambda: at.train().stats["bytes_origin"] == 0, 60, "it serves everything again")
        assert at.resident() == at.shard_bytes
        assert at.daemon.metric("quiver_resident_bytes") == sum(
            path.stat().st_size for kind in ("shards", "manifests") for path in at.daemon.files(kind)
        )
        at.check_end()
