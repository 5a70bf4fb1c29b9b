"""Disks that cannot be read while shards are mapped and sent: samples come from elsewhere, no signal ends a process."""

from __future__ import annotations

import errno
import signal
from pathlib import Path

import pytest

from tests.chaos import validators
from tests.chaos.disk.bad_blocks import bad_blocks, forget
from tests.chaos.disk.faultfs import Control, Op
from tests.chaos.disk.job import WAIT_SECONDS_MAX, shop
from tests.chaos.history import Client, Job
from tests.chaos.rack import chaos_files
from tests.support.data import Files
from tests.support.waiting import until

pytestmark = pytest.mark.chaos


@pytest.fixture
def data(tmp_path: Path) -> Files:
    """120 samples in about fifteen shards: less than a MiB."""
    return chaos_files(tmp_path / "files", 120)


@pytest.mark.fault("C4")
def test_a_daemon_that_cannot_read_its_disk_leaves_the_reading_to_others_until_it_can(
    data: Files, control: Control, tmp_path: Path
) -> None:
    control.root = tmp_path / "data"
    with shop(data, tmp_path, control.root, control.environment) as at:
        at.fill(at.manifest.shard_count)
        at.daemon.stop()  # what it starts with is verified first: by reads
        at.daemon.start()
        at.daemon.wait_until_serving()
        control.fail((Op.READ, Op.MAP), errno.EIO, path="/shards/")
        during = at.train()
        assert control.hits > 0
        assert during.stats["bytes_origin"] > 0
        control.heal()
        at.train()
        until(lambda: at.train().stats["bytes_origin"] == 0, 60, "it serves from its disk again")
        at.check_end()


@pytest.mark.fault("C4", "C8")
def test_a_daemon_whose_mapped_shards_cannot_be_read_any_more_serves_on(data: Files, tmp_path: Path) -> None:
    with bad_blocks(tmp_path) as disk, shop(data, tmp_path, disk.folder / "data") as at:
        at.fill(at.manifest.shard_count)
        assert at.train().stats["bytes_origin"] == 0
        assert at.daemon.process is not None
        shards = at.daemon.files("shards")
        disk.fail()
        forget(disk.folder / "data" / "shards", at.daemon.process.pid)
        assert all(map(disk.fails, shards)), "the fault really fired"
        during = at.train()
        assert during.stats["samples_origin"] > 0
        disk.heal()
        at.train()
        until(lambda: at.train().stats["bytes_origin"] == 0, 60, "it fills again what it had lost")
        at.check_end()


@pytest.mark.fault("C4", "C8")
def test_a_training_process_whose_mapped_shards_cannot_be_read_any_more_trains_on(data: Files, tmp_path: Path) -> None:
    manifest = data.opened()
    expected = validators.Expected.of(manifest, data.content)
    with bad_blocks(tmp_path) as disk:
        folder, stop = disk.folder / "cache", tmp_path / "stop"
        cache = f"file://{folder}?capacity=1GiB"
        job = Job("job", str(data.manifest), cache, epochs=1, until_file=str(stop), pause_seconds=0.01)
        with Client(job, tmp_path) as client:
            until(lambda: len(client.history().epochs) >= 2, 60)
            shards = [path for path in (folder / "shards").glob("*/*") if path.is_file()]
            assert len(shards) == manifest.shard_count
            client.signal(signal.SIGSTOP)
            disk.fail()
            forget(folder / "shards", client.script.pid)
            assert sum(map(disk.fails, shards)) > len(shards) // 2, "the fault really fired"
            client.signal(signal.SIGCONT)
            epochs = len(client.history().epochs)
            until(lambda: len(client.history().epochs) >= epochs + 2 or client.script.ended, 60)
            disk.heal()
            epochs = len(client.history().epochs)
            until(lambda: len(client.history().epochs) >= epochs + 2 or client.script.ended, 60)
            stop.touch()
            history = client.wait()
    validators.digests_are_right(history, expected)
    validators.epochs_are_exact([history], expected)
    validators.has_no_error(history)
    validators.no_wait_exceeds(history, WAIT_SECONDS_MAX)
    validators.log_is_clean("job", history.log, expected)
    assert history.stats["samples_origin"] > 0 or history.stats["fills"] > manifest.shard_count
