"""Ranks of one data-parallel group get the same samples in the same order: four processes over gloo, a scarce cache.

Without a leader, two such ranks of a first epoch differed in 66 to 89 of 100 batches.
"""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import rack_of
from tests.support.data import Files, make_files, random_files
from tests.support.ports import free_port
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
from quiver_client import BatchSampler, DataLoader, Dataset, Mix, merge_states
from quiver_client.loader import draw_wait
draw_wait.PATIENCE_SECONDS = draw_wait.PATIENCE_SECONDS_MIN = 0.1  # samples are soon read past the scarce cache
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
            assert each.wait(280) == 0, each.lines()[-20:]
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
        port = free_port()
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
loader = DataLoader(dataset, 8, shuffle=True, seed=5, mesh=mesh, num_workers={workers},
                    multiprocessing_context="fork" if {workers} else None, job="train", timeout=60,
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
        ((4, 1), ("dp_shard", "cp"), 4, 1),
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


def test_groups_agree_in_every_use_of_a_loader(ranks: Ranks) -> None:
    """Several epochs, two loaders at once, nested loops, a pass that all break off, a stock loader, a fixed order."""
    text = """
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
tp = mesh["tp"].get_group()
read = []
def part(batches, count=None):
    read.append([rows(batch) for batch, _ in zip(batches, range(count if count is not None else 1000))])
train = DataLoader(dataset, 16, shuffle=True, mesh=mesh, timeout=60)
other = DataLoader(dataset, 32, shuffle=True, replicate=tp, seed=3, timeout=60)
part(train)
part(train, 2)  # broken off by all
train.set_epoch(4)
for batch, another in zip(train, other):  # in turns, until the shorter one ends
    read.append([rows(batch), rows(another)])
for number, batch in enumerate(train):
    read.append([rows(batch)])
    if number == 1:
        part(train, 3)  # a loop within a loop
    if number == 3:
        train.close()  # it opens again
        break
state = train.state_dict()
part(train)
stock = torch.utils.data.DataLoader(dataset, batch_sampler=BatchSampler(dataset, 16, mesh=mesh))
read.append([[row_of[key] for key in batch["__key__"]] for batch in stock])
fixed = DataLoader(dataset, 16, shuffle=True, mesh=mesh, substitute=False)
part(fixed)
assert refused(lambda: DataLoader(dataset, 16, mesh=mesh, on_error="skip")).startswith("ValueError: on_error='skip':")
half = len(dataset) // 2
mix = Mix({"a": dataset[:half], "b": dataset[half:]}, weights={"a": 3, "b": 1}, seed=1)
mixed = DataLoader(mix, 16, shuffle=True, mesh=mesh, timeout=60)
guided = refused(lambda: DataLoader(Mix({"a": dataset, "b": dataset}, guided=True), 16, shuffle=True, mesh=mesh))
assert guided.startswith("ValueError: mesh: the weights of a guided mixture"), guided
mixture = [sorted(batch["__key__"])[:3] + list(batch["__key__"]) for batch in mixed]
for batch, _ in zip(mixed, range(3)):
    mixture.append(list(batch["__key__"]))
assert everybodys(mixed.state_dict())[rank // 2 * 2] == mixed.state_dict()
assert everybodys(mixture)[rank // 2 * 2] == mixture
assert merge_states(everybodys(mixed.state_dict()))["world_size"] == 1
assert everybodys(mixture)[(rank + 2) % 4] != mixture
mixed.close()
streams = train.order._role, fixed.order._role
answer([read, everybodys(state)[rank // 2 * 2] == state, [fixed.order.deal.rank, fixed.order.deal.world_size],
        train.state_dict(merged=True)["world_size"], [type(each).__name__ for each in streams]])
"""
    answers = ranks(text).answers()
    for first, second in (answers[:2], answers[2:]):
        assert first[0] == second[0]
        assert first[1]
        assert second[1]
    assert [answer[2] for answer in answers] == [[0, 2], [0, 2], [1, 2], [1, 2]]
    assert {answer[3] for answer in answers} == {1}
    assert [answer[4] for answer in answers] == [["Leader", "Member"], ["Follower", "Member"]] * 2
    for which in (0, -2, -1):  # whole epochs
        both = [itertools.chain(*answer[0][which]) for answer in (answers[0], answers[2])]
        assert sorted(itertools.chain(*both)) == list(range(SAMPLES))


def test_ranks_of_a_group_that_differ_are_told_what_differs(ranks: Ranks) -> None:
    text = """
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
def loader(**more):
    return DataLoader(dataset, **{"batch_size": 16, "shuffle": True, "mesh": mesh, "timeout": 60, **more})
def one(made, state=None, count=1):
    def call():
        if state is not None:
            made.load_state_dict(state)
        for _ in zip(range(count), made if count else ()):
            pass
    said = refused(call)
    distributed.barrier()
    made.close()
    return said
first = loader()
next(iter(first))
state = first.state_dict()
first.close()
said = {
    "batch_size": one(loader(batch_size=16 + rank)),
    "seed": one(loader(seed=rank)),
    "substitute": one(loader(substitute=rank == 0)),
    "order": one(loader(), state if rank else None),
    "sampler": one(loader(shuffle=False, sampler=torch.utils.data.RandomSampler(range(len(dataset)),
                                                generator=torch.Generator().manual_seed(rank)))),
    "follower alone": one(loader(timeout=1), count=rank),
    "leader alone": one(loader(batch_size=1, timeout=1), count=0 if rank else 1000),
    "leader breaks off": one(loader(), count=4 if rank else 1),
    "follower breaks off": one(loader(batch_size=1), count=1 if rank else 1000),
}
answer(said)
"""
    leader, follower = ranks(text, 2).answers()
    for name in ("batch_size", "seed", "substitute", "order", "sampler"):
        said = [each for each in (leader[name], follower[name]) if each is not None]
        assert said, "one of the two raises, or both"
        expected = "order" if name == "sampler" else name
        assert all(each.startswith(f"Misconfigured: {expected}: ") for each in said)
    assert "did not make this loader and begin its pass: waited" in follower["follower alone"]
    assert "rank 1: did not begin epoch 0" in leader["leader alone"]
    assert leader["leader breaks off"] is None
    assert "rank 0, the leader of rank 1 broke off epoch 0 while rank 1 reads on" in follower["leader breaks off"]
    assert follower["follower breaks off"] is None
    assert "rank 1 broke off epoch 0 while rank 0, its leader, reads on" in leader["follower breaks off"]


def test_a_killed_leader_ends_its_followers_with_an_error_and_a_stopped_follower_delays_nobody(
    ranks: Ranks, tmp_path: Path
) -> None:
    text = """
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
loader = DataLoader(dataset, 4, shuffle=True, mesh=mesh, timeout=60)
batches, read = iter(loader), []
for number in range(1000):
    while number == 30 and not os.path.exists(f"{folder}/{'leader' if rank == 0 else 'follower'}"):
        time.sleep(0.01)  # until the test goes on
    try:
        read.append(rows(next(batches)))
    except StopIteration:
        break
    except Exception as error:
        answer([number, f"{type(error).__name__}: {error}"])
        os._exit(0)
    answer(read)
"""
    leader, follower = (run := ranks(text, 2)).scripts
    until(lambda: all(len(each.lines()) == 30 for each in run.scripts), 60)
    assert leader.lines() == follower.lines()
    follower.signal(signal.SIGSTOP)
    (tmp_path / "leader").touch()
    until(lambda: len(leader.lines()) > 60, 60, "the leader reads on while its follower is stopped")
    (tmp_path / "follower").touch()
    follower.signal(signal.SIGCONT)
    leader.signal(signal.SIGKILL)
    assert follower.wait(200) == 0
    number, said = json.loads(follower.lines()[-1])
    assert number < SAMPLES // 4
    assert said.startswith("Unavailable: rank 0, the leader of rank 1: it is gone, and its group cannot go on")
    assert json.loads(follower.lines()[-2]) == json.loads(leader.lines()[-1])[:number]


def test_a_loader_that_is_dropped_in_all_ranks_after_the_same_batch_gives_all_of_them_that_batch(ranks: Ranks) -> None:
    text = """
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
def look():
    return rows(next(iter(DataLoader(dataset, 16, shuffle=True, mesh=mesh, timeout=60))))
if rank == 1:
    time.sleep(0.5)  # the leader has dropped its loader by then
looked = [look(), look()]
"""
    leader, follower = ranks(text + "answer(looked)\n", 2).answers()
    assert leader == follower
