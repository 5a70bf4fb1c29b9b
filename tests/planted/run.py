"""Plants bugs in copies of the sources, runs the tests that should catch them, and judges what they say.

A copy is made of hard links, and a planted file replaces its link: the sources are never touched. The copy comes first
on the path of Python, also for the daemons that tests start, so what is tested is the copy; that is checked. A bug is
caught if a test *fails*: an import that fails, a fixture that raises or a run that hangs catches nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.planted.plant import ROOT, Planted

COPIED: Final = ("quiver", "client", "cacheserver", "tests", "bench", "examples", "deploy", "docs")
COPIED_FILES: Final = ("pyproject.toml", "README.md", "hatch_build.py", "Makefile")
RUN_SECONDS_MAX: Final = 150.0
TEST_SECONDS_MAX: Final = 60
NO_FAILURES: Final = ("ImportError", "ModuleNotFoundError", "SyntaxError", "NameError", "IndentationError")

# Added to the copy's conftest: one failing example is enough, and it has to be the same one each time.
WITHOUT_SHRINKING: Final = """
import hypothesis

once = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
hypothesis.settings.register_profile("planted", derandomize=True, phases=once, deadline=None, database=None)
hypothesis.settings.load_profile("planted")
"""


@dataclass(frozen=True)
class Verdict:
    """What the tests said of a bug. ``by``: the test that caught it, or why none did."""

    bug: Planted
    caught: bool
    by: str
    seconds: float

    def __str__(self) -> str:
        return f"{'caught' if self.caught else 'MISSED'} {self.seconds:5.1f} s  {self.bug.name}: {self.by}"


class Copy:
    """A copy of the sources, in which one bug at a time is planted."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "copy"
        for name in COPIED:
            if (ROOT / name).exists():
                ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".hypothesis")
                shutil.copytree(ROOT / name, self.root / name, copy_function=os.link, ignore=ignored, symlinks=True)
        for name in COPIED_FILES:
            if (ROOT / name).exists():
                os.link(ROOT / name, self.root / name)
        conftest = self.root / "tests" / "conftest.py"
        text = conftest.read_text() + WITHOUT_SHRINKING
        conftest.unlink()
        conftest.write_text(text)
        (folder / "tmp").mkdir()
        roots = [str(self.root), str(self.root / "client"), str(self.root / "cacheserver")]
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*roots, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TMPDIR": str(folder / "tmp"),
            "PLANTED_LOG": str(folder / "pytest.log"),
        }
        self._report, self._log = folder / "report.xml", folder / "pytest.log"
        self._check_imports()
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.planted.zygote"],
            env=self._environment,
            cwd=self.root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _check_imports(self) -> None:
        names = ("quiver", "quiver_client", "quiver_cacheserver", "tests.planted")
        script = "\n".join(f"import {name}; print({name}.__file__)" for name in names)
        found = subprocess.run(
            [sys.executable, "-c", script],
            env=self._environment,
            cwd=self.root,
            check=True,
            capture_output=True,
            text=True,
        )
        wrong = [file for file in found.stdout.split() if not file.startswith(str(self.root))]
        if wrong:
            raise AssertionError(f"not the copy is imported: {wrong}")

    def try_out(self, bug: Planted, tests: Iterable[str] | None = None) -> Verdict:
        """Plant a bug, run the tests, and restore the copy."""
        target = self.root / bug.file
        count = bug.occurrences(self.root)
        began = time.monotonic()
        if count != 1:
            return Verdict(bug, False, f"its text occurs {count} times in {bug.file}", 0.0)
        self._replace(target, bug.planted(self.root))
        try:
            code, failures = self.run(bug.caught_by if tests is None else tuple(tests), first_only=True)
        finally:
            target.unlink()
            os.link(ROOT / bug.file, target)
            _forget_compiled(target)
        seconds = time.monotonic() - began
        if code != 1 or not failures:
            return Verdict(bug, False, f"no test failed (exit {code}): {self._said()}", seconds)
        name, message = failures[0]
        wrong = next((kind for kind in NO_FAILURES if message.startswith(kind)), "")
        return Verdict(
            bug, not wrong, f"{name}: {wrong or message.splitlines()[0][:100] if message else name}", seconds
        )

    def run(self, tests: Sequence[str], *, first_only: bool) -> tuple[int, list[tuple[str, str]]]:
        """Run tests; return pytest's exit status, and name and message of each that failed."""
        self._report.unlink(missing_ok=True)
        arguments = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--no-header", f"--timeout={TEST_SECONDS_MAX}"]
        arguments += ["-o", "timeout_func_only=true"]  # a fixture that takes long on a busy machine catches nothing
        arguments += [f"--junitxml={self._report}", *(["-x"] if first_only else []), *tests]
        return self._pytest(arguments), _failures(self._report)

    def _pytest(self, arguments: list[str]) -> int:
        """Have the zygote run pytest; return its exit status, -1 if it did not end in time."""
        asked, answers = self._zygote.stdin, self._zygote.stdout
        assert asked is not None
        assert answers is not None
        asked.write(json.dumps(arguments) + "\n")
        asked.flush()
        pid = int(answers.readline())
        timer = threading.Timer(RUN_SECONDS_MAX, _kill_group, (pid,))
        timer.start()
        try:
            return int(answers.readline())
        finally:
            timer.cancel()

    def _said(self) -> str:
        """Return the last line that pytest said."""
        lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
        return next((line for line in reversed(lines) if line.strip()), "nothing")[:200]

    def close(self) -> None:
        """End the zygote."""
        self._zygote.communicate()

    def _replace(self, target: Path, text: str) -> None:
        target.unlink()
        target.write_text(text)
        _forget_compiled(target)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _forget_compiled(source: Path) -> None:
    """Remove compiled files: their time stamps count whole seconds."""
    for compiled in (source.parent / "__pycache__").glob(f"{source.stem}.*"):
        compiled.unlink()


def _failures(report: Path) -> list[tuple[str, str]]:
    """Return name and message of each test that failed; fixtures that raised are errors, and no failures."""
    if not report.exists():
        return []
    cases = ET.parse(report).getroot().iter("testcase")
    return [
        (f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}", failure.get("message") or "")
        for case in cases
        for failure in case.iter("failure")
    ]
