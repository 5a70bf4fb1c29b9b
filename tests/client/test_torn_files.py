"""Shards that become shorter while they are mapped: a read of what is gone is SIGBUS, which ends a process."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quiver.store import OpenFile
from quiver_client import Dataset, native
from quiver_client.buffers import Buffer, copy_each, copy_rows, xxh3_64
from tests.support.daemon import Daemon
from tests.support.data import Files, make_files
from tests.support.forking import FORKED
from tests.support.scripts import Script

READER = """
    import os, sys
    from pathlib import Path
    from quiver_client import Dataset, native

    manifest, cache, shards, folder, way, verify = sys.argv[1:]
    if way == "python":
        native.pieces = None

    def tear(size):
        for path in Path(shards).rglob("*"):
            if path.is_file() and len(path.name) == 64:
                os.truncate(path, size)

    def transform(sample):
        global torn
        if torn is not None:
            tear(torn)
            torn = None
        return sample

    torn = None
    dataset = Dataset(manifest, cache=cache, fields=["image", "__key__"], transform=transform, verify=verify)
    everything = list(range(len(dataset)))

    def read():
        for at in range(0, len(everything), 40):
            for sample in dataset.__getitems__(everything[at:at + 40]):
                assert sample["image"] == Path(folder, sample["__key__"]).read_bytes(), sample["__key__"]

    read()
    tear(5000)  # between two batches
    read()
    torn = 5000  # in the middle of a batch that was checked
    read()
    tear(0)
    read()
    counted = dataset.stats()
    assert counted["corruptions"] >= 1, counted
    print("all right", flush=True)
