"""The picture of imports."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

from bench.imports import House, drawn

ROOT = Path(__file__).parents[2]


def survey(*arguments: str) -> str:
    command = [sys.executable, "-m", "bench.imports", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def make_checkout(root: Path, modules: dict[str, str]) -> Path:
    for top, source in (("quiver", "."), ("quiver_client", "client"), ("quiver_cacheserver", "cacheserver")):
        folder = root / source / top
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    for name, text in modules.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    return root


def test_a_circle_is_named_also_where_only_a_type_checker_sees_it(tmp_path: Path) -> None:
    checkout = make_checkout(
        tmp_path,
        {
            "quiver/low.py": "",
            "quiver/one.py": "import quiver.two\nimport quiver.low\n",
            "quiver/two.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import quiver.one\n",
        },
    )
    told = survey("--root", str(checkout))
    assert "circle: quiver.one <-> quiver.two\n" in told
    assert "1 circles" in told


def test_rooms_stand_above_what_they_import(tmp_path: Path) -> None:
    checkout = make_checkout(
        tmp_path,
        {
            "quiver/low.py": "x = 1\n",
            "quiver/store/disk.py": "import quiver.low\n",
            "client/quiver_client/reader.py": "import quiver.store.disk\n",
        },
    )
    told = survey("--root", str(checkout), "--svg", str(tmp_path / "picture.svg"))
    floors = {line.split()[0]: at for at, line in enumerate(told.splitlines()) if line.startswith("    ")}
    assert floors["quiver_client.reader"] < floors["quiver.store"] < floors["quiver.low"]
    assert "circle:" not in told
    assert (tmp_path / "picture.svg").read_text().count("<rect") == 6


def test_an_arrow_is_drawn_only_where_no_longer_way_leads() -> None:
    arrows = Counter({("quiver.a", "quiver.b"): 1, ("quiver.b", "quiver.c"): 1, ("quiver.a", "quiver.c"): 2})
    house = House(dict.fromkeys(("quiver.a", "quiver.b", "quiver.c"), 10), arrows, [])
    assert house.needed_arrows() == [("quiver.a", "quiver.b"), ("quiver.b", "quiver.c")]
    assert drawn(house).count("<line") == 2
