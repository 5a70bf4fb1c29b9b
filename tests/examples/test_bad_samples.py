"""The example of bad samples runs as it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.daemon import clean_environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "bad_samples.py"


def test_the_example_reads_all_good_samples_in_whole_batches() -> None:
    run = subprocess.run(
        [sys.executable, EXAMPLE], capture_output=True, text=True, check=False, env=clean_environment(), timeout=100
    )
    assert run.returncode == 0, run.stderr
    assert [line.split(", sizes")[0] for line in run.stdout.splitlines()[:2]] == [
        f"epoch {epoch}: 19 batches, 596 different samples" for epoch in range(2)
    ]
    assert all(run.stderr.count(f"('{name}'):") == 1 for name in ("0007.npy", "0123.npy", "0400.npy", "0300.npy"))