"""


def reads(files: Files, cache: str, shards: Path, log: Path, *more: str) -> None:
    script = Script(textwrap.dedent(READER), [files.manifest, cache, shards, files.folder, *more], log)
    try:
        assert (script.wait(60), script.lines()) == (0, ["all right"])
    finally:
        script.kill()


WAYS = [("native", "fast"), ("native", "full"), ("native", "off"), ("python", "fast"), ("python", "full")]


@pytest.mark.fault("C2", "C8")
@pytest.mark.parametrize(("way", "verify"), WAYS)
def test_a_shard_of_a_folder_may_become_shorter_under_its_reader(
    way: str, verify: str, files: Files, tmp_path: Path
) -> None:
    if way == "native" and native.pieces is None:
        pytest.skip("no native code was built where these tests run: it takes a C compiler")
    cache = tmp_path / "cache"
    reads(files, f"file://{cache}?capacity=1GiB", cache / "shards", tmp_path / "log", way, verify)


@pytest.mark.fault("C2", "C8")
def test_a_shard_that_a_daemon_passed_may_become_shorter_under_its_reader(files: Files, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Daemon(data, "--socket", str(tmp_path / "s"), origins=[files.folder]) as daemon:
        reads(files, daemon.url, data / "shards", tmp_path / "log", "native", "fast")


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "native" and native.pieces is None:
        pytest.skip("no native code was built where these tests run: it takes a C compiler")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":
            patch.setattr(native, "pieces", None)
        yield


@pytest.mark.fault("C8")
@pytest.mark.usefixtures("way")
def test_what_is_torn_is_told_and_the_rest_is_read(tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(6 * mmap.PAGESIZE)
    (tmp_path / "shard").write_bytes(content)
    torn, whole = Buffer.of(OpenFile(tmp_path / "shard").map(), mapped=True), Buffer.of(content)
    os.truncate(tmp_path / "shard", 2 * mmap.PAGESIZE)
    which, length = np.asarray([0, 0, 1, 0, 0]), mmap.PAGESIZE + 10
    starts = np.asarray([5 * mmap.PAGESIZE - 10, 0, 4 * mmap.PAGESIZE, 50, mmap.PAGESIZE])
    # Without native code, nothing is read of a file that is not whole.
    expected = [True, False, False, False, True] if native.pieces is not None else [True, True, False, True, True]
    rows, missed = copy_rows([torn, whole], which, starts, length)
    assert missed.tolist() == expected
    for row, start, gone in zip(rows, starts.tolist(), expected, strict=True):
        assert gone or row.tobytes() == content[start : start + length]
    hashes, missed = xxh3_64([torn, whole], which, starts, np.full(5, length))
    assert missed.tolist() == expected
    assert hashes[~missed].tolist() == xxh3_64([whole], which * 0, starts, np.full(5, length))[0][~missed].tolist()
    assert torn.copy(2 * mmap.PAGESIZE - 10, 2 * mmap.PAGESIZE + 10) is None


@pytest.mark.fault("C8")
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [5 * mmap.PAGESIZE - 100, 2 * mmap.PAGESIZE, 10, 0])
def test_small_pieces_that_are_torn_are_told_from_those_of_other_files(size: int, tmp_path: Path) -> None:
    """All of a file that is not whole are: what follows its new end in the page reads as zeros, without a fault."""
    content = np.random.default_rng(0).bytes(5 * mmap.PAGESIZE)
    for name in ("torn", "whole"):
        (tmp_path / name).write_bytes(content)
    buffers = [Buffer.of(OpenFile(tmp_path / name).map(), mapped=True) for name in ("torn", "whole")]
    which, starts = np.arange(500) * 7 % 5 % 2, np.arange(500) * 997 % (4 * mmap.PAGESIZE)
    lengths = np.arange(500) % 1500
    cuts = list(zip(which.tolist(), starts.tolist(), lengths.tolist(), strict=True))
    os.truncate(tmp_path / "torn", size)
    expected = [content[start : start + length] if at or not length else None for at, start, length in cuts]
    assert list(copy_each(buffers, which, starts, lengths)) == expected


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [3 * mmap.PAGESIZE - 100, 2 * mmap.PAGESIZE, 10, 0])
def test_no_bytes_are_taken_of_a_file_that_is_not_whole(size: int, tmp_path: Path) -> None:
    """What follows its new end in the page reads as zeros, without a fault."""
    content = np.random.default_rng(0).bytes(3 * mmap.PAGESIZE)
    (tmp_path / "shard").write_bytes(content)
    buffer = Buffer.of(OpenFile(tmp_path / "shard").map(), mapped=True)
    assert buffer.copy(5, 10) == content[5:10]
    os.truncate(tmp_path / "shard", size)
    assert buffer.copy(5, 10) is None
    assert not buffer.is_whole


@pytest.mark.fault("C8")
@pytest.mark.usefixtures("way")
def test_a_batch_that_was_checked_is_stacked_though_its_shard_becomes_shorter(tmp_path: Path) -> None:
    content = {f"a/{at:02}.bin": np.random.default_rng(at).bytes(20_000) for at in range(20)}
    files = make_files(tmp_path, content)
    dataset = Dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB")
    try:
        for _ in (1, 2):  # the second time, what is mapped is not what was written just now
            batch = dataset.read(np.arange(20))
        assert batch is not None
        for path in (tmp_path / "cache" / "shards").rglob("*"):
            if path.is_file():
                os.truncate(path, 0)
        rows = batch.rows(0)
        assert rows is not None
        assert [row.tobytes() for row in rows] == files.expected(list(dataset.manifest.keys(np.arange(20))))
    finally:
        dataset.close()


@pytest.mark.fault("C8")
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [0, 5000, -10])
@pytest.mark.parametrize("handed_out", [0, 1, 150])
def test_a_batch_of_small_samples_that_was_checked_is_copied_though_its_shards_become_shorter(
    handed_out: int, size: int, tmp_path: Path
) -> None:
    content = {f"a/{at:03}.bin": np.random.default_rng(at).bytes(3000 + 13 * (at * 7 % 300)) for at in range(300)}
    files = make_files(tmp_path, content)
    dataset = Dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB")
    try:
        rows = np.random.default_rng(0).permutation(300)
        for _ in (1, 2):  # the second time, what is mapped is not what was written just now
            batch = dataset.read(rows)
        assert batch is not None
        copies = batch.copies(0)
        found = [next(copies) for _ in range(handed_out)]
        for path in (tmp_path / "cache" / "shards").rglob("*"):
            if path.is_file():
                os.truncate(path, size if size >= 0 else path.stat().st_size + size)
        found += copies
        assert found == files.expected(list(dataset.manifest.keys(rows)))
        assert dataset.stats()["corruptions"] >= 1
    finally:
        dataset.close()


# -- others who handle SIGBUS -----------------------------------------------------------------------------------------


def _faults_elsewhere(folder: str, handled: bool) -> None:
    import faulthandler

    import torch.utils.data._utils.signal_handling

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    faulthandler.disable()
    path = Path(folder) / "file"
    path.write_bytes(bytes(mmap.PAGESIZE))
    view = OpenFile(path).map()
    buffer = Buffer.of(view, mapped=True)
    if handled:
        faulthandler.enable()
    os.truncate(path, 0)
    for _ in range(2):
        assert buffer.copy(0, 10) is None
        torch._C._set_worker_signal_handlers() if handled else None
    assert buffer.copy(0, 10) is None
    ctypes.string_at(buffer.address, 1)  # as somebody's own broken map
    sys.exit(3)


@pytest.mark.parametrize("handled", [False, True])
def test_a_fault_that_is_not_ours_still_ends_the_process(handled: bool, tmp_path: Path) -> None:
    if native.pieces is None:
        pytest.skip("no native code was built where these tests run: it takes a C compiler")
    process = FORKED.Process(target=_faults_elsewhere, args=(str(tmp_path), handled))
    process.start()
    process.join(30)
    ended = process.exitcode
    process.kill()
    assert ended == -signal.SIGBUS
