"""Real jobs in processes of their own, with real daemons that hold a part of the data: some are killed or stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quiver.manifest import Manifest
from quiver_cacheserver import opened
from tests.support.daemon import Daemon, rack_of, serve
from tests.support.data import Files, make_files, random_files, rebased
from tests.support.scripts import Script
from tests.support.servers import counting_origin
from tests.support.waiting import until

CACHED = 0.3
LEASE_SECONDS = 2.0
JOB = textwrap.dedent("""
    import json, os, sys, time
    from quiver_client import DataLoader, Dataset
    from quiver_client.loader import consumer
    consumer.LEASE_SECONDS = float(sys.argv[6])
    manifest, cache, name, epochs, step = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])
    dataset = Dataset(manifest, cache, fields=["data", "__key__"])
    loader = DataLoader(dataset, batch_size=8, shuffle=True, seed=len(name), job=name)
    for epoch in range(epochs):
        for batch in loader:
            good = all(len(data) == int(key.split("-")[1]) for key, data in zip(batch["__key__"], batch["data"]))
            print(json.dumps({"epoch": epoch, "keys": batch["__key__"], "good": good}), flush=True)
            time.sleep(step)
    print(json.dumps({"stats": dataset.stats()}), flush=True)
    loader.close()
    dataset.close()
""")


class Job:
    """A training process that logs the samples that it received."""

    def __init__(self, files: Files, rack: list[Daemon], log: Path, *, epochs: int = 2, step: float = 0.01) -> None:
        self.log = log
        self.script = Script(JOB, [files.manifest, rack[0].url, log.stem, epochs, step, LEASE_SECONDS], log)

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.script.lines()]

    def keys(self, epoch: int) -> list[str]:
        assert all(line.get("good", True) for line in self.lines())
        return [key for line in self.lines() if line.get("epoch") == epoch for key in line["keys"]]  # type: ignore[attr-defined]

    def ended(self) -> bool:
        return self.script.ended


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """480 samples in about sixty shards; a sample's name contains its length."""
    content = random_files(480, seed=5, low=6_000, high=8_000)
    named = {f"{serial:04}-{len(data)}-x": data for serial, data in enumerate(content.values())}
    return make_files(tmp_path_factory.mktemp("jobs"), named, shard_bytes="64KiB", layout="mixed")


@pytest.fixture
def daemons(files: Files, tmp_path: Path) -> Iterator[list[Daemon]]:
    capacity = int(CACHED * files.total_bytes() / 3) + files.manifest.stat().st_size
    with rack_of(3, tmp_path / "rack", origins=[files.folder], capacity=str(capacity)) as rack:
        yield rack
        for daemon in rack:
            status = daemon.status()
            assert status["resident_bytes"] <= status["capacity_bytes"]


def exactly_once(job: Job, files: Files, epochs: int) -> None:
    for epoch in range(epochs):
        assert sorted(job.keys(epoch)) == sorted(files.content), f"epoch {epoch} of {job.log.stem}"


def origin_bytes(rack: list[Daemon]) -> int:
    return sum(daemon.status()["origin_read_bytes"] for daemon in rack)


def test_two_jobs_read_through_a_cache_that_holds_a_third(files: Files, daemons: list[Daemon], tmp_path: Path) -> None:
    jobs = [Job(files, daemons, tmp_path / f"{'job' + 'x' * number}.log", step=0.03) for number in range(2)]
    until(lambda: all(job.ended() for job in jobs), 60)
    assert [job.script.wait() for job in jobs] == [0, 0]
    for job in jobs:
        exactly_once(job, files, 2)
        stats = job.lines()[-1]["stats"]
        assert stats["substitutions"] > 0  # type: ignore[index]
        assert stats["corruptions"] == 0  # type: ignore[index]
    # How well they share depends on the machine, and bench/ measures it. That no byte is read needlessly does not.
    assert origin_bytes(daemons) < 0.9 * 4 * files.total_bytes()
    until(lambda: sum(daemon.metric("quiver_consumers") for daemon in daemons) == 0, what="they withdrew their needs")


def test_a_killed_job_and_a_stopped_one_delay_no_other(files: Files, daemons: list[Daemon], tmp_path: Path) -> None:
    killed = Job(files, daemons, tmp_path / "killed.log", epochs=9)
    still = Job(files, daemons, tmp_path / "still.log", epochs=9)
    going = Job(files, daemons, tmp_path / "going.log", epochs=3)
    try:
        until(lambda: all(len(job.lines()) > 20 for job in (killed, still, going)), 60)
        killed.script.kill()
        still.script.signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        until(
            lambda: max(daemon.metric("quiver_consumers") for daemon in daemons) <= 1,
            LEASE_SECONDS + 10,
            "their needs expire",
        )
        assert time.monotonic() - stopped_at < LEASE_SECONDS + 8
        until(going.ended, 60)
        assert going.script.wait() == 0
        exactly_once(going, files, 3)
        taken = len(still.lines())
        still.script.signal(signal.SIGCONT)
        until(lambda: len(still.lines()) > taken + 80, 60, "it continues where it was stopped")
        exactly_once(still, files, 1)
    finally:
        for job in (killed, still, going):
            job.script.kill()


