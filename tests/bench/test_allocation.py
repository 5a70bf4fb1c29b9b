"""The bench of allocations: what it predicts, how it measures, and that it runs; figures are in docs/allocation.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.allocation.cases import CASES, MB, Case, Job, Source
from bench.allocation.model import equal_split, optimum, predicted
from bench.allocation.steady import measured

ROOT = Path(__file__).parents[2]
SMALL = [it.at_pace(2) for it in CASES if len(it.sources) <= 2]


def test_a_short_run_measures_every_job_and_writes_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.allocation", "--quick", "--case", "nothing-all-cached", "--policy", "none"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, env=os.environ | {"COLUMNS": "160"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "allocation.json").read_text())["rows"]
    assert (row["case"], row["policy"]) == ("nothing-all-cached", "none")
    assert row["measured"].keys() == row["need"].keys() == {"x", "y"}
    assert row["each"][0]["load_average"] >= 0


def test_an_unknown_case_is_named_with_those_that_there_are() -> None:
    command = [sys.executable, "-m", "bench.allocation", "--case", "floppies"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no case 'floppies'; there are a-group, ample" in " ".join(done.stderr.split())


@pytest.mark.parametrize("case", SMALL, ids=[it.name for it in SMALL])
def test_the_prediction_is_the_optimum_by_brute_force_and_nobody_is_below_an_equal_split(case: Case) -> None:
    told, best, even = predicted(case, "max-min"), optimum(case, "max-min"), equal_split(case)
    assert told is not None
    assert min(told.rates[job.name] / case.need(job) for job in case.jobs) == pytest.approx(
        min(best.rates[job.name] / case.need(job) for job in case.jobs), rel=0.02
    )
    assert all(told.rates[name] >= rate * (1 - 1e-6) for name, rate in even.rates.items())


def test_the_optimum_of_two_jobs_is_what_paper_and_pencil_say() -> None:
    sources = Source("a", 100 * MB, 10_000), Source("b", 100 * MB, 10_000)
    case = Case("", "", sources, (Job("x", "a", 300), Job("y", "b", 100)), cached=0.2, origin=0.75)
    # 40 MB for a: x needs 0.6 of the origin per byte, y all of it. The origin sends 0.75 · (3 + 1) · 0.8 = 2.4 MB/s.
    best = optimum(case)
    assert best.cache == pytest.approx({"a": 0.4, "b": 0.0})
    assert best.rates == pytest.approx({"x": 3e6, "y": 0.6e6})
    assert equal_split(case).rates == pytest.approx({"x": 1.5e6, "y": 1e6})


def test_a_window_counts_what_was_read_in_it_and_a_rank_that_waits_at_its_end_as_idle() -> None:
    busy = [{"t": float(at), "samples": 10 * at, "bytes": 0, "idle": 0.0} for at in range(11)]
    stalls = [*busy[:6], {"epoch": 0, "seconds": 5.0, "t": 5.0}]  # reads nothing from second 5 on
    told = measured([busy, stalls], (2.0, 8.0), sample_bytes=100)
    assert told.samples_per_second == pytest.approx(10 + 10 * 3 / 6)
    assert told.bytes_per_second == pytest.approx(1500)
    assert told.idle == pytest.approx((0 + 0.5) / 2)


def test_of_a_window_with_whole_epochs_only_those_count() -> None:
    """An epoch of 10 s is read at 20 a second for 4 s, and at 5 a second for the rest."""
    lines: list[dict[str, float]] = []
    for at in range(41):
        into = at % 10
        samples = 110 * (at // 10) + 20 * min(into, 4) + 5 * max(into - 4, 0)
        lines.append({"t": float(at), "samples": samples, "bytes": 0, "idle": 0.0})
        if at and not into:
            lines.append({"epoch": at // 10, "seconds": 10.0, "t": float(at)})
    assert measured([lines], (8.0, 34.0), sample_bytes=1, epochs=True).samples_per_second == pytest.approx(11.0)
    assert measured([lines], (8.0, 34.0), sample_bytes=1).samples_per_second == pytest.approx(12.0, abs=0.1)
    assert measured([lines], (8.0, 14.0), sample_bytes=1, epochs=True) == measured([lines], (8.0, 14.0), sample_bytes=1)
