"""Two ranks of a real trainer over gloo, each in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.data import Files
from tests.support.ports import free_port
from tests.support.scripts import Script

Ranks = Callable[..., list[Any]]

BEGIN = """
import json, os, sys, warnings
warnings.resetwarnings()
warnings.simplefilter("ignore")  # of the trainers' own
rank, port, manifest, cache = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
folder = sys.argv[5]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
import torch
from quiver_client import DataLoader, Dataset
dataset = Dataset(manifest, cache, fields=["__key__"])
row_of = {dataset.manifest.key(row): row for row in range(len(dataset))}
def rows(batch):
    return [row_of[key] for key in batch["__key__"]]
def answer(value):
    print(json.dumps(value), flush=True)
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several processes that each import a trainer take minutes on a busy machine."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture
def ranks(files: Files, tmp_path: Path) -> Iterator[Ranks]:
    """Run a script in several ranks; return the answer of each."""
    started: list[Script] = []

    def run(text: str, count: int = 2, seconds: float = 280) -> list[Any]:
        port = free_port()
        cache = f"file://{tmp_path}/cache?capacity=1GiB"
        mine = [
            Script(BEGIN + text, [rank, port, files.manifest, cache, tmp_path], tmp_path / f"{len(started)}-{rank}.log")
            for rank in range(count)
        ]
        started.extend(mine)
        for each in mine:
            assert each.wait(seconds) == 0, each.lines()[-20:]
        return [json.loads(each.lines()[-1]) for each in mine]

    yield run
    for each in started:
        each.kill()
