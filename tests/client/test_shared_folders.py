"""Who may use a cache's folder: a daemon alone, processes together, users of a group, readers of a warmed one."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from quiver.errors import Misconfigured
from quiver_client import Dataset
from tests.support.daemon import Daemon
from tests.support.data import Files, make_files, random_files

Make = Callable[..., Dataset]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
GROUP = 4242
CHILD_SECONDS_MAX = 60


def as_user(uid: int, work: Callable[[], object], *, umask: int = 0o002) -> None:
    """Do something in a child that is this user, of a group that all of them share; fail if it raises."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest has a handler, which a thread that hangs does not run
        signal.alarm(CHILD_SECONDS_MAX)
        try:
            os.setgroups([GROUP])
            os.setgid(uid)
            os.setuid(uid)
            os.umask(umask)
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the exit status says it
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def open_to_all(folder: Path) -> Path:
    """Let every user come as far as this folder: those above it are pytest's, for one user alone."""
    for path in (folder, *folder.parents):
        if path.stat().st_mode & 0o005 != 0o005:
            path.chmod(path.stat().st_mode | 0o055)
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Files:
    open_to_all(tmp_path)
    return make_files(tmp_path, random_files(40, high=5_000), shard_bytes="16KiB")


@pytest.fixture
def group_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    os.chown(folder, 0, GROUP)
    folder.chmod(0o2770)
    return folder


def read_all(files: Files, cache: Path, capacity: str = "1GiB") -> dict[str, int]:
    """Read everything through a cache, in a process or as a user of its own; return the counters."""
    with contextlib.closing(Dataset(files.manifest, f"file://{cache}?capacity={capacity}")) as ds:
        keys = [ds.manifest.key(at) for at in range(len(ds))]
        assert [sample["image"] for sample in ds.__getitems__(range(len(ds)))] == files.expected(keys)
        return ds.stats()


def test_a_client_on_the_folder_of_a_running_daemon_is_told_its_address(
    files: Files, tmp_path: Path, dataset: Make
) -> None:
    with Daemon(tmp_path / "data", origins=[files.folder]) as daemon:
        cache = f"file://{daemon.data_dir}"
        with pytest.raises(Misconfigured, match=f'{daemon.data_dir} is the folder of a running daemon.*"{daemon.url}"'):
            dataset(files.manifest, cache)
        assert daemon.stop() == 0
    made = dataset(files.manifest, cache)
    assert made[0]["image"] == files.content[made.manifest.key(0)]


def test_a_daemon_does_not_start_on_a_folder_that_jobs_use(files: Files, tmp_path: Path, dataset: Make) -> None:
    made = dataset(files.manifest, f"file://{tmp_path}/cache")
    made[0]
    refused = Daemon(tmp_path / "cache", origins=[files.folder])
    refused.start()
    assert refused.wait() == 1
    assert "running jobs have it as an embedded cache" in refused.log
    assert "Traceback" not in refused.log
    made.close()
    with Daemon(tmp_path / "cache", origins=[files.folder]) as daemon:
        assert daemon.status()["shards"] == 1, "and what they filled is there"


def test_a_child_that_does_nothing_keeps_no_daemon_from_starting(files: Files, tmp_path: Path, dataset: Make) -> None:
    made = dataset(files.manifest, f"file://{tmp_path}/cache")
    made[0]
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        made.close()
        with Daemon(tmp_path / "cache", origins=[files.folder]):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@needs_root
def test_users_of_a_group_fill_and_evict_in_one_folder(small: Files, group_folder: Path) -> None:
    shards = small.opened().shard_count

    def first() -> None:
        assert read_all(small, group_folder)["fills"] == shards

    def second() -> None:
        stats = read_all(small, group_folder)
        assert (stats["fills"], stats["bytes_origin"], stats["misses_host"]) == (0, 0, 0)
        for path in (group_folder / "shards").rglob("??/*"):
            os.utime(path)  # as a read does now and then, so that what others read stays
        victim = next((group_folder / "shards").rglob("??/*"))
        victim.unlink()
        assert read_all(small, group_folder)["fills"] == 1

    def third() -> None:
        (group_folder / "tmp" / "1.left").touch()
        half = str(int(small.opened().tables.shard_sizes.sum()) // 2)
        read_all(small, group_folder, half)
        held = sum(path.stat().st_size for path in (group_folder / "shards").rglob("??/*"))
        assert held <= int(half), "what another user filled is dropped for room"
        assert not list((group_folder / "tmp").iterdir())

    as_user(5001, first)
    as_user(5002, second)
    as_user(5003, third)
    as_user(5001, lambda: read_all(small, group_folder))


@needs_root
def test_a_folder_that_may_only_be_read_serves_what_it_has_and_nothing_is_written(
    small: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "warm"
    read_all(small, cache)
    lost = next((cache / "shards").rglob("??/*"))
    lost.unlink()
    for path in (cache, *cache.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted((path, path.stat().st_mtime_ns) for path in cache.rglob("*"))

    def read() -> None:
        from quiver_client import DataLoader

        stats = read_all(small, cache)
        assert (stats["fills"], stats["misses_host"], stats["corruptions"]) == (0, 1, 0)
        assert stats["bytes_host"] > stats["bytes_origin"] > 0
        (said,) = {record.getMessage() for record in caplog.records}
        assert "is read-only" in said
        with contextlib.closing(Dataset(small.manifest, f"file://{cache}?capacity=1GiB")) as ds:
            loader = DataLoader(ds, batch_size=8, shuffle=True, seed=1)
            assert sum(len(batch["image"]) for batch in loader) == len(ds)
            loader.close()
        assert {record.getMessage() for record in caplog.records} == {said}

    as_user(5001, read)
    assert sorted((path, path.stat().st_mtime_ns) for path in cache.rglob("*")) == before
