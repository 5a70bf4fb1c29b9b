"""Accelerate with our loader: each sample once, gradients synchronised, and nothing dealt or skipped twice."""

from __future__ import annotations

from itertools import chain

import pytest

from tests.trainers.conftest import Ranks

SAMPLES = 150
BEGIN = """
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
torch.multiprocessing.set_start_method("fork", force=True)  # the default; a server of forks started this process
from accelerate import Accelerator
"""


def test_a_prepared_loader_gives_each_sample_once_to_one_of_two_ranks(ranks: Ranks) -> None:
    """It used to be dealt twice: 91 of 150 samples per epoch."""
    text = """
loader = DataLoader(dataset, 16, shuffle=True)  # before there is a process group, as in most examples
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
model = torch.nn.Linear(1, 1)
loader, model = accelerator.prepare(loader, model)
epochs = []
for epoch in range(2):
    seen, synchronised, gathered = [], [], []
    for batch in loader:
        with accelerator.accumulate(model):
            synchronised.append(accelerator.sync_gradients)
        seen += rows(batch)
        gathered += accelerator.gather_for_metrics(torch.tensor(rows(batch))).tolist()
    epochs.append([seen, synchronised, gathered])
for batch in loader:
    break
answer([epochs, len(loader), loader.batch_size, len(loader.sampler), loader.sampler.num_replicas, loader.sampler.rank,
        accelerator.gradient_state.in_dataloader])
accelerator.end_training()
"""
    answers = ranks(BEGIN + text)
    for epoch in range(2):
        seen = [each[0][epoch][0] for each in answers]
        assert sorted(seen[0] + seen[1]) == list(range(SAMPLES))
        for _, synchronised, gathered in (each[0][epoch] for each in answers):
            assert synchronised == [False, False, False, True, True]  # every fourth, and at the end of the epoch
            assert sorted(gathered) == list(range(SAMPLES))
    assert [each[1:] for each in answers] == [[5, 16, 75, 2, rank, False] for rank in range(2)]


def test_batches_are_neither_dealt_nor_skipped_by_accelerate(ranks: Ranks) -> None:
    text = """
from accelerate import skip_first_batches
from torch.utils.data import RandomSampler
from accelerate.data_loader import prepare_data_loader
from quiver_client import BatchSampler
accelerator = Accelerator(cpu=True)
def refused(batches):
    try:
        list(batches)
    except RuntimeError as error:
        return str(error)
stock = torch.utils.data.DataLoader
alone = stock(dataset, batch_sampler=BatchSampler(dataset, 16, rank=0, world_size=1))
said = [
    refused(prepare_data_loader(DataLoader(dataset, 16, shuffle=True, rank=0, world_size=1))),
    refused(prepare_data_loader(DataLoader(dataset, 16, sampler=RandomSampler(dataset)))),
    refused(accelerator.prepare(alone)),
    refused(skip_first_batches(DataLoader(dataset, 16, shuffle=True), 2)),
    refused(skip_first_batches(DataLoader(dataset, 16, shuffle=True, substitute=False), 2)),
    refused(skip_first_batches(DataLoader(dataset, 16, sampler=RandomSampler(dataset)), 2)),
]
fixed = DataLoader(dataset, 16, shuffle=True, substitute=False)
before = [batch for batch, _ in zip(map(rows, fixed), range(2))]
resumed = DataLoader(dataset, 16, shuffle=True, substitute=False)
resumed.set_epoch(0)
rest = list(map(rows, skip_first_batches(resumed, 2)))
dealt = BatchSampler(dataset, 15, rank=0, world_size=1, substitute=False)
by_accelerate = list(map(rows, accelerator.prepare(stock(dataset, batch_sampler=dealt))))
from accelerate import DataLoaderConfiguration
dispatching = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
def numbers(samples):
    return torch.tensor([row_of[sample["__key__"]] for sample in samples])
def dispatched(**place):
    batches = BatchSampler(dataset, 15, **place)
    return dispatching.prepare(stock(dataset, batch_sampler=batches, collate_fn=numbers))
said.append(refused(dispatched()))
by_rank_0 = torch.cat(list(dispatched(rank=0, world_size=1))).tolist()
try:
    accelerator.prepare(DataLoader(dataset, 16, sampler=RandomSampler(dataset)))
except ValueError as error:
    said.append(str(error))
answer([said, sum(before + rest, []), sum(by_accelerate, []), by_rank_0])
fixed.close()
torch.distributed.destroy_process_group()
"""
    answers = ranks(BEGIN + text)
    for said, *_ in answers:
        assert all("deal them to the ranks again" in each for each in said[:3])
        assert all("loader.load_state_dict(state)" in each for each in said[3:6])
        assert "deal them to the ranks again" in said[6], "by rank 0 reading its own share for all: 502 of 1,003"
        assert "Wrap the sampler in a DistributedSampler" in said[7], "each sample was read by both"
    for which in (1, 2, 3):
        assert sorted(answers[0][which] + answers[1][which]) == list(range(SAMPLES))


