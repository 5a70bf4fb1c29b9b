"""The typed program of a user runs; ``make check`` runs mypy --strict over it."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.packaging import user_code
from tests.support.people import make_people

ROOT = Path(__file__).parents[2]


def test_a_typed_program_runs_and_is_checked_by_mypy(tmp_path: Path) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["strict"] is True
    assert "tests/packaging/user_code.py" in settings["files"]
    assert user_code.main(str(make_people(tmp_path)), f"file://{tmp_path}/cache?capacity=1GiB") > 0
