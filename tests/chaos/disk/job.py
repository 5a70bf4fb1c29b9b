"""One daemon on a disk that fails, a client that trains through it, and the oracle for both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from quiver.peer import PeerClient
from quiver.wire import FillRequest, RangeStatus
from tests.chaos import validators
from tests.chaos.history import Client, History, Job
from tests.support.daemon import Daemon, FreshDaemon
from tests.support.data import Files
from tests.support.waiting import until

WAIT_SECONDS_MAX: Final = 20.0  # for a batch: a disk that fails costs reads from the origin, and no time beyond that


class Shop:
    """A daemon, and clients that train through it one after the other."""

    def __init__(self, files: Files, folder: Path, daemon: Daemon) -> None:
        self.files, self.daemon = files, daemon
        self.manifest = files.opened()
        self.expected = validators.Expected.of(self.manifest, files.content)
        self.shard_bytes = int(self.manifest.tables.shard_sizes.sum())
        self._folder = folder
        self._trained = 0
        self._leaks: validators.Leaks | None = None

    def job(self, **more: object) -> Job:
        self._trained += 1
        return Job(f"job{self._trained}", str(self.files.manifest), self.daemon.url, **more)  # type: ignore[arg-type]

    def client(self, **more: object) -> Client:
        """Start a client; the caller ends it."""
        return Client(self.job(**more), self._folder)

    def train(self, **more: object) -> History:
        """Train to the end, and check it."""
        with self.client(**more) as client:
            history = client.wait()
        self.check(history)
        return history

    def fill(self, count: int) -> None:
        """Have the dataset's first ``count`` shards resident, and note what the daemon holds."""
        wanted = tuple(self.manifest.shard_digest(number) for number in range(count))
        with contextlib.closing(PeerClient(self.daemon.url)) as peer:
            peer.put_manifest(self.manifest.digest, self.files.manifest.read_bytes())
            until(lambda: set(peer.fill(FillRequest(self.manifest.digest, wanted, 1000))) == {RangeStatus.PRESENT})
        self._leaks = validators.Leaks([self.daemon])

    def resident(self) -> int:
        return sum(path.stat().st_size for path in self.daemon.files("shards"))

    def check(self, *histories: History) -> None:
        """What holds under any fault: right digests, exact epochs, bounded waits, no error, and clean logs."""
        for history in histories:
            validators.digests_are_right(history, self.expected)
            validators.epochs_are_exact([history], self.expected)
            validators.no_wait_exceeds(history, WAIT_SECONDS_MAX)
            validators.has_no_error(history)
            assert history.ended
            validators.log_is_clean(history.job.name, history.log, self.expected)
        validators.log_is_clean("the daemon", self.daemon.log, self.expected)

    def check_end(self) -> None:
        """When the fault is over: the daemon still runs and holds no more than before, and nothing unfinished."""
        assert self.daemon.process is not None
        assert self.daemon.process.poll() is None, self.daemon.log[-3000:]
        until(lambda: not validators.temporary_files(self.daemon.data_dir))
        if self._leaks is not None:
            self._leaks.check()

    def disk(self) -> str:
        return str(self.daemon.status()["disk"])

    def readiness(self) -> tuple[int, str]:
        status, body, _ = self.daemon.ask("GET", "/readyz")
        return status, body.decode()


@contextlib.contextmanager
def shop(
    files: Files, folder: Path, data: Path, environment: dict[str, str] | None = None, **more: object
) -> Iterator[Shop]:
    """Run a daemon with its data in ``data``; with an environment, in an interpreter of its own."""
    make = Daemon if environment is None else FreshDaemon
    with make(data, origins=[files.folder], environment=environment, **more) as daemon:  # type: ignore[arg-type]
        yield Shop(files, folder, daemon)
