"""The graph of imports."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

from bench.imports import ImportGraph, as_svg

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


def test_a_cycle_is_listed_also_if_it_exists_only_for_type_checkers(tmp_path: Path) -> None:
    checkout = make_checkout(
        tmp_path,
        {
            "quiver/low.py": "",
            "quiver/one.py": "import quiver.two\nimport quiver.low\n",
            "quiver/two.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import quiver.one\n",
        },
    )
    told = survey("--root", str(checkout))
    assert "cycle: quiver.one <-> quiver.two\n" in told
    assert "1 cycles" in told


def test_components_are_in_layers_above_what_they_import(tmp_path: Path) -> None:
    checkout = make_checkout(
        tmp_path,
        {
            "quiver/low.py": "x = 1\n",
            "quiver/store/disk.py": "import quiver.low\n",
            "client/quiver_client/reader.py": "import quiver.store.disk\n",
        },
    )
    told = survey("--root", str(checkout), "--svg", str(tmp_path / "picture.svg"))
    layers = {line.split()[0]: at for at, line in enumerate(told.splitlines()) if line.startswith("    ")}
    assert layers["quiver_client.reader"] < layers["quiver.store"] < layers["quiver.low"]
    assert "cycle:" not in told
    assert (tmp_path / "picture.svg").read_text().count("<rect") == 6


def test_an_arrow_is_omitted_if_a_longer_path_exists() -> None:
    arrows = Counter({("quiver.a", "quiver.b"): 1, ("quiver.b", "quiver.c"): 1, ("quiver.a", "quiver.c"): 2})
    graph = ImportGraph(dict.fromkeys(("quiver.a", "quiver.b", "quiver.c"), 10), arrows, [])
    assert graph.needed_arrows() == [("quiver.a", "quiver.b"), ("quiver.b", "quiver.c")]
    assert as_svg(graph).count("<line") == 2
