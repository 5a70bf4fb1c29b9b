"""What became of the rows of the fault matrix in a run of pytest: ``--faults`` prints it at the end.

A row survived if no test that is evidence for it failed, and at least one passed. With pytest-xdist the workers attach
the rows to their reports, and the controller counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest

from tests.chaos.rows import ROWS


class FaultReport:
    """Collects outcomes by row."""

    def __init__(self) -> None:
        self.outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        known = {row.name for row in ROWS}
        for item in items:
            rows = [row for mark in item.iter_markers("fault") for row in mark.args]
            if unknown := set(rows) - known:
                raise pytest.UsageError(f"{item.nodeid}: no such rows in the fault matrix: {sorted(unknown)}")
            if rows:
                item.user_properties.append(("fault", sorted(set(rows))))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":  # a failed or skipped setup has no call
            for name, rows in report.user_properties:
                if name == "fault":
                    self.add(rows if isinstance(rows, list) else [], report.outcome)

    def add(self, rows: Iterable[str], outcome: str) -> None:
        for row in rows:
            self.outcomes[row][outcome] += 1

    def survived(self) -> list[str]:
        return [row for row, counts in self.outcomes.items() if counts["passed"] and not counts["failed"]]

    def lines(self) -> list[str]:
        run = [row for row, counts in self.outcomes.items() if counts["passed"] or counts["failed"]]
        shown = []
        for row in ROWS:
            counts = self.outcomes.get(row.name)
            if counts is None:
                shown.append(f"{row.name:<4} not run   {row.fault:.90}")
                continue
            word = "FAILED" if counts["failed"] else "survived" if counts["passed"] else "skipped"
            tests = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
            shown.append(f"{row.name:<4} {word:<9} {row.fault:.90} ({tests})")
        count = f"{len(self.survived())} of {len(run)} (the matrix has {len(ROWS)})"
        return [*shown, f"fault rows survived of rows run: {count}"]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        if config.getoption("--faults"):
            terminalreporter.section("fault matrix")
            for line in self.lines():
                terminalreporter.write_line(line)
