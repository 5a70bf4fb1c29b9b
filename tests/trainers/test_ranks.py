"""Ranks that would deal an epoch differently: detected through torch.distributed's store; no rank waits for another."""

from __future__ import annotations

from typing import Any

from tests.trainers.conftest import Ranks

SAMPLES = 150
BEGIN = """
import torch.distributed as distributed
from quiver_client import BatchSampler, merge_states
from torch.utils.data import DistributedSampler
distributed.init_process_group("gloo", rank=rank, world_size=2)
def passes(loader, count=2):
    try:
        return [sum(map(rows, loader), []) for _ in range(count)]
    except Exception as error:
        return str(error)
    finally:
        distributed.barrier()
def peeked(loader):
    if rank == 0:
        next(iter(loader))
    return loader
"""
END = """
answer(said)
distributed.destroy_process_group()
"""


def exact(answers: list[Any]) -> None:
    for first, second in zip(*answers, strict=True):
        assert sorted(first + second) == list(range(SAMPLES))


def test_a_rank_that_looked_at_a_batch_alone_is_detected_at_the_end_of_the_epoch(ranks: Ranks) -> None:
    """From then on the ranks used to read different epochs: 765 of 1,003 samples, without an error."""
    text = """
stock = torch.utils.data.DataLoader
def peeked_by_set_epoch():
    loader = peeked(DataLoader(dataset, 16, shuffle=True))
    loader.set_epoch(0)
    return loader
said = [
    passes(peeked(DataLoader(dataset, 16, shuffle=True))),
    passes(peeked(stock(dataset, batch_sampler=BatchSampler(dataset, 16)))),
    passes(peeked(DataLoader(dataset, 16, sampler=DistributedSampler(dataset)))),
    passes(peeked(DataLoader(dataset, 16))),
    passes(peeked_by_set_epoch()),
]
"""
    answers = ranks(BEGIN + text + END)
    for which in range(3):
        said = {str(answer[which]) for answer in answers if isinstance(answer[which], str)}
        assert said, "one of the two raises, or both"
        assert all("call loader.set_epoch(epoch) before each" in each for each in said)
    for which in (3, 4):
        exact([answer[which] for answer in answers])


def test_ranks_that_deal_by_different_settings_or_states_are_refused(ranks: Ranks) -> None:
    text = """
def loader(**more):
    return DataLoader(dataset, **{"batch_size": 16, "shuffle": True, **more})
def loaded(state):
    found = loader()
    if state is not None:
        found.load_state_dict(state)
    return found
first = loader()
next(iter(first))
states = [None, None]
distributed.all_gather_object(states, first.state_dict())
merged = merge_states(states)
said = [
    passes(loader(seed=rank)),
    passes(loader(shuffle=rank == 0)),
    passes(loader(drop_last=rank == 0)),
    passes(loader(batch_size=16 + rank)),
    passes(loader(shuffle=False, sampler=DistributedSampler(dataset, shuffle=False) if rank else None)),
    passes(loaded(merged if rank else {**merged, "done": None}), 1),
    passes(loaded(merged), 1),
]
"""
    answers = ranks(BEGIN + text + END)
    names = ["seed: ", "shuffle: ", "drop_last: ", "batch_size: ", "batch_size: ", "epoch 0: "]
    for which, name in enumerate(names):
        [said] = [answer[which] for answer in answers if isinstance(answer[which], str)]
        assert said.startswith(name)
    assert len({row for answer in answers for row in answer[6][0]}) == SAMPLES - 32


def test_correct_uses_by_one_rank_or_by_all_raise_no_alarm(ranks: Ranks) -> None:
    text = """
said = []
train = DataLoader(dataset, 16, shuffle=True)
if rank == 0:
    next(iter(DataLoader(dataset, 7, shuffle=True)))  # a loader that the others do not have
for epoch in range(4):
    if epoch == 1:
        for _ in zip(range(2 + rank), train):
            pass  # broken off by all, though not at the same batch
    said += passes(train, 1)
    if rank == 0:
        alone = DataLoader(dataset, 50, shuffle=True, rank=0, world_size=1)
        assert len(sum(map(rows, alone), [])) == 150
later = DataLoader(dataset, 16, shuffle=True, seed=3)
said += passes(later)
"""
    exact(ranks(BEGIN + text + END))


def test_all_ranks_get_one_merged_state_or_all_raise(ranks: Ranks) -> None:
    text = """
import threading
from quiver_client.loader import merged_state
def merged(loader):
    try:
        return loader.state_dict(merged=True)
    except (ValueError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
def taken(loader, batches):
    return sum((rows(batch) for _, batch in zip(range(batches), loader)), [])
def resumed(state, **place):
    loader = DataLoader(dataset, 10, shuffle=True, **place)
    loader.load_state_dict(state)
    return sum(map(rows, loader), [])
loader = DataLoader(dataset, 16, shuffle=True)
read = taken(loader, 2)
state = merged(loader)
whole = resumed(state, rank=0, world_size=1)
shared = DataLoader(dataset, 16, shuffle=True, rank=0, world_size=1)  # all of it in each rank: nobody is asked
taken(shared, 3)
one = merged(shared)["done"]
sampled = DataLoader(dataset, 16, sampler=DistributedSampler(dataset))
others = taken(sampled, 2)
left = merged(sampled)
after = DataLoader(dataset, 16, sampler=DistributedSampler(dataset))
after.load_state_dict(left)
others += sum(map(rows, after), [])
different = DataLoader(dataset, 16, shuffle=True, seed=rank)
apart = merged(different)
if rank == 1:
    broken = DataLoader(dataset, 16, shuffle=True)
    broken.order._recorder = None
    failed = merged(broken)
else:
    failed = merged(DataLoader(dataset, 16, shuffle=True))
of_group = DataLoader(dataset, 16, shuffle=True, rank=rank, world_size=2)
found = []
thread = threading.Thread(target=lambda: found.append(merged(of_group)))  # as asynchronous checkpoints do
thread.start()
distributed.barrier()
thread.join()
merged_state.WAIT_SECONDS = 0.5
missing = merged(loader) if rank == 0 else ""
answer([read, sorted(state), state["world_size"], whole, len(one), others, apart, failed, len(found[0]), missing])
distributed.barrier()
distributed.destroy_process_group()
"""
    first, second = ranks(BEGIN + text)
    assert first[1:3] == second[1:3]
    for answer in (first, second):
        assert sorted(first[0] + second[0] + answer[3]) == list(range(SAMPLES))
    assert sorted(first[5] + second[5]) == list(range(SAMPLES))
    for answer in (first, second):
        assert "they are of different runs: seed 0 and 1" in answer[6]
        assert answer[7].startswith("ValueError: merged=True: rank 1: AttributeError")
    assert first[9].startswith("TimeoutError: merged=True: after 0.5 seconds ranks [1] of 2 have not called it")
