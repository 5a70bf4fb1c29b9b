"""Ranks of one data-parallel group get the same samples in the same order: four processes over gloo, a scarce cache.

Without a leader, two such ranks of a first epoch differed in 66 to 89 of 100 batches.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from socket import create_server
from typing import Any

import pytest

from tests.support.daemon import rack_of
from tests.support.data import Files, make_files, random_files
from tests.support.scripts import Script
from tests.support.waiting import until

SAMPLES = 300
Ranks = Callable[..., "Run"]

BEGIN = """
import hashlib, json, logging, os, signal, sys, time
rank, world_size, port, manifest, cache, folder = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:7]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
import torch, torch.distributed as distributed
from torch.distributed.device_mesh import init_device_mesh
from quiver_client import BatchSampler, DataLoader, Dataset, merge_states
distributed.init_process_group("gloo", rank=rank, world_size=world_size)
dataset = Dataset(manifest, cache)
dataset = Dataset(manifest, cache, fields=[*dataset.fields, "__key__"])
row_of = {dataset.manifest.key(row): row for row in range(len(dataset))}
def rows(batch):
    return [row_of[key] for key in batch["__key__"]]
def answer(value):
    print(json.dumps(value), flush=True)
def everybodys(value):
    gathered = [None] * world_size
    distributed.all_gather_object(gathered, value)
    return gathered
def refused(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""
END = """
distributed.barrier()
dataset.close()
distributed.destroy_process_group()
"""


class Run:
    """The ranks of a job."""

    def __init__(self, scripts: list[Script]) -> None:
        self.scripts = scripts

    def answers(self) -> list[Any]:
        """Wait for all; return the last line of each."""
        for each in self.scripts:
            assert each.wait(100) == 0, each.lines()[-20:]
        return [json.loads(each.lines()[-1]) for each in self.scripts]

    def killed_answers(self) -> list[Any]:
        """Wait until each has answered, and kill all."""
        until(lambda: all(each.lines() or each.ended for each in self.scripts), 100)
        answers = [json.loads(each.lines()[-1]) for each in self.scripts]
        for each in self.scripts:
            each.kill()
        return answers


@pytest.fixture(scope="module")
def scarce(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Files, str]]:
    """A dataset of about sixty shards, and a rack that holds a fifth of it."""
    folder = tmp_path_factory.mktemp("scarce")
    files = make_files(folder, random_files(SAMPLES, low=2_000, high=20_000), shard_bytes="64KiB")
    with rack_of(1, folder / "rack", origins=[files.folder], capacity=f"{files.total_bytes() // 5}") as [daemon]:
        yield files, daemon.url


@pytest.fixture
def ranks(scarce: tuple[Files, str], tmp_path: Path) -> Iterator[Ranks]:
    """Start a script in several ranks."""
    started: list[Script] = []

    def run(text: str, count: int = 4, end: str = END) -> Run:
        with closing(create_server(("127.0.0.1", 0))) as listening:
            port = listening.getsockname()[1]
        files, cache = scarce
        mine = [
            Script(
                BEGIN + text + end,
                [rank, count, port, files.manifest, cache, tmp_path],
                tmp_path / f"{len(started)}-{rank}.log",
            )
            for rank in range(count)
        ]
        started.extend(mine)
        return Run(mine)

    yield run
    for each in started:
        each.kill()


TRAIN = """
sizes, names, stop = {layout}
mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
loader = DataLoader(dataset, 8, shuffle=True, seed=5, mesh=mesh, num_workers={workers}, job="train", timeout=60,
                    ledger=f"{{folder}}/{name}.ledger")
loader.load_state_dict(torch.load(f"{{folder}}/state.pt")) if os.path.exists(f"{{folder}}/state.pt") else None
read, hashes = [], []
for number, batch in enumerate(loader, 1):
    read.append(rows(batch))
    hashes.append(hashlib.sha256(b"".join(batch["image"] if "image" in batch else batch["png"])).hexdigest())
    if number == stop:
        break
state = loader.state_dict()
states = everybodys(state)
if rank == 0:
    torch.save(merge_states(states), f"{{folder}}/state.pt")
answer([mesh.get_coordinate(), sum(read, []), hashes, state == states[rank // sizes[-1] * sizes[-1]],
        loader.order._consumer.view is not None])
if stop:
    signal.pause()
loader.close()
"""


def test_two_by_two_ranks_that_are_killed_resume_on_four_by_one_and_one_by_two(ranks: Ranks) -> None:
    """Batches are the same within each group, by their bytes; over all layouts each sample is read once."""
    read: list[list[int]] = []
    layouts = [
        ((2, 2), ("dp", "tp"), 7, 0),
        ((4, 1), ("dp_shard", "cp"), 4, 2),
        ((1, 2), ("dp", "tp"), 0, 0),
    ]
    for number, (sizes, names, stop, workers) in enumerate(layouts):
        text = TRAIN.format(layout=(sizes, names, stop), workers=workers, name=number)
        run = ranks(text, sizes[0] * sizes[1])
        answers = run.killed_answers() if stop else run.answers()
        groups: dict[int, list[Any]] = {}
        for [at, *rest] in answers:
            groups.setdefault(at[0], []).append(rest)
        assert len(groups) == sizes[0]
        for members in groups.values():
            assert len(members) == sizes[1]
            assert all(each[:3] == members[0][:3] for each in members)
            assert all(each[2] for each in members), "the state is the group's"
            assert [each[3] for each in members] == [True, *[False] * (sizes[1] - 1)], "one consumer reports"
            read.append(members[0][0])
    assert sorted(itertools.chain(*read)) == list(range(SAMPLES))
