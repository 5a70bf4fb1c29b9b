"""Runs the code of the README: its Python unchanged, and its commands with addresses and paths of the test."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from examples.rack import run_rack
from quiver_client import index

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
PYTHON = [code for language, code in BLOCKS if language == "python"]
SHELL = "".join(code for language, code in BLOCKS if not language)
COMMANDS = [line.split("#")[0].strip() for line in SHELL.splitlines() if line.startswith("quiver ")]
CLI = [sys.executable, "-c", "from quiver_client.cli import main; main()"]


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder with images, named as in the README, and the address of a rack that may read it."""
    folder = tmp_path_factory.mktemp("readme")
    random = np.random.default_rng(0)
    for label in ("cat", "dog"):
        target = folder / "data" / "imagenet" / "train" / label
        target.mkdir(parents=True)
        for number in range(20):
            pixels = random.integers(0, 256, (8, 8, 3), np.uint8)
            Image.fromarray(pixels).save(target / f"{number}.png")
    index(folder / "data" / "imagenet" / "train", folder / "imagenet.quiver")
    with run_rack(folder, [folder / "data"]) as daemons:
        yield folder, daemons[0].url


def put_in(text: str, folder: Path, url: str) -> str:
    return text.replace("/data/imagenet", str(folder / "data" / "imagenet")).replace("http://node1:7717", url)


def test_the_commands_of_the_readme_run(rack: tuple[Path, str]) -> None:
    folder, url = rack
    assert {line.split()[1] for line in COMMANDS} == {"index", "status", "warm", "verify"}
    (folder / "imagenet.quiver").unlink()  # the first command makes it
    for line in COMMANDS:
        words = shlex.split(put_in(line, folder, url))
        ran = subprocess.run([*CLI, *words[1:]], cwd=folder, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, f"{line}: {ran.stderr}"


def test_the_python_of_the_readme_runs(rack: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, url = rack
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("QUIVER_CACHE", "")
    assert len(PYTHON) == 3
    names: dict[str, Any] = {"transform": np.array}
    for code in PYTHON:
        small = code.replace("num_workers=8", "num_workers=0").replace("range(90)", "range(2)")
        exec(put_in(small, folder, url), names)
        dataset = names["dataset"]
        assert len(dataset) == 40
        assert dataset[0] is not None
        if "loader" in names:
            images, labels = next(iter(names["loader"]))
            assert images.shape == (40, 8, 8, 3)
            assert sorted(labels.tolist()) == [0] * 20 + [1] * 20
    assert names["epoch"] == 1
    names["loader"].close()


def test_every_flag_that_the_readme_names_exists() -> None:
    helps = ""
    for command in ("index", "info", "verify", "warm", "status"):
        helps += subprocess.run([*CLI, command, "--help"], capture_output=True, text=True, check=True).stdout
    for module in (["quiver_cacheserver.cli"], ["bench", "load"]):
        asked = [sys.executable, "-m", *module, "--help"]
        helps += subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert named
    assert {flag for flag in named if flag not in helps} == set()


def test_every_file_that_the_documents_link_to_exists() -> None:
    root = Path(__file__).parents[2]
    for page in [root / "README.md", root / "CHANGELOG.md", *root.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
