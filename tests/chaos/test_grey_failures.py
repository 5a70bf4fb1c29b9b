"""Training through grey failures: daemons that are killed, stopped, stuck, dripping, slow or reset connections.

The oracle of every row: each epoch has each sample exactly once and right, no batch waits longer than promised, hedges
stay within their budget, nothing is left behind, and the fault really fired.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from quiver.health import HEDGED_BURST_BYTES, HEDGED_SHARE
from quiver_client import DataLoader, Dataset
from tests.support.daemon import Daemon
from tests.support.data import Files, make_files, random_files
from tests.support.etcd import free_ports
from tests.support.waiting import until

pytestmark = pytest.mark.chaos

WAIT_SECONDS_MAX = 1.0  # for which a fault may hold a batch up, beyond what batches take on this machine
COUNT = 240
BATCH = 16
FIELDS = ["image", "__key__"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("files"), random_files(COUNT, seed=7), shard_bytes="256KiB")


@dataclass
class Rack:
    """Three daemons; the second is reached through a proxy, in a process of its own."""

    daemons: list[Daemon]
    urls: list[str]
    proxy: subprocess.Popen[str]

    def behave(self, how: str) -> int:
        """Change the proxy's behaviour; return how often it did anything but forward."""
        assert self.proxy.stdin is not None
        assert self.proxy.stdout is not None
        self.proxy.stdin.write(how + "\n")
        self.proxy.stdin.flush()
        return int(self.proxy.stdout.readline())


@pytest.fixture
def rack(files: Files, tmp_path: Path) -> Iterator[Rack]:
    *ports, hidden = free_ports(4)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    command = [sys.executable, "-m", "bench.grey_proxy", str(ports[1]), str(hidden)]
    with contextlib.ExitStack() as ending:
        proxy = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ending.enter_context(proxy)
        ending.callback(proxy.kill)
        assert proxy.stdout is not None
        assert proxy.stdout.readline().strip() == urls[1]
        daemons = []
        for at, port in enumerate(ports):
            flags = ("--peers", ",".join(urls), "--advertise", urls[at])
            where, port = tmp_path / f"node{at}", hidden if at == 1 else port
            daemons.append(ending.enter_context(Daemon(where, *flags, port=port, origins=[files.folder])))
        yield Rack(daemons, urls, proxy)
        daemons[1].signal(signal.SIGCONT)


@dataclass
class History:
    """What a reader was given: how long each batch took, and when it was asked for."""

    seconds: list[float] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)
    healthy: int = 0  # batches before the fault

    def fault_begins(self) -> None:
        self.healthy = len(self.seconds)

    @property
    def longest_wait_seconds(self) -> float:
        """The longest batch since the fault began, less twice the longest before: other processes use the cores too."""
        return max(self.seconds[self.healthy :]) - 2 * max(self.seconds[: self.healthy])


def epoch(made: Dataset, files: Files, history: History, at_batch: Callable[[int], None] = lambda batch: None) -> None:
    """Read every sample once in random order and compare: digests, and the exact multiset."""
    order = np.random.default_rng(len(history.seconds)).permutation(COUNT).tolist()
    seen: list[str] = []
    for batch, at in enumerate(range(0, COUNT, BATCH)):
        at_batch(batch)
        history.begun.append(time.monotonic())
        samples = made.__getitems__(order[at : at + BATCH])
        history.seconds.append(time.monotonic() - history.begun[-1])
        for sample in samples:
            assert sample["image"] == files.content[sample["__key__"]]
            seen.append(sample["__key__"])
    assert sorted(seen) == sorted(files.content)


def check(made: Dataset, history: History, epochs: int) -> dict[str, int]:
    stats = made.stats()
    assert stats["samples"] == epochs * COUNT
    assert stats["samples_host"] + stats["samples_rack"] + stats["samples_origin"] == epochs * COUNT
    assert stats["corruptions"] == 0
    read_bytes = stats["bytes_host"] + stats["bytes_rack"] + stats["bytes_origin"]
    assert stats["bytes_hedged"] <= HEDGED_BURST_BYTES + HEDGED_SHARE * read_bytes
    assert history.longest_wait_seconds < WAIT_SECONDS_MAX
    return stats


@contextlib.contextmanager
def opened(files: Files, rack: Rack) -> Iterator[Dataset]:
    """A dataset through the rack; afterwards no descriptor and no thread of it is left."""
    fds, threads = _descriptors(), threading.active_count()
    made = Dataset(files.manifest, rack.urls[0], fields=FIELDS)
    try:
        yield made
    finally:
        made.close()
    until(lambda: threading.active_count() <= threads, what="threads end")
    until(lambda: _descriptors() <= fds, what="descriptors are closed")


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


N2 = {"reset": "reset 60000", "mute": "mute", "silent": "silent", "drip": "drip 1024", "slow": "slow 2e6 0.1"}


