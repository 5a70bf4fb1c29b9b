"""``examples/parts.py`` runs as it is."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "parts.py"


def test_the_example_of_parts_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    shown = capsys.readouterr().out
    assert "300 samples" in shown
    assert "refused: state: it is of dataset" in shown or "refused: state: it is of a dataset of" in shown
    assert "fields audio, id, speaker, seconds, text" in shown
