"""Runs scripts up to the end of their interpreter, many at a time, each forked from a server that has imported torch.

A forked process of ``multiprocessing`` ends by ``os._exit``, without finalization. Here it ends as ``sys.exit`` does,
by ``Py_Exit``: it joins threads, runs ``atexit`` callbacks, and finalizes the interpreter.

The slow part is the last one, which frees modules. So the process is ended a moment after finalization
began, when daemon threads that take the GIL have been ended.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.support.forking import FORKED

AT_ONCE: Final = 4
FINALIZING: Final = 70  # the exit status of a process that reached finalization without a thread of ours
WITH_THREADS: Final = 71
CUT_OFF_SECONDS: Final = 0.05  # for other threads to acquire the GIL and be ended


class Ended(NamedTuple):
    status: int
    printed: str


def ended(scripts: Sequence[str], folder: Path, *, seconds: float = 60.0) -> list[Ended]:
    """Run scripts, with ``number`` and ``folder`` as variables; return the exit status and output of each."""
    found: list[Ended] = []
    for first in range(0, len(scripts), AT_ONCE):
        running = []
        for number in range(first, min(first + AT_ONCE, len(scripts))):
            log = folder / f"{number}.log"
            process = FORKED.Process(target=_run, args=(scripts[number], number, str(folder), str(log)))
            process.start()
            running.append((process, log))
        for process, log in running:
            process.join(seconds)
            if process.exitcode is None:
                process.kill()
                process.join()
            assert process.exitcode is not None
            found.append(Ended(process.exitcode, log.read_text()))
            process.close()
    return found


class _Output:
    """Standard output. The interpreter flushes it first when it finalizes."""

    def __init__(self, output: Any) -> None:
        self.write = output.write
        self._flush = output.flush

    def flush(self) -> None:
        self._flush()
        if sys.is_finalizing():
            ours = [thread.name for thread in threading.enumerate() if thread.name.startswith("quiver")]
            if ours:
                os.write(2, f"still there: {ours}\n".encode())
            time.sleep(CUT_OFF_SECONDS)
            os._exit(WITH_THREADS if ours else FINALIZING)


def _run(text: str, number: int, folder: str, log: str) -> None:
    with Path(log).open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout = _Output(open(1, "w", closefd=False))  # noqa: SIM115 - for as long as the process lives
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    vars(sys.modules["__main__"]).update(number=number, folder=folder)
    ctypes.pythonapi.Py_Exit.argtypes = (ctypes.c_int,)
    ctypes.pythonapi.Py_Exit(_status(text))


def _status(text: str) -> int:
    """Run a script so that no frame holds its variables afterwards; return the exit status that it requests."""
    try:
        exec(compile(text, "script", "exec"), vars(sys.modules["__main__"]))
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 0
    except Exception:  # noqa: BLE001 - as the interpreter does with what a script raises
        traceback.print_exc()
        return 1
    return 0
