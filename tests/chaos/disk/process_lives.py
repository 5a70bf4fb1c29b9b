"""Whole lives on a folder of shards: a training process with an embedded cache, and a daemon that is asked over HTTP.

They have threads, so the order of their changes is not the same twice: a point that the second life does not reach is
not counted.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from quiver.digest import Digest
from quiver.errors import QuiverError
from quiver.peer import PeerClient
from quiver.store import Kind
from quiver.wire import RANGE, RangeStatus, ReadRequest
from quiver_client import Dataset
from tests.chaos.disk.lives import Say
from tests.support.data import Files, shard_bytes_of
from tests.support.waiting import until

DAEMON_MODULES: Final = tuple(
    f"quiver_cacheserver.{name}" for name in ("cli", "command", "serve", "serving.app", "rack.etcd_registry")
)
WAIT_MS: Final = 5_000
SERVES: Final = re.compile(rb"serves rack \S+ at (\S+)")


class _Folder:
    """What both have: a dataset of a few shards, and how to tell what is in a folder."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._manifest = files.opened()
        self._shards = dict(shard_bytes_of(self._manifest, number) for number in range(self._manifest.shard_count))

    def _check_files(self, root: Path, held_at_least: set[Digest]) -> int:
        """Each visible shard is whole and right, and all of these are there; return the bytes of what is visible."""
        held = {Digest.parse(path.name): path.read_bytes() for path in (root / "shards").glob("*/*")}
        for digest, data in held.items():
            assert data == self._shards[digest], f"{digest} is visible and wrong"
        assert held_at_least <= held.keys()
        return sum(path.stat().st_size for kind in Kind for path in (root / kind).rglob("*") if path.is_file())


class EmbeddedLife(_Folder):
    """Reads an epoch through a folder with room for half of it, so that shards are evicted."""

    name = "embedded cache"
    deterministic = False

    def __init__(self, files: Files) -> None:
        super().__init__(files)
        self._capacity = sum(map(len, self._shards.values())) // 2

    def _open(self, root: Path) -> contextlib.closing[Dataset]:
        cache = f"file://{root}?capacity={self._capacity}"
        return contextlib.closing(Dataset(self._files.manifest, cache, fields=["image", "__key__"]))

    def prepare(self, root: Path) -> list[str]:
        root.mkdir()
        return []

    def run(self, root: Path, said: list[str], say: Say) -> None:
        with self._open(root) as dataset:
            for at in range(0, len(dataset), 8):
                self._read(dataset, range(at, min(at + 8, len(dataset))))
                say(f"read up to {at}")

    recover = run

    def _read(self, dataset: Dataset, rows: range) -> None:
        for sample in dataset.__getitems__(rows):
            assert sample["image"] == self._files.content[sample["__key__"]]

    def check(self, root: Path, said: list[str], *, power_cut: bool) -> None:
        self._check_files(root, set())
        for folder in ("tmp", "fills"):  # of a file without a lock another process may be about to take it
            for path in (root / folder).glob("*"):
                os.utime(path, (time.time() - 60,) * 2)
        with self._open(root) as dataset:
            store = dataset._open().tiers[0].store  # type: ignore[attr-defined]
            for at in range(0, len(dataset), 8):
                self._read(dataset, range(at, min(at + 8, len(dataset))))
                assert store.resident_bytes() <= self._capacity
            assert dataset.stats()["corruptions"] == 0
        assert store.resident_bytes() == self._check_files(root, set()) <= self._capacity
        assert not list((root / "tmp").iterdir())


class DaemonLife(_Folder):
    """A daemon starts, takes a manifest and an upload, fills two shards, and is ended by SIGTERM."""

    name = "daemon"
    deterministic = False

    def prepare(self, root: Path) -> list[str]:
        for name in DAEMON_MODULES:  # before the forks, not after each
            importlib.import_module(name)
        root.mkdir()
        return []

    def run(self, root: Path, said: list[str], say: Say) -> None:
        first, second, third = list(self._shards)[:3]
        with _daemon(root, self._files.folder, signal.SIGTERM) as url, contextlib.closing(PeerClient(url)) as peer:
            try:
                peer.put_manifest(self._manifest.digest, self._files.manifest.read_bytes())
                say("manifest")
                peer.put_shard(first, self._shards[first])
                say(f"shard {first}")
                for digest in (second, third):
                    self._read(peer, digest)
                    say(f"shard {digest}")
            except QuiverError:
                time.sleep(30)  # until the signal says that the daemon was killed
                raise

    recover = run

    def check(self, root: Path, said: list[str], *, power_cut: bool) -> None:
        told = {Digest.parse(line.removeprefix("shard ")) for line in said if line.startswith("shard ")}
        self._check_files(root, told)
        with _daemon(root, self._files.folder, signal.SIGKILL) as url, contextlib.closing(PeerClient(url)) as peer:
            assert not list((root / "tmp").iterdir()), "what a dead daemon left is swept"
            assert peer.status().resident_bytes == self._check_files(root, told)
            peer.put_manifest(self._manifest.digest, self._files.manifest.read_bytes())
            for digest in self._shards:
                self._read(peer, digest)
            assert peer.status().resident_bytes == self._check_files(root, set(self._shards))
            assert not list((root / "quarantine").iterdir())

    def _read(self, peer: PeerClient, digest: Digest) -> None:
        """Read a whole shard, which the daemon fills."""
        data = self._shards[digest]
        ranges = np.zeros(1, RANGE)
        ranges["length"] = len(data)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            statuses, got = peer.read(ReadRequest(self._manifest.digest, (digest,), ranges, wait_ms=WAIT_MS))
            if statuses[0] == RangeStatus.PRESENT:
                assert bytes(got) == data, "wrong bytes were served"
                return
            assert statuses[0] == RangeStatus.FILLING, f"status {statuses[0]}"
        raise AssertionError("it is not filled")


@contextlib.contextmanager
def _daemon(root: Path, origin: Path, end: signal.Signals) -> Iterator[str]:
    """Run a daemon in a forked process, ended by this signal; yield its URL.

    If it is killed before, this process ends the same way: both are one life.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _serve(root, origin, writing)
    os.close(writing)
    status: list[int] = []

    def reap(*_: object) -> None:
        status.append(os.waitpid(child, 0)[1])
        if os.WIFSIGNALED(status[0]):
            os.kill(os.getpid(), signal.SIGKILL)

    log = b""
    while not (serves := SERVES.search(log)):
        more = os.read(reading, 4096)
        if not more:
            reap()
            raise AssertionError(f"the daemon does not start: {log.decode()}")
        log += more
    signal.signal(signal.SIGCHLD, reap)
    try:
        yield serves[1].decode()
    finally:
        if end is signal.SIGKILL:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.kill(child, end)
        if end is signal.SIGKILL:
            os.waitpid(child, 0)
        else:
            until(lambda: status, 40)
        os.close(reading)


def _serve(root: Path, origin: Path, log: int) -> None:
    signal.alarm(60)
    os.dup2(log, 2)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - for as long as the process lives
    flags = ("--listen", "127.0.0.1:0", "--data-dir", str(root), "--capacity", "100MiB", "--origin", str(origin))
    sys.argv = ["quiver-cacheserver", *flags]
    from quiver_cacheserver.cli import main

    try:
        main()
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    os._exit(0)
