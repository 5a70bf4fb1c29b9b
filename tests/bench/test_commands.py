"""``python -m bench`` as users run it: a table, JSON with the measurements, and plots."""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.accelerator import Accelerator
from bench.arena import Arena, Result
from bench.data import make_data
from bench.measure import Consumer, Round, digests_of, measure
from bench.questions.base import Answer, Ratio, per_round, speed_ratio
from bench.stall import absent_bytes
from tests.support.daemon import Daemon
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "160"}
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The host question with two contenders, and a third whose interpreter does not exist."""
    out = tmp_path_factory.mktemp("out")
    arguments = [
        "host",
        "--quick",
        "--rounds",
        "1",
        "--samples",
        "64",
        "--peers",
        "quiver-bytes,files,raw",
        "--out",
        str(out),
    ]
    return bench(*arguments, "--python", "mapped=/no/such/python"), out


def test_a_question_writes_a_ratio_and_its_target_as_json(
    asked: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, out = asked
    assert done.returncode == 0, done.stderr
    told = json.loads((out / "host.json").read_text())
    ratio = told["ratios"][0]
    speeds = {name: one["median"]["bytes_a_second"] for name, one in told["contenders"].items()}
    assert speeds.keys() == {"quiver-bytes", "files"}
    assert ratio["value"] == pytest.approx(speeds["quiver-bytes"] / speeds["files"])
    assert (ratio["reach"], ratio["met"]) == (5.0, ratio["value"] >= 5.0)
    assert len(told["contenders"]["files"]["rounds"]) == told["configuration"]["rounds"] == 1
    assert told["facts"]["cores"] >= 1
    assert "torch" in told["facts"]["packages"]


def test_a_question_prints_a_table_and_the_absent_contenders_with_reasons(
    asked: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, out = asked
    assert "host tier ÷ best of formats on disk (quiver-bytes ÷ files)" in done.stdout
    assert "absent: mapped: /no/such/python: No such file or directory" in done.stdout
    assert json.loads((out / "host.json").read_text())["absent"].keys() == {"mapped"}


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is in the extra bench")
def test_plots_are_drawn_for_existing_answers(
    asked: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    _, out = asked
    done = bench("plots", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in out.glob("*.png")] == ["throughput-host.png"]
    assert (out / "throughput-host.png").read_bytes().startswith(b"\x89PNG")


def test_the_load_generator_reads_from_a_daemon_and_reports(tmp_path: Path) -> None:
    with Daemon(tmp_path / "node") as daemon:
        done = bench(
            *("load", "--cache", daemon.url, "--readers", "2", "--seconds", "0.5", "--size", "2MiB"),
            *("--sample-size", "20kB", "--batch-size", "8", "--step-time", "1", "--json"),
        )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["bytes_a_second"] > 0
    assert len(told["shares"]) == 2
    assert sum(told["shares"]) == pytest.approx(1)
    assert 0 < told["evenness"] <= 1
    assert 0 < told["utilisation"] < 1
    assert told["errors"] == 0
    assert told["stats"]["bytes_rack"] > 0


def test_the_load_generator_says_that_no_daemon_answers(tmp_path: Path) -> None:
    done = bench("load", "--cache", "http://127.0.0.1:1", "--readers", "1", "--seconds", "0.1", "--size", "64kB",
                 "--sample-size", "20kB")  # fmt: skip
    assert done.returncode == 1
    assert "Error: http://127.0.0.1:1: no daemon answers" in done.stderr


def test_a_server_ends_with_the_process_that_started_it_even_if_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, signal, sys\n"
        "from bench.servers import Server\n"
        "print(Server(['sleep', '600'], pathlib.Path(sys.argv[1])).pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "log")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    until(lambda: _gone(int(done.stdout)), what="the server is gone")


def _gone(pid: int) -> bool:
    """Whether a process has ended. When it is reaped depends on the machine's init process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_the_error_names_an_unknown_peer() -> None:
    done = bench("host", "--peers", "files,floppies")
    assert done.returncode == 2
    assert "no peer 'floppies'" in done.stderr


def test_a_contender_with_other_bytes_is_removed_and_one_with_another_order_is_marked(
    tmp_path: Path,
) -> None:
    data = make_data(tmp_path / "data", "blobs", 6, 1_000)
    samples = [[data.sample(at)] for at in data.order.tolist()]
    told = {"right": samples, "turned round": samples[::-1], "short": samples[:-1]}
    with Arena(data, 2, tmp_path, {}) as arena:
        for name, batches in told.items():
            content, ordered = digests_of(batches, None)
            arena.results[name] = Result({"content": content, "ordered": ordered})
        arena.check_same_bytes()
        assert {name: one.prepared["same_order"] for name, one in arena.results.items()} == {
            "right": True,
            "turned round": False,
        }
        assert arena.absent == {"short": "it delivered bytes that differ from the data"}


def test_a_round_counts_what_the_consumer_copied_and_how_long_the_accelerator_worked() -> None:
    batches = [[b"abc", memoryview(b"de")], [b"f"]]
    consumer = Consumer(5)
    done = measure(lambda: batches, 3, consumer, Accelerator(0.002))
    assert (done.samples, done.bytes) == (3, 6)
    assert bytes(consumer.tensor.tolist()) == b"fbcde"
    assert 0.004 <= done.utilisation * done.seconds <= done.seconds


def test_pages_of_a_file_that_are_not_in_memory_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(64 * mmap.PAGESIZE + 10)  # a hole, which no process has read
        assert absent_bytes(path) == 64 * mmap.PAGESIZE + 10
        os.pwrite(file.fileno(), b"x" * 3 * mmap.PAGESIZE, 0)
    assert absent_bytes(path) == 61 * mmap.PAGESIZE + 10
    assert absent_bytes(path) == 61 * mmap.PAGESIZE + 10, "counting reads nothing into memory"


def test_a_ratio_is_taken_between_rounds_that_ran_side_by_side() -> None:
    def rounds(*seconds: float) -> Result:
        return Result({}, [Round(one, 1, 10**9, one / 2, 0.0, 0.0, 0.0) for one in seconds])

    answer = Answer(contenders={"a": rounds(1.0, 2.0, 4.0), "b": rounds(2.0, 1.0, 4.0), "c": rounds(9.0, 9.0, 9.0)})
    assert per_round(answer, "a", "b", lambda done: done.cpu_seconds / done.bytes) == (0.5, 2.0, 1.0)
    speed_ratio(answer, "ours ÷ theirs", ["a", "absent"], ["b", "c"], 2.0)
    (ratio,) = answer.ratios
    assert ratio.each == (2.0, 0.5, 1.0)
    assert (ratio.value, ratio.met) == (1.0, False)


@pytest.mark.parametrize(("ratio", "met"), [
    (Ratio("a", 4.9, 5.0), False), (Ratio("a", 5.0, 5.0), True), (Ratio("a", 0.6, 0.5, "≤"), False),
    (Ratio("a", 0.5, 0.5, "≤"), True), (Ratio("a", 1.0), None),
])  # fmt: skip
def test_a_target_is_met_or_missed_or_absent(ratio: Ratio, met: bool | None) -> None:
    assert ratio.met is met
