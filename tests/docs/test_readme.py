"""Runs the code of the README: its Python unchanged, and its commands with addresses and paths of the test."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from examples.rack import run_rack
from quiver_client import DataLoader, Dataset, index
from tests.support.daemon import clean_environment
from tests.support.etcd import free_ports

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
PYTHON = [code for language, code in BLOCKS if language == "python"]
SHELL = [code for language, code in BLOCKS if not language]
OPERATING = next(code for code in SHELL if "quiver jobs" in code)


def commands(shell: str) -> list[str]:
    return [line.split("#")[0].strip() for line in shell.splitlines() if line.startswith("quiver ")]


COMMANDS = commands("".join(code for code in SHELL if code != OPERATING))
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
    assert len(PYTHON) == 4
    names: dict[str, Any] = {"transform": np.array}
    for code in PYTHON:
        small = code.replace("num_workers=8", "num_workers=0").replace("range(90)", "range(2)").replace("== 3", "== 1")
        if "Mix" in code:
            names["loader"].close()
        exec(put_in(small, folder, url), names)
        dataset = names["dataset"]
        assert len(dataset) == 40
        assert dataset[0] is not None
        if "mix" in names:
            mixed = next(iter(names["loader"]))
            assert sorted(names["mix"].parts_of(range(len(names["mix"])))) == ["all"] * 36 + ["cats"] * 20
            assert len(mixed["image"]) == len(names["cats"]) / 0.2
        elif "loader" in names:
            images, labels = next(iter(names["loader"]))
            assert images.shape == (40, 8, 8, 3)
            assert sorted(labels.tolist()) == [0] * 20 + [1] * 20
    assert names["epoch"] == 1
    names["loader"].close()


@pytest.mark.timeout(300)
def test_the_commands_for_operators_run(rack: tuple[Path, str], tmp_path: Path) -> None:
    """One after the other, in a rack that holds two datasets, one of which a job that was saved had begun."""
    folder, url = rack
    manifest, crops = tmp_path / "imagenet.quiver", tmp_path / "old-crops.quiver"
    index(folder / "data" / "imagenet" / "train", manifest, name="imagenet")
    index(folder / "data" / "imagenet" / "train" / "dog", crops, name="old-crops")
    for name in ("a", "b"):
        (tmp_path / f"{name}.quiver").write_bytes(manifest.read_bytes())
    loader = DataLoader(Dataset(manifest, cache=url, fields=["label"]), batch_size=8, shuffle=True)
    batches = iter(loader)
    next(batches)
    torch.save({"loader": loader.state_dict()}, tmp_path / "checkpoint.pt")
    loader.close()
    (tmp_path / "fleet.toml").write_text(
        '[[racks]]\nname = "r"\nnodes = 3\nssd_per_node = "1TB"\norigins = { s3 = "1GB/s" }\n'
        '[[jobs]]\nname = "j"\ndataset = "d"\nsize = "9TB"\norigin = "s3"\nrate = "2GB/s"\nepochs = 2\n'
    )
    environment = clean_environment() | {"QUIVER_CACHE": url}
    asked = [*CLI, "status", "--json"]
    status = json.loads(subprocess.run(asked, env=environment, capture_output=True, text=True, check=True).stdout)
    node = max(member["id"] for member in status["members"])
    subprocess.run([*CLI, "warm", str(crops)], env=environment, capture_output=True, check=True)
    for line in [*commands(OPERATING), "quiver undrain node3"]:
        ours = re.sub(r"http://r(ack)?\d:7717(,http://r\d:7717)?", url, line).replace("node3", node)
        ran = subprocess.run(
            [*CLI, *shlex.split(ours)[1:]], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, f"{line}: {ran.stdout}{ran.stderr}"
        assert ran.stdout.strip(), line


def test_every_flag_that_the_readme_names_exists() -> None:
    helps = ""
    tokens = ("token keygen", "token create", "token show")
    operating = [line.split()[1] for line in commands(OPERATING)]
    for command in ("index", "info", "verify", "status", "probe", "tls init", *operating, *tokens):
        helps += subprocess.run([*CLI, *command.split(), "--help"], capture_output=True, text=True, check=True).stdout
    for module in (["quiver_cacheserver.cli"], ["bench", "load"]):
        asked = [sys.executable, "-m", *module, "--help"]
        helps += subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert named
    assert {flag for flag in named if flag not in helps} == set()


def test_every_file_that_the_documents_link_to_exists() -> None:
    root = Path(__file__).parents[2]
    for page in [root / "README.md", root / "CHANGELOG.md", root / "SECURITY.md", *root.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_commands_for_a_shared_network_run(rack: tuple[Path, str], tmp_path: Path) -> None:
    """One after the other, in a shell, with this machine as node1; the daemon runs while those after it do."""
    folder, _ = rack
    blocks = [code for language, code in BLOCKS if language == "sh"]
    assert len(blocks) == 3
    (port,) = free_ports(1)
    (tmp_path / "imagenet.quiver").write_bytes((folder / "imagenet.quiver").read_bytes())
    script = "".join(blocks).replace("\\\n", " ")
    for name, here in {
        "node1=node1 ": "node1=127.0.0.1 ",
        "--listen 0.0.0.0:7717": f"--listen 127.0.0.1:{port}",
        "https://node1:7717": f"https://127.0.0.1:{port}",
        "/ssd/quiver --capacity 2TB": f"{tmp_path}/data --capacity 1GiB",
        "--etcd http://etcd:2379": f"--origin {folder}/data",
    }.items():
        assert name in script, name
        script = script.replace(name, here)
    daemon = next(line for line in script.splitlines() if line.startswith("quiver-cacheserver "))
    waiting = f"until {sys.executable} -c 'import socket; socket.create_connection((\"127.0.0.1\", {port})).close()'"
    script = script.replace(daemon, f"{daemon} & trap 'kill $!; wait' EXIT; {waiting} 2>/dev/null; do sleep 0.1; done")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-euc", script],
        cwd=tmp_path,
        env={**clean_environment(), "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"tenant +vision", ran.stdout)
    assert stat.S_IMODE(next((tmp_path / "rack-keys").glob("*.key")).stat().st_mode) == 0o600
    assert list((tmp_path / "data" / "shards").rglob("*")), "the rack was filled"
