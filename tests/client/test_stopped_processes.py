"""Processes that are stopped while they hold a lock of a folder that others use: those go on, and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from quiver.errors import OverCapacity
from quiver.store import Kind, Store, idle_of, put_with_room
from quiver.store.locks import LOCK_SECONDS_MAX
from quiver_client import Dataset
from quiver_client.embedded.fill_locks import STALE_SECONDS
from quiver_client.embedded.tier import EmbeddedTier
from tests.store.test_store import shard_of
from tests.support.data import Files
from tests.support.waiting import until

Make = Callable[..., Dataset]

# The promise is one second; the machine that runs this may be busy.
PATIENCE_SECONDS = 5.0
MIB = 1 << 20
HOLDER = """
    import os, pathlib, signal, sys
    from quiver.store import Store

    with Store.open(pathlib.Path(sys.argv[1]), 1 << 30, shared=True).inventory.locked():
        print("held", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    print("released", flush=True)
"""
FILLER = """
    import os, signal, sys, time
    from quiver.origin.samples import Counted
    from quiver_client import Dataset

    def stopped(origin, blobs, out):
        print("fills", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        return read(origin, blobs, out)

    manifest, cache, number = sys.argv[1:]
    read, Counted.read = Counted.read, stopped
    ds = Dataset(manifest, cache)
    print(len(ds[int(number)]["image"]), flush=True)
    ds.close()
"""


@contextlib.contextmanager
def stopped(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run a script that stops itself once it has said that it holds something."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline(), "it ended"
        until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def resume(process: subprocess.Popen[str]) -> str:
    """Let it go on to its end; return what it printed."""
    process.send_signal(signal.SIGCONT)
    assert process.stdout is not None
    printed = process.stdout.read()
    assert process.wait(30) == 0
    return printed


def timed(work: Callable[[], object]) -> float:
    begun = time.monotonic()
    work()
    return time.monotonic() - begun


@pytest.mark.fault("C7")
def test_what_is_waited_for_a_stopped_process_is_less_than_a_second_in_all() -> None:
    assert LOCK_SECONDS_MAX + STALE_SECONDS < 1


@pytest.mark.fault("C7")
def test_a_stopped_process_that_holds_the_folder_holds_nobody_up(dataset: Make, files: Files, tmp_path: Path) -> None:
    cache = f"file://{tmp_path}/cache"
    made = dataset(files.manifest, cache)
    with stopped(HOLDER, tmp_path / "cache") as holder:
        waits = [timed(lambda at=at: made[at]) for at in range(0, len(made), 5)]  # type: ignore[misc]
        assert max(waits) < PATIENCE_SECONDS
        assert sum(waits) < 3 * PATIENCE_SECONDS, "it is waited for once, and not at every fill"
        samples = made.__getitems__(range(len(made)))
        assert made.stats()["fills"] == made.manifest.shard_count, "and nothing is read past the cache"
        assert timed(lambda: dataset(files.manifest, cache).close()) < PATIENCE_SECONDS
        assert resume(holder) == "released\n"
    assert [sample["image"] for sample in samples] == files.expected([made.manifest.key(i) for i in range(len(made))])
    tier = cast(EmbeddedTier, made._open().tiers[0])
    assert tier.store.resident_bytes() == int(made.manifest.tables.shard_sizes.sum())


@pytest.mark.fault("O2")
def test_a_stopped_filler_is_not_waited_for_and_its_shard_is_read_by_another(
    dataset: Make, files: Files, tmp_path: Path
) -> None:
    cache = f"file://{tmp_path}/cache"
    made = dataset(files.manifest, cache)
    with stopped(FILLER, files.manifest, cache, 0) as filler:
        assert timed(lambda: made[0]) < PATIENCE_SECONDS
        assert made[0]["image"] == files.content[made.manifest.key(0)]
        stats = made.stats()
        assert (stats["fills"], stats["samples_origin"]) == (1, 0), "it is resident"
        assert int(resume(filler)) == len(files.content[made.manifest.key(0)])
    tier = cast(EmbeddedTier, made._open().tiers[0])
    until(lambda: not tier.filler.locks.under_way())
    shard = int(made.manifest.tables.shard_sizes[tier._mapped._maps.mapped()[0][0]])
    assert tier.store.resident_bytes() == shard, "what was reserved twice is held once"


def test_who_fills_for_long_is_waited_for_as_long_as_it_lives(dataset: Make, files: Files, tmp_path: Path) -> None:
    one, other = (dataset(files.manifest, f"file://{tmp_path}/cache") for _ in range(2))
    begun, go_on = threading.Event(), threading.Event()
    origin = one._open().origin()
    read = origin.read

    def slow(blobs: list[int], out: memoryview) -> int:
        begun.set()
        assert go_on.wait(30)
        return read(blobs, out)

    origin.read = slow  # type: ignore[method-assign, assignment]
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda each=each: results.append(each[0]["image"])) for each in (one, other)]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    threads[1].join(1.5)  # longer than it waits for one that is stopped
    waited = threads[1].is_alive()
    go_on.set()
    for thread in threads:
        thread.join()
    assert waited
    assert results == [files.content[one.manifest.key(0)]] * 2
    assert (one.stats()["fills"], other.stats()["fills"]) == (1, 0)
    assert other.stats()["bytes_origin"] == 0


@pytest.mark.fault("C7")
def test_the_capacity_holds_while_nobody_gets_the_lock(tmp_path: Path) -> None:
    script = """
        import pathlib, sys
        from quiver.errors import OverCapacity
        from quiver.store import Kind, Store
        from tests.store.test_store import shard_of
        store = Store.open(pathlib.Path(sys.argv[1]), 1 << 20, shared=True)
        for i in range(30):
            digest, data = shard_of(i + 100 * int(sys.argv[2]), 40_000)
            try:
                store.put(Kind.SHARD, digest, data)
            except OverCapacity:
                continue
            assert bytes(store.load(digest, len(data))) == data
    """
    root = tmp_path / "store"
    store = Store.open(root, MIB, shared=True)
    with stopped(HOLDER, root):
        command = [sys.executable, "-c", textwrap.dedent(script), str(root)]
        writers = [subprocess.Popen([*command, str(number)]) for number in range(2)]
        most = 0
        while any(writer.poll() is None for writer in writers):
            held = sum(path.stat().st_size for path in (root / "shards").rglob("??/*"))
            most = max(most, held)
        assert [writer.returncode for writer in writers] == [0, 0]
        assert MIB * 3 // 4 < most <= MIB
        with pytest.raises(OverCapacity):
            put_with_room(store, Kind.SHARD, *shard_of(1000, MIB // 2), idle_of(store, lambda digest: True))
        assert store.resident_bytes() <= MIB
        assert not list((root / "tmp").iterdir())
    store.close()


@pytest.mark.fault("C7", "E8")
def test_a_worker_that_outlives_its_parent_keeps_no_lock(tmp_path: Path) -> None:
    store = Store.open(tmp_path, MIB, shared=True)
    read_end, write_end = os.pipe()
    parent = os.fork()
    if parent == 0:
        with store.inventory.locked(), store.reserve(Kind.SHARD, *_named(1)):
            if os.fork() == 0:  # which lives on until its grandparent is done
                os.close(write_end)
                os.read(read_end, 1)
            os._exit(0)  # with no word to the locks
    os.waitpid(parent, 0)
    try:
        begun = time.monotonic()
        with store.inventory.locked():
            assert not store.inventory._lock._is_stuck  # type: ignore[attr-defined]
        assert time.monotonic() - begun < PATIENCE_SECONDS
        assert store.resident_bytes() == 0, "what the dead one had reserved is free"
    finally:
        os.close(write_end)
        os.close(read_end)
    store.close()


def _named(number: int) -> tuple[object, int]:
    digest, data = shard_of(number, 40_000)
    return digest, len(data)
