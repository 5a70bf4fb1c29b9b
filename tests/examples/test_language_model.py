"""The example of a language model: what it claims of a run that is resumed, by its own output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "language_model.py"


def test_a_language_model_resumes_in_mid_epoch_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, env=environment, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "the same losses"
    first, last = (float(it) for it in re.findall(r"loss ([\d.]+) -> ([\d.]+)", done.stdout)[-1])
    assert last < first / 2, "it learns"
    assert [path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")] == []