@pytest.mark.fault("N2")
@pytest.mark.parametrize("how", N2.values(), ids=list(N2))
def test_a_grey_daemon_costs_no_sample_and_no_long_wait(files: Files, rack: Rack, how: str) -> None:
    with opened(files, rack) as made:
        history = History()
        for _ in range(3):
            epoch(made, files, history)
        history.fault_begins()
        epoch(made, files, history, lambda batch: rack.behave(how) if batch == 2 else None)
        for _ in range(3):
            epoch(made, files, history)
        assert rack.behave("pass") > 0, "the fault really fired"
        stats = check(made, history, 7)
        assert stats["hedges"] + stats["fallbacks"] > 0
        settled = history.seconds[history.healthy + 30 :]
        assert float(np.median(settled)) < 0.5, "it is passed over"
        for _ in range(2):
            epoch(made, files, history)
        check(made, history, 9)


@pytest.mark.fault("M1", "N2")
def test_a_daemon_that_is_stopped_costs_one_batch_and_is_used_again_soon_after(files: Files, rack: Rack) -> None:
    with opened(files, rack) as made:
        history = History()
        for _ in range(3):
            epoch(made, files, history)
        before = rack.daemons[1].status()["served_bytes"]
        history.fault_begins()
        epoch(made, files, history, lambda batch: rack.daemons[1].signal(signal.SIGSTOP) if batch == 3 else None)
        until_at = time.monotonic() + 8.0
        epochs = 4
        while time.monotonic() < until_at:
            epoch(made, files, history)
            epochs += 1
        check(made, history, epochs)
        assert made.stats()["fallbacks"] > 0, "the fault really fired"
        late = [seconds for seconds in history.seconds[history.healthy :] if seconds > 1.0]
        assert len(late) <= 2, "this reader's patience once, and once that of the daemons that fill in its place"
        rack.daemons[1].signal(signal.SIGCONT)
        back_at = time.monotonic()
        while rack.daemons[1].status()["served_bytes"] <= before:
            assert time.monotonic() < back_at + 30, "it is used again"
            epoch(made, files, history)
            epochs += 1
        check(made, history, epochs)


@pytest.mark.fault("M1")
def test_a_daemon_killed_in_an_epoch_costs_no_sample_and_no_long_wait(files: Files, rack: Rack) -> None:
    with opened(files, rack) as made:
        history = History()
        epoch(made, files, history)
        history.fault_begins()
        epoch(made, files, history, lambda batch: rack.daemons[2].kill() if batch == 3 else None)
        epoch(made, files, history)
        stats = check(made, history, 3)
        assert rack.daemons[2].process is not None
        assert rack.daemons[2].process.poll() is not None
        assert stats["fallbacks"] > 0, "the fault really fired"


@pytest.mark.fault("M2")
@pytest.mark.parametrize("survivors", [1, 0], ids=["all but one's own", "all"])
def test_when_daemons_die_together_the_epoch_ends_with_few_warnings(
    files: Files, rack: Rack, survivors: int, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(files, rack) as made:
        history = History()
        epoch(made, files, history)
        history.fault_begins()

        def kill(batch: int) -> None:
            if batch == 3:
                for daemon in rack.daemons[survivors:]:
                    daemon.kill()

        with caplog.at_level(logging.WARNING):
            epoch(made, files, history, kill)
            epoch(made, files, history)
        stats = check(made, history, 3)
        if survivors:
            assert stats["samples_rack"] > 2 * COUNT, "the one that is left serves all shards"
        else:
            assert stats["samples_origin"] >= COUNT
        assert caplog.records, "it is said"
        said = [re.findall(r"http://[^ :]+:\d+", record.getMessage()) for record in caplog.records]
        passed_over = [urls[0] for urls, it in zip(said, caplog.records, strict=True) if "passing over" in it.message]
        assert len(passed_over) == len(set(passed_over)), "once in 30 s for each daemon"
        assert len(said) <= 3 * len(rack.urls)


@pytest.mark.fault("N2")
def test_workers_of_a_loader_each_find_out_for_themselves_and_the_epoch_is_exact(files: Files, rack: Rack) -> None:
    made = Dataset(files.manifest, rack.urls[0], fields=FIELDS)
    try:
        loader = DataLoader(made, batch_size=BATCH, num_workers=2, seed=3, collate_fn=list)
        for faulty in (False, True):
            if faulty:
                rack.behave("mute")
            begun = time.monotonic()
            seen = []
            for batch in loader:
                for sample in batch:
                    assert sample["image"] == files.content[sample["__key__"]]
                    seen.append(sample["__key__"])
            assert sorted(seen) == sorted(files.content)
            assert time.monotonic() - begun < 20
        assert rack.behave("pass") > 0, "the fault really fired"
    finally:
        made.close()