@pytest.mark.fault("M1")
def test_a_job_continues_when_a_daemon_is_killed(files: Files, daemons: list[Daemon], tmp_path: Path) -> None:
    job = Job(files, daemons, tmp_path / "job.log")
    until(lambda: len(job.lines()) > 20, 60)
    daemons[1].kill()
    try:
        until(job.ended, 90)
    finally:
        job.script.kill()
    assert job.script.wait() == 0
    exactly_once(job, files, 2)
    daemons[1].start()
    daemons[1].wait_until_serving()


def test_jobs_upload_shards_whose_origin_the_daemons_may_not_read(files: Files, tmp_path: Path) -> None:
    capacity = int(CACHED * files.total_bytes() / 3) + files.manifest.stat().st_size
    with rack_of(3, tmp_path / "rack", capacity=str(capacity)) as rack:
        jobs = [Job(files, rack, tmp_path / f"{'job' + 'x' * number}.log") for number in range(2)]
        try:
            until(lambda: all(job.ended() for job in jobs), 60)
        finally:
            for job in jobs:
                job.script.kill()
        assert origin_bytes(rack) == 0
        stats = [job.lines()[-1]["stats"] for job in jobs]
        for job in jobs:
            exactly_once(job, files, 2)
        read = sum(each["bytes_origin"] for each in stats)  # type: ignore[index]
        uploads = sum(each["uploads"] for each in stats)  # type: ignore[index]
        assert uploads > 60, "each shard at least once"
        assert read < 0.9 * 4 * files.total_bytes(), "and not once per job and epoch"


# -- beside a stock loader --------------------------------------------------------------------------------------------

IDLE_SECONDS = 60.0  # a paused reader's shards were kept so long, whoever needed the room
STOCK = textwrap.dedent("""
    import itertools, sys, time
    import torch
    from quiver_client import Dataset
    dataset = Dataset(sys.argv[1], sys.argv[2])
    loader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True, collate_fn=lambda batch: batch)
    for epoch in itertools.count():
        for batch in loader:
            print(epoch, len(batch), flush=True)
            time.sleep(0.01)
""")


def serve_with_short_leases(stderr: Any, arguments: list[str], environment: dict[str, str]) -> None:
    from quiver_cacheserver.residency import rooms

    rooms.READ_LEASE_SECONDS = opened.READ_LEASE_SECONDS = (1.0, opened.READ_LEASE_SECONDS[1])  # type: ignore[misc]
    serve(stderr, arguments, environment)


class HastyDaemon(Daemon):
    serve = staticmethod(serve_with_short_leases)


def test_a_paused_stock_loader_costs_a_job_no_more_than_a_lease(files: Files, tmp_path: Path) -> None:
    other = make_files(tmp_path, random_files(100, seed=6, low=6_000, high=8_000), name="other", shard_bytes="64KiB")
    stocks, mine = (each.opened() for each in (other, files))
    capacity = int(1.1 * other.total_bytes() / 3) + sum(each.manifest.stat().st_size for each in (other, files))
    with rack_of(
        3, tmp_path / "rack", origins=[files.folder, other.folder], capacity=str(capacity), make=HastyDaemon
    ) as rack:

        def resident(manifest: Manifest) -> int:
            held = {path.name for daemon in rack for path in daemon.files()}
            return sum(manifest.shard_digest(number).hex() in held for number in range(manifest.shard_count))

        job = Job(files, rack, tmp_path / "job.log", epochs=1000)
        stock = Script(STOCK, [other.manifest, rack[0].url], tmp_path / "stock.log")
        try:
            until(lambda: len(job.lines()) > 20 and stock.lines(), 60)
            job.script.signal(signal.SIGSTOP)
            # Not all of it fits: the daemons' shares of the shards differ, and their names, with the ports, by the run.
            until(lambda: resident(stocks) > 0.6 * stocks.shard_count, 60, "a stock loader fills the cache")
            job.script.signal(signal.SIGCONT)
            taken = len(job.lines())
            until(lambda: len(job.lines()) > taken + 5, 60)
            assert resident(stocks) > 0.6 * stocks.shard_count, "and keeps it while it reads"
            stock.signal(signal.SIGSTOP)
            until(lambda: resident(stocks) == 0, IDLE_SECONDS / 2, "what it held is the job's")
            assert resident(mine) > 0
            taken = len(stock.lines())
            stock.signal(signal.SIGCONT)
            until(lambda: len(stock.lines()) > taken + 5, 60, "it continues where it was stopped")
            assert not job.ended()
        finally:
            job.script.kill()
            stock.kill()


# -- ending -----------------------------------------------------------------------------------------------------------

