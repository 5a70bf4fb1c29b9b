"""``make demo`` is what a newcomer sees first: the tests check its claims against its own table."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
ROW = re.compile(r"│\s+(\d+) │\s+([\d.]+)% │\s+([\d,]+) │\s+([\d,]+) │\s+([\d,]+) │\s+([\d,]+) │\s+([\d.]+) │(.*)│")


def start(folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen([sys.executable, str(DEMO)], stdout=subprocess.PIPE, text=True, env=environment)


def left_behind(folder: Path) -> list[str]:
    """Return the commands of processes that use the folder, and the files in it."""
    running = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    files = [str(path) for path in folder.iterdir() if not path.name.startswith("torchinductor")]  # torch's own
    return [command for command in running if str(folder) in command] + files


def test_the_demo_trains_through_a_rack_and_reads_the_origin_once(tmp_path: Path) -> None:
    process = start(tmp_path)
    shown, _ = process.communicate(timeout=240)
    assert process.returncode == 0, shown
    rows = [match.groups() for match in map(ROW.match, shown.splitlines()) if match]
    assert [int(row[0]) for row in rows] == list(range(1, 9)), shown
    killed = next(at for at, row in enumerate(rows) if "killed" in row[7])
    shares = [float(row[6]) for row in rows]
    assert shares[0] == 1.0
    assert shares[1:killed] == [0.0] * (killed - 1)
    assert 0 < shares[killed] + shares[killed + 1] < 1, "only the dead daemon's shards are read again"
    assert shares[killed + 2 :] == [0.0] * len(shares[killed + 2 :])
    assert float(rows[-1][1]) >= 95.0
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_interrupted_stops_all_that_it_started(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path)
    assert process.stdout is not None
    while "daemons are up" not in (line := process.stdout.readline()):
        assert line, "the demo ended by itself"
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert left_behind(tmp_path) == []
