"""What the loader says while a loop reads: a line of the first fill on a terminal, and a warning where it waits."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver_client import DataLoader, Dataset
from quiver_client.loader import progress, wait_warning
from quiver_client.loader.progress import FirstFill, ProgressLine, duration, is_wanted
from quiver_client.loader.wait_warning import HELP, SUBSTITUTE, LoopTimes, LoopWatch, finding
from tests.support.data import Files
from tests.support.residency import Clock

READS = {"host": 0.0, "rack": 0.0, "origin": 0.0}


def times(**more: Any) -> LoopTimes:
    return LoopTimes(**{"loop": 30.0, "waited": 10.0, "batches": 100, "reads": READS, **more})


# -- why a loop waits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "measured"),
    [
        ("origin", {"starved": 6.0}),
        ("origin", {"reads": {**READS, "origin": 5.0}, "made": 1.0, "bytes_origin": 9, "bytes_read": 9}),
        ("origin", {"reads": {**READS, "rack": 5.0}, "bytes_origin": 5, "bytes_read": 9}),
        ("daemon", {"reads": {**READS, "rack": 5.0, "host": 1.0}, "made": 2.0, "bytes_read": 9}),
        ("folder", {"reads": {**READS, "host": 5.0}, "made": 2.0, "bytes_read": 9}),
        ("transform", {"reads": {**READS, "host": 5.0}, "made": 20.0, "bytes_read": 9}),
        ("workers", {"reads": None}),
        ("origin", {"reads": None, "starved": 9.0}),
    ],
)
def test_a_loop_that_waits_is_told_what_it_waits_for(reason: str, measured: dict[str, Any]) -> None:
    found = finding(times(**measured))
    assert found is not None
    assert found.reason == reason
    assert found.message == f"the training loop waited for data 33% of its time: {HELP[reason]}"


@given(loop=st.floats(0, 1e4), share=st.floats(0, 1), batches=st.integers(0, 1000))
def test_a_warning_needs_more_than_a_tenth_of_a_window_that_is_long_enough(
    loop: float, share: float, batches: int
) -> None:
    found = finding(times(loop=loop, waited=loop * share, batches=batches))
    assert (found is not None) == (loop >= 20 and batches >= 16 and loop * share > loop * 0.1)


class Slow:
    """An order and its dataset, of which the test moves the counters."""

    def __init__(self) -> None:
        self.leaves, self.starved_seconds, self.substitute = (self,), 0.0, True
        self.seconds = dict(READS)
        self.counts = {"bytes_host": 0, "bytes_rack": 0, "bytes_origin": 0}

    def stats(self) -> dict[str, int]:
        return dict(self.counts)

    def read_seconds(self) -> dict[str, float]:
        return dict(self.seconds)


@pytest.mark.parametrize("slow", ["transform", "origin", "daemon"])
def test_a_loop_is_warned_once_of_what_is_slow(slow: str, caplog: pytest.LogCaptureFixture) -> None:
    clock, order = Clock(), Slow()
    watch = LoopWatch(order, 0, clock.monotonic)

    def steps(count: int, waited: float) -> None:
        for _ in range(count):
            clock.now += 1.0
            order.counts["bytes_rack"] += 100
            if slow == "transform":
                watch.fetched(waited)
            elif slow == "origin":
                order.starved_seconds += waited
            else:
                order.seconds["rack"] += waited
                watch.fetched(waited)
            watch.waited(waited)

    watch.begin()
    steps(200, 0.09)
    assert not caplog.messages, "less than a tenth"
    clock.now += 500  # it validates
    watch.begin()
    steps(60, 0.5)
    steps(60, 0.9)
    [message] = caplog.messages
    assert message.endswith(HELP[slow])
    assert message.startswith("the training loop waited for data")


@pytest.mark.parametrize("substitute", [False, True])
def test_a_loader_that_substitutes_is_not_advised_to(substitute: bool, caplog: pytest.LogCaptureFixture) -> None:
    clock, order = Clock(), Slow()
    order.substitute = substitute
    watch = LoopWatch(order, 0, clock.monotonic)
    watch.begin()
    for _ in range(60):
        clock.now += 1.0
        order.starved_seconds += 0.5
        watch.waited(0.5)
    [message] = caplog.messages
    assert message.endswith(HELP["origin"] + (SUBSTITUTE if not substitute else ""))


def test_a_real_loop_with_a_slow_transform_is_warned(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_warning, "WINDOW_SECONDS", 0.05)
    gate = threading.Event()

    def transform(sample: Any) -> Any:
        gate.wait(0.002)  # never set: the transform takes that long
        return sample["label"]

    dataset = Dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB", transform=transform)
    list(dataset)  # all is resident
    loader = DataLoader(dataset, 4, shuffle=True)
    for _ in loader:
        pass
    [message] = [each for each in caplog.messages if "waited for data" in each]
    assert message.endswith(HELP["transform"])
    loader.close()
    dataset.close()


# -- the first fill ---------------------------------------------------------------------------------------------------


def test_the_line_says_how_fast_how_far_and_how_long() -> None:
    fill = FirstFill(np.full(100, 31.2e6), np.ones(100, bool))
    resident = np.zeros(100, bool)
    for second in range(42):
        resident[:second] = True
        fill.learn(resident, second * 0.1)
    assert fill.text == "origin 312 MB/s, 41 %, 6 s"
    resident[:] = False  # evicted: they were filled
    fill.learn(resident, 5.0)
    assert not fill.is_complete
    assert "41 %" in fill.text
    fill.learn(np.ones(100, bool), 6.0)
    assert fill.is_complete


def test_shards_that_a_pass_does_not_read_do_not_count() -> None:
    fill = FirstFill(np.ones(4), np.array([True, True, False, False]))
    fill.learn(np.array([True, True, False, False]), 0.0)
    assert fill.is_complete


def test_durations_have_one_unit() -> None:
    assert [duration(each) for each in (0.4, 40, 89, 120, 5000, 7200)] == [
        "0 s",
        "40 s",
        "89 s",
        "2 min",
        "83 min",
        "2 h",
    ]


def test_a_line_is_for_rank_0_and_a_terminal_and_can_be_silenced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    assert is_wanted(None, 0)
    assert not is_wanted(None, 1)
    assert not is_wanted(False, 0)
    monkeypatch.setenv("QUIVER_PROGRESS", "0")
    assert not is_wanted(None, 0)
    assert is_wanted(True, 0)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: False))
    assert not is_wanted(True, 0)
    with pytest.raises(ValueError, match="progress='yes': give True, False, or None"):
        is_wanted("yes", 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("occupied", [False, True])
def test_a_line_leaves_the_terminal_to_a_bar_of_tqdm(monkeypatch: pytest.MonkeyPatch, occupied: bool) -> None:
    written: list[str] = []
    clock = Clock()
    monkeypatch.setattr(progress, "_write", written.append)
    bars = SimpleNamespace(tqdm=SimpleNamespace(_instances=["bar"] if occupied else []))
    monkeypatch.setitem(sys.modules, "tqdm.std", bars)
    line = ProgressLine(clock.monotonic)
    line.measure("imagenet", np.full(4, 1e6))
    epoch: Any = SimpleNamespace(left=np.ones(4, np.int64))
    for count in range(4):
        line.learn(epoch, np.arange(4) < count)
        clock.now += 2.0
    line.learn(epoch, np.ones(4, bool))
    line.learn(epoch, np.ones(4, bool))
    if occupied:
        assert written == []
    else:
        assert written[0].startswith("\r\x1b[2Kimagenet: origin 0.5 MB/s, 25 %")
        assert written[-1] == "\r\x1b[2K"
        assert len(written) == 4


SCRIPT = """
import sys, threading
from quiver_client import DataLoader, Dataset
from quiver_client.loader import progress
progress.FIRST_SECONDS = progress.SHOWN_SECONDS = 0.0
dataset = Dataset(sys.argv[1], sys.argv[2])
loader = DataLoader(dataset, 8, shuffle=True)
slow = threading.Event()
for _ in loader:
    slow.wait(0.05)  # never set: a step
for _ in loader:
    pass
loader.close()
assert not any(thread.name.startswith("quiver-p") for thread in threading.enumerate())
print("done", file=sys.stderr)
"""


def test_a_first_fill_shows_on_a_real_terminal_and_leaves_nothing_there(files: Files, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", SCRIPT, str(files.manifest), f"file://{tmp_path}/cache?capacity=1GiB"]
    process = subprocess.Popen(command, stderr=theirs, env={**os.environ, "QUIVER_PROGRESS": ""})
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # the other side has closed the terminal
        pass
    finally:
        os.close(ours)
    assert process.wait(60) == 0, shown
    text = shown.decode()
    assert re.search(r"\r\x1b\[2Kdata: origin [\d.,]+ MB/s, \d+ %", text)
    assert text.endswith("\x1b[2Kdone\r\n")