@pytest.mark.timeout(300)
def test_batches_that_are_dealt_already_are_handed_on_by_what_accelerate_wraps_around_them(ranks: Ranks) -> None:
    """It used to refuse them."""
    text = """
from accelerate import DataLoaderConfiguration
from accelerate.data_loader import prepare_data_loader
from quiver_client import BatchSampler, Mix, index
stock = torch.utils.data.DataLoader
def accelerator(**more):
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**more))
def read(loader, passes=2):
    length = len(loader)  # before the first pass, as schedulers take it
    found = [list(map(rows, loader)) for _ in range(passes)]
    return [[length], *found]
plain, uneven, split, dispatching = accelerator(), accelerator(even_batches=False), accelerator(
    split_batches=True), accelerator(dispatch_batches=True)
found = {
    "sampler": read(plain.prepare(stock(dataset, batch_sampler=BatchSampler(dataset, 16)))),
    "workers": read(plain.prepare(stock(dataset, batch_sampler=BatchSampler(dataset, 16), num_workers=2))),
    "uneven": read(uneven.prepare(stock(dataset, batch_sampler=BatchSampler(dataset, 16)))),
    "split": read(split.prepare(stock(dataset, batch_sampler=BatchSampler(dataset, 16)))),
    "function": read(prepare_data_loader(DataLoader(dataset, 16, shuffle=True))),
    "ours split": read(split.prepare(DataLoader(dataset, 16, shuffle=True))),
    "ours dispatched": read(dispatching.prepare(DataLoader(dataset, 16, shuffle=True))),
    "ours uneven": read(uneven.prepare(DataLoader(dataset, 16, shuffle=True))),
    "distributed": read(plain.prepare(stock(dataset, batch_sampler=BatchSampler(
        dataset, 16, sampler=torch.utils.data.DistributedSampler(dataset))))),
    "stock": read(plain.prepare(stock(dataset, 15, shuffle=True))),
    "stock split": read(split.prepare(stock(dataset, 30, shuffle=True))),
}
mixture = Mix({"first": dataset[:100], "second": dataset[100:]}, weights={"first": 2, "second": 1})
mixed = plain.prepare(DataLoader(mixture, 16, shuffle=True))
sizes = [len(mixed), len(list(mixed)), split.prepare(mixed).batch_size]
train, test = DataLoader(dataset, 16, shuffle=True), DataLoader(dataset, 50)
assert plain.prepare(train, test) == (train, test) == plain.prepare(train, test)
assert plain._dataloaders.count(train) == 1
plain.free_memory()
assert plain.prepare(train) is train
with plain.join_uneven_inputs([], even_batches=False):
    found["again"] = read(train)
train.batch_sampler.even_batches = False  # as join_uneven_inputs does with several devices
test = split.prepare(test)
found["again split"] = read(split.prepare(test))
assert (test.batch_size, split.prepare_data_loader(test).batch_size) == (25, 25)
os.mkdir(f"{folder}/odd{rank}")
for number in range(9):
    open(f"{folder}/odd{rank}/{number}", "w").write(str(number))
index(f"{folder}/odd{rank}", f"{folder}/odd{rank}.quiver")
odd = Dataset(f"{folder}/odd{rank}.quiver", sys.argv[4], fields=["__key__"])
gathered = []
loader = plain.prepare(DataLoader(odd, 2))
for batch in loader:
    gathered += plain.gather_for_metrics(batch["__key__"], use_gather_object=True)
unknown = plain.prepare(DataLoader(odd, 2, shuffle=True))
for batch in unknown:
    pass
def one(samples):
    return {"ones": torch.ones(len(samples)), "keys": [sample["__key__"] for sample in samples]}
plain.state._shared_state["device"] = torch.device("meta")  # a device that every machine has
placed = next(iter(plain.prepare(DataLoader(dataset, 16, collate_fn=one))))
kept = next(iter(plain.prepare(DataLoader(dataset, 16, collate_fn=one), device_placement=[False])))
plain.state._shared_state["device"] = torch.device("cpu")
devices = [str(placed["ones"].device), str(kept["ones"].device), len(placed["keys"])]
said = ""
try:
    split.prepare(DataLoader(dataset, 15))
except ValueError as error:
    said = str(error)
answer([found, gathered, said, devices, sizes])
torch.distributed.destroy_process_group()
"""
    answers = ranks(BEGIN + text, seconds=280)
    for what in answers[0][0]:
        for epoch in (1, 2):
            both = [answer[0][what][epoch] for answer in answers]
            assert sorted(chain(*both[0], *both[1])) == list(range(SAMPLES)), what
            assert [len(each) for each in both] == [answer[0][what][0][0] for answer in answers], what
            assert list(map(len, both[0])) == list(map(len, both[1])), what
    assert [len(batch) for batch in answers[0][0]["split"][1]] == [8] * 9 + [3]
    assert [len(batch) for batch in answers[0][0]["ours split"][1]] == [8] * 9 + [3]
    assert [len(batch) for batch in answers[0][0]["again split"][1]] == [25] * 3
    for _, gathered, said, devices, sizes in answers:
        assert sizes == [5, 5, 8], "of a mixture"
        assert devices == ["meta", "cpu", 16]
        assert sorted(gathered) == list("012345678"), "the sample that evens out the ranks is dropped"
        assert said.startswith("batch_size=15: with split_batches it must be a multiple of 2 ranks")