END_SECONDS_MAX = 4.0  # it takes 2 on an idle machine; a request waits 5 for a daemon that does not answer
WITHDRAWN_SECONDS = 1.0  # after the end; a lease lasts 5 from its last renewal
ATTEMPTS = 3  # a process takes 1.5 s for its end at most; beside other work that may not suffice to tell every daemon
READER = textwrap.dedent("""
    import select, sys, time
    from quiver_client import DataLoader, Dataset
    manifest, cache, fields = sys.argv[1:]
    loader = DataLoader(Dataset(manifest, cache, fields=fields.split(",")), batch_size=8, shuffle=True)
    batches = iter(loader)
    print("reads", flush=True)
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        pass  # a signal just before a read that never returns would not be seen
    if "close" in sys.stdin.readline():
        begun = time.monotonic()
        loader.close()
        print(time.monotonic() - begun, flush=True)
        sys.stdin.readline()
""")


class Reader:
    """A process that reads ahead and consumes nothing, until it is interrupted, told to close, or its script ends."""

    def __init__(self, manifest: Path, cache: str, fields: str) -> None:
        arguments = [sys.executable, "-c", READER, str(manifest), cache, fields]
        # Not a pipe: the process that reads a remote origin inherits its end, and may end later.
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed on exit
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        self.process: subprocess.Popen[str] = subprocess.Popen(arguments, text=True, stderr=self._said, **pipes)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout, self._said):
            assert file is not None
            file.close()

    def reads(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "reads\n"

    def closes_after_seconds(self) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("close\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def ends_at_once(self, how: str) -> bool:
        """Interrupt it, or let its script end; check that the process prints nothing. Whether it ended at once."""
        begun = time.monotonic()
        if how == "interrupted":
            self.process.send_signal(signal.SIGINT)
        else:
            assert self.process.stdin is not None
            self.process.stdin.close()
        code = self.process.wait(20)
        seconds = time.monotonic() - begun
        self._said.seek(0)
        said = self._said.read()
        if how == "interrupted":
            assert code == -signal.SIGINT
            before, _, said = said.partition("Traceback")
            assert "KeyboardInterrupt" in said
            said = before + said
        else:
            assert code == 0
        assert "Traceback" not in said
        assert "Exception" not in said
        return seconds < END_SECONDS_MAX


@contextmanager
def reading(files: Files, daemons: list[Daemon], stopped: int) -> Iterator[Reader]:
    """A process that every daemon counts as a consumer; then the first ``stopped`` of the daemons are stopped."""
    until(lambda: not any(daemon.metric("quiver_consumers") for daemon in daemons), what="no lease is left")
    with Reader(files.manifest, daemons[0].url, "__key__,data") as reader:
        reader.reads()
        until(lambda: all(daemon.metric("quiver_consumers") == 1 for daemon in daemons))
        for daemon in daemons[:stopped]:
            daemon.signal(signal.SIGSTOP)
        try:
            yield reader
        finally:
            for daemon in daemons[:stopped]:
                daemon.signal(signal.SIGCONT)


def is_withdrawn(daemons: list[Daemon]) -> bool:
    """Whether none of the daemons counts a consumer any more, before a lease could have expired."""
    deadline = time.monotonic() + WITHDRAWN_SECONDS
    while any(daemon.metric("quiver_consumers") for daemon in daemons):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.fault("E7")
@pytest.mark.parametrize("how", ["interrupted", "over"])
@pytest.mark.parametrize("stopped", [0, 1, 3])
def test_a_job_ends_at_once_and_withdraws_its_needs_from_the_daemons_that_answer(
    files: Files, daemons: list[Daemon], how: str, stopped: int
) -> None:
    def ends() -> bool:
        with reading(files, daemons, stopped) as reader:
            return reader.ends_at_once(how) and is_withdrawn(daemons[stopped:])

    assert any(ends() for _ in range(ATTEMPTS))


def test_closing_a_loader_does_not_wait_for_a_stopped_daemon(files: Files, daemons: list[Daemon]) -> None:
    def closes() -> bool:
        with reading(files, daemons, stopped=1) as reader:
            return reader.closes_after_seconds() < END_SECONDS_MAX and is_withdrawn(daemons[1:])

    assert any(closes() for _ in range(ATTEMPTS))


@pytest.mark.fault("E7")
@pytest.mark.parametrize("how", ["interrupted", "over"])
def test_a_job_with_an_embedded_cache_ends_at_once_while_its_origin_does_not_answer(
    files: Files, tmp_path: Path, how: str
) -> None:
    with counting_origin(files.folder) as origin:
        remote = rebased(files, origin.url, tmp_path / "remote.quiver")
        origin.open.clear()

        def ends(cache: Path) -> bool:
            with Reader(remote.manifest, f"file://{cache}?capacity=1GiB", "data") as reader:
                reader.reads()
                until(lambda: any((cache / "fills").iterdir()) and any((cache / "needs").glob("*")), what="it fills")
                return reader.ends_at_once(how) and not list((cache / "needs").iterdir())

        assert any(ends(tmp_path / f"cache{attempt}") for attempt in range(ATTEMPTS))
