"""Processes that are killed at any change to their folder, and machines that lose power there.

``python -m tests.chaos.disk.crash_points`` is the command; ``--help`` says how to try more points, or others by a seed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.disk.faultfs import Control, Op, recorded

ROOT = Path(__file__).parents[3]
CRASH_POINTS = [sys.executable, "-m", "tests.chaos.disk.crash_points"]
# What strace calls the changes that faultfs.c counts. Creating a file is seen by its flag.
CALLS = {
    Op.WRITE: ("write", "pwrite64"),
    Op.FSYNC: ("fsync", "fdatasync"),
    Op.RENAME: ("rename", "renameat", "renameat2"),
    Op.TRUNCATE: ("ftruncate",),
    Op.ALLOCATE: ("fallocate",),
    Op.UNLINK: ("unlink", "unlinkat"),
    Op.MKDIR: ("mkdir", "mkdirat"),
}
RECIPE = """
    import sys
    from pathlib import Path
    from tests.chaos.disk.lives import StoreLife

    root = Path(sys.argv[1])
    life = StoreLife(shared=sys.argv[2] == "shared")
    life.prepare(root)
    life.run(root, [], lambda text: None)
"""


def crash(built: Path, *arguments: object) -> dict[str, Any]:
    """Run the command; return its figures."""
    assert built.exists()
    ended = subprocess.run([*CRASH_POINTS, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-8000:]
    figures: dict[str, Any] = json.loads(ended.stdout)
    assert figures["exact"] == figures["points"] > 0
    return figures


@pytest.mark.fault("C1", "E1")
def test_a_process_killed_at_some_changes_leaves_nothing_partial_and_resumes_exactly(built: Path) -> None:
    figures = crash(built, "--lives", "owned,shared,ledger", "--every", 11)
    assert figures["killed"] >= figures["points"] >= 12


@pytest.mark.fault("C1")
def test_a_power_cut_behind_some_calls_leaves_nothing_partial(built: Path) -> None:
    assert crash(built, "--lives", "owned,shared", "--power-cuts", 1, "--every", 11)["points"] >= 20


@pytest.mark.chaos
@pytest.mark.fault("C1", "E1")
def test_a_process_killed_at_every_change_leaves_nothing_partial_and_resumes_exactly(built: Path) -> None:
    figures = crash(built, "--lives", "owned,shared,ledger", "--points", 250)
    assert figures["killed"] > figures["points"] >= 250


@pytest.mark.chaos
@pytest.mark.fault("C1")
@pytest.mark.parametrize(("life", "every"), [("embedded", 6), ("daemon", 6)])
def test_a_training_process_or_a_daemon_killed_at_a_change_leaves_nothing_partial(
    built: Path, life: str, every: int
) -> None:
    figures = crash(built, "--lives", life, "--every", every)
    assert figures["killed"] >= figures["points"] >= 5


@pytest.mark.chaos
@pytest.mark.fault("C1")
def test_a_power_cut_behind_every_call_leaves_nothing_partial_and_a_ledger_that_is_exact_or_refused(
    built: Path,
) -> None:
    assert crash(built, "--lives", "owned,shared,ledger", "--points", 1500, "--power-cuts", 2)["points"] >= 1500


@pytest.mark.chaos
@pytest.mark.fault("C1")
@pytest.mark.parametrize("kind", ["owned", "shared"])
def test_the_library_counts_every_change_that_the_kernel_sees(control: Control, tmp_path: Path, kind: str) -> None:
    """That the points are all of them: strace, which sees system calls, counts as many as the library."""
    root, trace, record = tmp_path / "root", tmp_path / "trace", tmp_path / "record"
    control.root = root
    control.record_to(record)
    settings = [part for name, value in control.environment.items() for part in ("-E", f"{name}={value}")]
    script = textwrap.dedent(RECIPE)
    command = ["strace", "-f", "-y", "-qq", "-o", str(trace), *settings, sys.executable, "-c", script, str(root), kind]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("strace is not installed")
    if "PTRACE" in ended.stderr or "Operation not permitted" in ended.stderr:
        pytest.skip(f"strace may not trace here: {ended.stderr.strip()}")
    assert ended.returncode == 0, ended.stderr
    traced = re.findall(rf"^\d+ +(\w+)\((.*{re.escape(str(root))}.*)\) += \d+", trace.read_text(), re.MULTILINE)
    counted = Counter(it.op for it in recorded(record))
    assert counted == {
        **{op: sum(name in names for name, _ in traced) for op, names in CALLS.items()},
        Op.CREATE: sum("O_CREAT" in rest for _, rest in traced),
    }
    assert counted.total() > 50