def test_accelerates_saved_state_has_what_all_ranks_read(ranks: Ranks) -> None:
    text = """
from accelerate import DataLoaderConfiguration, skip_first_batches
from quiver_client import BatchSampler
def run(batches, load=None, save=None, skip=0, **more):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(dataset, 16, shuffle=True, **more))
    kept = DataLoader(dataset, 10, shuffle=True)  # not prepared, and registered by the user
    accelerator.register_for_checkpointing(kept)
    if load:
        accelerator.load_state(f"{folder}/{load}")
    found = sum((rows(batch) for _, batch in zip(range(batches), kept)), [])
    if skip:
        loader = skip_first_batches(loader, skip)
    read = sum((rows(batch) for _, batch in zip(range(batches), loader)), [])
    if save:
        accelerator.save_state(f"{folder}/{save}")
    accelerator.free_memory()
    accelerator._custom_objects.clear()
    return [read, found]
straight = [run(2, save="first"), run(1, "first", "second"), run(99, "second"), run(99, "second", skip=3)]
said = []
try:
    run(99, "second", skip=2)
except RuntimeError as error:
    said.append(str(error))
stateful = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
try:
    list(stateful.prepare(torch.utils.data.DataLoader(dataset, batch_sampler=BatchSampler(dataset, 16))))
except RuntimeError as error:
    said.append(str(error))
answer([straight, said])
torch.distributed.destroy_process_group()
"""
    answers = ranks(BEGIN + text)
    for which in (0, 1):
        for last in (2, 3) if which == 0 else (2,):
            parts = [answer[0][part][which] for answer in answers for part in (0, 1, last)]
            assert sorted(chain(*parts)) == list(range(SAMPLES))
    for _, said in answers:
        assert "skips 2 batches, and the loaded state counts 3" in said[0]
        assert "Accelerator.save_state then saves the state of all ranks" in said[1]
