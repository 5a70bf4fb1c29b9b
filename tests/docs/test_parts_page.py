"""The code of docs/parts.md runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.people import make_people

PAGE = (Path(__file__).parents[2] / "docs" / "parts.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_code_of_the_page_on_parts_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_people(tmp_path, 120, name="imagenet")
    make_people(tmp_path, 100, name="more")
    monkeypatch.setenv("QUIVER_CACHE", f"file://{tmp_path}/cache?capacity=1GiB")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in BLOCKS[:6]:
        exec(block, names)
    assert len(names["cats"]) == len(names["every_tenth"]) * 2.5 == 30
    assert [len(names[name]) for name in ("small", "chosen", "both", "joined")] == [10, 3, 20, 100]
    assert names["joined"][0].keys() == {"image", "label", "image_other"}
    assert len(list(names["stream"])) == 120
    for loader in (names["loader"],):
        loader.close()
    names["dataset"].close()
