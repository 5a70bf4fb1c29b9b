"""Plant the bugs and print which were caught: ``python -m tests.planted``."""

from __future__ import annotations

import argparse
import contextlib
import queue
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.planted.bugs import BUGS
from tests.planted.plant import Planted
from tests.planted.run import Copy, Verdict


def attempt(bugs: Sequence[Planted], at_once: int, *, find: bool = False, base: bool = True) -> list[Verdict]:
    """Try bugs, several at a time; print each verdict. ``base``: first check that the tests pass without any bug."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(at_once))
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(at_once):
            (Path(folder) / str(number)).mkdir()
            copies.put(stack.enter_context(contextlib.closing(Copy(Path(folder) / str(number)))))

        def tried(bug: Planted) -> Verdict:
            copy = copies.get()
            try:
                verdict = copy.try_out(bug, [test.split("::")[0] for test in bug.caught_by] if find else None)
            finally:
                copies.put(copy)
            print(verdict, flush=True)
            return verdict

        def passed(tests: Sequence[str]) -> tuple[int, list[tuple[str, str]]]:
            copy = copies.get()
            try:
                return copy.run(tests, first_only=False)
            finally:
                copies.put(copy)

        if base and not find:
            tests = sorted({test for bug in bugs for test in bug.caught_by})
            for code, failures in pool.map(passed, [part for at in range(at_once) if (part := tests[at::at_once])]):
                if code:
                    raise AssertionError(f"without a bug pytest exits with {code}: {failures}")
            print(f"without a bug {len(tests)} tests pass", flush=True)
        return list(pool.map(tried, bugs))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="how many bugs to try at a time")
    parser.add_argument("--only", nargs="+", help="bugs whose names contain one of these")
    parser.add_argument("--find", action="store_true", help="run the whole files of the tests, to find which fail")
    asked = parser.parse_args(arguments)
    bugs = [bug for bug in BUGS if not asked.only or any(part in bug.name for part in asked.only)]
    if not bugs:
        parser.error("no bug has such a name")
    began = time.monotonic()
    verdicts = attempt(bugs, asked.jobs, find=asked.find)
    caught = sum(verdict.caught for verdict in verdicts)
    print(f"{time.monotonic() - began:.0f} s")
    print(f"caught {caught} of {len(verdicts)}")
    return 0 if caught == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
