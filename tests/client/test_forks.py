"""Processes that are forked while others of their threads hash, import, fill, map, tell needs and hold locks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quiver import forks
from quiver.digest import Bytes, Digest
from quiver.manifest import Manifest
from quiver_client import index
from quiver_client.indexing.reading import PIECE_BYTES
from tests.support.data import Files, random_files, write_files
from tests.support.scripts import Script

CHILD_SECONDS_MAX = 20
FORKS = 20  # of each kind
UNDER_LOAD = """
    import os, random, signal, sys, threading, time
    import numpy as np
    from pathlib import Path
    from quiver.digest import Digest
    from quiver.residency import ConsumerReport
    from quiver_client import DataLoader, Dataset

    manifest, cache, large, count, seconds = sys.argv[1:]
    ds = Dataset(manifest, cache)
    loader = DataLoader(ds, batch_size=8, shuffle=True)
    ended, errors = threading.Event(), []

    def work(once):
        try:
            while not ended.is_set():
                once()
        except BaseException as error:
            errors.append(error)

    def train():
        for _ in loader:
            if ended.is_set():
                break

    def open_and_close():
        other = Dataset(manifest, cache)
        other[random.randrange(len(other))]
        other.close()

    def child():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(seconds))  # a child that hangs is killed
        rng = np.random.default_rng(os.getpid())
        assert Digest.of(Path(large).read_bytes()) == digest
        for _ in range(3):
            rows = rng.integers(0, len(ds), 8).tolist()
            assert [sample["__key__"] for sample in fresh.__getitems__(rows)] == fresh.manifest.keys(np.array(rows))
            assert ds.__getitems__(rows)
        left = np.full(ds.manifest.shard_count, 255, np.uint8)
        needs = ds.needs()
        needs.report(ConsumerReport(os.urandom(16), left, 0.0, 0.0, 5.0))
        needs.close()

    fresh = Dataset(manifest, cache, fields=["__key__", "image"])
    digest = Digest.of(Path(large).read_bytes())
    hashing = lambda: Digest.of(Path(large).read_bytes())
    threads = [threading.Thread(target=work, args=(once,)) for once in (train, open_and_close, hashing)]
    for thread in threads:
        thread.start()
    running, statuses = [], []
    for _ in range(int(count)):
        time.sleep(random.uniform(0, 0.02))
        pid = os.fork()
        if pid == 0:
            try:
                child()
                os._exit(0)
            except BaseException as error:
                print(repr(error), flush=True)
                os._exit(1)
        running.append(pid)
        while len(running) >= 3:
            statuses.append(os.waitpid(running.pop(0), 0)[1])
    statuses += [os.waitpid(pid, 0)[1] for pid in running]
    ended.set()
    for thread in threads:
        thread.join()
    loader.close()
    print("statuses", sorted(set(statuses)), errors, flush=True)
"""
IMPORTS = """
    import sys, threading

    main, found = threading.main_thread(), []

    def hook(event, args):
        if event == "import" and threading.current_thread() is not main:
            found.append((threading.current_thread().name, args[0]))

    from quiver_client import DataLoader, Dataset

    sys.addaudithook(hook)
    threads = set()
    for manifest in sys.argv[2:]:  # what needs least comes first
        for substitute in (True, False):
            ds = Dataset(manifest, sys.argv[1])
            loader = DataLoader(ds, batch_size=8, shuffle=True, substitute=substitute)
            assert sum(len(batch["image"]) for batch in loader) == len(ds)
            threads |= {thread.name for thread in threading.enumerate()}
            loader.close()
            ds.close()
    assert any("fill" in name for name in threads), threads
    print(found)
"""


def parquet_of(where: Path, content: dict[str, bytes]) -> Path:
    """Index the content as a Parquet file of several row groups."""
    pq.write_table(pa.table({"image": list(content.values())}), where / "data.parquet", row_group_size=10)
    index(where / "data.parquet", where / "parquet.quiver", shard_bytes="64KiB")
    return where / "parquet.quiver"


def in_child(work: Callable[[], object]) -> None:
    """Do something in a forked child, and fail if it raises or does not end."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest has a handler, which a thread that hangs does not run
        signal.alarm(CHILD_SECONDS_MAX)
        try:
            work()
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - the exit status says it
            sys.stderr.write(repr(error))
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert not os.WIFSIGNALED(status), "the child hangs"
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.fault("E8")
def test_a_child_hashes_after_its_parent_did(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "one").write_bytes(os.urandom(PIECE_BYTES + 1))
    index(tmp_path / "large", tmp_path / "first.quiver")
    in_child(lambda: index(tmp_path / "large", tmp_path / "second.quiver"))
    assert (tmp_path / "first.quiver").read_bytes() == (tmp_path / "second.quiver").read_bytes()


@pytest.mark.fault("E8")
def test_a_child_computes_what_a_thread_of_its_parent_was_computing(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, parent = threading.Event(), threading.Event(), os.getpid()
    expected = Digest.of(files.manifest.read_bytes())

    def slow(data: Bytes) -> Digest:
        if os.getpid() == parent:
            begun.set()
            go_on.wait()
        return expected

    monkeypatch.setattr(Digest, "of", slow)
    first, second = Manifest.open(files.manifest), Manifest.open(files.manifest)
    thread = threading.Thread(target=lambda: first.digest)
    thread.start()
    try:
        assert begun.wait(10)
        in_child(lambda: (first.digest, second.digest) == (expected, expected) or os._exit(2))
    finally:
        go_on.set()
        thread.join()
    assert first.digest is first.digest is expected


@pytest.mark.fault("E8")
def test_locks_that_threads_hold_are_free_in_a_child() -> None:
    lock, rlock, condition, event = forks.lock(), forks.rlock(), forks.condition(), forks.event()
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with lock, rlock, condition, event._cond:
            held.set()
            release.wait()

    def take() -> None:
        with lock, rlock, condition:
            event.set()
            condition.notify_all()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(10)
        in_child(take)
        assert not lock.acquire(blocking=False), "the parent's is as it was"
    finally:
        release.set()
        thread.join()


@pytest.mark.fault("E8")
def test_no_thread_of_a_session_imports_anything(tmp_path: Path) -> None:
    content = random_files(60, high=5_000)
    write_files(tmp_path / "files", content)
    index(tmp_path / "files", tmp_path / "files.quiver", shard_bytes="64KiB")
    parquet = parquet_of(tmp_path, content)
    command = [sys.executable, "-c", textwrap.dedent(IMPORTS), f"file://{tmp_path}/cache"]
    ended = subprocess.run(
        [*command, str(tmp_path / "files.quiver"), str(parquet)], capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.returncode) == ("[]\n", 0), ended.stderr


@pytest.mark.fault("E4", "E8")
@pytest.mark.parametrize("kind", ["files", "parquet"])
def test_children_forked_at_any_moment_under_load_read_hash_fill_and_end(
    files: Files, tmp_path: Path, kind: str
) -> None:
    manifest = files.manifest if kind == "files" else parquet_of(tmp_path, files.content)
    capacity = int(Manifest.open(manifest).tables.shard_sizes.sum()) // 2  # so that there is always something to fill
    cache = f"file://{tmp_path}/cache?capacity={capacity}"
    large = tmp_path / "large"
    large.write_bytes(os.urandom(2 << 20))
    script = Script(
        textwrap.dedent(UNDER_LOAD), [manifest, cache, large, FORKS, CHILD_SECONDS_MAX], tmp_path / "printed"
    )
    try:
        code = script.wait(90)
    finally:
        script.kill()
    assert (code, script.lines()) == (0, ["statuses [0] []"])
