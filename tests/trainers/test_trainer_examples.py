"""The examples of torchrun, Lightning, Fabric and Ray Train, each run as its docstring says."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"
QUIET = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
Start = Callable[..., subprocess.Popen[str]]
pytestmark = pytest.mark.timeout(300)  # several processes that each import a trainer, on a busy machine


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start an example in a folder of its own, under torchrun with a number of processes."""
    started: list[subprocess.Popen[str]] = []

    def begin(name: str, processes: int = 0) -> subprocess.Popen[str]:
        torchrun = (*TORCHRUN, str(processes)) if processes else ()
        environment = {**os.environ, **QUIET, "QUIVER_EXAMPLE_DATA": str(tmp_path), "TMPDIR": str(tmp_path)}
        started.append(
            subprocess.Popen(
                [sys.executable, *torchrun, str(EXAMPLES / name)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ended(process: subprocess.Popen[str]) -> list[str]:
    """Return the lines that a successful run printed."""
    shown, _ = process.communicate(timeout=280)
    assert process.returncode == 0, shown
    return shown.splitlines()


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    shown = []
    for each in process.stdout:
        shown.append(each)
        if each.startswith(line):
            return
    raise AssertionError("".join(shown))


def once(epoch: int) -> str:
    return f"epoch {epoch}: 600 of 600 samples read once"


def has(lines: list[str], beginning: str) -> bool:
    return any(line.startswith(beginning) for line in lines)


def test_processes_under_torchrun_that_are_killed_resume_in_another_number_of_them(start: Start) -> None:
    process = start("ddp_train.py", 3)
    wait_for(process, "epoch 1, checkpoint after step 10")
    for rank in psutil.Process(process.pid).children(recursive=True):
        rank.kill()
    process.communicate(timeout=280)
    assert process.returncode != 0
    lines = ended(start("ddp_train.py", 2))
    assert has(lines, once(1))
    assert has(lines, once(2))


def test_fully_sharded_processes_resume_in_another_number_of_them(start: Start) -> None:
    assert has(ended(start("fsdp_train.py", 3)), "checkpoint after step 7 of 3 ranks")
    assert has(ended(start("fsdp_train.py", 2)), "600 of 600 samples read once")


def test_lightning_starts_its_processes_and_resumes_from_its_own_checkpoint(start: Start) -> None:
    lines = ended(start("lightning_train.py"))
    assert [line for line in lines if "read once" in line][0::2] == [once(0), once(1)]
    assert once(2) in lines


def test_fabric_starts_its_processes_and_resumes_from_what_it_saved(start: Start) -> None:
    lines = ended(start("fabric_train.py"))
    assert [line for line in lines if "read once" in line] == [once(0), once(1)]


needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


@needs_ray
def test_ray_train_runs_in_processes_of_torchrun(start: Start) -> None:
    """Without a cluster, whose start takes a minute on a busy machine; the loaders are prepared as in one."""
    lines = ended(start("ray_train.py", 2))
    assert once(0) in lines
    assert once(1) in lines


@needs_ray
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_ray_train_starts_a_cluster_of_two_workers(start: Start) -> None:
    process = start("ray_train.py")
    shown, _ = process.communicate(timeout=590)
    assert process.returncode == 0, shown
    assert once(0) in shown
    assert once(1) in shown
