"""The claims of ``docs/substitution.md``, at a small scale, and that the script writes its tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.soundness import BEGIN, CASES, END, Results, Scale, block, measure, rendered, shape

DOCUMENT = (Path(__file__).parents[2] / "docs" / "substitution.md").read_text()


@pytest.fixture(scope="module")
def results() -> Results:
    return measure(Scale(shards=64, samples=32, batch=32, epochs=3, layouts=1, seeds=2, passes=2, uniform_runs=5))


def test_every_sample_is_taken_exactly_once_per_epoch(results: Results) -> None:
    assert [(it.name, it.duplicates, it.omissions) for it in results.orders] == [(case.name, 0, 0) for case in CASES]
    assert all(it.epochs >= results.scale.epochs for it in results.orders)


def test_mixed_layout_raises_no_alarm(results: Results) -> None:
    mixed = [it for it in results.labels if it.name.startswith("mixed")]
    assert mixed
    assert all(it.warned == 0 < it.epochs for it in mixed)
    assert all(it.warned == 0 < it.epochs for it in results.alarms)


def test_classes_in_order_in_a_sequential_layout_raise_the_alarm_in_every_epoch(results: Results) -> None:
    alike = [it for it in results.labels if it.name.startswith("sequential") and "50%" not in it.name]
    assert alike
    assert all(it.warned == it.epochs > 0 for it in alike)


def test_the_document_has_the_tables_that_the_script_writes(results: Results) -> None:
    assert DOCUMENT.count(BEGIN) == DOCUMENT.count(END) == 1
    assert shape(block(DOCUMENT)) == shape(rendered(results))
