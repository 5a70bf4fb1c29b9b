"""Training scripts in processes of their own, without importing torch each time: that takes longer than most tests.

Each is forked from a server that has imported torch (``tests.support.forking``), and not from the test's process.
It ends without finalizing its interpreter: tests of finalization use ``tests.support.endings``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.forking import FORKED


class Script:
    """A script in a session of its own, with warnings as errors and its output in a file."""

    def __init__(self, text: str, arguments: Sequence[object], log: Path) -> None:
        self.log = log
        log.touch()
        self._process = FORKED.Process(target=_run, args=(text, [str(each) for each in arguments], str(log)))
        self._process.start()

    def lines(self) -> list[str]:
        """Return the complete lines: a killed process may have written half of the last."""
        return self.log.read_text().rpartition("\n")[0].splitlines()

    @property
    def pid(self) -> int:
        """The process id, which is also that of the session and of the process group."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.exitcode is not None

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self, seconds: float = 30.0) -> int:
        """Return the exit status."""
        self._process.join(seconds)
        assert self._process.exitcode is not None, f"it does not end; it printed {self.lines()[-1:]}"
        return self._process.exitcode

    def kill(self) -> None:
        """Kill it, if it still runs, and all that it started."""
        assert self._process.pid is not None
        if not self.ended:
            for kill in (os.killpg, os.kill):  # it may not have its session yet, or have ended
                with contextlib.suppress(ProcessLookupError):
                    kill(self._process.pid, signal.SIGKILL)
        self.wait()


def _run(text: str, arguments: list[str], log: str) -> None:
    os.setsid()
    with Path(log).open("w") as output:
        os.dup2(output.fileno(), 1)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - for as long as the process lives
    sys.argv = ["script", *arguments]
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than there are processors
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "script", "exec"), names)
    sys.stdout.flush()
