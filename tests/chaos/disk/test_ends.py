"""Ends of training processes: workers that are killed, signals, and interpreters that exit at any moment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import textwrap
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from quiver.store import Store
from tests.client.test_process_exit import MOMENTS, script, unclean
from tests.support.daemon import Daemon
from tests.support.data import Files, rebased
from tests.support.endings import ended
from tests.support.scripts import Script
from tests.support.servers import counting_origin
from tests.support.waiting import until

pytestmark = pytest.mark.chaos
EXITS = 204
END_SECONDS_MAX = 4.0  # the promise is two; the machine that runs this may be busy
KILLED = """
    import json, multiprocessing, os, signal, sys
    from quiver_client import DataLoader, Dataset

    manifest, cache = sys.argv[1:]
    dataset = Dataset(manifest, cache, fields=["image", "__key__"])
    number = {dataset.manifest.key(row): row for row in range(len(dataset))}

    def made():
        return DataLoader(dataset, 4, shuffle=True, num_workers=2)

    loader, rows, state = made(), [], None
    batches = iter(loader)
    try:
        for at, batch in enumerate(batches):
            rows += [number[key] for key in batch["__key__"]]
            state = loader.state_dict()
            if at == 5:
                os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    except RuntimeError as error:
        print(json.dumps(str(error)), flush=True)
    del batches
    loader.close()
    again = made()
    again.load_state_dict(state)
    rows += [number[key] for batch in again for key in batch["__key__"]]
    again.close()
    print(json.dumps(rows), flush=True)
"""
READER = """
    import sys
    from quiver_client import DataLoader, Dataset

    manifest, cache, workers = sys.argv[1:]
    dataset = Dataset(manifest, cache, fields=["image", "__key__"])
    loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=int(workers))
    while True:
        for at, _ in enumerate(loader):
            print(at, flush=True)
"""


@pytest.mark.fault("E2")
@pytest.mark.parametrize("kind", ["embedded", "rack"])
def test_a_worker_that_is_killed_is_an_error_that_says_so_and_a_resume_is_exact(
    files: Files, lone: Daemon, tmp_path: Path, kind: str
) -> None:
    cache = lone.url if kind == "rack" else f"file://{tmp_path}/cache?capacity=1GiB"
    running = Script(textwrap.dedent(KILLED), [files.manifest, cache], tmp_path / "log")
    try:
        code = running.wait(110)
    finally:
        running.kill()
    lines = [json.loads(line) for line in running.lines()]
    assert code == 0, lines
    assert "worker" in lines[0]
    assert "killed" in lines[0] or "exited unexpectedly" in lines[0]
    assert Counter(lines[1]) == Counter(range(len(files.content)))


def members_of(session: int) -> list[psutil.Process]:
    """Return the processes of a session that run."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return found


@pytest.mark.fault("E7")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_signal_ends_a_training_process_at_once_and_leaves_no_other(
    files: Files, tmp_path: Path, number: signal.Signals, workers: int
) -> None:
    """It waits for an origin that does not answer, in a process of its own."""
    with counting_origin(files.folder) as origin:
        remote = rebased(files, origin.url, tmp_path / "remote.quiver")
        cache = tmp_path / "cache"
        arguments = [remote.manifest, f"file://{cache}?capacity=1MiB", workers]  # a third: it reads the origin for ever
        running = Script(textwrap.dedent(READER), arguments, tmp_path / "log")
        try:
            until(running.lines, 40)
            origin.open.clear()
            assert len(members_of(running.pid)) >= 2, "the origin is read by a process of its own"
            begun = time.monotonic()
            running.signal(number)
            code = running.wait(20)
            took = time.monotonic() - begun
            assert code in (-number, 1), "by the signal, or by KeyboardInterrupt"
            assert took < END_SECONDS_MAX
            until(lambda: not members_of(running.pid), 20, "orphans")
        finally:
            running.kill()
            origin.open.set()
    with contextlib.closing(Store.open(cache, 1 << 20, shared=True)) as store:
        assert store.resident_bytes() > 0
        assert not list((cache / "tmp").iterdir()), "what it was filling is swept by whoever comes next"


@pytest.mark.fault("E10")
@pytest.mark.timeout(300)
def test_an_interpreter_exits_as_without_us_two_hundred_times_of_two_hundred(files: Files, tmp_path: Path) -> None:
    each = EXITS // len(MOMENTS)
    scripts = [script(files, moment) for moment in MOMENTS for _ in range(each)]
    found = ended(scripts[::2], tmp_path) + ended(scripts[1::2], tmp_path)  # a script's number is a row of the dataset
    assert len(found) == EXITS
    assert not unclean(found)
