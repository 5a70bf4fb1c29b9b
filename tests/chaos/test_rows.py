"""The fault matrix is complete: each row is in docs/reliability.md and has a test, or a line that says why not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos.fault_report import FaultReport
from tests.chaos.rows import DOCUMENT, ROWS, Row, marks, written


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_has_evidence_and_is_in_the_document(row: Row) -> None:
    assert f"| {row.name} | {row.fault} | {row.sees} |" in DOCUMENT.read_text()
    assert row.argued or marks().get(row.name), f"no test has the mark fault({row.name!r})"


def test_the_table_of_the_document_is_up_to_date() -> None:
    document = DOCUMENT.read_text()
    assert document == written(document), "run: python -m tests.chaos.rows"


def test_marks_name_rows_of_the_matrix() -> None:
    assert set(marks()) <= {row.name for row in ROWS}


def report(rows: list[str], outcome: str, when: str = "call") -> Any:
    return SimpleNamespace(when=when, outcome=outcome, user_properties=[("fault", rows)])


def test_a_row_survives_if_none_of_its_tests_failed_and_one_passed() -> None:
    counted = FaultReport()
    counted.pytest_runtest_logreport(report(["M1", "M2"], "passed"))
    counted.pytest_runtest_logreport(report(["M2"], "failed"))
    counted.pytest_runtest_logreport(report(["M3"], "skipped", "setup"))
    counted.pytest_runtest_logreport(report(["M3"], "passed", "teardown"))
    assert counted.survived() == ["M1"]
    assert f"survived of rows run: 1 of 2 (the matrix has {len(ROWS)})" in counted.lines()[-1]


def test_a_mark_with_an_unknown_row_is_refused() -> None:
    item: Any = SimpleNamespace(
        nodeid="x", iter_markers=lambda name: [SimpleNamespace(args=("M99",))], user_properties=[]
    )
    with pytest.raises(pytest.UsageError, match="M99"):
        FaultReport().pytest_collection_modifyitems([item])
