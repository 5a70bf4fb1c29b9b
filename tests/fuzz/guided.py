"""Fuzzing guided by coverage: atheris (libFuzzer) on the same targets, each in a process of its own.

    python -m tests.fuzz.guided TARGET [libFuzzer's options]

Needs the extra ``fuzz``. Where atheris does not install, ``python -m tests.fuzz`` uses the mutator alone.
"""

from __future__ import annotations

import importlib.util
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.fuzz.target import INPUT_BYTES_MAX

RSS_MIB_MAX = 2048
INSTRUMENTED = ["quiver", "quiver_client", "quiver_cacheserver"]


def is_installed() -> bool:
    return importlib.util.find_spec("atheris") is not None


def run(name: str, seconds: float, out: Path) -> Any:
    """Fuzz a target for so long; return the outcome. What was found is also left in ``out``."""
    from tests.fuzz.run import Outcome, all_targets

    out.mkdir(parents=True, exist_ok=True)
    target = next(target for target in all_targets() if target.name == name)
    with tempfile.TemporaryDirectory(prefix="quiver-fuzz-") as corpus:
        for number, data in enumerate(target.corpus()):
            (Path(corpus) / f"seed{number}").write_bytes(data)
        options = [f"-max_total_time={max(int(seconds), 1)}", f"-max_len={INPUT_BYTES_MAX}", "-timeout=20"]
        options += [f"-rss_limit_mb={RSS_MIB_MAX}", f"-artifact_prefix={out}/{name}-", "-print_final_stats=1"]
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.guided", name, *options, corpus],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
        )  # fmt: skip
    tried = re.search(r"number_of_executed_units: (\d+)", done.stdout)
    found = re.search(r"Test unit written to (\S+)", done.stdout)
    outcome = Outcome(name, int(tried[1]) if tried else 0, seconds=time.monotonic() - began)
    if done.returncode:
        data = Path(found[1]).read_bytes() if found else b""
        outcome.findings = [(f"crash: {done.stdout[-3000:]}", data.hex())]
    return outcome


def main() -> None:
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        from tests.fuzz.run import all_targets

        targets = list(all_targets())
    target = next(target for target in targets if target.name == sys.argv[1])

    def mutated(data: bytes, size_max: int, seed: int) -> bytes:
        out = atheris.Mutate(data, size_max)
        return target.repair(out)[:size_max] if random.Random(seed).random() < 0.8 else out

    atheris.Setup([sys.argv[0], *sys.argv[2:]], lambda data: target.fuzz_one(data) and None, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
